"""One client at work: its parts, its samples, its memory. It does not know where it runs."""

import numpy as np

from fedloom.lane import Lane
from fedloom.parts import State
from fedloom.worker import Worker


class Client(Worker):
    """What a method's `update`, `personalise`, `predict` and losses get."""

    def __init__(
        self,
        lane: Lane,
        *,
        who: int,
        round: int,
        job: str,
        samples: np.ndarray,
        first: bool,
        kept: State | None = None,
    ):
        super().__init__(lane, who=who, round=round, job=job, samples=samples, kept=kept)
        self._first = first

    @property
    def first(self) -> bool:
        """Whether this client takes part for the first time."""
        return bool(self._plain(self._first))
