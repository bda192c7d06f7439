"""Logs of both sides: what was asked, decided and sent, with times."""

import json
import logging
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

from federated import LoopGrid, make_experiment, make_federation, make_fleet, member, small_recipe

from fedloom.deploy import fleet as fleet_module
from fedloom.deploy.events import EventLog, read_events, sentence
from fedloom.deploy.launch import environment
from fedloom.deploy.terms import protocol_versions, what_runs


def test_an_event_has_a_time_in_utc_and_is_logged_as_a_sentence(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "fedloom"):
        EventLog(tmp_path / "log").add("refused", "west", reason="clock", why="61 s ahead", address=None, run="one")
    (entry,) = read_events(tmp_path / "log")
    assert abs(datetime.now(UTC) - datetime.fromisoformat(entry.pop("at"))) < timedelta(minutes=1)
    assert entry == {"event": "refused", "who": "west", "reason": "clock", "why": "61 s ahead", "run": "one"}
    assert caplog.messages == ["west refused (clock): 61 s ahead [run one]"]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_a_log_is_read_in_spite_of_a_line_that_was_cut_off(tmp_path):
    log = EventLog(tmp_path / "log")
    log.add("joined", "north")
    with (tmp_path / "log").open("a") as file:
        file.write('{"at": "2026-01-01T00')
    assert [event["who"] for event in read_events(tmp_path / "log")] == ["north"]
    assert list(read_events(tmp_path / "none")) == []


def test_what_repeats_itself_is_written_once_a_minute(tmp_path):
    log = EventLog(tmp_path / "log")
    for _ in range(3):
        log.add_once("refused", "west", reason="clock")
    log.add_once("refused", "west", reason="key")
    assert [event["reason"] for event in read_events(tmp_path / "log")] == ["clock", "key"]


def test_both_sides_record_every_request_with_what_left(tmp_path):
    recipe = small_recipe("fedavg", training__rounds=1)
    make_federation(tmp_path / "fed", recipe)
    north = member(tmp_path / "fed", "north")
    fleet = make_fleet(tmp_path / "fed", LoopGrid({100: north}), recipe)
    fleet._events = EventLog(tmp_path / "events.jsonl")
    fleet.wait_for(1, 1, 1)
    make_experiment(fleet, recipe).run()
    server = [(event["who"], event["event"]) for event in read_events(tmp_path / "events.jsonl")]
    assert server[:3] == [("north", "request"), ("north", "answer"), ("north", "joined")]
    update = next(e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "request" and e["kind"] == "train")
    assert (update["round"], update["run"]) == (1, "one") and update["bytes"] > 0
    audit = list(read_events(north.folder / "audit.jsonl"))
    asked = [(entry["asked"], entry.get("kind"), entry["decision"]) for entry in audit]
    assert asked[:3] == [("join", None, "answered"), ("job", "update", "answered"), ("job", "global", "answered")]
    own = north.task(recipe).federation
    assert audit[0]["left"] == {
        "number of train samples": len(own.train[0]), "number of test samples": len(own.test[0])
    }  # fmt: skip
    assert audit[1]["left"]["tensors"] > 0 and audit[1]["left"]["bytes"] < audit[1]["bytes_sent"]
    assert any("scores" in entry.get("left", {}) for entry in audit)


def test_a_refusal_has_its_reason_on_both_sides(tmp_path, monkeypatch):
    recipe = small_recipe("fedavg")
    make_federation(tmp_path / "fed", recipe)
    north = member(tmp_path / "fed", "north")
    other = small_recipe("fedavg", training__rounds=3)

    def join(run, recipe=recipe, versions=None):
        fleet = make_fleet(tmp_path / "fed", LoopGrid({100: north}), recipe, run)
        fleet._events = EventLog(tmp_path / f"{run}.jsonl")
        if versions:
            monkeypatch.setattr(fleet_module, "protocol_versions", lambda: versions)
        fleet.gather()
        monkeypatch.undo()
        return next(event["reason"] for event in read_events(tmp_path / f"{run}.jsonl") if event["event"] == "refused")

    mine = protocol_versions()
    assert join("one", other) == "consent"
    assert join("two", versions=mine | {"code": "other"}) == "code"
    assert join("three", versions=mine | {"torch": "0.1"}) == "version"
    decisions = [entry["decision"] for entry in read_events(north.folder / "audit.jsonl")]
    assert decisions == ["refused (consent)", "refused (code)", "refused (version)"]


def test_code_is_compared_without_comments_docstrings_and_layout():
    source = '"""Doc."""\nX = 1  # why\n"""What X is."""\n\ndef f(a):\n    """Doc."""\n    return a + X\n'
    same = "X=1\ndef f(a): return (a+X)\n"
    assert what_runs(source) == what_runs(same)
    for other in (same.replace("1", "2"), same.replace("a+X", "a-X"), same.replace("f(", "g("), same + 'print("x")\n'):
        assert what_runs(other) != what_runs(same)


def test_values_that_are_long_are_part_of_the_line():
    entry = json.loads('{"at": "x", "event": "request", "who": "server", "left": {"bytes": 3}}')
    assert sentence(entry) == "server request [left {bytes: 3}]"


def test_flowers_routine_lines_are_left_out_and_the_others_have_a_time(tmp_path):
    code = (
        "import logging; from flwr.supercore import log; from fedloom.deploy.logs import log_with_times\n"
        "log_with_times(); log(logging.INFO, 'ControlServicer.ListRuns'); log(logging.INFO, 'Started task')\n"
        "logging.getLogger('fedloom').info('north joined')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) == 2 and all(re.search(r"\d\d:\d\d:\d\d,\d{3}", line) for line in lines), lines
