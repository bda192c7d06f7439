"""`fedloom reproduce --queue`: entries select cells, runs are stored as they come, stopped, resumed, and fail alone."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedloom.cli import commands
from fedloom.config.loading import shipped
from fedloom.core.errors import UserError
from fedloom.studies.findings import NOT_AT_HAND
from fedloom.studies.plan import StudyPlan, runs_of
from fedloom.studies.queue import distinct, load_queue, shipped_queues
from fedloom.studies.queue_running import arguments_of, status
from fedloom.studies.selection import Selection
from fedloom.studies.summary import COST
from fedloom.studies.table import cells_of, load_table, table_names

pytestmark = pytest.mark.usefixtures("no_results")
ROOT = Path(__file__).parents[2]
LOCAL = "{name: local, table: fedcrl/table2, at: {dataset: cifar10, kind: practical}, methods: local"


def reproduce(*arguments: str) -> Result:
    return CliRunner(env={"PYTHONPATH": str(ROOT)}).invoke(commands.app, ["reproduce", *arguments])


def entries_of(result: Result) -> list[dict[str, Any]]:
    return json.loads(result.stdout.splitlines()[-1])["entries"]


def queue(*entries: str) -> str:
    Path("queue.yaml").write_text("".join(f"- {entry}\n" for entry in entries))
    return "queue.yaml"


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", shipped_queues())
def test_every_entry_of_a_shipped_queue_selects_cells_and_each_run_has_its_command(name: str, step: int) -> None:
    entries = load_queue(name).runs(StudyPlan())
    assert all(runs for _, runs in entries)
    assert len({entry.name for entry, _ in entries}) == len(entries)
    for run in list({run.cells[0].key: run for run in distinct(entries)}.values())[::step]:
        _, table, _, at, _, row = arguments_of(run.cells, run.plan)[:6]
        places = dict(pair.split("=") for pair in at.split(","))
        ((cell, *_),) = runs_of(Selection([table], at={k: [v] for k, v in places.items()}, methods=[row]).cells())
        assert cell.key == run.cells[0].key


def test_shipped_queues_are_the_decisive_runs_and_the_tables_and_no_recipes() -> None:
    assert list(shipped_queues()) == ["board", "decisive", "tables"]
    assert not [name for name in shipped() if "queue" in name or name in shipped_queues()]
    names = {entry.name.partition(",")[0] for entry in load_queue("decisive").entries}
    assert names == {"R1", "R2", "R3", "R4", "R5"}


def test_the_report_names_the_tables_that_are_in_no_entry_of_the_queue_of_tables() -> None:
    queued = {cell.key for run in distinct(load_queue("tables").runs(StudyPlan())) for cell in run.cells}
    cells = {cell for name in table_names() for cell in cells_of(name, load_table(name))}
    left = {cell.table for cell in cells if cell.values["data"]["name"] not in NOT_AT_HAND and cell.key not in queued}
    named = re.findall(r"`(\w+/[\w-]+)`", COST.partition("Not in this queue")[2])
    assert sorted(named) == sorted(left)


def test_an_entry_has_all_cells_with_the_first_seed_then_with_the_next() -> None:
    at = "at: {dataset: cifar10, beta: [0.1, 0.5]}"
    first = f"{{name: a, table: fedintr/table3, {at}, methods: [fedavg, moon], seeds: [0, 1], scale: 0.5}}"
    again = "{name: b, table: fedintr/table3, only: cifar10, methods: fedavg, seeds: [1], scale: 0.5}"
    entries = load_queue(queue(first, again)).runs(StudyPlan())
    runs = entries[0][1]
    assert [(run.plan.seed, run.cells[0].row, run.cells[0].column.at["beta"]) for run in runs] == [
        (seed, row, beta) for seed in (0, 1) for beta in (0.5, 0.1) for row in ("fedavg", "moon")
    ]
    assert {run.recipe.training.rounds for run in runs} == {50}
    assert [len(of_entry) for _, of_entry in entries] == [8, 3]
    assert [run.result for run in distinct(entries)][:8] == [run.result for run in runs]
    assert len(distinct(entries)) == 9  # only β = 5 is new in the second entry


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("table: fedcrc", "must be a list of entries"),
        ("[]", "must be a list of entries"),
        ("- {name: a}", "queue 'queue.yaml': entry 1.table"),
        ("- {name: a, table: fedcrc/table1, method: fedavg}", "there is no such field; did you mean 'methods'"),
        ("- {name: a, table: fedcrc/table1, scale: 2}", "entry 1.scale = 2: must be at most 1"),
        ("- {name: a, table: fedcrc/table9}", r"entry 1 \(a\): table 'fedcrc/table9' is unknown"),
        ("- {name: a, table: fedcrc/table1, methods: fedavgg}", "methods: there is no 'fedavgg'; did you mean"),
        ("- {name: a, table: fedcrc/table1, only: cinic10}", "only, at, methods: no cell meets all these conditions"),
        ("- fedcrc", "entry 1 = 'fedcrc': must be a name or a section with the fields name, what, verdict, table"),
        ("- {a", "is not YAML"),
    ],
)
def test_mistakes_in_a_queue_are_named(text: str, words: str) -> None:
    Path("queue.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        load_queue("queue.yaml").runs(StudyPlan())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--queue", "decisve"], "queue 'decisve' cannot be read: .*did you mean 'decisive'"),
        (["--queue", "decisive", "--methods", "fedavg"], "--methods: cannot be combined with --queue"),
        (["--queue", "decisive", "--set", "model.features=8"], "--set model.features: changes the figures"),
        (["--queue", "decisive", "--status", "--carry", "a.tar"], "--carry: cannot be combined with --status"),
        (["--status"], "--status: name a queue"),
        (["fedcrl", "--figures", "--methods", "fedavg"], "--methods: cannot be combined with --figures"),
        (["--report", "--queue", "decisive"], "--queue: cannot be combined with --report"),
        (["fedcrc/fig3", "--carry", "back.tar"], "--carry back.tar: only affects queues; add --queue"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        raise reproduce(*arguments).exception or AssertionError


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others_and_is_reported_with_its_log(data: Path) -> None:
    (data / "cifar-100-python").mkdir()
    for name in ("train", "test", "meta"):
        (data / "cifar-100-python" / name).write_bytes(b"damaged")
    damaged = "{name: damaged, table: fedcrl/table2, at: {dataset: cifar100, kind: practical}, methods: local}"
    options = ["--queue", queue(damaged, f"{LOCAL}, scale: 0.005}}"), "--results", "kept"]
    run = [*options, "--data-dir", str(data), "--engine", "inline", "--parallel", "2"]
    result = reproduce(*run, "--json")
    assert result.exit_code == 2
    bad, good = entries_of(result)
    assert (bad["runs"], bad["failed"], good["done"]) == (1, 1, 1)
    (log,) = Path("runs/reproduce/logs").iterdir()  # those of the others are gone
    assert bad["left"][0]["log"] == str(log)
    assert "cifar-100-python" in log.read_text()
    assert (
        "cifar-100-python"
        in result.stderr.partition("failed with exit code 2: fedcrl/table2 cifar100-practical local")[2]
    )
    kept = sorted(Path("kept/fedcrl").iterdir())
    assert [path.stem[-3:] for path in kept] == ["-s0"]
    assert {json.loads(path.read_text())["beside"] for path in kept} == {2}

    said = reproduce(*options, "--status").stdout
    assert "1 failed" in said and "1 done" in said and f"failed in damaged: {log}" in said
    before = [path.stat().st_mtime_ns for path in kept]
    assert "[1/1] failed" in reproduce(*run).stderr  # what is stored is skipped, what failed is tried again
    assert [path.stat().st_mtime_ns for path in kept] == before


@pytest.mark.slow
def test_what_is_out_of_time_stops_with_a_checkpoint_and_is_resumed(data: Path) -> None:
    options = ["--queue", queue(f"{LOCAL}, seeds: [0, 1], scale: 0.2}}"), "--data-dir", str(data)]
    options += ["--engine", "inline"]
    stopped = reproduce(*options, "--limit-seconds", "3")
    assert stopped.exit_code == 0
    found = re.search(r"stopped after round (\d+) of 40", stopped.stderr)
    assert found and "time is up: 1 run was not started" in stopped.stderr
    reached = int(found[1])
    (entry,) = entries_of(reproduce(*options, "--status", "--json"))
    assert (entry["stopped"], entry["waiting"], entry["done"]) == (1, 1, 0)
    assert (entry["left"][0]["round"], entry["left"][0]["rounds"]) == (reached, 40)
    steps = entry["image_steps_left"]
    assert [left["round"] for left in entry["left"]] == [reached, 0]
    (entry,) = entries_of(reproduce(*options, "--parallel", "2", "--json"))
    assert (entry["done"], entry["image_steps_left"], entry["left"]) == (2, 0, [])
    assert steps == pytest.approx(45_000 * (40 - reached + 40))  # 75% of 60,000 images, and the rounds that were left
    assert not list(Path("runs/reproduce/logs").iterdir())


@pytest.mark.slow
def test_a_queue_is_continued_from_the_carried_file(data: Path, tmp_path: Path) -> None:
    options = ["--queue", queue(f"{LOCAL}, scale: 0.2}}"), "--data-dir", str(data), "--engine", "inline"]
    options += ["--carry", str(tmp_path / "back.tar"), "--results", "kept"]
    said = reproduce(*options, "--limit-seconds", "3").stderr
    reached = re.search(r"stopped after round (\d+) of 40", said)
    assert reached and re.search(r"carry: .*back\.tar, \d+\.\d MB", said)
    shutil.rmtree("runs")
    said = reproduce(*options).stderr
    assert "restored 0 results and 1 unfinished runs" in said and "[1/1] done" in said
    (result,) = Path("kept/fedcrl").iterdir()
    (metrics,) = Path("runs").glob("**/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == json.loads(result.read_text())["rounds"] == 40
    shutil.rmtree("kept")
    assert "restored 1 results and 0 unfinished runs" in reproduce(*options).stderr


def test_a_run_that_a_process_works_on_is_running() -> None:
    (entry,) = load_queue(queue(f"{LOCAL}}}")).runs(StudyPlan())
    (run,) = entry[1]
    assert run.recipe.out is not None
    from fedloom.experiment.lock import RunLock

    run.recipe.out.mkdir(parents=True)
    lock = RunLock(run.recipe.out)
    assert run.state == "running"
    found, _ = status([entry], Path("kept"))
    assert (found[0].count("running"), found[0].unknown, found[0].seconds) == (1, 1, 0)
    lock.release()
    assert run.state == "waiting"
