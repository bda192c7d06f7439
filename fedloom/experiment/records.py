"""What a run writes down, one definition each: a record per round, a summary, a row per client."""

from typing import Any, Required, TypedDict


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
    styles: dict[str, float]
    """Accuracy of the global representation in every style."""
    personal_styles: dict[str, float]
    distance: float | None
    """Mean L2 distance between clients' copies of `evaluation.distance`."""
    evaluated: int
    """Clients that were evaluated; only in rounds with an evaluation."""


class RoundRecord(Measures, total=False):
    """A line of metrics.jsonl."""

    round: Required[int]
    lr: float
    clients: int
    """Clients whose answers were combined."""
    loss: float | None
    """Mean training loss over samples."""
    up_bytes: int
    """Per client that answered."""
    down_bytes: int
    """Per client that was asked."""
    failed: dict[str, int]
    """Clients that were left out, by the kind of failure."""
    attempts: int
    """How often the round was begun; only where more than once."""
    hostile: int
    """Attackers among the participants."""
    epsilon: float
    """Privacy spent so far."""
    train_seconds: float
    seconds: float


class Best(TypedDict):
    """Highest accuracies of any round: chosen on test data, shown beside the summary and never instead of it."""

    global_accuracy: float | None
    personal_accuracy: float | None


class Figures(Measures, total=False):
    """The part of a summary that comes out of the rounds' records."""

    summary: str
    """The rule of `evaluation.summary` by which the measures were taken."""
    best: Best
    up_bytes: int
    down_bytes: int
    failed: dict[str, int]
    epsilon: float
    notes: list[str]
    seconds: float


class Summary(Figures, total=False):
    """summary.json."""

    method: Required[str]
    rounds: int
    seed: int
    clients: int
    run_dir: str
    label: str
    """In a comparison or sweep: what tells this run apart."""
    setting: dict[str, Any]
    """In a sweep: the values of the swept fields."""


class ClientRow(TypedDict):
    """A line of clients.jsonl: one client at the last evaluation."""

    client: int
    newcomer: bool
    train: int
    accuracy: float
    right: list[int]
    """Per class, or one number for all classes together where an organisation shares no more."""
    total: list[int]
    loss: float | None


def measure(record: RoundRecord | Figures | Summary, name: str) -> float | None:
    """A number of a record by its name, for code that goes through several of them."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None
