"""Process of an organisation: keeps a SuperNode running, takes tasks from it and answers them.

Flower would run the app that the server sends. Here, received code is never run: the app bundle is ignored, and each
message is answered by the installed fedloom, within the organisation's consent.
"""

import logging
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import httpx
from flwr.app import Error
from flwr.app import Message as Parcel
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedloom.core.message import MessageError
from fedloom.deploy.certificates import write_secret
from fedloom.deploy.launch import free_port, process
from fedloom.deploy.member import Member
from fedloom.deploy.sealing import name_of, opened, sealed

POLL_SECONDS = 0.3
STEADY_SECONDS = 60.0
"""Seconds after which a SuperNode counts as stable; the next pause is then the shortest again."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before the SuperNode is restarted. After a SIGKILL, Flower refuses a node for about a minute."""
GUARDED = frozenset({"/flwr.proto.Runtime/AcquireTask"})
log = logging.getLogger("fedloom")


def work(member: Member) -> None:
    """Answer the server's requests until this process is ended; the connection is restored after a failure.

    Args:
        member: The organisation.
    """
    failures = 0
    while True:
        begun = monotonic()
        with _supernode(member) as (node, connection):
            _serve(member, node, connection)
        failures = 0 if monotonic() - begun > STEADY_SECONDS else failures + 1
        pause = PAUSES[min(max(failures, 1), len(PAUSES)) - 1]
        log.warning(
            f"the connection to {member.federation.host}:{member.federation.port} has ended (see "
            f"{member.folder}/supernode.log); reconnecting in {pause:g} s"
        )
        sleep(pause)


@dataclass(frozen=True)
class _Connection:
    """Connection to the SuperNode on loopback, which gives tasks only to processes that know the secret."""

    port: int
    secret: bytes

    def tasks(self) -> RuntimeHttpClient:
        """Return a client that asks for new tasks."""
        return self._client(SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=GUARDED))

    def task(self, token: str) -> RuntimeHttpClient:
        """Return a client for one task."""
        return self._client(RuntimeTokenHttpInterceptor(token), retry=True)

    def _client(self, interceptor: Any, retry: bool = False) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=f"127.0.0.1:{self.port}",
            insecure=True,
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), interceptor],
            retry_invoker=make_simple_http_retry_invoker() if retry else None,
        )


@contextmanager
def _supernode(member: Member) -> Iterator[tuple[subprocess.Popen[bytes], _Connection]]:
    federation, folder = member.federation, member.folder
    connection = _Connection(free_port(), secrets.token_bytes(32))
    secret = folder / ".supernode.secret"
    secret.unlink(missing_ok=True)
    write_secret(secret, connection.secret)
    arguments = (
        "--superlink", f"{federation.host}:{federation.port}", "--root-certificates", str(folder / "ca.pem"),
        "--auth-supernode-private-key", str(folder / "node.key"), "--isolation", "process",
        "--superexec-auth-secret-file", str(secret), "--host", "127.0.0.1", "--port", str(connection.port),
    )  # fmt: skip
    with process("supernode", *arguments, folder=folder) as node:
        yield node, connection


def _serve(member: Member, node: subprocess.Popen[bytes], connection: _Connection) -> None:
    """Process tasks until the SuperNode ends, or until a task fails, since Flower would wait forever for its answer."""
    with closing(connection.tasks()) as client:
        while node.poll() is None:
            try:
                found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            except httpx.HTTPError as error:  # the SuperNode is still starting, or has just ended
                log.debug(f"the SuperNode does not answer: {error}")
                sleep(POLL_SECONDS)
                continue
            if not found.HasField("task") or not found.token:
                sleep(POLL_SECONDS)
                continue
            try:
                _do(member, connection, found.token)
            except Exception as error:  # raised by Flower: our errors are part of the answer
                log.warning(f"an answer could not be sent: {type(error).__name__}: {error}")
                return


def _do(member: Member, connection: _Connection, token: str) -> None:
    """Process one task: pull the message, push the answer. Flower's context and app bundle are not read."""
    with closing(connection.task(token)) as client:
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heartbeat.start()
        try:
            parcel, context, _, _ = pull_task_input(client)
            push_message(client, reply_to(member, parcel), context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        finally:
            heartbeat.stop()


def reply_to(member: Member, parcel: Parcel) -> Parcel:
    """Return the signed answer to a message.

    A message that the coordinator did not sign, or that was received before, gets only a refusal.
    """
    try:
        about, body = opened(parcel.content, member.coordinator, member.consent.limits.message_bytes)
        member.seen.add(name_of(parcel.content))
    except MessageError as error:
        log.warning(f"a message was refused: {error}")
        return Parcel(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=parcel)
    answer, answer_body = member.answer(about, body)
    return Parcel(sealed(answer | {"answers": name_of(parcel.content)}, answer_body, member.key), reply_to=parcel)
