"""Paired values of two groups of runs, by client or by seed, for significance tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import UserError
from fedloom.experiment.records import ClientRow
from fedloom.report.page.measures import Measure
from fedloom.report.page.runs import Run


@dataclass(frozen=True)
class Pairs:
    """Values of the same clients or seeds in two groups of runs."""

    one: list[float]
    other: list[float]
    unit: str
    """What a pair is: `clients`, `clients of all seeds` or `seeds`."""


def client_pairs(one: Sequence[Run], other: Sequence[Run], figure: Measure) -> Pairs:
    """Pair the clients' figures at the last evaluation, of the seeds that both groups have; without newcomers.

    If the clients are the same with every seed (equal numbers of training and test samples), each client's figures are
    averaged over seeds, so that a client counts once. Otherwise every client of every seed is a pair.

    Raises:
        UserError: The two groups have no common seed, or different clients.
    """
    seeds = _common_seeds(one, other)
    first, second = ({run.seed: _rows(run) for run in group} for group in (one, other))
    for seed in seeds:
        if _who(first[seed]) != _who(second[seed]):
            paths = [next(run.path for run in group if run.seed == seed) for group in (one, other)]
            raise UserError(
                f"test = 'clients': '{paths[0]}' and '{paths[1]}' have different clients (other numbers of training or "
                "test samples), so their results cannot be paired; leave out test, or compare runs on the same "
                "federation"
            )
    pairs = {
        seed: {
            row["client"]: (a, b)
            for row, match in zip(first[seed], second[seed], strict=True)
            if (a := figure.of(row)) is not None and (b := figure.of(match)) is not None
        }
        for seed in seeds
    }
    if len(seeds) > 1 and all(_who(first[seed]) == _who(first[seeds[0]]) for seed in seeds):
        always = [client for client in pairs[seeds[0]] if all(client in pairs[seed] for seed in seeds)]
        means = [np.mean([pairs[seed][client] for seed in seeds], axis=0) for client in always]
        return Pairs([float(a) for a, _ in means], [float(b) for _, b in means], "clients")
    found = [pair for each in pairs.values() for pair in each.values()]
    unit = "clients" if len(seeds) == 1 else "clients of all seeds"
    return Pairs([a for a, _ in found], [b for _, b in found], unit)


def seed_pairs(one: dict[int, float], other: dict[int, float]) -> Pairs:
    """Pair the values of the seeds that both groups have."""
    seeds = [seed for seed in one if seed in other]
    return Pairs([one[seed] for seed in seeds], [other[seed] for seed in seeds], "seeds")


def _common_seeds(one: Sequence[Run], other: Sequence[Run]) -> list[int]:
    seeds = [run.seed for run in one if run.seed in {run.seed for run in other}]
    if not seeds:
        raise UserError(
            f"test = 'clients': '{one[0].path}' and '{other[0].path}' have no seed in common; run both methods with "
            "the same seeds, or leave out test"
        )
    return seeds


def _rows(run: Run) -> list[ClientRow]:
    if not run.clients:
        raise UserError(f"test = 'clients': '{run.path}' has no results of single clients; leave out test")
    return sorted(run.clients, key=lambda row: row["client"])


def _who(rows: Sequence[ClientRow]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return what identifies a federation's clients: number, training samples and test samples per class."""
    return [(row["client"], row["train"], tuple(row["total"])) for row in rows]
