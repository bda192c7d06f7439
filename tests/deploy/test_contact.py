"""What a client learns from its first contact with a real TLS server, and which reason it names."""

import asyncio
import contextlib
import json
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import uvicorn
from waiting import until

from fedloom.deploy.certificates import (
    make_authority,
    make_server_certificate,
    new_key,
    write_certificate,
    write_key_pair,
    write_tls_key,
)
from fedloom.deploy.contact import Contact, ask
from fedloom.deploy.door import Organisations, door
from fedloom.deploy.events import EventLog, read_events
from fedloom.deploy.launch import free_port
from fedloom.deploy.superlink import Watch, greeting
from fedloom.deploy.terms import FederationTerms

VERSIONS = {"fedloom": "1", "code": "abc"}


class Server:
    """The greeting of a server with TLS, in a thread."""

    def __init__(self, folder, days=365.0, host="127.0.0.1"):
        self.folder = folder
        (folder / "organisations").mkdir()
        self.authority = make_authority("trial")
        write_certificate(folder / "ca.pem", self.authority[1])
        key, certificate = make_server_certificate(self.authority, "127.0.0.1", days)
        write_tls_key(folder / "server.key", key)
        write_certificate(folder / "server.pem", certificate)
        self.key = new_key()
        write_key_pair(folder / "organisations", "north", self.key)
        self.organisations = Organisations(folder / "organisations", EventLog(folder / "events.jsonl"), VERSIONS)
        self.terms = FederationTerms(
            name="trial", host=host, port=free_port(), organisations=("north",), classes=("a", "b"), shape=(1, 8, 8)
        )
        app = greeting(self.organisations, door(None, self.organisations.admits), lambda pem: True)
        self.server = uvicorn.Server(
            uvicorn.Config(
                app, host="127.0.0.1", port=self.terms.port, lifespan="off", log_level="critical",
                ssl_keyfile=folder / "server.key", ssl_certfile=folder / "server.pem",
            )
        )  # fmt: skip
        self.server.capture_signals = contextlib.nullcontext
        self.watch = Watch(folder, self.organisations, lambda: None, [self.server])
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()))

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started, 30)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()

    def ask(self, key=None, client="one", versions=VERSIONS, ca="ca.pem", ahead=0.0) -> Contact:
        def clock():
            return datetime.now(UTC) + timedelta(seconds=ahead)

        return ask(self.terms, self.folder / ca, key or self.key, client, versions, now=clock)


def test_each_reason_has_a_line_that_names_it(tmp_path):
    with Server(tmp_path) as server:
        fine = server.ask()
        assert fine.admitted and fine.clock_warning is None
        assert abs(fine.clock_ahead) < 1
        assert timedelta(days=364) < fine.expires - datetime.now(UTC) < timedelta(days=366)
        found = {
            "key": server.ask(new_key()),
            "clock": server.ask(ahead=60),
            "duplicate": server.ask(client="two"),
            "code": server.ask(versions=VERSIONS | {"code": "other"}),
            "version": server.ask(versions=VERSIONS | {"fedloom": "2"}),
        }
    assert {name: one.reason for name, one in found.items()} == {name: name for name in found}
    assert "60 s ahead" in found["clock"].why and round(found["clock"].clock_ahead) == 60
    assert "not registered" in found["key"].why
    assert "another client at 127.0.0.1 uses the key of north" in found["duplicate"].why
    assert len({one.why for one in found.values()}) == len(found)
    gone = server.ask()
    assert gone.reason == "unreachable" and "does not answer" in gone.why


def test_a_clock_that_is_accepted_but_wrong_is_named(tmp_path):
    with Server(tmp_path) as server:
        contact = server.ask(ahead=3)
    assert contact.admitted
    assert contact.clock_ahead == pytest.approx(3, abs=1)
    nearly = replace(contact, clock_ahead=4.6).clock_warning
    assert nearly.startswith("this machine's clock is 4.6 s ahead of the server's; from 5 s ahead")


def test_an_expired_certificate_is_named_and_a_renewed_one_is_used_at_once(tmp_path):
    with Server(tmp_path, days=-1 / 24) as server:
        before = server.ask()
        assert before.reason == "certificate"
        assert "has expired" in before.why and "fedloom deploy renew" in before.why and "clock" not in before.why
        (tmp_path / "server.key").unlink()
        key, certificate = make_server_certificate(server.authority, "127.0.0.1")
        write_tls_key(tmp_path / "server.key", key)
        server.watch.tick()  # with a key that does not fit the certificate
        write_certificate(tmp_path / "server.pem", certificate)
        server.watch.tick()
        assert server.ask().admitted


@pytest.mark.parametrize(("ahead", "by"), [(3 * 3600, "3.0 h ahead of"), (-86400 * 3, "3 days behind")])
def test_a_clock_for_which_the_certificate_is_not_valid_is_named_instead_of_the_certificate(tmp_path, ahead, by):
    with Server(tmp_path, days=-1 / 24) as server:  # as it looks on a machine whose clock is wrong
        contact = server.ask(ahead=ahead)
    assert contact.reason == "clock" and abs(contact.clock_ahead - ahead) < 10
    assert contact.why.startswith(f"this machine's clock is {by} the server's, so that the server's certificate")
    assert contact.why.endswith("set both by NTP") and "renew" not in contact.why


def test_a_certificate_of_another_federation_or_host_is_named(tmp_path):
    (tmp_path / "one").mkdir()
    with Server(tmp_path / "one") as server:
        write_certificate(tmp_path / "one" / "other.pem", make_authority("other")[1])
        contact = server.ask(ca="other.pem")
        assert "not from this federation's CA" in contact.why
        assert not list(read_events(tmp_path / "one" / "events.jsonl"))  # `key` would lead to a key that nobody needs
        server.terms = server.terms.model_copy(update={"host": "127.0.0.2"})
        assert server.ask().reason in ("certificate", "unreachable")


def test_a_damaged_authority_is_named_with_a_remedy(tmp_path):
    with Server(tmp_path) as server:
        whole = (tmp_path / "ca.pem").read_bytes()
        (tmp_path / "empty.pem").touch()
        (tmp_path / "header.pem").write_bytes(whole.replace(b"BEGIN", b"BEGUN"))
        for name in ("missing.pem", "empty.pem", "header.pem"):
            contact = server.ask(ca=name)
            assert contact.reason == "certificate"
            assert f"{name}' is missing or damaged" in contact.why
            assert "get the federation's ca.pem again" in contact.why


def test_the_last_contacts_are_stored(tmp_path):
    with Server(tmp_path) as server:
        server.ask()
        server.watch.tick()
    found = json.loads((tmp_path / "contacts.json").read_text())
    assert found["north"]["address"] == "127.0.0.1" and abs(found["north"]["clock_ahead"]) < 1


@pytest.mark.parametrize("body", [b"[]", b"null", b"<html>", b"[" * 100_000])
def test_an_answer_that_is_not_from_fedloom_is_named(tmp_path, body):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    with Server(tmp_path) as server:
        server.server.config.loaded_app = app
        contact = server.ask()
    assert (contact.reason, contact.why.endswith("is not a server of fedloom")) == ("unreachable", True)


@pytest.mark.parametrize(("ahead", "side"), [(2.0, "2.0 s ahead of"), (-100.0, "100 s behind")])
def test_the_warning_says_in_which_direction_a_clock_is_wrong(ahead, side):
    assert f"{side} the server's" in Contact(clock_ahead=ahead).clock_warning
