"""The division of a dataset among clients."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedloom.core.errors import UserError


@dataclass(frozen=True, eq=False)
class Federation:
    """The division of a dataset among clients: positions of each client's samples."""

    train: list[np.ndarray]
    """Training samples of each client, int64, ascending."""
    test: list[np.ndarray]
    """Test samples of each client, int64, ascending. Clients with the same test set share one array."""
    newcomers: tuple[int, ...] = ()
    """Clients that are held out of training."""
    notes: tuple[str, ...] = ()
    """Remarks about the division that are shown to the user."""
    names: tuple[str, ...] = ()
    """Different names of the clients, such as those of their folders; empty if the clients have only numbers."""
    validation: list[np.ndarray] = field(default_factory=list)
    """Validation samples of each client, int64, ascending; empty arrays by default."""

    def __post_init__(self) -> None:
        if self.names and len(set(self.names)) != len(self.train):
            raise UserError(
                f"names: {len(set(self.names))} different names for {len(self.train)} clients; give each client one"
            )
        if not self.validation:
            object.__setattr__(self, "validation", [np.empty(0, np.int64)] * len(self.train))

    def __len__(self) -> int:
        return len(self.train)

    def name(self, client: int) -> str:
        """Return the name of a client; `client 3` if the clients have only numbers."""
        return self.names[client] if self.names else f"client {client}"

    @property
    def validates(self) -> bool:
        """Whether any client has validation samples."""
        return any(len(part) for part in self.validation)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one array: pickling a hundred thousand small arrays takes many times as long."""
        every = (*self.train, *self.test, *self.validation)
        distinct = {id(part): part for part in every}
        place = {key: i for i, key in enumerate(distinct)}
        uses = np.array([place[id(part)] for part in every], np.int64)
        ends = np.cumsum([len(part) for part in distinct.values()])
        rest = (self.newcomers, self.notes, self.names)
        return _restored, (np.concatenate([*distinct.values()]), ends, uses, *rest)


def _restored(
    positions: np.ndarray,
    ends: np.ndarray,
    uses: np.ndarray,
    newcomers: tuple[int, ...],
    notes: tuple[str, ...],
    names: tuple[str, ...],
) -> Federation:
    distinct = np.split(positions, ends[:-1])
    parts = [distinct[i] for i in uses]
    clients = len(parts) // 3
    train, test, validation = parts[:clients], parts[clients : 2 * clients], parts[2 * clients :]
    return Federation(train, test, newcomers, notes, names, validation)
