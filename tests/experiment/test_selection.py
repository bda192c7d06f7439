"""Validation samples: what is recorded of them, the best round, early stopping and the restored state."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import same_state, tiny_experiment, tiny_run, tiny_task, with_validation, without_times

from fedloom import Callback, StopRun
from fedloom.core.errors import UserError
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.selection import BestState, EarlyStopping, best_of, best_round
from fedloom.experiment.summary import summary_of


def record(round: int, value: float | None, evaluated: int = 4, **figures) -> dict:
    return {"round": round, "evaluated": evaluated, "validation_personal_accuracy": value, "up_bytes": 1,
            "down_bytes": 1} | figures  # fmt: skip


def history(*values: float | None) -> list[dict]:
    return [record(i, value) for i, value in enumerate(values, 1)]


def test_the_best_is_the_first_of_equals_and_never_unknown():
    assert best_of([("a", 0.1), ("b", 0.3), ("c", 0.3), ("d", None), ("e", float("nan"))], "accuracy") == "b"
    assert best_of([("a", 0.3), ("b", 0.1)], "loss") == "b"
    assert best_of([("a", None)], "accuracy") is None


def test_rounds_are_compared_only_if_as_many_clients_were_evaluated():
    rounds = [record(1, 0.9, evaluated=2), record(2, 0.4), record(3, 0.5), {"round": 4}]
    assert best_round(rounds, "accuracy") is rounds[2]
    assert best_round([], "accuracy") is None


@pytest.mark.parametrize(
    ("values", "improved", "due"),
    [
        ([0.5], True, False),
        ([0.5, 0.5], False, False),  # equal values do not improve
        ([0.5, 0.4, 0.5], False, True),
        ([0.5, 0.4, 0.6], True, False),
        ([0.5, 0.4, 0.6, 0.1], False, False),
        ([None, None], False, True),
        ([None, 0.1], True, False),
    ],
)
def test_patience_counts_evaluations_without_improvement(values, improved, due):
    stopping = EarlyStopping(2, "accuracy")
    assert stopping.improved(history(*values)) == improved
    assert stopping.due(history(*values)) == due


def test_rounds_without_an_evaluation_do_not_count():
    rounds = [record(1, 0.5), {"round": 2}, {"round": 3}, record(4, 0.4), {"round": 5}]
    assert not EarlyStopping(2, "accuracy").due(rounds)
    assert EarlyStopping(1, "accuracy").due(rounds)
    assert not EarlyStopping(1, "accuracy").improved(rounds[:3])


def test_the_best_round_of_a_summary_is_chosen_by_validation_and_reported_by_test():
    rounds = [
        record(1, 0.2, personal_accuracy=0.9, global_accuracy=0.8),
        record(2, 0.7, personal_accuracy=0.5, global_accuracy=0.4),
        record(3, 0.6, personal_accuracy=0.6, global_accuracy=0.5),
    ]
    found = summary_of(rounds, "last", ())
    assert found["best"] == {"personal_accuracy": 0.5, "global_accuracy": 0.4, "round": 2}
    assert (found["best_by"], found["measure"]) == ("validation", "accuracy")
    assert (found["personal_accuracy"], found["validation_personal_accuracy"]) == (0.6, 0.6)  # still the last round
    for one in rounds:
        del one["validation_personal_accuracy"]
    plain = summary_of(rounds, "last", ())
    assert plain["best"] == {"personal_accuracy": 0.9, "global_accuracy": 0.8}  # as without validation ever
    assert not [name for name in plain if "validation" in name or name in ("best_by", "measure")]


def test_best_state_is_copied_and_restored_with_clients_that_came_and_went():
    live = {"memory": ClientStore(2**20)}
    live["memory"][0] = {"x": torch.zeros(2)}
    best = BestState(live, 2**20, Path())
    server = {"state/w": torch.ones(2)}
    live["memory"][1] = {"x": torch.ones(2)}
    best.keep(server)
    server["state/w"].add_(1)  # copies are not views
    live["memory"][1]["x"].add_(1)
    live["memory"][1] = live["memory"][1]
    live["memory"][2] = {"x": torch.ones(2)}
    del live["memory"][0]
    assert same_state(best.restore(), {"state/w": torch.ones(2)})
    assert sorted(live["memory"]) == [0, 1]
    assert live["memory"][0]["x"].tolist() == [0, 0]
    assert live["memory"][1]["x"].tolist() == [1, 1]


SOME = {"training__rounds": 9, "training__patience": 2, "training__optimizer__lr": 0.3}


@pytest.mark.parametrize(
    "method", ["fedavg", "fedper", "fedamp", "fedavg+ft", pytest.param("fedstyle", marks=pytest.mark.slow)]
)
def test_a_stopped_run_has_the_models_and_figures_of_its_best_round(method, tmp_path):
    task = with_validation(tiny_task())
    run = tiny_experiment(method, task=task, out=str(tmp_path / "stopped"), **SOME)
    summary = run.run()
    best = summary["restored"]
    assert best == summary["best"]["round"] == best_round(run.history, "accuracy")["round"]
    assert summary["rounds"] == len(run.history) == min(9, best + 2)
    only = {**SOME, "training__rounds": best, "training__patience": None}
    until = tiny_experiment(method, task=task, out=str(tmp_path / "until"), **only)
    expected = until.run()
    assert same_state(run.server.state, until.server.state)
    for name in ("personal_accuracy", "global_accuracy", "personal_worst", "validation_personal_accuracy"):
        assert summary[name] == expected[name]
    files = {path.name: path.read_bytes() for path in (tmp_path / "stopped" / "models").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "until" / "models").iterdir()}
    assert (tmp_path / "stopped/clients.jsonl").read_text() == (tmp_path / "until/clients.jsonl").read_text()


def test_some_of_these_runs_stop_before_their_end(tmp_path):
    run = tiny_run("fedper", task=with_validation(tiny_task()), out=str(tmp_path / "run"), **SOME)
    assert len(run.history) < 9
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert f"stopped after round {len(run.history)} of 9: no improvement of" in summary["notes"][-1]


@pytest.mark.parametrize("engine", ["processes", "replay"])
@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fedper"])
def test_engines_agree_on_validation_and_stopping(engine, method):
    task = with_validation(tiny_task())
    expected, got = (tiny_run(method, task=task, engine=e, **SOME) for e in ("inline", engine))
    assert "validation_personal_accuracy" in expected.history[-1]
    assert without_times(got.history) == without_times(expected.history)
    assert same_state(got.server.state, expected.server.state)
    assert got.evaluator.validation == expected.evaluator.validation


class CrashError(BaseException):
    pass


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedamp"])
@pytest.mark.parametrize("storage", [1, 3])
def test_a_resumed_run_stops_and_restores_as_an_uninterrupted_one(method, storage, tmp_path):
    task, folders = with_validation(tiny_task()), {}
    for name in ("whole", "resumed"):
        fields = {**SOME, "out": str(tmp_path / name), "storage__checkpoint_every": storage}
        at = -1 if name == "whole" else 4

        def on_round(record, at=at):
            if record["round"] == at:
                raise CrashError

        experiment = tiny_experiment(method, task=task, on_round=on_round, **fields)
        if name == "resumed":
            with pytest.raises(CrashError):
                experiment.run()
            experiment = tiny_experiment(method, task=task, **fields)
        experiment.run(resume=True)
        files = {path.name: path.read_bytes() for path in (tmp_path / name / "models").iterdir()}
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        folders[name] = files, without_times(experiment.history), {**summary, "seconds": 0, "run_dir": ""}
        assert len(experiment.history) > 3
    assert folders["resumed"] == folders["whole"]


def test_validation_figures_against_a_count_by_hand():
    task = with_validation(tiny_task())
    run = tiny_run("fedavg", task=task, training__rounds=2)
    last = run.history[-1]
    server = run.evaluator.server
    server.load(run.server.state, None)
    server.modes.evaluate_only()
    with torch.no_grad():
        right = {
            c: (server.parts.model(task.stored.plain(torch.from_numpy(held))).argmax(1).numpy()
                == task.dataset.labels[held].numpy())
            for c, held in enumerate(task.federation.validation) if len(held)
        }  # fmt: skip
    assert len(right) == 5  # client 5 has a single sample, for training
    assert last["validation_personal_accuracy"] == pytest.approx(np.mean([r.mean() for r in right.values()]))
    assert last["validation_global_accuracy"] == pytest.approx(np.concatenate(list(right.values())).mean())
    assert last["validation_global_mean_accuracy"] == last["validation_personal_accuracy"]
    assert {row["client"]: row.get("validation_accuracy") for row in run.evaluator.rows()} == {
        c: pytest.approx(r.mean()) for c, r in right.items()
    } | {5: None}


def test_validation_changes_nothing_but_what_is_recorded():
    task = with_validation(tiny_task())
    without = replace(task, federation=replace(task.federation, validation=[]))
    got, expected = tiny_run("fedper", task=task), tiny_run("fedper", task=without)
    assert same_state(got.server.state, expected.server.state)
    plain = [{k: v for k, v in one.items() if "validation" not in k} for one in without_times(got.history)]
    assert plain == without_times(expected.history)


def test_newcomers_are_not_validated():
    task = with_validation(tiny_task())
    task = replace(task, federation=replace(task.federation, newcomers=(1, 2)))
    run = tiny_run("fedper", task=task, training__fraction=1.0)
    assert {scores.client for scores in run.evaluator.validation} == {0, 3, 4}


def test_patience_needs_validation_samples_and_the_last_figures():
    with pytest.raises(UserError, match=r"training.patience = 2: needs validation samples.* data.split = pooled:0.6"):
        tiny_experiment("fedavg", training__patience=2)
    with pytest.raises(UserError, match="evaluation.summary = 'mean:3': with training.patience"):
        tiny_experiment("fedavg", task=with_validation(tiny_task()), training__patience=2, evaluation__summary="mean:3")


@pytest.mark.parametrize("method", ["fedavg", "fedper", pytest.param("fedamp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [1, 2])
def test_more_rounds_after_the_last_are_those_of_a_longer_run(method, every, tmp_path):
    """The fifth round is evaluated only because it is the last: a longer run neither knows nor restores it."""
    task, fields = with_validation(tiny_task()), {**SOME, "training__patience": 3, "evaluation__every": every}
    found = {}
    for name, ends in (("extended", (5, 9)), ("whole", (9,))):
        for rounds in ends:
            fields |= {"out": str(tmp_path / name), "training__rounds": rounds}
            experiment = tiny_experiment(method, task=task, **fields)
            experiment.run(resume=True, extend=True)
        files = {path.name: path.read_bytes() for path in (tmp_path / name / "models").iterdir()}
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        found[name] = files, without_times(experiment.history), {**summary, "seconds": 0, "run_dir": ""}
        assert len(experiment.history) > 5
    assert found["extended"] == found["whole"]


def test_a_stopped_run_is_finished_and_not_extended(tmp_path):
    task, fields = with_validation(tiny_task()), {**SOME, "out": str(tmp_path / "run")}
    summary = tiny_experiment("fedper", task=task, **fields).run()
    assert summary["rounds"] < 9
    again = tiny_experiment("fedper", task=task, **fields).run(resume=True)
    assert again["restored"] == summary["restored"] and again["rounds"] == summary["rounds"]
    with pytest.raises(UserError, match=f"stopped after round {summary['rounds']} because of training.patience = 2"):
        tiny_experiment("fedper", task=task, **fields | {"training__rounds": 20}).run(resume=True, extend=True)


def test_a_callback_that_ends_a_run_is_not_mistaken_for_lost_patience(tmp_path):
    class Stop(Callback):
        def on_round(self, record):
            if record["round"] == 2:
                raise StopRun("far enough")

    run = tiny_experiment(
        "fedper", task=with_validation(tiny_task()), out=str(tmp_path / "run"), callbacks=[Stop()],
        **{**SOME, "training__patience": 50},
    )  # fmt: skip
    notes = run.run()["notes"]
    best = best_round(run.history, "accuracy")["round"]
    assert notes[-2:] == ["stopped after round 2 of 9: far enough", f"models and figures are those of round {best}"]
