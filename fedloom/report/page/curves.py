"""Report section with learning curves: personal models, global model, training loss; bands over seeds or clients."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fedloom.experiment.records import measure as value_of
from fedloom.report.page.figure import Axis, Figure, Marks, Numbers, PageSection, colour, listed, slug
from fedloom.report.page.measures import ACCURACY, Measure, choices, recorded
from fedloom.report.page.runs import Entry
from fedloom.report.significance import sample_std

WIDE_BANDS = 3
"""With more methods than this, bands over clients would cover each other: they are not shown initially."""
BANDS = {"seeds": "over seeds", "clients": "over clients", "none": "none"}
ROUNDS = Axis("round", whole=True)


def curves(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Learning curves": means over seeds for each round, of one measure at a time."""
    measures = recorded(entries)
    figures = [figure for measure in measures for figure in _of(measure, entries)]
    figures.append(
        Figure(
            "curve-loss", "Training loss", ROUNDS, Axis("loss"),
            [_line(entry, i, "loss") for i, entry in enumerate(entries)],
            "Each method defines its own loss: compare the shapes of the curves, not their levels.",
        )
    )  # fmt: skip
    for figure in figures:
        figure.marks = [marks for marks in figure.marks if marks.x]
        _leave_out_constant(figure)
        figure.note += _coinciding(figure.marks)
    figures = [figure for figure in figures if figure.marks]
    return PageSection(
        "curves", "Learning curves", text=_text(entries) if figures else "", figures=figures,
        choices=choices(measures) if figures else [], bands=_bands(figures, len(entries)),
        missing="" if figures else "No round has finished yet.",
    )  # fmt: skip


def _text(entries: Sequence[Entry]) -> str:
    several = any(len(entry.runs) > 1 for entry in entries)
    return "Lines are means over seeds. A band is one standard deviation." if several else ""


def _bands(figures: Sequence[Figure], methods: int) -> list[tuple[str, str]]:
    """Return the bands to choose from: first those over seeds, or over clients if there are few methods."""
    found = [band for band in BANDS if any(band in marks.bands for figure in figures for marks in figure.marks)]
    first = "seeds" if "seeds" in found else "clients" if methods <= WIDE_BANDS else "none"
    return [(band, BANDS[band]) for band in sorted([*found, "none"], key=lambda band: band != first)] if found else []


def _of(measure: Measure, entries: Sequence[Entry]) -> list[Figure]:
    """Return the curves of a measure: personal models, global model, worst tenth, validation samples."""
    pooled = measure == ACCURACY
    shared = "global_accuracy" if pooled else measure.field("mean", "global_mean")
    over = "Over the test samples of all clients." if pooled else "Mean over clients of the global model's figure."
    worst = "highest" if measure.lower else "lowest"
    kinds = (
        (
            "curve-clients", "Personal models", measure.field("mean"), measure.field("std"),
            "Mean over clients, each with its personal model.",
        ),
        ("curve-global", "Global model", shared, "", over),
        (
            "curve-worst", "Worst tenth of the clients", measure.field("worst"), "",
            f"Mean {measure.title} of the 10% of the clients with the {worst} {measure.title}.",
        ),
        (
            "curve-validation", "Personal models, validation samples", measure.field("mean", "validation_personal"),
            measure.field("std", "validation_personal"), "Mean over clients, on validation samples.",
        ),
    )  # fmt: skip
    return [
        Figure(
            name if pooled else slug(name, measure.name), title, ROUNDS, measure.axis,
            [_line(entry, i, field, spread, measure) for i, entry in enumerate(entries)], note, choice=measure.name,
        )
        for name, title, field, spread, note in kinds
    ]  # fmt: skip


def _coinciding(marks: Sequence[Marks]) -> str:
    """Return a note that names identical lines, since they look like a single line."""
    same: dict[tuple[float | None, ...], list[str]] = defaultdict(list)
    for line in marks:
        same[(*line.x, *line.y)].append(line.name)
    return "".join(f" {listed(names, last=' and ')} coincide." for names in same.values() if len(names) > 1)


def _leave_out_constant(figure: Figure) -> None:
    """Leave out lines that never change and lie so far from the others that they would squash them; name their value.

    Such is an untrained network's. Two equal values may be a coincidence.
    """
    values = {marks.name: [v for v in marks.y if v is not None] for marks in figure.marks}
    varying = [v for each in values.values() if len(set(each)) > 1 for v in each]
    if not varying:
        return
    low, high = min(varying), max(varying)
    constant = {name: each[0] for name, each in values.items() if len(each) > 2 and len(set(each)) == 1}
    apart = {name: value for name, value in constant.items() if max(low - value, value - high) > high - low}
    figure.marks = [marks for marks in figure.marks if marks.name not in apart]
    text = "{:.1f}%" if figure.y.percent else "{:.4g}"
    figure.note += "".join(f" Not drawn: {name}, always at {text.format(value)}." for name, value in apart.items())


def _line(entry: Entry, index: int, name: str, spread: str = "", measure: Measure | None = None) -> Marks:
    scale = measure.scale if measure else 1
    found = by_round(entry, name, scale)
    y = [float(np.mean(values)) for values in found.values()]
    marks = Marks("line", entry.label, [float(r) for r in found], y, colour(index), [entry.group])
    most = scale if measure and measure.name != "loss" else float("inf")
    if any(len(values) > 1 for values in found.values()):
        marks.bands["seeds"] = _around(y, [sample_std(values) for values in found.values()], most)
    if spread and found:
        widths = by_round(entry, spread, scale)
        over = [float(np.mean(widths[r])) if r in widths else None for r in found]
        marks.bands["clients"] = _around(y, over, most)
    return marks


def _around(values: Sequence[float], widths: Numbers, most: float) -> tuple[Numbers, Numbers]:
    """Return the edges of a band, within 0 and `most`."""
    each = list(zip(values, widths, strict=True))
    return (
        [None if width is None else max(0.0, value - width) for value, width in each],
        [None if width is None else min(most, value + width) for value, width in each],
    )


def by_round(entry: Entry, name: str, scale: float = 1) -> dict[int, list[float]]:
    """Return the values of all seeds in each round in which a value was measured."""
    found: dict[int, list[float]] = defaultdict(list)
    for run in entry.runs:
        for record in run.history:
            if (value := value_of(record, name)) is not None:
                found[record["round"]].append(scale * value)
    return dict(sorted(found.items()))


def mean_by_round(entry: Entry, name: str, scale: float = 1) -> tuple[Numbers, Numbers]:
    """Return the rounds in which a value was measured, and its mean over seeds in each."""
    found = by_round(entry, name, scale)
    return [float(r) for r in found], [float(np.mean(values)) for values in found.values()]
