"""Sampling of the clients that take part in a round."""

from collections.abc import Iterable
from secrets import randbits

import numpy as np

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.rng import numpy_generator
from fedloom.core.task import EVERYONE, Task, longest_first


class Sampling:
    """Draws clients by (seed, round); newcomers never take part, and a pooled method has one virtual client.

    Privacy amplification by sampling requires that the drawn clients are secret. In a deployment every member knows the
    seed, so with `privacy` clients are drawn from the operating system's random source.
    """

    def __init__(self, recipe: Recipe, task: Task, *, pooled: bool):
        self._task, self._seed, self._fraction = task, recipe.seed, recipe.training.fraction
        newcomers = set(task.federation.newcomers)
        self.participants = [c for c in range(task.clients) if c not in newcomers]
        self.trainers = [EVERYONE] if pooled else self.participants
        self._secret = recipe.privacy is not None and task.elsewhere
        self.poisson = recipe.privacy is not None and recipe.privacy.sampling == "poisson"
        share = int(self._fraction * len(self.trainers) + 0.5)
        self.per_round = max(1, share) if pooled else share
        self._refuse_too_few(recipe.training.min_clients)

    def _refuse_too_few(self, needed: int) -> None:
        if self.per_round == 0:
            raise UserError(
                f"training.fraction = {self._fraction:g}: selects none of {len(self.trainers)} clients; "
                f"set it to {1 / len(self.trainers):.2g}, which selects one client, or more"
            )
        if needed > self.per_round:
            raise UserError(
                f"training.min_clients = {needed}: {self.per_round} of {len(self.trainers)} clients take part in a "
                "round; lower it, or raise training.fraction"
            )

    def draw(self, round: int, attempt: int = 0, asked: Iterable[int] = ()) -> list[int]:
        """Draw the clients of a round.

        Args:
            round: Number of the round.
            attempt: Number of earlier attempts at this round.
            asked: Clients of the earlier attempts; a retry prefers other clients.

        Returns:
            The clients, those with the most work first. This is also the order of summation, on every engine.
        """
        if attempt == 0:
            generator = self._generator(round, "sample")
            if self.poisson:  # may be empty
                drawn = np.flatnonzero(generator.random(len(self.trainers)) < self._fraction)
            else:
                drawn = generator.choice(len(self.trainers), self.per_round, replace=False)
            return longest_first(self._task, (self.trainers[i] for i in drawn))
        order = self._generator(round, "sample", attempt).permutation(self.trainers)
        others_first = sorted((int(c) for c in order), key=set(asked).__contains__)
        return longest_first(self._task, others_first[: self.per_round])

    def _generator(self, *purpose: object) -> np.random.Generator:
        return np.random.default_rng(randbits(128)) if self._secret else numpy_generator(self._seed, *purpose)
