"""Different networks for different clients: dealt in turn, or named client by client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.core.errors import UserError, nearest
from fedloom.core.federation import Federation
from fedloom.core.protocols import Shape
from fedloom.models.base import SplitModel
from fedloom.models.factory import Factory

OTHERS = "others"
"""Key of the network of all clients that are not named."""
SHOWN = 20
"""Maximum number of clients that an error names."""


@dataclass(frozen=True)
class NetworkPerClient:
    """Builder of several networks, of which each client has one. The server has the first.

    Example:
        >>> dealt([Factory("mlp"), Factory("mlp", {"hidden": 32})], clients=3).kind_of(2)
        0
    """

    kinds: tuple[Factory, ...]
    """The different networks."""
    numbers: tuple[int, ...]
    """Number of each client's network."""

    def __post_init__(self) -> None:
        if not self.kinds or not all(0 <= number < len(self.kinds) for number in self.numbers):
            raise UserError(f"model.networks: a client's network is not among the {len(self.kinds)} that are given")

    @property
    def name(self) -> str:
        """Name of the first network."""
        return self.kinds[0].name

    @property
    def title(self) -> str:
        """All networks with the options that are set."""
        return ", ".join(kind.title for kind in self.kinds)

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the first network."""
        return self.kinds[0].options

    def kind_of(self, client: int) -> int:
        """Return the number of a client's network in `kinds`."""
        return self.numbers[client]

    def __call__(self, shape: Shape, classes: int) -> SplitModel:
        """Build the first network."""
        return self.kinds[0](shape, classes)

    def notes(self, shape: Shape, classes: int) -> list[str]:
        """Return how many clients have each network, and the remarks of each network."""
        counts = [self.numbers.count(number) for number in range(len(self.kinds))]
        words = ", ".join(f"{count} × {kind.title}" for kind, count in zip(self.kinds, counts, strict=True))
        inner = [note for kind in self.kinds for note in kind.notes(shape, classes)]
        return [f"model: networks of the clients: {words}", *dict.fromkeys(inner)]

    def facts(self) -> dict[str, Any]:
        """Return the networks and the number of each client's network, as they are stored with trained models."""
        return {
            "name": self.name, "networks": [kind.facts() for kind in self.kinds], "numbers": list(self.numbers),
        }  # fmt: skip


def dealt(networks: Sequence[Factory], clients: int) -> NetworkPerClient:
    """Return networks that are dealt in turn: client i has network i mod n."""
    return NetworkPerClient(tuple(networks), tuple(client % len(networks) for client in range(clients)))


def by_client(networks: Mapping[str, Factory], federation: Federation) -> NetworkPerClient:
    """Return networks that are given by client.

    Args:
        networks: The network of each client, by its name or number; `others` stands for all clients that are missing.
            A number that is a client's name stands for that client.
        federation: The clients.

    Raises:
        UserError: A client is unknown, or has no network.
    """
    taken = set(federation.names)
    numbered = ["" if str(client) in taken else str(client) for client in range(len(federation))]
    known = [*federation.names, *filter(None, numbered)]
    for key in networks:
        if key != OTHERS and key not in known:
            raise UserError(f"model.by_client.{key}: there is no such client: {nearest(key, known[:SHOWN])}")
    kinds: list[Factory] = []
    numbers: list[int] = []
    missing: list[str] = []
    for client in range(len(federation)):
        keys = (*federation.names[client : client + 1], numbered[client], OTHERS)
        found = next((networks[key] for key in keys if key and key in networks), None)
        if found is None:
            missing.append(federation.name(client))
            continue
        if found not in kinds:
            kinds.append(found)
        numbers.append(kinds.index(found))
    if missing:
        raise UserError(
            f"model.by_client: has no network for {', '.join(missing[:SHOWN])}; add them, or the key '{OTHERS}'"
        )
    return NetworkPerClient(tuple(kinds), tuple(numbers))
