"""Accuracy over clients, and a run's summary computed from its rounds.

Only `best` is chosen on test data, and only if there are no validation samples.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

import numpy as np

from fedloom.core.metrics import Metric
from fedloom.core.scores import BACKDOOR, Scores
from fedloom.experiment.records import LOWER_IS_BETTER, Figures, Measures, RoundRecord, measure
from fedloom.experiment.selection import best_round

Prefix = Literal[
    "personal", "newcomer", "newcomer_global", "global_mean", "validation_personal", "validation_global_mean"
]  # fmt: skip


def spread(scores: Sequence[Scores], prefix: Prefix = "personal") -> Measures:
    """Return mean accuracy over clients, sample-weighted mean, standard deviation, mean of the worst tenth, and loss.

    Clients without test samples are ignored.
    """
    known = [s for s in scores if sum(s.total)]
    if not known:
        return {}
    each = np.array([s.accuracy for s in known])
    worst = np.sort(each)[: max(1, len(each) // 10)]
    losses = [s.loss for s in known if s.loss is not None]
    found = {
        f"{prefix}_accuracy": float(each.mean()),
        f"{prefix}_weighted": pooled(known),
        f"{prefix}_std": float(each.std()),
        f"{prefix}_worst": float(worst.mean()),
        f"{prefix}_loss": sum(losses) / sum(sum(s.total) for s in known) if len(losses) == len(known) else None,
    }
    return cast(Measures, found)


def figures_of(scores: Sequence[Scores], prefix: Prefix, names: Sequence[str]) -> Measures:
    """Return further figures over clients: mean, sample-weighted mean, standard deviation and mean of the worst tenth.

    Clients for which a figure is undefined are left out of it; `…_clients` is the number of the others. The mean of the
    loss is in `…_loss_unweighted`, because `…_loss` is its mean over samples (see `spread`).

    Args:
        scores: Clients' scores with their `metrics`.
        prefix: Start of the names of fields.
        names: Names of the figures: those of `metrics`, or `loss`.
    """
    found: dict[str, float | None] = {}
    for name in names:
        known = [(value, sum(s.total)) for s in scores if (value := _figure(s, name)) is not None]
        field = f"{prefix}_{name}"
        mean = f"{field}_unweighted" if name == "loss" else field
        found |= {mean: None, f"{field}_weighted": None, f"{field}_std": None, f"{field}_worst": None}
        found[f"{field}_clients"] = len(known)
        if not known:
            continue
        each, samples = np.array([value for value, _ in known]), np.array([count for _, count in known])
        ordered = np.sort(each)[::-1] if name in LOWER_IS_BETTER else np.sort(each)
        found[mean] = float(each.mean())
        found[f"{field}_weighted"] = float(np.average(each, weights=samples))
        found[f"{field}_std"] = float(each.std())
        found[f"{field}_worst"] = float(ordered[: max(1, len(each) // 10)].mean())
    return cast(Measures, found)


def _figure(scores: Scores, name: str) -> float | None:
    """Return a client's figure; None if it is unknown or not finite."""
    samples = sum(scores.total)
    if name == "loss":
        value = None if scores.loss is None or not samples else scores.loss / samples
    else:
        value = scores.metrics.get(name)
    return value if value is not None and np.isfinite(value) else None


def pooled(scores: Sequence[Scores]) -> float:
    """Return the accuracy over all clients' test samples together; NaN without test samples."""
    total = sum(sum(s.total) for s in scores)
    return sum(sum(s.right) for s in scores) / total if total else float("nan")


def summarise(values: Sequence[float], rule: str) -> float:
    """Return a run's reported value from the values of its evaluations.

    Args:
        values: One value per evaluation.
        rule: `last`, or `median:10` or `mean:10` of the last ten. The best value is not offered, because it would be
            chosen on test data.
    """
    if rule == "last":
        return values[-1]
    kind, _, count = rule.partition(":")
    last = np.asarray(values[-int(count) :])
    return float(np.median(last) if kind == "median" else last.mean())


FIGURES = "|".join((*get_args(Metric), BACKDOOR))
FURTHER = re.compile(rf"_(({FIGURES})(_weighted|_std|_worst|_clients)?|loss_(unweighted|weighted|std|worst|clients))$")
"""Fields of `figures_of`."""
Accuracy = Literal[
    "global_accuracy", "personal_accuracy", "personal_weighted", "personal_std", "personal_worst", "newcomer_accuracy",
    "newcomer_std", "newcomer_global_accuracy",
]  # fmt: skip
Validation = Literal[
    "validation_global_accuracy", "validation_personal_accuracy", "validation_personal_weighted",
    "validation_personal_std", "validation_personal_worst", "validation_personal_loss",
]  # fmt: skip


def summary_of(
    history: Sequence[RoundRecord],
    rule: str,
    notes: Sequence[str],
    *,
    name: str = "accuracy",
    restored: Measures | None = None,
) -> Figures:
    """Compute the summary from the rounds' records: accuracies by `rule`, bytes per round, failures, notes.

    Args:
        history: Records of all rounds.
        rule: How accuracies are computed from the evaluations, see `summarise`.
        notes: Remarks to include.
        name: The measure by which `best` is chosen if there are validation samples (`evaluation.measure`).
        restored: Evaluation of the restored state of the best round, which then gives the accuracies.
    """
    tested: list[RoundRecord] = [record for record in history if "evaluated" in record]
    reported = tested if restored is None else [cast(RoundRecord, restored)]
    figures: Figures = {"summary": rule}
    names: tuple[str, ...] = get_args(Accuracy)
    validates = any("validation_personal_accuracy" in record for record in tested)
    names += get_args(Validation) if validates else ()
    names += tuple(dict.fromkeys(field for record in reported for field in record if FURTHER.search(field)))
    for figure in names:
        known = _known(reported, figure)
        figures |= cast(Figures, {figure: summarise(known, rule) if known else None})
    if validates:
        best = best_round(tested, name)
        figures["best"] = {"global_accuracy": None, "personal_accuracy": None}
        figures["best_by"], figures["measure"] = "validation", name
        if best is not None:
            figures["best"] = {
                "global_accuracy": best.get("global_accuracy"),
                "personal_accuracy": best.get("personal_accuracy"),
                "round": best["round"],
            }
    else:
        figures["best"] = {
            "global_accuracy": max(_known(tested, "global_accuracy"), default=None),
            "personal_accuracy": max(_known(tested, "personal_accuracy"), default=None),
        }
    figures["up_bytes"] = round(float(np.mean([record["up_bytes"] for record in history])))
    figures["down_bytes"] = round(float(np.mean([record["down_bytes"] for record in history])))
    failed: Counter[str] = Counter()
    for record in history:
        failed.update(record.get("failed") or {})
    if "epsilon" in history[-1]:
        figures["epsilon"] = history[-1]["epsilon"]
    figures["failed"] = dict(sorted(failed.items()))
    figures["notes"] = [*notes, *_left_out(failed)]
    return figures


def _known(records: Sequence[RoundRecord], name: str) -> list[float]:
    return [value for record in records if (value := measure(record, name)) is not None]


def _left_out(failed: Mapping[str, int]) -> list[str]:
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(failed.items()))
    return [f"clients that were left out of a round: {counts} (see log.txt for details)"] if failed else []
