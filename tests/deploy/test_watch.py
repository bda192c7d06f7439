"""The state of a federation as text and as a page, from the files of a server that does not run."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from federated import make_federation, small_recipe
from test_deploy_commands import call

from fedloom.core.errors import UserError
from fedloom.deploy import status
from fedloom.deploy.events import EventLog
from fedloom.deploy.launch import free_port
from fedloom.deploy.status import ago, federation_state, size
from fedloom.deploy.watch import page, watch


@pytest.fixture
def server(tmp_path):
    make_federation(tmp_path / "fed", small_recipe("fedavg"), port=free_port(), control_port=free_port())
    folder = tmp_path / "fed" / "server"
    log = EventLog(folder / "events.jsonl")
    log.add("connected", "north")
    log.add("refused", "west", reason="clock", why="its clock is <61 s> ahead")
    for round in (1, 2):
        log.add("answer", "north", run="first", bytes=1500)
        log.add("round", "server", run="first", round=round, rounds=9)
    log.add("answer", "north", run="zeroth", bytes=7)
    return folder


def test_the_state_has_members_rounds_what_left_and_refusals(server):
    state = federation_state(server)
    assert state.server.startswith("no server answers on 127.0.0.1")
    assert [(one.name, one.state) for one in state.members] == [
        ("north", "offline"), ("south", "offline"), ("west", "refused"),
    ]  # fmt: skip
    assert (state.run, state.round, state.rounds) == ("first", 2, 9)
    assert (state.members[0].updates, state.members[0].bytes_sent) == (2, 3000)
    assert state.members[2].refusal == "(clock) its clock is <61 s> ahead"


@pytest.mark.parametrize(
    ("reason", "state"), [("duplicate", "online"), ("signature", "online"), ("code", "refused"), ("consent", "refused")]
)
def test_a_stranger_with_a_members_key_does_not_make_the_member_look_refused(server, monkeypatch, reason, state):
    @contextmanager
    def controlling(*_):
        yield SimpleNamespace(nodes=lambda: {"north": "online"}, runs=list)

    monkeypatch.setattr(status, "controlling", controlling)
    EventLog(server / "events.jsonl").add("refused", "north", reason=reason, why="so")
    north = federation_state(server).members[0]
    assert (north.state, north.refusal) == (state, f"({reason}) so")


def test_status_prints_it(server):
    said = call("deploy", "status", "--folder", str(server))
    assert "west: refused: (clock) its clock is <61 s> ahead" in said
    assert "run 'first': round 2 of 9" in said and "server.pem: valid until" in said
    call("deploy", "revoke", "south", "--folder", str(server))
    assert "south: revoked" in call("deploy", "status", "--folder", str(server))
    assert '"refusal": "(clock)' in call("deploy", "status", "--json", "--folder", str(server))


def test_the_page_escapes_what_others_wrote_and_reloads_itself(server):
    shown = page(federation_state(server))
    assert "&lt;61 s&gt;" in shown and "<61 s>" not in shown
    assert '<meta http-equiv="refresh" content="5">' in shown and "<script" not in shown
    assert "round 2 of 9" in shown and "3.0 kB" in shown


def test_the_page_is_served_on_this_machine_to_its_own_name_alone(server):
    address = []
    there = threading.Event()

    def ready(where):
        address.append(where)
        there.set()

    threading.Thread(target=watch, args=(server, 0, ready), daemon=True).start()
    assert there.wait(20)
    assert address[0].startswith("http://127.0.0.1:")
    assert "<h1>digits</h1>" in httpx.get(address[0]).text
    for host in ("evil.example:80", "evil.example", "127.0.0.1.evil.example", ""):
        assert httpx.get(address[0], headers={"Host": host}).status_code == 403
    assert httpx.get(address[0], headers={"Host": "localhost"}).status_code == 200
    assert httpx.get(address[0] + "other").status_code == 404
    with pytest.raises(UserError, match="choose another"):
        watch(server, int(address[0].rpartition(":")[2].strip("/")), ready)


def test_ages_and_sizes_are_readable():
    assert [size(n) for n in (12, 1500, 2_500_000, 3 * 10**9)] == ["12 B", "1.5 kB", "2.5 MB", "3.0 GB"]
    assert ago("2000-01-01T00:00:00Z").endswith(" d ago")
