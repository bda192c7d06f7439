"""Report section with the distribution of a measure over clients, also against the clients' sizes."""

from collections.abc import Sequence

import numpy as np

from fedloom.experiment.records import ClientRow, client_name, client_tick
from fedloom.report.page.figure import Axis, Figure, Key, Marks, PageSection, colour, slug
from fedloom.report.page.heat import FEW, HeatRow, heat
from fedloom.report.page.measures import ACCURACY, Measure, choices, recorded
from fedloom.report.page.runs import Entry

BARS = 400
"""Largest number of clients in a figure with a bar or column per client; of more, an even selection is drawn."""
Numbered = list[tuple[int, Entry]]
Found = list[tuple[int, ClientRow, float]]
"""Seed, row and figure of each client that has one."""


class Words:
    """Hover texts of clients; methods that were trained on the same clients share them."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def of(self, seed: int, row: ClientRow) -> int:
        """Return the number of a client's text."""
        text = f"{client_name(row)} (seed {seed})<br>{row['train']:,} training samples"
        return self.known.setdefault(text, len(self.known))


def clients(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Clients": each client's figure as a dot, in a row or bar, and against its size."""
    section = PageSection("clients", "Clients", "How results are distributed over clients, and which clients do worst.")
    shown: list[Measure] = []
    words = Words()
    for measure in recorded(entries):
        known = [(i, entry) for i, entry in enumerate(entries) if _rows(entry, measure)]
        if known:
            shown.append(measure)
            section.figures += _figures(known, measure, words)
    if any(run.newcomers for entry in entries for run in entry.runs):
        section.text += " Newcomers, which took no part in training, are left out; see section Newcomers."
    section.words = list(words.known)
    section.choices = choices(shown)
    if not shown:
        section.missing = "Results per client are available when a run has finished."
    return section


def _figures(known: Numbered, measure: Measure, words: Words) -> list[Figure]:
    strips = _strips(known, measure, words)
    sizes = len({row["train"] for _, entry in known for _, row, _ in _rows(entry, measure) if row["train"]}) > 1
    if len(known) > FEW:
        strips.wide = True
        return [strips, _by_client(known, measure, words), *(_panels(known, measure, words) if sizes else [])]
    bars = [_bars(i, entry, measure, words, wide=len(known) == 1) for i, entry in known]
    return [strips, *([_against_size(known, measure, words)] if sizes else []), *bars]


def _rows(entry: Entry, measure: Measure) -> Found:
    each = [(run.seed, row, measure.of(row)) for run in entry.runs for row in run.clients]
    return [(seed, row, value) for seed, row, value in each if value is not None]


def _name(name: str, measure: Measure, *more: str) -> str:
    """Return the name of a figure and its file; those of the accuracy have no suffix."""
    return slug(name, *more) if measure == ACCURACY else slug(name, *more, measure.name)


def _strips(known: Numbered, measure: Measure, words: Words) -> Figure:
    """Draw a row of dots per method, with the mean and the worst tenth highlighted."""
    marks: list[Marks] = []
    rows = known[::-1]
    for height, (i, entry) in enumerate(rows):
        found = _rows(entry, measure)
        jitter = np.random.default_rng(0).uniform(-0.24, 0.24, len(found))
        x, y = [measure.scale * value for *_, value in found], [round(height + float(j), 2) for j in jitter]
        who = [words.of(seed, row) for seed, row, _ in found]
        marks.append(Marks("dots", entry.label, x, y, colour(i), [entry.group], sizes=[6], words=who, pale=[True]))
        marks += _large(i, entry, height, measure, "worst", "mean of the worst tenth", hollow=True)
        marks += _large(i, entry, height, measure, "mean", "mean over clients")
    row = 44 if len(rows) <= FEW else 30
    return Figure(
        _name("clients-spread", measure), f"{_capital(measure)} of each client", measure.axis,
        Axis(labels=[entry.label for _, entry in rows], rows=[entry.group for _, entry in rows]), marks,
        height=max(240, 110 + row * len(rows)), choice=measure.name, row=row if len(rows) > FEW else 0,
        key=[
            Key("small", "a client (all seeds)"), Key("dot", "mean over clients"),
            Key("ring", "mean of the worst tenth of the clients"),
        ],
    )  # fmt: skip


def _capital(measure: Measure) -> str:
    return measure.title[0].upper() + measure.title[1:]


def _large(
    i: int, entry: Entry, height: int, measure: Measure, which: str, what: str, hollow: bool = False
) -> list[Marks]:
    values = entry.known(measure.field(which))
    if not values:
        return []
    mean = float(np.mean(values))
    text = [f"{entry.label}<br>{what}: {measure.text(mean)}"]
    place = ([measure.scale * mean], [float(height)])
    return [Marks("dots", what, *place, colour(i), [entry.group], sizes=[13], text=text, hollow=hollow)]


def _by_size(i: int, entry: Entry, measure: Measure, words: Words) -> Marks:
    found = [one for one in _rows(entry, measure) if one[1]["train"]]
    x, y = [float(row["train"]) for _, row, _ in found], [measure.scale * value for *_, value in found]
    who = [words.of(seed, row) for seed, row, _ in found]
    return Marks("dots", entry.label, x, y, colour(i), [entry.group], sizes=[7], words=who)


def _against_size(known: Numbered, measure: Measure, words: Words) -> Figure:
    return Figure(
        _name("clients-size", measure), f"{_capital(measure)} against size",
        Axis("training samples of the client", log=True), measure.axis,
        [_by_size(i, entry, measure, words) for i, entry in known], "All clients of all seeds.",
        height=max(300, 110 + 44 * len(known)), choice=measure.name,
    )  # fmt: skip


def _panels(known: Numbered, measure: Measure, words: Words) -> list[Figure]:
    """Draw the measure against size in one small figure per method, all with the same axes."""
    each = [(i, entry, _by_size(i, entry, measure, words)) for i, entry in known]
    sizes = [v for *_, marks in each for v in marks.x if v is not None]
    values = [v for *_, marks in each for v in marks.y if v is not None]
    if not sizes:
        return []
    margin = 0.05 * (max(values) - min(values)) or 0.05
    x = Axis(log=True, range=(min(sizes) / 1.2, max(sizes) * 1.2))
    y = Axis(percent=measure.axis.percent, range=(min(values) - margin, max(values) + margin))
    return [
        Figure(
            _name("clients-size", measure, str(i), entry.label), entry.label, x, y, [marks], height=170, square=True,
            choice=measure.name, family=f"{_capital(measure)} against size",
            family_note=f"A dot is a client of a seed: {measure.title} (vertical) by number of training samples "
            "(horizontal). All figures have the same axes.",
        )
        for i, entry, marks in each
    ]  # fmt: skip


def _by_client(known: Numbered, measure: Measure, words: Words) -> Figure:
    """Draw methods by clients as a heat map, with the clients that do worst on average first."""
    seed = known[0][1].first.seed
    found = {
        entry.group: {row["client"]: (row, value) for one, row, value in _rows(entry, measure) if one == seed}
        for _, entry in known
    }
    every: dict[int, ClientRow] = {}
    for rows in found.values():
        every |= {client: row for client, (row, _) in rows.items()}
    means = {c: float(np.mean([rows[c][1] for rows in found.values() if c in rows])) for c in every}
    order = sorted(every, key=lambda client: (-1 if measure.lower else 1) * means[client])
    shown = _some(len(order))
    columns = [order[place] for place in shown]
    rows_drawn = []
    for _, entry in known:
        mine = [(place, found[entry.group][c]) for place, c in enumerate(columns) if c in found[entry.group]]
        values = [measure.scale * value for _, (_, value) in mine]
        who = [words.of(seed, row) for _, (row, _) in mine]
        rows_drawn.append(HeatRow(entry, [place for place, _ in mine], values, who))
    some = f"{len(shown)} of {len(order)} clients. " if len(shown) < len(order) else ""
    axis = Axis("client", labels=[client_tick(every[c]) for c in columns])
    note = f"{some}Clients with the worst mean over methods are on the left. Seed {seed}."
    name, title = _name("clients-heat", measure), f"{_capital(measure)} by method and client"
    return heat(name, title, rows_drawn, axis, measure.axis, note, wide=True, choice=measure.name)


def _some(count: int) -> list[int]:
    """Return an even selection of at most `BARS` positions."""
    return np.unique(np.linspace(0, count - 1, min(count, BARS)).round().astype(int)).tolist()


def _bars(i: int, entry: Entry, measure: Measure, words: Words, *, wide: bool) -> Figure:
    """Draw the clients of one seed as bars, the worst first."""
    found = _rows(entry, measure)
    seed, sign = found[0][0], -1 if measure.lower else 1
    rows = sorted((one for one in found if one[0] == seed), key=lambda one: sign * one[2])
    behind = max(1, len(rows) // 10)
    shown = _some(len(rows))
    some = f", {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
    marks = Marks(
        "bars", entry.label, [float(x) for x in range(len(shown))], [measure.scale * rows[r][2] for r in shown],
        colour(i), [entry.group], words=[words.of(seed, rows[r][1]) for r in shown],
        pale=[r >= behind for r in shown],
    )  # fmt: skip
    first = "highest" if measure.lower else "lowest"
    return Figure(
        _name("clients", measure, str(i), entry.label), entry.label,
        Axis("client", labels=[client_tick(rows[r][1]) for r in shown]), measure.axis, [marks],
        f"Clients of seed {seed}, {first} {measure.title} first{some}.", 250, wide,
        choice=measure.name, key=[Key("bar", "worst tenth"), Key("pale", "other clients")],
    )  # fmt: skip
