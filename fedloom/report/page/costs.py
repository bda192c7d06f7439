"""Report section with costs: transferred bytes against accuracy, and time per round."""

from collections.abc import Sequence

import numpy as np

from fedloom.report.page.curves import mean_by_round
from fedloom.report.page.figure import Axis, Figure, Marks, PageSection, colour
from fedloom.report.page.runs import Entry


def costs(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Cost": traffic per client against accuracy, and seconds per round."""
    traffic = [_traffic(i, entry) for i, entry in enumerate(entries)]
    seconds = [
        Marks("line", entry.label, *mean_by_round(entry, "train_seconds"), colour(i), [entry.group])
        for i, entry in enumerate(entries)
    ]
    figures = [
        Figure(
            "cost-bytes", "Accuracy against bytes", Axis("cumulative MB per client, up and down"),
            Axis("accuracy of personal models", percent=True), [m for m in traffic if m.x],
            "For a client that takes part in every round. A method that sends no messages stays at 0.",
        ),
        Figure(
            "cost-time", "Time per round", Axis("round", whole=True), Axis("seconds"), [m for m in seconds if m.x],
            "Training and aggregation, without evaluation. The first round includes start-up.",
        ),
    ]  # fmt: skip
    figures = [figure for figure in figures if figure.marks]
    return PageSection("costs", "Cost", figures=figures, missing="" if figures else "No round has finished yet.")


def _traffic(i: int, entry: Entry) -> Marks:
    """Return the line of accuracy over the bytes transferred up to that round, as means over seeds."""
    up, down = mean_by_round(entry, "up_bytes", 1e-6), mean_by_round(entry, "down_bytes", 1e-6)
    total = np.cumsum(np.array(up[1], float) + np.array(down[1], float)).tolist()
    sent = dict(zip(up[0], total, strict=True))
    rounds, accuracy = mean_by_round(entry, "personal_accuracy", 100)
    text = [
        f"{entry.label}<br>round {r:.0f}: {a:.1f}%<br>{sent[r]:.3g} MB" for r, a in zip(rounds, accuracy, strict=True)
    ]
    return Marks("line", entry.label, [sent[r] for r in rounds], accuracy, colour(i), [entry.group], text=text)
