"""`fedloom migrate`: the fedloom command for a command line of PFLlib."""

import shlex
from typing import Annotated

import typer

from fedloom.cli.base import app, err, say
from fedloom.cli.pfllib import translated


@app.command(context_settings={"ignore_unknown_options": True})
def migrate(
    arguments: Annotated[list[str], typer.Argument(metavar="PFLLIB…", help="Arguments of PFLlib's main.py.")],
) -> None:
    """Print the fedloom command for a command line of PFLlib, and name the flags that have no equivalent.

    What PFLlib's data scripts decide is not among its flags: the command divides by Dir(0.1) as PFLlib does.

    Examples:

      fedloom migrate -data Cifar10 -algo FedProx -nc 20 -jr 1 -gr 200 -lbs 16 -lr 0.01 -mu 0.1

      fedloom migrate python main.py -data MNIST -m CNN -algo FedRep -pls 5 -cdr 0.2
    """
    command, remarks = translated(arguments)
    say(shlex.join(command))
    for remark in remarks:
        say(remark, err)
