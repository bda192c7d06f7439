"""`fedloom deploy server`: Flower's SuperLink with our doors, all organisations' keys registered."""

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
"""Beside a run's recipe: the Python files that it names and the user consented to, with their hashes."""


def loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return host in LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    folder: Path, *, listen: str | None, control: str, have_proxy: bool, ready: Callable[[FederationTerms], None]
) -> None:
    """Till a signal, or till Flower ends."""
    federation = FederationTerms.load(folder)
    if not loopback(control) and not have_proxy:
        raise UserError(
            f"--control {control}: whoever reaches that port and has the token can start runs and register keys; keep "
            "it on 127.0.0.1 (an ssh tunnel reaches it), or put an authenticating proxy before it and say "
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
                raise RunError(f"Flower's server did not start: see {folder}/superlink.log (is a port taken?) {last}")
            try:
                with controlling(folder, "127.0.0.1" if ip_unspecified(control) else control) as flower:
                    nodes = flower.register()
                break
            except RunError as error:  # it is not up yet
                last = str(error)
                if asked.wait(0.3):
                    return
        write_whole(folder / "nodes.json", json.dumps(nodes).encode())
        ready(federation)
        while not asked.wait(0.5):
            if link.poll() is not None:
                raise RunError(f"Flower's server has ended by itself: see {folder}/superlink.log")


def ip_unspecified(host: str) -> bool:
    """0.0.0.0 and its like, which nobody can connect to."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def begin(folder: Path, recipe: Recipe, name: str, *, wait: float = 60.0, client_timeout: float = 600.0) -> int:
    """Starts a run on the server of this folder, or goes on with the one of this name; Flower's number of it."""
    deployable(recipe)
    if not is_run(name):
        raise UserError(f"--name {name}: must be letters, digits, dots, dashes and plus signs, and begin with no dot")
    (folder / "recipes").mkdir(exist_ok=True)
    with controlling(folder) as flower:
        if busy := [run for run in flower.runs() if not run.over]:
            raise UserError(f"run {busy[0].number} is under way: wait for it, or stop it (fedloom deploy stop)")
        trusted = trusted_code.hashes(recipe.resolved())
        write_whole(folder / "recipes" / f"{name}{CODE}", json.dumps(trusted).encode())
        write_whole(folder / "recipes" / f"{name}.yaml", recipe.with_(out=None).to_yaml().encode())
        return flower.start(name, wait=wait, timeout=client_timeout)


def await_run(folder: Path, number: int, seconds: float | None = None) -> None:
    """Waits for a run; one that failed is an error."""
    end = None if seconds is None else monotonic() + seconds
    while end is None or monotonic() < end:
        with controlling(folder) as flower:
            state = next((run for run in flower.runs() if run.number == number), None)
        if state is not None and state.over:
            if state.outcome != "completed":
                raise RunError(f"the run has ended ({state.outcome}): {state.details}; see {folder}/superlink.log")
            return
        sleep(1)
    raise RunError(f"the run has not ended within {seconds:g} s; it goes on (fedloom deploy status)")
