"""Progress of runs that were started from Python, in addition to the caller's callbacks."""

from collections.abc import Callable

from fedloom.config.recipe import Recipe
from fedloom.core.registry import short
from fedloom.experiment.records import RoundRecord
from fedloom.report.progress import Start

OnRound = Callable[[RoundRecord], None]
OnRun = Callable[[Recipe], OnRound]


def on_round_of(recipe: Recipe, start: Start | None, on_round: OnRound | None) -> OnRound | None:
    """Return a function that calls `on_round` and updates the display of a run, or None if there is neither."""
    if start is None:
        return on_round
    show = start(f"{short(recipe.method.name)} (seed {recipe.seed})", recipe.training.rounds)

    def both(record: RoundRecord) -> None:
        show(record)
        if on_round is not None:
            on_round(record)

    return both


def on_run_of(start: Start | None, on_run: OnRun | None) -> OnRun | None:
    """Return the same for a series of runs."""
    if start is None:
        return on_run

    def begin(recipe: Recipe) -> OnRound:
        both = on_round_of(recipe, start, on_run(recipe) if on_run is not None else None)
        assert both is not None
        return both

    return begin
