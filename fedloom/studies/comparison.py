"""The papers' figures beside ours: means over seeds, what was changed, and a two-sided count of what agrees."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, Literal

from fedloom.studies.results import CellResult
from fedloom.studies.table import Cell

TOLERANCE = 2.0
"""Points by which a figure that agrees may differ from the paper's, to either side."""

Verdict = Literal["agrees", "within 2 points", "above", "below"]
Apart = Literal["shortened", "ours"]


@dataclass(frozen=True)
class Line:
    """A cell with what was run of it: the paper's setting if it was, else the longest shortened run."""

    cell: Cell
    results: tuple[CellResult, ...] = ()
    """of the same changes, seed by seed"""

    @property
    def here(self) -> float | None:
        """Our figure, in percent: the mean over seeds."""
        known = self.figures
        return mean(known) if known else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return stdev(self.figures) if len(self.figures) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.here is None or self.cell.printed is None else self.here - self.cell.printed

    @property
    def verdict(self) -> Verdict | None:
        """How ours compares with the paper's figure, judged as printed, with two decimals.

        Only a run in the paper's setting agrees with it; one that is counted apart is `within 2 points`.
        """
        if self.difference is None:
            return None
        difference = round(self.difference, 2)
        if abs(difference) <= TOLERANCE:
            return "within 2 points" if self.apart else "agrees"
        return "above" if difference > 0 else "below"

    @property
    def apart(self) -> Apart | None:
        """Why the cell is counted apart from those in the paper's setting; a shortened run of ours is `shortened`."""
        return "shortened" if self.changes else "ours" if self.cell.ours else None

    @property
    def changes(self) -> Mapping[str, Any]:
        """What differs from the paper's setting."""
        return self.results[0].changes if self.results else {}

    @property
    def figures(self) -> list[float]:
        """Our figure of each seed, in percent."""
        return [figure for r in self.results if (figure := r.figure(self.cell)) is not None]


@dataclass(frozen=True)
class Count:
    """How many cells were run, and how their figures compare with the paper's."""

    run: int
    within: int
    """at most 2 points from the paper's figure: in the paper's setting, those that agree"""
    above: int
    below: int

    @property
    def judged(self) -> int:
        """Cells that were run and whose figure the paper prints."""
        return self.within + self.above + self.below


@dataclass(frozen=True)
class Tally:
    """Cells counted: in the paper's setting, and apart from them those in a setting of ours and the shortened ones."""

    cells: int
    """of the paper's tables; where all are in a setting of ours, those"""
    paper: Count
    ours: Count
    shortened: Count

    @property
    def run(self) -> int:
        """Cells of which anything was run, those in a setting of ours apart."""
        return self.paper.run + self.shortened.run

    @property
    def any_run(self) -> bool:
        """Whether anything was run."""
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
    """Write a count of cells that stand apart: `14: 6 within 2 points, 5 above, 3 below`."""
    parts = {"within 2 points": count.within, "above": count.above, "below": count.below}
    words = ", ".join(f"{number} {word}" for word, number in parts.items() if number)
    return f"{count.run}: {words}" if words else f"{count.run}"


def compared(cells: Iterable[Cell], results: Sequence[CellResult]) -> list[Line]:
    """Cells with their results."""
    return [Line(cell, _best([r for r in results if r.of == cell.key])) for cell in cells]


def with_other_seeds(line: Line, results: Iterable[CellResult]) -> Line:
    """Add results of the same run with other seeds."""
    alike = {r.seed: r for r in results if r.of == line.cell.key and r.changes == line.changes}
    alike |= {r.seed: r for r in line.results}
    return Line(line.cell, tuple(alike[seed] for seed in sorted(alike)))


def _best(results: Sequence[CellResult]) -> tuple[CellResult, ...]:
    """Those in the paper's setting; else the longest of the shortened ones."""
    if not results:
        return ()
    best = min(results, key=lambda r: (bool(r.changes), -r.rounds))
    alike = {r.seed: r for r in results if r.changes == best.changes}
    return tuple(alike[seed] for seed in sorted(alike))


def changes_in_words(changes: Mapping[str, Any], cell: Cell) -> str:
    """`50 of 100 rounds, data.limit 6000`; nothing where nothing was changed."""
    words = [f"{changes['training.rounds']} of {cell.rounds} rounds"] if "training.rounds" in changes else []
    return ", ".join(words + [f"{path} {value}" for path, value in changes.items() if path != "training.rounds"])


def setting_in_words(line: Line) -> str:
    """`the paper's`; `ours, 50 of 100 rounds`; `not run yet`."""
    words = changes_in_words(line.changes, line.cell) if line.results else "not run yet"
    if line.cell.ours:
        return f"ours, {words}" if words else "ours"
    return words or "the paper's"
