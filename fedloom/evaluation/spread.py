"""How accuracy spreads over clients: the mean is not the whole story."""

from collections.abc import Sequence

import numpy as np

from fedloom.evaluation.scores import Scores


def spread(scores: Sequence[Scores], prefix: str = "personal") -> dict[str, float]:
    """Mean over clients (unweighted), the sample-weighted one, standard deviation, and the worst tenth's mean.

    Clients without test samples say nothing.
    """
    known = [s for s in scores if sum(s.total)]
    if not known:
        return {}
    each = np.array([s.accuracy for s in known])
    worst = np.sort(each)[: max(1, len(each) // 10)]
    return {
        f"{prefix}_accuracy": float(each.mean()),
        f"{prefix}_weighted": pooled(known),
        f"{prefix}_std": float(each.std()),
        f"{prefix}_worst": float(worst.mean()),
        f"{prefix}_loss": sum(s.loss for s in known) / sum(sum(s.total) for s in known),
    }


def pooled(scores: Sequence[Scores]) -> float:
    """Right answers among all test samples."""
    total = sum(sum(s.total) for s in scores)
    return sum(sum(s.right) for s in scores) / total if total else float("nan")


def summarise(values: Sequence[float], rule: str) -> float:
    """A run's figure out of its evaluations: the `last`, or `median:10` / `mean:10` of the last ten.

    Never the best: that would be chosen on test data.
    """
    if rule == "last":
        return values[-1]
    kind, _, count = rule.partition(":")
    last = np.asarray(values[-int(count) :])
    return float(np.median(last) if kind == "median" else last.mean())
