"""Report section with learning curves: personal models with a band over clients, global model, training loss."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fedloom.experiment.records import measure
from fedloom.report.page.figure import Axis, Figure, Marks, Numbers, PageSection, Switch, colour
from fedloom.report.page.runs import Entry

BANDS_SHOWN = 3
"""With more methods than this, bands would cover each other: they are hidden until the user switches them on."""


def curves(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Learning curves": means over seeds for each round."""
    rounds = Axis("round", whole=True)
    figures = [
        Figure(
            "curve-clients", "Personal models", rounds, Axis("accuracy", percent=True),
            [_line(entry, i, "personal_accuracy", "personal_std") for i, entry in enumerate(entries)],
            "Mean over clients, each with its personal model. The band is one standard deviation over clients.",
        ),
        Figure(
            "curve-global", "Global model", rounds, Axis("accuracy", percent=True),
            [_line(entry, i, "global_accuracy") for i, entry in enumerate(entries)],
            "Over the test samples of all clients.",
        ),
        Figure(
            "curve-worst", "Worst tenth of the clients", rounds, Axis("accuracy", percent=True),
            [_line(entry, i, "personal_worst") for i, entry in enumerate(entries)],
            "Mean accuracy of the 10% of the clients with the lowest accuracy.",
        ),
        Figure(
            "curve-loss", "Training loss", rounds, Axis("loss"),
            [_line(entry, i, "loss", scale=1) for i, entry in enumerate(entries)],
            "Each method defines its own loss: compare the shapes of the curves, not their levels.",
        ),
    ]  # fmt: skip
    for figure in figures:
        figure.marks = [marks for marks in figure.marks if marks.x]
        figure.note += _coinciding(figure.marks)
    figures = [figure for figure in figures if figure.marks]
    return PageSection(
        "curves", "Learning curves", figures=figures, legend=[Switch("band", "band over clients")],
        hidden=["band"] if len(entries) > BANDS_SHOWN else [],
        missing="" if figures else "No round has finished yet.",
    )  # fmt: skip


def _coinciding(marks: Sequence[Marks]) -> str:
    """Return a note that names identical lines, since they look like a single line."""
    same: dict[tuple[float | None, ...], list[str]] = defaultdict(list)
    for line in marks:
        same[(*line.x, *line.y)].append(line.name)
    return "".join(f" {' and '.join(names)} coincide." for names in same.values() if len(names) > 1)


def _line(entry: Entry, index: int, name: str, spread: str = "", scale: float = 100) -> Marks:
    x, y = mean_by_round(entry, name, scale)
    marks = Marks("line", entry.label, x, y, colour(index), [entry.group], dashed=index >= 10)
    if spread and x:
        widths = dict(zip(*mean_by_round(entry, spread, scale), strict=True))
        each = [(value, widths.get(round)) for round, value in zip(x, y, strict=True)]
        marks.low = [None if v is None or w is None else max(0.0, v - w) for v, w in each]
        marks.high = [None if v is None or w is None else min(scale, v + w) for v, w in each]
    return marks


def mean_by_round(entry: Entry, name: str, scale: float = 1) -> tuple[Numbers, Numbers]:
    """Return the rounds in which a value was measured, and its mean over seeds in each."""
    found: dict[int, list[float]] = defaultdict(list)
    for run in entry.runs:
        for record in run.history:
            if (value := measure(record, name)) is not None:
                found[record["round"]].append(scale * value)
    rounds = sorted(found)
    return [float(r) for r in rounds], [float(np.mean(found[r])) for r in rounds]
