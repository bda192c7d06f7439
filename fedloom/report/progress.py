"""Progress of a run: a live bar in a terminal (on stderr) or a notebook, plain lines otherwise."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedloom.experiment.records import RoundRecord, measure

REFRESH = 0.1
"""Minimum seconds between two updates of a notebook's bar."""
Start = Callable[[str, int], Callable[[RoundRecord], None]]
"""Starts the display of a run, given its title and number of rounds; returns a function to call with each record."""


class RunProgress:
    """Progress display of one run; call it with the record of each round."""

    def __init__(self, title: str, rounds: int, console: Console):
        self.title, self.rounds, self.console = title, rounds, console
        self._start = self._last = monotonic()
        self._before: int | None = None  # rounds completed before this run was resumed
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(title, total=rounds, text="")
            self._bar.start()

    def __call__(self, record: RoundRecord) -> None:
        """Show a finished round."""
        done = record["round"]
        text = accuracies(record)
        if self._before is None:
            self._before = done - 1
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text)
            if done == self.rounds:
                self._bar.stop()
            return
        now = monotonic()
        if done in (1, self.rounds) or done % max(1, self.rounds // 10) == 0 or now - self._last > 15:
            self._last = now
            left = (now - self._start) / (done - self._before) * (self.rounds - done)
            self.console.print(
                f"{self.title}  round {done}/{self.rounds}  {text}  {left:.0f} s left", highlight=False, soft_wrap=True
            )

    def stop(self) -> None:
        """End the live display; call it after an error too."""
        if self._bar is not None:
            self._bar.stop()


class NotebookProgress:
    """Progress of one or several runs in a notebook: one output that is updated in place.

    It needs no widgets, so that it also works where ipywidgets is missing, and in stored notebooks.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._runs, self._last = 0, 0.0

    def start(self, title: str, rounds: int) -> Callable[[RoundRecord], None]:
        """Show another run in the same place."""
        self._runs += 1
        title = title if self._runs == 1 else f"run {self._runs}: {title}"
        self._show(title, 0, rounds, "")

        def update(record: RoundRecord) -> None:
            if record["round"] == rounds or monotonic() - self._last > REFRESH:
                self._show(title, record["round"], rounds, accuracies(record))

        return update

    def _show(self, title: str, done: int, rounds: int, text: str) -> None:
        self._last = monotonic()
        line = f"{title}  round {done}/{rounds}  {text}".rstrip()
        bar = f'{escape(title)} <progress value="{done}" max="{rounds}"></progress> {done}/{rounds} {escape(text)}'
        shown = {"text/plain": line, "text/html": bar}
        if self._handle is None:
            # Not imported: a kernel has loaded it, and fedloom does not depend on IPython.
            self._handle = sys.modules["IPython.display"].display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


@contextmanager
def showing(progress: bool | None) -> Iterator[Start | None]:
    """Yield a function that starts the display of a run, or None if progress is not shown.

    Args:
        progress: Whether to show progress; None shows it in notebooks only.
    """
    if progress is False or (progress is None and not in_notebook()):
        yield None
        return
    if in_notebook():
        yield NotebookProgress().start
        return
    shown: list[RunProgress] = []

    def start(title: str, rounds: int) -> RunProgress:
        for one in shown:
            one.stop()
        shown.append(RunProgress(title, rounds, Console(stderr=True)))
        return shown[-1]

    try:
        yield start
    finally:
        for one in shown:
            one.stop()


def accuracies(record: RoundRecord) -> str:
    """Format the loss and accuracies of a round; values that were not measured are left out."""
    shown = []
    if record.get("loss") is not None:
        shown.append(f"loss {record['loss']:.3f}")
    for name, label in (("global_accuracy", "global"), ("personal_accuracy", "clients")):
        if (value := measure(record, name)) is not None:
            shown.append(f"{label} {100 * value:.1f}%")
    return "  ".join(shown)
