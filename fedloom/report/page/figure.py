"""Data model of the page: sections with figures, tables and texts, as plain data for JSON."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Numbers = Sequence[float | None]
# Okabe and Ito's colours, which colour-blind readers can distinguish, and two of Paul Tol's.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f5aa8", "#882255", "#999933",
)  # fmt: skip
GREY = "#8a96a1"


def colour(index: int) -> str:
    """Return the colour of a method, class or client; colours repeat after ten."""
    return COLOURS[index % len(COLOURS)]


def slug(*words: str) -> str:
    """Return a name for a figure and its file: lower case, with dashes."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


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
    bare: bool = False
    """Without ticks, labels and grid (t-SNE)."""


@dataclass
class Marks:
    """One series of a figure; it is hidden when one of its groups is switched off in a legend."""

    kind: Literal["line", "bars", "dots"]
    name: str
    x: Numbers
    y: Numbers
    colour: str = GREY
    groups: list[str] = field(default_factory=list)
    low: Numbers | None = None
    """With `high`: a band around a line, or the error bar of a bar."""
    high: Numbers | None = None
    sizes: list[float] | None = None
    """Diameters in pixels; a single value applies to all dots."""
    text: list[str] | None = None
    """Hover text of each point."""
    pale: list[bool] | None = None
    hollow: bool = False
    dashed: bool = False


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


@dataclass
class Table:
    """A sortable table; `groups` has the legend group of each row."""

    name: str
    columns: list[Column]
    rows: list[list[Cell]]
    groups: list[str] = field(default_factory=list)
    colours: list[str] = field(default_factory=list)
    note: str = ""


@dataclass
class Switch:
    """A legend entry that switches a group on and off."""

    group: str
    name: str
    colour: str = GREY


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
    hidden: list[str] = field(default_factory=list)
    """Groups that are initially switched off."""
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

    def to_json(self) -> dict[str, Any]:
        """Return the data for the browser, without unset and empty fields."""
        slim = _slim(asdict(self))
        assert isinstance(slim, dict)
        return slim


def _slim(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _slim(v) for k, v in value.items() if v is not None and v is not False and v not in ([], "")}
    if isinstance(value, list | tuple):
        return [_slim(item) for item in value]
    return round(value, 5) if isinstance(value, float) else value
