"""Report section with the results table: means, deviations over seeds and clients, and significance."""

from collections.abc import Sequence

import numpy as np

from fedloom.config.loading import flat
from fedloom.report.page.comparison import Comparison, compare_with_best
from fedloom.report.page.figure import Cell, Column, PageSection, Table
from fedloom.report.page.measures import ACCURACY, Measure, recorded
from fedloom.report.page.runs import Entry
from fedloom.report.significance import sample_std
from fedloom.report.table import MODELS, STATISTICS

COLUMNS = (
    (
        "personal_accuracy",
        "clients %",
        "mean accuracy over clients, each with its personal model; ±: sample std over seeds",
    ),
    ("personal_std", "spread", "standard deviation over clients, in percentage points"),
    ("personal_worst", "worst tenth %", "mean accuracy of the worst tenth of the clients"),
    (
        "global_accuracy",
        "global %",
        "accuracy of the global model on all clients' test samples; ±: sample std over seeds",
    ),
)


TESTED: dict[str, Measure | None] = {"personal_accuracy": ACCURACY, "global_accuracy": None}
"""Columns whose best value is bold and tested against; with the clients' measure, if single clients have one."""


def results(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Results": a table with one row per method, without columns that no method has."""
    columns = [c for c in COLUMNS if any(entry.known(c[0]) for entry in entries) or c[0] == "personal_accuracy"]
    compared = {name: compare_with_best(entries, name, over) for name, over in TESTED.items()}
    rows = [
        [
            Cell(entry.label, entry.label, badge=_badge(entry)),
            Cell(str(len(entry.runs)), len(entry.runs), "seeds " + ", ".join(str(run.seed) for run in entry.runs)),
            *(_accuracy(entry, name, compared.get(name)) for name, _, _ in columns),
            number_cell(entry.known("up_bytes"), 1e6, 3),
            number_cell(entry.known("down_bytes"), 1e6, 3),
            number_cell([float(len(run.history)) for run in entry.runs], 1, 0),
            number_cell(entry.known("seconds"), 1, 1),
        ]
        for entry in entries
    ]
    head = [
        Column("method"),
        Column("seeds", "number of runs with different seeds"),
        *(Column(name, help) for _, name, help in columns),
        Column("MB up", "sent by a client per round"),
        Column("MB down", "received by a client per round"),
        Column("rounds", "finished rounds"),
        Column("seconds", "duration of a run"),
    ]
    table = Table("results", head, rows, [entry.group for entry in entries], _note(entries, list(compared.values())))
    measures = recorded(entries)
    return PageSection("results", "Results", tables=[table, *([_measures(entries, measures)] if measures[1:] else [])])


def _badge(entry: Entry) -> str:
    """Return the state of unfinished runs and how far they got, such as `killed at round 3 of 20`."""
    left = [run for run in entry.runs if run.done is None]
    if not left:
        return ""
    rounds = sorted({len(run.history) for run in left})
    at = f"{rounds[0]} to {rounds[-1]}" if rounds[1:] else str(rounds[0])
    return f"{entry.state} at round {at} of {left[0].rounds}"


def _note(entries: Sequence[Entry], compared: Sequence[Comparison]) -> str:
    """Return the legend of the table."""
    rules = sorted({str(run.recipe["evaluation"]["summary"]) for entry in entries for run in entry.runs})
    sentences = ["Bold: best."] if any(one.best for one in compared) else []
    sentences += dict.fromkeys(sentence for one in compared for sentence in one.legend)
    if any(len(entry.runs) > 1 for entry in entries):
        sentences.append("±: sample standard deviation over seeds.")
    sentences.append(
        f"Evaluations that count for the accuracies (evaluation.summary): {', '.join(rules)}. They are not chosen by "
        "test accuracy."
    )
    if any(dict(flat(run.recipe)).get("objective.name") == "multilabel" for entry in entries for run in entry.runs):
        sentences.append("Accuracy is the share of correct decisions about single labels.")
    return " ".join(sentences)


def _accuracy(entry: Entry, name: str, compared: Comparison | None) -> Cell:
    cell = number_cell(entry.known(name), 0.01, 1, _weighted(entry, name))
    if compared is not None:
        cell.strong, cell.mark = entry.group in compared.best, compared.marks.get(entry.group, "")
        cell.title = "; ".join(filter(None, [cell.title, compared.details.get(entry.group)]))
    return cell


def _measures(entries: Sequence[Entry], measures: Sequence[Measure]) -> Table:
    """Return the table of all recorded measures: their statistics over clients beside each other."""
    rows, groups = [], []
    for entry in entries:
        for measure in measures:
            for models, title in MODELS.items():
                cells = [
                    number_cell(
                        entry.known(measure.field(which, models)), 1 / measure.scale, 1 if measure.scale > 1 else 4
                    )
                    for which in STATISTICS
                ]
                if any(cell.value is not None for cell in cells):
                    percent = " %" if measure.scale > 1 else ""
                    number = number_cell(entry.known(measure.field("clients", models)), 1, 0)
                    rows.append(
                        [Cell(entry.label, entry.label), Cell(title), Cell(measure.title + percent), *cells, number]
                    )
                    groups.append(entry.group)
    head = [
        Column("method"),
        Column("model", "clients: each with its personal model; global: the global model at each client"),
        Column("measure"),
        Column("mean", "over clients; ±: sample standard deviation over seeds"),
        Column("weighted", "mean over clients, weighted by their test samples"),
        Column("spread", "standard deviation over clients"),
        Column("worst tenth", "mean of the worst tenth of the clients"),
        Column("n", "clients for which the measure is defined"),
    ]
    return Table("measures", head, rows, groups, note="On the clients' test samples (evaluation.metrics).")


def _weighted(entry: Entry, name: str) -> str:
    """Return the text that appears over the mean accuracy over clients: its mean weighted by test samples."""
    values = entry.known("personal_weighted") if name == "personal_accuracy" else []
    return f"weighted by test samples: {100 * np.mean(values):.1f}" if values else ""


def number_cell(values: list[float], unit: float, digits: int, title: str = "") -> Cell:
    """Return a cell with the mean of some values, in a unit, and their sample deviation."""
    if not values:
        return Cell("–")
    scaled = np.array(values) / unit
    mean, std = float(scaled.mean()), sample_std(scaled.tolist())
    deviation = f"{std:,.{digits}f}"
    return Cell(
        f"{mean:,.{digits}f}", mean, title, spread=f"± {deviation}" if float(deviation.replace(",", "")) else ""
    )
