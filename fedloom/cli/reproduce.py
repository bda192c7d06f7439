"""`fedloom reproduce`: the papers' tables, run, beside the papers' figures."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as Grid

from fedloom.cli import flags
from fedloom.cli.base import app, err, out, say, show_json, watching
from fedloom.core.errors import UserError, nearest
from fedloom.core.signals import Interrupts

if TYPE_CHECKING:
    from fedloom.studies.comparison import Line
    from fedloom.studies.results import CellResult
    from fedloom.studies.running import StudyPlan
    from fedloom.studies.table import Cell, Table

Names = Annotated[list[str] | None, typer.Argument(metavar="TABLE", help="repper/table2, or a paper: fedcrc.")]


@app.command()
def reproduce(
    tables: Names = None,
    only: Annotated[str | None, typer.Option("--only", help="Columns with one of these: cifar10,mnist")] = None,
    at: Annotated[list[str] | None, typer.Option("--at", help="Columns at a place: dataset=cifar10,beta=0.5")] = None,
    alpha: Annotated[str | None, typer.Option("--alpha", help="Short for --at alpha=…")] = None,
    beta: Annotated[str | None, typer.Option("--beta", help="Short for --at beta=…")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Rows: fedavg,repper")] = None,
    first: Annotated[bool, typer.Option("--first", help="Only what is to be run before everything else.")] = False,
    scale: Annotated[float, typer.Option("--scale", help="Share of the rounds; the result says so.")] = 1.0,
    reduced: Annotated[bool, typer.Option("--reduced", help="The table's smaller setting; told as such.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Everything random follows from it.")] = 0,
    engine: flags.Engine = None, data_dir: flags.DataDir = None, set_: flags.Set = None,
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="Runs at a time, each in its own process.")] = 1,
    limit_seconds: Annotated[
        float | None, typer.Option("--limit-seconds", help="Stop between rounds by then; a later call goes on.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also what is stored already.")] = False,
    results: Annotated[Path, typer.Option("--results", help="Where results are stored.")] = Path("docs/reproduction"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print each cell's command and recipe.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Every table: cells, cost, what has been run.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --list: time each network here.")] = False,
    report_: Annotated[bool, typer.Option("--report", help="Write the report of all that is stored.")] = False,
    to: Annotated[Path, typer.Option("--to", help="The report.")] = Path("docs/reproduction.md"),
    as_json: flags.Json = False,
) -> None:  # fmt: skip
    """Run cells of the five papers' tables, and show the papers' figures beside ours.

    Runs are resumable (runs/reproduce); finished ones are stored as small files (docs/reproduction). With --set, what
    differs from the paper's setting is a trial: shown, never stored.

    Examples:

      fedloom reproduce --list --measure

      fedloom reproduce repper/table2 --only cifar10 --alpha 0.5 --methods fedavg,repper --scale 0.5

      fedloom reproduce fedcrc fedintr/table3 --first --parallel 4 --limit-seconds 500 --data-dir ~/data

      fedloom reproduce --report
    """
    from fedloom.studies.report import report
    from fedloom.studies.running import StudyPlan, runs_of

    began = monotonic()
    if report_:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(report(results), encoding="utf-8")
        say(f"written: {to}")
        return
    chosen = _tables(tables or ([] if not list_ and not first else ["all"]))
    cells = _cells(chosen, only, _places(at, alpha=alpha, beta=beta), methods, first)
    fields = flags.fields_of(set_, **{"engine.name": engine, "data.dir": None if data_dir is None else str(data_dir)})
    plan = StudyPlan(
        seed=seed, scale=_share(scale), trial=fields, results=results, again=again,
        deadline=None if limit_seconds is None else began + limit_seconds,
    )  # fmt: skip
    if list_:
        _show_list(chosen, cells, plan, measure)
        return
    plans = [replace(plan, shortened=chosen[c.table].reduced if reduced else {}) for c in cells]
    runs = [(plans[cells.index(run[0])], run) for run in runs_of(cells)]
    if dry_run:
        for one, run in runs:
            _show_plan(one, run)
        return
    found = _run_here(runs) if parallel == 1 else []
    failed = 0 if parallel == 1 else _run_beside(runs, parallel, plan)
    lines = _lines(cells, found, results)
    if as_json:
        show_json({"cells": [_as_json(line) for line in lines]})
    else:
        _show(chosen, lines)
    if failed:
        say("some runs failed: see above", err)
        raise typer.Exit(failed)


def _tables(names: Sequence[str]) -> dict[str, Table]:
    """By name; a paper's name stands for all its tables."""
    from fedloom.studies.table import PAPERS, load_table, table_names

    known = table_names()
    if not names:
        raise UserError("say which table: fedloom reproduce repper/table2; `fedloom reproduce --list` shows all")
    found: dict[str, Table] = {}
    for name in names:
        of_it = known if name == "all" else [k for k in known if k == name or k.startswith(f"{name}/")]
        if not of_it:
            raise UserError(f"table '{name}' is unknown: {nearest(name, [*PAPERS, *known])}")
        found |= {k: load_table(k) for k in of_it}
    return found


def _places(at: Sequence[str] | None, **short: str | None) -> dict[str, set[str]]:
    """`a=1,b=2` → what a column must have."""
    places: dict[str, set[str]] = {axis: set(value.split(",")) for axis, value in short.items() if value is not None}
    for pair in (pair for text in at or [] for pair in text.split(",")):
        axis, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--at {pair}: write axis=value, for example --at dataset=cifar10,beta=0.5")
        places.setdefault(axis, set()).add(value)
    return places


def _cells(
    tables: dict[str, Table], only: str | None, places: dict[str, set[str]], methods: str | None, first: bool
) -> list[Cell]:
    from fedloom.studies.table import cells_of

    every = [cell for name, table in tables.items() for cell in cells_of(name, table)]
    rows = None if methods is None else methods.split(",")
    if rows and (unknown := [row for row in rows if row not in {cell.row for cell in every}]):
        raise UserError(f"--methods {unknown[0]}: {nearest(unknown[0], {cell.row for cell in every})}")
    wanted = None if only is None else set(only.split(","))
    found = [
        cell
        for cell in every
        if (rows is None or cell.row in rows)
        and (wanted is None or wanted & {str(value) for value in cell.column.at.values()})
        and all(str(cell.column.at.get(axis)) in values for axis, values in places.items())
        and (cell.first or not first)
    ]
    if not found:
        columns = "; ".join(dict.fromkeys(cell.place for cell in every[:200]))
        raise UserError(f"--only, --at, --methods: no cell has all of that; columns are {columns}")
    return found


def _share(scale: float) -> float:
    if not 0 < scale <= 1:
        raise UserError(f"--scale {scale:g}: must be above 0 and at most 1, the share of the rounds")
    return scale


def _run_here(runs: list[tuple[StudyPlan, list[Cell]]]) -> list[CellResult]:
    from fedloom.studies.report import command
    from fedloom.studies.running import run_cells

    found = []
    for number, (plan, run) in enumerate(runs):
        if number > 0 and plan.left <= 0:  # the first makes a round in any case, so that every call gets on
            say(f"time is up: {len(runs) - number} runs were not begun", err)
            break
        with watching() as start:
            outcome = run_cells(run, plan, start)
        if outcome.result is None:
            words = f"stopped after round {outcome.round} of {outcome.rounds}; the same command goes on"
            say(f"{' '.join(command(run[0])[2:])}: {words}", err)
        else:
            found.append(outcome.result)
    return found


def _run_beside(runs: list[tuple[StudyPlan, list[Cell]]], many: int, plan: StudyPlan) -> int:
    """Each run by its own command; results come back through their files. The exit code of one that failed, or 0."""
    from fedloom.studies.report import command
    from fedloom.studies.running import recipe_of, run_side_by_side

    if any(recipe_of(run[0], one)[1] for one, run in runs):
        raise UserError("--parallel: a trial (--set of what the figures depend on) is not stored; run it without")
    settings = [f"--set={path}={value}" for path, value in plan.trial.items()]
    commands = []
    for one, run in runs:
        line = [*command(run[0])[1:], "--seed", str(one.seed), "--scale", f"{one.scale}", "--results", str(one.results)]
        line += ["--reduced"] * bool(one.shortened) + ["--again"] * one.again
        commands.append(line + settings)
    with watching(), Interrupts() as interrupts:
        return run_side_by_side(commands, many, plan, interrupts, lambda text: say(text, err))


def _lines(cells: list[Cell], found: list[CellResult], results: Path) -> list[Line]:
    """What has just been run comes before what is stored."""
    from fedloom.studies.comparison import compared
    from fedloom.studies.report import chosen_lines

    fresh = {line.cell: line for line in compared(cells, found) if line.results}
    return [fresh.get(line.cell, line) for line in chosen_lines(cells, results)]


def _show(tables: dict[str, Table], lines: list[Line]) -> None:
    from fedloom.studies.comparison import order, setting_in_words
    from fedloom.studies.report import command

    for name, of_table in groupby(lines, key=lambda line: line.cell.table):
        out.print(f"\n[bold]{tables[name].title}[/bold]", highlight=False)
        for _, group in groupby(of_table, key=lambda line: line.cell.place):
            column = list(group)
            grid = Grid(title=column[0].cell.place, title_justify="left")
            for head in ("method", "paper", "here", "difference", "setting"):
                grid.add_column(head, justify="left" if head in ("method", "setting") else "right")
            for line in column:
                setting = setting_in_words(line)
                figures = (line.cell.printed, line.here, line.difference)
                paper, here, difference = ("–" if value is None else f"{value:.2f}" for value in figures)
                grid.add_row(line.cell.name, paper, here, difference, setting)
            out.print(grid)
            say(shlex.join(command(column[0].cell)[:-2]))
            if words := order([line for line in column if line.results]):
                say(words)
        for text in tables[name].deviations:
            say(f"- {text}")


def _show_plan(plan: StudyPlan, run: list[Cell]) -> None:
    from fedloom.studies import cost, report
    from fedloom.studies.comparison import changes_in_words
    from fedloom.studies.running import recipe_of

    recipe, is_trial = recipe_of(run[0], plan)
    line = [*report.command(run[0]), *report.flags(plan.changes(run[0]), run[0]), "--seed", str(plan.seed)]
    say(f"# {shlex.join(line)}")
    others = [f"{cell.table} {cell.place} {cell.row} ({cell.measure})" for cell in run]
    say(f"# figures: {'; '.join(others)}")
    words = changes_in_words(plan.changes(run[0]), run[0])
    for text in ([f"changed: {words}"] if words else []) + (["a trial: not stored"] if is_trial else []):
        say(f"# {text}")
    say(f"# {cost.image_steps(recipe) / 1e6:.1f} million image-steps")
    say(recipe.to_yaml())


def _show_list(tables: dict[str, Table], cells: list[Cell], plan: StudyPlan, measure: bool) -> None:
    """Cells and runs of every table, million image-steps, seconds here, and what is stored."""
    from fedloom.studies import cost
    from fedloom.studies.cost import measured
    from fedloom.studies.report import chosen_lines
    from fedloom.studies.results import stored
    from fedloom.studies.running import recipe_of, runs_of
    from fedloom.studies.table import PAPERS

    known = cost.speeds(result for paper in PAPERS for result in stored(plan.results, paper))
    if measure:
        recipes = [recipe_of(run[0], plan)[0] for run in runs_of(cells)]
        for kind, recipe in {cost.kind(recipe): recipe for recipe in recipes}.items():
            known[kind] = measured(recipe)
            say(f"{recipe.model.name}: {known[kind]:,.0f} images a second", err)
    grid = Grid()
    for head in ("table", "runs", "M steps", "time here", "cells run", "what"):
        grid.add_column(head, justify="left" if head in ("table", "what") else "right", no_wrap=head != "what")
    for name, table in tables.items():
        mine = [cell for cell in cells if cell.table == name]
        if not mine:
            continue
        recipes = [recipe_of(run[0], plan)[0] for run in runs_of(mine)]
        steps = sum(map(cost.image_steps, recipes)) / 1e6
        times = [cost.seconds(recipe, known) for recipe in recipes]
        sure = [t for t in times if t is not None]
        took = "–" if not sure else cost.in_words(sum(sure))
        took += "" if len(sure) in (0, len(times)) else f" ({len(sure)} runs)"
        done = chosen_lines(mine, plan.results)
        full = sum(bool(line.results) and not line.changes for line in done)
        short = sum(bool(line.changes) for line in done)
        words = f"{full} of {len(mine)}" + (f", {short} shortened" if short else "")
        what = table.title.partition(": ")[2]
        grid.add_row(name, str(len(recipes)), f"{steps:,.0f}", took, words, what)
    out.print(grid)
    out.print(
        "M steps: million images forward and backward through the network; evaluation is not counted. Time here: from "
        "the speed of runs with the same network on this machine, one at a time (–: unknown; --measure finds out).",
        highlight=False,
    )


def _as_json(line: Line) -> dict[str, Any]:
    from fedloom.studies import report

    cell = line.cell
    return {
        "table": cell.table, "column": cell.column.at, "row": cell.row, "measure": cell.measure, "paper": cell.printed,
        "here": line.here, "difference": line.difference, "ours": cell.ours, "changes": dict(line.changes),
        "seeds": [result.seed for result in line.results],
        "command": shlex.join([*report.command(cell), *report.flags(line.changes, cell)]),
    }  # fmt: skip
