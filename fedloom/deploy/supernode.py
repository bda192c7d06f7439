"""Flower's SuperNode as a process that ends with its parent; run as a script, so that it does not import torch.

It differs from Flower's in three ways. Each successful request is recorded, so that the parent notices a SuperNode
without contact. Heartbeats are sent every 4 seconds instead of 20, so that the server notices within 20 seconds instead
of 60 that a SuperNode was killed. And when Flower gives up, the process ends: its HTTP server would keep it alive.
"""

import os
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import flwr.supercore.heartbeat
import flwr.supernode.fleet_http_connection as connection
import httpx
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedloom.deploy.door import CLIENT_HEADER
from fedloom.deploy.logs import log_with_times


class ObservedInterceptor(NodeAuthHttpInterceptor):
    """Signs requests as Flower does, names the client, and records when a request succeeded."""

    contact: Path
    client: str

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Send a request; called by Flower's client."""
        context.request.headers[CLIENT_HEADER] = self.client
        response = super().intercept(context, call_next)
        if response.is_success:
            self.contact.write_text(f"{monotonic():.3f}", encoding="ascii")
        return response


def last_contact(path: Path) -> float | None:
    """Return the time of the last successful request by the monotonic clock; None if there was none."""
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # none yet, or it is being written
        return None


def main() -> None:
    """Run a SuperNode until it ends or is ended."""
    start_parent_process_monitor(int(sys.argv.pop(1)))
    ObservedInterceptor.contact, ObservedInterceptor.client = Path(sys.argv.pop(1)), sys.argv.pop(1)
    connection.NodeAuthHttpInterceptor = ObservedInterceptor  # type: ignore[misc]
    for module in (connection, flwr.supercore.heartbeat):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_MIN_INTERVAL  # type: ignore[attr-defined]
    log_with_times()
    try:
        flower_supernode()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
