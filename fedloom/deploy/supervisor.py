"""`fedloom deploy server`: keeps Flower's SuperLink running behind our access control, and registers keys.

If the SuperLink ends, it is started again, and an interrupted run is resumed from its last checkpoint. Keys and
certificates that are added, revoked or renewed take effect while the server runs.
"""

import json
import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from time import monotonic, sleep

from fedloom.core.errors import RunError, UserError
from fedloom.deploy.active import ActiveRun, resume_active
from fedloom.deploy.certificates import LOOPBACK, expiry_warning, read_certificate, read_public_key
from fedloom.deploy.control import controlling
from fedloom.deploy.events import SERVER, EventLog
from fedloom.deploy.launch import process
from fedloom.deploy.terms import FederationTerms, protocol_versions
from fedloom.experiment.files import write_whole

START_SECONDS = 180.0
PORT_SECONDS = 20.0
"""Seconds to wait for a port that an earlier server, which was killed, still uses."""
RESTARTS, STEADY_SECONDS = 5, 60.0
"""Number of times that a SuperLink may end within a minute of its start before the server gives up."""
TICK_SECONDS, QUERY_SECONDS = 0.5, 2.0
DAY = 86400.0
log = logging.getLogger("fedloom")


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
        RunError: If Flower's server does not start, or ends again and again.
    """
    federation = FederationTerms.load(folder)
    if not loopback(control) and not have_proxy:
        raise UserError(
            f"--control {control}: anyone who can reach that port and has the token can start runs and register keys; "
            "use 127.0.0.1 (reachable through an ssh tunnel), or put an authenticating proxy in front of it and pass "
            "--i-have-a-proxy"
        )
    outside = listen or (federation.host if loopback(federation.host) else "0.0.0.0")
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    Supervisor(folder.resolve(), outside, control, asked, ready).run()


class Supervisor:
    """Keeps a SuperLink running until it is asked to stop.

    Args:
        folder: The server's folder.
        listen: Address for organisations.
        control: Address for control.
        asked: Set when the server is to stop.
        ready: Called with the terms when all keys are registered for the first time.
    """

    def __init__(
        self, folder: Path, listen: str, control: str, asked: threading.Event, ready: Callable[[FederationTerms], None]
    ):
        self.folder, self._listen, self._control, self._asked, self._ready = folder, listen, control, asked, ready
        self._reach = "127.0.0.1" if _unspecified(control) else control
        self._events = EventLog(folder / SERVER)
        self._names: dict[str, str] = {}
        """Registered keys (text of the file) by organisation."""
        self._nodes: dict[str, int] = {}
        """Flower's node ids by key, since the SuperLink was started; Flower registers a key only once."""
        self._was_ready = False
        self._checked_days = -DAY
        self._warned: set[str] = set()

    def run(self) -> None:
        """Run SuperLinks until the server is to stop."""
        federation = FederationTerms.load(self.folder)
        _wait_for_ports((self._listen, federation.port), (self._control, federation.control_port))
        self._events.add("started", "server", port=federation.port)
        failures = 0
        while not self._asked.is_set():
            begun = monotonic()
            with process("superlink", *self._arguments(), folder=self.folder) as link:
                why = self._attend(link)
            if not why:
                continue
            failures = 1 if monotonic() - begun > STEADY_SECONDS else failures + 1
            if not self._was_ready or failures > RESTARTS:
                raise RunError(f"{why}: see {self.folder}/superlink.log")
            self._events.add("restarted", "server", why=why)
        self._events.add("stopped", "server")

    def _arguments(self) -> tuple[str, ...]:
        federation, folder = FederationTerms.load(self.folder), self.folder
        return (
            "--folder", str(folder), "--listen", self._listen, "--listen-port", str(federation.port),
            "--versions", json.dumps(protocol_versions()),
            "--host", self._control, "--port", str(federation.control_port), "--enable-supernode-auth",
            "--ssl-ca-certfile", str(folder / "ca.pem"), "--ssl-certfile", str(folder / "server.pem"),
            "--ssl-keyfile", str(folder / "server.key"), "--isolation", "process",
        )  # fmt: skip

    def _attend(self, link: "subprocess.Popen[bytes]") -> str:
        """Attend to a SuperLink until it ends or the server is to stop.

        Returns:
            Why it must be started again; empty if the server is to stop, or its certificate was renewed.
        """
        self._names, self._nodes = {}, {}
        started, queried, last = False, -QUERY_SECONDS, ""
        end = monotonic() + START_SECONDS
        while not self._asked.wait(TICK_SECONDS):
            if link.poll() is not None:
                return f"Flower's server has ended (exit code {link.returncode}) {last}".strip()
            if not started and monotonic() > end:
                return f"Flower's server did not start within {START_SECONDS:g} s {last}".strip()
            self._warn_of_expiry()
            if self._expired():  # organisations and Flower's own processes refuse it
                if not self._await_renewal(link):
                    continue
                return ""
            try:
                self._register()
                if not started:
                    started = True
                    self._begin()
                if monotonic() - queried > QUERY_SECONDS:
                    queried, last = monotonic(), ""
                    self._forget_finished_run()
            except RunError as error:  # the SuperLink is not ready yet, or has just ended
                last = str(error)
        return ""

    def _begin(self) -> None:
        """Say that the server is ready, and resume a run that was interrupted."""
        if not self._was_ready:
            self._was_ready = True
            self._ready(FederationTerms.load(self.folder))
        if (name := resume_active(self.folder, self._reach)) is not None:
            self._events.add("resumed", "server", run=name)

    def _register(self) -> None:
        """Register keys that are new, and forget those that were removed; the door refuses them."""
        found = self._keys()
        if found == self._names:
            return
        new = [name for name, key in found.items() if self._names.get(name) != key]
        unknown = [name for name in new if found[name] not in self._nodes]
        if unknown:
            with controlling(self.folder, self._reach) as flower:
                for name in unknown:
                    key = read_public_key(self.folder / "organisations" / f"{name}.pub")
                    self._nodes[found[name]] = flower.register(name, key)
        if self._names:
            for name in new:
                self._events.add("registered", name)
        self._names = found
        nodes = {self._nodes[key]: name for name, key in found.items()}
        write_whole(self.folder / "nodes.json", json.dumps(nodes).encode())

    def _keys(self) -> dict[str, str]:
        """Return the text of the key files by organisation; a file that cannot be used is left out, with a warning."""
        federation = FederationTerms.load(self.folder)
        found: dict[str, str] = {}
        for name in federation.organisations:
            path = self.folder / "organisations" / f"{name}.pub"
            if name in federation.revoked:
                continue
            try:
                read_public_key(path)
                key = path.read_text(encoding="ascii")
            except (UserError, OSError):
                self._warn(f"{name} cannot connect: '{path}' is missing or is not a key; restore it, or revoke {name}")
                continue
            if other := next((one for one, known in found.items() if known == key), None):
                self._warn(f"{name} cannot connect: it has the same key as {other}; each organisation needs its own")
            else:
                found[name] = key
        return found

    def _forget_finished_run(self) -> None:
        active = ActiveRun.load(self.folder)
        if active is None:
            return
        with controlling(self.folder, self._reach) as flower:
            state = next((run for run in flower.runs() if run.number == active.number), None)
        if state is not None and state.over:
            why = state.details[:300] or None
            self._events.add("finished", "server", run=active.run, outcome=state.outcome, why=why)
            ActiveRun.remove(self.folder)

    def _expired(self) -> bool:
        end = read_certificate(self.folder / "server.pem").not_valid_after_utc
        return end <= datetime.now(UTC)

    def _await_renewal(self, link: "subprocess.Popen[bytes]") -> bool:
        """Wait until an expired certificate is renewed; return false if the server is to stop, or the SuperLink ends.

        The SuperLink keeps running, so that organisations see why they cannot connect.
        """
        while not self._asked.wait(TICK_SECONDS) and link.poll() is None:
            if not self._expired():
                self._events.add("renewed", "server", why="server.pem is valid again")
                return True
        return False

    def _warn_of_expiry(self) -> None:
        if monotonic() - self._checked_days < DAY and not self._expired():
            return
        self._checked_days = monotonic()
        for name in ("server.pem", "ca.pem"):
            if why := expiry_warning(name, read_certificate(self.folder / name).not_valid_after_utc):
                self._warn(why)

    def _warn(self, why: str) -> None:
        """Write a warning, once."""
        if why not in self._warned:
            self._warned.add(why)
            self._events.add("warning", "server", why=why)


def _wait_for_ports(*ports: tuple[str, int]) -> None:
    """Wait for ports to be free, as a server that was killed needs a few seconds to end.

    Raises:
        RunError: If another program uses a port.
    """
    end = monotonic() + PORT_SECONDS
    for host, port in ports:
        while (why := _refuses(host, port)) is not None:
            if monotonic() > end:
                raise RunError(f"port {port} of {host} cannot be used ({why}): end the program that uses it")
            sleep(TICK_SECONDS)


def _refuses(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
    return None


def _unspecified(host: str) -> bool:
    """Whether an address is 0.0.0.0 or `::`, which clients cannot connect to."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False
