"""Pictures with several panels and one legend: lines over an axis, with deviations and published figures."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.report.paper.drawing import print_figure, style, write

WIDTH = 6.6
"""Inches: the width of a page with margins."""
PUBLISHED = "hollow: the paper"
HEIGHT = 2.5
"""Inches of one row of panels, without the legend."""
MARKS = 6
"""Number of markers on a long line."""
LONG_NUMBER = re.compile(rb"\d+\.\d{3,}")


@dataclass(frozen=True)
class Series:
    """A line, or a single point, with the published figures that belong to it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()
    """Deviation at each point; empty without."""
    published: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log: bool = False
    """Whether the horizontal axis is logarithmic; otherwise its ticks are whole numbers."""


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels, at most two in a row, with a common legend below.

    Lines differ in colour, dashes and markers, which distinguishes them in grey. Bands are deviations; hollow
    markers are published figures.

    Args:
        panels: What to draw; a label has the same look in all panels.
        path: The file; its suffix is .svg, .png or .pdf.

    Raises:
        UserError: The file cannot be written.
    """
    labels = list(dict.fromkeys(series.label for panel in panels for series in panel.series))
    columns = 3 if len(panels) == 3 else min(len(panels), 2)
    rows = -(-len(panels) // columns)
    width = WIDTH if columns > 1 else 0.65 * WIDTH
    in_legend = max(1, min(5, int(width / (0.5 + 0.07 * max(map(len, [*labels, PUBLISHED]))))))
    with print_figure(width, rows * HEIGHT + 0.2 * -(-len(labels) // in_legend)) as figure:
        every = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        for place, (axes, panel) in enumerate(zip(every, panels, strict=False)):
            _draw(axes, panel, labels)
            if place % columns == 0 or panel.y != panels[place - 1].y:
                axes.set_ylabel(panel.y)
        for axes in every[len(panels) :]:
            axes.set_visible(False)
        _legend(figure, panels, labels, in_legend)
        write(figure, path)
    if path.suffix == ".svg":  # a hundredth of a point is invisible; the file is half as large
        path.write_bytes(LONG_NUMBER.sub(lambda found: b"%.2f" % float(found[0]), path.read_bytes()))


def _draw(axes: Any, panel: Panel, labels: Sequence[str]) -> None:
    for series in panel.series:
        number = labels.index(series.label)
        look = style(number)
        many = len(series.x) > 2 * MARKS
        step = max(1, len(series.x) // MARKS)
        marked = list(range(number % step, len(series.x), step)) if many else None
        axes.plot(series.x, series.y, markevery=marked, clip_on=False, zorder=3, **look)
        if series.spread and many:
            edges = ([y + side * s for y, s in zip(series.y, series.spread, strict=True)] for side in (-1, 1))
            axes.fill_between(series.x, *edges, color=look["color"], alpha=0.12, lw=0)
        elif series.spread:
            axes.errorbar(
                series.x, series.y, series.spread, fmt="none", ecolor=look["color"], elinewidth=0.7, capsize=2
            )
        for x, y in series.published:
            axes.plot(
                x, y, marker=look["marker"], markersize=5, mfc="white", color=look["color"], clip_on=False, zorder=4
            )
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    if panel.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)


def _legend(figure: Any, panels: Sequence[Panel], labels: Sequence[str], columns: int) -> None:
    from matplotlib.lines import Line2D

    is_line = {s.label for panel in panels for s in panel.series if len(s.x) > 1}
    looks = {label: style(number) for number, label in enumerate(labels)}
    handles = [
        Line2D([], [], label=label, **(look if label in is_line else look | {"linestyle": ""}))
        for label, look in looks.items()
    ]
    if any(series.published for panel in panels for series in panel.series):
        handles.append(Line2D([], [], label=PUBLISHED, marker="o", mfc="white", color="#444444", linestyle=""))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)), frameon=False)
