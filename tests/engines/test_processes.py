import os
import pickle
import signal
import threading

import pytest
import torch
from tiny import same_state, tiny_run, tiny_task

from fedloom.engines import EngineSettings, Inline, Processes
from fedloom.engines.processes import WorkerError, fork_works
from fedloom.job import Job
from fedloom.lane import Setup
from fedloom.message import Message
from fedloom.methods import Method, get
from fedloom.training import Training


class _Failing(Method, abstract=True):
    def update(self, client):
        raise ZeroDivisionError("on purpose")


def engine_of(method, workers=2):
    return Processes(Setup(tiny_task(), method, Training(), seed=0), EngineSettings(name="processes", workers=workers))


def jobs(engine, count):
    message = Message(engine.home.initial)
    return [Job("update", 1, message, client=c) for c in range(count)]


def test_results_come_in_the_order_of_the_jobs():
    with engine_of(get("fedavg")) as engine:
        assert [r.client for r in engine.run(jobs(engine, 6))] == list(range(6))
        assert [r.client for r in engine.run(reversed(jobs(engine, 6)))] == list(range(5, -1, -1))
        assert list(engine.run([])) == []


def test_a_failing_client_is_named_with_its_traceback():
    with (
        engine_of(_Failing()) as engine,
        pytest.raises(WorkerError, match=r"client 0 failed in round 1:[\s\S]*on purpose"),
    ):
        list(engine.run(jobs(engine, 1)))


def test_a_killed_worker_is_noticed():
    with engine_of(get("fedavg"), workers=1) as engine:
        os.kill(engine._workers[0].process.pid, signal.SIGKILL)
        with pytest.raises((WorkerError, BrokenPipeError)):
            list(engine.run(jobs(engine, 2)))


def test_a_slow_first_client_does_not_let_results_pile_up():
    given = []

    def lazily(engine):
        for job in jobs(engine, 6) * 10:
            given.append(job)
            yield job

    with engine_of(get("fedavg"), workers=2) as engine:
        stream = engine.run(lazily(engine))
        slow = engine._workers[1]
        os.kill(slow.process.pid, signal.SIGSTOP)
        try:
            threading.Timer(2.0, lambda: os.kill(slow.process.pid, signal.SIGCONT)).start()
            assert len(list(stream)) == 60
        finally:
            os.kill(slow.process.pid, signal.SIGCONT)
    assert len(given) == 60


@pytest.mark.parametrize("method", ["fedavg+ft", "fedcrl", "fedstyle"])
def test_where_forking_is_impossible_workers_are_spawned_and_agree(method, monkeypatch):
    monkeypatch.setattr("fedloom.engines.processes.fork_works", lambda: False)
    expected = tiny_run(method, training__rounds=1)
    assert same_state(tiny_run(method, engine="processes", training__rounds=1).server.state, expected.server.state)


def test_a_method_survives_pickling_with_its_additions():
    method = get("fedprox+ft", mu=0.3, ft_epochs=2)
    again = pickle.loads(pickle.dumps(method))
    assert (again.name, again.mu, again.ft_epochs, again.ft_parts) == ("fedprox+ft", 0.3, 2, "head")


def test_threads_are_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tiny_run("fedavg", training__rounds=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_names_the_client_on_every_engine():
    setup = Setup(tiny_task(), _Failing(), Training(), seed=0)
    engine = Inline(setup, EngineSettings(device="cpu"))
    with pytest.raises(ZeroDivisionError) as caught:
        list(engine.run(jobs(engine, 1)))
    assert "client 0" in caught.value.__notes__[0]


def test_no_process_is_left_behind():
    with engine_of(get("fedavg")) as engine:
        processes = [worker.process for worker in engine._workers]
    assert not any(process.is_alive() for process in processes)


@pytest.mark.skipif(not fork_works(), reason="forking is impossible here, and a class inside a function cannot be sent")
def test_a_method_of_the_users_script_runs_in_the_workers():
    class Mine(Method):
        pass

    try:
        assert tiny_run("mine", engine="processes").history[-1]["global_accuracy"] is not None
    finally:
        from fedloom.methods import REGISTRY

        del REGISTRY["mine"]
