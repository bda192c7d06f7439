"""Clients that fail are left out of a round, logged and counted; what the others make of it is unchanged."""

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tiny import same_state, tiny_run, tiny_run_with_memory, tiny_task, without_times

from fedloom.config.recipe import Recipe
from fedloom.core.errors import RunError, UserError
from fedloom.core.execution import WORK, perform
from fedloom.core.failures import ClientError, RoundError
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.workspace import Workspace
from fedloom.experiment.loop import Experiment
from fedloom.experiment.rounds import ATTEMPTS, Rounds
from fedloom.methods import Method
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedper import FedPer
from fedloom.trust.faults import Faults


@pytest.fixture
def method():
    """Registers a class as the method `troubled` for one test."""

    def register(body, base=Method):
        type("Troubled", (base,), {**body, "__module__": __name__})
        return "troubled"

    return register


def everyone(**fields):
    """All six clients, one round."""
    return {"training__fraction": 1.0, "training__rounds": 1} | fields


def inject(monkeypatch, draw):
    """Faults that this function draws."""
    monkeypatch.setattr(Faults, "draw", draw)
    monkeypatch.setattr(Faults, "any", True)


def raising_for(*bad):
    def update(self, client):
        Method.update(self, client)
        if client.id in bad:
            raise ZeroDivisionError(f"no luck for {client.id}")

    return {"update": update}


# a client that raises


def test_by_default_a_client_that_raises_ends_the_run_with_its_own_exception(method):
    with pytest.raises(ZeroDivisionError, match="no luck for 3") as caught:
        tiny_run(method(raising_for(3)), **everyone())
    assert "client 3: update, round 1" in caught.value.__notes__[0]


def test_from_a_worker_the_traceback_comes_as_text(method):
    with pytest.raises(ClientError, match=r"client 3 failed in round 1:[\s\S]*in update[\s\S]*no luck for 3"):
        tiny_run(method(raising_for(3)), engine="processes", **everyone())


@pytest.mark.parametrize("engine", ["inline", "processes", "replay"])
def test_skipped_clients_are_left_out_counted_and_logged_once_with_a_traceback(method, engine, caplog):
    fields = everyone(training__on_error="skip", training__rounds=2)
    done = tiny_run(method(raising_for(0, 3)), engine=engine, **fields)
    assert [(r["clients"], r["failed"]) for r in done.history] == [(4, {"raised": 2})] * 2
    text = (done.folder.path / "log.txt").read_text()
    assert text.count("Traceback") == 2  # two clients, two different sentences, each once in two rounds
    assert text.count("client 3 is left out (raised): ZeroDivisionError: no luck for 3") == 2
    summary = json.loads((done.folder.path / "summary.json").read_text())
    assert summary["failed"] == {"raised": 4}
    assert "4 raised" in summary["notes"][-1]


def test_averaging_is_that_of_those_who_answered(method):
    """The weights of a round with failures are those of the same round among the others alone, weighed by samples."""
    troubled = tiny_run(method(raising_for(1, 4)), **everyone(training__on_error="skip"))
    plain = tiny_run("fedavg", **everyone(training__rounds=1))
    lane = Workspace(plain.setup)
    start = Message(lane.downward())
    messages = [perform(lane, Job("update", 1, start, client=c)).message for c in (0, 2, 3, 5)]
    samples = sum(m.samples for m in messages)
    for name in ("model.head.weight", "model.extractor.fc1.bias"):
        mean = sum(m[name].double() * m.samples for m in messages) / samples
        assert torch.allclose(troubled.server.state[name].double(), mean, atol=1e-7)
    assert not same_state(troubled.server.state, plain.server.state)


def test_if_all_raise_the_run_ends_with_the_first_error_and_no_retry(method, caplog):
    asked = []

    def update(self, client):
        asked.append(client.id)
        raise ZeroDivisionError(f"no luck for {client.id}")

    with pytest.raises(ZeroDivisionError) as caught:
        tiny_run(method({"update": update}), **everyone(training__on_error="skip"))
    assert str(caught.value) == f"no luck for {asked[0]}"
    assert len(asked) == 6


def test_a_users_mistake_found_by_a_client_is_told_without_a_traceback_from_everywhere(method):
    def update(self, client):
        raise UserError("method.top = 3: there are two layers")

    name = method({"update": update})
    for engine in ("inline", "processes"):
        with pytest.raises(UserError) as caught:
            tiny_run(name, engine=engine, **everyone(training__on_error="skip"))
        assert str(caught.value) == "method.top = 3: there are two layers"


# what is sent


def rewrite(message, others, without=None):
    tensors = {name: tensor for name, tensor in message.items() if name != without}
    message.tensors = type(message.tensors).of(tensors | others)


BAD = {
    "nan": (lambda m: m["model.head.bias"].fill_(math.nan), "'model.head.bias' has values that are not finite"),
    "inf": (lambda m: m["model.head.bias"][0].fill_(-math.inf), "'model.head.bias' has values that are not finite"),
    "shape": (lambda m: rewrite(m, {"model.head.bias": torch.zeros(5)}), "[5], but torch.float32 [4] is"),
    "dtype": (lambda m: rewrite(m, {"model.head.bias": torch.zeros(4).double()}), "is torch.float64 [4]"),
    "missing": (lambda m: rewrite(m, {}, without="model.head.bias"), "'model.head.bias' is missing"),
    "extra": (lambda m: rewrite(m, {"model.tail": torch.zeros(1)}), "'model.tail' is not expected"),
    "samples": (lambda m: setattr(m, "samples", -5), "with -5 samples"),
    "another's": (lambda m: setattr(m, "client", 1), "claims to be client 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "engine"),
    # from a worker process a message comes with its result's client: it cannot claim to be another's
    [
        (what, engine)
        for what in BAD
        for engine in ("inline", "processes")
        if (what, engine) != ("another's", "processes")
    ],
)
def test_what_cannot_be_used_is_not_combined(what, engine, monkeypatch, caplog):
    change, words = BAD[what]
    reference = tiny_run("fedavg", engine="inline", **everyone(faults__drop=0.0))
    dropped = _without_client_two(monkeypatch)
    honest = WORK["update"]

    def update(lane, job):
        result = honest(lane, job)
        if job.client == 2:
            change(result.message)
        return result

    monkeypatch.setitem(WORK, "update", update)
    done = tiny_run("fedavg", engine=engine, **everyone())
    assert done.history[0]["failed"] == {"invalid": 1}
    assert done.history[0]["clients"] == 5
    assert "client 2 is left out (invalid): " in caplog.text
    assert words in caplog.text
    assert same_state(done.server.state, dropped)
    assert not same_state(done.server.state, reference.server.state)


def _without_client_two(monkeypatch):
    """The state after the same round in which client 2 just does not answer."""
    with monkeypatch.context() as patch:
        inject(patch, lambda self, seed, round, client, attempt=0: ("drop" if client == 2 else "", 0.0))
        done = tiny_run("fedavg", **everyone())
    assert done.history[0]["failed"] == {"dropped": 1}
    return done.server.state


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_bad_value_among_many_is_found_wherever_it_is(dtype, value):
    for size in (1, 7, 1000, 70_000):
        for place in (0, size // 2, size - 1):
            good, bad = torch.ones(size, dtype=dtype), torch.ones(size, dtype=dtype)
            bad[place] = value
            others = {"a": torch.full((3,), 3e38), "n": torch.zeros(0), "i": torch.ones(2, dtype=torch.int64)}
            assert Message(others | {"b": good}).not_finite() is None
            assert Message(others | {"b": bad, "c": good}).not_finite() == "b"


# memory


def remembered(experiment_fields, monkeypatch, method="fedper"):
    """Runs, and keeps a copy of every client's memory after each round."""
    after = []
    original = Rounds.run

    def run(self, number):
        record = original(self, number)
        after.append(({c: deepcopy(self.memory[c]) for c in self.memory}, record))
        return record

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "run", run)
        tiny_run(method, **experiment_fields)
    return after


@pytest.mark.parametrize("engine", ["inline", "processes"])
@pytest.mark.parametrize("fault", ["drop", "crash", "raises", "nan"])
def test_a_failed_clients_memory_is_what_it_was(fault, engine, monkeypatch):
    def draw(self, seed, round, client, attempt=0):
        return (fault if (round, client) == (2, 1) else ""), 0.0

    inject(monkeypatch, draw)
    rounds = remembered(everyone(training__rounds=3, engine__name=engine), monkeypatch)
    one, two, three = (memory for memory, _ in rounds)
    assert rounds[1][1]["failed"] == {
        {"drop": "dropped", "crash": "died", "raises": "raised", "nan": "invalid"}[fault]: 1
    }
    assert same_state(two[1], one[1])
    assert not same_state(two[0], one[0])
    assert not same_state(three[1], two[1])


def test_a_client_that_fails_at_its_first_round_has_no_memory(monkeypatch):
    inject(monkeypatch, lambda self, seed, round, client, attempt=0: ("raises" if client == 1 else "", 0))
    (memory, _), *_ = remembered(everyone(), monkeypatch)
    assert sorted(memory) == [0, 2, 3, 4, 5]


def test_an_update_that_raises_midway_leaves_the_memory_alone(method, monkeypatch):
    def update(self, client):
        FedPer.update(self, client)
        if client.round == 2 and client.id == 1:
            raise ZeroDivisionError("late")

    name = method({"update": update}, FedPer)
    fields = everyone(training__rounds=2, training__on_error="skip")
    (one, _), (two, record) = remembered(fields, monkeypatch, name)
    assert record["failed"] == {"raised": 1}
    assert same_state(one[1], two[1])


# rounds that need more answers


def test_a_round_with_too_few_answers_is_retried_with_others(monkeypatch, caplog):
    """Half of the clients; in the first attempt of round 1 nobody answers: the other half is asked, and that is all."""

    def draw(self, seed, round, client, attempt=0):
        return ("drop" if round == 1 and attempt == 0 else ""), 0.0

    inject(monkeypatch, draw)
    rounds = remembered({"training__fraction": 0.5, "training__rounds": 2}, monkeypatch)
    asked_first = {int(line.split("client ")[1].split()[0]) for line in caplog.messages if "left out" in line}
    memory, record = rounds[0]
    assert (record["clients"], record["failed"], record["attempts"]) == (3, {}, 2)
    assert set(memory) == set(range(6)) - asked_first
    assert "0 of 3 clients answered (3 dropped); training.min_clients = 1, so the round is retried" in caplog.text
    assert "attempts" not in rounds[1][1]


def test_answers_of_an_attempt_that_failed_are_as_if_never_given(monkeypatch):
    """4 of 6 answer where 5 are needed; in the second attempt all do: the run equals one without any fault."""

    def draw(self, seed, round, client, attempt=0):
        return ("drop" if attempt == 0 and client in (0, 4) else ""), 0.0

    plain = tiny_run("fedper", **everyone(training__rounds=2))
    inject(monkeypatch, draw)
    done = tiny_run("fedper", **everyone(training__rounds=2, training__min_clients=5))
    assert [r["attempts"] for r in done.history] == [2, 2]
    assert same_state(done.server.state, plain.server.state)
    drop = ("attempts", "failed")
    assert [{k: v for k, v in r.items() if k not in drop} for r in without_times(done.history)] == [
        {k: v for k, v in r.items() if k not in drop} for r in without_times(plain.history)
    ]


def test_the_run_stops_with_a_typed_error_when_nobody_answers(caplog):
    with pytest.raises(
        RoundError, match=r"round 1: 0 of 4 clients answered \(4 dropped\).*lower training\.min_clients"
    ):
        tiny_run("fedavg", faults__drop=1.0)
    assert issubclass(RoundError, RunError)
    assert caplog.text.count("is retried with other clients") == ATTEMPTS - 1


def test_diverged_clients_all_of_them_stop_the_run(caplog):
    with pytest.raises(RoundError, match=r"round 1: .*4 invalid.*client \d and others diverged; lower training"):
        tiny_run("fedavg", faults__nan=1.0)
    (once,) = [line for line in caplog.messages if "not finite" in line]
    assert re.match(r"round 1: client \d is left out \(invalid\): .*likely causes: ", once)
    assert all(name in once for name in ("training.optimizer.lr", "training.optimizer.clip", "data.normalise"))


@pytest.mark.parametrize("engine", ["inline", "processes", "replay"])
def test_the_step_at_which_training_diverged_is_named(engine, method, caplog):
    def build(self, task):
        return {"model": task.model(), "taken": torch.zeros(())}

    def loss(self, client, batch):
        client.taken.add_(1)
        return FedAvg.loss(self, client, batch) * torch.where(client.taken >= 3, torch.nan, 1.0)

    tiny_run(method({"build": build, "loss": loss}, base=FedAvg), engine=engine, training__batch_size=2)
    (once,) = [line for line in caplog.messages if "not finite" in line]
    assert "its loss was not finite from training step 3 on; likely causes: " in once


def test_more_answers_than_clients_of_a_round_are_refused_before_anything_is_written(tmp_path):
    recipe = Recipe.parse({"training": {"fraction": 0.5, "min_clients": 4}, "out": str(tmp_path / "x")})
    with pytest.raises(UserError, match=r"training\.min_clients = 4: 3 of 6 clients .*raise training\.fraction"):
        Experiment(recipe, task=tiny_task()).run()
    assert not (tmp_path / "x").exists()


# injected faults

FAULTS = {"faults__drop": 0.15, "faults__nan": 0.15, "faults__crash": 0.1, "faults__raises": 0.1}


@pytest.mark.parametrize("method_name", ["fedavg", "fedper", "scaffold"])
def test_faults_give_the_same_numbers_on_every_engine(method_name):
    fields = everyone(training__rounds=4, training__min_clients=2, **FAULTS)
    inline = tiny_run(method_name, **fields)
    processes = tiny_run(method_name, engine="processes", **fields)
    assert without_times(inline.history) == without_times(processes.history)
    assert same_state(inline.server.state, processes.server.state)
    failed = [kind for record in inline.history for kind in record["failed"]]
    assert len(set(failed)) >= 3


def test_faults_come_as_often_as_asked_and_are_keyed():
    faults = Faults(drop=0.2, crash=0.1, raises=0.05, nan=0.15, lost=0.1, slow=0.3, slow_seconds=7)
    drawn = [faults.draw(0, round, client) for round in range(100) for client in range(100)]
    for kind in ("drop", "crash", "raises", "nan", "lost"):
        share = sum(fault == kind for fault, _ in drawn) / len(drawn)
        p = getattr(faults, kind)
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / len(drawn))
    assert {delay for _, delay in drawn} == {0.0, 7.0}
    assert abs(sum(delay > 0 for _, delay in drawn) / len(drawn) - 0.3) < 0.02
    assert drawn == [faults.draw(0, round, client) for round in range(100) for client in range(100)]
    assert drawn != [faults.draw(1, round, client) for round in range(100) for client in range(100)]
    assert drawn != [faults.draw(0, round, client, 1) for round in range(100) for client in range(100)]


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_a_client_whose_message_is_lost_trains_and_keeps_the_result(engine):
    """So it is in PFLlib (`client_drop_rate`); a client that does not respond (`drop`) does not train."""
    (plain, kept), (lossy, kept_too) = (
        tiny_run_with_memory("fedper", engine=engine, **everyone(faults__lost=share)) for share in (0, 0.5)
    )
    lost = [c for c in range(6) if Faults(lost=0.5).draw(3, 1, c)[0] == "lost"]
    assert 0 < len(lost) < 6
    assert (lossy.history[0]["clients"], lossy.history[0]["failed"]) == (6 - len(lost), {"dropped": len(lost)})
    assert all(same_state(kept_too[c], kept[c]) for c in range(6))
    arrived = [c for c in range(6) if c not in lost]
    lane = Workspace(plain.setup)
    start = Message(lane.downward())
    messages = [perform(lane, Job("update", 1, start, client=c)).message for c in arrived]
    name = "model.extractor.fc1.bias"
    mean = sum(m[name].double() * m.samples for m in messages) / sum(m.samples for m in messages)
    assert torch.allclose(lossy.server.state[name].double(), mean, atol=1e-7)


def test_without_faults_nothing_is_different():
    assert Faults().draw(0, 1, 2) == ("", 0.0)
    record = tiny_run("fedavg", training__rounds=1).history[0]
    assert record["failed"] == {}
    assert not list(Path("runs").glob("*/log.txt"))


@pytest.mark.slow
def test_slow_clients_are_timed_out_where_that_can_be_done(caplog):
    fields = everyone(faults__slow=0.5, faults__slow_seconds=30, engine__client_timeout=1.5)
    done = tiny_run("fedavg", engine="processes", **fields)
    slow = [c for c in range(6) if Faults(slow=0.5, slow_seconds=30).draw(3, 1, c)[1]]
    assert 0 < len(slow) < 6
    assert done.history[0]["failed"] == {"timed_out": len(slow)}
    for client in slow:
        assert f"client {client} is left out (timed out)" in caplog.text


# a worker killed from outside, in the middle of a run


def test_a_run_survives_workers_that_are_shot(method, tmp_path):
    def update(self, client):
        Method.update(self, client)
        if client.round == 2 and client.id == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    done = tiny_run(method({"update": update}), engine="processes", **everyone(training__rounds=3))
    assert [r["failed"] for r in done.history] == [{}, {"died": 1}, {}]
    assert [r["clients"] for r in done.history] == [6, 5, 6]


# evaluation


def test_a_client_whose_evaluation_raises_is_left_out_of_it_only_where_asked(method, caplog):
    def personalise(self, client):
        if client.id == 2:
            raise ZeroDivisionError("not me")

    name = method({"personalise": personalise})
    with pytest.raises(ZeroDivisionError, match="not me"):
        tiny_run(name, **everyone())
    done = tiny_run(name, **everyone(training__on_error="skip"))
    assert done.history[0]["evaluated"] == 5
    assert "client 2 is not evaluated: ZeroDivisionError: not me" in caplog.text


def test_the_users_own_logging_is_left_alone():
    logger = logging.getLogger("fedloom")
    before = list(logger.handlers)
    tiny_run("fedavg", **everyone(faults__drop=0.3))
    assert logger.handlers == before


def test_the_command_says_on_stderr_and_in_the_log_who_was_left_out():
    arguments = ["run", "--rounds", "3", "--clients", "6", "--set", "data.limit=200", "--set", "faults.drop=0.3"]
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", *arguments, "--out", "here", "--json"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    dropped = json.loads(done.stdout)["failed"]["dropped"]
    assert dropped > 0
    assert done.stderr.count("is left out (dropped): no response (faults.drop)") == dropped
    assert Path("here/log.txt").read_text().count("WARNING round") == dropped
    assert f"note: clients that were left out of a round: {dropped} dropped" in done.stderr


def test_a_round_that_nobody_answers_leaves_a_checkpoint_of_the_rounds_before(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(RoundError) as error:
        tiny_run("fedavg", out=str(out), faults__drop=1.0)
    assert f"fedloom resume {out}" in error.value.__notes__[-1]
    assert any((out / "checkpoints").iterdir())
