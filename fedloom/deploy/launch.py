"""Start of Flower's processes: without telemetry or installation at run time, and always ended with their parent."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import sleep

FOLDER = "FEDLOOM_DEPLOY"
"""Environment variable with the server's folder, read by the app at the server."""
GRACE_SECONDS = 10.0
PARENT_SECONDS = 0.2
OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
LOCAL = "127.0.0.1,localhost,::1"


def quiet() -> dict[str, str]:
    """Return environment variables that disable telemetry, update checks, installation, and proxies for loopback."""
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOCAL)))
    return OFF | {"NO_PROXY": direct, "no_proxy": direct}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a Flower process: quiet, with its files in the folder and this Python's commands."""
    commands = str(Path(sys.executable).parent)
    return os.environ | quiet() | {
        FOLDER: str(folder.resolve()),
        "FLWR_HOME": str(folder.resolve() / ".flwr"),
        "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip


def start(script: str, *arguments: str, folder: Path, secret: str = "") -> subprocess.Popen[bytes]:
    """Start a script of this package as a process.

    Args:
        script: Name of the script, without `.py`; also of its log.
        arguments: Arguments of the script, after the id of this process; all users of the machine can read them.
        folder: Folder for the log and for Flower's files.
        secret: Standard input of the script, for what other users must not read.

    Returns:
        The process.
    """
    path = Path(__file__).with_name(f"{script}.py")
    command = [sys.executable, "-P", str(path), str(os.getpid()), *arguments]
    with (folder / f"{script}.log").open("ab") as log:
        child = subprocess.Popen(
            command, env=environment(folder), stdout=log, stderr=log, stdin=subprocess.PIPE, start_new_session=True
        )
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:  # it may have ended already
        child.stdin.write(secret.encode())
    return child


@contextmanager
def process(
    script: str, *arguments: str, folder: Path, grace: float = GRACE_SECONDS
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script of this package as a process, and end it when the context is left.

    Args:
        script: Name of the script, without `.py`; also of its log.
        arguments: Arguments of the script.
        folder: Folder for the log and for Flower's files.
        grace: Seconds that the process has to end before it is killed.

    Yields:
        The process.
    """
    child = start(script, *arguments, folder=folder)
    try:
        yield child
    finally:
        end(child, grace)


def end(child: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """End a process with SIGTERM, and with SIGKILL if it still runs after `grace` seconds."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def end_with_parent(grace: float = GRACE_SECONDS) -> None:
    """End this process if its parent ends, `grace` seconds later at the latest.

    Flower interrupts the ServerApp then, but a ServerApp that waits for clients' answers would continue for minutes.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            sleep(PARENT_SECONDS)
        sleep(grace)
        os._exit(1)

    Thread(target=watch, name="end with parent", daemon=True).start()


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
