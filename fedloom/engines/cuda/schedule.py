"""Which clients of a lane take their steps together: those that come to steps of the same size at the same time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core.batches import Plan


@dataclass(frozen=True)
class Piece:
    """Steps of one size: of the first `clients` clients together, or of one of them alone."""

    clients: range
    size: int
    count: int
    start: tuple[int, ...]
    """The first of these steps in each client's plan."""

    @property
    def together(self) -> bool:
        """Whether several clients take these steps at once."""
        return len(self.clients) > 1

    def one_by_one(self) -> list["Piece"]:
        """The same steps, client after client."""
        starts = zip(self.clients, self.start, strict=True)
        return [Piece(range(client, client + 1), self.size, self.count, (start,)) for client, start in starts]

    def rows(self, plans: Sequence[Plan]) -> np.ndarray:
        """int64 [count, clients, row]: what every step takes."""
        each = [plans[c].part(start, self.size, self.count) for c, start in zip(self.clients, self.start, strict=True)]
        return np.stack(each, axis=1)


def pieces(plans: Sequence[Plan]) -> list[Piece]:
    """Everybody's steps, each client's in its own order.

    As long as all clients that have steps left come to the same size, they take them together. Before that, a client
    that comes to another size (a remainder) takes it alone. Those that go together are the first ones: a client with
    more steps than one before it takes the last of them alone.
    """
    left = [[(size, count) for _, size, count in plan.runs()][::-1] for plan in plans]
    taken = [0] * len(plans)
    found: list[Piece] = []

    def take(clients: range, count: int) -> None:
        size = left[clients[0]][-1][0]
        found.append(Piece(clients, size, count, tuple(taken[client] for client in clients)))
        for client in clients:
            taken[client] += count
            rest = left[client].pop()[1] - count
            if rest:
                left[client].append((size, rest))

    usual = Counter(size for plan in plans for size in plan.sizes).most_common(1)[0][0] if any(left) else 0
    while any(left):
        active = range(next((client for client, runs in enumerate(left) if not runs), len(left)))
        coming = {left[client][-1][0] for client in active}
        if len(active) > 1 and len(coming) == 1:
            take(active, min(left[client][-1][1] for client in active))
            continue
        alone = [client for client in active if left[client][-1][0] != usual] if len(active) > 1 else range(len(left))
        for client in [client for client in alone if left[client]]:
            take(range(client, client + 1), left[client][-1][1])
    return found
