"""Report section with the distribution of accuracy over clients, also against the clients' sizes."""

from collections.abc import Sequence

import numpy as np

from fedloom.experiment.records import ClientRow, client_name, client_tick
from fedloom.report.page.figure import Axis, Figure, Marks, PageSection, colour, slug
from fedloom.report.page.runs import Entry

BARS = 400
"""Largest number of bars in a figure; of more clients, an evenly spaced selection is drawn."""
Numbered = list[tuple[int, Entry]]


def clients(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Clients": each client's accuracy as a dot, as a bar, and against its size."""
    section = PageSection("clients", "Clients", "How accuracy is distributed over clients, and which clients do worst.")
    known = [(i, entry) for i, entry in enumerate(entries) if _rows(entry)]
    if not known:
        section.missing = "Results per client are available when a run has finished."
        return section
    section.figures = [
        _strips(known),
        _against_size(known),
        *(_bars(i, entry, wide=len(known) == 1) for i, entry in known),
    ]
    return section


def _rows(entry: Entry) -> list[tuple[int, ClientRow]]:
    """Return the seed and the result of every client that was tested."""
    return [(run.seed, row) for run in entry.runs for row in run.clients if row["accuracy"] is not None]


def _strips(known: Numbered) -> Figure:
    """Draw a row of dots per method, with the mean and the worst tenth highlighted."""
    marks: list[Marks] = []
    rows = known[::-1]
    for height, (i, entry) in enumerate(rows):
        found = _rows(entry)
        jitter = np.random.default_rng(0).uniform(-0.24, 0.24, len(found))
        x, y = [100 * row["accuracy"] for _, row in found], [height + float(j) for j in jitter]
        text = [_hover(entry, seed, row) for seed, row in found]
        pale = [True] * len(found)
        marks.append(Marks("dots", entry.label, x, y, colour(i), [entry.group], sizes=[6], text=text, pale=pale))
        marks += _large(i, entry, height, "personal_worst", "mean of the worst tenth", hollow=True)
        marks += _large(i, entry, height, "personal_accuracy", "mean over clients")
    return Figure(
        "clients-spread", "Accuracy of each client", Axis("accuracy", percent=True),
        Axis(labels=[entry.label for _, entry in rows]), marks,
        "Small dots: clients of all seeds. Large dot: mean over clients. Ring: mean of the worst tenth of the clients.",
        height=max(240, 110 + 44 * len(rows)),
    )  # fmt: skip


def _large(i: int, entry: Entry, height: int, name: str, what: str, hollow: bool = False) -> list[Marks]:
    values = entry.known(name)
    if not values:
        return []
    mean = 100 * float(np.mean(values))
    text = [f"{entry.label}<br>{what}: {mean:.1f}%"]
    place = ([mean], [float(height)])
    return [Marks("dots", what, *place, colour(i), [entry.group], sizes=[13], text=text, hollow=hollow)]


def _hover(entry: Entry, seed: int, row: ClientRow) -> str:
    new = ", newcomer" if row["newcomer"] else ""
    who = f"{entry.label}<br>{client_name(row)}{new} (seed {seed})"
    return f"{who}<br>{100 * row['accuracy']:.1f}%<br>{row['train']:,} training samples"


def _against_size(known: Numbered) -> Figure:
    marks = []
    for i, entry in known:
        found = [(seed, row) for seed, row in _rows(entry) if row["train"]]
        x, y = [float(row["train"]) for _, row in found], [100 * row["accuracy"] for _, row in found]
        text = [_hover(entry, seed, row) for seed, row in found]
        marks.append(Marks("dots", entry.label, x, y, colour(i), [entry.group], sizes=[7], text=text))
    return Figure(
        "clients-size", "Accuracy against size", Axis("training samples of the client", log=True),
        Axis("accuracy", percent=True), marks, "All clients of all seeds.", height=max(300, 110 + 44 * len(known)),
    )  # fmt: skip


def _bars(i: int, entry: Entry, *, wide: bool) -> Figure:
    """Draw the clients of one seed as bars, lowest accuracy first."""
    seed = _rows(entry)[0][0]
    rows = sorted((row for other, row in _rows(entry) if other == seed), key=lambda row: float(row["accuracy"]))
    behind = max(1, len(rows) // 10)
    shown = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), BARS)).round().astype(int)).tolist()
    some = f", {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
    marks = Marks(
        "bars", entry.label, [float(x) for x in range(len(shown))], [100 * rows[r]["accuracy"] for r in shown],
        colour(i), [entry.group], text=[_hover(entry, seed, rows[r]) for r in shown], pale=[r >= behind for r in shown],
    )  # fmt: skip
    note = f"Clients of seed {seed}, lowest accuracy first{some}; the worst tenth is highlighted."
    x, y = Axis("client", labels=[client_tick(rows[r]) for r in shown]), Axis("accuracy", percent=True)
    return Figure(slug("clients", str(i), entry.label), entry.label, x, y, [marks], note, 250, wide)
