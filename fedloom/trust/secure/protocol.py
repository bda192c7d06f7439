"""What the server and the clients exchange in a round of secure aggregation, as JSON.

1. `keys`: each client generates two X25519 key pairs, and signs their public keys.
2. `shares`: each client gets all public keys (the roster). It shares a seed and its private mask key among the members
   of the roster, encrypted for each of them. The server passes the shares on with the training job.
3. The training job: each client answers with its masked message.
4. `unmask`: the server names the survivors, whose masked messages it has. Each client reveals its shares of the
   survivors' seeds and of the other members' mask keys; never both of one member.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from fedloom.core.errors import UserError
from fedloom.core.failures import Failure
from fedloom.core.message import MessageError
from fedloom.core.reading import Count, Read, parse_json
from fedloom.trust.secure.settings import SecureSettings

Stage = Literal["keys", "shares", "unmask"]
MEMBERS_LIMIT = 10_000
"""Largest number of members that a request may name."""
CLOSED = ConfigDict(extra="forbid")
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,512}$")]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[str, Field(pattern=r"^[0-9a-f]{66}$")]
Members = Annotated[list[Count], Field(max_length=MEMBERS_LIMIT)]


@with_config(CLOSED)
class Announcement(TypedDict):
    """A client's answer to `keys`: its public keys of one round, signed."""

    encryption: Key
    mask: Key
    signature: Hex


@with_config(CLOSED)
class KeysRequest(TypedDict):
    """Request for public keys, with the round that they are for."""

    round: Count
    attempt: Count


@with_config(CLOSED)
class SharesRequest(TypedDict):
    """All public keys of a round, and the number of samples that has the weight 1."""

    roster: Annotated[dict[Count, Announcement], Field(max_length=MEMBERS_LIMIT)]
    largest: Count


@with_config(CLOSED)
class SharesAnswer(TypedDict):
    """A client's encrypted shares by recipient."""

    roster: Key
    """Hash of the terms and the roster, from which masks are derived."""
    commitment: Key
    """Hash of the client's seed, which reveals wrong shares later."""
    shares: Annotated[dict[Count, Hex], Field(max_length=MEMBERS_LIMIT)]


@with_config(CLOSED)
class Relay(TypedDict):
    """Encrypted shares for one client by sender, passed on by the server."""

    shares: Annotated[dict[Count, Hex], Field(max_length=MEMBERS_LIMIT)]


@with_config(CLOSED)
class UnmaskRequest(TypedDict):
    """The members whose masked messages the server has."""

    survivors: Members


@with_config(CLOSED)
class UnmaskAnswer(TypedDict):
    """A client's shares: of survivors' seeds, and of the other members' mask keys."""

    seeds: Annotated[dict[Count, Share], Field(max_length=MEMBERS_LIMIT)]
    keys: Annotated[dict[Count, Share], Field(max_length=MEMBERS_LIMIT)]


def written(value: Mapping[str, Any]) -> bytes:
    """Serialise a request or an answer."""
    return json.dumps(value, separators=(",", ":")).encode()


def read(data: bytes, kind: type[Read]) -> Read:
    """Parse a request or an answer.

    Raises:
        MessageError: The bytes are not of this kind.
    """
    try:
        return parse_json(data, kind, "the message", "it is refused")
    except UserError as error:
        raise MessageError(str(error)) from None


@dataclass(frozen=True)
class Terms:
    """What all parties of a round know in advance; every key and signature is bound to it."""

    run: str
    recipe: str
    """Hash of the recipe."""
    round: int
    attempt: int
    settings: SecureSettings

    @property
    def context(self) -> bytes:
        """Hash of the terms."""
        values = [self.run, self.recipe, self.round, self.attempt, self.settings.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(values).encode()).digest()


def roster_hash(terms: Terms, request: SharesRequest) -> bytes:
    """Return a hash of the terms and the roster; clients with different rosters cannot read each other's shares."""
    rows = [[client, one["encryption"], one["mask"]] for client, one in sorted(request["roster"].items())]
    return hashlib.sha256(terms.context + json.dumps([rows, request["largest"]]).encode()).digest()


class Identity(Protocol):
    """A client's long-term key, and the other clients' public ones."""

    def sign(self, data: bytes) -> bytes:
        """Sign data as this client."""

    def verify(self, client: int, data: bytes, signature: bytes) -> None:
        """Raise MessageError unless this client signed the data."""


@runtime_checkable
class Parties(Protocol):
    """How the server reaches the clients of a round."""

    @property
    def scope(self) -> tuple[str, str]:
        """Name of the run, and hash of the recipe."""

    def ask(self, stage: Stage, round: int, requests: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Send a request to each of these clients, and return their answers."""

    def relay(self, client: int, body: bytes) -> None:
        """Send this along with the client's next training job."""
