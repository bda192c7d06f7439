"""HTTP requests at the public port of a deployment: mutated headers, most of them signed with the right key."""

import asyncio
from base64 import b64encode
from collections.abc import MutableMapping
from pathlib import Path
from random import Random
from typing import Any

from fedloom.core.errors import UserError
from tests.fuzz import mutate

NOW = b"NOW"
"""Replaced by the time, without which a valid request would be refused after five minutes."""
VERSIONS = b'{"code": "abc", "fedloom": "1"}'


def request_seeds() -> list[bytes]:
    """Path, timestamp, client and versions of valid requests, separated by line breaks."""
    from fedloom.deploy.door import HELLO, LEAVES

    paths = (HELLO.encode(), LEAVES.encode(), b"/v1/fleet/pull-messages")
    return [b"\n".join((path, NOW, b"one", VERSIONS)) for path in paths]


def nested(rng: Random, data: bytes) -> bytes:
    """The versions are nested deeply."""
    return data.rpartition(b"\n")[0] + b"\n" + rng.choice((b"[", b'{"a":')) * rng.choice((10, 900, 30_000))


class Requests:
    """The greeting and the door of a server, with one registered organisation."""

    def __init__(self, folder: Path) -> None:
        from fedloom.deploy.certificates import new_key, write_key_pair
        from fedloom.deploy.door import Organisations
        from fedloom.deploy.events import EventLog

        self.key = new_key()
        place = folder / "door"
        place.mkdir(parents=True, exist_ok=True)
        (place / "north.key").unlink(missing_ok=True)
        write_key_pair(place, "north", self.key)
        self.organisations = Organisations(place, EventLog(place / "events.jsonl"), {"code": "abc", "fedloom": "1"})

    def __call__(self, data: bytes) -> object:
        status = asyncio.run(self._status(self._scope(data)))
        if status != 200:
            raise UserError(f"the request is refused with status {status}")
        return status

    def _scope(self, data: bytes) -> MutableMapping[str, Any]:
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.date import now
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

        from fedloom.deploy.door import CLIENT_HEADER, VERSIONS_HEADER

        path, time, client, versions = (data.replace(NOW, now().isoformat().encode()).split(b"\n", 3) + [b""] * 3)[:4]
        key, signature = (
            b64encode(one) for one in (public_key_to_bytes(self.key.public_key()), sign_message(self.key, time))
        )
        rng = Random(data)
        if rng.random() < 0.3:
            key = mutate.plain(rng, key)
        if rng.random() < 0.3:
            signature = mutate.plain(rng, signature)
        headers = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: key, FLEET_HTTP_SIGNATURE_HEADER: signature, TIMESTAMP_HEADER: time,
            CLIENT_HEADER: client, VERSIONS_HEADER: versions,
        }  # fmt: skip
        raw = [(name.lower().encode(), value) for name, value in headers.items()]
        return {"type": "http", "path": path.decode("utf-8", "replace"), "headers": raw, "client": ("10.0.0.7", 1)}

    async def _status(self, scope: MutableMapping[str, Any]) -> int:
        from fedloom.deploy.door import door
        from fedloom.deploy.superlink import greeting

        self.organisations.present.clear()  # each request is that of a new client
        sent: list[MutableMapping[str, Any]] = []

        async def flower(_: Any, __: Any, send: Any) -> None:
            await send({"status": 200})

        async def receive() -> MutableMapping[str, Any]:
            raise AssertionError("the body is read")

        async def send(event: MutableMapping[str, Any]) -> None:
            sent.append(event)

        app = greeting(self.organisations, door(flower, self.organisations.admits), lambda pem: True)
        await app(scope, receive, send)
        return int(sent[0]["status"])
