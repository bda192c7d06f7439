"""Results of runs as Python objects: what `fedloom.run`, `load`, `compare` and `sweep` return."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import nearest
from fedloom.core.registry import short
from fedloom.core.task import Task
from fedloom.experiment.records import Newcomers, Summary, measure
from fedloom.experiment.run_folder import read_newcomers
from fedloom.inference.trained_run import TrainedRun
from fedloom.report.page.insight import POINTS
from fedloom.report.page.report import ReportFile, write_report
from fedloom.runs.frames import clients_frame, history_frame, runs_frame
from fedloom.runs.objects import register_again

if TYPE_CHECKING:
    from pandas import DataFrame

REPORT = "report.html"
"""Default name of a report, in the folder of its runs."""
SHOWN = {"personal_accuracy": "personal accuracy", "global_accuracy": "global accuracy"}
"""Figures of a summary that `repr` shows."""


class Run(TrainedRun, Mapping[str, Any]):
    """A run: its figures as frames, its models, its report. `fedloom.run`, `resume` and `load` return it.

    Everything is read from the run folder on demand. As a mapping, a run has the fields of its summary, and none before
    it is finished. Runs are equal if they have the same folder.

    Args:
        path: The run folder.
        task: The run's data, if they were made in Python.
        trust_code: Allow the Python files that the folder names to be imported.

    Attributes:
        folder: The run folder.
        recipe: The run's recipe.
        method: The run's method.
        summary: Accuracies, costs and notes, the content of summary.json; None if the run is not finished.

    Raises:
        UserError: The folder holds no run, or names a Python file that is not trusted.

    Example:
        >>> run = fedloom.run(method="fedper", data="digits", rounds=5)   # doctest: +SKIP
        >>> run["personal_accuracy"], run.history["loss"].min()   # doctest: +SKIP
        >>> run.clients.sort_values("accuracy").head()   # doctest: +SKIP
        >>> run.personal(3)(images).argmax(1)   # doctest: +SKIP
    """

    @cached_property
    def history(self) -> "DataFrame":
        """The rounds as a pandas frame, indexed by round: loss, accuracies, bytes, seconds.

        Raises:
            UserError: pandas is not installed.
        """
        return history_frame(self.round_records)

    @cached_property
    def clients(self) -> "DataFrame":
        """The clients' last evaluation as a pandas frame, indexed by number; empty if the run is not finished.

        `client_rows` also has the counts per class.

        Raises:
            UserError: pandas is not installed.
        """
        return clients_frame(self.client_rows)

    def report(self, to: str | Path | None = None, *, points: int = POINTS) -> ReportFile:
        """Write the HTML report of the run, one file that works offline.

        Args:
            to: The file to write. Default: report.html in the run folder.
            points: Number of samples in each t-SNE plot; 0 for none.

        Returns:
            The path of the file; a notebook shows the report.

        Raises:
            UserError: The file cannot be written.
        """
        return _write_report(self.folder, to, points)

    @property
    def finished(self) -> Summary:
        """The summary of a finished run.

        Raises:
            UserError: The run is not finished.
        """
        self._refuse_unfinished()
        assert self.summary is not None
        return self.summary

    def __getitem__(self, name: str) -> Any:
        summary = self.finished
        if name not in summary:
            raise KeyError(f"'{name}' is not in summary.json: {nearest(name, summary)}")
        return summary[name]  # type: ignore[literal-required]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary or {})

    def __len__(self) -> int:
        return len(self.summary or {})

    def __contains__(self, name: object) -> bool:
        return name in (self.summary or {})

    @cached_property
    def _place(self) -> Path:
        return self.folder.resolve()

    def __eq__(self, other: object) -> bool:
        return self._place == other._place if isinstance(other, Run) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self._place)

    def __bool__(self) -> bool:
        return True  # also of an unfinished run, which has no summary

    def __repr__(self) -> str:
        return f"<Run '{self.folder}': {', '.join(f'{name} {value}' for name, value in self._shown().items())}>"

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in self._shown().items())
        return f"<table><caption>{escape(str(self.folder))}</caption>{cells}</table>"

    def _shown(self) -> dict[str, str]:
        """Return what identifies a run, and its accuracies."""
        recipe, done = self.recipe, self.summary
        rounds = len(self.round_records)
        shown = {
            "method": short(recipe.method.name), "data": short(recipe.data.name), "seed": str(recipe.seed),
            "rounds": str(rounds) if done else f"{rounds} of {recipe.training.rounds}, not finished",
        }  # fmt: skip
        accuracies = {label: measure(done, name) for name, label in SHOWN.items()} if done else {}
        return shown | {label: f"{100 * value:.1f}%" for label, value in accuracies.items() if value is not None}


class Runs(list[Summary]):
    """The summaries of a comparison or sweep, method by method or setting by setting.

    Attributes:
        folder: The folder of the runs.

    Example:
        >>> runs = fedloom.compare(methods=["local", "fedavg"], data="digits", seeds=[0, 1])   # doctest: +SKIP
        >>> runs.frame.groupby("label")["personal_accuracy"].mean()   # doctest: +SKIP
        >>> runs.report()   # doctest: +SKIP
    """

    def __init__(self, summaries: Iterable[Summary], folder: str | Path):
        super().__init__(summaries)
        self.folder = Path(folder)

    @property
    def frame(self) -> "DataFrame":
        """A pandas frame with a row per run.

        Raises:
            UserError: pandas is not installed.
        """
        return runs_frame(self)

    @property
    def newcomers(self) -> Newcomers | None:
        """Accuracies of clients that never took part, as `compare.newcomers` asks; None if it does not."""
        return read_newcomers(self.folder)

    def run(self, index: int) -> Run:
        """Return one of the runs, with its models and rounds."""
        return Run(self[index]["run_dir"])

    def report(self, to: str | Path | None = None, *, points: int = POINTS) -> ReportFile:
        """Write the HTML report of all runs, as `Run.report` does. Default: report.html in their folder."""
        return _write_report(self.folder, to, points)


def load(path: str | Path, *, task: Task | None = None, trust_code: bool = False, **objects: Any) -> Run:
    """Load a run from its folder.

    Args:
        path: The run folder.
        task: The run's data, if they were made in Python; only needed to use `Run.task`.
        trust_code: Allow the Python files that the folder names (a custom method or network) to be imported; read them
            first. Without it, such a file is refused, unless the user has named it before in this process.
        **objects: Objects that the run was started with, in another process: `model`, `data`, `partition` or
            `optimizer`. A method class only has to be defined.

    Returns:
        The run, whose models and results are read on demand.

    Raises:
        UserError: The folder holds no run, or names a Python file that is not trusted.

    Example:
        >>> run = fedloom.load("runs/mine")   # doctest: +SKIP
        >>> logits = run.personal(3)(images)   # doctest: +SKIP
    """
    register_again(path, objects)
    return Run(path, task=task, trust_code=trust_code)


def _write_report(folder: Path, to: str | Path | None, points: int) -> ReportFile:
    place = ReportFile(folder / REPORT if to is None else to)
    write_report([folder], place, points=points)
    return place
