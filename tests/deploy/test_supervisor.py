"""The server's process without Flower: keys that come and go, restarts, runs that are resumed."""

import json
import socket
import threading
from contextlib import contextmanager

import pytest
from federated import NAMES, make_federation, small_recipe
from test_deploy_commands import call
from waiting import idle_process, until

from fedloom.core.errors import RunError
from fedloom.deploy import active, supervisor
from fedloom.deploy.active import ActiveRun, resume_active
from fedloom.deploy.certificates import (
    make_server_certificate,
    read_certificate,
    read_tls_key,
    tls_key_bytes,
    write_certificate,
)
from fedloom.deploy.control import RunState
from fedloom.deploy.events import read_events


class Flower:
    """Flower's control, as far as it is used."""

    def __init__(self):
        self.registered, self.states, self.begun = [], [], []

    def register(self, name, key):
        self.registered.append(name)
        return 100 + len(self.registered)

    def runs(self):
        return self.states

    def start(self, name, **_):
        self.begun.append(name)
        self.states = [RunState(len(self.begun) + 10, "running", "", "")]
        return self.states[0].number


class Server:
    """A supervisor in a thread, whose SuperLink is a process that does nothing."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.flower, self.links, self.ready = folder, Flower(), [], []
        self.asked, self.failure = threading.Event(), None

        @contextmanager
        def controlling(*_):
            yield self.flower

        for module in (supervisor, active):
            monkeypatch.setattr(module, "controlling", controlling)
        for name in ("TICK_SECONDS", "QUERY_SECONDS"):
            monkeypatch.setattr(supervisor, name, 0.02)
        monkeypatch.setattr(supervisor, "process", self._process)
        self.supervisor = supervisor.Supervisor(folder, "127.0.0.1", "127.0.0.1", self.asked, self.ready.append)
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self.supervisor.run()
        except RunError as error:
            self.failure = error

    @contextmanager
    def _process(self, *_, **__):
        self.flower.registered, self.flower.states = [], []
        with idle_process() as link:
            self.links.append(link)
            yield link

    def events(self):
        return [(event["who"], event["event"]) for event in read_events(self.folder / "events.jsonl")]

    def warnings(self):
        return [event["why"] for event in read_events(self.folder / "events.jsonl") if event["event"] == "warning"]

    def nodes(self):
        try:
            return sorted(json.loads((self.folder / "nodes.json").read_text()).values())
        except FileNotFoundError:
            return []


@pytest.fixture
def server(tmp_path, monkeypatch):
    ports = {"port": free(), "control_port": free()}
    make_federation(tmp_path / "fed", small_recipe("fedavg"), **ports)
    found = Server(tmp_path / "fed" / "server", monkeypatch)
    yield found
    found.asked.set()
    if found.thread.ident is not None:
        found.thread.join()


def free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_server_starts_without_a_key_file_and_says_who_cannot_connect(server):
    (server.folder / "organisations" / "south.pub").unlink()
    (server.folder / "organisations" / "west.pub").write_text("nonsense")
    server.thread.start()
    until(lambda: server.ready)
    assert server.nodes() == ["north"]
    assert [why.partition(":")[0] for why in server.warnings()] == ["south cannot connect", "west cannot connect"]


def test_two_organisations_with_one_key_are_named(server):
    keys = server.folder / "organisations"
    (keys / "west.pub").write_bytes((keys / "north.pub").read_bytes())
    server.thread.start()
    until(lambda: server.ready)
    assert server.nodes() == ["north", "south"]
    assert server.warnings() == [
        "west cannot connect: it has the same key as north; each organisation needs its own"
    ]  # fmt: skip


def test_organisations_are_added_and_revoked_while_the_server_runs(server):
    server.thread.start()
    until(lambda: server.nodes() == sorted(NAMES))
    call("deploy", "add", "east", "--folder", str(server.folder))
    until(lambda: server.nodes() == ["east", *NAMES])
    call("deploy", "revoke", "south", "--folder", str(server.folder))
    until(lambda: server.nodes() == ["east", "north", "west"])
    call("deploy", "add", "south", "--folder", str(server.folder), "--to", str(server.folder / "again"))
    until(lambda: server.nodes() == ["east", *NAMES])
    assert server.flower.registered == [*NAMES, "east", "south"]  # each key once: Flower refuses a second time
    assert ("east", "registered") in server.events() and len(server.links) == 1


def test_a_superlink_that_ends_is_started_again_and_its_run_is_resumed(server):
    server.thread.start()
    until(lambda: server.ready)
    number = server.flower.start("first")
    ActiveRun("first", 60.0, 600.0, number).save(server.folder)
    server.links[0].kill()
    until(lambda: server.flower.begun == ["first", "first"])
    until(lambda: ("server", "resumed") in server.events())
    now = ActiveRun.load(server.folder)
    assert (now.run, now.number, now.earlier) == ("first", 12, (11,))
    assert len(server.links) == 2 and len(server.ready) == 1
    server.flower.states = [RunState(12, "finished", "completed", "")]
    until(lambda: ActiveRun.load(server.folder) is None)
    assert server.events()[-1] == ("server", "finished")


def test_a_run_that_was_finished_or_stopped_is_not_resumed(server, monkeypatch):
    assert resume_active(server.folder) is None
    place = server.folder / "runs" / "first"
    place.mkdir(parents=True)
    (place / "summary.json").write_text("{}")
    ActiveRun("first", 60.0, 600.0, 5).save(server.folder)
    assert resume_active(server.folder) is None
    assert server.flower.begun == [] and ActiveRun.load(server.folder) is None


def test_an_expired_certificate_is_named_and_the_server_continues_when_it_is_renewed(server):
    root = server.folder.parent
    authority = read_tls_key(root / "ca.key"), read_certificate(root / "server" / "ca.pem")
    key, certificate = make_server_certificate(authority, "127.0.0.1", days=-1)
    (server.folder / "server.key").write_bytes(tls_key_bytes(key))
    write_certificate(server.folder / "server.pem", certificate)
    server.thread.start()
    until(server.warnings)
    assert "server.pem has expired on" in server.warnings()[0] and "fedloom deploy renew" in server.warnings()[0]
    assert not server.ready
    call("deploy", "renew", "--folder", str(server.folder))
    until(lambda: server.ready)
    assert len(server.links) == 2  # Flower's own processes had refused the old one


def test_a_superlink_that_does_not_start_ends_the_server(server):
    server.supervisor._attend = lambda link: "Flower's server has ended (exit code 1)"
    server.thread.start()
    server.thread.join()
    assert "has ended (exit code 1): see" in str(server.failure)


def test_a_port_that_is_in_use_is_named(monkeypatch):
    monkeypatch.setattr(supervisor, "PORT_SECONDS", 0.05)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} of 127.0.0.1 cannot be used"):
            supervisor._wait_for_ports(("127.0.0.1", port))
