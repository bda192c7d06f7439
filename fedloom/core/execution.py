"""Execution of jobs in a workspace. Every engine calls `handle` or `launch`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fedloom.core.client import Client
from fedloom.core.failures import Failure
from fedloom.core.job import ENCODED, Job, JobKind, Result
from fedloom.core.message import Message
from fedloom.core.metrics import Metric
from fedloom.core.scores import Answers
from fedloom.core.state import State, copies
from fedloom.core.task import EVERYONE
from fedloom.core.workspace import Workspace


def handle(workspace: Workspace, job: Job) -> Result:
    """Run a job, including decoding and encoding of messages, and wait for the device.

    An exception raised by the client becomes the result's error. `torch.OutOfMemoryError` is re-raised: the engine
    handles it.
    """
    start = perf_counter()
    result = launch(workspace, job)
    try:
        result.read()
    except Exception as error:  # errors of GPU kernels are raised here
        return _failed(job, error)
    result.seconds = perf_counter() - start
    return result


def launch(workspace: Workspace, job: Job) -> Result:
    """Run a job like `handle`, but without waiting: on a GPU the result's tensors may not be computed yet."""
    start = perf_counter()
    workspace = workspace.of(job.client)
    codec, intercept, work = workspace.setup.codec, workspace.setup.intercept, WORK[job.kind]
    try:
        if job.kind in ENCODED and codec.down is not None:
            job = replace(job, message=codec.decode_down(job.message, workspace.initial))
        result = work(workspace, job) if intercept is None else intercept(work, workspace, job)
        workspace.refuse_rebound()
        if codec.up is not None and result.message is not None and result.memory is not None:
            result.message, left = codec.encode_up(result.message, job.message, job.memory or {})
            result.memory |= left
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return _failed(job, error)
    result.seconds = perf_counter() - start
    return result


def _failed(job: Job, error: Exception) -> Result:
    error.add_note(f"(in a job of client {job.client}: {job.kind}, round {job.round})")
    return Result(job.client, error=Failure.of(error))


def perform(workspace: Workspace, job: Job) -> Result:
    """Run a job whose message is not encoded; exceptions are not caught."""
    return WORK[job.kind](workspace.of(job.client), job).read()


def _client(workspace: Workspace, job: Job, purpose: str, memory: State | None) -> Client:
    """Load a client into the workspace. A client without memory is prepared first."""
    samples = workspace.setup.task.samples(job.client)
    workspace.load(job.message, memory)
    new = memory is None
    if new:
        for network in workspace.networks:
            workspace.setup.task.objective.begin(network)
        workspace.setup.method.prepare(
            Client(workspace, id=job.client, round=0, job="prepare", samples=samples, first=True)
        )
    kept = {name: tensor for name, tensor in (memory or {}).items() if name.startswith("optim.")}
    return Client(workspace, id=job.client, round=job.round, job=purpose, samples=samples, first=new, optimizers=kept)


def _update(workspace: Workspace, job: Job) -> Result:
    method = workspace.setup.method
    client = _client(workspace, job, "update", job.memory)
    method.update(client)
    message = Message(workspace.outgoing(), client=job.client, samples=client.size)
    return Result(
        client=job.client, message=message, memory=_memory(workspace, client), loss=client.last_loss,
        finite_steps=client.finite_steps,
    )  # fmt: skip


def _memory(workspace: Workspace, client: Client) -> State:
    return workspace.kept() | client.optimizers


def _evaluate(workspace: Workspace, job: Job) -> Result:
    """Score the personal model. A client without memory of its personal parts gets them from a temporary update."""
    method, task = workspace.setup.method, workspace.setup.task
    memory = job.memory
    if memory is None and method.is_personal:
        newcomer = _client(workspace, job, "newcomer", None)
        method.update(newcomer)
        memory = _memory(workspace, newcomer)
    client = _client(workspace, job, "personalise", {} if memory is None else memory)
    method.personalise(client)
    personal = _changed(workspace, job.message) if job.keep_model else None
    workspace.modes.evaluate_only()

    def predict(x: Tensor) -> Tensor:
        return method.predict(client, x)

    scored = answers(workspace, {job.client: task.federation.test[job.client]}, predict)
    validated = _validated(workspace, {job.client: task.federation.validation[job.client]}, predict)
    return Result(client=job.client, personal=personal, answers=scored, validation_answers=validated)


def _validated(
    workspace: Workspace, samples: dict[int, np.ndarray], predict: Callable[[Tensor], Tensor]
) -> Answers | None:
    """Predict the validation samples of clients; None if they have none."""
    return answers(workspace, samples, predict) if any(map(len, samples.values())) else None


def _changed(workspace: Workspace, message: Message) -> State:
    """Return the tensors that differ from the message, or from the initial values where the message has none."""
    now = copies(workspace.changing())
    base = {name: message.get(name, workspace.initial[name]) for name in now}
    return {name: value.cpu() for name, value in now.items() if not torch.equal(value, base[name].to(value))}


def _score_global(workspace: Workspace, job: Job) -> Result:
    task, method = workspace.setup.task, workspace.setup.method
    workspace.load(job.message, None)
    workspace.modes.evaluate_only()
    holder = Client(workspace, id=-1, round=job.round, job="global", samples=np.empty(0, np.int64))
    validate = job.kind == "validate"
    held = task.federation.validation if validate else task.federation.test
    scored = answers(workspace, {c: held[c] for c in job.clients}, lambda x: method.predict_global(holder, x))
    return Result(client=-1, validation_answers=scored) if validate else Result(client=-1, answers=scored)


def _generalise(workspace: Workspace, job: Job) -> Result:
    task, method = workspace.setup.task, workspace.setup.method
    workspace.load(job.message, None)
    newcomers = set(job.clients) & set(task.federation.newcomers)
    trained = [c for c in job.clients if c not in newcomers]
    samples = np.concatenate([task.samples(c) for c in trained])
    pooled = Client(workspace, id=job.client, round=job.round, job="generalise", samples=samples, first=False)
    method.generalise(pooled)
    personal = _changed(workspace, job.message) if job.keep_model else None
    workspace.modes.evaluate_only()
    tests = {id(task.federation.test[c]): task.federation.test[c] for c in trained}
    held = {EVERYONE: np.concatenate(list(tests.values()))} | {c: task.federation.test[c] for c in sorted(newcomers)}

    def predict(x: Tensor) -> Tensor:
        return method.predict_global(pooled, x)

    scored = answers(workspace, held, predict)
    validation = np.concatenate([task.federation.validation[c] for c in trained])
    validated = _validated(workspace, {job.client: validation}, predict)
    return Result(client=job.client, personal=personal, answers=scored, validation_answers=validated)


Work = Callable[[Workspace, Job], Result]
WORK: dict[JobKind, Work] = {
    "update": _update,
    "evaluate": _evaluate,
    "global": _score_global,
    "validate": _score_global,
    "generalise": _generalise,
}


@torch.no_grad()
def answers(workspace: Workspace, samples: Mapping[int, np.ndarray], predict: Callable[[Tensor], Tensor]) -> Answers:
    """Predict samples of some clients, in large batches."""
    task, metrics, trigger = workspace.setup.task, workspace.setup.metrics, workspace.setup.trigger
    compare = _labels if task.objective.multilabel else _classes
    columns: list[tuple[Tensor, ...]] = []
    fooled: list[Tensor] = [torch.zeros(0, dtype=torch.bool, device=workspace.device)]
    index = torch.from_numpy(np.concatenate(list(samples.values()))).to(workspace.device)
    for chunk in index.split(workspace.evaluation_batch):
        if len(chunk) == 0:
            continue
        with workspace.autocast():
            logits = task.objective.class_logits(predict(workspace.stored.plain(chunk)).float())
        columns.append(compare(logits, workspace.stored.labels[chunk], metrics))
        if trigger is not None:
            x = workspace.stored.normalise(trigger.stamp(workspace.stored.image(chunk)))
            with workspace.autocast():
                triggered = task.objective.class_logits(predict(x).float())
            fooled.append(triggered.argmax(1) == trigger.target)
    if not columns:
        nothing = torch.zeros(0, task.classes, device=workspace.device)
        columns = [compare(nothing, workspace.stored.labels[index], metrics)]
    labels, right, loss, *predicted = (torch.cat(column) for column in zip(*columns, strict=True))
    sizes = tuple(len(part) for part in samples.values())
    return Answers(
        labels, right, loss, task.classes, tuple(samples), sizes, metrics, tuple(predicted),
        *(() if trigger is None else (torch.cat(fooled), trigger.target)),
    )  # fmt: skip


def _classes(logits: Tensor, y: Tensor, metrics: tuple[Metric, ...]) -> tuple[Tensor, ...]:
    """Return labels, whether predictions are right, losses and, for `metrics`, what was predicted."""
    judged = y, logits.argmax(1) == y, cross_entropy(logits, y, reduction="none")
    return (*judged, *_predicted(logits, probabilities="auc" in metrics)) if metrics else judged


def _labels(logits: Tensor, y: Tensor, metrics: tuple[Metric, ...]) -> tuple[Tensor, ...]:
    """Return the same for several labels per sample: one decision and one loss per label."""
    judged = y, (logits > 0) == (y > 0), binary_cross_entropy_with_logits(logits, y.to(logits), reduction="none")
    return (*judged, logits.double().sigmoid()) if metrics else judged


def _predicted(logits: Tensor, *, probabilities: bool) -> tuple[Tensor, ...]:
    """Return predicted classes, their probabilities and, if asked for, the probabilities of all classes, in float64."""
    share = logits.double().softmax(1)
    answers = logits.argmax(1), share.amax(1)
    return (*answers, share) if probabilities else answers
