"""`fedloom deploy server`: runs Flower's SuperLink behind our access control and registers the organisations' keys."""

import json
import signal
import threading
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from time import monotonic, sleep

from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import RunError, UserError
from fedloom.deploy.certificates import LOOPBACK
from fedloom.deploy.control import controlling
from fedloom.deploy.launch import process
from fedloom.deploy.terms import FederationTerms, deployable, is_run
from fedloom.experiment.files import write_whole

START_SECONDS = 180.0
CODE = ".code.json"
"""Ending of the file with the hashes of the Python files that a run's recipe names and the user allowed."""


def loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    try:
        return host in LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    folder: Path, *, listen: str | None, control: str, have_proxy: bool, ready: Callable[[FederationTerms], None]
) -> None:
    """Run Flower's server until SIGINT or SIGTERM.

    Args:
        folder: The server's folder.
        listen: Address for organisations; by default all interfaces, or loopback if the federation's host is loopback.
        control: Address for control.
        have_proxy: Whether an authenticating proxy protects a control address that is not loopback.
        ready: Called when all organisations' keys are registered.

    Raises:
        UserError: If the control address is not loopback and `have_proxy` is false.
        RunError: If Flower's server does not start, or ends unexpectedly.
    """
    federation = FederationTerms.load(folder)
    if not loopback(control) and not have_proxy:
        raise UserError(
            f"--control {control}: anyone who can reach that port and has the token can start runs and register keys; "
            "use 127.0.0.1 (reachable through an ssh tunnel), or put an authenticating proxy in front of it and pass "
            "--i-have-a-proxy"
        )
    outside = listen or (federation.host if loopback(federation.host) else "0.0.0.0")
    folder = folder.resolve()
    arguments = (
        "--listen", outside, "--listen-port", str(federation.port), "--token-file", str(folder / "control.token"),
        "--keys", str(folder / "organisations"),
        "--host", control, "--port", str(federation.control_port), "--enable-supernode-auth",
        "--ssl-ca-certfile", str(folder / "ca.pem"), "--ssl-certfile", str(folder / "server.pem"),
        "--ssl-keyfile", str(folder / "server.key"), "--isolation", "subprocess",
        "--disable-runtime-dependency-installation",
    )  # fmt: skip
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    with process("superlink", *arguments, folder=folder) as link:
        end, last = monotonic() + START_SECONDS, ""
        while True:
            if link.poll() is not None or monotonic() > end:
                raise RunError(f"Flower's server did not start: see {folder}/superlink.log (is a port in use?) {last}")
            try:
                with controlling(folder, "127.0.0.1" if ip_unspecified(control) else control) as flower:
                    nodes = flower.register()
                break
            except RunError as error:  # the server is not ready yet
                last = str(error)
                if asked.wait(0.3):
                    return
        write_whole(folder / "nodes.json", json.dumps(nodes).encode())
        ready(federation)
        while not asked.wait(0.5):
            if link.poll() is not None:
                raise RunError(f"Flower's server has ended unexpectedly: see {folder}/superlink.log")


def ip_unspecified(host: str) -> bool:
    """Whether an address is 0.0.0.0 or `::`, which clients cannot connect to."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def begin(folder: Path, recipe: Recipe, name: str, *, wait: float = 60.0, client_timeout: float = 600.0) -> int:
    """Start or resume a run on the server of a folder.

    Args:
        folder: The server's folder.
        recipe: The recipe.
        name: Name of the run; an existing run of this name is resumed.
        wait: Seconds to wait for organisations.
        client_timeout: Seconds that an organisation has for an answer.

    Returns:
        Flower's id of the run.

    Raises:
        UserError: If the recipe or name cannot be used, or another run is in progress.
        RunError: If no server answers.

    Example:
        >>> from pathlib import Path
        >>> from fedloom import Recipe
        >>> server = Path("fed/server")
        >>> await_run(server, begin(server, Recipe.load(server / "recipe.yaml"), "first"))
    """
    deployable(recipe)
    if not is_run(name):
        raise UserError(
            f"--name {name}: must be letters, digits, dots, dashes, underscores and plus signs, and must not begin "
            "with a dot"
        )
    (folder / "recipes").mkdir(exist_ok=True)
    with controlling(folder) as flower:
        if busy := [run for run in flower.runs() if not run.over]:
            raise UserError(f"run {busy[0].number} is in progress: wait for it, or stop it (fedloom deploy stop)")
        trusted = trusted_code.hashes(recipe.resolved())
        write_whole(folder / "recipes" / f"{name}{CODE}", json.dumps(trusted).encode())
        write_whole(folder / "recipes" / f"{name}.yaml", recipe.with_(out=None).to_yaml().encode())
        return flower.start(name, wait=wait, timeout=client_timeout)


def await_run(folder: Path, number: int, seconds: float | None = None) -> None:
    """Wait until a run has ended.

    Args:
        folder: The server's folder.
        number: Flower's id of the run.
        seconds: Longest time to wait; None for no limit.

    Raises:
        RunError: If the run failed, was stopped, or has not ended in time.
    """
    end = None if seconds is None else monotonic() + seconds
    while end is None or monotonic() < end:
        with controlling(folder) as flower:
            state = next((run for run in flower.runs() if run.number == number), None)
        if state is not None and state.over:
            if state.outcome != "completed":
                raise RunError(f"the run has ended ({state.outcome}): {state.details}; see {folder}/superlink.log")
            return
        sleep(1)
    raise RunError(f"the run has not ended within {seconds:g} s; it is still running (fedloom deploy status)")
