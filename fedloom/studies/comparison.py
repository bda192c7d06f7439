"""Comparison of the papers' figures with ours: means over seeds, changed settings, and counts of agreement."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import mean, stdev
from typing import Any, Literal

from fedloom.studies.results import CellResult
from fedloom.studies.table import Cell

TOLERANCE = 2.0
"""Percentage points by which a figure may differ from the paper's, in either direction, and still agree with it."""

Verdict = Literal["agrees", "within 2 points", "above", "below"]
Apart = Literal["shortened", "ours"]


@dataclass(frozen=True)
class Line:
    """A cell with its results: those in the paper's setting if there are any, otherwise the longest shortened run."""

    cell: Cell
    results: tuple[CellResult, ...] = ()
    """Results with the same changes, one per seed."""

    @property
    def here(self) -> float | None:
        """Our figure in percent, as the mean over seeds; None without results."""
        known = self.figures
        return mean(known) if known else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None with fewer than two seeds."""
        return stdev(self.figures) if len(self.figures) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our figure minus the paper's; None if one of them is missing."""
        return None if self.here is None or self.cell.printed is None else self.here - self.cell.printed

    @property
    def verdict(self) -> Verdict | None:
        """How our figure compares with the paper's, both rounded to two decimals.

        Figures agree if they differ by at most 2 points and the run has the paper's setting. A shortened run, or one in
        another setting, is `within 2 points` instead. None if one of the figures is missing.
        """
        if self.difference is None:
            return None
        difference = round(self.difference, 2)
        if abs(difference) <= TOLERANCE:
            return "within 2 points" if self.apart else "agrees"
        return "above" if difference > 0 else "below"

    @property
    def apart(self) -> Apart | None:
        """Why the cell is counted separately from those in the paper's setting; None if it is not.

        A shortened run in another setting counts as `shortened`.
        """
        return "shortened" if self.changes else "ours" if self.cell.ours else None

    @property
    def changes(self) -> Mapping[str, Any]:
        """Fields that differ from the paper's setting."""
        return self.results[0].changes if self.results else {}

    @property
    def figures(self) -> list[float]:
        """Our figures in percent, one per seed."""
        return list(self.by_seed.values())

    @property
    def by_seed(self) -> dict[int, float]:
        """Our figure for each seed, in percent, by seed."""
        return {r.seed: figure for r in self.results if (figure := r.figure(self.cell)) is not None}


@dataclass(frozen=True)
class Count:
    """Number of cells that were run, and how their figures compare with the paper's."""

    run: int
    within: int
    """Figures at most 2 points from the paper's; in the paper's setting these are the ones that agree."""
    above: int
    below: int

    @property
    def judged(self) -> int:
        """Number of cells that were run and for which the paper prints a figure."""
        return self.within + self.above + self.below


@dataclass(frozen=True)
class Tally:
    """Counts of cells: in the paper's setting, in another setting, and shortened."""

    cells: int
    """Number of cells in the paper's setting; if there are none, of all cells."""
    paper: Count
    ours: Count
    shortened: Count

    @property
    def run(self) -> int:
        """Number of cells that were run, completely or shortened, without cells in another setting."""
        return self.paper.run + self.shortened.run

    @property
    def any_run(self) -> bool:
        """Whether any cell was run."""
        return self.run + self.ours.run > 0


def tally(lines: Sequence[Line]) -> Tally:
    """Count cells by what was run and by verdict."""
    run = [line for line in lines if line.here is not None]
    return Tally(
        cells=sum(not line.cell.ours for line in lines) or len(lines),
        paper=_count(line for line in run if line.apart is None),
        ours=_count(line for line in run if line.apart == "ours"),
        shortened=_count(line for line in run if line.apart == "shortened"),
    )


def _count(lines: Iterable[Line]) -> Count:
    verdicts = [line.verdict for line in lines]
    judged = len(verdicts) - verdicts.count(None)
    above, below = verdicts.count("above"), verdicts.count("below")
    return Count(len(verdicts), judged - above - below, above, below)


def count_in_words(count: Count) -> str:
    """Format a count of separately counted cells: `14: 6 within 2 points, 5 above, 3 below`."""
    parts = {"within 2 points": count.within, "above": count.above, "below": count.below}
    words = ", ".join(f"{number} {word}" for word, number in parts.items() if number)
    return f"{count.run}: {words}" if words else f"{count.run}"


def compared(cells: Iterable[Cell], results: Sequence[CellResult]) -> list[Line]:
    """Match cells with their results."""
    return [Line(cell, _best(_results_of(cell, results))) for cell in cells]


def with_other_seeds(line: Line, results: Iterable[CellResult]) -> Line:
    """Add results of the same run with other seeds."""
    alike = {r.seed: r for r in _results_of(line.cell, results) if r.changes == line.changes}
    alike |= {r.seed: r for r in line.results}
    return Line(line.cell, tuple(alike[seed] for seed in sorted(alike)))


def _results_of(cell: Cell, results: Iterable[CellResult]) -> list[CellResult]:
    """Return the results of a cell's recipe; those that have all rounds that its column needs count as unshortened."""
    found = sorted((r for r in results if r.of == cell.key), key=lambda r: r.rounds)
    return [replace(r, changes={}) if _has_the_rounds(r, cell) else r for r in found]


def _has_the_rounds(result: CellResult, cell: Cell) -> bool:
    """Return whether a run with fewer rounds went through the same rounds up to the one that the column shows.

    That needs a learning rate that does not depend on the number of rounds.
    """
    needed = cell.column.round
    if needed is None or needed > result.rounds or set(result.changes) != {"training.rounds"}:
        return False
    schedules = [values["training"].get("schedule") for values in (result.recipe, cell.values)]
    return schedules[0] == schedules[1] != "cosine"


def _best(results: Sequence[CellResult]) -> tuple[CellResult, ...]:
    """Return the results in the paper's setting; if there are none, those of the longest shortened run."""
    if not results:
        return ()
    best = min(results, key=lambda r: (bool(r.changes), -r.rounds))
    alike = {r.seed: r for r in results if r.changes == best.changes}
    return tuple(alike[seed] for seed in sorted(alike))


def changes_in_words(changes: Mapping[str, Any], cell: Cell) -> str:
    """Describe changes, such as `50 of 100 rounds, data.limit 6000`; empty without changes."""
    words = [f"{changes['training.rounds']} of {cell.rounds} rounds"] if "training.rounds" in changes else []
    return ", ".join(words + [f"{path} {value}" for path, value in changes.items() if path != "training.rounds"])


def setting_in_words(line: Line) -> str:
    """Describe the setting of a line: `the paper's`, `ours, 50 of 100 rounds` or `not run yet`."""
    words = changes_in_words(line.changes, line.cell) if line.results else "not run yet"
    if line.cell.ours:
        return f"ours, {words}" if words else "ours"
    return words or "the paper's"


def by_column(lines: Iterable[Line]) -> list[list[Line]]:
    """Group consecutive lines of the same column of the same table."""
    return [list(group) for _, group in groupby(lines, key=lambda line: (line.cell.table, line.cell.place))]
