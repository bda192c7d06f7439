"""Who is let in, before a byte of a request's body is read: Flower itself looks at keys only after that."""

import asyncio
import json
from base64 import b64encode
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import sign_message

from fedloom.deploy.certificates import new_key, write_key_pair
from fedloom.deploy.door import CLIENT_HEADER, HELLO, LEAVES, Organisations, door, with_token
from fedloom.deploy.events import EventLog, read_events

PULL = "/v1/fleet/pull-messages"


def status(admits, path, headers):
    """What a door answers; 200 stands for Flower behind it. Nobody may read the body at the door."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def receive():
        raise AssertionError("the body is read")

    async def send(event):
        sent.append(event)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(door(app, admits)({"type": "http", "path": path, "headers": raw}, receive, send))
    return sent[0]["status"]


def signed(key, by=None, ahead=0.0, client="one"):
    time = (now() + timedelta(seconds=ahead)).isoformat()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(by or key, time.encode())).decode(),
        TIMESTAMP_HEADER: time,
        CLIENT_HEADER: client,
    }


@pytest.fixture
def north(tmp_path):
    key = new_key()
    write_key_pair(tmp_path, "north", key)
    return key


@pytest.fixture
def organisations(tmp_path, north):
    return Organisations(tmp_path, EventLog(tmp_path / "events.jsonl"), {"fedloom": "1", "code": "abc"})


def reasons(tmp_path):
    return [(event["who"], event["reason"]) for event in read_events(tmp_path / "events.jsonl") if "reason" in event]


def test_only_a_registered_key_that_signs_comes_in(organisations, north):
    admits = organisations.admits
    stranger = new_key()
    assert status(admits, PULL, signed(north)) == 200
    for headers in ({}, signed(stranger), signed(north, by=stranger), signed(north) | {TIMESTAMP_HEADER: "now"}):
        assert status(admits, PULL, headers) == 404
    garbled = signed(north)
    for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER):
        assert status(admits, PULL, garbled | {name: "%"}) == 404
    for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/../control/list-runs", "/"):
        expected = 200 if path.startswith("/v1/fleet/") else 404  # Flower knows no such path
        assert status(admits, path, signed(north)) == expected


def test_control_needs_the_token():
    admits = with_token(b"secret")
    assert status(admits, "/v1/control/list-runs", {"Authorization": "Bearer secret"}) == 200
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "secret"}):
        assert status(admits, "/v1/control/list-runs", headers) == 404


def test_the_private_port_hands_out_no_run_and_passes_only_runs_and_control():
    admits = with_token(b"secret")
    assert status(admits, "/v1/runtime/pull-messages", {}) == 200  # Flower checks the run's token
    for path in ("/v1/runtime/acquire-task", "/v1/runtime/acquire-task/", "/v1/fleet/pull-messages", "/docs", "/"):
        assert status(admits, path, {"Authorization": "Bearer secret"}) == 404


def test_versions_that_are_nested_deeply_are_refused_like_others(organisations, north):
    status, answer = greeted(organisations, signed(north) | {"fedloom-versions": "[" * 50_000})
    assert (status, answer["reason"]) == (403, "version")


def greeted(organisations, headers, ready=True):
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": HELLO, "headers": raw, "client": ("10.0.0.7", 1)}
    return organisations.greet(scope, lambda pem: ready)


def versions(**other):
    return {"fedloom-versions": json.dumps({"fedloom": "1", "code": "abc"} | other)}


@pytest.mark.parametrize(
    ("given", "reason", "why"),
    [
        ({"ahead": 61}, "clock", "61 s ahead of the server's, and at most 5 s ahead and 305 s behind are allowed"),
        ({"ahead": -400}, "clock", "400 s behind the server's"),
        ({"by": new_key()}, "signature", "not signed with the key that it names"),
    ],
)
def test_a_refused_client_learns_why(organisations, north, given, reason, why, tmp_path):
    code, answer = greeted(organisations, signed(north, **given) | versions())
    assert (code, answer["reason"]) == (403, reason)
    assert why in answer["why"]
    assert reasons(tmp_path) == [("north", reason)]


def test_strangers_revoked_keys_other_code_and_duplicates_differ(organisations, north, tmp_path):
    def reason(headers, **more):
        return greeted(organisations, headers, **more)[1].get("reason")

    assert reason(signed(new_key()) | versions()) == "key"
    assert reason(signed(north) | versions(code="other")) == "code"
    assert reason(signed(north) | versions(fedloom="2")) == "version"
    assert reason(signed(north) | versions(), ready=False) == "starting"
    assert reason(signed(north) | versions()) is None
    assert reason(signed(north, client="two") | versions()) == "duplicate"
    (tmp_path / "north.pub").rename(tmp_path / "north.pub.revoked")
    assert len(organisations.reload()) == 1
    assert reason(signed(north) | versions()) == "revoked"
    found = reasons(tmp_path)
    assert [one for _, one in found] == ["key", "code", "version", "duplicate", "revoked"]
    why = {event["reason"]: event["why"] for event in read_events(tmp_path / "events.jsonl")}
    assert "has lost its key must be revoked first" in why["key"] and "must be added with a new key" in why["revoked"]
    assert "without local changes" in why["code"] and "fedloom and torch" in why["version"]
    assert found[0][0].startswith("key ") and found[0][0].endswith("at 10.0.0.7")


def test_a_key_is_free_for_another_client_after_20_seconds_or_a_goodbye(organisations, north):
    admits = organisations.admits
    assert status(admits, PULL, signed(north)) == 200
    assert status(admits, PULL, signed(north, client="two")) == 404
    organisations.present["north"].at -= 21
    assert status(admits, PULL, signed(north, client="two")) == 200
    assert status(admits, LEAVES, signed(north, client="two")) == 200
    assert status(admits, PULL, signed(north)) == 200


def test_connections_and_losses_are_logged_once(organisations, north, tmp_path):
    for _ in range(3):
        status(organisations.admits, PULL, signed(north))
    organisations.note_lost()
    organisations.present["north"].at -= 21
    organisations.note_lost()
    organisations.note_lost()
    status(organisations.admits, PULL, signed(north))
    logged = [event["event"] for event in read_events(tmp_path / "events.jsonl")]
    assert logged == ["connected", "lost", "connected"]


def test_a_client_that_tries_again_does_not_fill_the_log(organisations, north, tmp_path):
    for _ in range(50):
        status(organisations.admits, PULL, signed(north, ahead=61))
    assert reasons(tmp_path) == [("north", "clock")]


def test_a_key_is_added_while_the_server_runs(organisations, tmp_path):
    south = new_key()
    assert status(organisations.admits, PULL, signed(south)) == 404
    write_key_pair(tmp_path, "south", south)
    assert organisations.reload() == []
    assert status(organisations.admits, PULL, signed(south)) == 200


def test_a_file_that_is_not_a_key_does_not_stop_the_server(tmp_path, north):
    (tmp_path / "west.pub").write_text("nonsense")
    assert [one.name for one in Organisations(tmp_path, EventLog(None), {}).keys.values()] == ["north"]
