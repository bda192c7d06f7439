"""Flower's SuperLink behind two access-controlled ports.

Flower serves two APIs on one port: the Fleet API, which organisations need, and the Control API, which starts runs and
registers keys without authentication. Here the public port passes only requests to the Fleet API. The Control API has a
separate port, on loopback by default, and requires the token in the server's folder (`door.py`). Keys and the TLS
certificate are read again when their files change, while connections and runs continue. A run is computed by a child
process, the ServerApp.
This module is run as a script, so that the process does not import torch.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.address import resolve_bind_address
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from flwr.superlink.servicer.runtime.runtime_handlers import acquire_task

from fedloom.deploy.door import HELLO, App, Organisations, Receive, Scope, Send, door, respond, with_token
from fedloom.deploy.events import CONTACTS, SERVER, EventLog
from fedloom.deploy.launch import end, start
from fedloom.deploy.logs import log_with_times
from fedloom.experiment.files import write_whole

TICK_SECONDS = 1.0
APP_SECONDS = 3.0
"""Seconds that a ServerApp has to end; its run can be resumed from its last round."""


def greeting(organisations: Organisations, app: App, is_ready: Callable[[bytes], bool]) -> App:
    """Wrap an app so that clients can ask whether they may connect, at `HELLO`."""

    async def with_greeting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == HELLO:
            status, answer = organisations.greet(scope, is_ready)
            await respond(send, status, json.dumps(answer).encode())
        else:
            await app(scope, receive, send)

    return with_greeting


class Apps:
    """The ServerApps: a process for each run that was started at the Control API.

    Args:
        folder: The server's folder.
        address: Address of the control port, which the ServerApps use.
        link_state: Returns Flower's state.
    """

    def __init__(self, folder: Path, address: str, link_state: Callable[[], Any]):
        self._folder, self._address, self._link_state = folder, address, link_state
        self._running: list[subprocess.Popen[bytes]] = []

    def tick(self) -> None:
        """Start the ServerApp of a run that has none yet."""
        self._running = [app for app in self._running if app.poll() is None]
        found = acquire_task(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]), self._link_state())
        if found.token:
            authority = str(self._folder / "ca.pem")
            self._running.append(start("serverapp", self._address, authority, folder=self._folder, secret=found.token))

    def stop(self) -> None:
        """End all ServerApps."""
        for app in self._running:
            app.terminate()
        for app in self._running:
            end(app, APP_SECONDS)


class Watch:
    """Watches the files of keys and certificate, and applies their changes.

    Args:
        folder: The server's folder.
        organisations: The organisations at the public port.
        link_state: Returns Flower's state.
        servers: The servers that use the certificate.
    """

    def __init__(
        self,
        folder: Path,
        organisations: Organisations,
        link_state: Callable[[], Any],
        servers: Sequence[uvicorn.Server],
    ):
        self._folder, self._organisations, self._link_state, self._servers = folder, organisations, link_state, servers
        self._keys, self._pair = self._stamps("organisations"), self._stamps("server.pem", "server.key")
        self._contacts = ""

    def tick(self) -> None:
        """Apply changes since the last call, and store the last contacts."""
        if (keys := self._stamps("organisations")) != self._keys:
            self._keys = keys
            for pem in self._organisations.reload():
                node = self._link_state().get_node_id_by_public_key(pem)
                if node is not None:
                    self._link_state().deactivate_node(node)  # a running round need not wait for its heartbeats to end
        if (pair := self._stamps("server.pem", "server.key")) != self._pair:
            with contextlib.suppress(ssl.SSLError, OSError):  # one of both files is new: try again
                for server in self._servers:
                    if server.config.ssl is not None:
                        server.config.ssl.load_cert_chain(self._folder / "server.pem", self._folder / "server.key")
                self._pair = pair
        self._organisations.note_lost()
        contacts = json.dumps(self._organisations.contacts())
        if contacts != self._contacts:
            self._contacts = contacts
            write_whole(self._folder / CONTACTS, contacts.encode())

    def _stamps(self, *names: str) -> dict[str, int]:
        """Return the modification times of files, and of the files in folders."""
        paths = [self._folder / name for name in names]
        files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
        found = {}
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                found[file.name] = file.stat().st_mtime_ns
        return found


async def serve(folder: Path, listen: str, port: int, versions: dict[str, str]) -> None:
    """Serve both ports until a signal."""
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    tls: dict[str, Any] = {
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "log_level": "warning",
        "log_config": None,
        "timeout_graceful_shutdown": 3,
    }
    organisations = Organisations(folder / "organisations", EventLog(folder / SERVER), versions)

    def link_state() -> Any:
        return app.state.linkstate_factory.state()

    def is_ready(pem: bytes) -> bool:
        node = link_state().get_node_id_by_public_key(pem)
        if node is not None:
            # A client greets before it starts a SuperNode, so an earlier one has ended. Without this, Flower would
            # refuse the new one until the heartbeats of the old one have timed out.
            link_state().deactivate_node(node)
        return node is not None

    token = (folder / "control.token").read_bytes()
    inner = uvicorn.Server(uvicorn.Config(door(app, with_token(token)), host=config.host, port=config.port, **tls))
    public_app = greeting(organisations, door(app, organisations.admits), is_ready)
    outer = uvicorn.Server(uvicorn.Config(public_app, host=listen, port=port, lifespan="off", **tls))
    _stop_on_signal(inner, outer)
    public = asyncio.create_task(outer.serve())
    inside = f"[{config.host}]" if ":" in config.host else config.host
    apps = Apps(folder, resolve_bind_address(f"{inside}:{config.port}"), link_state)
    watch = Watch(folder, organisations, link_state, (inner, outer))
    ticking = [
        asyncio.create_task(_repeat(watch.tick, "changes of keys or certificates could not be applied")),
        asyncio.create_task(_repeat(apps.tick, "a run could not be started")),
    ]
    await inner.serve()
    for task in ticking:
        task.cancel()
    outer.should_exit = True
    await asyncio.gather(public, asyncio.to_thread(apps.stop))


def _stop_on_signal(*servers: uvicorn.Server) -> None:
    """Stop servers at SIGINT and SIGTERM; by themselves they would end this process, and not the ServerApps."""

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    for server in servers:
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]


async def _repeat(tick: Callable[[], None], problem: str) -> None:
    """Call a function every second; if it fails, log the problem and continue."""
    while True:
        await asyncio.sleep(TICK_SECONDS)
        try:
            tick()
        except Exception:
            logging.getLogger("fedloom").exception(problem)


def main() -> None:
    """Parse our arguments, pass the remaining ones to Flower, and serve."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--folder", type=Path, required=True)
    arguments.add_argument("--listen", required=True)
    arguments.add_argument("--listen-port", type=int, required=True)
    arguments.add_argument("--versions", type=json.loads, required=True)
    start_parent_process_monitor(int(sys.argv.pop(1)))
    ours, theirs = arguments.parse_known_args()
    sys.argv = [sys.argv[0], *theirs]
    log_with_times()
    asyncio.run(serve(ours.folder, ours.listen, ours.listen_port, ours.versions))


if __name__ == "__main__":
    main()
