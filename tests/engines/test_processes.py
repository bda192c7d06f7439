import os
import pickle
import signal
import threading

import pytest
import torch
from tiny import same_state, tiny_run, tiny_task

from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.engines import EngineSettings, Processes
from fedloom.engines.pool import AHEAD
from fedloom.engines.processes import fork_works
from fedloom.methods import Method, get


class _FailingForTwo(Method, abstract=True):
    def update(self, client):
        if client.id == 2:
            raise ZeroDivisionError("on purpose")
        super().update(client)


def engine_of(method, workers=2):
    return Processes(Setup(tiny_task(), method, Training(), seed=0), EngineSettings(name="processes", workers=workers))


def jobs(engine, count):
    message = Message(engine.server_workspace.initial)
    return [Job("update", 1, message, client=c) for c in range(count)]


def test_results_come_in_the_order_of_the_jobs():
    with engine_of(get("fedavg")) as engine:
        assert [r.client for r in engine.run(jobs(engine, 6))] == list(range(6))
        assert [r.client for r in engine.run(reversed(jobs(engine, 6)))] == list(range(5, -1, -1))
        assert list(engine.run([])) == []


def test_a_failing_client_is_a_result_with_its_traceback_and_others_go_on():
    with engine_of(_FailingForTwo()) as engine:
        results = list(engine.run(jobs(engine, 4)))
        again = list(engine.run(jobs(engine, 2)))
    assert [r.error is None for r in results] == [True, True, False, True]
    assert results[2].error.kind == "raised"
    assert results[2].error.why == "ZeroDivisionError: on purpose"
    assert "in update" in results[2].error.trace
    assert all(r.error is None for r in again)


def test_a_slow_client_does_not_let_results_pile_up():
    given, read, meanwhile = [], [], []

    def lazily(engine):
        for job in jobs(engine, 6) * 10:
            given.append(job)
            yield job

    with engine_of(get("fedavg"), workers=2) as engine:
        while not all(worker.ready for worker in engine._workers):
            list(engine.run(jobs(engine, 2)))
        slow = engine._workers[1].process.pid
        os.kill(slow, signal.SIGSTOP)

        def go_on():
            meanwhile.append(len(given) - len(read))
            os.kill(slow, signal.SIGCONT)

        timer = threading.Timer(2.0, go_on)
        timer.start()
        read.extend(result.client for result in engine.run(lazily(engine)))
        timer.join()
    assert len(given) == len(read) == 60
    assert meanwhile == [AHEAD * 2]


@pytest.mark.parametrize("method", ["fedavg+ft", pytest.param("fedstyle", marks=pytest.mark.slow)])
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


def test_no_process_is_left_behind():
    with engine_of(get("fedavg")) as engine:
        processes = [worker.process for worker in engine._workers]
    assert not any(process.is_alive() for process in processes)


@pytest.mark.skipif(not fork_works(), reason="forking is impossible here, and a class inside a function cannot be sent")
def test_a_method_of_the_users_script_runs_in_the_workers():
    class Mine(Method):
        pass

    assert tiny_run("mine", engine="processes").history[-1]["global_accuracy"] is not None
