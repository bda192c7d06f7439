"""The organisations behind Flower's grid: who is there, how much each holds, and asking them."""

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, get_args

from flwr.app import Message as Parcel
from flwr.app import MessageType
from flwr.serverapp import Grid

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.failures import Failure, FailureKind, RoundError
from fedloom.core.job import Result
from fedloom.core.message import LIMIT, MessageError, is_count, refuse_unless
from fedloom.deploy.certificates import Key, PublicKey
from fedloom.deploy.sealing import name_of, opened, sealed
from fedloom.deploy.tasks import samples_elsewhere
from fedloom.deploy.terms import FederationTerms, fingerprint, language, refuse_other_language

JOIN_SECONDS = 120.0
"""How long an organisation may take to answer that it joins."""
POLL_SECONDS = 0.3
ROLL_CALL_SECONDS = 5.0
MOST_SAMPLES = 10**9
"""That an organisation may say it has."""
log = logging.getLogger("fedloom")


@dataclass
class Asked:
    """A request on its way: whom, under which of Flower's identities (there since when), what the answer will name."""

    client: int
    node: int = 0
    since: str = ""
    parcel: str = ""
    name: str = ""
    deadline: float = 0.0
    failure: Failure | None = None


class Fleet:
    """Asks organisations by their numbers. Whoever is not there, is late or answers nonsense has failed, no more."""

    def __init__(
        self,
        grid: Grid,
        federation: FederationTerms,
        nodes: Mapping[int, int],
        keys: Mapping[int, PublicKey],
        key: Key,
        recipe: Recipe,
        run: str,
    ):
        self.grid, self.federation, self.recipe, self.run = grid, federation, recipe, run
        self._node_of = {client: node for node, client in nodes.items()}
        self._keys, self._key = keys, key
        self._terms = fingerprint(recipe, federation)
        clients = range(len(federation.organisations))
        self.train, self.test = ([samples_elsewhere(0) for _ in clients] for _ in range(2))
        self._joined: dict[int, int] = {}
        self._here: dict[int, str] = {}
        self._refused: dict[int, float] = {}

    def gather(self) -> list[int]:
        """Lets those who are here, and have not joined yet, join; those who have left are forgotten."""
        self._call_roll()
        present = {client: node for client, node in self._node_of.items() if node in self._here}
        self._joined = {client: node for client, node in self._joined.items() if client in present}
        self._refused = {client: when for client, when in self._refused.items() if client in present}
        late = monotonic() - JOIN_SECONDS
        new = [c for c in present if c not in self._joined and self._refused.get(c, late) <= late]
        body = json.dumps(self.recipe.resolved()).encode() if new else b""
        asked = [self.send(c, {"what": "join"}, body, MessageType.QUERY, JOIN_SECONDS, joining=True) for c in new]
        for one in asked:
            answer = self.receive(one)
            failure = answer if isinstance(answer, Failure) else self._admit(one.client, *answer)
            name = self.federation.organisations[one.client]
            if failure is None:
                self._joined[one.client] = one.node
                log.info(f"{name} has joined, with {len(self.train[one.client])} training samples")
            else:
                self._refused[one.client] = monotonic()
                log.warning(f"{name} does not join: {failure.why}")
        return sorted(self._joined)

    def _call_roll(self) -> None:
        """Which nodes are there, and since when."""
        self._here = {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def wait_for(self, wanted: int, needed: int, seconds: float) -> None:
        """Until so many as are wanted have joined; after some seconds those who are needed must do."""
        end = monotonic() + seconds
        while len(joined := self.gather()) < wanted and monotonic() < end:
            if len(joined) >= needed and len(joined) + len(self._refused) >= len(self._node_of):
                break  # nobody is undecided
            sleep(1)
        if len(joined) < needed:
            raise RoundError(
                f"{len(joined)} of {len(self._node_of)} organisations have joined within {seconds:g} s, and "
                f"training.min_clients = {needed}: start their clients, or lower it (`fedloom deploy status` shows who "
                "is there; the server's log says who refused, and why)"
            )

    def send(
        self, client: int, about: dict[str, Any], body: bytes, kind: str, seconds: float, *, joining: bool = False
    ) -> Asked:
        """Gives a request to Flower; it does not wait."""
        node = self._node_of.get(client) if joining else self._joined.get(client)
        if node is None or node not in self._here:
            return Asked(client, failure=Failure("dropped", "it has not joined, or has left"))
        about = about | {
            "to": client, "run": self.run, "recipe": self._terms, "versions": language(), "nonce": secrets.token_hex(16)
        }  # fmt: skip
        content = sealed(about, body, self._key)
        parcel = Parcel(content, dst_node_id=node, message_type=kind, ttl=seconds, group_id=str(about.get("round", "")))
        found = list(self.grid.push_messages([parcel]))
        if not found or not found[0]:
            return Asked(client, failure=Failure("dropped", "Flower did not take the message"))
        return Asked(client, node, self._here[node], found[0], name_of(content), monotonic() + seconds)

    def receive(self, asked: Asked, limit: int = LIMIT) -> tuple[dict[str, Any], bytes] | Failure:
        """The answer; it is waited for till its deadline, or till its node has left, even if it is back by now."""
        if asked.failure is not None:
            return asked.failure
        roll_call = monotonic() + ROLL_CALL_SECONDS
        while True:
            now = monotonic()
            if now > roll_call:
                self._call_roll()
                roll_call = now + ROLL_CALL_SECONDS
            gone = self._here.get(asked.node) != asked.since
            for reply in self.grid.pull_messages([asked.parcel]):
                return self._read(reply, asked, limit)
            if gone:
                return Failure("dropped", "it left before it answered")
            if now > asked.deadline:
                return Failure("timed_out", "it did not answer in time (--client-timeout)")
            sleep(POLL_SECONDS)

    def _read(self, reply: Parcel, asked: Asked, limit: int) -> tuple[dict[str, Any], bytes] | Failure:
        if reply.has_error():
            return Failure("died", f"Flower says: {reply.error.reason or f'error {reply.error.code}'}"[:300])
        try:
            about, body = opened(reply.content, self._keys[asked.client], limit)
            refuse_unless(about.get("answers") == asked.name, "it answers another message")
        except MessageError as error:
            return Failure("invalid", str(error))
        return about, body

    def _admit(self, client: int, about: dict[str, Any], body: bytes) -> Failure | None:
        """Takes in what a newcomer says of itself."""
        try:
            if about.get("what") == "result":
                failure = Result.from_bytes(body).error
                return reported(failure) if failure else Failure("invalid", "it does not say whether it joins")
            refuse_other_language(about.get("versions"))
            train, test = about.get("train"), about.get("test")
            refuse_unless(about.get("what") == "joined" and is_count(train) and is_count(test), "it does not join")
        except (MessageError, UserError) as error:
            return Failure("invalid", str(error))
        assert isinstance(train, int)
        assert isinstance(test, int)
        if not 0 < train <= MOST_SAMPLES or test > MOST_SAMPLES:
            why = f"it says it has {train} training and {test} test samples, and must have 1 to {MOST_SAMPLES}"
            return Failure("invalid", why)
        self.train[client], self.test[client] = samples_elsewhere(train), samples_elsewhere(test)
        return None


def reported(failure: Failure) -> Failure:
    """A failure as another party reports it: the text alone, cut to a reasonable length."""
    refuse_unless(failure.kind in get_args(FailureKind) and isinstance(failure.why, str), "its error is none")
    return Failure(failure.kind, failure.why[:1000], reported=True)
