"""Measures of a paper's tables and figures: titles, units, direction, and their value in a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from fedloom.core.errors import UserError
from fedloom.experiment.records import LOWER_IS_BETTER, RoundRecord, measure
from fedloom.experiment.selection import best_of, best_round
from fedloom.experiment.summary import summarise
from fedloom.report.page.measures import Measure
from fedloom.report.page.runs import Run
from fedloom.report.table import FIGURES, STATISTICS, field_of

Which = Literal["last", "best"]
WHOLE_RUN = ("up_bytes", "down_bytes", "seconds", "rounds", "epsilon")
"""Figures of a whole run; a round has fields of the same name with another meaning."""
NOT_MEASURED = ("seed", "round", "attempts", "lr")
PREFIXES = {
    "personal": "", "global_mean": "global ", "newcomer": "newcomers ", "newcomer_global": "newcomers global ",
    "validation_personal": "validation ", "validation_global_mean": "validation global ",
}  # fmt: skip
COSTS = {"up_bytes": "MB up", "down_bytes": "MB down", "seconds": "seconds", "rounds": "rounds"}


@dataclass(frozen=True)
class Quantity:
    """A measure as a table or figure shows it."""

    name: str
    """The field of summaries and records, such as `personal_accuracy`."""
    title: str
    scale: float = 1.0
    digits: int = 3
    lower: bool | None = None
    """Whether small values are good; None if neither end is."""
    clients: Measure | None = None
    """The figure of a client whose unweighted mean over clients this is."""

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest value that it can have; infinite if unknown."""
        if self.clients is not None and self.clients.name == "loss":
            return 0.0, float("inf")
        return (0.0, 1.0) if self.scale == 100 or self.clients is not None else (-float("inf"), float("inf"))

    @property
    def words(self) -> str:
        """The title for a sentence: without the unit, and with what it is a mean of."""
        title = self.title.removesuffix(" (%)")
        if self.clients is not None:
            return f"{title}, mean over clients"
        return f"{title} (accuracy)" if self.name.endswith(("_worst", "_std")) and self.scale == 100 else title


def quantity(name: str) -> Quantity:
    """Return how to show a field of summaries and records."""
    for prefix, words in PREFIXES.items():
        for figure, title in FIGURES.items():
            for which in STATISTICS:
                if name == field_of(figure, which, prefix):
                    return _over_clients(name, prefix, figure, which, words, title)
    if name in COSTS:
        scale, digits = (1e-6, 3) if name.endswith("_bytes") else (1, 1)
        return Quantity(name, COSTS[name], scale, digits, lower=True)
    title = "training loss" if name == "loss" else name.replace("_", " ")
    if name.endswith("accuracy"):
        return Quantity(name, f"{title} (%)", 100, 1, False)
    return Quantity(name, title, lower=True if name.endswith("loss") else None)


def _over_clients(name: str, prefix: str, figure: str, which: str, words: str, title: str) -> Quantity:
    accuracy = figure == "accuracy"
    titles = {
        "mean": title, "weighted": f"weighted {title}",
        "std": "std over clients" if accuracy else f"{title} std over clients",
        "worst": "worst tenth" if accuracy else f"{title} worst tenth",
    }  # fmt: skip
    own = Measure(figure) if prefix == "personal" and which == "mean" else None
    unit = " (%)" if accuracy else ""
    lower = which == "std" or figure in LOWER_IS_BETTER
    return Quantity(name, words + titles[which] + unit, 100 if accuracy else 1, 1 if accuracy else 3, lower, own)


def quantities(names: Sequence[str], runs: Iterable[Run]) -> list[Quantity]:
    """Return the measures with these names; `auc` stands for `personal_auc`.

    Raises:
        UserError: No run has recorded one of them.
    """
    known = recorded_names(runs)
    found = []
    for name in names:
        field = field_of(name, "mean") if name in FIGURES and name != "loss" else name
        if field not in known:
            near = get_close_matches(field, known, n=3) or known
            raise UserError(
                f"measure = '{name}': no run has recorded it; choose among {', '.join(near)}, or record further "
                "figures with evaluation.metrics"
            )
        found.append(quantity(field))
    return found


def recorded_names(runs: Iterable[Run]) -> list[str]:
    """Return the names of all numbers that the runs have recorded, sorted."""
    names: set[str] = set()
    for run in runs:
        names |= {name for name in run.summary if measure(run.summary, name) is not None}
        names |= {name for record in run.tested for name in record if measure(record, name) is not None}
    return sorted(names - set(NOT_MEASURED))


def value_in(run: Run, name: str, record: RoundRecord | None = None) -> float | None:
    """Return a run's value of a measure.

    Args:
        run: The run.
        name: The field.
        record: The round to take it from. Default: the summary, by the run's `evaluation.summary`.
    """
    if record is not None and name not in WHOLE_RUN:
        return measure(record, name)
    if name in run.summary:
        return measure(run.summary, name)
    restored = run.summary.get("restored")
    records = [record for record in run.tested if restored in (None, record["round"])]
    known = [value for record in records if (value := measure(record, name)) is not None]
    return summarise(known, str(run.recipe["evaluation"]["summary"])) if known else None


def validates(run: Run) -> bool:
    """Return whether a run has evaluated its models on validation samples."""
    return any(name.startswith("validation_") for record in run.tested for name in record)


def judged_by(run: Run) -> str:
    """Return the measure by which the run's recipe chooses rounds and settings."""
    return str(run.recipe["evaluation"].get("measure", "accuracy"))


def best_evaluation(run: Run, by: Quantity) -> RoundRecord | None:
    """Return a run's best evaluation: by validation samples if it has them, else by a measure on test data."""
    if validates(run):
        return best_round(run.tested, judged_by(run))
    most = max((record["evaluated"] for record in run.tested), default=0)
    compared = [record for record in run.tested if record["evaluated"] == most]
    return best_of([(record, measure(record, by.name)) for record in compared], "loss" if by.lower else "accuracy")


def rounds_shown(runs: Sequence[Run], which: Which, by: Quantity) -> str:
    """Return the caption's sentence about the rounds that values come from.

    Raises:
        UserError: The best rounds would be chosen on validation samples in some runs and on test data in others.
    """
    if which == "best":
        kinds = {validates(run) for run in runs}
        if len(kinds) > 1:
            one = next(run for run in runs if not validates(run))
            raise UserError(
                f"round = 'best': some runs have validation samples, but '{one.path}' has none; use 'last', or give "
                "runs of one kind"
            )
        if kinds == {False}:
            return f"Best round on test data, by {by.title.removesuffix(' (%)')}: optimistic, not a result."
        return f"Round that is best on validation samples, by {', '.join(sorted({judged_by(run) for run in runs}))}."
    found = []
    for run in runs:
        rule = str(run.recipe["evaluation"]["summary"])
        kind, _, count = rule.partition(":")
        if "restored" in run.summary:
            found.append("round that is best on validation samples")
        else:
            found.append("last round" if rule == "last" else f"{kind} of the last {count} evaluations")
    sentence = "; ".join(dict.fromkeys(found))
    return sentence[0].upper() + sentence[1:] + "."
