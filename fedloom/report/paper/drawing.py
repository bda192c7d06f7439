"""Drawing for a paper: size, fonts, distinguishable line styles, labels at lines, reproducible files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.report.page.figure import COLOURS

SUFFIXES = (".pdf", ".svg", ".png")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p")
"""Eleven markers and ten colours: 110 methods have different pairs of both."""
FONT = 8.0
"""Points; figures are drawn in their final size, so that this is the size on paper."""
SMALL = 2.5
"""Below this width in inches, the font is one point smaller."""
SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif", "axes.linewidth": 0.6, "lines.linewidth": 1.1, "lines.markersize": 3.2,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5,
    "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42, "svg.fonttype": "path",
    "svg.hashsalt": "fedloom", "savefig.dpi": 300,
}  # fmt: skip
NO_DATES: dict[str, dict[str, None]] = {
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None}, ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
}  # fmt: skip
"""Without dates and versions, equal figures are equal files."""


@dataclass(frozen=True)
class Canvas:
    """A matplotlib figure with one pair of axes."""

    figure: Any
    axes: Any
    font: float
    height: float
    """Height of the figure in inches."""

    def save(self, path: Path) -> None:
        """Write the figure in the format of the path's suffix.

        Raises:
            UserError: The file cannot be written.
        """
        write(self.figure, path)


def write(figure: Any, path: Path) -> None:
    """Write a matplotlib figure, without dates, in the format of the path's suffix.

    Raises:
        UserError: The file cannot be written.
    """
    data = BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower(), metadata=NO_DATES[path.suffix.lower()])
    try:
        path.write_bytes(data.getvalue())
    except OSError as error:
        raise UserError(f"--to {path}: cannot be written: {error.strerror}; choose another file") from None


def refuse_suffix(path: Path) -> None:
    """Raise a UserError if a figure's path has a suffix other than .pdf, .svg or .png."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--to {path}: must end in {', '.join(SUFFIXES)}, for example --to {path.stem or 'figure'}.pdf")


@contextmanager
def canvas(width: float, height: float | None, rows: int) -> Iterator[Canvas]:
    """Yield a canvas with settings for print.

    Args:
        width: Width in inches.
        height: Height in inches. Default: 0.65 of the width, more if labels of all rows need it.
        rows: Number of methods.
    """
    font = FONT if width >= SMALL else FONT - 1
    height = height or max(0.65 * width, 0.6 + rows * 1.35 * font / 72)
    with print_figure(width, height, font) as figure:
        yield Canvas(figure, figure.subplots(), font, height)


@contextmanager
def print_figure(width: float, height: float, font: float = FONT) -> Iterator[Any]:
    """Yield an empty matplotlib figure, in inches, with settings for print."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    texts = ("font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize")
    with rc_context(SETTINGS | dict.fromkeys(texts, font)):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def style(number: int) -> dict[str, Any]:
    """Return colour, dashes and marker of a method; no two of the first 110 have the same colour and marker."""
    return {
        "color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
    }  # fmt: skip


def label_ends(canvas: Canvas, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> None:
    """Write each line's label beside its end, in its colour; labels are moved apart vertically."""
    axes = canvas.axes
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    right = max(x[-1] for _, x, _ in lines)
    gap = 1.25 * canvas.font / 72 / max(0.5, canvas.height - 0.5) * (high - low)
    places = spread_out([y[-1] for *_, y in lines], gap, low, high)
    for number, ((label, x, y), place) in enumerate(zip(lines, places, strict=True)):
        colour = style(number)["color"]
        axes.annotate(
            label, (x[-1], y[-1]), xytext=(1.06, place), textcoords=axes.get_yaxis_transform(), color=colour,
            va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "shrinkA": 1, "shrinkB": 2, "relpos": (0, 0.5)},
        )  # fmt: skip
    axes.set_xlim(right=right)


def spread_out(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return values moved apart so that neighbours differ by at least `gap`, within the bounds if they all fit."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    blocks: list[list[float]] = []  # values minus their distance from the lowest; each block moves as one
    for place, i in enumerate(order):
        blocks.append([values[i] - place * gap])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    placed = [_mean(block) for block in blocks for _ in block]
    most = max(low, high - gap * (len(values) - 1))
    within = [min(max(value, low), most) + place * gap for place, value in enumerate(placed)]
    found = dict(zip(order, within, strict=True))
    return [found[i] for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
