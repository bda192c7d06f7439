"""The sections of a recipe that configure `fedloom.experiment`, which this package cannot import."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from fedloom.core.checking import Section
from fedloom.core.metrics import Metric


def _summary_rule(rule: str) -> str:
    kind, _, count = rule.partition(":")
    if rule == "last" or (kind in ("median", "mean") and count.isdigit() and int(count) > 0):
        return rule
    raise ValueError(f"'{rule}' is unknown; write last, median:10 or mean:10 (of the last ten evaluations)")


class EvaluationSettings(Section):
    """The recipe section `evaluation`: when models are tested, on which clients, and which figures are reported."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    clients: int | None = Field(
        None, ge=1, description="number of clients to evaluate, a fixed random sample; default: all clients"
    )
    summary: Annotated[str, AfterValidator(_summary_rule)] = Field(
        "last",
        description="how the reported accuracy is computed: the last evaluation (last), or the median or mean of the "
        "last n (median:10, mean:10)",
    )
    metrics: Annotated[
        tuple[Literal[Metric, "loss"], ...],
        BeforeValidator(lambda names: names.split(",") if isinstance(names, str) else names),
    ] = Field(
        (),
        description="further figures of each client, with mean, weighted mean, spread and worst tenth over clients: "
        "balanced_accuracy, f1 (two classes), macro_f1, micro_f1, auc (one-vs-rest), ece (calibration error, 15 "
        "bins), exact_match (all labels), loss",
    )
    measure: Literal[Metric, "accuracy", "loss"] = Field(
        "accuracy",
        description="the figure on validation samples by which sweeps, the summary's best round and training.patience "
        "choose: mean over clients of accuracy, loss or one of the metrics, of personal models",
    )
    distance: str | None = Field(
        None,
        description="a part that clients keep, such as model.head: each evaluation adds the mean L2 distance between "
        "clients' copies of it",
    )

    @property
    def wanted(self) -> tuple[Literal[Metric, "loss"], ...]:
        """The figures besides accuracy to report: `metrics` and, if it is none of them, `measure`."""
        more = () if self.measure in ("accuracy", "loss") else (self.measure,)
        return tuple(dict.fromkeys((*self.metrics, *more)))


class StorageSettings(Section):
    """The recipe section `storage`: RAM for clients' memory, saved models and checkpoints."""

    memory_mb: int = Field(
        1024, ge=1, description="RAM in MiB for clients' memory; the least recently used states beyond it go to disk"
    )
    personal_models: bool = Field(True, description="save each client's personal parameters at the end of the run")
    checkpoint_every: int = Field(
        10, ge=0, description="rounds between checkpoints; 0: a checkpoint only when the run is stopped"
    )
    checkpoint_seconds: float = Field(
        60,
        ge=0,
        description="maximum seconds between checkpoints (longer if writing one takes more than a twentieth of this "
        "time); 0: no maximum",
    )
    final_checkpoint: bool = Field(
        True,
        description="keep a checkpoint of the last round: the run can then be extended (fedloom resume RUN --rounds N)",
    )
