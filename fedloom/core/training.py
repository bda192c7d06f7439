"""The `training` section of a recipe, and learning-rate schedules."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedloom.core.checking import Section, as_written, refusal
from fedloom.core.optimizers import OptimizerSettings


def schedule_factor(schedule: str, round: int, rounds: int) -> float:
    """Return the factor of the learning rate in a round.

    Args:
        schedule: `constant`, `cosine`, `exponential:0.99` (multiply by 0.99 per round) or `step:50=0.2,75=0.02`
            (multiply by 0.2 from round 50, by 0.02 from round 75).
        round: The round, counted from 1.
        rounds: Total number of rounds.

    Raises:
        ValueError: The text is not a schedule, or the factor is too large for a number.
    """
    kind, _, rest = schedule.partition(":")
    try:
        if kind == "constant" and not rest:
            return 1.0
        if kind == "cosine" and not rest:
            return 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds))
        if kind == "exponential":
            return float(_factor(rest) ** (round - 1))
        if kind == "step":
            pairs = [pair.split("=") for pair in rest.split(",")]
            steps = {int(start): _factor(factor) for start, factor in pairs}
            if min(steps) >= 1 and len(steps) == len(pairs):
                reached = [start for start in steps if start <= round]
                return steps[max(reached)] if reached else 1.0
    except OverflowError:
        raise ValueError(f"'{schedule}' is infinite in round {round}; choose a smaller factor") from None
    except ValueError:
        pass
    raise ValueError(
        f"'{schedule}' is not a schedule; write constant, cosine, exponential:0.99 or step:50=0.2,75=0.02 "
        "(round=factor; each round once, from 1; no factor may be negative)"
    )


def _factor(text: str) -> float:
    factor = float(text)
    if not 0 <= factor < math.inf:
        raise ValueError
    return factor


class Training(Section):
    """The `training` section: number of rounds, participation and the clients' training."""

    rounds: int = Field(20, ge=1, description="communication rounds")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    epochs: int = Field(1, ge=0, description="passes over a client's data per round")
    batch_size: int = Field(
        32, ge=1, description="samples per training step; the last batch of an epoch may be smaller"
    )
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: Annotated[str, as_written(lambda schedule: schedule_factor(schedule, 1, 1))] = Field(
        "constant", description="learning rate over rounds: constant, cosine, exponential:0.99, step:50=0.2,75=0.02"
    )
    warmup: int = Field(
        0,
        ge=0,
        description="rounds of linear warm-up: round r of the first n uses r / (n + 1) of the schedule's learning rate",
    )
    min_clients: int = Field(
        1, ge=1, description="responses that a round needs; with fewer it is retried with other clients"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description="if a client raises an exception: stop the run and show it, or skip the client in that round "
        "(clients that die, time out or send invalid values are always skipped)",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="end the run after this many evaluations in a row without an improvement on validation samples, "
        "and restore the state of the best round (needs a split with validation, such as data.split: pooled:0.6:0.2); "
        "default: run all rounds",
    )

    @model_validator(mode="after")
    def _last_round_is_finite(self) -> "Training":
        try:
            schedule_factor(self.schedule, self.rounds, self.rounds)
        except ValueError as error:
            raise refusal(f"training.schedule: {error}") from None
        return self

    def lr(self, round: int) -> float:
        """Return the learning rate of a round."""
        warm = min(1.0, round / (self.warmup + 1))
        return self.optimizer.lr * schedule_factor(self.schedule, round, self.rounds) * warm

    @property
    def needs_total(self) -> bool:
        """Whether the learning rate of a round depends on the total number of rounds."""
        return self.schedule == "cosine"
