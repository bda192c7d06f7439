"""`fedloom deploy add`, `revoke`, `renew`, `status` and `watch`: operation of a federation."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import flags
from fedloom.cli.base import err, say, show_json
from fedloom.cli.deploy import Folder, deploy_app

Organisation = Annotated[str, typer.Argument(help="Name of the organisation.")]


@deploy_app.command()
def add(
    name: Organisation,
    folder: Folder = Path("."),
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Folder to create for the organisation; default: ../organisations/NAME of --folder."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Public key that the organisation has created; default: create a key pair."),
    ] = None,
) -> None:
    """Add an organisation. The others keep their keys and numbers; it takes part from the next run.

    A server that runs lets it connect within seconds. Send the new folder to the organisation over a secure channel.

    Example: fedloom deploy add east --folder hospitals/server
    """
    from fedloom.deploy.lifecycle import add_organisation

    place = to or folder.resolve().parent / "organisations" / name
    add_organisation(folder, name, place, key)
    secret = "" if key else "; it contains their private key"
    say(f"added: {name}. For {name}: {place} (send it to them{secret})")
    say(f"with secure aggregation, the others need {place / 'node.pub'} as members/{name}.pub")


@deploy_app.command()
def revoke(name: Organisation, folder: Folder = Path(".")) -> None:
    """Revoke an organisation: it is disconnected within seconds and cannot connect again.

    A run continues without it, as if it had left. The others keep their keys and numbers.

    Example: fedloom deploy revoke west --folder hospitals/server
    """
    from fedloom.deploy.lifecycle import revoke_organisation

    revoke_organisation(folder, name)
    say(f"revoked: {name}")


@deploy_app.command()
def renew(
    folder: Folder = Path("."),
    ca_key: Annotated[
        Path | None, typer.Option("--ca-key", help="The federation's ca.key; default: ../ca.key of --folder.")
    ] = None,
    authority: Annotated[
        bool,
        typer.Option("--authority", help="Renew the CA's certificate too; send the new ca.pem to all organisations."),
    ] = False,
) -> None:
    """Renew the server's certificate for a year. A server that runs uses it within seconds.

    Example: fedloom deploy renew --folder hospitals/server --ca-key hospitals/ca.key
    """
    from fedloom.deploy.lifecycle import renew_certificates

    end = renew_certificates(folder, ca_key or folder.resolve().parent / "ca.key", authority=authority)
    say(f"renewed: {folder}/server.pem is valid until {end:%Y-%m-%d}")
    if authority:
        say(f"send {folder}/ca.pem to all organisations: it replaces their ca.pem")


@deploy_app.command()
def status(folder: Folder = Path("."), as_json: flags.Json = False) -> None:
    """Show members, runs, certificates and the last joins and refusals, with their reasons.

    The exit code is 1 if the server does not answer.

    Example: fedloom deploy status --folder hospitals/server
    """
    from fedloom.deploy.status import federation_state

    found = federation_state(folder)
    if as_json:
        show_json(found.to_json())
    else:
        for line in found.lines():
            say(line)
    if found.server != "running":
        raise typer.Exit(1)


@deploy_app.command()
def watch(
    folder: Folder = Path("."),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")] = 9094,
) -> None:
    """Serve a status page of the federation on 127.0.0.1, until Ctrl-C.

    From another machine use an ssh tunnel: ssh -L 9094:127.0.0.1:9094 SERVER.

    Example: fedloom deploy watch --folder hospitals/server
    """
    from fedloom.deploy.watch import watch as serve

    try:
        serve(folder, port, ready=lambda address: say(f"status page: {address}", err))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
