"""Process of an organisation: keeps a SuperNode running, takes tasks from it and answers them.

Flower would run the app that the server sends. Here, received code is never run: the app bundle is ignored, and each
message is answered by the installed fedloom, within the organisation's consent.
"""

import logging
from contextlib import closing
from time import sleep

import httpx
from flwr.app import Error
from flwr.app import Message as Parcel
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedloom.core.message import MessageError
from fedloom.deploy.member import Member
from fedloom.deploy.reconnect import CONTACT_SECONDS, Connection, Reconnecting
from fedloom.deploy.sealing import name_of, opened, sealed

POLL_SECONDS = 0.3
log = logging.getLogger("fedloom")


def work(member: Member, contact_seconds: float = CONTACT_SECONDS) -> None:
    """Answer the server's requests until this process is ended; the connection is restored after a failure.

    Args:
        member: The organisation.
        contact_seconds: Seconds without contact after which the SuperNode is replaced.
    """
    link = Reconnecting(member.folder, member.federation, member.key, member.audit, contact_seconds)
    link.start()
    try:
        while True:
            if link.current is None:
                sleep(POLL_SECONDS)
            else:
                _serve(member, link, link.current)
    finally:
        link.stop()


def _serve(member: Member, link: Reconnecting, connection: Connection) -> None:
    """Process tasks of a SuperNode until it is replaced.

    It is also replaced if a task fails, since Flower would wait forever for its answer.
    """
    with closing(connection.tasks()) as client:
        while link.current is connection:
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
                member.audit.add("failed", member.name, why=f"an answer could not be sent: {type(error).__name__}")
                log.warning(f"an answer could not be sent: {type(error).__name__}: {error}")
                link.replace(connection)
                return


def _do(member: Member, connection: Connection, token: str) -> None:
    """Process one task: pull the message, push the answer. Flower's context and app bundle are not read."""
    with closing(connection.task(token)) as client:
        heartbeat = HeartbeatSender(lambda: _beat(client))
        heartbeat.start()
        try:
            parcel, context, _, _ = pull_task_input(client)
            push_message(client, reply_to(member, parcel), context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        finally:
            heartbeat.stop()


def _beat(client: RuntimeHttpClient) -> bool:
    """Send a heartbeat; Flower's function would interrupt this process if the SuperNode does not know the task."""
    try:
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except httpx.HTTPError:
        return False
    return True


def reply_to(member: Member, parcel: Parcel) -> Parcel:
    """Return the signed answer to a message.

    A message that the coordinator did not sign, or that was received before, gets only a refusal.
    """
    try:
        about, body = opened(parcel.content, member.coordinator, member.consent.limits.message_bytes)
        member.seen.add(name_of(parcel.content))
    except MessageError as error:
        member.audit.add("refused", "server", reason="signature", why=str(error), decision="refused")
        return Parcel(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=parcel)
    answer, answer_body = member.answer(about, body)
    return Parcel(sealed(answer | {"answers": name_of(parcel.content)}, answer_body, member.key), reply_to=parcel)
