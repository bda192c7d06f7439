"""Client of Flower's Control API, with our token: register keys, start and stop runs, list runs and nodes."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from fedloom.core.errors import RunError, UserError
from fedloom.deploy.certificates import PublicKey
from fedloom.deploy.terms import FederationTerms


@dataclass(frozen=True)
class RunState:
    """State of a run according to Flower."""

    number: int
    status: str
    outcome: str
    details: str
    """Error message of a failed run; otherwise empty."""

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status == "finished"


class _Token:
    """HTTP interceptor that adds the token to each request."""

    def __init__(self, token: str):
        self._header = f"Bearer {token}"

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Add the header and continue; called by Flower's client."""
        context.request.headers["authorization"] = self._header
        response: httpx.Response = call_next(context)
        return response


class Control:
    """Control of the running server of a folder."""

    def __init__(self, folder: Path, client: ControlHttpClient):
        self.folder, self._client = folder, client

    def register(self, name: str, key: PublicKey) -> int:
        """Register the key of an organisation, which can then connect.

        Args:
            name: Name of the organisation.
            key: Its public key.

        Returns:
            Flower's id of its node.
        """
        encoded = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return int(self._client.RegisterNode(RegisterNodeRequest(public_key=encoded, name=name)).node_id)

    def start(self, run: str, *, wait: float, timeout: float) -> int:
        """Start a run whose recipe is stored in the folder.

        Args:
            run: Name of the run.
            wait: Seconds to wait for organisations.
            timeout: Seconds that an organisation has for an answer.

        Returns:
            Flower's id of the run.
        """
        content = build_fab_from_disk(self.folder / "app")
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        config = user_config_to_proto({"run": run, "wait": wait, "timeout": timeout})
        return int(self._client.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=config)).run_id)

    def stop(self, number: int) -> bool:
        """Stop a run, and return whether it was stopped."""
        return bool(self._client.StopRun(StopRunRequest(run_id=number)).success)

    def runs(self) -> list[RunState]:
        """Return all runs since the server started, oldest first."""
        found = self._client.ListRuns(ListRunsRequest()).run_dict.values()
        states = [
            (run.pending_at, RunState(run.run_id, run.status.status, run.status.sub_status, run.status.details))
            for run in found
        ]
        return [state for _, state in sorted(states, key=lambda pair: pair[0])]

    def nodes(self) -> dict[str, str]:
        """Return Flower's status of each organisation by name (online, offline, …)."""
        return {node.name: node.status for node in self._client.ListNodes(ListNodesRequest()).nodes_info}


@contextmanager
def controlling(folder: Path, host: str = "127.0.0.1") -> Iterator[Control]:
    """Open a connection to the server that runs from a folder on this machine.

    Args:
        folder: The server's folder.
        host: Address of the control port.

    Yields:
        The control of the server.

    Raises:
        UserError: If the folder is not a server's folder.
        RunError: If no server answers, or Flower refuses a request.
    """
    federation = FederationTerms.load(folder)
    try:
        token = (folder / "control.token").read_text(encoding="ascii")
    except OSError as error:
        raise UserError(
            f"'{folder}/control.token' cannot be read ({error.strerror}): give the server's folder that "
            "`fedloom deploy init` created"
        ) from None
    client = ControlHttpClient.from_server_address(
        f"{host}:{federation.control_port}", False, str(folder / "ca.pem"), interceptors=[_Token(token)]
    )
    try:
        yield Control(folder, client)
    except httpx.TransportError as error:
        raise RunError(
            f"no server answers on {host}:{federation.control_port} ({error}); start it with fedloom deploy server "
            f"--folder {folder}"
        ) from None
    except httpx.HTTPStatusError as error:
        raise RunError(
            f"Flower refused the request: {error.response.text[:300]} ({error.response.status_code})"
        ) from None
    finally:
        client.close()
