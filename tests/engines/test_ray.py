"""Ray on this machine: the same numbers as inline, whatever becomes of workers and nodes. Ray is started once."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from references import figures, reference
from safetensors.torch import load_file
from tiny import same_state, tiny_run, tiny_task, without_times

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.engines import EngineSettings, Inline
from fedloom.engines.pool import WorkerLostError
from fedloom.engines.ray import START, Ray, _heartbeat, _token, _Worker, connected, import_ray
from fedloom.experiment.loop import Experiment
from fedloom.methods import Method, get
from fedloom.trust.faults import FaultInjector, Faults

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def local():
    """A Ray of two CPUs; engines use it and leave it as it is."""
    with connected(import_ray(), EngineSettings(name="ray", workers=2)):
        yield
    assert not ray.is_initialized()


def setup_of(method=None, intercept=None):
    return Setup(tiny_task(), method or get("fedavg"), Training(), seed=0, intercept=intercept)


@pytest.fixture
def mine():
    class Mine(Method):
        __module__ = "__main__"  # as in a script or a notebook: a worker cannot import it
        pull: float = 0.3

        def loss(self, client, batch):
            return super().loss(client, batch) * self.pull

    return Mine(pull=0.5)


def jobs(count, round=1):
    message = Message(setup_of().build().named_tensors())
    return [Job("update", round, message, client=c) for c in range(count)]


SLOW = Faults(slow=0.5, slow_seconds=1.5)


def round_in_which(*slow):
    """A round in which just these of the first clients are slow."""
    return next(r for r in count(1) if [SLOW.draw(0, r, c)[1] > 0 for c in range(len(slow))] == list(slow))


def results(engine, jobs, strike=None):
    """The jobs' results, and the worker process that was struck by a signal while it was working."""
    struck = []

    def wait_and_strike():
        while not (busy := [w for w in engine._workers if w.tasks]):
            time.sleep(0.02)
        struck.append(ray.get(_heartbeat(busy[0].actor), timeout=60))
        os.kill(struck[0], strike)

    thread = threading.Thread(target=wait_and_strike if strike else lambda: None)
    thread.start()
    got = list(engine.run(jobs))
    thread.join()
    return got, struck


def gone(process):
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("method", ["fedcrl", slow("fedpac"), slow("fedstyle")])
@pytest.mark.usefixtures("local")
def test_ray_equals_inline_bit_for_bit(method):
    """Fedavg and scaffold are below: a worker takes seconds to start."""
    expected, got = reference(method), tiny_run(method, engine="ray")
    assert same_state(got.server.state, expected.state)
    assert without_times(got.history) == without_times(expected.history)
    assert figures(got.scores) == figures(expected.scores)


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["fedavg", "fedcrl"])
def test_workers_that_share_a_gpu_equal_lanes_bit_for_bit(method):
    fixed = {"engine__deterministic": True}
    expected = tiny_run(method, engine="lanes", engine__device="cuda", **fixed)
    got = tiny_run(method, engine="ray", engine__worker_gpus=0.5, **fixed)
    assert same_state(got.server.state, {name: tensor.cpu() for name, tensor in expected.server.state.items()})
    assert without_times(got.history) == without_times(expected.history)


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, slow(signal.SIGSTOP)])  # dead; silent, as behind a lost network
@pytest.mark.usefixtures("local")
def test_a_lost_worker_is_replaced_and_its_client_is_not_lost(blow, caplog, mine):
    all_slow, one_slow = round_in_which(True, True, True, True), round_in_which(True, False, False)
    expected = [r.message for r in Inline(setup_of(mine), EngineSettings()).run(jobs(4, all_slow))]
    setup = setup_of(mine, FaultInjector(SLOW, seed=0))
    with Ray(setup, EngineSettings(name="ray", workers=2, lost_after=3, client_timeout=60)) as engine:
        got, struck = results(engine, jobs(4, all_slow), strike=blow)
        assert [r.error for r in got] == [None] * 4
        assert all(same_state(r.message.tensors, m.tensors) for r, m in zip(got, expected, strict=True))
        assert gone(struck[0])
        assert ("no heartbeat for engine.lost_after = 3 s" in caplog.text) == (blow == signal.SIGSTOP)
        engine.settings = engine.settings.model_copy(update={"client_timeout": 1.0})
        got, _ = results(engine, jobs(3, one_slow))
        assert [r.error and r.error.kind for r in got] == ["timed_out", None, None]


@pytest.mark.usefixtures("local")
def test_ray_listens_on_the_loopback_address_alone_and_asks_for_a_token():
    ours = {str(p) for p in (os.getpid(), *descendants(os.getpid()))}
    sockets = {link for p in ours for link in descriptors(p)}
    heard = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = {row[1].split(":")[0] for row in heard if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}
    assert listening <= {"0100007F", "0000000000000000FFFF00000100007F"} and listening
    ask = f"from ray._raylet import GcsClient; GcsClient(address={ray.get_runtime_context().gcs_address!r})"
    for token, comes_in in ((_token(), True), ("0" * 64, False)):
        env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        asked = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, timeout=60)
        assert (asked.returncode == 0) == comes_in, asked.stderr
        assert ("InvalidAuthToken" in asked.stderr) != comes_in


def descendants(process):
    for child in Path(f"/proc/{process}/task").glob("*/children"):
        numbers = []
        with suppress(OSError):  # ended in the meantime
            numbers = child.read_text().split()
        for number in numbers:
            yield int(number)
            yield from descendants(number)


def descriptors(process):
    with suppress(OSError):
        for file in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                yield os.readlink(file)


@pytest.mark.usefixtures("local")
def test_a_signal_to_the_programs_group_does_not_reach_ray():
    """So that SIGTERM, as a scheduler sends it to all at once, lets a round be finished."""
    groups = {}
    for process in descendants(os.getpid()):
        with suppress(ProcessLookupError):  # ended in the meantime
            groups[cmdline(process).split(b"\0")[0].rpartition(b"/")[2]] = os.getpgid(process)
    assert {b"gcs_server", b"raylet"} <= groups.keys()
    assert os.getpgid(0) not in groups.values()


def test_who_is_lost_after_a_long_pause_may_be_replaced():
    """Time in which nobody waited for workers is none in which none was ready."""
    engine = object.__new__(Ray)
    worker = _Worker(actor=None, reply=None, ready=True)
    engine._ray, engine._workers = SimpleNamespace(kill=lambda actor: None, cluster_resources=dict), [worker]
    engine._queue, engine.settings = deque(), EngineSettings(name="ray")
    engine._none_ready_since = time.monotonic() - 10 * START
    engine._lose(worker, WorkerLostError("it died while the server was busy"))
    engine._check_start()


@pytest.mark.slow
def test_a_node_that_is_killed_changes_no_number(tmp_path):
    """Two nodes of one CPU each, as `ray start` makes them; the second one dies in the middle of a client's work."""
    fields = ["--method=scaffold", "--data=digits", "--clients=6", "--rounds=2", "--set=training.epochs=1"]
    with two_nodes(tmp_path) as (head, second, env):
        slow = ["--set=engine.workers=2", "--set=faults.slow=1", "--set=faults.slow_seconds=1"]
        run = fedloom_run([*fields, *slow, "--engine=ray", f"--ray-address={head}", "--out=killed"], env)
        try:
            limit = time.monotonic() + 120
            while not any(b"ray::RayWorker.run" in cmdline(p) for p in descendants(second.pid)):
                assert run.poll() is None and time.monotonic() < limit, run.stderr.read()
                time.sleep(0.05)
            os.killpg(second.pid, signal.SIGKILL)
            errors = run.communicate(timeout=120)[1]
        finally:
            run.kill()
    assert run.returncode == 0, errors
    assert "a Ray worker was lost and is replaced" in Path("killed/log.txt").read_text()
    inline = Experiment(Recipe.load("killed/recipe.yaml").with_(engine={"name": "inline"}, faults={}, out="inline"))
    inline.run()
    assert same_state(load_file("killed/models/server.safetensors"), inline.server.state)


def fedloom_run(arguments, env):
    command = [sys.executable, "-m", "fedloom", "run", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def cmdline(process):
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


@contextmanager
def two_nodes(tmp_path):
    """The head's address, the second node's process, and what a driver needs in its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path may have 107 characters
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    nodes = [
        ["--head", f"--port={port}", "--node-ip-address=127.0.0.2", "--include-dashboard=false",
         f"--temp-dir={folder}"],
        [f"--address=127.0.0.2:{port}", "--node-ip-address=127.0.0.3"],
    ]  # fmt: skip
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1"]
    started = []
    try:
        for options in nodes:
            with (tmp_path / f"node-{len(started)}.txt").open("wb") as log:
                started.append(
                    subprocess.Popen([*command, *options], env=env, stdout=log, stderr=log, start_new_session=True)
                )
        yield f"127.0.0.2:{port}", started[1], env
    finally:
        left = [p for process in started for p in descendants(process.pid)]
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert all(map(gone, left))
        shutil.rmtree(folder, ignore_errors=True)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"engine.name = 'ray': Ray cannot be imported.*pip install 'fedloom\[ray\]'"):
        Ray(setup_of(), EngineSettings(name="ray"))


def test_one_client_cannot_be_stopped_where_a_worker_runs_lanes():
    with pytest.raises(UserError, match="engine.client_timeout = 5: with engine.worker_gpus = 1"):
        Ray(setup_of(), EngineSettings(name="ray", worker_gpus=1, client_timeout=5))
