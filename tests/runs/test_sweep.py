"""Sweeps: settings, runs, resuming, parallel runs, the table and the picture."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import fedloom
from fedloom.cli import commands
from fedloom.config.loading import read_yaml
from fedloom.config.recipe import Recipe
from fedloom.core.checking import checked
from fedloom.core.errors import RunError, UserError
from fedloom.core.signals import Interrupts
from fedloom.engines.cuda import connections
from fedloom.report.sweep import NOTE, best_setting, choice, plot_sweep, sweep_table
from fedloom.runs import parallel as beside
from fedloom.runs.sweep import Sweep, label, read_over, settings

TINY = {"data": "digits", "clients": 2, "rounds": 2, "data.limit": 80, "method": "fedprox"}
FLAGS = ["--data", "digits", "--clients", "2", "--rounds", "2", "--set", "data.limit=80", "--method", "fedprox"]


def all_of(**section):
    return list(settings(checked(Sweep, section)))


def test_a_grid_has_every_combination_once():
    found = all_of(over={"method.mu": [0.1, 1, 0.1], "lr": [0.01, 0.1]})
    assert found == [{"method.mu": mu, "lr": lr} for mu in (0.1, 1) for lr in (0.01, 0.1)]


def test_random_settings_are_log_uniform_repeatable_and_distinct():
    over = {"lr": "0.001..0.1", "training.epochs": "1..8", "method.mu": [0, 1]}
    found = all_of(over=over, random=400)
    assert found[:20] == all_of(over=over, random=20)
    lrs = np.log10([one["lr"] for one in found])
    assert lrs.min() >= -3 and lrs.max() <= -1
    assert np.histogram(lrs, bins=4, range=(-3, -1))[0] == pytest.approx([100] * 4, abs=35)  # four std
    assert {one["training.epochs"] for one in found} == set(range(1, 9))
    assert {one["method.mu"] for one in found} == {0, 1}
    assert len(all_of(over={"method.mu": [0, 1, 2]}, random=20)) == 3


def test_values_are_read_as_in_a_recipe():
    assert read_over("method.mu=1e-2,0.1,1") == ("method.mu", [0.01, 0.1, 1])
    assert read_over("data.partition=dirichlet:0.1,iid") == ("data.partition", ["dirichlet:0.1", "iid"])
    assert read_over("data.augment=[flip],[flip, crop:4]") == ("data.augment", [["flip"], ["flip", "crop:4"]])


def test_labels_have_the_last_part_of_a_field_or_all_of_it():
    assert label({"method.mu": 1, "training.optimizer.lr": 0.1}) == "mu=1 lr=0.1"
    assert label({"a.x": 1, "b.x": 2}) == "a.x=1 b.x=2"
    assert label({"method.name": "here/mine.py:Mine"}) == "method=mine"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "sweep.over is missing: name a field"),
        ({"over": {"lr": "0.1..1"}}, "sweep.over.lr = '0.1..1': values of a range are drawn at random; set the number"),
        ({"over": {"lr": "0..1"}, "random": 2}, "a range is sampled log-uniformly and needs 0 < low < high"),
        ({"over": {"lr": "a..b"}, "random": 2}, "a range needs two numbers"),
        ({"over": {"lr": []}}, "sweep.over.lr = []: must have at least one value"),
        ({"over": {"seed": [1, 2]}}, "set sweep.seeds, such as 0,1,2"),
        ({"over": {"method.strat": [1]}}, "did you mean 'start'"),
        ({"over": {"method.mu": ["much"]}}, "method.mu = 'much': must be a number"),
        ({"over": {"lr": [0.1]}, "random": 0}, "sweep.random = 0: must be at least 1"),
        ({"over": {"lr": [0.1]}, "resume": True}, "out is missing; set it to the folder"),
    ],
)
def test_what_cannot_be_swept_is_named_before_anything_runs(given, words):
    with pytest.raises(UserError) as error:
        fedloom.sweep(**TINY | given)
    assert words in str(error.value)
    assert not Path("runs").exists()


def test_a_recipe_with_a_sweep_is_sent_to_the_command():
    with pytest.raises(UserError, match="run it with `fedloom sweep`"):
        Recipe.load("sweeps/fedintr-mu")


def test_the_command_runs_the_grid_and_reports_without_choosing():
    command = ["sweep", *FLAGS, "--over", "method.mu=0,1", "--over", "lr=0.001,0.1", "--seeds", "1", "--out", "s"]
    result = CliRunner().invoke(commands.app, [*command, "--json"], catch_exceptions=False)
    said = json.loads(result.stdout.splitlines()[-1])
    assert [one["setting"] for one in said["settings"]] == [
        {"method.mu": mu, "lr": lr} for mu in (0, 1) for lr in (0.001, 0.1)
    ]
    assert "chosen on test data" in said["note"] and "chosen on test data" in result.stderr
    assert (Path("s/mu=1_lr=0.1-s1/summary.json")).exists()
    alone = fedloom.run(**TINY | {"seed": 1, "lr": 0.1, "method.mu": 1, "out": "alone"})
    swept = said["settings"][3]["runs"][0]
    for figure in ("personal_accuracy", "global_accuracy", "seed"):
        assert swept[figure] == alone[figure]
    before = {path: path.stat().st_mtime_ns for path in Path("s").rglob("metrics.jsonl")}
    again = (
        CliRunner().invoke(commands.app, ["resume", "s"], catch_exceptions=False).stdout
    )  # nothing is left: the table
    assert {path: path.stat().st_mtime_ns for path in Path("s").rglob("metrics.jsonl")} == before
    assert "worst tenth" in again and "picture: s/sweep.png" in again
    assert Image.open("s/sweep.png").size[0] > 1000  # two heat maps: clients and global
    with pytest.raises(UserError, match="already holds runs"):
        CliRunner().invoke(commands.app, command, catch_exceptions=False)


def test_a_stopped_sweep_keeps_what_is_finished_and_goes_on():
    rounds = []

    def stop_in_second(recipe):
        def on_round(record):
            rounds.append((recipe.out.name, record["round"]))
            if rounds[-1] == ("mu=1-s0", 1):
                os.kill(os.getpid(), signal.SIGINT)

        return on_round

    with pytest.raises(KeyboardInterrupt, match="run 2 of 2 stopped after round 1 of 2; resume with: fedloom resume s"):
        fedloom.sweep(**TINY, over={"method.mu": [0, 1]}, out="s", on_run=stop_in_second)
    rounds.clear()
    stored = read_yaml("s/sweep.yaml")
    assert stored["sweep"]["over"] == {"method.mu": [0, 1]}
    runs = fedloom.sweep("s/sweep.yaml", out="s", resume=True, on_run=stop_in_second)
    assert rounds == [("mu=1-s0", 2)]
    assert [run["setting"] for run in runs] == [{"method.mu": 0}, {"method.mu": 1}]
    with pytest.raises(UserError, match="sweep.over.method.mu = .*was started with"):
        fedloom.sweep(**TINY, over={"method.mu": [0, 2]}, out="s", resume=True)


@pytest.fixture
def pretend(monkeypatch):
    """Runs that are small scripts: what matters here is who is started, asked and waited for."""

    def use(script):
        def start(recipe, place, count, datasets):
            place.with_suffix(".txt").touch()
            with place.with_suffix(".txt").open("wb") as said:
                command = [sys.executable, "-c", script, str(recipe.out)]
                return beside._Run(recipe, subprocess.Popen(command, stderr=said), place.with_suffix(".txt"))

        monkeypatch.setattr(beside, "_start", start)

    return use


def some(count):
    return [SimpleNamespace(out=Path(str(i))) for i in range(count)]


def test_two_at_a_time_and_no_more(pretend):
    pretend("import sys, time; a = time.time(); time.sleep(0.3); open(sys.argv[1], 'w').write(f'{a} {time.time()}')")
    ended = []
    beside.run_parallel(some(4), 2, Interrupts(), lambda recipe: ended.append(recipe.out.name))
    spans = [tuple(map(float, Path(str(i)).read_text().split())) for i in range(4)]
    together = [sum(a < end and begin < b for a, b in spans) for begin, end in spans]
    assert sorted(ended) == list("0123")
    assert max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans) <= 2
    assert max(together) > 1


def test_an_interrupt_is_passed_on_and_waited_for(pretend):
    pretend(
        "import signal, sys, time, pathlib\n"
        "def stop(*_): time.sleep(0.3); pathlib.Path(sys.argv[1]).write_text('checkpoint'); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop)\npathlib.Path(sys.argv[1] + '.begun').touch()\ntime.sleep(60)"
    )

    class Asked:
        @property
        def asked(self):
            return signal.SIGINT if all(Path(f"{i}.begun").exists() for i in range(2)) else None

    beside.run_parallel(some(5), 2, Asked())
    assert sorted(path.name for path in Path().iterdir() if path.suffix == "") == ["0", "1"]
    assert Path("0").read_text() == Path("1").read_text() == "checkpoint"


def test_a_failing_run_is_named_and_the_others_are_waited_for(pretend):
    pretend(
        "import sys, time, pathlib\n"
        "if sys.argv[1] == '0': sys.exit('progress\\nerror: no room left')\n"
        "time.sleep(0.5); pathlib.Path(sys.argv[1]).touch()"
    )
    with pytest.raises(RunError, match="the run in '0' failed: no room left"):
        beside.run_parallel(some(4), 2, Interrupts())
    assert Path("1").exists() and not Path("3").exists()


@pytest.mark.slow
def test_runs_side_by_side_give_what_they_give_one_by_one_and_ctrl_c_reaches_them():
    over = ["--over", "method.mu=0,1", "--out", "s", "--parallel", "2", "--set", "training.rounds=400"]
    command = [sys.executable, "-m", "fedloom", "sweep", *FLAGS, *over, "--resume"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    metrics = [Path(f"s/mu={mu}-s0/metrics.jsonl") for mu in (0, 1)]
    deadline = time.monotonic() + 100
    while not all(path.exists() and path.stat().st_size for path in metrics):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "stopped after run 0 of 2; resume with: fedloom resume s" in said
    done = [json.loads(path.read_text().splitlines()[-1]) for path in metrics]
    for path, record in zip(metrics, done, strict=True):
        assert (path.parent / f"checkpoints/round-{record['round']:06d}.json").exists()
    record, path = min(zip(done, metrics, strict=True), key=lambda pair: pair[0]["round"])
    recipe = Recipe.load(path.parent / "recipe.yaml")
    whole = fedloom.run(recipe, out="alone", rounds=record["round"])
    assert whole["personal_accuracy"] == record["personal_accuracy"]


def summary(setting, seed, personal, general=None):
    return {"setting": setting, "seed": seed, "personal_accuracy": personal, "global_accuracy": general,
            "personal_std": 0.1, "personal_worst": 0.2, "seconds": 1.0}  # fmt: skip


def test_the_table_has_means_and_deviations_over_seeds():
    runs = [summary({"method.mu": mu}, seed, 0.5 + mu * seed / 10) for mu in (0, 1) for seed in (0, 1)]
    console = Console(width=100, record=True)
    console.print(sweep_table(runs))
    text = console.export_text()
    assert "50.0 ± 0.0" in text and "55.0 ± 7.1" in text and "sample std over 2 seeds" in text


def validated(setting, seed, personal, value, measure="accuracy"):
    return summary(setting, seed, personal) | {
        "best_by": "validation", "measure": measure, f"validation_personal_{measure}": value,
    }  # fmt: skip


def test_the_best_setting_is_chosen_by_the_mean_validation_over_seeds():
    values = {0.1: (0.9, 0.1), 0.2: (0.6, 0.6), 0.3: (0.95, None)}
    runs = [
        validated({"lr": lr}, seed, 1 - lr, value) for lr, each in values.items() for seed, value in enumerate(each)
    ]
    best = best_setting(runs)
    assert (best.setting, best.by, best.value) == ({"lr": 0.2}, "validation_personal_accuracy", 0.6)
    assert "best by validation_personal_accuracy: lr=0.2 (0.6)" in choice(runs, best)
    assert "clients 80.0 ± 0.0%" in choice(runs, best)  # reported on test samples
    console = Console(width=100, record=True)
    console.print(sweep_table(runs))
    marked = [line for line in console.export_text().splitlines() if " * " in line and "│" in line]
    assert len(marked) == 1 and "0.2" in marked[0] and "60.0 *" in marked[0]


def test_the_smallest_loss_or_calibration_error_is_the_best():
    runs = [validated({"lr": lr}, 0, 0.5, loss, "loss") for lr, loss in ((1, 0.7), (2, 0.3), (3, 0.4))]
    assert best_setting(runs).setting == {"lr": 2}
    runs = [validated({"lr": lr}, 0, 0.5, ece, "ece") | {"personal_ece": 0.25} for lr, ece in ((1, 0.3), (2, 0.4))]
    assert best_setting(runs).setting == {"lr": 1}
    assert choice(runs, best_setting(runs)).endswith("clients 50.0%, personal_ece 0.25")


def test_nothing_is_chosen_without_validation_or_across_data():
    plain = [summary({"lr": lr}, 0, lr) for lr in (0.1, 0.2)]
    assert best_setting(plain) is None
    assert choice(plain, None) == NOTE
    some = [validated({"lr": 1}, 0, 0.5, 0.5), summary({"lr": 2}, 0, 0.5)]
    assert best_setting(some) is None
    for path in ("partition", "data.split", "data.clients"):
        runs = [validated({path: value}, 0, 0.5, 0.5) for value in (1, 2)]
        assert best_setting(runs) is None
        assert f"the settings differ in {path}, so their results" in choice(runs, None)


def test_a_sweep_with_validation_stores_and_prints_the_best_setting():
    fields = ["--set", "data.split=pooled:0.6:0.2", "--partition", "iid", "--set", "training.epochs=5"]
    over = ["--over", "lr=0.0001,0.5", *fields, "--out", "s", "--json"]
    said = CliRunner().invoke(commands.app, ["sweep", *FLAGS, *over], catch_exceptions=False)
    found = json.loads(said.stdout.splitlines()[-1])
    values = [one["runs"][0]["validation_personal_accuracy"] for one in found["settings"]]
    assert values[0] != values[1]
    assert [one["best"] for one in found["settings"]] == [value == max(values) for value in values]
    assert found["best"]["value"] == max(values)
    assert f"best by validation_personal_accuracy: lr={found['best']['setting']['lr']}" in said.stderr
    assert json.loads(Path("s/sweep.json").read_text())["best"] == found["best"]


@pytest.mark.parametrize(
    "chosen",
    [
        [{"lr": lr} for lr in (0.001, 0.01, 0.1)],
        [{"method": name} for name in ("fedavg", "local")],
        [{"lr": lr, "data.partition": p} for lr in (0.01, 0.1) for p in ("iid", "dirichlet:0.1")],
        [{"lr": 0.01, "mu": 1}, {"lr": 0.02, "mu": 30}, {"lr": 0.5, "mu": 2}],
        [{"lr": lr, "mu": mu, "epochs": e} for lr in (0.01, 0.1) for mu in (1, 2) for e in (1, 2)],
    ],
)  # fmt: skip
def test_every_kind_of_sweep_has_a_picture(chosen):
    plot_sweep([summary(one, 0, 0.1 * i, None) for i, one in enumerate(chosen)], "p.png")
    assert len(Image.open("p.png").convert("RGB").getcolors(10**7)) > 50


def test_numbers_that_no_axis_separates_are_equally_spaced_in_ascending_order(monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self.axes[0]))

    def places(*values):
        plot_sweep([summary({"mu": mu}, 0, 0.5, None) for mu in values], "p.png")
        axes = drawn[-1]
        return axes.lines[0].get_xdata().tolist(), [label.get_text() for label in axes.get_xticklabels()]

    assert places(1, 0, 10, 0.1) == ([0, 1, 2, 3], ["0", "0.1", "1", "10"])
    assert places(0, 0.5, 1)[0] == [0, 0.5, 1]  # a linear axis
    assert places(0.1, 1, 10)[0] == [0.1, 1, 10] and drawn[-1].get_xscale() == "log"


def test_processes_beside_each_other_have_one_thread_and_share_the_queues_to_a_gpu(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "8"})
    monkeypatch.setattr(connections, "_set_here", set())
    for count, each in ((1, "32"), (4, "8"), (100, "1")):
        own = beside.environment(count)
        assert (own[connections.NAME], own["OMP_NUM_THREADS"]) == (each, "1")
    connections.request()  # as lanes in this process do
    assert beside.environment(4)[connections.NAME] == "8"
    os.environ[connections.NAME] = "3"  # set by the user: kept
    assert beside.environment(4)[connections.NAME] == "3"


def test_no_more_processes_share_the_queues_than_there_are(monkeypatch):
    monkeypatch.delenv(connections.NAME, raising=False)
    found = []

    class Process:
        returncode = 0

        def __init__(self, command, env, **_):
            found.append(env[connections.NAME])

        def poll(self):
            return 0

    monkeypatch.setattr(beside.subprocess, "Popen", Process)
    beside.run_parallel([Recipe.parse({"out": name}) for name in ("one", "other")], 16, Interrupts())
    assert found == ["16", "16"]
