"""docs/reproduction.md, out of the tables and the stored results: `fedloom reproduce --report`."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from fedloom.studies.comparison import Line, compared, order, setting_in_words
from fedloom.studies.results import CellResult, stored
from fedloom.studies.table import PAPERS, Cell, Table, cells_of, load_table, table_names

HEAD = """\
# The papers' tables, run

Made by `fedloom reproduce --report` out of the tables in `fedloom/studies/recipes` (settings, the papers' figures) and
the results in `docs/reproduction` (a small file for each run). Accuracies in percent; "difference" is ours less the
paper's. Where a run was shorter or smaller than the paper's, or its setting is one of ours, its row says so, and it is
no result of the paper's setting. A cell is run by the command of its column with its method added,
`--methods fedavg`; what is stored already needs `--again`.
"""


def report(folder: Path) -> str:
    """The whole page."""
    results = {paper: stored(folder, paper) for paper in PAPERS}
    tables = {name: load_table(name) for name in table_names()}
    lines = {name: compared(cells_of(name, table), results[name.partition("/")[0]]) for name, table in tables.items()}
    text = [HEAD, *_overview(tables, lines)]
    for name, table in tables.items():
        text += ["", *_section(name, table, lines[name])]
    return "\n".join([*text, "", PICTURES])


def _overview(tables: dict[str, Table], lines: dict[str, list[Line]]) -> Iterator[str]:
    yield "| table | what | cells | run | within 2 points of the paper, or better |"
    yield "|---|---|---|---|---|"
    for name, table in tables.items():
        run = [line for line in lines[name] if line.here is not None]
        judged = [line.near for line in run if line.near is not None and not (line.changes or line.cell.ours)]
        near = f"{sum(judged)} of {len(judged)}" if judged else ""
        short = sum(bool(line.changes) for line in run)
        some = f"{len(run)}" + (f" ({short} shortened)" if short else "") if run else "not run yet"
        what = table.title.partition(": ")[2]
        yield f"| [{name}](#{_anchor(table.title)}) | {what} | {len(lines[name])} | {some} | {near} |"


def _section(name: str, table: Table, lines: list[Line]) -> Iterator[str]:
    yield f"## {table.title}"
    yield ""
    yield f"`fedloom reproduce {name}`. {table.setting}"
    if table.deviations:
        yield ""
        yield from (f"- {text}" for text in table.deviations)
    for note in table.notes:
        yield ""
        yield f"**Note.** {note}"
    columns = [list(group) for _, group in groupby(lines, key=lambda line: line.cell.place)]
    for column in (c for c in columns if any(line.results for line in c)):
        yield ""
        yield from _column(column)
    if waiting := [c for c in columns if not any(line.results for line in c)]:
        yield ""
        yield from _not_run(waiting)


def _column(lines: list[Line]) -> Iterator[str]:
    cell = lines[0].cell
    yield f"**{_titled(cell)}**: `{shlex.join(command(cell)[:-2])}`"
    yield ""
    yield "| method | paper | here | difference | setting | seeds | seconds | machine |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in lines:
        yield _row(line)
    if verdict := order([line for line in lines if line.results]):
        yield ""
        yield verdict


def _row(line: Line) -> str:
    paper = _number(line.cell.printed)
    if not line.results:
        return f"| {line.cell.name} | {paper} | {setting_in_words(line)} | | | | | |"
    spread = f" ± {line.spread:.2f}" if line.spread is not None else ""
    here = f"{line.here:.2f}{spread}" if line.here is not None else "not reached"
    difference = f"{line.difference:+.2f}" if line.difference is not None else ""
    seeds = ", ".join(str(r.seed) for r in line.results)
    took = ", ".join(f"{r.seconds:.0f}" + (f" ({r.beside} runs at once)" if r.beside > 1 else "") for r in line.results)
    machines = ", ".join(dict.fromkeys(_computer(r) for r in line.results))
    shortened = " ".join(flags(line.changes, line.cell))
    setting = setting_in_words(line) + (f" (`{shortened}`)" if shortened else "")
    return f"| {line.cell.name} | {paper} | {here} | {difference} | {setting} | {seeds} | {took} | {machines} |"


def _computer(result: CellResult) -> str:
    precision = result.engine.get("precision", "")
    return f"{result.machine} {precision}".strip()


def _not_run(columns: list[list[Line]]) -> Iterator[str]:
    """The paper's figures alone."""
    yield "Not run yet (the paper's figures):"
    yield ""
    columns = [[line for line in column if not (line.cell.ours and line.cell.printed is None)] for column in columns]
    names = list(dict.fromkeys(line.cell.name for column in columns for line in column))
    printed = [{line.cell.name: _number(line.cell.printed) for line in column} for column in columns]
    yield "| | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for column, figures in zip(columns, printed, strict=True):
        yield f"| {_titled(column[0].cell)} | " + " | ".join(figures.get(name, "") for name in names) + " |"


def command(cell: Cell) -> list[str]:
    """The one line that runs a cell; the method is its last word."""
    at = ",".join(f"{axis}={value}" for axis, value in cell.column.at.items())
    return ["fedloom", "reproduce", cell.table, "--at", at, "--methods", cell.row]


def flags(changes: Mapping[str, Any], cell: Cell) -> list[str]:
    """What the command has besides for a shortened run."""
    if not changes:
        return []
    only_rounds = set(changes) == {"training.rounds"}
    return ["--scale", f"{changes['training.rounds'] / cell.rounds:g}"] if only_rounds else ["--reduced"]


def _titled(cell: Cell) -> str:
    return ", ".join(v if isinstance(v, str) else f"{axis} = {v:g}" for axis, v in cell.column.at.items())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _anchor(title: str) -> str:
    kept = (c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    return "".join(kept)


def chosen_lines(cells: Iterable[Cell], results: Path) -> list[Line]:
    """Some cells with what is stored of them."""
    cells = list(cells)
    found = [result for paper in dict.fromkeys(cell.paper for cell in cells) for result in stored(results, paper)]
    return compared(cells, found)


PICTURES = """\
## Figures that are pictures

`fedloom reproduce` leaves its runs in `runs/reproduce/PAPER`; a report draws what the papers draw of theirs (names of runs end in the
recipe's key and the seed).

| figure | drawn by |
|---|---|
| RepPer, Fig. 1: t-SNE of four methods' representations | `fedloom reproduce repper/table2 --only cifar10 --alpha 0.5 --methods fedavg,lgfedavg,fedrep,repper`, then `fedloom report runs/reproduce/repper` (Representations) |
| RepPer, Fig. 4: t-SNE, global and clients' | `fedloom report` of the RepPer run alone |
| RepPer, Fig. 5: two clients class by class | the same report as Fig. 1 (Classes) |
| RepPer, Fig. 6: 20 newcomers of CIFAR-10 on representations of CIFAR-100 | `fedloom reproduce repper/table2 --only cifar100 --alpha 1`, then for each run `fedloom newcomers RUN --data cifar10 --clients 20 --partition dirichlet:1 --heads linear` |
| RepPer, Fig. 3; FedIntR, Fig. 3; FedStyle, Fig. 5: who holds what | `fedloom data plot --data cifar10 --clients 20 --partition dirichlet:0.5`; every report has it too |
| FedCRL, Fig. 4: t-SNE of FedAvg and FedCRL | `fedloom reproduce fedcrl/table2 --only cifar10 --at kind=practical --methods fedavg,fedcrl`, then `fedloom report runs/reproduce/fedcrl` |
| FedStyle, Fig. 4: t-SNE of style features | `fedloom reproduce fedstyle/table1-simclr --first --methods fedstyle`, then `fedloom report` of the run (Styles) |
"""  # noqa: E501
