"""Workers of the process engine that are killed, stopped or hang: the round continues with new ones."""

import os
import signal
import threading
from itertools import count
from time import monotonic, sleep

import pytest
import torch
from tiny import tiny_task

from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.engines import EngineSettings, Processes
from fedloom.engines.pool import WorkerError
from fedloom.methods import Method, get
from fedloom.trust.faults import FaultInjector, Faults


class _Suicidal(Method, abstract=True):
    """Client 1 kills its worker in the middle of its update, and the first one that evaluates it."""

    def update(self, client):
        super().update(client)
        if client.id == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def personalise(self, client):
        if client.id == 1 and not os.path.exists("shot"):
            open("shot", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


class _Returning(Method, abstract=True):
    """Keeps a large tensor."""

    def update(self, client):
        client.optimizers["optim.x"] = torch.arange(2_000_000.0)


class _Hanging(Method, abstract=True):
    def update(self, client):
        super().update(client)
        if client.id == 1:
            sleep(60)


def engine_of(method, workers=2, faults=None, seed=0, **settings):
    setup = Setup(tiny_task(), method, Training(), seed=0, intercept=FaultInjector(Faults(**faults or {}), seed))
    return Processes(setup, EngineSettings(name="processes", workers=workers, **settings))


def jobs(engine, clients, kind="update", **fields):
    message = Message(engine.server_workspace.initial)
    return [Job(kind, 1, message, client=c, **fields) for c in clients]


def slow_alone(client, of, seconds):
    """Faults and a seed with which this client alone, among the first `of`, is slow in round 1."""
    faults = {"slow": 0.3, "slow_seconds": seconds}
    only = [c == client for c in range(of)]
    seeds = (seed for seed in count() if [Faults(**faults).draw(seed, 1, c)[1] > 0 for c in range(of)] == only)
    return faults, next(seeds)


def kinds(results):
    return [r.error.kind if r.error else None for r in results]


SLOW_SPAWN = ["fork", pytest.param("spawn", marks=pytest.mark.slow)]  # a new interpreter takes 3 s


@pytest.fixture(params=["fork", "spawn"])
def start(request, monkeypatch):
    if request.param == "spawn":
        monkeypatch.setattr("fedloom.engines.processes.fork_works", lambda: False)
    return request.param


def test_a_worker_killed_in_a_round_costs_one_client_and_is_replaced():
    with engine_of(_Suicidal()) as engine:
        before = {w.process.pid for w in engine._workers}
        results = list(engine.run(jobs(engine, range(6))))
        assert kinds(results) == [None, "died", None, None, None, None]
        assert results[1].error.why == "its worker process died (SIGKILL) and was replaced"
        assert [r.client for r in results] == list(range(6))
        assert kinds(engine.run(jobs(engine, [0, 2]))) == [None, None]
        assert len(engine._workers) == 2
        assert len(before & {w.process.pid for w in engine._workers}) == 1


def test_a_worker_killed_with_several_clients_costs_only_the_one_that_kills_it_again():
    with engine_of(_Suicidal(), workers=1, cohort=3) as engine:
        results = list(engine.run(jobs(engine, range(6))))
        assert engine.batch == 3
    assert kinds(results) == [None, "died", None, None, None, None]
    assert [r.client for r in results] == list(range(6))


def test_a_job_that_waits_behind_a_dying_client_is_done_by_another_worker(monkeypatch):
    monkeypatch.setattr("fedloom.engines.processes.QUICK", 60)
    with engine_of(_Suicidal(), workers=1) as engine:
        waiting = []
        lose = engine._lose
        engine._lose = lambda worker, lost: (waiting.append(len(worker.tasks)), lose(worker, lost))
        results = list(engine.run(jobs(engine, [0, 2, 1, 3, 4])))
    assert kinds(results) == [None, None, "died", None, None]
    assert [r.client for r in results] == [0, 2, 1, 3, 4]
    assert waiting == [2]


def test_with_a_timeout_no_job_waits_in_a_worker():
    with engine_of(get("fedavg"), workers=1, client_timeout=60) as engine:
        for _ in engine.run(jobs(engine, range(6))):
            assert len(engine._workers[0].tasks) <= 1


def test_large_jobs_and_results_do_not_block_each_other():
    """More than sockets hold, in both directions at once."""
    with engine_of(_Returning(), workers=1) as engine:
        state = engine.server_workspace.initial
        large = {"optim.x": torch.arange(2_000_000.0)}
        for memory in (None, large):
            todo = [Job("update", 1, Message(state), client=c % 4, memory=memory) for c in range(20)]
            assert kinds(engine.run(todo)) == [None] * 20


def test_workers_killed_while_idle_cost_nobody():
    with engine_of(get("fedavg")) as engine:
        expected = [r.message["model.head.weight"] for r in engine.run(jobs(engine, range(3)))]
        for worker in engine._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()
        results = list(engine.run(jobs(engine, range(3))))
        assert kinds(results) == [None] * 3
        for result, head in zip(results, expected, strict=True):
            assert torch.equal(result.message["model.head.weight"], head)


def test_a_worker_killed_from_outside_during_a_round(start):
    with engine_of(get("fedavg"), workers=1, faults={"slow": 1, "slow_seconds": 0.3}) as engine:
        stream = engine.run(jobs(engine, range(4)))
        first = next(stream)
        victim = engine._workers[0].process.pid
        threading.Timer(0.1, os.kill, (victim, signal.SIGKILL)).start()
        results = [first, *stream]
        assert kinds(results) == [None, "died", None, None]
        assert engine._workers[0].process.pid != victim


@pytest.mark.parametrize("start", SLOW_SPAWN, indirect=True)
def test_a_hanging_client_is_left_after_its_time_and_only_it(start):
    if start == "spawn":
        method = get("fedavg")  # a class of a test file is not known to a new interpreter
        faults, seed = slow_alone(1, of=5, seconds=60)
    else:
        method, faults, seed = _Hanging(), {}, 0
    with engine_of(method, faults=faults, seed=seed, client_timeout=1.0) as engine:
        todo = jobs(engine, range(5))
        list(engine.run(todo[:1]))  # all are up: starting takes seconds where they are spawned, and is not counted
        begun = monotonic()
        results = list(engine.run(todo))
        assert kinds(results) == [None, "timed_out", None, None, None]
        assert "engine.client_timeout = 1 s" in results[1].error.why
        assert monotonic() - begun < 20
        assert not any(w.tasks for w in engine._workers)


def test_a_worker_that_is_stopped_before_it_takes_its_job_is_replaced():
    big = Message({"model.w": torch.zeros(4_000_000)})  # more than a pipe holds: sending it would wait for ever
    with engine_of(get("fedavg"), workers=1, client_timeout=0.5) as engine:
        list(engine.run(jobs(engine, [0])))
        os.kill(engine._workers[0].process.pid, signal.SIGSTOP)
        message = Message(engine.server_workspace.initial | big.tensors)
        results = list(engine.run([Job("update", 1, message, client=0)]))
    assert kinds(results) == [None]


def test_an_evaluation_is_done_again_by_another_worker():
    with engine_of(_Suicidal()) as engine:
        results = list(engine.run(jobs(engine, range(3), kind="evaluate")))
    assert kinds(results) == [None] * 3
    assert os.path.exists("shot")


def test_an_injected_crash_is_a_dead_worker():
    with engine_of(get("fedavg"), workers=1, faults={"crash": 1}) as engine:
        pid = engine._workers[0].process.pid
        results = list(engine.run([*jobs(engine, [0]), *jobs(engine, [1], kind="evaluate")]))
        assert kinds(results) == ["died", None]
        assert results[0].error.injected
        assert engine._workers[0].process.pid != pid


def test_workers_that_cannot_start_are_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr("fedloom.engines.processes._serve", _dies_at_once)
    with engine_of(get("fedavg")) as engine, pytest.raises(WorkerError, match="died before their first job"):
        list(engine.run(jobs(engine, [0])))


def _dies_at_once(*arguments):
    os._exit(3)


def test_who_stops_listening_leaves_nothing_to_the_next_round():
    with engine_of(get("fedavg"), faults={"slow": 1, "slow_seconds": 0.1}) as engine:
        stream = engine.run(jobs(engine, range(6)))
        next(stream)
        stream.close()
        assert [r.client for r in engine.run(jobs(engine, [5, 4, 3]))] == [5, 4, 3]


def test_closing_does_not_wait_for_a_busy_worker():
    faults, seed = slow_alone(1, of=2, seconds=60)
    engine = engine_of(get("fedavg"), faults=faults, seed=seed)
    stream = engine.run(jobs(engine, [0, 1]))
    next(stream)
    processes = [w.process for w in engine._workers]
    begun = monotonic()
    engine.close()
    assert monotonic() - begun < 5
    assert not any(p.is_alive() for p in processes)
