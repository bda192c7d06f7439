"""A recipe that an organisation has agreed to, with its engine, and the checks of jobs for it."""

from dataclasses import dataclass
from typing import Any

from fedloom.config.recipe import Recipe
from fedloom.core.job import ENCODED, Job
from fedloom.core.message import Message, MessageError, Signature, is_count, refuse_unless, signature
from fedloom.core.metrics import Metric
from fedloom.core.setup import Setup
from fedloom.core.task import Task
from fedloom.deploy.limits import JobLimits
from fedloom.deploy.secure import contribution_of
from fedloom.deploy.terms import FederationTerms, is_run
from fedloom.engines import Engine, EngineSettings, make_engine
from fedloom.trust.secure.contribution import Contribution

KINDS = ("update", "evaluate", "global")
"""Kinds of jobs that a client does. `generalise`, which needs the data of several clients, is not among them."""


@dataclass
class AgreedRecipe:
    """A recipe that this organisation has agreed to, with its engine."""

    recipe: Recipe
    organisations: tuple[str, ...]
    """Names of the organisations of the run, by number."""
    engine: Engine
    plain: Signature
    """Names, shapes and dtypes of the server's state."""
    packed: Signature
    """Names, shapes and dtypes of the server's state as encoded for training jobs."""
    contribution: Contribution | None
    """How this organisation adds to a sum, with secure aggregation."""


def make_ready(
    recipe: Recipe,
    task: Task,
    federation: FederationTerms,
    metrics: tuple[Metric, ...],
    limits: JobLimits,
    settings: EngineSettings,
) -> AgreedRecipe:
    """Create the engine of an agreed recipe, within the limits of a job.

    Args:
        recipe: The recipe.
        task: This organisation's part of its task.
        federation: The terms, with the organisations of the run.
        metrics: Figures that evaluations compute.
        limits: Limits of a job.
        settings: Engine settings.

    Raises:
        RefusalError: The method cannot be run as the recipe asks for.
        LimitError: It costs too much.
    """
    setup = Setup(
        task, recipe.make_method(), recipe.training, recipe.seed, recipe.wire, metrics=metrics, cache_features=True
    )
    with limits.enforced(interruptible=True):
        engine = make_engine(setup, settings)
        state = Message(engine.server_workspace.downward())
        packed = setup.codec.encode_down(state).signature
    contribution = contribution_of(recipe, signature(engine.server_workspace.sent))
    return AgreedRecipe(recipe, federation.organisations, engine, state.signature, packed, contribution)


def received_job(about: dict[str, Any], body: bytes, agreed: AgreedRecipe, number: int) -> tuple[Job, int | None, str]:
    """Return the job, the last accepted round and the run of a request, after checking all its fields.

    Args:
        about: The header of the request.
        body: The content of the request.
        agreed: The recipe that it is for.
        number: Number of this organisation.

    Raises:
        MessageError: A field is invalid.
    """
    try:
        job = Job.from_bytes(body)
    except (TypeError, KeyError, AssertionError, ValueError) as error:
        raise MessageError(f"the message is refused: it contains no valid job ({error!s:.120})") from None
    run, accepted = about.get("run"), about.get("accepted")
    refuse_unless(is_run(run), "it has no valid run name")
    refuse_unless(accepted is None or is_count(accepted), "it has no valid last accepted round")
    refuse_unless(job.kind in KINDS, f"a client does jobs of kind {', '.join(KINDS)}, not {job.kind!r:.20}")
    own = job.clients == (number,) if job.kind == "global" else job.client == number
    refuse_unless(own, "it is about another client's data")
    refuse_unless(is_count(job.attempt), "it has no valid number of attempts")
    rounds = agreed.recipe.training.rounds
    in_range = is_count(job.round, least=1) and job.round <= rounds
    refuse_unless(in_range, f"it is for round {job.round!r:.20} of {rounds}")
    known = agreed.packed if job.kind in ENCODED else agreed.plain
    for name, found in job.message.signature.items():
        refuse_unless(known.get(name) == found, f"'{name:.80}' does not match what this method sends to clients")
    if bad := job.message.not_finite():
        raise MessageError(f"the message is refused: '{bad}' has values that are not finite")
    return job, accepted, str(run)
