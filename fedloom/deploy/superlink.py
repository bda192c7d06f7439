"""Flower's SuperLink behind two doors.

Flower serves everything on one port: what organisations need (the Fleet API), and what starts runs and registers keys
(the Control API), which asks nobody who they are. Here the first is all that the public door lets through; the second
is on a door of its own, on loopback unless told otherwise, and asks for the token in the server's folder.
Run as a script: it needs no torch.
"""

import argparse
import asyncio
import contextlib
import hmac
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
PUBLIC = "/v1/fleet/"
CONTROL = "/v1/control/"


def door(app: App, admits: Callable[[Scope], bool]) -> App:
    """The app for those whom `admits` lets in; 403 for others."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and admits(scope)):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"not here"})
        else:
            await send({"type": "websocket.close"})

    return guarded


def organisations_only(scope: Scope) -> bool:
    """What a SuperNode asks for; its key is checked behind the door."""
    return str(scope["path"]).startswith(PUBLIC)


def with_token(token: bytes) -> Callable[[Scope], bool]:
    """Anything, but control only with the token."""
    expected = b"Bearer " + token

    def admits(scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return not str(scope["path"]).startswith(CONTROL) or hmac.compare_digest(given, expected)

    return admits


async def serve(listen: str, port: int, token: bytes) -> None:
    """Both doors, till a signal."""
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    tls: dict[str, Any] = {
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "log_level": "warning",
        "timeout_graceful_shutdown": 3,
    }
    inner = uvicorn.Server(uvicorn.Config(door(app, with_token(token)), host=config.host, port=config.port, **tls))
    outer = uvicorn.Server(uvicorn.Config(door(app, organisations_only), host=listen, port=port, lifespan="off", **tls))
    outer.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    public = asyncio.create_task(outer.serve())
    await inner.serve()
    outer.should_exit = True
    await public


def main() -> None:
    """Our own arguments first; the rest is Flower's."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--listen", required=True)
    arguments.add_argument("--listen-port", type=int, required=True)
    arguments.add_argument("--token-file", type=Path, required=True)
    start_parent_process_monitor(int(sys.argv.pop(1)))
    ours, theirs = arguments.parse_known_args()
    sys.argv = [sys.argv[0], *theirs]
    asyncio.run(serve(ours.listen, ours.listen_port, ours.token_file.read_bytes()))


if __name__ == "__main__":
    main()
