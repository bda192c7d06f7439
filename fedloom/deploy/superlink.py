"""Flower's SuperLink behind two access-controlled ports.

Flower serves two APIs on one port: the Fleet API, which organisations need, and the Control API, which starts runs and
registers keys without authentication. Here the public port passes only requests to the Fleet API. The Control API has a
separate port, on loopback by default, and requires the token in the server's folder. Flower reads a whole request
before it checks keys; the public port checks them first, so that strangers cannot fill the memory.
This module is run as a script, so that the process does not import torch.
"""

import argparse
import asyncio
import contextlib
import hmac
import sys
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import verify_signature
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
PUBLIC = "/v1/fleet/"
CONTROL = "/v1/control/"


def door(app: App, admits: Callable[[Scope], bool]) -> App:
    """Wrap an app so that requests which `admits` rejects get status 404.

    A SuperNode gives up at 404; at 403 it would hang.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and admits(scope)):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"not here"})
        else:
            await send({"type": "websocket.close"})

    return guarded


def registered(folder: Path) -> dict[bytes, EllipticCurvePublicKey]:
    """Return the organisations' public keys, by the PEM text that SuperNodes send."""
    keys = [load_ssh_public_key(path.read_bytes()) for path in folder.glob("*.pub")]
    pem = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return {key.public_bytes(*pem): key for key in keys if isinstance(key, EllipticCurvePublicKey)}


def organisations_only(keys: Mapping[bytes, EllipticCurvePublicKey]) -> Callable[[Scope], bool]:
    """Return a check that admits Fleet API requests signed with one of these keys.

    Flower then checks that the key belongs to the node that sent the request.
    """

    def admits(scope: Scope) -> bool:
        given = dict(scope["headers"])
        key, signature, time = (
            given.get(name.lower().encode(), b"")
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
        )
        try:
            known = keys.get(b64decode(key, validate=True))
            fits = known is not None and verify_signature(known, time, b64decode(signature, validate=True))
        except ValueError:  # not base64
            return False
        return fits and str(scope["path"]).startswith(PUBLIC)

    return admits


def with_token(token: bytes) -> Callable[[Scope], bool]:
    """Return a check that admits all requests, but requests to the Control API only with the token."""
    expected = b"Bearer " + token

    def admits(scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return not str(scope["path"]).startswith(CONTROL) or hmac.compare_digest(given, expected)

    return admits


async def serve(listen: str, port: int, token: bytes, keys: Mapping[bytes, EllipticCurvePublicKey]) -> None:
    """Serve both ports until a signal."""
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    tls: dict[str, Any] = {
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "log_level": "warning",
        "timeout_graceful_shutdown": 3,
    }
    inner = uvicorn.Server(uvicorn.Config(door(app, with_token(token)), host=config.host, port=config.port, **tls))
    public_app = door(app, organisations_only(keys))
    outer = uvicorn.Server(uvicorn.Config(public_app, host=listen, port=port, lifespan="off", **tls))
    outer.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    public = asyncio.create_task(outer.serve())
    await inner.serve()
    outer.should_exit = True
    await public


def main() -> None:
    """Parse our arguments, pass the remaining ones to Flower, and serve."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--listen", required=True)
    arguments.add_argument("--listen-port", type=int, required=True)
    arguments.add_argument("--token-file", type=Path, required=True)
    arguments.add_argument("--keys", type=Path, required=True)
    start_parent_process_monitor(int(sys.argv.pop(1)))
    ours, theirs = arguments.parse_known_args()
    sys.argv = [sys.argv[0], *theirs]
    asyncio.run(serve(ours.listen, ours.listen_port, ours.token_file.read_bytes(), registered(ours.keys)))


if __name__ == "__main__":
    main()
