"""Whether our results confirm or contradict the paper's order of methods, by confidence intervals over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import mean, stdev
from typing import Literal

from fedloom.studies.comparison import Line

LEVEL = 0.95
"""Level of the confidence intervals."""
TOO_FEW = "fewer than two common seeds"
"""Why a pair of methods has no interval."""
SHOWN = 4
"""Number of contradicted pairs that are written out."""


@dataclass(frozen=True)
class Pair:
    """Two methods of a column whose figures differ in the paper."""

    better: Line
    """The method with the higher figure in the paper."""
    worse: Line

    @property
    def printed(self) -> float:
        """The paper's difference, above 0."""
        assert self.better.cell.printed is not None
        assert self.worse.cell.printed is not None
        return self.better.cell.printed - self.worse.cell.printed

    @property
    def differences(self) -> list[float]:
        """Our differences, one per common seed."""
        ones, others = self.better.by_seed, self.worse.by_seed
        return [ones[seed] - others[seed] for seed in ones if seed in others]

    @property
    def here(self) -> float:
        """Our difference between the means over seeds; negative if the order is reversed."""
        assert self.better.here is not None
        assert self.worse.here is not None
        return round(self.better.here, 2) - round(self.worse.here, 2)  # as printed in the report

    @property
    def interval(self) -> tuple[float, float] | None:
        """Confidence interval of our difference over common seeds; None with fewer than two of them."""
        return interval_of_mean(self.differences)

    @property
    def verdict(self) -> Literal["confirmed", "contradicted", "open"]:
        """`confirmed` if the whole interval is above 0, `contradicted` if it is below 0, otherwise `open`."""
        low, high = self.interval or (0.0, 0.0)
        return "confirmed" if low > 0 else "contradicted" if high < 0 else "open"


def interval_of_mean(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the confidence interval (Student's t) of the mean of differences between two methods, one per seed.

    Methods are compared seed by seed, because a seed gives all methods the same partition, newcomers and initial model.

    Returns:
        The lower and upper end, or None with fewer than two differences.
    """
    if len(differences) < 2:
        return None
    from scipy.special import stdtrit  # here, since most commands need no interval; scipy.stats takes seconds

    reach = float(stdtrit(len(differences) - 1, (1 + LEVEL) / 2)) * stdev(differences) / sqrt(len(differences))
    return mean(differences) - reach, mean(differences) + reach


def pairs(lines: Sequence[Line]) -> list[Pair]:
    """Return all pairs of a column's methods that ran with the same changes and differ in the paper."""
    known = [line for line in lines if line.difference is not None]
    found = (Pair(*sorted(two, key=_printed, reverse=True)) for two in combinations(known, 2))
    return [pair for pair in found if pair.printed > 0 and pair.better.changes == pair.worse.changes]


def _printed(line: Line) -> float:
    return line.cell.printed or 0.0


def verdicts_in_words(found: Sequence[Pair]) -> str:
    """Summarise the verdicts on a column's pairs; empty without pairs."""
    if not found:
        return ""
    alone = sum(pair.interval is None for pair in found)
    same = sum(pair.here > 0 for pair in found)
    means = f"Our means have the paper's order in {same} of {len(found)}."
    if alone == len(found):
        return f"Order of methods: {_pairs(len(found))} open ({TOO_FEW}). {means}"
    confirmed = sum(pair.verdict == "confirmed" for pair in found)
    against = sorted((pair for pair in found if pair.verdict == "contradicted"), key=lambda pair: -pair.printed)
    undecided = len(found) - confirmed - len(against)
    still = f"{undecided} open" + (f" ({alone} with {TOO_FEW})" if alone else "")
    text = f"Order of methods, by 95% intervals over seeds: {confirmed} of {_pairs(len(found))} confirmed"
    text += f", {len(against)} contradicted, {still}. {means}"
    if against:
        more = f"; and {len(against) - SHOWN} more" if len(against) > SHOWN else ""
        text += f" Contradicted: {'; '.join(map(_reversed, against[:SHOWN]))}{more}."
    return text


def _pairs(number: int) -> str:
    return f"{number} pair{'s' * (number != 1)}"


def _reversed(pair: Pair) -> str:
    assert pair.interval is not None
    low, high = pair.interval
    return (
        f"{pair.better.cell.name} is {pair.printed:.2f} above {pair.worse.cell.name} in the paper, here "
        f"{-mean(pair.differences):.2f} below (between {-high:.2f} and {-low:.2f})"
    )
