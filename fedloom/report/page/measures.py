"""The figures that a report can show for every client: accuracy, and those that a run has recorded besides."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.experiment.records import LOWER_IS_BETTER, ClientRow
from fedloom.report.page.figure import Axis
from fedloom.report.page.runs import Entry
from fedloom.report.table import FIGURES, field_of


@dataclass(frozen=True)
class Measure:
    """A figure of a client's model on its test samples, and the names of its fields in records and summaries."""

    name: str
    """`accuracy`, `loss`, or one of `evaluation.metrics`."""

    @property
    def title(self) -> str:
        """The name for people."""
        return FIGURES[self.name]

    @property
    def lower(self) -> bool:
        """Whether small values are good."""
        return self.name in LOWER_IS_BETTER

    @property
    def scale(self) -> float:
        """Factor for display: accuracies are shown in percent."""
        return 100 if self.name == "accuracy" else 1

    @property
    def axis(self) -> Axis:
        """The axis of its values."""
        return Axis(self.title, percent=self.name == "accuracy")

    def field(self, which: str, models: str = "personal") -> str:
        """Return the field of a statistic over clients, see `field_of`."""
        return field_of(self.name, which, models)

    def of(self, row: ClientRow) -> float | None:
        """Return the figure of one client; None if it is unknown."""
        if self.name == "accuracy":
            return row["accuracy"]
        if self.name == "loss":
            return None if row["loss"] is None or not sum(row["total"]) else row["loss"] / sum(row["total"])
        return row.get("metrics", {}).get(self.name)

    def text(self, value: float) -> str:
        """Format a value."""
        return f"{100 * value:.1f}%" if self.name == "accuracy" else f"{self.title} {value:.4f}"


ACCURACY = Measure("accuracy")


def recorded(entries: Sequence[Entry]) -> list[Measure]:
    """Return the measures that any run has recorded; first the one by which the first run is judged."""
    fields = {name for entry in entries for run in entry.runs for record in run.tested[-1:] for name in record}
    found = [m for name in FIGURES if (m := Measure(name)) == ACCURACY or m.field("clients") in fields]
    chosen = str(entries[0].first.recipe["evaluation"].get("measure", "accuracy"))
    return sorted(found, key=lambda measure: measure.name != chosen)


def best_first(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries by the measure of the first run's recipe, best first; those without a value are last."""
    measure = recorded(entries)[0]
    sign = 1 if measure.lower else -1
    means = {entry.group: entry.known(measure.field("mean")) for entry in entries}
    return sorted(entries, key=lambda entry: sign * float(np.mean(means[entry.group] or [sign * float("inf")])))


def choices(measures: Sequence[Measure]) -> list[tuple[str, str]]:
    """Return the choices of a section that shows one measure at a time; empty if there is only one."""
    return [(measure.name, measure.title) for measure in measures] if len(measures) > 1 else []
