"""The local-training section of a recipe: epochs, batches, optimizer, learning rate over rounds."""

import math
from typing import Annotated, Literal

from pydantic import Field

from fedloom.core.checking import Section, as_written
from fedloom.core.optimizers import OptimizerSettings


def schedule_factor(schedule: str, round: int, rounds: int) -> float:
    """What the learning rate is multiplied by in a round (the first is 1).

    `constant`, `cosine`, `exponential:0.99` (times 0.99 a round) or `step:50=0.2,75=0.02` (from round 50 on a fifth
    of it, from round 75 on a fiftieth).
    """
    kind, _, rest = schedule.partition(":")
    try:
        if kind == "constant" and not rest:
            return 1.0
        if kind == "cosine" and not rest:
            return 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds))
        if kind == "exponential":
            return float(float(rest) ** (round - 1))
        if kind == "step":
            steps = {int(start): float(factor) for start, factor in (pair.split("=") for pair in rest.split(","))}
            reached = [start for start in steps if start <= round]
            return steps[max(reached)] if reached else 1.0
    except ValueError:
        pass
    raise ValueError(
        f"'{schedule}' is no schedule: write constant, cosine, exponential:0.99 or step:50=0.2,75=0.02 (round=factor)"
    )


class Training(Section):
    """How long and how clients train."""

    rounds: int = Field(20, ge=1, description="communication rounds")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    epochs: int = Field(1, ge=0, description="passes over a client's data per round")
    batch_size: int = Field(32, ge=1, description="samples of a training step; remainders keep their exact size")
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: Annotated[str, as_written(lambda schedule: schedule_factor(schedule, 1, 1))] = Field(
        "constant", description="learning rate over rounds: constant, cosine, exponential:0.99, step:50=0.2,75=0.02"
    )

    min_clients: int = Field(
        1, ge=1, description="answers that a round needs; with fewer it is retried with other clients"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description="when a client raises: stop the run and show where, or skip the client in that round (what dies, "
        "is late or sends unusable numbers is always skipped)",
    )

    def lr(self, round: int) -> float:
        """The learning rate of a round."""
        return self.optimizer.lr * schedule_factor(self.schedule, round, self.rounds)
