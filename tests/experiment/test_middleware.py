"""Middleware around an engine: what each adds, and that the ledger sees what really travelled."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_task

from fedloom.core.compression import WireSettings
from fedloom.core.execution import handle
from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result
from fedloom.core.message import Message, signature
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.experiment.middleware import EncodeMessages, RecordMessages, ValidateResults
from fedloom.methods import get
from fedloom.trust.ledger import Ledger


class Inside:
    """An engine that keeps the jobs it was given."""

    def __init__(self, workspace):
        self.workspace, self.jobs = workspace, []

    def run(self, jobs):
        for job in jobs:
            self.jobs.append(job)
            yield handle(self.workspace, job)


@pytest.fixture
def workspace():
    return Workspace(Setup(tiny_task(norm=False), get("fedavg"), Training(), 0, WireSettings(up="int8", down="fp16")))


def jobs(workspace, clients=(0, 1, 2)):
    message = Message(workspace.downward())
    return [Job("update", 1, message, client=client) for client in clients]


def test_a_common_message_is_encoded_once_and_answers_are_decoded(workspace):
    engine = Inside(workspace)
    results = list(EncodeMessages(engine, workspace.setup.codec, workspace).run(jobs(workspace)))
    assert len({id(job.message) for job in engine.jobs}) == 1
    assert all("#fp16" in name for name in engine.jobs[0].message)
    assert all(result.message.signature == signature(workspace.sent) for result in results)


def test_the_ledger_has_the_encoded_form_of_rejected_messages_too(workspace):
    class Broken(Inside):
        def run(self, jobs):
            for result in super().run(jobs):
                yield replace(result, message=Message({"strange": torch.zeros(3)}, client=result.client))

    ledger = Ledger()
    inner = RecordMessages(Broken(workspace), ledger)
    outer = ValidateResults(EncodeMessages(inner, workspace.setup.codec, workspace), signature(workspace.sent))
    results = list(outer.run(jobs(workspace)))
    assert [result.error.kind for result in results] == ["invalid"] * 3
    up, down = (
        [entry for entry in ledger.to_json()["messages"] if entry["direction"] == way] for way in ("up", "down")
    )
    assert [(entry["messages"], [t["name"] for t in entry["tensors"]]) for entry in up] == [(3, ["strange"])]
    assert down[0]["messages"] == inner.sent == 3
    assert down[0]["bytes"] == inner.bytes_down


def test_failures_pass_through_as_they_are(workspace):
    failure = Failure("dropped", "it does not answer")

    class Silent:
        def run(self, jobs):
            return (Result(job.client, error=failure) for job in jobs)

    outer = ValidateResults(EncodeMessages(Silent(), workspace.setup.codec, workspace), signature(workspace.sent))
    assert [result.error for result in outer.run(jobs(workspace))] == [failure] * 3
