"""A run that was stopped, killed or failed and then resumed gives the same numbers as an uninterrupted run."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cohorts import alternately
from references import shared
from tiny import tiny_experiment, tiny_task, without_times
from using import refused

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupted
from fedloom.experiment import run_checkpoints as due
from fedloom.experiment.lock import NAME as LOCK
from fedloom.methods import METHODS as REGISTRY

METHODS = [*sorted(name for name, method in REGISTRY.items() if method.__module__.startswith("fedloom.")), "fedavg+ft"]
WITH_MEMORY = ["fedcrl", "ditto", "fedpac", "fedamp", "local", "scaffold", "fedala", "byol"]
TINY = ["--data", "digits", "--clients", "6", "--set", "data.limit=300", "--set", "training.fraction=0.7"]


class CrashError(BaseException):
    """The process is gone, as far as the run folder can tell."""


def experiment(method: str, out: Path, **options):
    if method == "byol":
        options |= {"objective": "byol"}
        method = "fedavg"
    return tiny_experiment(method, out=str(out), storage__checkpoint_every=1, **options)


def crash_in(round: int):
    """After its metrics are written, before its checkpoint."""

    def on_round(record):
        if record["round"] == round:
            raise CrashError

    return on_round


def stop_in(round: int, by: int = signal.SIGTERM):
    def on_round(record):
        if record["round"] == round:
            os.kill(os.getpid(), by)

    return on_round


def metrics(folder: Path) -> list[dict]:
    return without_times([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def results(folder: Path) -> dict[str, object]:
    """Return the contents of a run folder without timings, its path and the log."""
    files = contents(folder)
    files.pop("log.txt", None)
    summary = json.loads(files.pop("summary.json"))
    versions = json.loads(files.pop("versions.json"))
    assert not [name for name in files if "lock" in name or name.endswith(".tmp")]
    for name in [name for name in files if name.startswith("checkpoints/")]:  # see test_extend.py
        del files[name]
    lines = [list(json.loads(line)) for line in files.pop("metrics.jsonl").splitlines()]
    kept = {name: value for name, value in summary.items() if name not in ("seconds", "run_dir")}
    installed = {name: value for name, value in versions.items() if "/" not in name}  # without files of other tests
    found = {"metrics.jsonl": metrics(folder), "order of fields": lines, "summary.json": kept, "versions": installed}
    return files | found


def whole(method: str) -> dict[str, object]:
    """Results of an uninterrupted inline run."""

    def make() -> dict[str, object]:
        with TemporaryDirectory() as folder:
            experiment(method, Path(folder) / "run").run()
            return results(Path(folder) / "run")

    return shared(f"resume {method}", make)


def but_for_the_engine(found: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in found.items() if name != "recipe.yaml"}


# A third of the methods without memory here, all in `make slow`; those with memory are below.
@pytest.mark.parametrize("method", alternately([method for method in METHODS if method not in WITH_MEMORY], first=0))
def test_every_method_resumed_after_two_rounds_gives_the_same_numbers(method, tmp_path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        experiment(method, out, on_round=stop_in(2)).run()
    assert [record["round"] for record in metrics(out)] == [1, 2]
    experiment(method, out).run(resume=True)
    assert results(out) == whole(method)


# Every method with one round, and with every round in `make slow`; every pair of engines and ends occurs.
ENDED = [
    pytest.param(method, engine, end, round, marks=[pytest.mark.slow] * (i % 3 + 1 != round))
    for i, method in enumerate(WITH_MEMORY)
    for round, (engine, end) in zip(
        (1, 2, 3),
        [
            (("inline", "processes")[i % 2], (crash_in, stop_in)[i // 2 % 2]),
            (("processes", "inline")[i % 2], (stop_in, crash_in)[i // 2 % 2]),
            (("inline", "processes")[i // 2 % 2], (crash_in, stop_in)[i % 2]),
        ],
        strict=True,
    )
]


@pytest.mark.parametrize(("method", "engine", "end", "round"), ENDED)
def test_whenever_and_however_it_ended_it_goes_on_to_the_same_numbers(method, engine, end, round, tmp_path) -> None:
    out = tmp_path / "run"
    if (end, round) == (stop_in, 3):  # asked to stop in the last round it has nothing left to stop
        experiment(method, out, engine=engine, on_round=end(round)).run()
    else:
        with pytest.raises((CrashError, Interrupted)):
            experiment(method, out, engine=engine, on_round=end(round)).run()
        experiment(method, out, engine=engine).run(resume=True)
    assert but_for_the_engine(results(out)) == but_for_the_engine(whole(method))


def test_a_run_may_be_stopped_again_and_again_and_change_engines(tmp_path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        experiment("fedamp", out, on_round=stop_in(1)).run()
    with pytest.raises(CrashError):
        experiment("fedamp", out, engine="processes", on_round=crash_in(3)).run(resume=True)
    experiment("fedamp", out, engine="replay", storage__memory_mb=1).run(resume=True)
    assert results(out) == whole("fedamp")  # recipe.yaml too: it is the one that the run was begun with


def test_metrics_written_after_the_last_checkpoint_are_cut_back(tmp_path) -> None:
    out, seen = tmp_path / "run", []
    with pytest.raises(CrashError):
        experiment("fedavg", out, on_round=crash_in(3)).run()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "los')  # killed in the middle of a line
    experiment("fedavg", out, on_round=lambda record: seen.append(record["round"])).run(resume=True)
    assert seen == [3]
    assert results(out) == whole("fedavg")


def test_a_damaged_newest_checkpoint_costs_its_rounds_and_nothing_else(tmp_path, caplog) -> None:
    out, seen = tmp_path / "run", []
    with pytest.raises(Interrupted):
        experiment("ditto", out, on_round=stop_in(2)).run()
    newest = out / "checkpoints" / "round-000002-clients-000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    experiment("ditto", out, on_round=lambda record: seen.append(record["round"])).run(resume=True)
    assert seen == [2, 3]
    assert "round-000002.json is damaged" in caplog.text
    assert results(out) == whole("ditto")


def test_without_a_usable_checkpoint_nothing_is_changed(tmp_path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        experiment("ditto", out, on_round=stop_in(2)).run()
    for path in (out / "checkpoints").glob("*server*"):
        path.unlink()
    before = contents(out)
    with pytest.raises(UserError, match="none of its 2 checkpoints can be used; nothing was changed"):
        experiment("ditto", out).run(resume=True)
    after = contents(out)
    assert "is damaged" in after.pop("log.txt").decode()
    assert after == before


def test_checkpoints_are_as_far_apart_as_the_recipe_says(tmp_path) -> None:
    found = {}
    for every in (0, 1, 2):
        out = tmp_path / str(every)
        with pytest.raises(CrashError):
            tiny_experiment(
                "fedavg", out=str(out), on_round=crash_in(5), storage__checkpoint_every=every, training__rounds=6
            ).run()
        found[every] = sorted(int(path.stem[-6:]) for path in (out / "checkpoints").glob("*.json"))
    assert found == {0: [0], 1: [3, 4], 2: [2, 4]}


@pytest.mark.parametrize(("seconds", "found"), [(0, [0]), (50, [0, 3]), (15, [4, 5])])
def test_where_rounds_are_long_the_clock_says_when(tmp_path, monkeypatch, seconds, found) -> None:
    clock = [0.0]
    monkeypatch.setattr(due, "perf_counter", lambda: clock[0])

    def slow(record) -> None:
        clock[0] += 20  # seconds that a round takes
        crash_in(6)(record)

    with pytest.raises(CrashError):
        tiny_experiment(
            "fedavg", out=str(tmp_path / "run"), on_round=slow, training__rounds=6,
            storage__checkpoint_every=10, storage__checkpoint_seconds=seconds,
        ).run()  # fmt: skip
    assert sorted(int(path.stem[-6:]) for path in (tmp_path / "run" / "checkpoints").glob("*.json")) == found


def test_checkpoints_by_the_clock_take_a_small_share_of_the_time(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(due, "perf_counter", lambda: clock[0])
    is_due = due.CheckpointSchedule(rounds=1000, seconds=60)
    with is_due.writing():
        clock[0] += 10
    asked = []
    for _ in range(5):
        clock[0] += 50
        asked.append(is_due(7))
    assert asked == [False, False, False, True, True]  # 20 times the 10 seconds


@pytest.mark.parametrize("call", [pytest.param("fsync", marks=pytest.mark.slow), "replace"])
def test_a_disk_that_is_full_at_any_moment_is_one_clear_error_and_loses_nothing(call, tmp_path, monkeypatch) -> None:
    expected, real = whole("local"), getattr(os, call)
    for failing in range(0, 100, 3):
        out, calls = tmp_path / str(failing), []

        def full(*arguments, calls=calls, failing=failing):
            calls.append(arguments)
            if len(calls) > failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        monkeypatch.setattr(os, call, full)
        try:
            experiment("local", out).run()
            said = ""
        except UserError as error:
            said = str(error)
        monkeypatch.setattr(os, call, real)
        assert ("No space left on device" in said) == (len(calls) > failing)
        if said:
            experiment("local", out).run(resume=True)
        assert results(out) == expected
        if not said:
            break
    assert failing >= 15


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_metrics(tmp_path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match="metrics.jsonl' cannot be written: No space left on device"):
        experiment("fedavg", out).run()


def test_a_full_disk_under_memory_that_spills(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fedloom.experiment.client_store.Path.write_bytes", _full)
    running = experiment("local", tmp_path / "run")
    monkeypatch.setattr("fedloom.experiment.loop.ClientStore", lambda budget, inside: _store(1, inside))
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        running.run()


def _full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _store(budget, inside):
    from fedloom.experiment.client_store import ClientStore

    return ClientStore(budget, inside=inside)


def test_spilled_memory_is_in_the_checkpoint_and_what_a_killed_process_left_is_removed(tmp_path, monkeypatch) -> None:
    expected = whole("ditto")
    monkeypatch.setattr("fedloom.experiment.loop.ClientStore", lambda budget, inside: _store(20_000, inside))
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        experiment("ditto", out, on_round=stop_in(2)).run()
    (out / ".memory-x1y2" / "0000").mkdir(parents=True)
    (out / ".memory-x1y2" / "0000" / "0000001.safetensors").write_bytes(b"old")
    experiment("ditto", out).run(resume=True)
    assert results(out) == expected
    assert not list(out.glob(".memory-*"))


def test_a_finished_run_says_so_and_stays_as_it_is(tmp_path, caplog) -> None:
    out = tmp_path / "run"
    summary = experiment("fedavg", out).run()
    before = contents(out)
    assert experiment("fedavg", out).run(resume=True) == summary
    assert "is finished: there is nothing to resume" in caplog.text
    assert contents(out) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"training__rounds": 4}, "training.rounds = 4: .* was started with 3"),
        ({"seed": 4}, "seed = 4: .* was started with 3"),
        ({"training__optimizer__lr": 0.06}, "training.optimizer.lr = 0.06: .* was started with 0.05"),
        ({"data__partition": "iid"}, "data.partition = 'iid': .* was started with 'dirichlet:0.1'"),
    ],
)
@pytest.mark.parametrize("done", [False, True])
def test_a_folder_of_another_recipe_is_refused_and_untouched(change, named, done, tmp_path) -> None:
    out = tmp_path / "run"
    if done:
        experiment("fedprox", out).run()
    else:
        with pytest.raises(CrashError):
            experiment("fedprox", out, on_round=crash_in(2)).run()
    before = contents(out)
    with pytest.raises(UserError, match=named + ", which cannot be changed on resume; use the original recipe"):
        experiment("fedprox", out, **change).run(resume=True)
    with pytest.raises(UserError, match="method.name = 'fedavg': .* was started with 'fedprox'"):
        experiment("fedavg", out).run(resume=True)
    with pytest.raises(UserError, match=f"already holds a run: .*fedloom resume {out}"):
        experiment("fedprox", out).run()
    assert contents(out) == before


def test_other_data_are_refused(tmp_path) -> None:
    out = tmp_path / "run"
    with pytest.raises(CrashError):
        experiment("fedavg", out, on_round=crash_in(2)).run()
    before = contents(out)
    for where in (0, 100, -1):
        task = tiny_task()
        task.dataset.inputs[where, 0, 0, 0] += 1
        with pytest.raises(
            UserError, match="the data differ from those that the run was started with; nothing was changed"
        ):
            experiment("fedavg", out, task=task).run(resume=True)
    task = tiny_task()
    task.federation.train[0] = task.federation.train[0][1:]
    with pytest.raises(UserError, match="the data differ from those"):
        experiment("fedavg", out, task=task).run(resume=True)
    assert contents(out) == before


def test_another_version_of_torch_is_warned_of(tmp_path, caplog) -> None:
    out = tmp_path / "run"
    with pytest.raises(CrashError):
        experiment("fedavg", out, on_round=crash_in(2)).run()
    found = json.loads((out / "versions.json").read_text())
    (out / "versions.json").write_text(json.dumps(found | {"torch": "1.0"}))
    experiment("fedavg", out).run(resume=True)
    assert "was started with 1.0: results may differ" in caplog.text


def test_two_runs_in_one_folder_the_second_is_refused_and_the_first_goes_on(tmp_path) -> None:
    out, refused = tmp_path / "run", []

    def second(record):
        for resume in (True, False):
            with pytest.raises(UserError, match="another process is using this folder|already holds a run") as error:
                experiment("fedavg", out).run(resume=resume)
            refused.append(str(error.value))

    experiment("fedavg", out, on_round=second).run()
    assert len(refused) == 6
    assert f"process {os.getpid()}" in refused[0]
    assert results(out) == whole("fedavg")


def test_a_run_in_a_thread_leaves_signals_alone(tmp_path) -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=experiment("fedavg", tmp_path / "run").run)
    thread.start()
    thread.join()
    assert results(tmp_path / "run") == whole("fedavg")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_stops_a_run_is_told_how_to_go_on(by, code, tmp_path, capfd) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as stopped:
        experiment("fedavg", tmp_path / "run", on_round=stop_in(1, by)).run()
    assert str(stopped.value) == f"stopped after round 1 of 3; resume with: fedloom resume {tmp_path / 'run'}"
    assert stopped.value.exit_code == code
    assert "a second Ctrl-C (or SIGTERM) stops at once" in capfd.readouterr().err
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_a_second_ctrl_c_leaves_at_once_with_the_last_checkpoint(engine, tmp_path) -> None:
    def twice(record):
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as left:
        experiment("ditto", tmp_path / "run", engine=engine, on_round=twice).run()
    assert not isinstance(left.value, Interrupted)
    assert sorted((tmp_path / "run" / "checkpoints").glob("*.json"))[-1].name == "round-000001.json"
    experiment("ditto", tmp_path / "run").run(resume=True)
    assert but_for_the_engine(results(tmp_path / "run")) == but_for_the_engine(whole("ditto"))


FROM_PYTHON = {"method": "ditto", "data": "digits", "clients": 4, "rounds": 3, "data.limit": 200}


def test_from_python(tmp_path, caplog) -> None:
    expected = fedloom.run(**FROM_PYTHON, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedloom.run(**FROM_PYTHON, out=tmp_path / "run", on_round=stop_in(2))
    summary = fedloom.resume(tmp_path / "run", engine="processes")
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    assert summary["personal_accuracy"] == expected["personal_accuracy"]
    assert fedloom.resume(str(tmp_path / "run")) == summary
    assert fedloom.run(**FROM_PYTHON, out=tmp_path / "run", resume=True) == summary
    assert fedloom.run(**FROM_PYTHON, out=tmp_path / "new", resume=True)["run_dir"] == str(tmp_path / "new")
    assert caplog.text.count("there is nothing to resume") == 2


def test_mistakes_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match="nowhere' holds no run .*no recipe.yaml"):
        fedloom.resume(tmp_path / "nowhere")
    with pytest.raises(UserError, match="resume: out is missing; set it to the folder to resume"):
        fedloom.run(method="fedavg", resume=True)
    fedloom.run(**FROM_PYTHON, out=tmp_path / "run")
    with pytest.raises(UserError, match="training.rounds = 9: .* was started with 3.*to change it: `fedloom resume"):
        fedloom.run(**FROM_PYTHON | {"rounds": 9}, out=tmp_path / "run", resume=True)


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in a new session, in the environment of these tests."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedloom", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"PYTHONPATH": str(Path(fedloom.__file__).parents[1])},
    )  # fmt: skip


def finish(*arguments: str) -> tuple[int, str]:
    """Exit code, and what it said."""
    running = start(*arguments)
    said = running.communicate(timeout=300)[1]
    return running.returncode, said


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_soak_in_short_ends_with_the_same_files_and_nothing_left() -> None:
    soak = Path(fedloom.__file__).parents[1] / "benchmarks" / "soak.py"
    options = ["--rounds", "24", "--ends", "3", "--every", "4", "--engines", "processes", "--seed", "2", "--fork"]
    done = subprocess.run([sys.executable, soak, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("processes"))
    ends, failed, differing, left = row[1], *map(int, row[3:6])
    assert sum(map(int, ends.split("/"))) == 3
    assert failed > 0
    assert (differing, left) == (0, 0)


def test_the_command_refuses_a_folder_that_another_process_has(capsys, monkeypatch) -> None:
    running = start("run", *TINY, "--rounds", "5000", "--set", "evaluation.every=5000", "--out", "run")
    try:
        while lines(Path("run")) < 1:
            assert running.poll() is None
            time.sleep(0.01)
        assert f"another process is using this folder (process {running.pid} on" in refused(
            capsys, monkeypatch, "resume", "run"
        )
        assert running.poll() is None
    finally:
        running.kill()
        running.communicate()


def test_the_command_resumes_what_is_finished_by_saying_so(capsys, monkeypatch) -> None:
    fedloom.run(**FROM_PYTHON, out="run")
    before = contents(Path("run"))
    code, said = finish("resume", "run")
    assert code == 0
    assert said.endswith("the run in 'run' is finished: there is nothing to resume\n")
    assert contents(Path("run")) == before
    assert refused(capsys, monkeypatch, "resume", "elsewhere").startswith("error: 'elsewhere' holds no run")


def test_nothing_is_logged_when_all_is_well(tmp_path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        with pytest.raises(Interrupted):
            experiment("fedavg", tmp_path / "run", on_round=stop_in(1)).run()
        experiment("fedavg", tmp_path / "run").run(resume=True)
    assert caplog.text == ""
