"""Access control of the server's ports: who sent a request, and why it is refused.

Flower reads a whole request before it checks keys, and refuses without a reason. The door checks keys, clocks and
duplicates before a request is read. A client asks `HELLO` before it connects, and gets the reason of a refusal.
This module is part of the SuperLink process and does not import torch.
"""

import hmac
import json
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import verify_signature

from fedloom.deploy.events import EventLog, timestamp
from fedloom.deploy.versions import same_version

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
PUBLIC = "/v1/fleet/"
CONTROL = "/v1/control/"
RUNTIME = "/v1/runtime/"
ACQUIRE = f"{RUNTIME}acquire-task"
LEAVES = "/v1/fleet/deactivate-node"
HELLO = "/fedloom/hello"
VERSIONS_HEADER, CLIENT_HEADER = "fedloom-versions", "fedloom-client"
AHEAD, BEHIND = SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
"""Seconds by which an organisation's clock may be ahead of the server's and behind it; Flower refuses others."""
PRESENT_SECONDS = 20.0
"""Seconds after its last request for which a client keeps others with the same key out."""
UNREGISTERED = (
    "the key is not registered at this server: add the organisation (fedloom deploy add); one that has lost its key "
    "must be revoked first (fedloom deploy revoke)"
)
REVOKED = ".revoked"
"""Ending of the public key file of an organisation that was revoked."""


class RefusedError(Exception):
    """Raised if a request is refused.

    Args:
        reason: One word: key, revoked, signature, clock, duplicate, starting, version or code.
        why: What is wrong, and the remedy.
        who: The organisation, or the unknown key.
    """

    def __init__(self, reason: str, why: str, who: str):
        super().__init__(why)
        self.reason, self.why, self.who = reason, why, who


@dataclass
class Presence:
    """The client that uses an organisation's key."""

    client: str
    """Random name of the client process."""
    address: str
    at: float
    """Time of its last request, by the monotonic clock."""
    skew: float
    """Seconds by which its clock is ahead of the server's; includes the time that the request travelled."""
    when: str
    """Time of its last request, as text."""
    connected: bool
    """Whether its SuperNode has sent requests; false if it has only asked, or if its requests have stopped."""


def door(app: App, admits: Callable[[Scope], bool]) -> App:
    """Wrap an app so that requests which `admits` rejects get status 404.

    A SuperNode gives up at 404; at 403 it would hang.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and admits(scope)):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await respond(send, 404, b"not here")
        else:
            await send({"type": "websocket.close"})

    return guarded


async def respond(send: Send, status: int, body: bytes) -> None:
    """Send a whole HTTP response."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def with_token(token: bytes) -> Callable[[Scope], bool]:
    """Return a check that admits requests to the Control API with the token, and those of a run.

    Flower checks the run's token in every request of a run but one: `ACQUIRE`, which hands out that token. The
    SuperLink starts the runs itself (`superlink.py`), so nobody needs it.
    """
    expected = b"Bearer " + token

    def admits(scope: Scope) -> bool:
        path = str(scope["path"])
        if path.startswith(CONTROL):
            return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), expected)
        return path.startswith(RUNTIME) and path.rstrip("/") != ACQUIRE

    return admits


@dataclass(frozen=True)
class Registered:
    """An organisation's public key."""

    name: str
    key: EllipticCurvePublicKey
    revoked: bool = False


def registered(folder: Path) -> dict[bytes, Registered]:
    """Return the organisations' public keys, by the PEM text that SuperNodes send. Unreadable files are left out."""
    found = {}
    for ending in (f".pub{REVOKED}", ".pub"):  # a key that is registered again is no longer revoked
        for path in sorted(folder.glob(f"*{ending}")):
            try:
                key = load_ssh_public_key(path.read_bytes())
            except (OSError, ValueError):
                continue
            if isinstance(key, EllipticCurvePublicKey):
                pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
                name = path.name.removesuffix(ending)
                found[pem] = Registered(name, key, revoked=ending != ".pub")
    return found


class Organisations:
    """The organisations at the public port: checks requests, and remembers who was in contact.

    Args:
        folder: Folder with the public keys, `NAME.pub`; changes take effect with `reload`.
        events: Log for connections and refusals.
        versions: The server's versions, which clients compare with theirs.
    """

    def __init__(self, folder: Path, events: EventLog, versions: Mapping[str, str]):
        self._folder, self._events, self.versions = folder, events, dict(versions)
        self.keys = registered(folder)
        self.present: dict[str, Presence] = {}

    def reload(self) -> list[bytes]:
        """Read the keys again, and return those (PEM) that are not valid any more."""
        before, self.keys = self.keys, registered(self._folder)
        gone = [pem for pem, one in before.items() if not one.revoked and self._lost(pem)]
        for pem in gone:
            self.present.pop(before[pem].name, None)
        return gone

    def _lost(self, pem: bytes) -> bool:
        return pem not in self.keys or self.keys[pem].revoked

    def note_lost(self) -> None:
        """Log the clients whose requests have stopped."""
        for name, one in self.present.items():
            if one.connected and monotonic() - one.at > PRESENT_SECONDS:
                one.connected = False
                self._events.add("lost", name, why=f"no request since {one.when}", address=one.address)

    def contacts(self) -> dict[str, dict[str, Any]]:
        """Return the last contact of each client since the server started, for `contacts.json`."""
        return {
            name: {"at": one.when, "address": one.address, "clock_ahead": round(one.skew, 1) + 0.0}
            for name, one in self.present.items()
        }

    def admits(self, scope: Scope) -> bool:
        """Whether a request to the Fleet API is passed to Flower, which checks that the key belongs to the node."""
        if not str(scope["path"]).startswith(PUBLIC):
            return False
        try:
            self.identify(scope)
        except RefusedError as refused:
            self.note(refused, scope)
            return False
        return True

    def identify(self, scope: Scope) -> tuple[str, bytes]:
        """Return the name and the key (PEM) of the organisation that signed a request.

        Raises:
            RefusedError: If the key, signature or clock is refused, or another client uses the key.
        """
        given = dict(scope["headers"])
        pem, signature, time, client = (
            given.get(name.lower().encode(), b"")
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER, CLIENT_HEADER)
        )
        try:
            pem = b64decode(pem, validate=True)
            found = self.keys.get(pem)
            stranger = f"key {fingerprint(pem)}" if pem else "a stranger"
            if found is None:
                raise RefusedError("key", UNREGISTERED, stranger)
            if not verify_signature(found.key, time, b64decode(signature, validate=True)):
                raise RefusedError("signature", "the request is not signed with the key that it names", found.name)
            skew = (datetime.fromisoformat(time.decode("ascii")) - now()).total_seconds()
        except (Base64Error, ValueError, TypeError):
            raise RefusedError("signature", "the request is not signed", "a stranger") from None
        if found.revoked:
            why = f"the key of {found.name} was revoked; to take part again, it must be added with a new key"
            raise RefusedError("revoked", f"{why} (fedloom deploy add)", found.name)
        if not accepts_clock(skew):
            raise RefusedError("clock", clock_sentence(skew), found.name)
        self._note_present(found.name, client.decode("latin-1")[:40], scope, skew)
        return found.name, pem

    def _note_present(self, name: str, client: str, scope: Scope, skew: float) -> None:
        seen, address = self.present.get(name), _address(scope)
        if seen is not None and seen.client != client and monotonic() - seen.at < PRESENT_SECONDS:
            raise RefusedError(
                "duplicate",
                f"another client at {seen.address} uses the key of {name}, last {monotonic() - seen.at:.0f} s ago; end "
                f"it, or wait {PRESENT_SECONDS:.0f} s if it was killed",
                name,
            )
        if str(scope["path"]) == LEAVES:
            self._events.add("disconnected", name, address=address)
            free = monotonic() - PRESENT_SECONDS  # for another client at once
            self.present[name] = Presence(client, address, free, skew, timestamp(), connected=False)
            return
        greets = str(scope["path"]) == HELLO
        if not greets and (seen is None or not seen.connected or seen.client != client):
            self._events.add("connected", name, address=address, clock_ahead=round(skew, 1) + 0.0)
        self.present[name] = Presence(client, address, monotonic(), skew, timestamp(), connected=not greets)

    def note(self, refused: RefusedError, scope: Scope) -> None:
        """Log a refusal."""
        address = _address(scope)
        who = refused.who if refused.who in {one.name for one in self.keys.values()} else f"{refused.who} at {address}"
        self._events.add_once("refused", who, reason=refused.reason, why=refused.why, address=address)

    def greet(self, scope: Scope, is_ready: Callable[[bytes], bool]) -> tuple[int, dict[str, Any]]:
        """Answer a client that asks whether it may connect.

        Args:
            scope: The request.
            is_ready: Whether Flower knows a key (PEM) already; ends an earlier connection of the organisation.

        Returns:
            The HTTP status and the content of the answer.
        """
        answer = {"time": timestamp(), "versions": self.versions}
        try:
            name, pem = self.identify(scope)
            given = dict(scope["headers"]).get(VERSIONS_HEADER.encode(), b"")
            self._refuse_other_versions(name, given)
            if not is_ready(pem):
                raise RefusedError("starting", "the server is starting", name)
        except RefusedError as refused:
            if refused.reason != "starting":
                self.note(refused, scope)
            return 403, answer | {"reason": refused.reason, "why": refused.why}
        return 200, answer | {"name": name}

    def _refuse_other_versions(self, name: str, given: bytes) -> None:
        try:
            theirs = json.loads(given)
        except (ValueError, RecursionError):
            theirs = None
        theirs = theirs if isinstance(theirs, dict) else {}
        for what, ours in self.versions.items():
            if (found := theirs.get(what)) != ours:
                reason = "code" if what == "code" else "version"
                why = f"versions.{what} = {found!r:.60} at {name}, {ours!r} at the server"
                raise RefusedError(reason, f"{why}: {same_version(what)}", name)


def fingerprint(pem: bytes) -> str:
    """Return the first digits of a key's hash, to name a key in logs."""
    return sha256(pem).hexdigest()[:12]


def accepts_clock(skew: float) -> bool:
    """Whether Flower accepts requests from a clock that is `skew` seconds ahead of the server's."""
    return -BEHIND < skew < AHEAD


def clock_sentence(skew: float) -> str:
    """Return a line about a clock that Flower refuses.

    Args:
        skew: Seconds by which the organisation's clock is ahead of the server's.
    """
    return (
        f"the organisation's clock is {clock_difference(skew)} the server's, and at most {AHEAD} s ahead and "
        f"{BEHIND} s behind are allowed; set both by NTP"
    )


def clock_difference(skew: float) -> str:
    """Return by how much a clock is wrong, such as `3.0 h behind`; positive differences are `ahead of`."""
    size = abs(skew)
    units = (
        (10.0, f"{size:.1f} s"),
        (600.0, f"{size:.0f} s"),
        (48 * 3600.0, f"{size / 3600:.1f} h"),
        (inf, f"{size / 86400:.0f} days"),
    )
    return f"{next(text for limit, text in units if size < limit)} {'ahead of' if skew > 0 else 'behind'}"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "?"
