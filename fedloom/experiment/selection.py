"""Selection by validation samples: the best round of a run, early stopping, and the copy of the best round's state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fedloom.core.errors import UserError
from fedloom.core.state import State
from fedloom.core.task import Task
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.records import LOWER_IS_BETTER, RoundRecord, measure

PLACE = "best/"
"""Prefix of the best round's tensors in the server's file of a checkpoint."""
Choice = TypeVar("Choice")


def field_of(name: str) -> str:
    """Return the field of records and summaries by which a measure chooses: personal models, validation samples."""
    return f"validation_personal_{name}"


def best_of(candidates: Sequence[tuple[Choice, float | None]], name: str) -> Choice | None:
    """Return the candidate with the best value of a measure, the first of equals; None if no value is known."""
    known = [(candidate, value) for candidate, value in candidates if value is not None and value == value]
    if not known:
        return None
    pick = min if name in LOWER_IS_BETTER else max
    return pick(known, key=lambda pair: pair[1])[0]


def best_round(history: Sequence[RoundRecord], name: str) -> RoundRecord | None:
    """Return the record of the best evaluation by a measure on validation samples; None if there is none.

    Only evaluations of the most clients are compared: means over different numbers of clients are not comparable. In
    a method with personal parts, earlier rounds evaluate only the clients that have taken part so far.
    """
    most = max((record.get("evaluated", 0) for record in history), default=0)
    compared = [record for record in history if record.get("evaluated") == most]
    return best_of([(record, measure(record, field_of(name))) for record in compared], name)


class EarlyStopping:
    """Decides when a run ends because the validation samples show no more improvement.

    Everything follows from the history, so a resumed run decides like an uninterrupted one.

    Args:
        patience: Number of evaluations in a row without an improvement after which the run ends.
        name: The measure.
    """

    def __init__(self, patience: int, name: str):
        self.patience, self.name = patience, name

    def improved(self, history: Sequence[RoundRecord]) -> bool:
        """Return whether the last round is better than all rounds before it."""
        return bool(history) and best_round(history, self.name) is history[-1]

    def due(self, history: Sequence[RoundRecord]) -> bool:
        """Return whether the last `patience` evaluations brought no improvement."""
        best = best_round(history, self.name)
        since = 0 if best is None else best["round"]
        return sum("evaluated" in record for record in history[since:]) >= self.patience

    def note(self, history: Sequence[RoundRecord], rounds: int) -> str:
        """Return a remark for the summary: when the run ended, and which state its models have."""
        best, last = best_round(history, self.name), len(history)
        if last == rounds:
            ended = f"ended after all {rounds} rounds; "
        elif self.due(history):
            ended = f"stopped after round {last} of {rounds}: no improvement of {field_of(self.name)} in "
            ended += f"{self.patience} evaluations; "
        else:
            ended = ""  # a callback ended the run, which has another remark
        if best is None:
            return f"{ended}no validation result is known, so models and figures are those of the last round"
        return f"{ended}models and figures are those of round {best['round']}"


class BestState:
    """A copy of the state of the best round so far: the server's state and all stores of clients' states.

    The copies are stores with bounded RAM, too. Only clients that changed since the last copy are copied again.

    Args:
        stores: The stores to copy, by name.
        budget: Bytes of tensors in RAM for each copy.
        inside: Folder for states beyond the budget.

    Attributes:
        stores: The copies, named `best_NAME`, to be saved in checkpoints.
    """

    def __init__(self, stores: Mapping[str, ClientStore], budget: int, inside: Path):
        self._live = dict(stores)
        self._changed = {name: store.track() for name, store in stores.items()}
        self.stores = {f"best_{name}": ClientStore(budget, inside=inside) for name in stores}
        self._server: State = {}

    def keep(self, server: State) -> None:
        """Copy the current state; `server` is the server's part of it, as `Server.saved` returns it."""
        self._server = _copied(server)
        for name, live in self._live.items():
            copy, changed = self.stores[f"best_{name}"], self._changed[name]
            for client in sorted(changed):
                if client in live:
                    copy[client] = _copied(live.peek(client))
                else:
                    copy.pop(client, None)
            changed.clear()

    def restore(self) -> State:
        """Set the stores to the copies and return the server's state; empty if no state was kept."""
        if self._server:
            for name, live in self._live.items():
                copy = self.stores[f"best_{name}"]
                for client in sorted(self._changed[name]):
                    if client in copy:
                        live[client] = copy.peek(client)
                    else:
                        live.pop(client, None)
                self._changed[name].clear()
        return _copied(self._server)

    def saved(self) -> State:
        """Return the server's part of the copy for a checkpoint; the stores are saved with the others."""
        return {PLACE + name: tensor for name, tensor in self._server.items()}

    def load(self, saved: State) -> None:
        """Take the server's part of the copy from a checkpoint, whose stores have been loaded."""
        self._server = {name.removeprefix(PLACE): t for name, t in saved.items() if name.startswith(PLACE)}
        for name, live in self._live.items():  # it is unknown which clients changed since the copy was made
            self._changed[name] |= {*live, *self.stores[f"best_{name}"]}

    def close(self) -> None:
        """Delete the copies."""
        for store in self.stores.values():
            store.close()


def refuse_without_validation(patience: int | None, summary: str, task: Task) -> None:
    """Raise a UserError if `training.patience` is set, but cannot be followed."""
    if patience is None:
        return
    if not task.federation.validates:
        raise UserError(
            f"training.patience = {patience}: needs validation samples, since stopping by test samples would choose "
            "the result on them; set for example data.split = pooled:0.6:0.2 or official:0.8, or remove "
            "training.patience"
        )
    if summary != "last":
        raise UserError(
            f"evaluation.summary = '{summary}': with training.patience, figures are those of the round that is best by "
            "validation; remove one of them"
        )


def _copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}
