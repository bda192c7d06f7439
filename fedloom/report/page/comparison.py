"""Significance tests for the results table: every method against the best, over clients and over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedloom.core.errors import UserError
from fedloom.experiment.records import measure as value_of
from fedloom.report.page.measures import Measure
from fedloom.report.page.pairs import Pairs, client_pairs, seed_pairs
from fedloom.report.page.runs import Entry
from fedloom.report.significance import FEWEST_SEEDS, LEVEL, holm, signed_rank, smallest_p

OVER_CLIENTS, OVER_SEEDS = "*", "†"


@dataclass
class Comparison:
    """The best method of a column, and the marks of those that differ from it."""

    best: set[str] = field(default_factory=set)
    """Groups whose mean is the highest as it is shown; empty if there is nothing to compare."""
    marks: dict[str, str] = field(default_factory=dict)
    """Marks by group, `*` over clients and `†` over seeds, where p < 0.05 after Holm's correction."""
    details: dict[str, str] = field(default_factory=dict)
    """The corrected p-values in words, by group."""
    legend: list[str] = field(default_factory=list)
    """Sentences that say what is marked."""


def compare_with_best(entries: Sequence[Entry], name: str, clients: Measure | None, digits: int = 3) -> Comparison:
    """Compare the methods' values of a summary field, of which higher is better, with the best.

    Args:
        entries: The methods.
        name: Field of summaries, such as `personal_accuracy`.
        clients: The clients' measure of which the field is the mean; None if single clients have none.
        digits: Decimals by which means are compared, so that values that look equal are equally good.
    """
    means = {entry.group: float(np.mean(known)) for entry in entries if (known := entry.known(name))}
    found = Comparison()
    if len(means) < 2:
        return found
    highest = max(means.values())
    found.best = {group for group, mean in means.items() if round(mean, digits) == round(highest, digits)}
    reference = next(entry for entry in entries if means.get(entry.group) == highest)
    others = [entry for entry in entries if entry.group in means and entry is not reference]
    if clients is not None:
        pairs = {entry.group: one for entry in others if (one := _over_clients(entry, reference, clients))}
        _add(found, pairs, len(others), OVER_CLIENTS)
    seeds = {entry.group: seed_pairs(_by_seed(entry, name), _by_seed(reference, name)) for entry in others}
    enough = {group: one for group, one in seeds.items() if len(one.one) >= FEWEST_SEEDS}
    _add(found, enough, len(others), OVER_SEEDS)
    if not enough and any(len(one.one) > 1 for one in seeds.values()):
        found.legend.append(f"Not tested over seeds, which takes at least {FEWEST_SEEDS} seeds.")
    return found


def _over_clients(entry: Entry, reference: Entry, measure: Measure) -> Pairs | None:
    try:
        return client_pairs(entry.runs, reference.runs, measure)
    except UserError:  # unfinished, or trained on other clients
        return None


def _by_seed(entry: Entry, name: str) -> dict[int, float]:
    return {run.seed: value for run in entry.runs if (value := value_of(run.summary, name)) is not None}


def _add(found: Comparison, pairs: Mapping[str, Pairs], methods: int, mark: str) -> None:
    """Test pairs and add marks, p-values and the legend's sentence."""
    if not pairs:
        return
    corrected = holm({group: signed_rank(one.one, one.other) for group, one in pairs.items()})
    unit = " and ".join(dict.fromkeys(one.unit for one in pairs.values()))
    for group, p in corrected.items():
        said = f"p = {p:.2g} against the best, over {len(pairs[group].one)} {pairs[group].unit}"
        found.details[group] = "; ".join(filter(None, [found.details.get(group), said]))
        if p < LEVEL:
            found.marks[group] = found.marks.get(group, "") + mark
    numbers = sorted({len(one.one) for one in pairs.values()})
    count = f"{numbers[0]} to {numbers[-1]}" if numbers[1:] else str(numbers[0])
    found.legend.append(
        f"{mark} differs from the best: p < {LEVEL}, two-sided Wilcoxon signed-rank test over {count} {unit}, Holm's "
        f"correction for {len(pairs)} comparison{'s' if pairs.keys() - {next(iter(pairs))} else ''}."
    )
    if len(pairs) < methods:
        found.legend.append(f"{methods - len(pairs)} of {methods} methods could not be paired with the best.")
    if (least := smallest_p(numbers[0], len(pairs))) >= LEVEL:
        found.legend.append(f"With {numbers[0]} pairs, no p below {least:.2g} is possible.")
