"""The page of a run as it goes: served to this machine alone, updated with every change, ended by Ctrl-C."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from typer.testing import CliRunner
from written import evaluated, write_run

from fedloom.cli import commands
from fedloom.core.errors import UserError
from fedloom.experiment.run_folder import RunFolder, run_state
from fedloom.report.live import Live
from fedloom.report.page.insight import Insights

WAIT = 60
"""Seconds, on a busy machine."""


def serve(path: Path, **options) -> Live:
    return Live([path], insights=Insights(unfinished=False), **options)


def ask(live: Live, path: str, **headers: str):
    connection = HTTPConnection("127.0.0.1", live.port, timeout=WAIT)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


@contextmanager
def events(live: Live):
    """What a page hears, line by line, without the empty ones."""
    answer = ask(live, "/events")
    yield (line for line in iter(lambda: answer.readline().decode().strip(), None) if line)
    answer.close()


def add(run: Path, record: dict) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_a_run_whose_process_was_killed_is_shown_as_killed(tmp_path):
    run = write_run(tmp_path / "run", rounds=9)
    process = subprocess.Popen(
        [sys.executable, "-c", f"from pathlib import Path; from fedloom.experiment.lock import RunLock\n"
         f"lock = RunLock(Path({str(run)!r})); print('locked', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"locked\n"
    with serve(run) as live:

        def await_state(state: str, running: bool) -> None:
            deadline = time.monotonic() + WAIT
            while (now := json.loads(ask(live, "/data.json").read()))["state"] != state:
                assert time.monotonic() < deadline, now["state"]
                time.sleep(0.05)
            assert now.get("running", False) == running

        await_state("round 0 of 9", True)
        process.kill()
        process.communicate()
        await_state("round 0 of 9, killed", False)


def test_a_run_that_failed_or_was_stopped_is_shown_as_such(tmp_path):
    run = write_run(tmp_path / "run", rounds=9)
    assert run_state(run) == "stopped"
    folder = RunFolder(run, resume=True)
    assert run_state(run) == "running"
    with pytest.raises(ZeroDivisionError), folder.noting_failure():
        raise ZeroDivisionError("before the first round")
    assert not (run / "failed.txt").exists()
    folder.begin()
    with pytest.raises(ZeroDivisionError), closing(folder), folder.noting_failure():
        raise ZeroDivisionError("no luck")
    assert run_state(run) == "failed"
    assert (run / "failed.txt").read_text() == "ZeroDivisionError: no luck\n"
    with closing(RunFolder(run, resume=True)) as folder:
        folder.begin()
    assert run_state(run) == "stopped"


def test_pages_are_told_of_every_round(tmp_path):
    run = tmp_path / "run"
    with serve(run) as live:
        assert json.loads(ask(live, "/data.json").read())["state"] == "waiting"
        with events(live) as lines:
            assert next(lines) == "retry: 1000"
            assert next(lines).startswith("data:")
            write_run(run, rounds=9)
            for number in (1, 2):
                assert next(lines).startswith("data:")
                state = json.loads(ask(live, "/data.json").read())["state"]
                assert state == f"round {number - 1} of 9, stopped"
                add(run, evaluated(number, 0.5))
            assert next(lines).startswith("data:")
        assert b"<title>fedloom watch</title>" in ask(live, "/").read()


def test_only_this_machine_is_served(tmp_path):
    with serve(write_run(tmp_path / "run")) as live:
        assert live._server.server_address[0] == "127.0.0.1"
        assert ask(live, "/data.json", Host="elsewhere.example").status == 403
        assert ask(live, "/data.json", Host=f"localhost:{live.port}").status == 200
        assert ask(live, "/recipe.yaml").status == 404
        assert ask(live, "/../run/recipe.yaml").status == 404


def test_a_port_that_is_taken_is_refused_with_the_remedy(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: cannot be used.*leave it out"):
            serve(tmp_path, port=port)


def test_a_folder_that_cannot_be_read_is_told_and_comes_back(tmp_path):
    run = write_run(tmp_path / "run", history=[evaluated(1, 0.5)])
    recipe = (run / "recipe.yaml").read_text()
    with serve(run) as live, events(live) as lines:
        assert next(lines) == "retry: 1000"
        (run / "recipe.yaml").write_text("seed: 1\n")
        while "method is missing" not in json.loads(ask(live, "/data.json").read())["state"]:
            next(lines)
        (run / "recipe.yaml").write_text(recipe)
        while json.loads(ask(live, "/data.json").read())["state"] != "round 1 of 2, stopped":
            next(lines)


@pytest.mark.parametrize("command", [pytest.param("watch", marks=pytest.mark.slow), "run"])
def test_ctrl_c_ends_it_cleanly_after_the_run(command, tmp_path):
    if command == "watch":
        arguments = ["watch", str(write_run(tmp_path / "run"))]
    else:
        flags = "--method fedavg --data digits --clients 3 --rounds 1 --engine inline --out run --set data.limit=90"
        arguments = ["run", "--watch", "--json", *flags.split(" ")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it
    )  # fmt: skip
    try:
        said = ""
        while "Ctrl-C stops the server" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", said)[1])
        connection = HTTPConnection("127.0.0.1", port, timeout=WAIT)
        connection.request("GET", "/data.json")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=WAIT)
        assert (process.returncode, "Traceback" in rest) == (0, False), rest
        if command == "run":
            assert json.loads(next(line for line in said.splitlines() if line.startswith("{")))["rounds"] == 1
    finally:
        process.kill()


def test_a_comparison_that_is_watched_stays_in_the_folder_of_its_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(Live, "stay", lambda self, announce: announce())
    recipe = {"method": "local", "data": {"name": "digits", "clients": 3, "limit": 90}, "training": {"rounds": 1}}
    (tmp_path / "mine.yaml").write_text(json.dumps(recipe | {"out": "mine"}))
    result = CliRunner().invoke(commands.app, ["compare", "mine.yaml", "--watch"], catch_exceptions=False)
    assert "Ctrl-C stops the server" in result.stderr
    assert Path("mine/comparison.json").exists() and not Path("runs").exists()
