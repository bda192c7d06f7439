"""Data model of the page: sections with figures, tables and texts, as plain data for JSON."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from math import isfinite
from typing import Any, Literal

Numbers = Sequence[float | None]
# Okabe and Ito's colours, which colour-blind readers can distinguish, and two of Paul Tol's.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f5aa8", "#882255", "#999933",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
GREY = "#8a96a1"


def colour(index: int) -> str:
    """Return the colour of a method, class or client; colours repeat after ten, see `Switch.of`."""
    return COLOURS[index % len(COLOURS)]


def slug(*words: str) -> str:
    """Return a name for a figure and its file: lower case, with dashes."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def listed(names: Sequence[str], most: int = 4, last: str = ", ") -> str:
    """Return names separated by commas; of more than `most` names, the first ones and the number of the others."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return last.join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


@dataclass
class Axis:
    """An axis of a figure: its title, scale and tick labels."""

    title: str = ""
    percent: bool = False
    log: bool = False
    whole: bool = False
    """Integer ticks only (rounds)."""
    labels: list[str] | None = None
    """Tick labels of the positions 0, 1, …"""
    rows: list[str] | None = None
    """The group of each label: rows of groups that are not selected are left out."""
    bare: bool = False
    """Without ticks, labels and grid (t-SNE)."""
    range: tuple[float, float] | None = None
    """Lowest and highest value, where several figures share an axis."""


@dataclass
class Marks:
    """One series of a figure; it is hidden when one of its groups is switched off.

    Colour, dashes and symbols are those of its first group in the page's legend, if it is there.
    """

    kind: Literal["line", "bars", "dots", "heat"]
    """`heat` is one row of a heat map: `x` are columns, `y` are values."""
    name: str
    x: Numbers
    y: Numbers
    colour: str = GREY
    groups: list[str] = field(default_factory=list)
    low: Numbers | None = None
    """With `high`: the error bar of a bar."""
    high: Numbers | None = None
    bands: dict[str, tuple[Numbers, Numbers]] = field(default_factory=dict)
    """Low and high values around a line, by what they are the deviation over (`seeds`, `clients`)."""
    sizes: list[float] | None = None
    """Diameters in pixels; a single value applies to all dots."""
    text: list[str] | None = None
    """Hover text of each point."""
    words: list[int] | None = None
    """Numbers of the section's words: hover texts that several series share."""
    pale: list[bool] | None = None
    hollow: bool = False


@dataclass
class Key:
    """An entry of a figure's own legend."""

    shape: Literal["dot", "small", "ring", "bar", "pale"]
    text: str


@dataclass
class Figure:
    """A figure: one set of axes with its series."""

    name: str
    title: str
    x: Axis
    y: Axis
    marks: list[Marks]
    note: str = ""
    height: int = 340
    wide: bool = False
    square: bool = False
    choice: str = ""
    """The choice of the section with which the figure is shown; empty: always."""
    key: list[Key] = field(default_factory=list)
    row: int = 0
    """Pixels of `height` for each row of the y axis."""
    value: Axis | None = None
    """What the colours of a heat map mean."""
    family: str = ""
    """Title over small figures that belong together."""
    family_note: str = ""


@dataclass
class Column:
    """A column of a table."""

    name: str
    help: str = ""


@dataclass
class Cell:
    """A table cell: the displayed text and the value to sort by."""

    text: str
    value: float | str | None = None
    title: str = ""
    strong: bool = False
    spread: str = ""
    """A deviation, shown after the text in a smaller font."""
    mark: str = ""
    """Raised after the text, such as the sign of a significant difference."""
    badge: str = ""
    """State of a run that did not finish."""


@dataclass
class Table:
    """A sortable table; `groups` has the legend group of each row."""

    name: str
    columns: list[Column]
    rows: list[list[Cell]]
    groups: list[str] = field(default_factory=list)
    note: str = ""


@dataclass
class Switch:
    """A legend entry that switches a group on and off."""

    group: str
    name: str
    colour: str = GREY
    dash: str = DASHES[0]
    symbol: str = SYMBOLS[0]
    badge: str = ""

    @classmethod
    def of(cls, group: str, name: str, index: int, badge: str = "") -> "Switch":
        """Return the entry of a method: after ten colours, another dash and another symbol; 280 differ."""
        turn = index // len(COLOURS)
        return cls(group, name, colour(index), DASHES[turn % len(DASHES)], SYMBOLS[turn % len(SYMBOLS)], badge)


@dataclass
class PageSection:
    """A section of the page."""

    name: str
    title: str
    text: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    """Titles and preformatted texts: recipes, logs."""
    legend: list[Switch] = field(default_factory=list)
    choices: list[tuple[str, str]] = field(default_factory=list)
    """Values and names of a list to choose from; the first is chosen initially."""
    bands: list[tuple[str, str]] = field(default_factory=list)
    """Values and names of the bands around lines; the first is chosen initially."""
    words: list[str] = field(default_factory=list)
    """Hover texts that series refer to by number."""
    missing: str = ""
    """The reason why content of this section is not shown."""


@dataclass
class Page:
    """The whole page."""

    title: str
    facts: list[tuple[str, str]]
    state: str
    running: bool
    legend: list[Switch]
    sections: list[PageSection]
    top: list[str] = field(default_factory=list)
    """Groups that are selected initially; empty for all."""
    unfinished: bool = False
    """Whether some runs have not finished: they are running, or were stopped or killed or failed."""

    def to_json(self) -> dict[str, Any]:
        """Return the data for the browser, without unset and empty fields."""
        slim = _slim(self)
        assert isinstance(slim, dict)
        return slim


def _slim(value: Any) -> Any:
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, dict):
        return {k: _slim(v) for k, v in value.items() if v is not None and v is not False and v not in ([], "", {})}
    if isinstance(value, list | tuple):
        return [_slim(item) for item in value]
    return _short(value) if isinstance(value, float) else value


def _short(value: float) -> float:
    """Return an integer if the number is one, or five significant digits: most of a large page is numbers."""
    if not isfinite(value):
        return value
    return int(value) if value.is_integer() else float(f"{value:.5g}")
