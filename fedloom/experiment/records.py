"""Types of the records that a run writes: a record per round, a summary, a row per client, facts about the data."""

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, with_config
from typing_extensions import TypedDict

from fedloom.core.reading import CHECKED, Count


def _or_null(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return None if value is None else check(value)


Known = Annotated[float, WrapValidator(_or_null)]
"""A number that is null in files if it is NaN or infinite."""


@with_config(CHECKED)
class Measures(TypedDict, total=False):
    """The results of an evaluation; accuracies are between 0 and 1.

    With `evaluation.metrics` there are further fields, such as `personal_auc_worst`: see `summary.figures_of`.
    """

    global_accuracy: float | None
    """Accuracy of the shared model on all clients' test samples together; null if the method has no shared model."""
    global_mean_accuracy: float | None
    """Accuracy of the shared model on each client's test samples, unweighted mean over clients."""
    personal_accuracy: float | None
    """Accuracy of each client's personal model on its test samples, unweighted mean over clients."""
    personal_weighted: float | None
    """The same mean, weighted by test samples."""
    personal_std: float | None
    """Standard deviation over clients."""
    personal_worst: float | None
    """Mean of the worst tenth of the clients."""
    personal_loss: float | None
    """Mean loss per test sample."""
    validation_global_accuracy: float | None
    """As `global_accuracy`, on validation samples of clients that take part in training; like the fields below only
    if the split has validation samples."""
    validation_global_mean_accuracy: float | None
    validation_personal_accuracy: float | None
    validation_personal_weighted: float | None
    validation_personal_std: float | None
    validation_personal_worst: float | None
    validation_personal_loss: float | None
    newcomer_accuracy: float | None
    """As `personal_accuracy`, for clients held out of training; the fields below correspond to those above."""
    newcomer_weighted: float | None
    newcomer_std: float | None
    newcomer_worst: float | None
    newcomer_loss: float | None
    newcomer_global_accuracy: float | None
    """Accuracy of the shared model on the newcomers' test samples; the fields below correspond to those above."""
    newcomer_global_weighted: float | None
    newcomer_global_std: float | None
    newcomer_global_worst: float | None
    newcomer_global_loss: float | None
    styles: dict[str, Known]
    """Accuracy of the global representation by style."""
    personal_styles: dict[str, Known]
    """Mean personal accuracy by style."""
    distance: float | None
    """Mean L2 distance between clients' copies of the part `evaluation.distance`."""
    evaluated: Count
    """Number of evaluated clients; only in rounds with an evaluation."""


@with_config(CHECKED)
class RoundRecord(Measures, total=False):
    """A line of metrics.jsonl."""

    round: Required[Count]
    lr: float
    """Learning rate of the round."""
    clients: Count
    """Number of clients whose messages were combined."""
    loss: float | None
    """Mean training loss over samples."""
    up_bytes: Count
    """Bytes that a client sent to the server; mean over the clients that responded."""
    down_bytes: Count
    """Bytes that the server sent to a client; mean over all participants."""
    failed: dict[str, Count]
    """Number of clients that were left out, by kind of failure."""
    attempts: Count
    """Number of attempts at the round; only if it was retried."""
    hostile: Count
    """Number of hostile clients among the participants; only with `attack`."""
    epsilon: Known
    """Privacy budget ε spent so far; only with `privacy`."""
    quantisation: float
    """Largest difference between an averaged value and the plain mean, by fixed-point numbers; only with `secure`."""
    train_seconds: float
    """Seconds for training and combining."""
    seconds: float
    """Seconds for the whole round, including evaluation."""


@with_config(CHECKED)
class Best(TypedDict):
    """Highest accuracies of any round; chosen on test data, so they must not replace the summary's accuracies.

    With validation samples (`best_by`), these are the accuracies of the round that is best on validation samples.
    """

    global_accuracy: float | None
    personal_accuracy: float | None
    round: NotRequired[Count]
    """The best round; only with validation samples."""


@with_config(CHECKED)
class Figures(Measures, total=False):
    """The part of a summary that is computed from the rounds' records."""

    summary: str
    """The rule by which accuracies were computed from evaluations (`evaluation.summary`)."""
    best: Best
    best_by: Literal["validation"]
    """How the round in `best` was chosen; missing without validation samples."""
    measure: str
    """The measure that `best` and sweeps choose by (`evaluation.measure`); only with validation samples."""
    restored: Count
    """The round whose state was restored at the end, which models and figures belong to; only with
    `training.patience`."""
    stopped: str
    """Why a callback ended the run before its last round; only then."""
    up_bytes: Count
    """Bytes that a client sent to the server per round; mean over rounds."""
    down_bytes: Count
    """Bytes that the server sent to a client per round; mean over rounds."""
    failed: dict[str, Count]
    """Number of failures in all rounds, by kind."""
    epsilon: Known
    """Privacy budget ε spent in all rounds; only with `privacy`."""
    notes: list[str]
    """Remarks about the data, privacy and clients that were left out."""
    seconds: float
    """Duration of the run, including the time before a resume."""


@with_config(CHECKED)
class Summary(Figures, total=False):
    """The contents of summary.json, as `fedloom.run` returns it."""

    method: Required[str]
    rounds: Count
    seed: Count
    clients: Count
    run_dir: str
    label: str
    """In a comparison or sweep: name that distinguishes this run's method or setting from the others."""
    setting: dict[str, Any]
    """In a sweep: the values of the swept fields."""


@with_config(CHECKED)
class ClientRow(TypedDict):
    """A line of clients.jsonl: one client in the last evaluation."""

    client: Count
    name: NotRequired[str]
    """Name of the client, such as that of its folder; `client 3` if it has only a number."""
    newcomer: bool
    train: Count
    """Number of training samples."""
    accuracy: Known
    right: list[Count]
    """Correctly classified test samples per class, or of all classes if an organisation shares only the sum."""
    total: list[Count]
    """Test samples, in the form of `right`."""
    loss: float | None
    """Sum of the loss over the test samples."""
    validation_accuracy: NotRequired[Known]
    """Accuracy on validation samples; only if the split has them."""
    metrics: NotRequired[dict[str, float | None]]
    """Further figures on the test samples, null if undefined; only with `evaluation.metrics`."""
    validation_metrics: NotRequired[dict[str, float | None]]
    """The same on validation samples."""


@with_config(CHECKED)
class Named(TypedDict):
    """A network, a method or an objective: its name, and its options as further keys."""

    name: str


@with_config(CHECKED)
class NetworkFacts(Named):
    """The network of a run; if clients have different networks, all of them and the number of each client's."""

    networks: NotRequired[Annotated[list[Named], Field(min_length=1)]]
    numbers: NotRequired[list[Count]]


@with_config(CHECKED)
class ImageFacts(TypedDict):
    """Classes, shape, type and normalisation of inputs, as `InputFormat` writes them."""

    classes: Annotated[list[str], Field(min_length=1)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=2**20)]], Field(min_length=1, max_length=8)]
    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]
    dtype: NotRequired[Literal["uint8", "float32"]]


@with_config(CHECKED)
class TaskFacts(ImageFacts):
    """The contents of task.json: facts about the data that are needed to use a model without the data."""

    model: NetworkFacts
    clients: Count
    newcomers: list[Count]
    names: NotRequired[list[str]]
    """Names of the clients; empty if they have only numbers."""
    styles: list[str]
    fingerprint: str


@with_config(CHECKED)
class NewcomerRow(TypedDict):
    """Accuracy of the newcomers of a comparison with one kind of model and number of labelled samples."""

    label: str
    """The method whose representation is used, or `alone`."""
    run: NotRequired[str]
    """Folder of that method's run, inside the comparison's folder; absent with `alone`."""
    seed: Count
    labelled: Count
    """Labelled samples of each newcomer; 0: the global model as it is."""
    mean: float | None
    std: float | None
    worst: float | None


@with_config(CHECKED)
class Newcomers(TypedDict):
    """The contents of a comparison's newcomers.json."""

    newcomers: Count
    head: str
    rows: list[NewcomerRow]


LOWER_IS_BETTER = ("loss", "ece", "backdoor")
"""Figures of which the smallest value is the best."""
ROUND = ("lr", "clients", "loss", "up_bytes", "down_bytes", "failed", "train_seconds", "seconds")
"""Fields that every line of metrics.jsonl has."""
SUMMARISED = ("rounds", "seed", "clients", "summary", "best", "up_bytes", "down_bytes", "failed", "notes", "seconds")
"""Fields that every summary.json has."""


def client_name(row: ClientRow) -> str:
    """Return the name of a client in its line of clients.jsonl."""
    return row.get("name", f"client {row['client']}")


def client_tick(row: ClientRow) -> str:
    """Return a client's name for an axis that is titled "client": its number if it has no other name."""
    number = str(row["client"])
    return number if client_name(row) == f"client {number}" else client_name(row)


def measure(record: RoundRecord | Figures | Summary, name: str) -> float | None:
    """Return a number of a record by its name, for code that iterates over names."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None
