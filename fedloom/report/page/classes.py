"""Report section with accuracy per class, separately for each client's head and tail classes (RepPer's Fig. 5)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.experiment.records import ClientRow
from fedloom.report.page.figure import Axis, Figure, Marks, PageSection, colour
from fedloom.report.page.heat import FEW, HeatRow, heat
from fedloom.report.page.insight import Holdings, Insight
from fedloom.report.page.runs import Entry, Run
from fedloom.report.significance import sample_std

KINDS = ("head", "tail", "not held")
SHOWN = 2
"""Number of clients that get a separate figure."""
ACCURACY_AXIS = Axis("accuracy", percent=True)
Insights = Mapping[Path, Insight]
Tally = Mapping[int, tuple[float, float]]


def classes(entries: Sequence[Entry], insights: Insights) -> PageSection:
    """Return the section "Classes": accuracy over all clients, head against tail, and for some single clients."""
    section = PageSection("classes", "Classes")
    rows = [row for entry in entries for run in entry.runs for row in run.clients]
    known = [(i, e) for i, e in enumerate(entries) if any(per_class(row) for run in e.runs for row in run.clients)]
    if not known:
        alone = "These organisations share only the accuracy over all classes together."
        section.missing = alone if rows else "Accuracy per class is available when a run has finished."
        return section
    held = next((found for _, entry in known if (found := _held(entry.first, insights))), None)
    section.figures.append(_over_all(known, held))
    if held is None:
        section.missing = "Head and tail cannot be shown without the data: " + why_missing(entries, insights)
        return section
    section.text = (
        "A client's head: its largest classes, which together have at least half of its training samples. "
        "Its tail: the other classes of which it has training samples."
    )
    if any(_held(entry.first, insights) is None for _, entry in known):
        section.missing = "Some runs are not shown: " + why_missing(entries, insights)
    section.figures.append(_head_and_tail(known, insights))
    section.figures += _chosen_clients(known, insights, held)
    return section


def _held(run: Run, insights: Insights) -> Holdings | None:
    found = insights.get(run.path)
    return found.holdings if found else None


def why_missing(entries: Sequence[Entry], insights: Insights) -> str:
    """Return the reason why the data or models that a section needs are missing."""
    problems = [found.problem for entry in entries if (found := insights.get(entry.first.path)) and found.problem]
    return problems[0] if problems else "data and models are read when a run has finished."


def _over_all(known: list[tuple[int, Entry]], held: Holdings | None) -> Figure:
    tallies = [(i, entry, _tally(entry.runs)) for i, entry in known]
    tested: dict[int, float] = defaultdict(float)
    for _, _, tally in tallies:
        for label, (_, total) in tally.items():
            tested[label] += total
    sizes = held.totals if held else tested
    order = sorted(tested, key=lambda label: (-sizes.get(label, 0), label))
    what = "training" if held else "test"
    note = f"Over all clients and seeds. Classes are sorted by their number of {what} samples, largest first."
    return _by_class("class-all", "All classes", tallies, order, known[0][1].first.classes, note)


def _tally(runs: Sequence[Run]) -> Tally:
    """Return the number of correct predictions and of test samples for each class."""
    found: dict[int, tuple[float, float]] = {}
    for run in runs:
        for row in run.clients:
            for label, (right, total) in _tally_of(row).items():
                before = found.get(label, (0, 0))
                found[label] = (before[0] + right, before[1] + total)
    return found


def per_class(row: ClientRow) -> bool:
    """Whether a client's results are known per class; organisations may share only the total."""
    return len(row["total"]) > 1


def _tally_of(row: ClientRow) -> Tally:
    if not per_class(row):
        return {}
    each = enumerate(zip(row["right"], row["total"], strict=True))
    return {label: (right, total) for label, (right, total) in each if total}


def _by_class(
    name: str, title: str, tallies: Sequence[tuple[int, Entry, Tally]], order: Sequence[int], classes: Sequence[str],
    note: str, *, bars: bool = False,
) -> Figure:  # fmt: skip
    """Draw methods next to each other for each class, as bars (where a few samples give 0% or 100%) or as dots.

    Many methods are drawn as a heat map.
    """
    names = [classes[label] if label < len(classes) else str(label) for label in order]
    if len(tallies) > FEW:
        return _class_heat(name, title, tallies, order, names, note)
    marks = []
    for place, (i, entry, tally) in enumerate(tallies):
        at = [position for position, label in enumerate(order) if label in tally]
        aside = 0.7 * ((place + 0.5) / len(tallies) - 0.5)
        scores = [100 * tally[order[p]][0] / tally[order[p]][1] for p in at]
        hover = [
            f"{entry.label}<br>{names[p]}: {score:.1f}% of {tally[order[p]][1]:.0f} test samples"
            for p, score in zip(at, scores, strict=True)
        ]
        kind: Literal["bars", "dots"] = "bars" if bars else "dots"
        x = [float(p) if bars else p + aside for p in at]
        marks.append(Marks(kind, entry.label, x, scores, colour(i), [entry.group], sizes=[9], text=hover))
    return Figure(name, title, Axis("class", labels=names), ACCURACY_AXIS, marks, note)


def _class_heat(
    name: str,
    title: str,
    tallies: Sequence[tuple[int, Entry, Tally]],
    order: Sequence[int],
    names: list[str],
    note: str,
) -> Figure:
    rows = []
    for _, entry, tally in tallies:
        at = [position for position, label in enumerate(order) if label in tally]
        scores = [100 * tally[order[p]][0] / tally[order[p]][1] for p in at]
        text = [f"{names[p]}, {tally[order[p]][1]:,.0f} test samples" for p in at]
        rows.append(HeatRow(entry, at, scores, text=text))
    return heat(name, title, rows, Axis("class", labels=names), ACCURACY_AXIS, note)


def _head_and_tail(known: list[tuple[int, Entry]], insights: Insights) -> Figure:
    marks, rows, last = [], [], 0
    for i, entry in known:
        each = [_by_kind(run, held) for run in entry.runs if (held := _held(run, insights))]
        if not each:
            continue
        scores = [[100 * tally[kind][0] / tally[kind][1] for tally in each if tally[kind][1]] for kind in KINDS]
        samples = [sum(tally[kind][1] for tally in each) for kind in KINDS]
        x = [k for k, values in enumerate(scores) if values]
        last = max([last, *x])
        mean, std = [float(np.mean(scores[k])) for k in x], [sample_std(scores[k]) for k in x]
        hover = zip(x, mean, strict=True)
        text = [f"{entry.label}<br>{KINDS[k]}: {value:.1f}% of {samples[k]:,} test samples" for k, value in hover]
        bars = Marks("bars", entry.label, [float(k) for k in x], mean, colour(i), [entry.group], text=text)
        text = [f"{KINDS[k]}, {samples[k]:,} test samples" for k in x]
        rows.append(HeatRow(entry, x, mean, text=text))
        if len(each) > 1:
            bars.low = [m - s for m, s in zip(mean, std, strict=True)]
            bars.high = [m + s for m, s in zip(mean, std, strict=True)]
        marks.append(bars)
    name, title, over = "class-head-tail", "Head and tail", "Over the test samples of all clients"
    kinds = Axis("classes of the client", labels=list(KINDS[: last + 1]))
    if len(known) > FEW:
        return heat(name, title, rows, kinds, ACCURACY_AXIS, f"{over}; mean over seeds.")
    whiskers = any(bars.low for bars in marks)
    note = f"{over}; whiskers: sample standard deviation over seeds." if whiskers else f"{over}."
    return Figure(name, title, kinds, ACCURACY_AXIS, marks, note)


def _by_kind(run: Run, held: Holdings) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in filter(per_class, run.clients):
        kinds = kinds_of(held.counts[row["client"]])
        for kind, right, total in zip(kinds, row["right"], row["total"], strict=True):
            found[kind] = (found[kind][0] + right, found[kind][1] + total)
    return found


def kinds_of(counts: Sequence[int]) -> list[str]:
    """Return the kind of each class of a client, from its training samples per class.

    The head is the smallest set of largest classes with at least half of the samples. The tail is all other classes
    of which the client has samples.
    """
    kinds = [KINDS[1] if count else KINDS[2] for count in counts]
    half, so_far = sum(counts) / 2, 0
    for label in sorted(range(len(counts)), key=lambda label: (-counts[label], label)):
        if so_far >= half:
            break
        kinds[label] = KINDS[0]
        so_far += counts[label]
    return kinds


def _chosen_clients(known: list[tuple[int, Entry]], insights: Insights, held: Holdings) -> list[Figure]:
    """Draw accuracy per class for the clients tested on the most classes, with every run on the same federation."""
    same = [(i, entry) for i, entry in known if _held(entry.first, insights) == held]
    results = {i: {row["client"]: _tally_of(row) for row in entry.first.clients} for i, entry in same}
    tested = {c: max(len(rows.get(c, {})) for rows in results.values()) for c in held.members}
    figures = []
    for client in sorted(tested, key=lambda c: (-tested[c], -sum(held.counts[c]), c))[:SHOWN]:
        counts = held.counts[client]
        tallies = [(i, entry, results[i][client]) for i, entry in same if client in results[i]]
        order = sorted({k for _, _, tally in tallies for k in tally if counts[k]}, key=lambda k: (-counts[k], k))
        heads = sum(kinds_of(counts)[k] == KINDS[0] for k in order)
        note = (
            f"The client's largest classes first; its head has {heads} of these {len(order)} classes. Classes without "
            f"test samples are left out. Seed {same[0][1].first.seed}."
        )
        name = held.names[client] if held.names else f"Client {client}"
        title = f"{name} ({held.size_of(client):,} training samples)"
        figures.append(_by_class(f"class-client-{client}", title, tallies, order, held.classes, note, bars=True))
    return figures
