"""Schedule of a cohort: steps are vectorised over clients that reach steps of the same size at the same time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core.batches import Plan


@dataclass(frozen=True)
class Piece:
    """Steps of one size, taken by the first `clients` clients at once or by one client."""

    clients: range
    size: int
    count: int
    start: tuple[int, ...]
    """Index of the first of these steps in each client's plan."""

    @property
    def together(self) -> bool:
        """Whether several clients take these steps at once."""
        return len(self.clients) > 1

    def one_by_one(self) -> list["Piece"]:
        """Return the same steps as pieces of single clients."""
        starts = zip(self.clients, self.start, strict=True)
        return [Piece(range(client, client + 1), self.size, self.count, (start,)) for client, start in starts]

    def rows(self, plans: Sequence[Plan]) -> np.ndarray:
        """Return the rows of all steps, int64 [count, clients, row]."""
        each = [plans[c].part(start, self.size, self.count) for c, start in zip(self.clients, self.start, strict=True)]
        return np.stack(each, axis=1)


def pieces(plans: Sequence[Plan]) -> list[Piece]:
    """Return all clients' steps as a schedule that keeps each client's order.

    While all clients with remaining steps are at the same batch size, their steps are vectorised. Before that, clients
    at another size (a remainder) take those steps individually. Vectorised clients are always the first ones: a client
    with more steps than a client before it takes its last steps individually.
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
