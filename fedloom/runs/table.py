"""`fedloom.table`: results of runs as a table."""

import re
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from fedloom.core.errors import UserError
from fedloom.report.paper.formats import FORMATS, as_records
from fedloom.report.paper.grid import arrange, finished_runs
from fedloom.report.paper.measures import Which
from fedloom.report.paper.table import Test, paper_table
from fedloom.report.table import comparison_table
from fedloom.runs.frames import table_frame
from fedloom.runs.result import Run

if TYPE_CHECKING:
    from pandas import DataFrame

Source = str | Path | Mapping[str, Any]
"""A run folder, a folder with runs below it, or a summary or `Run`, whose `run_dir` names its folder."""
MEASURES = ("personal_accuracy",)


def table(
    runs: Source | Iterable[Source],
    *,
    format: str = "text",
    measures: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    round: Which = "last",
    interval: bool = False,
    test: Test | None = None,
    against: str | None = None,
    digits: int | None = None,
    label: str = "tab:results",
) -> "str | DataFrame":
    r"""Return a results table of runs: methods in rows, means over seeds, ± the sample standard deviation.

    Summaries without any further argument give an overview: accuracies, spread over clients, traffic, seconds.

    Args:
        runs: Run folders, folders of comparisons or sweeps, or the result of `run`, `compare` or `sweep`.
        format: `text`, `markdown`, `latex` (for the package booktabs), `csv`, `json` or `frame` (pandas). The last
            three have a row per cell and measure with unrounded values.
        measures: Fields of summary.json or metrics.jsonl, such as `personal_worst` or `personal_auc`. Default:
            `personal_accuracy`.
        columns: Recipe fields that distinguish columns. Default: `data.name` if it differs.
        rows: Recipe fields that distinguish rows. Default: the method, and the settings in which its runs differ.
        seeds: Seeds to include. Default: all.
        round: `last`: the summary, by `evaluation.summary`. `best`: the round that is best on validation samples;
            without them, the best round on test data, and the caption says so.
        interval: ± is half the width of the 95% confidence interval (Student's t).
        test: Test every row against the reference by Wilcoxon's signed-rank test with Holm's correction, and mark
            significant differences: over pairs of the same `clients`, or of `seeds` (from six seeds on; with fewer,
            intervals are shown and nothing is marked).
        against: The reference row. Default: the best row of each column.
        digits: Number of decimals. Default: one of percentages, three of other figures.
        label: Label of a LaTeX table, for `\ref`.

    Returns:
        The table, with a caption that says how it was computed.

    Raises:
        UserError: A folder holds no finished run, an argument is invalid, or runs cannot be paired.

    Example:
        >>> print(fedloom.table(fedloom.compare("demo")))   # doctest: +SKIP
        >>> print(fedloom.table("runs/compared", format="latex", test="clients"))   # doctest: +SKIP
    """
    sources: list[Source] = [runs] if isinstance(runs, str | Path | Mapping) else list(runs)
    _refuse("format", format, (*FORMATS, "frame"))
    _refuse("round", round, get_args(Which))
    _refuse("test", test or "clients", get_args(Test))
    if not re.fullmatch(r"[\w:.+/-]+", label, re.ASCII):
        raise UserError(f"label = '{label}': must consist of letters, digits and : . - _ + /, for example tab:digits")
    asked = (format != "text", measures, columns, rows, seeds, round != "last", interval, test, against, digits)
    summaries: list[Any] = [source for source in sources if isinstance(source, Mapping)]
    if summaries and len(summaries) == len(sources) and all(value is None or value is False for value in asked):
        return _overview(summaries)
    grid = arrange(finished_runs(map(_folder, sources), seeds), rows or (), columns)
    found = paper_table(
        grid, measures or MEASURES, which=round, interval=interval, test=test, against=against, digits=digits
    )
    found.label = label
    return table_frame(as_records(found), " ".join(found.caption)) if format == "frame" else FORMATS[format](found)


def _overview(summaries: list[Any]) -> str:
    console = Console(width=100, file=StringIO())
    # Not read from the file: in a notebook, rich displays output instead of writing it there.
    with console.capture() as captured:
        console.print(comparison_table(summaries))
    return captured.get()


def _folder(source: Source) -> Path:
    if not isinstance(source, Mapping):
        return Path(source)
    if isinstance(source, Run):
        return source.folder
    if "run_dir" not in source:
        raise UserError("runs: a summary has no run_dir, which names its run folder; give the folders themselves")
    return Path(source["run_dir"])


def _refuse(name: str, value: str, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if value not in choices:
        raise UserError(f"{name} = '{value}': must be one of {', '.join(choices)}")
