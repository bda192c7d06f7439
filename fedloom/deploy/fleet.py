"""Organisations behind Flower's grid: which are online, how many samples each has, and requests to them."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, get_args

from flwr.app import Message as Parcel
from flwr.app import MessageType
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.failures import Failure, FailureKind, RoundError
from fedloom.core.job import Result
from fedloom.core.message import LIMIT, MessageError, is_count, refuse_unless
from fedloom.deploy.certificates import Key, PublicKey
from fedloom.deploy.events import EventLog
from fedloom.deploy.sealing import name_of, opened, sealed
from fedloom.deploy.tasks import samples_elsewhere
from fedloom.deploy.terms import FederationTerms, VersionError, fingerprint, protocol_versions, refuse_other_versions
from fedloom.trust.secure.settings import LEAST_MEMBERS

JOIN_SECONDS = 120.0
"""Seconds that an organisation has to answer a request to join."""
POLL_SECONDS = 0.3
SHOWN_REFUSALS = 3
"""Number of organisations whose refusals are quoted in the error of a run that cannot begin."""
REFRESH_SECONDS = 5.0
MOST_SAMPLES = 10**9
"""Largest number of samples that an organisation may declare."""
GONE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""Flower's errors for a node without heartbeats, and for a message that was lost with it."""
REASONS = ("version", "code", "consent", "limits", "message", "error")
"""Reasons of an organisation that refuses a request."""


@dataclass
class PendingRequest:
    """A request that was sent, or the failure to send it."""

    client: int
    node: int = 0
    """Flower's id of the client's node."""
    since: str = ""
    """When the node came online."""
    parcel: str = ""
    """Flower's id of the message."""
    name: str = ""
    """Hash of the request, which the answer repeats."""
    deadline: float = 0.0
    failure: Failure | None = None


class Fleet:
    """Sends requests to organisations by client number; absent, late or invalid answers become failures.

    Args:
        grid: Flower's grid.
        federation: The terms of the federation.
        nodes: Client numbers by Flower's node id.
        keys: Public keys of the clients.
        key: The coordinator's private key.
        recipe: The recipe of the run.
        run: Name of the run.
        events: Log for joins, refusals, requests and answers; by default none.
    """

    def __init__(
        self,
        grid: Grid,
        federation: FederationTerms,
        nodes: Mapping[int, int],
        keys: Mapping[int, PublicKey],
        key: Key,
        recipe: Recipe,
        run: str,
        events: EventLog | None = None,
    ):
        self._events = events or EventLog(None)
        self.grid, self.federation, self.recipe, self.run = grid, federation, recipe, run
        self._node_of = {client: node for node, client in nodes.items()}
        self._keys, self._key = keys, key
        self._terms = fingerprint(recipe, federation)
        clients = range(len(federation.organisations))
        self.train, self.test = ([samples_elsewhere(0) for _ in clients] for _ in range(2))
        self._joined: dict[int, int] = {}
        self._here: dict[int, str] = {}
        self._failing: dict[int, Failure] = {}
        """The last failure of each client since its last answer."""
        self._refused: dict[int, tuple[float, str]] = {}
        """When the clients that are not asked again for a while refused to join, and why."""

    @property
    def scope(self) -> tuple[str, str]:
        """Name of the run, and hash of the recipe."""
        return self.run, self._terms

    @property
    def least(self) -> int:
        """Smallest number of organisations with which training can begin."""
        return max(self.recipe.training.min_clients, LEAST_MEMBERS if self.recipe.secure is not None else 1)

    def gather(self) -> list[int]:
        """Let online organisations join that have not joined yet, and remove those that have gone offline.

        Returns:
            The clients that have joined.
        """
        self._refresh_nodes()
        present = {client: node for client, node in self._node_of.items() if node in self._here}
        self._joined = {client: node for client, node in self._joined.items() if client in present}
        self._refused = {client: when for client, when in self._refused.items() if client in present}
        late = monotonic() - JOIN_SECONDS
        new = [c for c in present if c not in self._joined and self._refused.get(c, (late, ""))[0] <= late]
        body = json.dumps(self.recipe.resolved()).encode() if new else b""
        about = {"what": "join", "organisations": list(self.federation.organisations)}
        asked = [self.send(c, about, body, MessageType.QUERY, JOIN_SECONDS, joining=True) for c in new]
        for one in asked:
            answer = self.receive(one)
            failure = answer if isinstance(answer, Failure) else self._admit(one.client, *answer)
            name = self.federation.organisations[one.client]
            if failure is None:
                self._joined[one.client] = one.node
                samples = {"train": len(self.train[one.client]), "test": len(self.test[one.client])}
                self._events.add("joined", name, run=self.run, **samples)
            elif not isinstance(answer, Failure):
                self._refused[one.client] = monotonic(), f"({_reason(answer[0])}) {failure.why}"
                self._events.add("refused", name, reason=_reason(answer[0]), why=failure.why, run=self.run)
            elif failure.kind != "dropped":  # an organisation that went offline is asked again as soon as it is back
                self._refused[one.client] = monotonic(), failure.why
        return sorted(self._joined)

    def _refresh_nodes(self) -> None:
        """Update which nodes are online, and since when."""
        self._here = {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def wait_for(self, wanted: int, needed: int, seconds: float) -> None:
        """Wait until enough organisations have joined.

        Args:
            wanted: Number of organisations at which waiting ends immediately.
            needed: Number of organisations that suffice when the time is over or the others have refused.
            seconds: Longest time to wait.

        Raises:
            RoundError: If fewer than `needed` organisations have joined.
        """
        end = monotonic() + seconds
        while len(joined := self.gather()) < wanted and monotonic() < end:
            if len(joined) >= needed and len(joined) + len(self._refused) >= len(self._node_of):
                break  # all others have refused
            sleep(1)
        if len(joined) < needed:
            raise RoundError(
                f"{len(joined)} of {len(self._node_of)} organisations have joined within {seconds:g} s, and "
                f"{self._too_few(joined, needed)} (see `fedloom deploy status`)"
            )

    def _too_few(self, joined: list[int], needed: int) -> str:
        """Return which number is too small, who has joined, who refuses and why, and the remedy."""
        names, least = self.federation.organisations, self.recipe.training.min_clients
        online = f"joined: {', '.join(names[c] for c in joined) or 'none'}"
        refused = [f"{names[c]} does not join: {why}" for c, (_, why) in sorted(self._refused.items())]
        remedies = ["remove the causes of the refusals"] if refused else []
        if len(joined) + len(refused) < len(self._node_of):
            remedies.append("start more clients")
        if needed <= least:
            remedies.append("lower it")
        rule = f"training.min_clients = {needed}" if needed <= least else f"secure needs {needed}"
        return f"{rule}; {'; '.join([online, *refused[:SHOWN_REFUSALS]])}: {', or '.join(remedies)}"

    def noted(self, client: int, about: dict[str, Any], failure: Failure) -> Failure:
        """Log a failure that is an organisation's refusal of a request, and return it."""
        if failure.refusal:
            name = self.federation.organisations[client]
            self._events.add_once("refused", name, reason=_reason(about), why=failure.why, run=self.run)
        return failure

    def send(
        self, client: int, about: dict[str, Any], body: bytes, kind: str, seconds: float, *, joining: bool = False
    ) -> PendingRequest:
        """Send a request through Flower, without waiting for the answer.

        Args:
            client: Number of the client.
            about: The header; addressing, versions and a nonce are added.
            body: The content.
            kind: Flower's message type.
            seconds: Time that the client has for the answer.
            joining: Whether this is a request to join; other requests go only to clients that have joined.

        Returns:
            The pending request; it has a failure if the client is not available.
        """
        node = self._node_of.get(client) if joining else self._joined.get(client)
        if node is None or node not in self._here:
            return PendingRequest(
                client, failure=Failure("dropped", "the organisation has not joined, has gone offline, or was revoked")
            )
        about = about | {
            "to": client, "run": self.run, "recipe": self._terms, "versions": protocol_versions(),
            "nonce": secrets.token_hex(16),
        }  # fmt: skip
        content = sealed(about, body, self._key)
        parcel = Parcel(content, dst_node_id=node, message_type=kind, ttl=seconds, group_id=str(about.get("round", "")))
        found = list(self.grid.push_messages([parcel]))
        if not found or not found[0]:
            return PendingRequest(client, failure=Failure("dropped", "Flower did not accept the message"))
        what = {
            "asked": about.get("what"),
            "kind": about.get("stage", str(kind)),
            "round": about.get("round"),
            "bytes": len(body),
        }
        self._events.add("request", self.federation.organisations[client], run=self.run, **what)
        return PendingRequest(client, node, self._here[node], found[0], name_of(content), monotonic() + seconds)

    def receive(self, asked: PendingRequest, limit: int = LIMIT) -> tuple[dict[str, Any], bytes] | Failure:
        """Wait for an answer until the deadline, or until its node goes offline (even if it has reconnected).

        Args:
            asked: The pending request.
            limit: Largest size of the answer's body in bytes.

        Returns:
            The header and body of the answer, or a failure.
        """
        answer = self._wait(asked, limit)
        name = self.federation.organisations[asked.client]
        if isinstance(answer, Failure):
            if self._failing.get(asked.client) != answer:  # an absent organisation fails at every request
                self._events.add("failed", name, reason=answer.kind, why=answer.why, run=self.run)
            self._failing[asked.client] = answer
        else:
            self._failing.pop(asked.client, None)
            what = str(answer[0].get("what"))[:20]
            self._events.add("answer", name, run=self.run, answered=what, bytes=len(answer[1]))
        return answer

    def _wait(self, asked: PendingRequest, limit: int) -> tuple[dict[str, Any], bytes] | Failure:
        if asked.failure is not None:
            return asked.failure
        next_refresh = monotonic() + REFRESH_SECONDS
        while True:
            now = monotonic()
            if now > next_refresh:
                self._refresh_nodes()
                next_refresh = now + REFRESH_SECONDS
            gone = self._here.get(asked.node) != asked.since
            for reply in self.grid.pull_messages([asked.parcel]):
                return self._read(reply, asked, limit)
            if gone:
                return Failure("dropped", "the organisation went offline before it answered")
            if now > asked.deadline:
                return Failure("timed_out", "the organisation did not answer in time (--client-timeout)")
            sleep(POLL_SECONDS)

    def _read(self, reply: Parcel, asked: PendingRequest, limit: int) -> tuple[dict[str, Any], bytes] | Failure:
        if reply.has_error():
            if reply.error.code in GONE:
                return Failure("dropped", "the organisation went offline before it answered")
            return Failure("died", f"Flower reports: {reply.error.reason or f'error {reply.error.code}'}"[:300])
        try:
            about, body = opened(reply.content, self._keys[asked.client], limit)
            refuse_unless(about.get("answers") == asked.name, "it answers a different message")
        except MessageError as error:
            return Failure("invalid", str(error))
        return about, body

    def _admit(self, client: int, about: dict[str, Any], body: bytes) -> Failure | None:
        """Check an organisation's answer to a request to join, and store its numbers of samples."""
        try:
            if about.get("what") == "result":
                failure = Result.from_bytes(body).error
                return reported(failure) if failure else Failure("invalid", "the answer does not say whether it joins")
            refuse_other_versions(about.get("versions"))
            train, test = about.get("train"), about.get("test")
            refuse_unless(
                about.get("what") == "joined" and is_count(train) and is_count(test),
                "it does not say that the organisation joins",
            )
        except (MessageError, UserError) as error:
            return Failure("invalid", str(error))
        assert isinstance(train, int)
        assert isinstance(test, int)
        if not 0 < train <= MOST_SAMPLES or test > MOST_SAMPLES:
            why = (
                f"the organisation declares {train} training and {test} test samples; 1 to {MOST_SAMPLES} training and "
                f"at most {MOST_SAMPLES} test samples are allowed"
            )
            return Failure("invalid", why)
        self.train[client], self.test[client] = samples_elsewhere(train), samples_elsewhere(test)
        return None


def _reason(about: dict[str, Any]) -> str:
    """Return one word for why an organisation did not join."""
    try:
        refuse_other_versions(about.get("versions", protocol_versions()))
    except VersionError as error:
        return error.reason
    found = about.get("reason")
    return found if isinstance(found, str) and found in REASONS else "invalid"


def reported(failure: Failure) -> Failure:
    """Return a failure reported by another party, with only its kind and its text, truncated to 1,000 characters."""
    refuse_unless(failure.kind in get_args(FailureKind) and isinstance(failure.why, str), "its error is invalid")
    return Failure(failure.kind, failure.why[:1000], reported=True)
