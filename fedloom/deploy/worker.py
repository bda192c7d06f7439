"""An organisation's process: it keeps a SuperNode running, takes tasks from it and answers them with its own code.

Flower would run the app that the server sends. Here nothing that came over the wire is ever run: the bundle is ignored,
and each message is answered by the fedloom that is installed here, within what the organisation consented to.
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
"""A SuperNode that ran so long was well; the next pause is short again."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Before the SuperNode is started again. After a SIGKILL Flower refuses a node for about a minute."""
GUARDED = frozenset({"/flwr.proto.Runtime/AcquireTask"})
log = logging.getLogger("fedloom")


def work(member: Member) -> None:
    """Till this process is ended."""
    failures = 0
    while True:
        begun = monotonic()
        with _supernode(member) as (node, line):
            _serve(member, node, line)
        failures = 0 if monotonic() - begun > STEADY_SECONDS else failures + 1
        pause = PAUSES[min(max(failures, 1), len(PAUSES)) - 1]
        log.warning(
            f"the connection to {member.federation.host}:{member.federation.port} has ended (see "
            f"{member.folder}/supernode.log); trying again in {pause:g} s"
        )
        sleep(pause)


@dataclass(frozen=True)
class _Line:
    """The way to the SuperNode: on loopback; tasks are given out only to who knows the secret."""

    port: int
    secret: bytes

    def tasks(self) -> RuntimeHttpClient:
        """For asking whether there is something to do."""
        return self._client(SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=GUARDED))

    def task(self, token: str) -> RuntimeHttpClient:
        """For doing it."""
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
def _supernode(member: Member) -> Iterator[tuple[subprocess.Popen[bytes], _Line]]:
    federation, folder = member.federation, member.folder
    line = _Line(free_port(), secrets.token_bytes(32))
    secret = folder / ".supernode.secret"
    secret.unlink(missing_ok=True)
    write_secret(secret, line.secret)
    arguments = (
        "--superlink", f"{federation.host}:{federation.port}", "--root-certificates", str(folder / "ca.pem"),
        "--auth-supernode-private-key", str(folder / "node.key"), "--isolation", "process",
        "--superexec-auth-secret-file", str(secret), "--host", "127.0.0.1", "--port", str(line.port),
    )  # fmt: skip
    with process("supernode", *arguments, folder=folder) as node:
        yield node, line


def _serve(member: Member, node: subprocess.Popen[bytes], line: _Line) -> None:
    """Takes tasks for as long as the SuperNode lives, and has not lost one: it would wait for its answer for ever."""
    with closing(line.tasks()) as client:
        while node.poll() is None:
            try:
                found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            except httpx.HTTPError as error:  # it is not up yet, or just went
                log.debug(f"the SuperNode does not answer: {error}")
                sleep(POLL_SECONDS)
                continue
            if not found.HasField("task") or not found.token:
                sleep(POLL_SECONDS)
                continue
            try:
                _do(member, line, found.token)
            except Exception as error:  # Flower's: ours are told in the answer
                log.warning(f"an answer could not be given: {type(error).__name__}: {error}")
                return


def _do(member: Member, line: _Line, token: str) -> None:
    """One task: message in, answer out. Flower's context and bundle stay unread."""
    with closing(line.task(token)) as client:
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heartbeat.start()
        try:
            parcel, context, _, _ = pull_task_input(client)
            push_message(client, reply_to(member, parcel), context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        finally:
            heartbeat.stop()


def reply_to(member: Member, parcel: Parcel) -> Parcel:
    """The answer to a message; one that the coordinator did not sign, or that came before, gets only a refusal."""
    try:
        about, body = opened(parcel.content, member.coordinator, member.consent.limits.message_bytes)
        member.seen.add(name_of(parcel.content))
    except MessageError as error:
        log.warning(f"a message was refused: {error}")
        return Parcel(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=parcel)
    answer, answer_body = member.answer(about, body)
    return Parcel(sealed(answer | {"answers": name_of(parcel.content)}, answer_body, member.key), reply_to=parcel)
