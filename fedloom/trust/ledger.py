"""The ledger: the exact contents of all messages from and to clients, and the data that never left a client.

Every run writes one. Messages of one purpose with the same tensors (names, shapes, types) form one entry with rounds,
clients and bytes, so the file stays small. In a deployment, the ledger also records evaluations and the texts of
errors, and the server and each client write a ledger each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fedloom.core.flat_state import nbytes
from fedloom.core.frozen import frozen_part
from fedloom.core.limits import refuse_without_room
from fedloom.core.message import Contents, Message, signature
from fedloom.core.method import Method
from fedloom.core.reading import conforming
from fedloom.core.scores import Scores
from fedloom.core.state import under
from fedloom.core.workspace import Workspace
from fedloom.trust.access import averaging_of
from fedloom.trust.ledger_file import FILE, Direction, EntryRow, Purpose
from fedloom.trust.privacy import PrivacySettings
from fedloom.trust.secure.settings import SecureSettings
from fedloom.trust.secure.weighted import WeightedSum

SIMULATED_NUMBERS = [
    "with every message: the number of training samples, the mean training loss, the training time in seconds",
    "with every evaluation: correct and tested samples per class, and the loss, on the client's test data",
]
"""Numbers that a simulated client reports in addition to tensors."""
ORGANISATION_NUMBERS = [
    "when it joins: the numbers of training and test samples (0 test samples if evaluation is declined)",
    "with every update: the number of training samples, the mean training loss, the seconds of training",
    "when a request fails or is refused: a sentence; for an error only its type, its text stays in the log of the "
    "organisation",
]
"""Numbers and texts that an organisation reports in addition to tensors; answers to evaluations are entries."""
STATISTICS = (
    "once, before training: the number, sum and sum of squares of the training inputs per channel or column "
    "(data.normalise: federated)"
)


@dataclass
class Entry:
    """All messages of one purpose with the same tensors in one direction."""

    direction: Direction
    purpose: Purpose
    tensors: list[dict[str, Any]]
    rounds: set[int] = field(default_factory=set)
    clients: set[int] = field(default_factory=set)
    messages: int = 0
    bytes: int = 0

    def count(self, round: int, client: int, size: int) -> None:
        """Count one message of `size` bytes."""
        self.rounds.add(round)
        self.clients.add(client)
        self.messages += 1
        self.bytes += size

    def to_json(self) -> dict[str, Any]:
        """Return the entry as an `EntryRow`, with rounds and clients as ranges [first, last]."""
        return {
            "direction": self.direction, "purpose": self.purpose, "messages": self.messages, "bytes": self.bytes,
            "rounds": ranges(self.rounds), "clients": len(self.clients), "client_ids": ranges(self.clients),
            "tensors": self.tensors,
        }  # fmt: skip


class Ledger:
    """A ledger that is filled message by message; `to_json` returns its whole state."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Direction, Purpose, Contents], Entry] = {}
        self._about: dict[str, Any] = {}

    def describe(
        self,
        workspace: Workspace,
        *,
        models: bool,
        privacy: PrivacySettings | None,
        secure: SecureSettings | None = None,
        simulated: bool = True,
    ) -> None:
        """Record the facts besides messages: parts that stay at the clients, the data, the reported numbers.

        Args:
            workspace: Workspace of the server or a client; its method determines which parts are sent.
            models: Whether clients' personal models are stored with the run.
            privacy: The recipe section `privacy`.
            secure: The recipe section `secure`.
            simulated: Whether clients are simulated in one place, in contrast to organisations with separate data.
        """
        method, task = workspace.setup.method, workspace.setup.task
        held = sum(map(len, (*task.federation.train, *task.federation.test)))
        count = held if task.elsewhere else len(task.dataset)
        numbers = SIMULATED_NUMBERS if simulated else ORGANISATION_NUMBERS
        image, label = (nbytes({"": tensor[:1]}) for tensor in (task.dataset.inputs, task.dataset.labels))
        self._about = {
            "method": method.name,
            "pooled": method.pooled,
            "never": [
                *(row for variant in workspace.variants for row in _stays(variant)),
                {"part": "images", "tensors": count, "bytes": count * image, "why": "data"},
                {"part": "labels", "tensors": count, "bytes": count * label, "why": "data"},
            ],
            "reveals": {part: says for part, says in method.reveals.items() if part in method.up},
            "numbers": [*numbers, *([STATISTICS] if task.normalisation == "federated" else [])],
            "models": models,
            "privacy": None
            if privacy is None
            else privacy.model_dump(mode="json") | {"simulated": simulated, "distributed": secure is not None},
            "secure": None
            if secure is None
            else secure.model_dump(mode="json") | {"range": secure.limit, "tensors": _summed(workspace)},
        }

    def add(
        self, direction: Direction, round: int, client: int, message: Message, purpose: Purpose = "training"
    ) -> None:
        """Record one message in the form in which it is transmitted."""
        contents = message.contents
        entry = self._entries.get((direction, purpose, contents))
        if entry is None:
            rows = [
                {
                    "name": name,
                    "shape": list(shape),
                    "dtype": str(dtype).removeprefix("torch."),
                    "bytes": nbytes({name: message[name]}),
                }
                for name, (dtype, shape) in sorted(message.signature.items())
            ]
            entry = self._entries[direction, purpose, contents] = Entry(direction, purpose, rows)
        entry.count(round, client, message.nbytes)

    def add_scores(self, round: int, scores: Scores) -> None:
        """Record one transmitted evaluation result: counts, and the loss and further figures that it includes."""
        counts = {"right": torch.tensor(scores.right), "tested": torch.tensor(scores.total)}
        figures = scores.metrics if scores.loss is None else scores.metrics | {"loss": scores.loss}
        known = {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items() if value is not None}
        self.add("up", round, scores.client, Message(counts | known), "evaluation")

    def add_error(self, round: int, client: int, text: str) -> None:
        """Record the transmitted text of an error or a refusal."""
        self.add_bytes("up", "error", round, client, len(text.encode()))

    def add_bytes(self, direction: Direction, purpose: Purpose, round: int, client: int, size: int) -> None:
        """Record a transmitted text of `size` bytes: an error, or keys and shares of secure aggregation."""
        key: tuple[Direction, Purpose, Contents] = (direction, purpose, frozenset())
        self._entries.setdefault(key, Entry(direction, purpose, [])).count(round, client, size)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of ledger.json, see `LedgerFile`."""
        return self._about | {"messages": [entry.to_json() for entry in self._entries.values()]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Ledger":
        """Restore a ledger from the values of `to_json`, to resume a run.

        Raises:
            UserError: The values are not a valid ledger.
        """
        conforming(values.get("messages"), list[EntryRow], FILE, "start a new run")
        ledger = cls()
        ledger._about = {name: value for name, value in values.items() if name != "messages"}
        for row in values["messages"]:
            contents = frozenset((t["name"], (getattr(torch, t["dtype"]), tuple(t["shape"]))) for t in row["tensors"])
            ledger._entries[row["direction"], row["purpose"], contents] = Entry(
                row["direction"], row["purpose"], row["tensors"], _members(row["rounds"]), _members(row["client_ids"]),
                row["messages"], row["bytes"],
            )  # fmt: skip
        return ledger


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return integers as sorted ranges [first, last].

    >>> ranges({1, 2, 3, 7})
    [[1, 3], [7, 7]]
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def _summed(workspace: Workspace) -> list[str]:
    """Return the names of the tensors whose sum secure aggregation reveals."""
    averaging = averaging_of(cast(Method, workspace.setup.method))
    addends = [] if averaging is None else WeightedSum(averaging, signature(workspace.sent)).addends
    return list(dict.fromkeys(addend.name for addend in addends))


def _members(found: Iterable[tuple[int, int]]) -> set[int]:
    found = list(found)
    count = sum(max(0, last - first + 1) for first, last in found)
    refuse_without_room(100 * count, f"{FILE}: rounds and clients", "start a new run", "they")
    return {number for first, last in found for number in range(first, last + 1)}


def _stays(workspace: Workspace) -> list[dict[str, Any]]:
    """Return the parts that are not sent, grouped by the longest path that the method or the model declares."""
    sent = set() if workspace.setup.method.pooled else set(workspace.sent)
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in workspace.tensors.items():
        if name not in sent:
            groups.setdefault(_why(name, workspace), {})[name] = tensor
    return [
        {"part": part, "tensors": len(found), "bytes": nbytes(found), "why": why}
        for (part, why), found in groups.items()
    ]


def _why(name: str, workspace: Workspace) -> tuple[str, str]:
    method = workspace.setup.method
    if frozen := frozen_part(name, workspace.fixed):
        return frozen, "frozen: the initial values, everywhere"
    for paths, why in (
        (workspace.private, "private module"),
        (method.keeps, "kept by the client"),
        (method.down, "received, never sent"),
        (method.server_keeps, "held by the server, never sent"),
    ):
        if owner := next((path for path in sorted(paths, key=len, reverse=True) if under(name, (path,))), None):
            return owner, why
    return ".".join(name.split(".")[:2]) if "." in name else name, "created anew in every round"
