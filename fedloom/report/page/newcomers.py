"""Report section with the accuracies of newcomers, the clients held out of training."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.experiment.records import NewcomerRow
from fedloom.experiment.run_folder import read_newcomers
from fedloom.report.page.figure import Cell, Column, PageSection, Table, listed
from fedloom.report.page.results import number_cell
from fedloom.report.page.runs import Entry
from fedloom.report.table import NO_REPRESENTATION, labelled_column, mean_and_worst

OWN = (
    "On the newcomers' own test samples. If the method gives clients personal models, a newcomer's model is made by "
    "one update on all its training samples; otherwise it is the global model."
)
OVER_SEEDS = "±: sample standard deviation over seeds."
COLUMNS = (
    ("newcomer_accuracy", "own model %", "mean over newcomers of the accuracies of these models"),
    ("newcomer_std", "spread", "standard deviation over newcomers, in percentage points"),
    ("newcomer_global_accuracy", "global model %", "accuracy of the global model as it is, mean over newcomers"),
)


def newcomers(entries: Sequence[Entry]) -> PageSection | None:
    """Return the section "Newcomers": with each method, and with few labelled samples; None if there are none."""
    numbers = sorted({run.newcomers for entry in entries for run in entry.runs if run.newcomers})
    if not numbers:
        return None
    section = PageSection(
        "newcomers", "Newcomers",
        f"Newcomers are clients held out of training (data.newcomers), here {listed([str(n) for n in numbers])}. The "
        "clients' accuracies in other sections leave them out.",
    )  # fmt: skip
    section.tables = _few_labels(entries)
    if any(entry.known(name) for entry in entries for name, *_ in COLUMNS):
        section.tables.append(_with_the_method(entries, few_labels=bool(section.tables)))
    else:
        section.missing = "Accuracies with each method are available after an evaluation."
    return section


def _with_the_method(entries: Sequence[Entry], *, few_labels: bool) -> Table:
    shown = COLUMNS[:-1] if few_labels else COLUMNS  # the table above has the global model, and its worst newcomer
    columns = [column for column in shown if any(entry.known(column[0]) for entry in entries)]
    rows = [
        [Cell(entry.label, entry.label), *(number_cell(entry.known(name), 0.01, 1) for name, *_ in columns)]
        for entry in entries
    ]
    head = [Column("method"), *(Column(name, help) for _, name, help in columns)]
    sentences = [OWN]
    if few_labels:
        sentences.append("In the table above, all methods get the same classifier, fitted on as many labelled samples.")
    if any(len(entry.runs) > 1 for entry in entries):
        sentences.append(OVER_SEEDS)
    return Table("newcomers-method", head, rows, [entry.group for entry in entries], " ".join(sentences))


def _few_labels(entries: Sequence[Entry]) -> list[Table]:
    """Return a table for each comparison that tested newcomers with few labelled samples (`compare.newcomers`)."""
    runs = {run.path.resolve(): (entry, run.seed) for entry in entries for run in entry.runs}
    tables: list[Table] = []
    for folder in dict.fromkeys(path.parent for path in runs):
        found = read_newcomers(folder)
        known = {path.name: entry for path, (entry, _) in runs.items() if path.parent == folder}
        seeds = {seed for path, (_, seed) in runs.items() if path.parent == folder}
        rows = [
            row for row in (found["rows"] if found else ())
            if row["seed"] in seeds and (row["label"] == "alone" or row.get("run") in known)
        ]  # fmt: skip
        if found and rows:
            tables.append(_comparison(folder, len(tables), rows, known, found["newcomers"], found["head"]))
    return tables


def _comparison(
    folder: Path, number: int, rows: Sequence[NewcomerRow], known: dict[str, Entry], count: int, head: str
) -> Table:
    groups: dict[str, list[NewcomerRow]] = {}
    titles = {"": NO_REPRESENTATION}
    for row in rows:
        entry = known.get(row.get("run", ""))
        group = entry.group if entry else ""
        titles[group] = entry.label if entry else NO_REPRESENTATION
        groups.setdefault(group, []).append(row)
    counts = sorted({row["labelled"] for row in rows})
    cells = [
        [Cell(titles[group], titles[group]), *(_cell([r for r in own if r["labelled"] == n]) for n in counts)]
        for group, own in groups.items()
    ]
    few = listed([str(n) for n in counts if n], last=" or ")
    who = f"{count} newcomer{'' if count == 1 else 's'}"
    note = (
        f"Mean accuracy over {who} and, in brackets, of the worst, in %, on their own test samples. {few} labelled: "
        f"each newcomer fits a classifier ({head}) on the frozen representation of the method, on this many of its "
        "training samples; trained alone, it trains the whole network on them. Global model as it is: without any of "
        "the newcomer's samples. Methods that share no representation have no row."
    )
    if len({row["seed"] for row in rows}) > 1:
        note += f" {OVER_SEEDS}"
    helps = {n: f"classifier fitted on {n} labelled samples of each newcomer" for n in counts if n}
    columns = [Column("representation"), *(Column(labelled_column(n), helps.get(n, "not adapted")) for n in counts)]
    name = f"newcomers-{number}" if number else "newcomers"
    return Table(name, columns, cells, list(groups), f"{folder.name}: {note}" if number else note)


def _cell(rows: Sequence[NewcomerRow]) -> Cell:
    known = [row["mean"] for row in rows if row["mean"] is not None]
    return Cell(mean_and_worst(rows), float(np.mean(known)) if known else None)
