"""Progress of a run, on stderr: a live bar in a terminal, plain lines otherwise."""

from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedloom.experiment.records import RoundRecord, measure


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


def accuracies(record: RoundRecord) -> str:
    """Format the loss and accuracies of a round; values that were not measured are left out."""
    shown = []
    if record.get("loss") is not None:
        shown.append(f"loss {record['loss']:.3f}")
    for name, label in (("global_accuracy", "global"), ("personal_accuracy", "clients")):
        if (value := measure(record, name)) is not None:
            shown.append(f"{label} {100 * value:.1f}%")
    return "  ".join(shown)
