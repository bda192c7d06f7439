"""What a run writes down, one definition each: a record per round, a summary, a row per client."""

from typing import Annotated, Any, Required

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, with_config
from typing_extensions import TypedDict

from fedloom.core.reading import CHECKED, Count


def _or_null(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return None if value is None else check(value)


Known = Annotated[float, WrapValidator(_or_null)]
"""A number; files have null where it is not one."""


@with_config(CHECKED)
class Measures(TypedDict, total=False):
    """What an evaluation found. Accuracies are shares; the `personal_*` ones are over clients."""

    global_accuracy: float | None
    global_mean_accuracy: float | None
    personal_accuracy: float | None
    personal_weighted: float | None
    personal_std: float | None
    personal_worst: float | None
    personal_loss: float | None
    newcomer_accuracy: float | None
    newcomer_weighted: float | None
    newcomer_std: float | None
    newcomer_worst: float | None
    newcomer_loss: float | None
    newcomer_global_accuracy: float | None
    newcomer_global_weighted: float | None
    newcomer_global_std: float | None
    newcomer_global_worst: float | None
    newcomer_global_loss: float | None
    styles: dict[str, Known]
    """Accuracy of the global representation in every style."""
    personal_styles: dict[str, Known]
    distance: float | None
    """Mean L2 distance between clients' copies of `evaluation.distance`."""
    evaluated: Count
    """Clients that were evaluated; only in rounds with an evaluation."""


@with_config(CHECKED)
class RoundRecord(Measures, total=False):
    """A line of metrics.jsonl."""

    round: Required[Count]
    lr: float
    clients: Count
    """Clients whose answers were combined."""
    loss: float | None
    """Mean training loss over samples."""
    up_bytes: Count
    """Per client that answered."""
    down_bytes: Count
    """Per client that was asked."""
    failed: dict[str, Count]
    """Clients that were left out, by the kind of failure."""
    attempts: Count
    """How often the round was begun; only where more than once."""
    hostile: Count
    """Attackers among the participants."""
    epsilon: Known
    """Privacy spent so far."""
    train_seconds: float
    seconds: float


@with_config(CHECKED)
class Best(TypedDict):
    """Highest accuracies of any round: chosen on test data, shown beside the summary and never instead of it."""

    global_accuracy: float | None
    personal_accuracy: float | None


@with_config(CHECKED)
class Figures(Measures, total=False):
    """The part of a summary that comes out of the rounds' records."""

    summary: str
    """The rule of `evaluation.summary` by which the measures were taken."""
    best: Best
    up_bytes: Count
    down_bytes: Count
    failed: dict[str, Count]
    epsilon: Known
    notes: list[str]
    seconds: float


@with_config(CHECKED)
class Summary(Figures, total=False):
    """summary.json."""

    method: Required[str]
    rounds: Count
    seed: Count
    clients: Count
    run_dir: str
    label: str
    """In a comparison or sweep: what tells this run apart."""
    setting: dict[str, Any]
    """In a sweep: the values of the swept fields."""


@with_config(CHECKED)
class ClientRow(TypedDict):
    """A line of clients.jsonl: one client at the last evaluation."""

    client: Count
    newcomer: bool
    train: Count
    accuracy: Known
    right: list[Count]
    """Per class, or one number for all classes together where an organisation shares no more."""
    total: list[Count]
    loss: float | None


@with_config(CHECKED)
class Named(TypedDict):
    """A network, a method or an objective by its name; its options are beside it."""

    name: str


@with_config(CHECKED)
class ImageFacts(TypedDict):
    """What is known of images, as `ImageFormat` writes it."""

    classes: Annotated[list[str], Field(min_length=1)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=2**20)]], Field(min_length=3, max_length=3)]
    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]


@with_config(CHECKED)
class TaskFacts(ImageFacts):
    """task.json: what must be known of the data to use a model without them."""

    model: Named
    clients: Count
    newcomers: list[Count]
    styles: list[str]
    fingerprint: str


ROUND = ("lr", "clients", "loss", "up_bytes", "down_bytes", "failed", "train_seconds", "seconds")
"""Fields that every line of metrics.jsonl has."""
SUMMARISED = ("rounds", "seed", "clients", "summary", "best", "up_bytes", "down_bytes", "failed", "notes", "seconds")
"""Fields that every summary.json has."""


def measure(record: RoundRecord | Figures | Summary, name: str) -> float | None:
    """A number of a record by its name, for code that goes through several of them."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None
