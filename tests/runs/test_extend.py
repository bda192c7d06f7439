"""A run that is extended to more rounds ends with the files of a run that was started with them, timings aside."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import tiny_experiment, without_times
from using import invoke, refused

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupted
from fedloom.experiment.checkpoint import Checkpoints
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.run_folder import RunFolder

KEEP = {"training__optimizer__keep": True}
CASES = {
    "fedavg": ("fedavg", {}),
    "rarely evaluated": ("fedper", {"evaluation__every": 3}),
    "scaffold": ("scaffold", {}),
    "fedcrl": ("fedcrl", {"training__fraction": 0.3}),  # some clients have not taken part after two rounds
    "ditto": ("ditto", KEEP | {"training__fraction": 0.3, "training__warmup": 3}),
}


class CrashError(BaseException):
    """The process is gone, as far as the run folder can tell."""


def crash_in(round: int):
    def on_round(record):
        if record["round"] == round:
            raise CrashError

    return on_round


def stop_in(round: int):
    def on_round(record):
        if record["round"] == round:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_round


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def experiment(case: str, out: Path, rounds: int, **options):
    method, fields = CASES[case]
    return tiny_experiment(method, out=str(out), training__rounds=rounds, **fields, **options)


def state_at_the_end(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the only checkpoint: the server's and each client's."""
    assert len(list((folder / "checkpoints").glob("*.json"))) == 1
    stores = {name: ClientStore(2**30, inside=folder) for name in ("memory", "remembered")}
    _, server = Checkpoints(folder / "checkpoints").load(stores)
    clients = {f"{s}/{c}/{n}": t for s, store in stores.items() for c in store for n, t in store[c].items()}
    return server | clients


def files(folder: Path) -> dict[str, object]:
    """The contents of a finished run's folder without timings and the folder's own path."""
    found: dict[str, object] = {
        name: data for name, data in contents(folder).items() if not name.startswith("checkpoints/")
    }
    found.pop("log.txt", None)
    lines = [json.loads(line) for line in found.pop("metrics.jsonl").splitlines()]
    summary = json.loads(found.pop("summary.json"))
    checkpoint = json.loads(next((folder / "checkpoints").glob("*.json")).read_text())["checkpoint"]
    return found | {
        "metrics.jsonl": without_times(lines),
        "order of fields": [list(line) for line in lines],
        "summary.json": {name: value for name, value in summary.items() if name not in ("seconds", "run_dir")},
        "checkpoint": checkpoint["round"],
        "history": without_times(checkpoint["notes"]["history"]),
        "ledger": checkpoint["notes"]["ledger"],
        "tensors": {name: t.numpy().tobytes() for name, t in state_at_the_end(folder).items()},
    }


@pytest.mark.parametrize("engine", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_two_rounds_extended_to_four_are_a_run_of_four(case, engine, tmp_path):
    make = partial(experiment, case, engine=engine)
    short, whole = tmp_path / "short", tmp_path / "whole"
    make(whole, 4).run()
    first = make(short, 2).run()
    before = len((short / "metrics.jsonl").read_text().splitlines())
    second = make(short, 4).run(resume=True, extend=True)
    assert (before, first["rounds"], second["rounds"]) == (2, 2, 4)
    assert files(short) == files(whole)


@pytest.mark.parametrize("done", ["stopped", "crashed"])
def test_an_unfinished_run_gets_more_or_fewer_rounds(done, tmp_path):
    for rounds in (4, 3):
        out, whole = tmp_path / f"run-{rounds}", tmp_path / f"whole-{rounds}"
        error, on_round = (Interrupted, stop_in(2)) if done == "stopped" else (CrashError, crash_in(2))
        running = experiment("ditto", out, 5, on_round=on_round, storage__checkpoint_every=1)
        with pytest.raises(error):
            running.run()
        experiment("ditto", out, rounds).run(resume=True, extend=True)
        experiment("ditto", whole, rounds, storage__checkpoint_every=1).run()
        assert files(out) == files(whole)


def test_fewer_rounds_than_the_last_checkpoint_start_from_the_one_before(tmp_path):
    out, seen = tmp_path / "run", []
    with pytest.raises(Interrupted):
        experiment("ditto", out, 5, on_round=stop_in(3), storage__checkpoint_every=1).run()
    on_round = lambda record: seen.append(record["round"])  # noqa: E731
    experiment("ditto", out, 3, on_round=on_round).run(resume=True, extend=True)
    experiment("ditto", tmp_path / "whole", 3, storage__checkpoint_every=1).run()
    assert seen == [3]
    assert files(out) == files(tmp_path / "whole")


def test_a_run_without_an_early_enough_checkpoint_is_refused(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        experiment("ditto", out, 5, on_round=stop_in(4), storage__checkpoint_every=1).run()
    before = contents(out)
    with pytest.raises(UserError, match=r"none of its 2 checkpoints can be used \(2 not before round 2"):
        experiment("ditto", out, 2).run(resume=True, extend=True)
    assert {name: data for name, data in contents(out).items() if name != "log.txt"} == {
        name: data for name, data in before.items() if name != "log.txt"
    }


def test_an_extension_can_itself_be_stopped_resumed_and_extended(tmp_path):
    out, whole = tmp_path / "run", tmp_path / "whole"
    experiment("ditto", out, 2).run()
    with pytest.raises(Interrupted):
        experiment("ditto", out, 4, on_round=stop_in(3)).run(resume=True, extend=True)
    assert not (out / "summary.json").exists()
    experiment("ditto", out, 4).run(resume=True)
    experiment("ditto", out, 5).run(resume=True, extend=True)
    experiment("ditto", whole, 5).run()
    assert files(out) == files(whole)


@pytest.mark.parametrize("moment", ["summary", "metrics"])
def test_a_process_that_dies_while_it_reopens_a_run_loses_nothing(moment, tmp_path, monkeypatch):
    out, whole = tmp_path / "run", tmp_path / "whole"
    experiment("fedcrl", out, 2).run()

    real = Path.unlink

    def die(where, *arguments, **options):
        if isinstance(where, Path) and where.name != "summary.json":
            return real(where, *arguments, **options)
        raise CrashError

    with monkeypatch.context() as patch:
        if moment == "summary":
            patch.setattr(Path, "unlink", die)
        else:
            patch.setattr(RunFolder, "cut_back", die)
        with pytest.raises(CrashError):
            experiment("fedcrl", out, 4).run(resume=True, extend=True)
    assert (out / "summary.json").exists() == (moment == "summary")
    experiment("fedcrl", out, 4).run(resume=True)
    experiment("fedcrl", whole, 4).run()
    assert files(out) == files(whole)


def test_a_process_that_dies_before_the_final_checkpoint_leaves_an_older_one(tmp_path, monkeypatch):
    out, whole = tmp_path / "run", tmp_path / "whole"
    make = partial(experiment, "ditto", storage__checkpoint_every=1)
    running = make(out, 3)
    real = running._save

    def dying(history=None):
        if history is not None:
            raise CrashError
        real()

    monkeypatch.setattr(running, "_save", dying)
    with pytest.raises(CrashError):
        running.run()
    make(out, 4).run(resume=True, extend=True)
    make(whole, 4).run()
    assert files(out) == files(whole)


def test_what_cannot_be_extended_is_refused_and_untouched(tmp_path):
    cosine, bare, done = tmp_path / "cosine", tmp_path / "bare", tmp_path / "done"
    experiment("fedavg", cosine, 2, training__schedule="cosine").run()
    experiment("fedavg", bare, 2, storage__final_checkpoint=False).run()
    experiment("fedavg", done, 2).run()
    assert not (bare / "checkpoints").exists()
    before = contents(tmp_path)
    extended = {"resume": True, "extend": True}
    with pytest.raises(UserError, match=r"training.rounds = 4: .*training.schedule = 'cosine', whose learning rates"):
        experiment("fedavg", cosine, 4, training__schedule="cosine").run(**extended)
    with pytest.raises(UserError, match=r"rounds = 4: .* no checkpoint to continue from \(storage.final_checkpoint"):
        experiment("fedavg", bare, 4).run(**extended)
    with pytest.raises(UserError, match=r"training.rounds = 1: .* has finished 2 rounds; choose more, or start a new"):
        experiment("fedavg", done, 1).run(**extended)
    with pytest.raises(UserError, match=r"training.rounds = 4: .* was started with 2.*fedloom resume .* --rounds 4"):
        experiment("fedavg", done, 4).run(resume=True)
    with pytest.raises(UserError, match=r"training.rounds = 1: .* has finished 2 rounds; choose more, or start a new"):
        experiment("fedavg", done, 1).run(resume=True)
    with pytest.raises(UserError, match=r"seed = 9: .* was started with 3"):
        experiment("fedavg", done, 4, seed=9).run(**extended)
    assert contents(tmp_path) == before
    assert experiment("fedavg", cosine, 2, training__schedule="cosine").run(**extended)["rounds"] == 2


PYTHON = {"method": "fedavg", "data": "digits", "clients": 4, "data.limit": 200}


def test_from_python_and_from_the_command_line(tmp_path, capsys, monkeypatch):
    for name in ("one", "two"):
        fedloom.run(**PYTHON, rounds=1, out=tmp_path / name)
    fedloom.run(**PYTHON, rounds=2, out=tmp_path / "whole")
    seen = []
    summary = fedloom.resume(tmp_path / "one", rounds=2, on_round=seen.append)
    assert (summary["rounds"], [record["round"] for record in seen]) == (2, [2])
    said = invoke("resume", tmp_path / "two", "--rounds", "2", "--json")
    assert json.loads(said.stdout)["rounds"] == 2
    assert files(tmp_path / "one") == files(tmp_path / "two") == files(tmp_path / "whole")
    assert "must be at least 1" in refused(capsys, monkeypatch, "resume", str(tmp_path / "two"), "--rounds", "0")


def test_runs_of_a_comparison_keep_their_rounds(tmp_path):
    runs = fedloom.compare(methods=["fedavg"], **{n: v for n, v in PYTHON.items() if n != "method"}, rounds=1,
                           out=tmp_path / "both")  # fmt: skip
    assert not (Path(runs[0]["run_dir"]) / "checkpoints").exists()
    with pytest.raises(UserError, match="training.rounds = 2: .* is a run of 'both', whose runs have equal numbers"):
        fedloom.resume(runs[0]["run_dir"], rounds=2)
    with pytest.raises(UserError, match="training.rounds = 2: .* was started with 1"):
        fedloom.resume_comparison(tmp_path / "both", rounds=2)
