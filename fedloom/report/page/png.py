"""Figures of the page as PNG files, for papers."""

from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import UserError
from fedloom.report.page.figure import DASHES, SYMBOLS, Axis, Figure, Marks, Page, PageSection, Switch

INK, SOFT, GRID = "#1d2730", "#5b6873", "#e3e8eb"
LINES: dict[str, Any] = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))
MARKERS = dict(zip(SYMBOLS, ("o", "s", "D", "^", "P", "X", "*"), strict=True))
PLAIN = Switch("", "")
"""How a series is drawn that has no entry in the page's legend."""
LETTERS = 90
"""Tick labels of an x axis with more letters than this are written at an angle."""
PIXELS = 96
"""Screen pixels per inch: sizes and heights of the page are in pixels."""


def write_pngs(page: Page, folder: Path) -> list[Path]:
    """Write each figure of the page as a PNG file.

    Args:
        page: The page.
        folder: The folder to write to; it is created if it does not exist.

    Returns:
        The written files, named after the figures.

    Raises:
        UserError: If the folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(figure, section, page, folder) for section in page.sections for figure in section.figures]
    except OSError as error:
        raise UserError(f"--png {folder}: cannot be written: {error.strerror}; for example --png figures") from error


def _write(figure: Figure, section: PageSection, page: Page, folder: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    width = 11.0 if figure.wide else 3.2 if figure.square else 5.6
    height = 3.2 if figure.x.bare else figure.height / PIXELS
    canvas = Canvas(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    axes.set_title(figure.title, fontsize=11, fontweight="bold", color=INK, loc="left")
    for name in ("top", "right", "left", "bottom"):
        axes.spines[name].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=SOFT)
    axes.set_axisbelow(True)
    shown = _selected(figure, page)
    bars = [marks for marks in shown if marks.kind == "bars"]
    axes.grid(axis="y" if bars else "both", color=GRID, linewidth=0.7)
    looks = {switch.group: switch for switch in page.legend}
    heat = figure.value is not None
    for marks in [] if heat else shown:
        look = looks.get(marks.groups[0] if marks.groups else "", PLAIN)
        _draw(axes, marks, bars, section.bands[0][0] if section.bands else "", look)
    _dress(axes.xaxis, axes.set_xscale, figure.x, 22 if figure.wide else 12)
    if figure.value is None:
        _dress(axes.yaxis, axes.set_yscale, figure.y, 34)
        if figure.y.rows:
            used = [figure.y.rows.index(marks.groups[0]) for marks in shown]
            axes.set_ylim(min(used) - 0.6, max(used) + 0.6)  # without the rows of methods that are not selected
    else:
        _heat(canvas, axes, shown, figure.value, len(figure.x.labels or []))
    if figure.x.bare:
        axes.set_xlabel(figure.note, fontsize=9, color=SOFT)
    if not figure.y.rows:
        _legend(canvas, shown, section, page)
    path = folder / f"{figure.name}.png"
    canvas.savefig(path, dpi=200)
    return path


def _selected(figure: Figure, page: Page) -> list[Marks]:
    """Return the series of the methods that the page shows initially; all if the figure has none of them."""
    left_out = {switch.group for switch in page.legend} - set(page.top) if page.top else set()
    shown = [marks for marks in figure.marks if not left_out.intersection(marks.groups)]
    return shown if any(marks.groups for marks in shown) else figure.marks


def _heat(canvas: Any, axes: Any, rows: list[Marks], value: Axis, columns: int) -> None:
    """Draw a heat map with the first row at the top, and its scale."""
    z = np.full((len(rows), columns), np.nan)
    for place, marks in enumerate(rows):
        z[place, np.array(marks.x, int)] = np.array(marks.y, float)
    drawn = axes.imshow(z, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set_yticks(range(len(rows)), [marks.name for marks in rows])
    axes.grid(visible=False)
    scale = canvas.colorbar(drawn, ax=axes, pad=0.01, fraction=0.03, format="{x:.0f}%" if value.percent else None)
    scale.outline.set_visible(False)
    scale.set_label(value.title, fontsize=9, color=SOFT)
    scale.ax.tick_params(length=0, labelsize=8, labelcolor=SOFT)


def _draw(axes: Any, marks: Marks, bars: list[Marks], band: str, look: Switch) -> None:
    x, y = np.array(marks.x, float), np.array(marks.y, float)
    low, high = (None if v is None else np.array(v, float) for v in (marks.low, marks.high))
    if marks.kind == "line":
        style = {"linestyle": LINES[look.dash], "marker": MARKERS[look.symbol], "markersize": 3.5}
        axes.plot(x, y, color=marks.colour, linewidth=1.6, **style)
        if band in marks.bands:
            edges = (np.array(edge, float) for edge in marks.bands[band])
            axes.fill_between(x, *edges, color=marks.colour, alpha=0.14, linewidth=0)
    elif marks.kind == "bars":
        width = 0.8 / len(bars)
        x = x + width * (next(n for n, other in enumerate(bars) if other is marks) + 0.5) - 0.4
        pale = marks.pale or [False] * len(x)
        axes.bar(x, y, width * 0.95, color=[_mixed(marks.colour, 0.45 if p else 1.0) for p in pale])
        if low is not None and high is not None:
            axes.errorbar(x, y, [y - low, high - y], fmt="none", ecolor=SOFT, elinewidth=0.8, capsize=2)
    else:
        sizes = np.array(marks.sizes or [7], float) * 72 / PIXELS
        face, edge = ("white", marks.colour) if marks.hollow else (marks.colour, "white")
        line = 1.6 if marks.hollow else 0.3
        alpha = 0.5 if marks.pale else None if marks.hollow else 0.88
        axes.scatter(x, y, s=sizes**2, c=face, edgecolors=edge, linewidths=line, alpha=alpha, zorder=3,
                     marker=MARKERS[look.symbol])  # fmt: skip


def _mixed(colour: str, share: float) -> tuple[float, ...]:
    return tuple(share * int(colour[i : i + 2], 16) / 255 + 1 - share for i in (1, 3, 5))


def _dress(axis: Any, scale: Any, described: Axis, room: int) -> None:
    """Set the title, scale and ticks of an axis."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axis.set_label_text(described.title, fontsize=9, color=SOFT)
    if described.bare:
        axis.set_ticks([])
    elif described.labels is not None:
        step = max(1, -(-len(described.labels) // room))
        shown = described.labels[::step]
        axis.set_ticks(range(0, len(described.labels), step), shown)
        if axis.axis_name == "x" and len(shown) * max(map(len, shown), default=0) > LETTERS:
            axis.set_tick_params(rotation=45)
            for label in axis.get_ticklabels():
                label.set(ha="right", rotation_mode="anchor")
    elif described.log:
        scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    else:
        axis.set_major_locator(MaxNLocator(6, integer=described.whole))
        if described.percent:
            axis.set_major_formatter(lambda value, _: f"{value:.0f}%")


def _legend(canvas: Any, marks: list[Marks], section: PageSection, page: Page) -> None:
    """Draw a legend next to the figure if it has several colours."""
    from matplotlib.lines import Line2D

    used = {group for one in marks for group in one.groups}
    local = [switch for switch in section.legend if switch.group in used]
    shown: list[Switch] = local or [switch for switch in page.legend if switch.group in used]
    if len(shown) < 2:
        return
    lines = any(one.kind == "line" for one in marks)
    handles = [
        Line2D([], [], linestyle=LINES[one.dash] if lines else "", marker=MARKERS[one.symbol], markersize=5,
               color=one.colour, label=one.name)
        for one in shown
    ]  # fmt: skip
    canvas.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8, labelcolor=INK)
