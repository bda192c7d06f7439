"""Leaderboards: the stored results of a table, ranked per column and number of rounds, with what they cost."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean

from fedloom.studies.comparison import Line, changes_in_words
from fedloom.studies.order import TOO_FEW, Pair, pairs
from fedloom.studies.results import CellResult
from fedloom.studies.schema import BEST, Table
from fedloom.studies.table import Cell

WEIGHTED, MEAN = "personal_weighted", "personal_accuracy"
"""Accuracy over all test samples, that is, weighted by clients' sizes; and the plain mean over clients."""


@dataclass(frozen=True)
class Measure:
    """A column of a leaderboard: its title, what it means, and how it is read from a result."""

    title: str
    help: str
    read: Callable[[CellResult], float | None]
    decimals: int = 2
    figure: str = ""
    """Name of the stored figure; empty for a cost."""

    def of(self, line: Line) -> float | None:
        """Return the mean over the seeds of a line; None if it was not measured."""
        values = [self.read(result) for result in line.results]
        known = [value for value in values if value is not None]
        return mean(known) if known else None

    def text(self, line: Line) -> str:
        """Return the mean as text; empty if it was not measured."""
        value = self.of(line)
        return "" if value is None else f"{value:,.{self.decimals}f}"


def _figure(name: str, title: str, help: str) -> Measure:
    def read(result: CellResult) -> float | None:
        return None if (value := result.figures.get(name)) is None else 100 * value

    return Measure(title, help, read, figure=name)


def _cost(name: str, unit: float) -> Callable[[CellResult], float | None]:
    return lambda result: None if (value := result.costs.get(name)) is None else value / unit


MEASURES = (
    _figure(WEIGHTED + BEST, "best, all samples", "accuracy over all test samples, at its best round"),
    _figure(WEIGHTED, "last, all samples", "accuracy over all test samples, after the last round"),
    _figure(MEAN + BEST, "best, mean", "mean over clients of their accuracies, at its best round"),
    _figure(MEAN, "last, mean", "mean over clients of their accuracies, after the last round"),
    _figure("personal_std", "spread", "standard deviation over clients, after the last round"),
    _figure("personal_worst", "worst tenth", "mean of the worst tenth of the clients, after the last round"),
    Measure("MB up", "megabytes that a client sends per round", _cost("up_bytes", 1e6)),
    Measure("MB down", "megabytes that a client receives per round", _cost("down_bytes", 1e6)),
    Measure("s/round", "seconds per round with its evaluation, median", _cost("round_seconds", 1)),
    Measure("s in all", "seconds of the run", lambda result: result.seconds or None, 1),
    Measure("GPU GB", "peak of the GPU memory that the run reserved", _cost("gpu_bytes", 1e9)),
)
"""The columns of a leaderboard after the published figure. Accuracies are in percent; all are means over seeds."""


@dataclass(frozen=True)
class Standing:
    """A ranked list of methods: one column of a table, after the same number of rounds."""

    column: str
    rounds: int
    changes: str
    """What differs from the table's setting, in words: `300 of 2000 rounds`; empty if nothing does."""
    lines: tuple[Line, ...]
    """The methods with results, the best by the table's measure first."""

    @property
    def title(self) -> str:
        """Column and rounds: `cifar100, dir0.1: 300 rounds`."""
        return f"{self.column}: {self.rounds:,} round{'s' * (self.rounds != 1)}"

    @property
    def measures(self) -> list[Measure]:
        """The columns that were measured, after the measure that is compared if it is none of them."""
        measured = [m for m in MEASURES if any(m.of(line) is not None for line in self.lines)]
        compared = self.lines[0].cell.measure
        own = [_figure(compared, compared, "the measure that methods are ranked by")]
        return measured if compared in {m.figure for m in measured} else own + measured

    @property
    def pairs(self) -> list[Pair]:
        """Pairs of methods whose published figures differ."""
        return pairs(self.lines)

    @property
    def seconds(self) -> float:
        """Seconds of all runs, each divided by the number of runs that shared the machine."""
        return sum(result.seconds / result.beside for line in self.lines for result in line.results)

    @property
    def machines(self) -> list[str]:
        """The machines that the runs were done on."""
        return list(dict.fromkeys(result.machine for line in self.lines for result in line.results))


def standings(cells: Iterable[Cell], results: Sequence[CellResult]) -> list[Standing]:
    """Rank the methods of each column, separately for each number of rounds and each change of the setting.

    Args:
        cells: Cells of one table, column by column.
        results: Stored results.

    Returns:
        The standings in the order of the columns, those with most rounds first. Columns without results are left out.
    """
    found: list[Standing] = []
    for _, group in groupby(cells, key=lambda cell: cell.place):
        column = list(group)
        of_column = [result for result in results if result.of in {cell.key for cell in column}]
        settings = sorted({(result.rounds, repr(result.changes)) for result in of_column}, reverse=True)
        for rounds, changes in settings:
            alike = [r for r in of_column if (r.rounds, repr(r.changes)) == (rounds, changes)]
            lines = [Line(cell, tuple(r for r in alike if r.of == cell.key)) for cell in column]
            ranked = sorted((line for line in lines if line.here is not None), key=lambda line: -(line.here or 0))
            if ranked:
                words = changes_in_words(alike[0].changes, column[0])
                found.append(Standing(column[0].title, rounds, words, tuple(ranked)))
    return found


def order_in_words(standing: Standing) -> list[str]:
    """Compare the order of methods with the published one, pair by pair, and name the contradictions.

    Returns:
        The counts, and one line for each pair whose order is reversed here, the largest published difference first.
        Empty without published figures.
    """
    found = standing.pairs
    if not found:
        return []
    against = sorted((pair for pair in found if pair.here < 0), key=lambda pair: -pair.printed)
    verdicts = [pair.verdict for pair in found]
    alone = sum(pair.interval is None for pair in found)
    same = sum(pair.here > 0 for pair in found)
    text = f"Order, over pairs of methods with different published figures ({len(found)}): {same} the same here, "
    text += f"{len(against)} reversed. By 95% intervals over seeds: {verdicts.count('confirmed')} confirmed, "
    text += f"{verdicts.count('contradicted')} contradicted, {verdicts.count('open')} open ({alone} with "
    text += f"{TOO_FEW})."
    return [text, *map(_contradiction, against)]


def _contradiction(pair: Pair) -> str:
    how = {"contradicted": "contradicted", "open": "reversed, but open over seeds", "confirmed": ""}[pair.verdict]
    return (
        f"{pair.better.cell.name} is published {pair.printed:.2f} above {pair.worse.cell.name}; here it is "
        f"{-pair.here:.2f} below ({how})"
    )


def best_rounds(line: Line) -> str:
    """Return the best rounds of a line's seeds by the measure that is compared, such as `212, 287`."""
    known = [result.best.get(line.cell.measure) for result in line.results]
    return ", ".join(str(value) for value in known if value is not None)


def waiting(cells: Sequence[Cell], results: Sequence[CellResult]) -> dict[str, str]:
    """Return the methods without any result, by the title of the column; `all 39 methods` if none has one."""
    done = {result.of for result in results}
    found: dict[str, str] = {}
    for _, group in groupby(cells, key=lambda cell: cell.place):
        column = list(group)
        left = [cell.name for cell in column if cell.key not in done]
        if left:
            found[column[0].title] = f"all {len(left)} methods" if len(left) == len(column) else ", ".join(left)
    return found


def published_name(table: Table) -> str:
    """Return who published the figures that stand beside ours: the title up to the colon; empty without a source."""
    return table.title.partition(":")[0] if table.source else ""
