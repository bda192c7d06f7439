"""Starting Flower's processes: nothing phones home, nothing is installed at run time, nothing is left behind."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.deploy.server import FOLDER

GRACE_SECONDS = 10.0
OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
LOCAL = "127.0.0.1,localhost,::1"


def environment(folder: Path) -> dict[str, str]:
    """For a process of Flower's: quiet, with its own files inside the folder, and with this Python's commands."""
    commands = str(Path(sys.executable).parent)
    return os.environ | OFF | {
        FOLDER: str(folder.resolve()),
        "FLWR_HOME": str(folder.resolve() / ".flwr"),
        "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
        "NO_PROXY": LOCAL,
        "no_proxy": LOCAL,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip


@contextmanager
def process(module: str, *arguments: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A module of ours as a process, in a session of its own; it is ended, kindly at first, when this one leaves."""
    command = [sys.executable, "-m", module, "--parent-pid", str(os.getpid()), *arguments]
    with (folder / f"{module.rpartition('.')[2]}.log").open("ab") as log:
        child = subprocess.Popen(
            command, env=environment(folder), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield child
    finally:
        end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port() -> int:
    """One that nobody has on this machine's loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def watch_parent(arguments: list[str]) -> list[str]:
    """Takes `--parent-pid N` off the arguments, and ends this process when that one has gone, however it went."""
    from flwr.supercore.app_utils import start_parent_process_monitor

    place = arguments.index("--parent-pid")
    start_parent_process_monitor(int(arguments[place + 1]))
    return arguments[:place] + arguments[place + 2 :]
