"""Connection of an organisation to the server: a SuperNode that is replaced whenever it loses contact."""

import logging
import secrets
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient

from fedloom.deploy.certificates import Key, expiry_warning, read_certificate, write_secret
from fedloom.deploy.contact import Contact, ask
from fedloom.deploy.events import EventLog
from fedloom.deploy.launch import free_port, process
from fedloom.deploy.supernode import last_contact
from fedloom.deploy.terms import FederationTerms, protocol_versions

CONTACT_SECONDS = 20.0
"""Seconds without contact after which a SuperNode is replaced."""
STEADY_SECONDS = 60.0
"""Seconds of contact after which a SuperNode counts as stable; the next pause is then the shortest again."""
PAUSES = (1.0, 2.0, 4.0, 5.0)
"""Seconds before the server is asked again. After 5 s at most, so that clients are back soon after the server is."""
START_SECONDS = 30.0
"""Seconds that a new SuperNode has for its first contact."""
CHECK_SECONDS = 0.3
END_SECONDS = 5.0
DAY = 86400.0
GUARDED = frozenset({"/flwr.proto.Runtime/AcquireTask"})
log = logging.getLogger("fedloom")


@dataclass(frozen=True)
class Connection:
    """Connection to the SuperNode on loopback, which gives tasks only to processes that know the secret."""

    port: int
    secret: bytes

    def tasks(self) -> RuntimeHttpClient:
        """Return a client that asks for new tasks."""
        return self._client(SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=GUARDED))

    def task(self, token: str) -> RuntimeHttpClient:
        """Return a client for one task."""
        return self._client(RuntimeTokenHttpInterceptor(token))

    def _client(self, interceptor: Any) -> RuntimeHttpClient:
        # Without Flower's retries, which have no end: on loopback, a failure means that the SuperNode has ended.
        return RuntimeHttpClient.from_server_address(
            server_address=f"127.0.0.1:{self.port}",
            insecure=True,
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), interceptor],
        )


class Reconnecting:
    """Keeps a SuperNode in contact with the server, in a thread, so that a long job does not delay it.

    Args:
        folder: The organisation's folder.
        federation: The terms of the federation.
        key: The organisation's private key.
        events: Log for connections and refusals.
        contact_seconds: Seconds without contact after which the SuperNode is replaced.
    """

    def __init__(
        self,
        folder: Path,
        federation: FederationTerms,
        key: Key,
        events: EventLog,
        contact_seconds: float = CONTACT_SECONDS,
    ):
        self._folder, self._federation, self._key, self._events = folder, federation, key, events
        self._contact_seconds = contact_seconds
        self._client = secrets.token_hex(8)
        self._versions = protocol_versions()
        self._where = f"{federation.host}:{federation.port}"
        self._stopping, self._replace = threading.Event(), threading.Event()
        self._reason = ""
        self._warned = -DAY
        self.current: Connection | None = None
        """Connection to the running SuperNode; None while there is none."""
        self._thread = threading.Thread(target=self._run, name="reconnect", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the SuperNode and the thread."""
        self._stopping.set()
        self._thread.join()

    def replace(self, connection: Connection) -> None:
        """Replace the SuperNode of a connection, which does not deliver an answer."""
        if self.current is connection:
            self._replace.set()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            begun = monotonic()
            try:
                contact = ask(self._federation, self._folder / "ca.pem", self._key, self._client, self._versions)
                self._note(contact)
                if contact.admitted:
                    self._keep_node()
            except Exception:  # the thread must survive: without it the organisation would never come back
                log.exception("the connection failed unexpectedly")
            failures = 0 if monotonic() - begun > STEADY_SECONDS else failures + 1
            self._stopping.wait(PAUSES[min(max(failures, 1), len(PAUSES)) - 1])

    def _note(self, contact: Contact) -> None:
        """Log a new reason why the server cannot be reached, and warnings about the clock and certificates."""
        if contact.reason and contact.reason != self._reason:
            self._events.add(
                "refused", self._where, reason=contact.reason, why=contact.why, clock_ahead=_rounded(contact)
            )
        self._reason = contact.reason
        if contact.admitted and monotonic() - self._warned > DAY:
            self._warned = monotonic()
            ca = read_certificate(self._folder / "ca.pem").not_valid_after_utc
            ends = {"server.pem": contact.expires, "ca.pem": ca}
            expiring = [expiry_warning(name, end) for name, end in ends.items() if end is not None]
            for why in filter(None, (contact.clock_warning, *expiring)):
                self._events.add("warning", self._where, why=why)

    def _keep_node(self) -> None:
        """Run a SuperNode until it ends, loses contact or is to be replaced."""
        seen, self._replace = self._folder / ".supernode.contact", threading.Event()
        seen.unlink(missing_ok=True)
        connection = Connection(free_port(), secrets.token_bytes(32))
        with process("supernode", *self._arguments(seen, connection), folder=self._folder, grace=END_SECONDS) as node:
            self.current = connection
            try:
                why = self._watch(node, seen)
            finally:
                self.current = None
        if why:
            self._events.add("lost", self._where, why=f"{why}; reconnecting (see {self._folder}/supernode.log)")

    def _arguments(self, seen: Path, connection: Connection) -> tuple[str, ...]:
        folder, secret = self._folder, self._folder / ".supernode.secret"
        secret.unlink(missing_ok=True)
        write_secret(secret, connection.secret)
        return (
            str(seen), self._client,
            "--superlink", self._where, "--root-certificates", str(folder / "ca.pem"),
            "--auth-supernode-private-key", str(folder / "node.key"), "--isolation", "process",
            "--superexec-auth-secret-file", str(secret), "--host", "127.0.0.1", "--port", str(connection.port),
        )  # fmt: skip

    def _watch(self, node: "subprocess.Popen[bytes]", seen: Path) -> str:
        """Wait until a SuperNode must be replaced, and return why; empty if this thread is to stop."""
        begun, contact, connected = monotonic(), None, False
        while not self._stopping.wait(CHECK_SECONDS):
            if node.poll() is not None:
                return f"the SuperNode has ended (exit code {node.returncode})"
            if self._replace.is_set():
                return "an answer could not be sent"
            contact = last_contact(seen) or contact  # none while the file is being written
            if contact is not None and not connected:
                connected = True
                self._events.add("connected", self._where)
            limit = self._contact_seconds if connected else max(START_SECONDS, self._contact_seconds)
            if (silent := monotonic() - (contact or begun)) > limit:
                return f"no contact for {silent:.0f} s"
        return ""


def _rounded(contact: Contact) -> float | None:
    return None if contact.clock_ahead is None else round(contact.clock_ahead, 1)
