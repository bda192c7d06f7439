"""Generator of docs/reproduction.md and its page for each paper: `fedloom reproduce --report`."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedloom.studies.comparison import Line, by_column, compared, setting_in_words
from fedloom.studies.findings import FINDINGS
from fedloom.studies.order import pairs, verdicts_in_words
from fedloom.studies.pictures import FOLDER, caption, lacks, shown, write_pictures
from fedloom.studies.pictures import SUFFIX as PICTURE
from fedloom.studies.results import CellResult, stored
from fedloom.studies.schema import Picture, Table
from fedloom.studies.summary import by_table, summary, title_of
from fedloom.studies.table import PAPERS, Cell, cells_of, load_table, table_names

PAGE = """\
# Reproduction of {paper}

{finding} See also the [summary of all papers]({summary}).

Accuracies are in percent; "difference" is our figure minus the paper's. To run a cell, add its method to the command of
its column, such as `--methods fedavg`; to repeat a run whose result is stored, add `--again`. Seconds are those of each
run, with its evaluations; "at once" is the number of runs that shared the machine.
"""


def report(folder: Path, file: Path) -> dict[Path, str]:
    """Return the report as Markdown: a summary, and a page for each paper.

    Args:
        folder: The folder of new results, with a subfolder for each paper; those of the package are included.
        file: File of the summary. The pages of the papers are in the folder of the same name, without the suffix.

    Returns:
        The text of each file.
    """
    results = {paper: stored(folder, paper) for paper in PAPERS}
    tables = {name: load_table(name) for name in table_names()}
    lines = {name: compared(cells_of(name, table), results[name.partition("/")[0]]) for name, table in tables.items()}
    every = [result for of_paper in results.values() for result in of_paper]
    found = {file: summary(tables, lines, every, folder, file.stem)}
    for paper in PAPERS:
        own = {name: table for name, table in tables.items() if name.startswith(f"{paper}/")}
        page = PAGE.format(paper=title_of(own, paper), summary=f"../{file.name}", finding=FINDINGS[paper])
        sections = ["\n".join(by_table(own, lines)), *("\n".join(_section(n, t, lines[n])) for n, t in own.items())]
        found[file.with_suffix("") / f"{paper}.md"] = "\n\n".join([page.rstrip(), *sections]) + "\n"
    return found


def write(folder: Path, file: Path) -> list[Path]:
    """Write the report with its pictures, and return the paths of its files."""
    found = report(folder, file)
    for path, text in found.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    tables = {name: load_table(name) for name in table_names() if load_table(name).pictures}
    cells = [cell for name, table in tables.items() for cell in cells_of(name, table)]
    pictures, _ = write_pictures(tables, chosen_lines(cells, folder), file.with_suffix("") / FOLDER)
    return [*found, *pictures]


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
    for picture in table.pictures:
        yield ""
        yield from _picture(picture, name, lines)
    columns = by_column(lines)
    for column in (c for c in columns if any(line.results for line in c)):
        yield ""
        yield from _column(column)
    if waiting := [c for c in columns if not any(line.results for line in c)]:
        yield ""
        yield from _not_run(waiting)


def _picture(picture: Picture, name: str, lines: list[Line]) -> Iterator[str]:
    """Yield a picture with its caption and command, or say that it was not drawn."""
    if not shown(picture, lines):
        run = f"fedloom reproduce {name}"
        yield f"**{picture.title}**: not drawn ({lacks(picture, lines)}). `{run}`, then `{run} --figures`"
        return
    yield f"![{picture.title}]({FOLDER}/{picture.name}{PICTURE})"
    yield ""
    yield f"{caption(picture, lines)} `fedloom reproduce {name} --figures`"


def _column(lines: list[Line]) -> Iterator[str]:
    cell = lines[0].cell
    yield f"**{cell.title}**: `{shlex.join(command(cell)[:-2])}`"
    yield ""
    yield "| method | paper | here | difference | verdict | setting | seeds | seconds | machine |"
    yield "|---" * 9 + "|"
    for line in lines:
        if line.results:
            yield _row(line)
    if waiting := [line for line in lines if not line.results]:
        yield ""
        yield "; ".join(_waiting(waiting)) + "."
    if words := verdicts_in_words(pairs(lines)):
        yield ""
        yield words


def _row(line: Line) -> str:
    paper = _number(line.cell.printed)
    spread = f" ± {line.spread:.2f}" if line.spread is not None else ""
    here = f"{line.here:.2f}{spread}" if line.here is not None else "not reached"
    difference = f"{line.difference:+.2f}" if line.difference is not None else ""
    seeds = ", ".join(str(r.seed) for r in line.results)
    took = ", ".join(f"{r.seconds:.0f}" for r in line.results)
    beside = sorted({r.beside for r in line.results if r.beside > 1})
    took += f" ({' to '.join(map(str, beside[:: len(beside) - 1 or 1]))} at once)" if beside else ""
    machines = ", ".join(dict.fromkeys(_computer(r) for r in line.results))
    shortened = " ".join(flags(line.changes, line.cell))
    setting = setting_in_words(line) + (f" (`{shortened}`)" if shortened else "")
    figures = f"{paper} | {here} | {difference} | {line.verdict or ''}"
    return f"| {line.cell.name} | {figures} | {setting} | {seeds} | {took} | {machines} |"


def _waiting(lines: list[Line]) -> Iterator[str]:
    """Yield the methods of a column that were not run, with the paper's figures; variants of ours apart."""
    for words, ours in (("Not run yet (the paper's figures)", False), ("Not run yet (variants of ours)", True)):
        names = [
            f"{line.cell.name} {'' if ours or line.cell.printed is None else _number(line.cell.printed)}".rstrip()
            for line in lines
            if line.cell.ours == ours
        ]
        if names:
            yield f"{words}: {', '.join(names)}"


def _computer(result: CellResult) -> str:
    precision = result.engine.get("precision", "")
    return f"{result.machine} {precision}".strip()


def _not_run(columns: list[list[Line]]) -> Iterator[str]:
    """Yield a table of the paper's figures only, or the names of the columns if the paper prints none."""
    if all(line.cell.printed is None for column in columns for line in column):
        yield f"Not run yet: {'; '.join(column[0].cell.title for column in columns)}."
        return
    yield "Not run yet (the paper's figures):"
    yield ""
    columns = [[line for line in column if not (line.cell.ours and line.cell.printed is None)] for column in columns]
    names = list(dict.fromkeys(line.cell.name for column in columns for line in column))
    printed = [{line.cell.name: _number(line.cell.printed) for line in column} for column in columns]
    yield "| | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for column, figures in zip(columns, printed, strict=True):
        yield f"| {column[0].cell.title} | " + " | ".join(figures.get(name, "") for name in names) + " |"


def command(cell: Cell) -> list[str]:
    """Return the command that runs a cell; the method is its last argument."""
    at = ",".join(f"{axis}={value}" for axis, value in cell.column.at.items())
    return ["fedloom", "reproduce", cell.table, "--at", at, "--methods", cell.row]


def flags(changes: Mapping[str, Any], cell: Cell) -> list[str]:
    """Return the additional flags of the command for a shortened run."""
    if not changes:
        return []
    only_rounds = set(changes) == {"training.rounds"}
    return ["--scale", f"{changes['training.rounds'] / cell.rounds:g}"] if only_rounds else ["--reduced"]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def chosen_lines(cells: Iterable[Cell], results: Path) -> list[Line]:
    """Match some cells with their stored results."""
    cells = list(cells)
    found = [result for paper in dict.fromkeys(cell.paper for cell in cells) for result in stored(results, paper)]
    return compared(cells, found)
