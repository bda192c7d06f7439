"""Flower's ServerApp, which computes one run, as a process that ends with its parent.

Flower's own command takes the run's token as an argument, which all users of the machine can read. With it they could
take the organisations' answers out of the SuperLink. Here the token is read from standard input.
"""

import sys
from pathlib import Path
from queue import Queue

from flwr.superlink.runtime import run_serverapp

from fedloom.deploy.logs import log_with_times


def main() -> None:
    """Run the ServerApp of the token on standard input.

    Arguments: process id of the parent, address of the Runtime API, certificate of its CA.
    """
    parent, address, authority = sys.argv[1:]
    log_with_times()
    run_serverapp(
        runtime_api_address=address,
        log_queue=Queue(),  # unused: the log is a file, so that the SuperLink need not hold it in memory
        token=sys.stdin.read(),
        insecure=False,
        certificates=Path(authority).read_bytes(),
        parent_pid=int(parent),
        runtime_dependency_install=False,
    )


if __name__ == "__main__":
    main()
