"""docs/reproduction.md, out of the tables and the stored results: `fedloom reproduce --report`."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from fedloom.studies.comparison import Count, Line, compared, count_in_words, setting_in_words, tally
from fedloom.studies.order import in_words, pairs
from fedloom.studies.results import CellResult, stored
from fedloom.studies.table import PAPERS, Cell, Table, cells_of, load_table, table_names

HEAD = """\
# The papers' tables, run

Made by `fedloom reproduce --report` out of the tables in `fedloom/studies/recipes` (settings, the papers' figures) and
the results in `docs/reproduction` (a small file for each run). Accuracies in percent; "difference" is ours less the
paper's. A cell is run by the command of its column with its method added, `--methods fedavg`; what is stored already
needs `--again`.
"""

COUNTING = """\
A figure **agrees** where it is within 2 points of the paper's, to either side; otherwise it is **above** or **below**.
Where a run was shorter or smaller than the paper's, or its setting is one of ours, its row says so, and it is counted
apart: it is no result of the paper's setting. A pair of methods is **confirmed** or **contradicted** where the 95%
interval of their difference over seeds (Student's t, unequal variances) lies on the paper's side of 0, or on the other
side; it is **open** where the interval contains 0 and where one of the two has a single seed. A figure that stands in
several tables is counted in each.
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
    yield "## Summary"
    yield ""
    yield COUNTING
    head = (
        "cells | run | agree | above | below | in a setting of ours | shortened | confirmed, contradicted, open pairs"
    )
    yield f"| paper | {head} |"
    yield "|---" * 9 + "|"
    for paper in PAPERS:
        of_it = [line for name in tables if name.startswith(f"{paper}/") for line in lines[name]]
        yield f"| {tables[of_it[0].cell.table].title.partition(',')[0]} | {_counted(of_it)} |"
    every = [line for of_table in lines.values() for line in of_table]
    run = {(line.cell.key, line.cell.measure, line.cell.column.round) for line in every if line.here is not None}
    yield f"| all | {_counted(every)} |"
    yield ""
    yield f"The cells that were run hold {len(run)} different figures. Table by table:"
    yield ""
    yield f"| table | what | {head} |"
    yield "|---" * 10 + "|"
    for name, table in tables.items():
        what = table.title.partition(": ")[2]
        yield f"| [{name}](#{_anchor(table.title)}) | {what} | {_counted(lines[name])} |"


def _counted(lines: list[Line]) -> str:
    """The numbers of a row of the summary."""
    found = tally(lines)
    if not found.any_run:
        return f"{found.cells} | not run yet | | | | | | "
    paper = found.paper
    verdicts = [f"{paper.within} of {paper.judged}", f"{paper.above}", f"{paper.below}"] if paper.judged else [""] * 3
    order = [pair.verdict for column in by_column(line for line in lines if not line.apart) for pair in pairs(column)]
    kinds = ", ".join(str(order.count(kind)) for kind in ("confirmed", "contradicted", "open")) if order else ""
    return " | ".join(map(str, [found.cells, found.run, *verdicts, _apart(found.ours), _apart(found.shortened), kinds]))


def _apart(count: Count) -> str:
    return count_in_words(count) if count.run else ""


def by_column(lines: Iterable[Line]) -> list[list[Line]]:
    """Lines that follow each other in the same column of the same table."""
    return [list(group) for _, group in groupby(lines, key=lambda line: (line.cell.table, line.cell.place))]


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
    columns = by_column(lines)
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
    yield "| method | paper | here | difference | verdict | setting | seeds | seconds | machine |"
    yield "|---" * 9 + "|"
    for line in lines:
        yield _row(line)
    if words := in_words(pairs(lines)):
        yield ""
        yield words


def _row(line: Line) -> str:
    paper = _number(line.cell.printed)
    if not line.results:
        return f"| {line.cell.name} | {paper} | {setting_in_words(line)} | | | | | | |"
    spread = f" ± {line.spread:.2f}" if line.spread is not None else ""
    here = f"{line.here:.2f}{spread}" if line.here is not None else "not reached"
    difference = f"{line.difference:+.2f}" if line.difference is not None else ""
    seeds = ", ".join(str(r.seed) for r in line.results)
    took = ", ".join(f"{r.seconds:.0f}" + (f" ({r.beside} runs at once)" if r.beside > 1 else "") for r in line.results)
    machines = ", ".join(dict.fromkeys(_computer(r) for r in line.results))
    shortened = " ".join(flags(line.changes, line.cell))
    setting = setting_in_words(line) + (f" (`{shortened}`)" if shortened else "")
    figures = f"{paper} | {here} | {difference} | {line.verdict or ''}"
    return f"| {line.cell.name} | {figures} | {setting} | {seeds} | {took} | {machines} |"


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
