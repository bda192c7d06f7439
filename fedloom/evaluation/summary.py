"""A run's figures out of its rounds. None is chosen on test data: `best` only stands beside."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedloom.evaluation.spread import summarise

Record = dict[str, Any]
ACCURACIES = (
    "global_accuracy", "personal_accuracy", "personal_weighted", "personal_std", "personal_worst",
    "newcomer_accuracy", "newcomer_std", "newcomer_global_accuracy",
)  # fmt: skip


def summary_of(history: Sequence[Record], rule: str, notes: Sequence[str]) -> Record:
    """Accuracies by the recipe's rule, bytes a round, who failed, what was noted."""
    tested = [record for record in history if "evaluated" in record]
    summary: Record = {"summary": rule}
    for name in ACCURACIES:
        known = [record[name] for record in tested if record.get(name) is not None]
        summary[name] = summarise(known, rule) if known else None
    summary["best"] = {
        name: max((r[name] for r in tested if r.get(name) is not None), default=None)
        for name in ("global_accuracy", "personal_accuracy")
    }
    for name in ("up_bytes", "down_bytes"):
        summary[name] = round(np.mean([record[name] for record in history]))
    failed: Counter[str] = Counter()
    for record in history:
        failed.update(record.get("failed") or {})
    summary |= {name: history[-1][name] for name in ("epsilon",) if name in history[-1]}
    return summary | {"failed": dict(sorted(failed.items())), "notes": [*notes, *_left_out(failed)]}


def _left_out(failed: Mapping[str, int]) -> list[str]:
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(failed.items()))
    return [f"clients that were left out of a round: {counts} (log.txt says who, when and why)"] if failed else []
