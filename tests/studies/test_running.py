"""`fedloom reproduce`, through the command line, on a CIFAR-10 of 300 images."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedloom.cli import commands
from fedloom.config.recipe import Recipe
from fedloom.core.signals import Interrupts
from fedloom.studies import running
from fedloom.studies.cost import image_steps
from fedloom.studies.results import CellResult
from fedloom.studies.workload import duration_in_words, speeds

pytestmark = pytest.mark.usefixtures("no_results")
CELLS = ["fedcrl/table2", "--at", "dataset=cifar10,kind=practical", "--methods", "local,fedavg"]
UNSTORED = ["--seed", "77", "--results", "reproduction"]
"""For runs in other processes, which see the results in the package."""
ROOT = Path(__file__).parents[2]


def reproduce(*arguments: str) -> Result:
    result = CliRunner().invoke(commands.app, ["reproduce", *arguments])
    if result.exception is not None:
        raise result.exception
    return result


def cells_of(result: Result) -> list[dict[str, Any]]:
    return json.loads(result.stdout.splitlines()[-1])["cells"]


def stored() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(Path("reproduction").glob("*/*.json"))]


def test_a_shortened_run_is_stopped_resumed_stored_and_reported(data: Path) -> None:
    scaled = [*CELLS, "--scale", "0.01", "--data-dir", str(data), "--engine", "inline"]
    stopped = reproduce(*scaled, "--limit-seconds", "0.001", "--json")  # one round in any case
    assert [cell["here"] for cell in cells_of(stopped)] == [None] * 4
    assert stored() == []
    moved = Path("runs/reproduce/fedcrl").rename("elsewhere")
    assert len(list(moved.glob("*/checkpoints/round-000001.json"))) == 1
    shutil.copytree(moved, "runs/reproduce/fedcrl")  # as if it came from another machine
    lines = cells_of(reproduce(*scaled, "--json"))
    local, fedavg, local_std, _ = lines
    assert (local["row"], local["paper"], local["changes"]) == ("local", 69.90, {"training.rounds": 2})
    assert (local["verdict"], local["apart"]) == ("below", "shortened")
    assert local["here"] > 20
    assert (local_std["measure"], local_std["paper"]) == ("personal_std", 9.44)
    assert fedavg["difference"] == pytest.approx(fedavg["here"] - 61.51)
    command = "fedloom reproduce fedcrl/table2 --at dataset=cifar10,kind=practical --methods local --scale 0.01"
    assert local["command"] == command
    kept = stored()
    assert [result["rounds"] for result in kept] == [2, 2]
    assert all(result["machine"] and result["versions"]["torch"] and result["seconds"] > 0 for result in kept)
    assert str(data) not in json.dumps(kept)  # nothing of this machine's folders
    again = cells_of(reproduce(*scaled, "--json"))  # what is stored is not run again
    assert [cell["here"] for cell in again] == pytest.approx([cell["here"] for cell in lines])
    reproduce("--report", "--to", "report.md")
    text = Path("report/fedcrl.md").read_text(encoding="utf-8")
    figures = f"{local['here']:.2f} | {local['difference']:+.2f} | below | 2 of 200 rounds (`--scale 0.01`)"
    assert f"| Local | 69.90 | {figures} |" in text
    assert "FedCRL 91.28" in text.partition("Not run yet (the paper's figures): ")[2].partition("\n")[0]
    assert "Order of methods: 1 pair open (fewer than two common seeds)." in text


def test_an_uninterrupted_run_gives_the_same_figures(data: Path) -> None:
    scaled = [*CELLS[:-1], "local", "--scale", "0.01", "--data-dir", str(data), "--engine", "inline", "--json"]
    whole = cells_of(reproduce(*scaled, "--results", "one"))
    shutil.rmtree("runs")
    reproduce(*scaled, "--results", "two", "--limit-seconds", "0.001")
    assert cells_of(reproduce(*scaled, "--results", "two")) == whole


def test_again_is_run_again_and_the_run_before_is_set_aside(data: Path) -> None:
    one = [*CELLS[:-1], "local", "--scale", "0.005", "--data-dir", str(data), "--engine", "inline"]
    for _ in range(3):
        reproduce(*one, "--again")
    folders = sorted(path for path in Path("runs/reproduce/fedcrl").iterdir())
    assert [path.name for path in folders] == [folders[0].name + end for end in ("", ".1", ".2")]
    begun = [(path / "metrics.jsonl").stat().st_mtime for path in folders]
    assert begun[1] < begun[2] < begun[0]  # three runs, the last in its place
    assert len(stored()) == 1


def test_a_trial_is_shown_and_not_stored(data: Path) -> None:
    result = reproduce(*CELLS[:-1], "local", "--scale", "0.005", "--data-dir", str(data), "--set", "model.features=8")
    assert "1 of 200 rounds, model.features 8" in " ".join(result.stdout.replace("│", " ").split())
    assert stored() == []


def test_runs_side_by_side_store_their_results(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [*CELLS[:-1], "local", "--scale", "0.005", "--data-dir", str(data), "--engine", "inline"]
    assert all(cell["here"] is not None for cell in cells_of(reproduce(*cells, "--parallel", "2", "--json")))
    assert len(stored()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "everyone", "code"),
    [
        pytest.param(signal.SIGTERM, False, 143, marks=pytest.mark.slow),
        (signal.SIGTERM, True, 143),  # as a scheduler does; to the runs it comes twice
        pytest.param(
            signal.SIGKILL, False, -signal.SIGKILL, marks=pytest.mark.slow
        ),  # a lost terminal: nothing passed on
    ],
)
def test_runs_side_by_side_stop_together_with_checkpoints_and_are_gone(
    data: Path, by: int, everyone: bool, code: int
) -> None:
    options = ["--data-dir", str(data), "--engine", "inline", "--parallel", "2", *UNSTORED]
    command = [sys.executable, "-m", "fedloom", "reproduce", *CELLS, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 100
    try:
        while len(rounds := [f for f in Path("runs/reproduce").glob("*/*/metrics.jsonl") if f.stat().st_size]) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        runs = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split() if everyone else []
        for pid in (*map(int, runs), process.pid):
            os.kill(pid, by)
        said = process.communicate(timeout=60)[1]  # to its end: a process that still runs holds the pipe
    finally:
        process.kill()
    assert process.returncode == code
    assert said.count("resume with: the same command") == (3 if code > 0 else 2)  # each run, and the whole
    for path in rounds:
        last = json.loads(path.read_text().splitlines()[-1])["round"]
        assert last < 200 and (path.parent / f"checkpoints/round-{last:06d}.json").exists()


@pytest.mark.slow
def test_a_run_that_fails_beside_others_is_told_and_so_is_the_exit_code(data: Path) -> None:
    (data / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"damaged")
    command = ["reproduce", *CELLS, "--data-dir", str(data), "--engine", "inline", "--parallel", "2", *UNSTORED]
    result = CliRunner(env={"PYTHONPATH": str(ROOT)}).invoke(commands.app, command)
    assert result.exit_code == 2
    assert result.stderr.count("exit code 2: ") == 2 and "not run yet" in result.stdout


def test_a_run_that_is_killed_gives_the_exit_code_that_a_shell_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os; os.kill(os.getpid(), 9)"
    killed = lambda *_, **__: subprocess.Popen([sys.executable, "-c", script])  # noqa: E731
    monkeypatch.setattr(running, "fedloom_process", killed)
    lines: list[str] = []
    assert running.run_side_by_side([["one"]], 2, running.StudyPlan(), Interrupts(), lines.append) == 137
    assert lines[0].startswith("exit code -9: ")


def test_the_list_tells_what_tables_would_take_here(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = ["fedintr/table5", "--only", "cifar10", "--list", "--engine", "inline"]
    assert "time here" not in reproduce(*narrow).stdout
    monkeypatch.setattr("fedloom.studies.cost.LEAST_SECONDS", 0.0)
    said = " ".join(reproduce(*narrow, "--measure").stdout.split())
    assert re.search(r"fedintr/table5 │ 2 │ [\d,]+ │ [\d.]+ (h|days) │ 0 of 2", said)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2.0 h"), (172800, "2 days")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert duration_in_words(seconds) == words


def test_runs_that_shared_the_machine_say_nothing_of_its_speed() -> None:
    recipe = {"method": "fedavg", "model": "cnn2", "data": {"name": "cifar10"}}
    alone = CellResult("x", 0, 1, {}, seconds=10, machine="there", recipe=recipe)
    known = speeds([alone, replace(alone, seconds=100, beside=9)])
    assert list(known) == [("there", "cnn2", None)]
    assert known["there", "cnn2", None] == image_steps(Recipe.parse(recipe)) / 10
    busy = speeds([replace(alone, seconds=30, beside=6)], shared=True)  # a sixth of the machine for 30 s
    assert busy["there", "cnn2", None] == pytest.approx(image_steps(Recipe.parse(recipe)) / 5)


def test_the_plan_of_a_cell_is_its_command_and_its_recipe() -> None:
    said = reproduce("repper/table2", "--only", "cifar10", "--alpha", "0.5", "--methods", "fedavg", "--dry-run").stdout
    command = "fedloom reproduce repper/table2 --at dataset=cifar10,C=0.2,alpha=0.5,E=10 --methods fedavg"
    assert f"# {command} --seed 0" in said
    assert "name: resnet34" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["repper/table9"], "table 'repper/table9' is unknown"),
        (["repper/table2", "--methods", "repperr"], "methods: there is no 'repperr'; did you mean 'repper'"),
        (["repper/table2", "--only", "mnist"], "no cell meets all these conditions"),
        (["repper/table2", "--at", "alpha"], "--at alpha: write axis=value"),
        (["repper/table2", "--scale", "2"], "--scale 2: must be above 0 and at most 1"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(Exception, match=words):
        reproduce(*arguments)


def test_the_list_has_every_table_and_what_was_run() -> None:
    said = reproduce("--list", "fedcrc").stdout
    assert all(f"fedcrc/{table}" in said for table in ("table1", "table2", "table3", "fig3"))
    assert "0 of 84" in said
