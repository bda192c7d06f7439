"""Callbacks are called in order, may end a run, and are named when they fail."""

import json
from pathlib import Path

import pytest
from tiny import tiny_experiment

import fedloom
from fedloom import Callback, StopRun, UserError
from fedloom.core.errors import RunError
from fedloom.experiment.resume import finished_summary

SMALL = {"data": "digits", "clients": 3, "engine": "inline", "data.limit": 90, "evaluation.every": 2}


class Notes(Callback):
    """Writes down what is called."""

    def __init__(self):
        self.calls = []

    def on_start(self, recipe, folder):
        self.calls.append(("start", recipe.method.name, folder.name))

    def on_round(self, record):
        self.calls.append(("round", record["round"]))

    def on_evaluation(self, record, clients):
        assert record["evaluated"] == len(clients)
        assert record["personal_accuracy"] == pytest.approx(sum(row["accuracy"] for row in clients) / len(clients))
        self.calls.append(("evaluation", record["round"]))

    def on_end(self, summary):
        self.calls.append(("end", summary["rounds"]))

    def close(self):
        self.calls.append(("close",))


class StopAt(Callback):
    """Ends the run after a round."""

    def __init__(self, round):
        self.round = round

    def on_round(self, record):
        if record["round"] == self.round:
            raise StopRun("far enough")


def test_callbacks_hear_of_rounds_and_evaluations_in_order():
    notes = Notes()
    fedloom.run(method="fedavg", rounds=3, out="run", callbacks=[notes], **SMALL)
    assert notes.calls == [
        ("start", "fedavg", "run"), ("round", 1), ("round", 2), ("evaluation", 2), ("round", 3), ("evaluation", 3),
        ("end", 3), ("close",),
    ]  # fmt: skip


def test_callbacks_are_called_in_all_runs_of_a_comparison_and_a_sweep():
    notes = Notes()
    fedloom.compare(methods=["local", "fedavg"], rounds=1, out="compared", callbacks=[notes], **SMALL)
    starts = [call for call in notes.calls if call[0] == "start"]
    assert starts == [("start", "local", "00-local-s0"), ("start", "fedavg", "01-fedavg-s0")]
    assert notes.calls.count(("end", 1)) == 2
    notes = Notes()
    fedloom.sweep(method="fedavg", over={"lr": [0.1, 0.2]}, rounds=1, out="swept", callbacks=[notes], **SMALL)
    assert [call[2] for call in notes.calls if call[0] == "start"] == ["lr=0.1-s0", "lr=0.2-s0"]
    with pytest.raises(UserError, match="callbacks: with parallel = 2 each run is another process"):
        fedloom.compare(methods=["local", "fedavg"], rounds=1, parallel=2, callbacks=[notes], **SMALL)


def test_a_callback_ends_a_run_which_is_then_finished():
    run = fedloom.run(method="fedper", rounds=9, out="run", callbacks=[StopAt(3)], **SMALL)
    assert (run["rounds"], run["stopped"]) == (3, "far enough")
    assert "stopped after round 3 of 9: far enough" in run["notes"]
    assert len(run.history) == 3
    whole = fedloom.run(method="fedper", rounds=3, out="whole", **SMALL)
    assert (
        run["personal_accuracy"] == whole["personal_accuracy"]
    )  # round 3 is not a multiple of 2: evaluated at the end
    assert (run.personal(1)(run.task.dataset.inputs) == whole.personal(1)(run.task.dataset.inputs)).all()
    assert fedloom.resume("run")["rounds"] == 3  # nothing is left to do
    assert finished_summary(run.recipe.with_(out="run"), warn=False) is not None
    with pytest.raises(UserError, match=r"training.rounds = 12: a callback stopped 'run' after round 3; start"):
        fedloom.resume("run", rounds=12)


def test_a_stop_after_the_last_round_changes_nothing():
    run = fedloom.run(method="fedavg", rounds=2, out="run", callbacks=[StopAt(2)], **SMALL)
    assert "stopped" not in run
    assert fedloom.resume("run", rounds=3)["rounds"] == 3


def test_the_runs_after_a_stopped_one_take_place():
    runs = fedloom.compare(methods=["local", "fedavg"], rounds=3, out="compared", callbacks=[StopAt(1)], **SMALL)
    assert [summary["rounds"] for summary in runs] == [1, 1]


def test_a_failing_callback_is_named_and_the_run_can_be_resumed():
    class Broken(Callback):
        def on_round(self, record):
            return {1: 1}[record["round"]]

    with pytest.raises(RunError, match=r"the callback Broken.on_round failed after round 2: KeyError: 2") as error:
        tiny_experiment("fedavg", out="run", callbacks=[Broken()]).run()
    assert "resume with: fedloom resume run" in error.value.__notes__[0]
    assert isinstance(error.value.__cause__, KeyError)
    notes = Notes()
    tiny_experiment("fedavg", out="run", callbacks=[notes]).run(resume=True)
    assert [call for call in notes.calls if call[0] == "round"] == [("round", 3)]
    assert [json.loads(line)["round"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Notes, r"Notes is a class; pass an instance: callbacks=\[Notes\(\)\]"),
        (print, "has none of the functions on_start, on_round, .* passed as on_round="),
    ],
)
def test_an_object_that_is_not_a_callback_is_refused(callback, message):
    with pytest.raises(UserError, match=message):
        fedloom.run(rounds=1, out="run", callbacks=[callback], **SMALL)
    assert not Path("run").exists()


def test_any_object_with_a_hook_is_a_callback():
    class Plain:
        seen = ()

        def on_evaluation(self, record, clients):
            self.seen += (record["round"],)

    plain = Plain()
    fedloom.run(method="fedavg", rounds=2, out="run", callbacks=[plain], **SMALL)
    assert plain.seen == (2,)


@pytest.mark.parametrize("error", [UserError, RunError, KeyError])
def test_a_callback_that_fails_with_any_error_loses_no_rounds(error):
    class Broken(Callback):
        def on_round(self, record):
            if record["round"] == 2:
                raise error("broken")

    with pytest.raises((UserError, RunError), match="broken") as failed:
        tiny_experiment("fedavg", out="run", callbacks=[Broken()]).run()
    assert failed.value.__notes__ == ["the rounds so far are saved; resume with: fedloom resume run"]
    assert checkpoints() == [0, 2]


@pytest.mark.parametrize("error", [UserError, KeyError])
def test_an_error_of_on_round_loses_no_rounds(error):
    def refuse(record):
        if record["round"] == 2:
            raise error("broken")

    with pytest.raises(error, match="broken") as failed:
        tiny_experiment("fedavg", out="run", on_round=refuse).run()
    assert "the rounds so far are saved" in failed.value.__notes__[0]
    assert checkpoints() == [0, 2]


def test_a_callback_that_fails_after_the_last_round_does_not_claim_that_it_is_saved():
    class Broken(Callback):
        def on_round(self, record):
            if record["round"] == 3:
                raise UserError("broken")

    with pytest.raises(UserError, match="broken") as failed:
        tiny_experiment("fedavg", out="run", callbacks=[Broken()]).run()
    assert failed.value.__notes__ == ["rounds after the last checkpoint are repeated; resume with: fedloom resume run"]
    assert checkpoints() == [0]
    assert tiny_experiment("fedavg", out="run").run(resume=True)["rounds"] == 3


def checkpoints():
    """Rounds of the checkpoints in the folder `run`."""
    return [int(path.stem.removeprefix("round-")) for path in sorted(Path("run/checkpoints").glob("round-*.json"))]


@pytest.mark.parametrize("every", [1, 4])
def test_the_final_evaluation_of_a_stopped_run_is_in_its_rounds_and_heard_by_callbacks(every):
    notes, fields = Notes(), {**SMALL, "evaluation.every": every}
    run = fedloom.run(method="fedper", rounds=6, out="run", callbacks=[StopAt(2), notes], **fields)
    whole = fedloom.run(method="fedper", rounds=2, out="whole", **fields)
    last = run.round_records[-1]
    assert last["personal_accuracy"] == run["personal_accuracy"] == whole.round_records[-1]["personal_accuracy"]
    assert [record["round"] for record in run.round_records] == [1, 2]
    assert notes.calls[-3:] == [("evaluation", 2), ("end", 2), ("close",)]


def test_a_callback_that_fails_in_the_final_evaluation_of_a_stopped_run_loses_no_rounds():
    class Broken(StopAt):
        def on_evaluation(self, record, clients):
            raise UserError("broken")

    with pytest.raises(UserError, match="broken") as failed:
        tiny_experiment("fedavg", out="run", callbacks=[Broken(2)], evaluation__every=4).run()
    assert "the rounds so far are saved" in failed.value.__notes__[0]
    assert checkpoints() == [0, 2]
    tiny_experiment("fedavg", out="run", evaluation__every=4).run(resume=True)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert ["evaluated" in line for line in lines] == [False, False, True]


class BrokenClose(Notes):
    """Cannot be closed."""

    def close(self):
        raise OSError("no connection")


def test_all_callbacks_are_closed_if_one_fails_and_the_finished_run_has_not_failed():
    notes = Notes()
    with pytest.raises(RunError, match=r"BrokenClose.close failed at the end: OSError: no connection") as failed:
        tiny_experiment("fedavg", out="run", callbacks=[BrokenClose(), BrokenClose(), notes]).run()
    assert failed.value.__notes__ == ["the run in 'run' is finished"]
    assert notes.calls[-1] == ("close",)
    assert Path("run/summary.json").exists()
    assert not Path("run/failed.txt").exists()
    assert Path("run/log.txt").read_text().count("BrokenClose.close failed") == 1  # the second one


def test_a_callback_that_cannot_be_closed_does_not_hide_the_error_that_ended_the_run():
    def die(record):
        raise ValueError("the cause")

    notes = Notes()
    with pytest.raises(ValueError, match="the cause"):
        tiny_experiment("fedavg", out="run", on_round=die, callbacks=[BrokenClose(), notes]).run()
    assert notes.calls[-1] == ("close",)
    assert Path("run/failed.txt").read_text() == "ValueError: the cause\n"
    assert "BrokenClose.close failed at the end: OSError: no connection" in Path("run/log.txt").read_text()


def test_one_callback_may_be_given_without_a_list():
    notes = Notes()
    tiny_experiment("fedavg", out="run", callbacks=notes).run()
    assert ("round", 1) in notes.calls
    with pytest.raises(UserError, match=r"Notes is a class; pass an instance"):
        tiny_experiment("fedavg", out="other", callbacks=Notes)
