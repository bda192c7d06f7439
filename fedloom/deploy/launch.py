"""Starting Flower's processes: nothing phones home, nothing is installed at run time, nothing is left behind."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "FEDLOOM_DEPLOY"
"""The environment variable that tells the app at the server where its folder is."""
GRACE_SECONDS = 10.0
OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
LOCAL = "127.0.0.1,localhost,::1"


def quiet() -> dict[str, str]:
    """No telemetry, no asking for updates, no installing; what goes to this machine goes through no proxy."""
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOCAL)))
    return OFF | {"NO_PROXY": direct, "no_proxy": direct}


def environment(folder: Path) -> dict[str, str]:
    """For a process of Flower's: quiet, with its own files inside the folder, and with this Python's commands."""
    commands = str(Path(sys.executable).parent)
    return os.environ | quiet() | {
        FOLDER: str(folder.resolve()),
        "FLWR_HOME": str(folder.resolve() / ".flwr"),
        "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip


@contextmanager
def process(script: str, *arguments: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A script of this package as a process; it is ended, kindly at first, when this one leaves, however that is."""
    path = Path(__file__).with_name(f"{script}.py")
    command = [sys.executable, "-P", str(path), str(os.getpid()), *arguments]
    with (folder / f"{script}.log").open("ab") as log:
        child = subprocess.Popen(
            command, env=environment(folder), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield child
    finally:
        end(child)


def end(child: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """SIGTERM, then SIGKILL for a process that still runs after `grace` seconds."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port() -> int:
    """One that nobody has on this machine's loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
