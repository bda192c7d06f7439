"""Pictures of the papers' figures from stored results: `fedloom reproduce --figures`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from fedloom.report.paper.panels import Panel, Series, draw
from fedloom.studies.comparison import Line, changes_in_words
from fedloom.studies.schema import BEST, Picture, Table

FOLDER = "figures"
"""Folder of pictures, next to the pages of the papers."""
SUFFIX = ".svg"
LABELS = {
    "personal_accuracy": "accuracy of personal models (%)",
    "personal_weighted": "accuracy over all test samples (%)", "global_accuracy": "accuracy of the global model (%)",
    "global_mean_accuracy": "mean accuracy of the global model (%)", "loss": "training loss",
    "newcomer_global_accuracy": "accuracy on newcomers (%)", "distance": "L2 distance of output layers",
}  # fmt: skip
GREEK = {"alpha": "α", "beta": "β"}
UNSCALED = ("loss", "distance")
"""Endings of metrics that are not shares."""


def pictures_of(name: str, table: Table) -> list[Picture]:
    """Return the pictures that a table declares; if none, its curves by round."""
    file = name.removesuffix(".yaml").replace("/", "-")
    return table.pictures or [Picture(name=file, title=table.title, kind="rounds")]


def shown(picture: Picture, lines: Iterable[Line]) -> list[Line]:
    """Return the lines of a picture's columns that have something to draw; one value of an axis is not a line."""
    found = [line for line in lines if line.results and _is_at(line, picture)]
    if picture.kind != "axis":
        return [line for line in found if any(_curve(line, name) for name in _measures(picture, line))]
    found = [line for line in found if line.here is not None]
    values = {line.cell.column.at[picture.axis] for line in found if picture.axis is not None}
    return found if len(values) > 1 else []


def lacks(picture: Picture, lines: Iterable[Line]) -> str:
    """Return why a picture cannot be drawn: no run is stored, no curves, or one value of its axis only."""
    found = [line for line in lines if line.here is not None and _is_at(line, picture)]
    values = sorted({line.cell.column.at[picture.axis] for line in found}, key=str) if picture.axis else []
    if values:
        return f"only {picture.axis} = {values[0]} was run"
    return "the stored results have no such curves" if found else "not run yet"


def panels_of(picture: Picture, lines: Iterable[Line]) -> list[Panel]:
    """Return what a picture shows of the stored results; empty if there is nothing to draw."""
    drawn = shown(picture, lines)
    make = {"rounds": _rounds, "axis": _along_axis, "bytes": _by_bytes}[picture.kind]
    return make(picture, drawn) if drawn else []


def caption(picture: Picture, lines: Iterable[Line]) -> str:
    """Return a picture's caption: what it shows, how many seeds, and what differs from the paper's setting."""
    drawn = shown(picture, lines)
    seeds = sorted({len(line.results) for line in drawn})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    words = [f"**{picture.title}.** {count} seed{'s' * (seeds[-1] > 1)}."]
    if seeds[-1] > 1:
        words.append("Bands and bars: ± one sample standard deviation over seeds.")
    changed: dict[str, list[str]] = {}
    for line in drawn:
        if line.changes:
            changed.setdefault(changes_in_words(line.changes, line.cell), []).append(line.cell.name)
    words += [f"Shortened: {', '.join(dict.fromkeys(names))} ({how})." for how, names in changed.items()]
    return " ".join([*words, *[picture.note] * bool(picture.note)])


def write_pictures(tables: dict[str, Table], lines: Sequence[Line], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the pictures of some tables.

    Args:
        tables: The tables by name.
        lines: The lines of these tables.
        folder: Folder of the pictures.

    Returns:
        The written files, and the titles of the other pictures, with the reason and the command.

    Raises:
        UserError: A file cannot be written.
    """
    written, lacking = [], []
    for name, table in tables.items():
        own = [line for line in lines if line.cell.table == name]
        for picture in pictures_of(name, table):
            if panels := panels_of(picture, own):
                folder.mkdir(parents=True, exist_ok=True)
                draw(panels, folder / (picture.name + SUFFIX))
                written.append(folder / (picture.name + SUFFIX))
            else:
                lacking.append(f"{picture.title}: {lacks(picture, own)} (fedloom reproduce {name})")
    return written, lacking


def _is_at(line: Line, picture: Picture) -> bool:
    return all(line.cell.column.at.get(axis) == value for axis, value in picture.at.items())


def _measures(picture: Picture, line: Line) -> list[str]:
    return picture.measures or [line.cell.measure.removesuffix(BEST)]


def _scale(name: str) -> float:
    return 1 if name.endswith(UNSCALED) else 100


def _curve(line: Line, name: str) -> dict[int, list[float]]:
    """Return the values of all seeds in each round that all of them have stored."""
    curves = [dict(result.curve.get(name, ())) for result in line.results]
    known = [curve for curve in curves if curve]
    rounds = sorted(set.intersection(*map(set, known))) if known else []
    return {number: [_scale(name) * curve[number] for curve in known] for number in rounds}


def _series(
    label: str, points: Sequence[tuple[float, Sequence[float]]], published: Sequence[tuple[float, float]] = ()
) -> Series:
    x = [at for at, _ in points]
    y = [mean(values) for _, values in points]
    several = all(len(values) > 1 for _, values in points)
    return Series(label, x, y, [stdev(values) for _, values in points] if several else [], published)


def _rounds(picture: Picture, lines: Sequence[Line]) -> list[Panel]:
    """Return a panel for each column (or row, if columns are the lines) and measure."""
    found = []
    for title, mine in _grouped(lines, picture.lines == "rows").items():
        for name in dict.fromkeys(name for line in mine.values() for name in _measures(picture, line)):
            series = [
                _series(label, list(curve.items()), _published_at_end(line, name, max(curve)))
                for label, line in mine.items()
                if name in _measures(picture, line) and (curve := _curve(line, name))
            ]
            if series:
                found.append(Panel(title, picture.x, LABELS.get(name, name), series))
    return found


def _grouped(lines: Sequence[Line], by_column: bool) -> dict[str, dict[str, Line]]:
    """Return the lines of each panel by label."""
    found: dict[str, dict[str, Line]] = {}
    for line in lines:
        column, row = _place(line, lines), line.cell.name
        title, label = (column, row) if by_column else (row, column)
        found.setdefault(title, {})[label] = line
    return found


def _published_at_end(line: Line, name: str, last: float) -> list[tuple[float, float]]:
    is_final = name == line.cell.measure and line.cell.column.round is None
    return [(last, line.cell.printed)] if is_final and line.cell.printed is not None else []


def _along_axis(picture: Picture, lines: Sequence[Line]) -> list[Panel]:
    """Return one panel: final figures of each row along an axis."""
    assert picture.axis is not None
    rows: dict[str, dict[float, Line]] = {}
    for line in lines:
        rows.setdefault(line.cell.name, {})[float(line.cell.column.at[picture.axis])] = line
    series = [
        _series(
            label,
            [(x, line.figures) for x, line in sorted(of_row.items())],
            [(x, line.cell.printed) for x, line in sorted(of_row.items()) if line.cell.printed is not None],
        )
        for label, of_row in rows.items()
    ]
    return [Panel("", picture.x, _figure_label(lines[0]), series)]


def _by_bytes(picture: Picture, lines: Sequence[Line]) -> list[Panel]:
    """Return curves by the megabytes that a client has sent and received; methods without messages are left out."""
    found = []
    for title, mine in _grouped(lines, by_column=True).items():
        for name in dict.fromkeys(name for line in mine.values() for name in _measures(picture, line)):
            series = []
            for label, line in mine.items():
                if (curve := _curve(line, name)) and (each := _bytes(line) / 1e6):
                    series.append(_series(label, [(each * number, values) for number, values in curve.items()], []))
            found.append(Panel(title, picture.x, LABELS.get(name, name), series, log=True))
    return found


def _bytes(line: Line) -> float:
    """Return what a client sends and receives in a round: recorded in the run, or counted for older results."""
    recorded = [result.costs["up_bytes"] + result.costs["down_bytes"] for result in line.results if result.costs]
    if recorded:
        return mean(recorded)
    from fedloom.studies.cost import message_bytes

    return sum(message_bytes(line.cell.recipe()))


def _figure_label(line: Line) -> str:
    return LABELS.get(line.cell.measure, line.cell.measure)


def _place(line: Line, lines: Sequence[Line]) -> str:
    """Return a column's name by the axes on which the columns differ; by all axes if there is one column."""
    places = [other.cell.column.at for other in lines]
    differ = [axis for axis, value in line.cell.column.at.items() if any(at.get(axis) != value for at in places)]
    at = {axis: line.cell.column.at[axis] for axis in differ or line.cell.column.at}
    return ", ".join(v if isinstance(v, str) else f"{GREEK.get(axis, axis)} = {v:g}" for axis, v in at.items())
