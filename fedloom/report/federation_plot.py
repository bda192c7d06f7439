"""Plot of a federation: one dot per client and class, whose area is the number of training samples."""

from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.dataset import Dataset
from fedloom.core.federation import Federation
from fedloom.data.federation import counts

INK, GREY, PALE, PAPER = "#22303c", "#9aa7b2", "#d9dfe4", "#ffffff"
# Wong's palette (Nature Methods 8, 2011), which colour-blind readers can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5aa8", "#8c6d31")
SHOWN = 120
LINE = 60
"""Largest number of characters in a line of the caption: wider ones would narrow the axes."""
LEGEND = 9
"""Font size of the legend in points."""


def plot_federation(dataset: Dataset, federation: Federation, path: Path | str) -> None:
    """Write a PNG that shows how many training samples of each class each client holds.

    The x axis has the clients, the y axis the classes, and a bar chart above shows each client's total. If every
    client belongs to exactly one group (a style or a domain), the colour is the group, unless the groups are the
    clients; otherwise all dots have the same colour. Newcomers are drawn as hollow dots. With more than 120 clients, an
    evenly spaced selection is drawn, and the title says so.

    Args:
        dataset: The samples, with their classes and groups.
        federation: The training and test samples of each client.
        path: The PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = counts(dataset, federation)
    shown = np.unique(np.linspace(0, len(table) - 1, min(len(table), SHOWN)).round().astype(int))
    held = table[shown]
    groups = _groups(dataset, federation, shown)
    clients, classes = held.shape
    figure = Figure(
        figsize=(min(17, max(7.2, 3.4 + 0.17 * clients)), min(13, max(4.2, 2.4 + 0.3 * classes))),
        layout="constrained",
        facecolor=PAPER,
    )
    FigureCanvasAgg(figure)
    bars, dots = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [1, max(3.0, 0.32 * min(classes, 40))]}
    )
    colours = np.array([COLOURS[g] for g in groups] if groups is not None else [COLOURS[0]] * clients)
    new = np.isin(shown, federation.newcomers)
    _draw_totals(bars, np.array([len(federation.train[client]) for client in shown]), colours, new)
    _draw_dots(dots, held, colours, new, _room(figure, clients, classes))
    _label_axes(dots, dataset, [_tick(federation.names[c]) if federation.names else str(c) for c in shown])
    _draw_legend(figure, dataset, groups, held, new)
    _title(bars, dataset.name, _caption(dataset, federation, clients))
    figure.savefig(path, dpi=160)


def _groups(dataset: Dataset, federation: Federation, shown: np.ndarray) -> np.ndarray | None:
    """Return each client's group; None if there are no groups, too many groups, or a client with several groups."""
    if dataset.groups is None or len(dataset.group_names) > len(COLOURS):
        return None
    groups = dataset.groups.numpy()
    own = [np.unique(groups[federation.train[client]]) for client in shown]
    if any(len(g) != 1 for g in own):
        return None
    found = np.array([g[0] for g in own])
    each = [dataset.group_names[g] for g in found]
    return None if each == [federation.name(int(client)) for client in shown] else found


def _room(figure: Any, clients: int, classes: int) -> float:
    """Return the diameter of the largest dot in points, chosen so that neighbouring dots barely overlap."""
    width, height = figure.get_size_inches()
    return float(min(72 * (width - 2.4) / clients, 72 * (height - 2.2) / classes, 26) * 1.05)


def _areas(held: np.ndarray, room: float, largest: int) -> np.ndarray:
    # The lower bound keeps a single sample visible.
    return np.maximum(held / largest * room**2, 1.2)


def _draw_dots(axes: Any, held: np.ndarray, colours: np.ndarray, new: np.ndarray, room: float) -> None:
    client, label = np.nonzero(held)
    hollow = new[client]
    areas = _areas(held[client, label], room, int(held.max()))
    for mask, face in ((~hollow, colours[client]), (hollow, np.full(len(client), PAPER))):
        axes.scatter(
            client[mask],
            label[mask],
            s=areas[mask],
            c=face[mask],
            edgecolors=colours[client][mask],
            linewidths=np.where(hollow[mask], 1.2, 0.4),
            alpha=0.88,
            zorder=2,
        )
    axes.set_ylim(-0.7, held.shape[1] - 0.3)
    axes.set_xlim(-0.8, held.shape[0] - 0.2)
    axes.grid(color=PALE, linewidth=0.5, alpha=0.6, zorder=0)
    _clean(axes)


def _draw_totals(axes: Any, totals: np.ndarray, colours: np.ndarray, new: np.ndarray) -> None:
    axes.bar(
        np.arange(len(totals)),
        totals,
        width=0.62,
        color=np.where(new, PAPER, colours),
        edgecolor=colours,
        linewidth=0.8,
        alpha=0.88,
    )
    axes.set_ylabel("samples", color=INK, fontsize=9)
    axes.set_ylim(0, max(1, totals.max()) * 1.12)
    axes.yaxis.set_major_locator(_ticks(3))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=PALE, linewidth=0.5)
    axes.set_axisbelow(True)
    _clean(axes)


def _label_axes(axes: Any, dataset: Dataset, clients: list[str]) -> None:
    step = max(1, -(-len(clients) // 25))
    longest = max(map(len, clients))
    tilt = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if longest * len(clients[::step]) > 100 else {}
    axes.set_xticks(np.arange(0, len(clients), step), clients[::step], **tilt)
    every = max(1, -(-len(dataset.classes) // 34))
    axes.set_yticks(np.arange(0, len(dataset.classes), every), dataset.classes[::every])
    axes.set_xlabel("client", color=INK, fontsize=9)
    axes.set_ylabel("class", color=INK, fontsize=9)


def _tick(name: str) -> str:
    """Return a client's name as the label of a tick: shortened, and without the mark of Matplotlib's formulas."""
    return (name if len(name) <= 24 else f"{name[:23]}…").replace("$", r"\$")


def _draw_legend(figure: Any, dataset: Dataset, groups: np.ndarray | None, held: np.ndarray, new: np.ndarray) -> None:
    from matplotlib.lines import Line2D

    def dot(label: str, face: str, edge: str, diameter: float) -> Line2D:
        return Line2D(
            [], [], linestyle="", marker="o", markersize=diameter, color=face, markeredgecolor=edge, label=label
        )

    room, largest = _room(figure, *held.shape), int(held.max())
    entries = []
    for group in [] if groups is None else np.unique(groups):
        entries.append(dot(dataset.group_names[group], COLOURS[group], COLOURS[group], 8))
    if new.any():
        entries.append(dot("newcomer", PAPER, INK, 8))
    diameter = 0.0
    for count in sorted({_round(largest), _round(largest / 4), _round(largest / 20)}, reverse=True):
        area = float(_areas(np.array(count), room, largest))
        entries.append(dot(f"{count:,} sample{'' if count == 1 else 's'}", GREY, GREY, area**0.5))
        diameter = max(diameter, area**0.5)
    figure.legend(  # lengths in multiples of the font size
        handles=entries, loc="outside right center", frameon=False, fontsize=LEGEND, labelcolor=INK,
        labelspacing=max(1.1, diameter / LEGEND - 0.6), handlelength=max(2.0, diameter / LEGEND),
    )  # fmt: skip


def _round(value: float) -> int:
    """Round down to one significant digit, at least 1."""
    if value < 1:
        return 1
    power = 10 ** int(np.log10(value))
    return int(value // power * power)


def _title(axes: Any, name: str, caption: str) -> None:
    above = {"xycoords": "axes fraction", "textcoords": "offset points", "color": INK}
    axes.annotate(name, (0, 1), (0, 27 + 13 * caption.count("\n")), fontsize=15, fontweight="bold", **above)
    axes.annotate(caption, (0, 1), (0, 11), fontsize=9.5, **above)


def _caption(dataset: Dataset, federation: Federation, clients: int) -> str:
    held_back = {"validation": federation.validation, "test": federation.test}  # clients may share them
    numbers = [f"{sum(map(len, federation.train)):,} training"]
    numbers += [f"{n:,} {kind}" for kind, parts in held_back.items() if (n := len(np.unique(np.concatenate(parts))))]
    new = len(federation.newcomers)
    words = f"{len(dataset.classes)} classes, {len(federation) - new:,} clients"
    words += f" + {new:,} newcomer{'s' if new > 1 else ''}" if new else ""
    words += "" if clients == len(federation) else f" ({clients} of them shown)"
    samples = f"{' + '.join(numbers)} samples,"
    return f"{samples}{' ' if len(samples + words) < LINE else chr(10)}{words}"


def _ticks(count: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=True)


def _clean(axes: Any) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
