"""Heat map of methods by clients or classes: readable with many methods, where dots would cover each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.report.page.figure import Axis, Figure, Marks
from fedloom.report.page.runs import Entry

FEW = 4
"""With at most this many methods, bars and dots are readable."""
ROW = 24
"""Pixels of a row."""
AROUND = 96
"""Pixels above and below the rows."""


@dataclass
class HeatRow:
    """A method's values, by column; columns without a value are left out."""

    entry: Entry
    columns: list[int]
    values: list[float]
    words: list[int] | None = None
    """Numbers of the section's hover texts."""
    text: list[str] | None = None


def heat(
    name: str, title: str, rows: Sequence[HeatRow], columns: Axis, value: Axis, note: str, *, wide: bool = False,
    choice: str = "",
) -> Figure:  # fmt: skip
    """Return a heat map with a row per method, the first one at the top."""
    marks = [
        Marks("heat", row.entry.label, [float(c) for c in row.columns], row.values, groups=[row.entry.group],
              words=row.words, text=row.text)
        for row in rows
    ]  # fmt: skip
    shown = list(reversed(rows))
    methods = Axis(labels=[row.entry.label for row in shown], rows=[row.entry.group for row in shown])
    return Figure(
        name, title, columns, methods, marks, note, AROUND + ROW * len(rows), wide, choice=choice, row=ROW, value=value
    )
