"""Accuracy per class, with a client's head and tail classes apart (RepPer's Fig. 5)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedloom.experiment.records import ClientRow
from fedloom.report.page.figure import Axis, Figure, Marks, PageSection, colour
from fedloom.report.page.insight import Holdings, Insight
from fedloom.report.page.runs import Entry, Run

KINDS = ("head", "tail", "not held")
SHOWN = 2
"""Clients that are shown one by one."""
Insights = Mapping[Path, Insight]
Tally = Mapping[int, tuple[float, float]]


def classes(entries: Sequence[Entry], insights: Insights) -> PageSection:
    """Over all clients; head against tail; and for clients that hold many classes."""
    section = PageSection("classes", "Classes")
    rows = [row for entry in entries for run in entry.runs for row in run.clients]
    known = [(i, e) for i, e in enumerate(entries) if any(per_class(row) for run in e.runs for row in run.clients)]
    if not known:
        alone = "These organisations share accuracy over all classes together."
        section.missing = alone if rows else "Accuracy per class is known when a run ends."
        return section
    held = next((found for _, entry in known if (found := _held(entry.first, insights))), None)
    section.figures.append(_over_all(known, held))
    if held is None:
        section.missing = "Head and tail need the data: " + why_missing(entries, insights)
        return section
    section.text = (
        "A client's head: its largest classes, which together hold half of its training samples. "
        "Its tail: the other classes that it holds."
    )
    if any(_held(entry.first, insights) is None for _, entry in known):
        section.missing = "Some are not shown: " + why_missing(entries, insights)
    section.figures.append(_head_and_tail(known, insights))
    section.figures += _chosen_clients(known, insights, held)
    return section


def _held(run: Run, insights: Insights) -> Holdings | None:
    found = insights.get(run.path)
    return found.holdings if found else None


def why_missing(entries: Sequence[Entry], insights: Insights) -> str:
    """Why a section that needs data or models does not have them."""
    problems = [found.problem for entry in entries if (found := insights.get(entry.first.path)) and found.problem]
    return problems[0] if problems else "they are looked at when a run has ended."


def _over_all(known: list[tuple[int, Entry]], held: Holdings | None) -> Figure:
    tallies = [(i, entry, _tally(entry.runs)) for i, entry in known]
    tested: dict[int, float] = defaultdict(float)
    for _, _, tally in tallies:
        for label, (_, total) in tally.items():
            tested[label] += total
    sizes = held.totals if held else tested
    order = sorted(tested, key=lambda label: (-sizes.get(label, 0), label))
    what = "training" if held else "test"
    note = f"Over all clients and seeds. Classes with the most {what} samples first."
    return _by_class("class-all", "Every class", tallies, order, known[0][1].first.classes, note)


def _tally(runs: Sequence[Run]) -> Tally:
    """Right answers and test samples by class."""
    found: dict[int, tuple[float, float]] = {}
    for run in runs:
        for row in run.clients:
            for label, (right, total) in _tally_of(row).items():
                before = found.get(label, (0, 0))
                found[label] = (before[0] + right, before[1] + total)
    return found


def per_class(row: ClientRow) -> bool:
    """Whether a client's results are known class by class: organisations need not share them."""
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
    """Methods side by side above each class: bars where few samples give 0% and 100%, else dots."""
    names = [classes[label] if label < len(classes) else str(label) for label in order]
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
    return Figure(name, title, Axis("class", labels=names), Axis("accuracy", percent=True), marks, note)


def _head_and_tail(known: list[tuple[int, Entry]], insights: Insights) -> Figure:
    marks, last = [], 0
    for i, entry in known:
        each = [_by_kind(run, held) for run in entry.runs if (held := _held(run, insights))]
        if not each:
            continue
        scores = [[100 * tally[kind][0] / tally[kind][1] for tally in each if tally[kind][1]] for kind in KINDS]
        samples = [sum(tally[kind][1] for tally in each) for kind in KINDS]
        x = [k for k, values in enumerate(scores) if values]
        last = max([last, *x])
        mean, std = [float(np.mean(scores[k])) for k in x], [float(np.std(scores[k])) for k in x]
        hover = zip(x, mean, strict=True)
        text = [f"{entry.label}<br>{KINDS[k]}: {value:.1f}% of {samples[k]:,} test samples" for k, value in hover]
        bars = Marks("bars", entry.label, [float(k) for k in x], mean, colour(i), [entry.group], text=text)
        if len(each) > 1:
            bars.low = [m - s for m, s in zip(mean, std, strict=True)]
            bars.high = [m + s for m, s in zip(mean, std, strict=True)]
        marks.append(bars)
    note = "Over the test samples of all clients; whiskers: standard deviation over seeds."
    kinds = Axis("classes of the client", labels=list(KINDS[: last + 1]))
    return Figure("class-head-tail", "Head and tail", kinds, Axis("accuracy", percent=True), marks, note)


def _by_kind(run: Run, held: Holdings) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in filter(per_class, run.clients):
        kinds = kinds_of(held.counts[row["client"]])
        for kind, right, total in zip(kinds, row["right"], row["total"], strict=True):
            found[kind] = (found[kind][0] + right, found[kind][1] + total)
    return found


def kinds_of(counts: Sequence[int]) -> list[str]:
    """Head: the largest classes, until half of the samples are among them. Tail: what else is there."""
    kinds = [KINDS[1] if count else KINDS[2] for count in counts]
    half, so_far = sum(counts) / 2, 0
    for label in sorted(range(len(counts)), key=lambda label: (-counts[label], label)):
        if so_far >= half:
            break
        kinds[label] = KINDS[0]
        so_far += counts[label]
    return kinds


def _chosen_clients(known: list[tuple[int, Entry]], insights: Insights, held: Holdings) -> list[Figure]:
    """Those that are tested on the most classes, class by class, in every run on the same federation."""
    same = [(i, entry) for i, entry in known if _held(entry.first, insights) == held]
    results = {i: {row["client"]: _tally_of(row) for row in entry.first.clients} for i, entry in same}
    tested = {c: max(len(rows.get(c, {})) for rows in results.values()) for c in range(len(held.counts))}
    figures = []
    for client in sorted(tested, key=lambda c: (-tested[c], -sum(held.counts[c]), c))[:SHOWN]:
        counts = held.counts[client]
        tallies = [(i, entry, results[i][client]) for i, entry in same if client in results[i]]
        order = sorted({k for _, _, tally in tallies for k in tally if counts[k]}, key=lambda k: (-counts[k], k))
        heads = sum(kinds_of(counts)[k] == KINDS[0] for k in order)
        note = (
            f"Its largest classes first; {heads} of these {len(order)} are its head. Classes without test samples are "
            f"left out. Seed {same[0][1].first.seed}."
        )
        title = f"Client {client} ({sum(counts):,} training samples)"
        figures.append(_by_class(f"class-client-{client}", title, tallies, order, held.classes, note, bars=True))
    return figures
