"""Callbacks: functions that a run calls at its start, after rounds and evaluations, and at its end."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, cast

from fedloom.config.recipe import Recipe
from fedloom.core.errors import RunError, UserError, brief
from fedloom.experiment.logging import LOGGER
from fedloom.experiment.records import ClientRow, RoundRecord, Summary


class StopRun(Exception):  # noqa: N818 (a request, not an error)
    """Raised by `on_round` or `on_evaluation` of a callback to end the run after this round; its text is the reason.

    The run is finished then: all clients are evaluated, and models and the summary are stored.

    Example:
        >>> raise fedloom.StopRun("the loss is below 0.1")   # doctest: +SKIP
    """


class Callback:
    """Base class of callbacks: `fedloom.run(..., callbacks=[Mine()])`. Override what you need.

    A callback belongs to all runs of a comparison or sweep; `on_start` says which run begins. A resumed run calls
    `on_start` again and continues with the next round.

    Example:
        >>> class Print(fedloom.Callback):
        ...     def on_evaluation(self, record, clients):
        ...         worst = min(clients, key=lambda row: row["accuracy"])
        ...         print(record["round"], record["personal_accuracy"], worst["name"])
    """

    def on_start(self, recipe: Recipe, folder: Path) -> None:
        """Begin a run.

        Args:
            recipe: The run's recipe.
            folder: The run folder.
        """

    def on_round(self, record: RoundRecord) -> None:
        """Handle a finished round.

        Args:
            record: The line of metrics.jsonl: `round`, `loss`, `up_bytes`, `seconds` and, with an evaluation,
                accuracies.

        Raises:
            StopRun: To end the run after this round.
        """

    def on_evaluation(self, record: RoundRecord, clients: Sequence[ClientRow]) -> None:
        """Handle an evaluation, after `on_round` of the same round.

        After `StopRun`, it is called for the final evaluation, too, which is of all clients.

        Args:
            record: The line of metrics.jsonl, with accuracies.
            clients: The evaluated clients, as in clients.jsonl: `client`, `name`, `accuracy`, `right`, `total`.

        Raises:
            StopRun: To end the run after this round.
        """

    def on_end(self, summary: Summary) -> None:
        """Handle the end of a finished run.

        Args:
            summary: The content of summary.json.
        """

    def close(self) -> None:
        """Release resources; called when a run has ended, was interrupted or has failed."""


HOOKS = ("on_start", "on_round", "on_evaluation", "on_end", "close")


def listed(callbacks: object) -> list[object]:
    """Return callbacks as a list; one callback may be given alone.

    >>> listed(Callback())[0].close()
    """
    alone = isinstance(callbacks, type) or not isinstance(callbacks, Iterable)
    return [callbacks] if alone else list(cast(Iterable[object], callbacks))


class Callbacks:
    """The callbacks of a run, called in order.

    Attributes:
        stopped: The reason why a callback ended the run; None if none did.

    Raises:
        UserError: An object has none of the hooks, or is a class.
    """

    def __init__(self, callbacks: Sequence[object] = ()):
        self.stopped: str | None = None
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if isinstance(callback, type):
                name = callback.__name__
                raise UserError(f"callbacks: {name} is a class; pass an instance: callbacks=[{name}()]")
            if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
                raise UserError(
                    f"callbacks: a {type(callback).__name__} has none of the functions {', '.join(HOOKS)}; derive it "
                    "from fedloom.Callback (a function of a round's record is passed as on_round=…)"
                )

    def on_start(self, recipe: Recipe, folder: Path) -> None:
        """Call `on_start` of all callbacks."""
        self.stopped = None
        self._call("on_start", "at the start", recipe, folder)

    def on_round(self, record: RoundRecord, clients: Callable[[], Iterator[ClientRow]]) -> None:
        """Call `on_round`, and `on_evaluation` if clients were evaluated in the round.

        Args:
            record: The round's record.
            clients: Returns the evaluated clients.
        """
        self._call("on_round", f"after round {record['round']}", record)
        if "evaluated" in record:
            self.on_evaluation(record, clients)

    def on_evaluation(self, record: RoundRecord, clients: Callable[[], Iterator[ClientRow]]) -> None:
        """Call `on_evaluation` of all callbacks with a round's record and the evaluated clients."""
        if self._callbacks:
            self._call("on_evaluation", f"after round {record['round']}", record, list(clients()))

    def on_end(self, summary: Summary) -> None:
        """Call `on_end` of all callbacks."""
        self._call("on_end", "at the end", summary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Call `close` of all callbacks, also after one has failed; an error is logged if there is one to raise."""
        failed = error
        for callback in self._callbacks:
            try:
                self._call_one(callback, "close", "at the end")
            except (UserError, RunError) as failure:
                if failed is not None:
                    LOGGER.warning(str(failure))
                failed = failed or failure
        if failed is not None and failed is not error:
            raise failed

    def _call(self, hook: str, when: str, *values: object) -> None:
        for callback in self._callbacks:
            self._call_one(callback, hook, when, *values)

    def _call_one(self, callback: object, hook: str, when: str, *values: object) -> None:
        if (call := getattr(callback, hook, None)) is None:
            return
        with _named(f"{getattr(callback, 'title', type(callback).__name__)}.{hook}", when):
            try:
                call(*values)
            except StopRun as stop:
                if hook not in ("on_round", "on_evaluation"):
                    raise
                self.stopped = self.stopped or str(stop) or type(callback).__name__


@contextmanager
def _named(name: str, when: str) -> Iterator[None]:
    """Name the callback in an exception that it raises."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        raise RunError(f"the callback {name} failed {when}: {type(error).__name__}: {brief(error)}") from error
