"""Report section with the results table: means and standard deviations over seeds and over clients."""

from collections.abc import Sequence

import numpy as np

from fedloom.report.page.figure import Cell, Column, PageSection, Table, colour
from fedloom.report.page.runs import Entry

COLUMNS = (
    ("personal_accuracy", "clients %", "mean accuracy over clients, each with its personal model; ± over seeds"),
    ("personal_std", "spread", "standard deviation over clients, in percentage points"),
    ("personal_worst", "worst tenth %", "mean accuracy of the worst tenth of the clients"),
    ("global_accuracy", "global %", "accuracy of the global model on all clients' test samples; ± over seeds"),
    ("newcomer_accuracy", "newcomers %", "mean accuracy over clients held out of training"),
)


def results(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Results": a table with one row per method, without columns that no method has."""
    columns = [c for c in COLUMNS if any(entry.known(c[0]) for entry in entries) or c[0] == "personal_accuracy"]
    rows = [
        [
            Cell(entry.label, entry.label),
            Cell(str(len(entry.runs)), len(entry.runs), "seeds " + ", ".join(str(run.seed) for run in entry.runs)),
            *(_number(entry.known(name), 0.01, 1) for name, _, _ in columns),
            _number(entry.known("up_bytes"), 1e6, 3),
            _number(entry.known("down_bytes"), 1e6, 3),
            _number([float(len(run.history)) for run in entry.runs], 1, 0),
            _number(entry.known("seconds"), 1, 1),
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
    rules = sorted({str(run.recipe["evaluation"]["summary"]) for entry in entries for run in entry.runs})
    table = Table(
        "results", head, rows, [entry.group for entry in entries], [colour(i) for i in range(len(entries))],
        note=f"Evaluations that count for the accuracies (evaluation.summary): {', '.join(rules)}. They are not chosen "
        "by test accuracy. Click a column header to sort.",
    )  # fmt: skip
    return PageSection("results", "Results", tables=[table])


def _number(values: list[float], unit: float, digits: int) -> Cell:
    if not values:
        return Cell("–")
    scaled = np.array(values) / unit
    mean, std = float(scaled.mean()), float(scaled.std())
    return Cell(f"{mean:,.{digits}f}" + (f" ± {std:,.{digits}f}" if len(values) > 1 and std else ""), mean)
