"""Who is let in, before a byte of a request's body is read: Flower itself looks at keys only after that."""

import asyncio
from base64 import b64encode

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import sign_message

from fedloom.deploy.certificates import new_key, write_key_pair
from fedloom.deploy.superlink import door, organisations_only, registered, with_token

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


def signed(key, by=None):
    time = now().isoformat()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(by or key, time.encode())).decode(),
        TIMESTAMP_HEADER: time,
    }


@pytest.fixture
def north(tmp_path):
    key = new_key()
    write_key_pair(tmp_path, "north", key)
    return key


def test_only_a_registered_key_that_signs_comes_in(tmp_path, north):
    admits = organisations_only(registered(tmp_path))
    stranger = new_key()
    assert status(admits, PULL, signed(north)) == 200
    for headers in ({}, signed(stranger), signed(north, by=stranger), signed(north) | {TIMESTAMP_HEADER: "now"}):
        assert status(admits, PULL, headers) == 404
    garbled = signed(north)
    for name in garbled:
        assert status(admits, PULL, garbled | {name: "%"}) == 404
    for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/../control/list-runs", "/"):
        expected = 200 if path.startswith("/v1/fleet/") else 404  # Flower knows no such path
        assert status(admits, path, signed(north)) == expected


def test_control_needs_the_token():
    admits = with_token(b"secret")
    assert status(admits, "/v1/control/list-runs", {"Authorization": "Bearer secret"}) == 200
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "secret"}):
        assert status(admits, "/v1/control/list-runs", headers) == 404
