"""Results tables for a paper: means over seeds, deviations or intervals, ranks and paired tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from fedloom.core.errors import UserError
from fedloom.report.page.pairs import Pairs, client_pairs, seed_pairs
from fedloom.report.page.runs import Run
from fedloom.report.paper.grid import Grid
from fedloom.report.paper.measures import Quantity, Which, best_evaluation, quantities, rounds_shown, value_in
from fedloom.report.significance import FEWEST_SEEDS, LEVEL, half_width, holm, sample_std, signed_rank, smallest_p

Test = Literal["clients", "seeds"]


@dataclass
class PaperCell:
    """A measure of one row and column: its values by seed, and what is computed from them."""

    values: dict[int, float]
    rank: int | None = None
    """1 for the best of the column, 2 for the second; None for the others."""
    p: float | None = None
    """p-value of the test against the reference, without correction."""
    corrected: float | None = None
    reference: bool = False
    pairs: int | None = None
    """Number of pairs of the test."""

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(list(self.values.values())))

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; None with one seed."""
        return sample_std(list(self.values.values())) if len(self.values) > 1 else None

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95% confidence interval; None with one seed."""
        return half_width(list(self.values.values())) if len(self.values) > 1 else None

    @property
    def marked(self) -> bool:
        """Whether the difference from the reference is significant."""
        return self.corrected is not None and self.corrected < LEVEL


@dataclass
class PaperTable:
    """A results table, independent of its format."""

    rows: list[str]
    columns: list[str]
    measures: list[Quantity]
    cells: dict[tuple[str, str, str], PaperCell]
    """By row, column and measure; without cells for which no value is known."""
    interval: bool
    """Whether ± is the 95% confidence interval instead of the sample deviation."""
    caption: list[str] = field(default_factory=list)
    """Sentences."""
    ranked: str = ""
    """The sentence that explains ranks, for formats that show them."""
    label: str = "tab:results"
    """The label in LaTeX."""


def paper_table(
    grid: Grid,
    measures: Sequence[str] = ("personal_accuracy",),
    *,
    which: Which = "last",
    interval: bool = False,
    test: Test | None = None,
    against: str | None = None,
    digits: int | None = None,
) -> PaperTable:
    """Compute a results table.

    Args:
        grid: The runs by row and column.
        measures: Fields of summaries and records, such as `personal_accuracy`.
        which: The rounds that values come from: `last`, by the runs' `evaluation.summary`, or `best`.
        interval: Show 95% confidence intervals instead of sample deviations.
        test: Pairs of the significance test; None for no test.
        against: The row that others are tested against. Default: the best row of each column.
        digits: Number of decimals. Default: one of percentages, three of other figures.

    Raises:
        UserError: A measure is unknown, or the test is not possible.
    """
    shown = quantities(measures, grid.runs)
    if digits is not None:
        shown = [replace(measure, digits=digits) for measure in shown]
    rounds = rounds_shown(grid.runs, which, shown[0])
    if against is not None and against not in grid.rows:
        raise UserError(f"against = '{against}': the table has no such row; choose among {', '.join(grid.rows)}")
    if against is not None and test is None:
        raise UserError(f"against = '{against}': is the reference of a test; set test to clients or seeds")
    if test == "clients" and which == "best":
        raise UserError(
            "test = 'clients': run folders have the results of single clients at the last evaluation only; set round "
            "to last, or test to seeds"
        )
    cells, left_out = {}, []
    for (row, column), runs in grid.cells.items():
        for measure in shown:
            if values := _values(runs, measure, which, shown[0]):
                cells[row, column, measure.name] = PaperCell(values)
                without = [str(run.seed) for run in runs if run.seed not in values]
                left_out += [f"{row} (seed {seed})" for seed in without]
    if not cells:
        raise UserError(
            f"measure = {', '.join(measures)}: the {which} rounds have no value of it; choose another measure"
        )
    table = PaperTable(grid.rows, grid.columns, shown, cells, interval)
    few = test == "seeds" and _fewest_common_seeds(table) < FEWEST_SEEDS
    table.interval |= few
    table.caption = [_spread(table), rounds]
    if left_out:  # such as the loss of a run that diverged
        table.caption.append(f"Left out, without a finite value: {', '.join(dict.fromkeys(left_out))}.")
    _rank(table)
    if few:
        table.caption.append(f"Not tested: a paired test over seeds needs at least {FEWEST_SEEDS} seeds.")
    elif test is not None:
        table.caption += _test(table, grid, test, against)
    return table


def _values(runs: Sequence[Run], measure: Quantity, which: Which, by: Quantity) -> dict[int, float]:
    found = {}
    for run in runs:
        record = best_evaluation(run, by) if which == "best" else None
        value = value_in(run, measure.name, record)
        if value is not None and np.isfinite(value):
            found[run.seed] = value
    return found


def _fewest_common_seeds(table: PaperTable) -> int:
    """Return the smallest number of seeds that all rows of a column have, over columns and measures."""
    seeds: dict[tuple[str, str], list[set[int]]] = {}
    for (_, column, measure), cell in table.cells.items():
        seeds.setdefault((column, measure), []).append(set(cell.values))
    return min(len(set.intersection(*each)) for each in seeds.values())


def _spread(table: PaperTable) -> str:
    """Return the caption's sentence about means and what ± is."""
    numbers = sorted({len(cell.values) for cell in table.cells.values()})
    over = f"{numbers[0]} to {numbers[-1]} seeds" if numbers[1:] else f"{numbers[0]} seeds"
    if numbers[-1] == 1:
        return "Results of one seed."
    if table.interval:
        return f"Mean ± half the width of the 95% confidence interval (Student's t) over {over}."
    return f"Mean ± sample standard deviation (n − 1) over {over}."


def _rank(table: PaperTable) -> None:
    """Rank the rows of each column by the means as they are shown, so that equal numbers have equal ranks."""
    for column in table.columns:
        for measure in table.measures:
            cells = [cell for row in table.rows if (cell := table.cells.get((row, column, measure.name)))]
            if measure.lower is None or len(cells) < 2:
                continue
            shown = [round(measure.scale * cell.mean, measure.digits) for cell in cells]
            order = sorted(set(shown), reverse=not measure.lower)
            for cell, value in zip(cells, shown, strict=True):
                if value in order[:2] and (value == order[0] or len(cells) > 2):
                    cell.rank = 1 + order.index(value)
    ranks = {cell.rank for cell in table.cells.values()}
    if 1 in ranks:
        table.ranked = "Bold: best; underlined: second best." if 2 in ranks else "Bold: best."


def _test(table: PaperTable, grid: Grid, test: Test, against: str | None) -> list[str]:
    """Test every row against the reference in each column; return the caption's sentences."""
    pairs: list[Pairs] = []
    comparisons: list[int] = []
    for column in table.columns:
        for measure in table.measures:
            found = _compare(table, grid, column, measure, test, against)
            pairs += found
            comparisons += [len(found)] if found else []
    if not pairs:
        return ["Not tested: no two rows have values of a measure that can be paired."]
    reference = f"the best row{' of its column' if table.columns[1:] else ''}" if against is None else against
    unit = " and ".join(dict.fromkeys(one.unit for one in pairs))
    numbers = sorted({len(one.one) for one in pairs})
    count = f"{numbers[0]} to {numbers[-1]}" if numbers[1:] else str(numbers[0])
    several = any(len(cell.values) > 1 for cell in table.cells.values())
    averaged = " (averaged over seeds)" if unit == "clients" and several else ""
    most = max(comparisons)
    each = " in each column" if len(comparisons) > 1 else ""
    sentences = [
        f"*: differs from {reference} (p < {LEVEL}; two-sided Wilcoxon signed-rank test over {count} {unit}{averaged}; "
        f"Holm's correction for {most} comparison{'s' if most > 1 else ''}{each})."
    ]
    if test == "clients":
        untested = [m.title for m in table.measures if m.clients is None]
        sentences += [f"Not tested: {', '.join(untested)}."] if untested else []
    if (least := smallest_p(numbers[0], most)) >= LEVEL:
        sentences.append(f"With {numbers[0]} pairs and {most} comparisons, no p below {least:.2g} is possible.")
    return sentences


def _compare(
    table: PaperTable, grid: Grid, column: str, measure: Quantity, test: Test, against: str | None
) -> list[Pairs]:
    """Test one measure in one column and store p-values in its cells; return the pairs of each comparison."""
    cells = {row: cell for row in table.rows if (cell := table.cells.get((row, column, measure.name)))}
    if test == "clients" and measure.clients is None:
        return []
    if measure.lower is None if against is None else against not in cells:
        return []
    pick = min if measure.lower else max
    reference = against if against is not None else pick(cells, key=lambda row: cells[row].mean)
    cells[reference].reference = True
    found: dict[str, Pairs] = {}
    for row, cell in cells.items():
        if row == reference:
            continue
        if test == "clients":
            assert measure.clients is not None
            one = client_pairs(grid.cells[row, column], grid.cells[reference, column], measure.clients)
        else:
            one = seed_pairs(cell.values, cells[reference].values)
        if one.one:
            found[row] = one
    p_values = {row: signed_rank(one.one, one.other) for row, one in found.items()}
    for row, corrected in holm(p_values).items():
        cells[row].p, cells[row].corrected, cells[row].pairs = p_values[row], corrected, len(found[row].one)
    return list(found.values())
