"""Output of `fedloom reproduce`: tables with the published figures, plans, costs, JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table as Grid

from fedloom.cli.base import err, out, say

if TYPE_CHECKING:
    from fedloom.studies.comparison import Line
    from fedloom.studies.order import Pair
    from fedloom.studies.plan import StudyPlan
    from fedloom.studies.schema import Table
    from fedloom.studies.selection import Selection
    from fedloom.studies.table import Cell
    from fedloom.studies.workload import Workload


def show_lines(tables: Mapping[str, Table], lines: Sequence[Line]) -> None:
    """Print each column as a table with the order of its methods, then the number of cells that agree."""
    from fedloom.studies.code import note
    from fedloom.studies.comparison import by_column, setting_in_words
    from fedloom.studies.order import pairs, verdicts_in_words
    from fedloom.studies.report import command

    for name, of_table in groupby(lines, key=lambda line: line.cell.table):
        out.print(f"\n[bold]{tables[name].title}[/bold]", highlight=False)
        for column in by_column(of_table):
            grid = Grid(title=column[0].cell.place, title_justify="left")
            for head in ("method", "paper", "here", "difference", "verdict", "setting"):
                grid.add_column(head, justify="right" if head in ("paper", "here", "difference") else "left")
            for line in column:
                figures = (line.cell.printed, line.here, line.difference)
                paper, here, difference = ("–" if value is None else f"{value:.2f}" for value in figures)
                here += "" if line.spread is None else f" ± {line.spread:.2f}"
                seeds = f", {len(line.results)} seeds" if len(line.results) > 1 else ""
                grid.add_row(line.cell.name, paper, here, difference, line.verdict, setting_in_words(line) + seeds)
            out.print(grid)
            say(shlex.join(command(column[0].cell)[:-2]))
            if words := verdicts_in_words(pairs(column)):
                say(words)
            for text in note(column):
                say(text)
        for text in tables[name].deviations:
            say(f"- {text}")
    say(f"\n{_counted(lines)}")


def _counted(lines: Sequence[Line]) -> str:
    from fedloom.studies.comparison import count_in_words, tally

    found = tally(lines)
    words = [f"{found.run} of {found.cells} cells were run"]
    if found.paper.judged:
        agree = f"{found.paper.within} of {found.paper.judged} agree (within 2 points, above or below)"
        words.append(f"in the paper's setting {agree}, {found.paper.above} above, {found.paper.below} below")
    words += [f"in another setting {count_in_words(found.ours)}"] * bool(found.ours.run)
    words += [f"shortened {count_in_words(found.shortened)}"] * bool(found.shortened.run)
    return "; ".join(words) + "."


def lines_as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """Return cells, agreement counts and the order of methods in each column, for JSON."""
    from fedloom.studies.comparison import by_column, tally
    from fedloom.studies.order import pairs

    return {
        "cells": [_line_as_json(line) for line in lines],
        "summary": asdict(tally(lines)),
        "pairs": [_pair_as_json(pair) for column in by_column(lines) for pair in pairs(column)],
    }


def _line_as_json(line: Line) -> dict[str, Any]:
    from fedloom.studies import report
    from fedloom.studies.code import outdated

    cell = line.cell
    return {
        "table": cell.table, "column": cell.column.at, "row": cell.row, "measure": cell.measure, "paper": cell.printed,
        "here": line.here, "spread": line.spread, "difference": line.difference, "verdict": line.verdict,
        "apart": line.apart, "ours": cell.ours, "changes": dict(line.changes),
        "seeds": [result.seed for result in line.results], "outdated": outdated(line),
        "command": shlex.join([*report.command(cell), *report.flags(line.changes, cell)]),
    }  # fmt: skip


def _pair_as_json(pair: Pair) -> dict[str, Any]:
    cell = pair.better.cell
    return {
        "table": cell.table, "column": cell.column.at, "better": cell.row, "worse": pair.worse.cell.row,
        "paper": pair.printed, "here": pair.here, "interval": pair.interval, "verdict": pair.verdict,
        "apart": pair.better.apart or pair.worse.apart,
    }  # fmt: skip


def show_plan(plan: StudyPlan, run: Sequence[Cell]) -> None:
    """Print a run's command, the figures that it gives, its cost and its recipe."""
    from fedloom.studies import report
    from fedloom.studies.comparison import changes_in_words
    from fedloom.studies.plan import recipe_of, values_of
    from fedloom.studies.workload import cost_of

    recipe, is_trial = recipe_of(run[0], plan)
    line = [*report.command(run[0]), *report.flags(plan.changes(run[0]), run[0]), "--seed", str(plan.seed)]
    say(f"# {shlex.join(line)}")
    others = [f"{cell.table} {cell.place} {cell.row} ({cell.measure})" for cell in run]
    say(f"# figures: {'; '.join(others)}")
    words = changes_in_words(plan.changes(run[0]), run[0])
    for text in ([f"changed: {words}"] if words else []) + (["a trial: not stored"] if is_trial else []):
        say(f"# {text}")
    say(f"# {cost_of(values_of(run[0], plan)).steps / 1e6:.1f} million image-steps")
    say(recipe.to_yaml())


def show_list(tables: Mapping[str, Table], cells: Sequence[Cell], plan: StudyPlan, measure: bool) -> None:
    """Print every table's cells, runs, million image-steps, time on this machine and stored results."""
    from fedloom.studies.comparison import compared, tally
    from fedloom.studies.plan import runs_of, values_of
    from fedloom.studies.results import stored
    from fedloom.studies.workload import cost_of, duration_in_words, speeds, this_machine

    results = {paper: stored(plan.results, paper) for paper in dict.fromkeys(cell.paper for cell in cells)}
    known = speeds(result for of_paper in results.values() for result in of_paper)
    here = this_machine(values_of(cells[0], plan))
    if measure:
        known |= _measured(cells, plan, here)
    rows = []
    for name, table in tables.items():
        mine = [cell for cell in cells if cell.table == name]
        if not mine:
            continue
        costs = [cost_of(values_of(run[0], plan)) for run in runs_of(mine)]
        steps = sum(cost.steps for cost in costs) / 1e6
        times = [cost.seconds(known, here) for cost in costs]
        sure = [t for t in times if t is not None]
        took = "–" if not sure else duration_in_words(sum(sure))
        took += "" if len(sure) in (0, len(times)) else f" ({len(sure)} runs)"
        done = tally(compared(mine, results[mine[0].paper]))
        words = f"{done.paper.run or done.ours.run} of {done.cells}"
        words += f", {done.shortened.run} shortened" if done.shortened.run else ""
        what = table.title.partition(": ")[2]
        rows.append((name, str(len(costs)), f"{steps:,.0f}", took, words, what))
    timed = any(row[3] != "–" for row in rows)
    grid = Grid()
    for head in ("table", "runs", "M steps", *(["time here"] if timed else []), "cells run", "what"):
        left, wraps = head in ("table", "what"), head in ("cells run", "what")
        grid.add_column(head, justify="left" if left else "right", no_wrap=not wraps, min_width=9 if wraps else None)
    for row in rows:
        grid.add_row(*(row if timed else row[:3] + row[4:]))
    out.print(grid)
    time = (
        "Time here: from the speed of runs with the same network on this machine, one at a time (–: unknown; --measure "
        "times it)."
        if timed
        else "--measure adds the time that runs take on this machine."
    )
    steps_are = "M steps: million images forward and backward through the network; evaluation is not counted."
    out.print(f"{steps_are} {time}", highlight=False)


def draw_figures(selection: Selection, is_named: bool, results: Path, report: Path) -> None:
    """Draw the pictures of some tables from stored results; print the files, and what lacks results.

    Args:
        selection: The tables.
        is_named: Whether the user named them: then tables that declare no picture are drawn too, as curves by round.
        results: Folder of new results; those of the package are always read.
        report: File of the report, which the folder of the pictures belongs to.
    """
    from fedloom.studies.pictures import FOLDER, write_pictures
    from fedloom.studies.report import chosen_lines
    from fedloom.studies.table import cells_of

    tables = {name: table for name, table in selection.load().items() if is_named or table.pictures}
    cells = [cell for name, table in tables.items() for cell in cells_of(name, table)]
    written, lacking = write_pictures(tables, chosen_lines(cells, results), report.with_suffix("") / FOLDER)
    for path in written:
        say(f"written: {path}")
    for text in lacking:
        say(f"not drawn: {text}", err)


def _measured(cells: Sequence[Cell], plan: StudyPlan, here: str) -> dict[Workload, float]:
    """Measure the speed of this machine with each network of these cells."""
    from fedloom.studies.cost import measured_speed
    from fedloom.studies.plan import recipe_of, runs_of, values_of
    from fedloom.studies.workload import cost_of

    known: dict[Workload, float] = {}
    for run in runs_of(cells):
        cost = cost_of(values_of(run[0], plan))
        if (kind := (here, cost.network, cost.size)) not in known:
            known[kind] = measured_speed(recipe_of(run[0], plan)[0])
            say(f"{cost.network}: {known[kind]:,.0f} images a second", err)
    return known
