"""The paper's figures beside ours: over seeds, with what was changed, and whether the order of methods holds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, stdev
from typing import Any

from fedloom.studies.results import CellResult
from fedloom.studies.table import Cell


@dataclass(frozen=True)
class Line:
    """A cell with what was run of it: the paper's setting if it was, else the longest shortened run."""

    cell: Cell
    results: tuple[CellResult, ...] = ()
    """of the same changes, seed by seed"""

    @property
    def here(self) -> float | None:
        """Our figure, in percent: the mean over seeds."""
        known = self._figures
        return mean(known) if known else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return stdev(self._figures) if len(self._figures) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.here is None or self.cell.printed is None else self.here - self.cell.printed

    @property
    def near(self) -> bool | None:
        """Whether it is within 2 points of the paper, or better; of a spread over clients, less is better."""
        if self.difference is None:
            return None
        return (-self.difference if self.cell.measure.endswith("_std") else self.difference) > -2

    @property
    def changes(self) -> Mapping[str, Any]:
        """What differs from the paper's setting."""
        return self.results[0].changes if self.results else {}

    @property
    def _figures(self) -> list[float]:
        return [figure for r in self.results if (figure := r.figure(self.cell)) is not None]


def compared(cells: Iterable[Cell], results: Sequence[CellResult]) -> list[Line]:
    """Cells with their results."""
    return [Line(cell, _best([r for r in results if r.of == cell.key])) for cell in cells]


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


def order(lines: Sequence[Line]) -> str:
    """Whether methods stand in the paper's order, pair by pair, among those that ran with the same changes."""
    known = [line for line in lines if line.difference is not None and line.changes == lines[0].changes]
    if len(known) < 2:
        return ""
    pairs = [
        (one, other) if _printed(one) > _printed(other) else (other, one)
        for one, other in combinations(known, 2)
        if _printed(one) != _printed(other)
    ]
    if not pairs:
        return ""
    against = [(better, worse) for better, worse in pairs if _here(better) < _here(worse)]
    level = [(better, worse) for better, worse in pairs if _here(better) == _here(worse)]
    if not against and not level:
        return f"The paper's order of methods is confirmed ({len(pairs)} of {len(pairs)} pairs)."
    agreeing = len(pairs) - len(against) - len(level)
    confirmed = f"The paper's order of methods: {agreeing} of {len(pairs)} pairs confirmed"
    ties = f", {len(level)} level" if level else ""
    if not against:
        return f"{confirmed}{ties}."
    against.sort(key=lambda pair: _printed(pair[1]) - _printed(pair[0]))
    words = "; ".join(
        f"{better.cell.name} is {_printed(better) - _printed(worse):.2f} above {worse.cell.name} in the paper, here "
        f"{_here(worse) - _here(better):.2f} below"
        for better, worse in against[:4]
    )
    more = f"; and {len(against) - 4} more" if len(against) > 4 else ""
    return f"{confirmed}{ties}, {len(against)} contradicted: {words}{more}."


def _printed(line: Line) -> float:
    assert line.cell.printed is not None
    return line.cell.printed


def _here(line: Line) -> float:
    assert line.here is not None
    return round(line.here, 2)  # as it is printed
