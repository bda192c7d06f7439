"""When a client replaces its SuperNode, without Flower: the SuperNode is a process that does nothing."""

import threading
from contextlib import contextmanager
from time import monotonic

import httpx
import pytest
from federated import LoopGrid, make_federation, make_fleet, member, small_recipe
from flwr.app import Error
from flwr.app import Message as Parcel
from flwr.common.constant import ErrorCode
from waiting import idle_process, until

from fedloom.deploy import reconnect, supernode
from fedloom.deploy.certificates import make_authority, new_key, write_certificate
from fedloom.deploy.contact import Contact
from fedloom.deploy.events import EventLog, read_events
from fedloom.deploy.supernode import ObservedInterceptor, last_contact
from fedloom.deploy.terms import FederationTerms


class Client:
    """A client whose server gives the answers of a list, the last one forever."""

    def __init__(self, folder, monkeypatch, *answers):
        self.folder, self.answers, self.started = folder, list(answers) or [Contact()], []
        monkeypatch.setattr(reconnect, "PAUSES", (0.01,))
        monkeypatch.setattr(reconnect, "CHECK_SECONDS", 0.01)
        monkeypatch.setattr(reconnect, "ask", self._ask)
        monkeypatch.setattr(reconnect, "process", self._process)
        write_certificate(folder / "ca.pem", make_authority("trial")[1])
        terms = FederationTerms(name="t", host="127.0.0.1", organisations=("a",), classes=("x",), shape=(1, 8, 8))
        self.link = reconnect.Reconnecting(folder, terms, new_key(), EventLog(folder / "audit.jsonl"), 0.2)

    def _ask(self, *_):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    @contextmanager
    def _process(self, *_, **__):
        with idle_process() as child:
            self.started.append(child)
            yield child

    def contact(self):
        (self.folder / ".supernode.contact").write_text(str(monotonic()))

    def events(self):
        return [(event["event"], event.get("reason")) for event in read_events(self.folder / "audit.jsonl")]


@pytest.fixture
def client(tmp_path, monkeypatch):
    found = Client(tmp_path, monkeypatch)
    yield found
    found.link.stop()


def test_a_supernode_that_ends_is_replaced(client):
    client.link.start()
    until(lambda: len(client.started) == 1)
    client.started[0].kill()
    until(lambda: len(client.started) == 2)
    assert client.events() == [("lost", None)]


def test_a_supernode_without_contact_is_replaced_while_its_process_lives(client):
    client.link.start()
    until(lambda: len(client.started) == 1)
    client.contact()
    until(lambda: len(client.started) == 2)
    assert client.events()[:2] == [("connected", None), ("lost", None)]


def test_a_contact_that_is_being_written_is_not_a_loss(client):
    client.link.start()
    until(lambda: len(client.started) == 1)

    def connected():
        client.contact()
        return client.events() == [("connected", None)]

    until(connected)
    threading.Event().wait(0.1)  # longer than since the start would be too long without contact
    for _ in range(30):
        client.contact()
        threading.Event().wait(0.015)
        (client.folder / ".supernode.contact").write_text("")
        threading.Event().wait(0.015)
    assert len(client.started) == 1


def test_a_supernode_that_cannot_send_an_answer_is_replaced(client):
    client.link.start()
    until(lambda: client.link.current is not None)
    client.link.replace(client.link.current)
    until(lambda: len(client.started) == 2)


def test_reasons_are_logged_when_they_change_and_the_client_connects_as_soon_as_it_may(tmp_path, monkeypatch):
    gone, old = Contact("unreachable", "gone"), Contact("certificate", "expired")
    client = Client(tmp_path, monkeypatch, gone, gone, old, old, old, gone, Contact())
    client.link.start()
    until(lambda: len(client.started) == 1)
    client.link.stop()
    assert client.events() == [("refused", "unreachable"), ("refused", "certificate"), ("refused", "unreachable")]


def test_an_unexpected_error_does_not_end_the_thread(client, monkeypatch):
    answers = iter([RuntimeError("what"), Contact()])

    def ask(*_):
        if isinstance(one := next(answers), Exception):
            raise one
        return one

    monkeypatch.setattr(reconnect, "ask", ask)
    client.link.start()
    until(lambda: len(client.started) == 1)


def test_flower_has_what_the_supernode_replaces():
    assert supernode.connection.NodeAuthHttpInterceptor is not None
    assert supernode.connection.HEARTBEAT_DEFAULT_INTERVAL == 30
    assert supernode.flwr.supercore.heartbeat.HEARTBEAT_DEFAULT_INTERVAL == 30


@pytest.mark.parametrize(("status", "recorded"), [(200, True), (404, False), (500, False)])
def test_only_requests_that_succeed_count_as_contact(tmp_path, monkeypatch, status, recorded):
    monkeypatch.setattr(ObservedInterceptor, "contact", tmp_path / "contact", raising=False)
    monkeypatch.setattr(ObservedInterceptor, "client", "me", raising=False)
    key = new_key()
    request = httpx.Request("POST", "https://127.0.0.1/")
    context = type("Context", (), {"request": request})()
    ObservedInterceptor(key, key.public_key()).intercept(context, lambda _: httpx.Response(status))
    assert request.headers["fedloom-client"] == "me"
    assert (last_contact(tmp_path / "contact") is not None) == recorded


def test_an_organisation_that_goes_offline_while_it_joins_is_asked_again_at_once(tmp_path):
    recipe = small_recipe("fedavg")
    make_federation(tmp_path / "fed", recipe)
    grid = LoopGrid({100: member(tmp_path / "fed", "north")})
    fleet = make_fleet(tmp_path / "fed", grid, recipe)
    grid.on_reply = lambda reply: Parcel(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=grid.sent[-1])
    assert fleet.gather() == []
    grid.on_reply = lambda reply: reply
    assert fleet.gather() == [0]
