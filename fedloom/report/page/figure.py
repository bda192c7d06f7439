"""What is on the page: sections with figures, tables and texts, as plain data that JSON can hold."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Numbers = Sequence[float | None]
# Okabe and Ito's colours, which colour-blind readers tell apart, and two of Paul Tol's.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f5aa8", "#882255", "#999933",
)  # fmt: skip
GREY = "#8a96a1"


def colour(index: int) -> str:
    """One per method, class or client, over and over."""
    return COLOURS[index % len(COLOURS)]


def slug(*words: str) -> str:
    """A name for a figure and its file."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


@dataclass
class Axis:
    """An axis: what it shows, and how."""

    title: str = ""
    percent: bool = False
    log: bool = False
    whole: bool = False
    """Whole numbers only (rounds)."""
    labels: list[str] | None = None
    """Names of the positions 0, 1, …"""
    bare: bool = False
    """Nothing to read on it (t-SNE)."""


@dataclass
class Marks:
    """One series. It is hidden when one of its groups is switched off in a legend."""

    kind: Literal["line", "bars", "dots"]
    name: str
    x: Numbers
    y: Numbers
    colour: str = GREY
    groups: list[str] = field(default_factory=list)
    low: Numbers | None = None
    """With `high`: a band around a line, the reach of a bar's error."""
    high: Numbers | None = None
    sizes: list[float] | None = None
    """Diameters in pixels; one for all where there is a single one."""
    text: list[str] | None = None
    """What hovering says of each point."""
    pale: list[bool] | None = None
    hollow: bool = False
    dashed: bool = False


@dataclass
class Figure:
    """One set of axes."""

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
    """What stands in a table, and by what it is sorted."""

    text: str
    value: float | str | None = None
    title: str = ""


@dataclass
class Table:
    """Rows that can be sorted; `groups` are the rows', for legends."""

    name: str
    columns: list[Column]
    rows: list[list[Cell]]
    groups: list[str] = field(default_factory=list)
    colours: list[str] = field(default_factory=list)
    note: str = ""


@dataclass
class Switch:
    """A legend's entry, which switches a group on and off."""

    group: str
    name: str
    colour: str = GREY


@dataclass
class PageSection:
    """A part of the page."""

    name: str
    title: str
    text: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    """A title, and text as it is: recipes, logs."""
    legend: list[Switch] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    """Groups that are switched off at first."""
    missing: str = ""
    """Why something is not shown."""


@dataclass
class Page:
    """Everything."""

    title: str
    facts: list[tuple[str, str]]
    state: str
    running: bool
    legend: list[Switch]
    sections: list[PageSection]

    def to_json(self) -> dict[str, Any]:
        """As the browser gets it; what is not set is left out."""
        slim = _slim(asdict(self))
        assert isinstance(slim, dict)
        return slim


def _slim(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _slim(v) for k, v in value.items() if v is not None and v is not False and v not in ([], "")}
    if isinstance(value, list | tuple):
        return [_slim(item) for item in value]
    return round(value, 5) if isinstance(value, float) else value
