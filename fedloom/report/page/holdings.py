"""Report section with the data of each client: one dot per client and class, sized by samples (RepPer's Fig. 3)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedloom.report.page.classes import why_missing
from fedloom.report.page.figure import Axis, Figure, Key, Marks, PageSection, Switch, colour
from fedloom.report.page.insight import Holdings, Insight
from fedloom.report.page.runs import Entry

SHOWN = 120
FEDERATIONS = 4
"""Largest number of different federations that are drawn."""
WIDTH = 1080
"""Pixels between the first and the last client on a large screen."""


def holdings(entries: Sequence[Entry], insights: Mapping[Path, Insight]) -> PageSection:
    """Return the section "Data of the clients": each distinct federation among the entries' first seeds."""
    section = PageSection("holdings", "Data of the clients")
    distinct: list[tuple[Entry, Holdings]] = []
    for entry in entries:
        found = insights.get(entry.first.path)
        if found and found.holdings and all(found.holdings != other for _, other in distinct):
            distinct.append((entry, found.holdings))
    if not distinct:
        section.missing = "This cannot be shown without the data: " + why_missing(entries, insights)
        return section
    drawn = distinct[:FEDERATIONS]
    names = list(dict.fromkeys(group for _, held in drawn for group in held.groups))
    section.legend = [Switch(f"group:{name}", name, colour(g)) for g, name in enumerate(names)]
    for number, (entry, held) in enumerate(drawn):
        section.figures.append(_dots(number, entry, held, names, several=len(distinct) > 1))
    if len(distinct) > FEDERATIONS:
        section.text = f"{FEDERATIONS} of {len(distinct)} federations are shown."
    return section


def _dots(number: int, entry: Entry, held: Holdings, names: list[str], several: bool) -> Figure:
    counts = np.array(held.counts)
    shown = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), SHOWN)).round().astype(int)).tolist()
    height = min(620, 90 + 26 * counts.shape[1])
    room = min(WIDTH / len(shown), (height - 90) / counts.shape[1], 30)
    ticks = [held.names[c] if held.names else str(c) for c in shown]
    title = held.name + (f" ({entry.label})" if several else "")
    key = [Key("dot", "client"), Key("ring", "newcomer (held out of training)")] if held.newcomers else []
    note = f"{_note(held, len(shown))} Seed {entry.first.seed}."
    return Figure(
        f"holdings-{number}", title, Axis("client", labels=ticks), Axis(labels=held.classes),
        _marks(held, shown, names, room), note, height, wide=True, key=key,
    )  # fmt: skip


def _marks(held: Holdings, shown: list[int], names: list[str], room: float) -> list[Marks]:
    """Return the dots of each group; those of newcomers are hollow."""
    counts = np.array(held.counts)
    largest = counts.max()
    marks = []
    groups = held.groups or [""] * len(counts)
    for group in dict.fromkeys(groups):
        for new in (False, True):
            mine = [(x, c) for x, c in enumerate(shown) if groups[c] == group and (c in held.newcomers) == new]
            at = [(x, c, int(k)) for x, c in mine for k in np.flatnonzero(counts[c])]
            if not at:
                continue
            hover = [
                f"{held.name_of(c)}{' (newcomer)' if new else ''}{f', {group}' if group and not held.names else ''}<br>"
                f"{held.classes[k]}: {counts[c, k]:,} of its {held.size_of(c):,} samples"
                for _, c, k in at
            ]
            sizes = [max(2.0, room * float((counts[c, k] / largest) ** 0.5)) for _, c, k in at]
            marks.append(
                Marks(
                    "dots",
                    group or "samples",
                    [float(x) for x, _, _ in at],
                    [float(k) for _, _, k in at],
                    colour(names.index(group) if group else 0),
                    [f"group:{group}"] if group else [],
                    sizes=sizes,
                    text=hover,
                    hollow=new,
                )
            )
    return marks


def _note(held: Holdings, shown: int) -> str:
    """Say how many samples the clients hold, and what the largest dot stands for."""
    sizes = np.array([held.size_of(c) for c in held.members])
    some = f"{shown} of {len(held.counts)} shown; " if shown < len(held.counts) else ""
    held_out = sum(held.size_of(c) for c in held.newcomers)
    who = f"{len(held.newcomers):,} newcomer{'s' if held.newcomers[1:] else ''}"
    besides = f" Besides, {held_out:,} training samples of {who}." if held.newcomers else ""
    spread = f"smallest {sizes.min():,}, median {np.median(sizes):,.0f}, largest {sizes.max():,}"
    if sizes.min() == sizes.max():
        spread = f"{sizes.max():,} each"
    return (
        f"{sizes.sum():,} training samples of {len(held.members):,} clients ({some}{spread}); the largest dot stands "
        f"for {np.max(held.counts):,} samples.{besides}"
    )
