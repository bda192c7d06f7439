"""Figures for a paper: learning curves and the distribution over clients, with their data as CSV."""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

import numpy as np

from fedloom.core.errors import UserError
from fedloom.experiment.records import client_name, measure
from fedloom.report.page.measures import Measure
from fedloom.report.page.runs import Entry
from fedloom.report.paper.drawing import Canvas, label_ends, style
from fedloom.report.paper.measures import Quantity, quantities
from fedloom.report.significance import sample_std
from fedloom.report.table import FIGURES

Band = Literal["seeds", "clients", "none"]
Record = dict[str, Any]
UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27}
LARGEST = 40.0
"""Largest width and height in inches."""


@dataclass(frozen=True)
class PaperFigure:
    """A figure: what was drawn, and a sentence for its caption."""

    records: list[Record]
    caption: str

    def csv(self) -> str:
        """Return the drawn values as CSV with a header."""
        out = StringIO()
        writer = csv.DictWriter(out, list(self.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records)
        return out.getvalue()


def inches(flag: str, text: str) -> float:
    """Return a length such as `3.3in`, `84mm`, `8.4cm` or `240pt` (TeX's points) in inches.

    Raises:
        UserError: It is not a length, or not one of a figure.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(in|cm|mm|pt)\s*", text)
    found = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 1 <= found <= LARGEST:
        raise UserError(
            f"{flag} {text}: must be a length between 1in and {LARGEST:g}in with a unit (in, cm, mm, pt), for example "
            f"{flag} 3.3in"
        )
    return found


def draw_curves(
    entries: Sequence[Entry], canvas: Canvas, name: str = "personal_accuracy", band: Band = "seeds"
) -> PaperFigure:
    """Draw a measure by round: a line per method, the mean over seeds, labelled at its end.

    Args:
        entries: Runs of each method.
        canvas: Where to draw.
        name: A field of metrics.jsonl.
        band: What the band around a line is: one sample standard deviation over `seeds`, one standard deviation over
            `clients` (mean over seeds), or `none`.

    Raises:
        UserError: No run has recorded the measure, or its deviation over clients.
    """
    shown = quantities([name], [run for entry in entries for run in entry.runs])[0]
    spread = _deviation_over_clients(shown) if band == "clients" else ""
    records: list[Record] = []
    lines: list[tuple[str, Sequence[float], Sequence[float]]] = []
    for entry in entries:
        found = _by_round(entry, shown.name)
        widths = _by_round(entry, spread) if spread else {}
        means = {number: float(np.mean(values)) for number, values in found.items()}
        for number, values in found.items():
            width = float(np.mean(widths[number])) if number in widths else None
            width = sample_std(values) if band == "seeds" and len(values) > 1 else width
            records.append(
                {
                    "method": entry.label, "measure": shown.name, "round": number,
                    "mean": means[number], "n": len(values),
                    "low": None if width is None else means[number] - width,
                    "high": None if width is None else means[number] + width,
                }
            )  # fmt: skip
        if found:
            lines.append((entry.label, list(means), [shown.scale * value for value in means.values()]))
    if not records:
        raise UserError(f"measure = '{name}': metrics.jsonl has no values of it; choose another measure")
    if band == "clients" and all(record["low"] is None for record in records):
        raise UserError(f"band = 'clients': no run has recorded {spread}, the deviation over clients; use 'seeds'")
    for number, (label, x, y) in enumerate(lines):
        look = style(number)
        canvas.axes.plot(x, y, label=label, markevery=_marked(len(x), number), clip_on=False, **look)
        own = [record for record in records if record["method"] == label and record["low"] is not None]
        low, high = (shown.scale * np.clip([record[end] for record in own], *shown.limits) for end in ("low", "high"))
        canvas.axes.fill_between([record["round"] for record in own], low, high, color=look["color"], alpha=0.15, lw=0)
    canvas.axes.set_xlabel("round")
    canvas.axes.set_ylabel(shown.title)
    canvas.axes.xaxis.get_major_locator().set_params(integer=True)
    label_ends(canvas, lines)
    return PaperFigure(records, _curves_caption(entries, shown, band, records))


def draw_clients(entries: Sequence[Entry], canvas: Canvas, name: str = "accuracy") -> PaperFigure:
    """Draw a figure of every client at the last evaluation: a row of dots per method, its mean and its worst tenth.

    Args:
        entries: Runs of each method.
        canvas: Where to draw.
        name: `accuracy`, `loss` or one of `evaluation.metrics`.

    Raises:
        UserError: No client has the figure.
    """
    if name.removeprefix("personal_") not in FIGURES:
        raise UserError(f"measure = '{name}': must be a figure of single clients: {', '.join(FIGURES)}")
    figure = Measure(name.removeprefix("personal_"))
    records: list[Record] = [
        {
            "method": entry.label, "seed": run.seed, "client": row["client"], "name": client_name(row),
            "train": row["train"], "measure": figure.name, "value": value,
        }
        for entry in entries
        for run in entry.runs
        for row in run.clients
        if (value := figure.of(row)) is not None
    ]  # fmt: skip
    if not records:
        raise UserError(f"measure = '{name}': clients.jsonl has no values of it; choose another measure")
    labels = list(dict.fromkeys(record["method"] for record in records))
    for number, label in enumerate(labels):
        own = [record for record in records if record["method"] == label]
        values = figure.scale * np.array([record["value"] for record in own])
        seeds = np.array([record["seed"] for record in own])
        each = [values[seeds == seed] for seed in np.unique(seeds)]
        height, colour = len(labels) - 1 - number, style(number)["color"]
        jitter = np.random.default_rng(0).uniform(-0.25, 0.25, len(values))
        canvas.axes.scatter(values, height + jitter, s=4, color=colour, alpha=0.45, lw=0)
        mean = np.mean([one.mean() for one in each])
        canvas.axes.scatter(mean, height, s=22, color=colour, edgecolors="black", lw=0.6, zorder=3)
        tenth = np.mean([_worst_tenth(one, figure.lower) for one in each])
        canvas.axes.scatter(tenth, height, s=22, marker="D", color="white", edgecolors=colour, lw=1.2, zorder=3)
    canvas.axes.set_yticks(range(len(labels)), labels[::-1])
    canvas.axes.set_xlabel(figure.title + (" (%)" if figure.scale > 1 else ""))
    count = _seeds(entries)
    return PaperFigure(
        records,
        f"{figure.title[0].upper()}{figure.title[1:]} of each client. Dots: clients at the last evaluation"
        f"{f', of {count}' if count != '1 seed' else ''}. Large dots: means over clients. Diamonds: means of the worst "
        "tenth of the clients.",
    )


def _worst_tenth(values: np.ndarray, lower: bool) -> float:
    """Return the mean of the worst tenth, as `personal_worst` in a summary."""
    ordered = np.sort(values)[::-1] if lower else np.sort(values)
    return float(ordered[: max(1, len(ordered) // 10)].mean())


def _by_round(entry: Entry, name: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for run in entry.runs:
        for record in run.history:
            if (value := measure(record, name)) is not None:
                found[record["round"]].append(value)
    return dict(sorted(found.items()))


def _deviation_over_clients(shown: Quantity) -> str:
    """Return the field of a measure's standard deviation over clients."""
    if shown.clients is None:
        raise UserError(
            f"band = 'clients': {shown.name} is not a mean over clients; use 'seeds', or the measure personal_accuracy"
        )
    return shown.clients.field("std")


def _marked(points: int, number: int) -> list[int]:
    """Return the points with a marker: the last, and about five others that differ from line to line."""
    every = max(1, points // 5)
    return [*range(number % every, points - 1, every), points - 1]


def _seeds(entries: Iterable[Entry]) -> str:
    numbers = sorted({len(entry.runs) for entry in entries})
    text = f"{numbers[0]} to {numbers[-1]}" if numbers[1:] else str(numbers[0])
    return f"{text} seed{'' if text == '1' else 's'}"


def _curves_caption(entries: Sequence[Entry], shown: Quantity, band: Band, records: Sequence[Record]) -> str:
    seeds = _seeds(entries)
    lines = "Lines: one seed." if seeds == "1 seed" else f"Lines: means over {seeds}."
    lines = f"{shown.words[0].upper()}{shown.words[1:]}, by round. {lines}"
    edges = [record[end] for record in records for end in ("low", "high") if record[end] is not None]
    over: Mapping[str, str] = {
        "seeds": "one sample standard deviation (n − 1) over seeds", "clients": "one standard deviation over clients",
    }  # fmt: skip
    if band == "seeds" and not edges:
        return f"{lines} No bands: a deviation over seeds needs two seeds."
    if band not in over:
        return lines
    least, most = shown.limits
    beyond = [f"{shown.scale * end:g}" for end, cut in ((least, min(edges) < least), (most, max(edges) > most)) if cut]
    where = f", cut at {' and '.join(beyond)}{' %' if shown.scale == 100 else ''}" if beyond else ""
    return f"{lines} Bands: ± {over[band]}{where}."
