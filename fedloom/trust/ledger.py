"""The ledger: exactly what left a client and what it was sent, and what never left it. Small, and written by every run.

Messages of one purpose that hold the same tensors (names, shapes, types) are one entry, with the rounds, the clients
and the bytes. In a deployment evaluation is counted too, and the texts of errors; server and client write one each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.core.limits import refuse_without_room
from fedloom.core.message import Contents, Message
from fedloom.core.protocols import MethodLike
from fedloom.core.reading import conforming
from fedloom.core.scores import Scores
from fedloom.core.state import nbytes, under
from fedloom.core.workspace import Workspace
from fedloom.trust.ledger_file import FILE, Direction, EntryRow, Purpose
from fedloom.trust.privacy import PrivacySettings

SIMULATED_NUMBERS = [
    "with every message: the number of training samples, the mean training loss, the seconds that it took",
    "when evaluated: samples right and samples tested per class, and the loss, of the client's own test data",
]


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
        """One more message of this size."""
        self.rounds.add(round)
        self.clients.add(client)
        self.messages += 1
        self.bytes += size

    def to_json(self) -> dict[str, Any]:
        """Rounds and clients as ranges, [first, last] each."""
        return {
            "direction": self.direction, "purpose": self.purpose, "messages": self.messages, "bytes": self.bytes,
            "rounds": ranges(self.rounds), "clients": len(self.clients), "client_ids": ranges(self.clients),
            "tensors": self.tensors,
        }  # fmt: skip


class Ledger:
    """Filled message by message; `to_json` is the whole of its state."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Direction, Purpose, Contents], Entry] = {}
        self._about: dict[str, Any] = {}

    def describe(
        self,
        workspace: Workspace,
        *,
        models: bool,
        privacy: PrivacySettings | None,
        simulated: bool = True,
        numbers: list[str] | None = None,
    ) -> None:
        """What there is besides messages: the parts that stay, the data, the numbers that are reported.

        Args:
            workspace: Of the server or a client; its method says what travels.
            models: Whether personal models are stored with the run.
            privacy: The recipe's section.
            simulated: Whether clients are simulated in one place, rather than organisations with data of their own.
            numbers: What leaves beside tensors; default: what leaves in a simulation.
        """
        method, task = workspace.setup.method, workspace.setup.task
        sent = set() if method.pooled else set(workspace.sent)
        held = sum(map(len, (*task.federation.train, *task.federation.test)))
        count = held if task.elsewhere else len(task.dataset)
        image, label = (nbytes({"": tensor[:1]}) for tensor in (task.dataset.images, task.dataset.labels))
        self._about = {
            "method": method.name,
            "pooled": method.pooled,
            "never": [
                *_stays(
                    {name: t for name, t in workspace.tensors.items() if name not in sent}, method, workspace.private
                ),
                {"part": "images", "tensors": count, "bytes": count * image, "why": "data"},
                {"part": "labels", "tensors": count, "bytes": count * label, "why": "data"},
            ],
            "reveals": {part: says for part, says in method.reveals.items() if part in method.up},
            "numbers": numbers or SIMULATED_NUMBERS,
            "models": models,
            "privacy": None if privacy is None else privacy.model_dump(mode="json") | {"simulated": simulated},
        }

    def add(
        self, direction: Direction, round: int, client: int, message: Message, purpose: Purpose = "training"
    ) -> None:
        """One message, as it travels."""
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
        """One answer to an evaluation, as it travels: counts, and the loss if it leaves."""
        counts = {"right": torch.tensor(scores.right), "tested": torch.tensor(scores.total)}
        loss = {} if scores.loss is None else {"loss": torch.tensor(scores.loss, dtype=torch.float64)}
        self.add("up", round, scores.client, Message(counts | loss), "evaluation")

    def add_error(self, round: int, client: int, text: str) -> None:
        """The text of an error or a refusal, as it travels."""
        key: tuple[Direction, Purpose, Contents] = ("up", "error", frozenset())
        entry = self._entries.setdefault(key, Entry("up", "error", []))
        entry.count(round, client, len(text.encode()))

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return self._about | {"messages": [entry.to_json() for entry in self._entries.values()]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Ledger":
        """The inverse, for a run that is resumed.

        Raises:
            UserError: These are not a ledger's values.
        """
        conforming(values.get("messages"), list[EntryRow], FILE, "begin a new run")
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
    """Whole numbers as ranges.

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


def _members(found: Iterable[tuple[int, int]]) -> set[int]:
    found = list(found)
    count = sum(max(0, last - first + 1) for first, last in found)
    refuse_without_room(100 * count, f"{FILE}: rounds and clients", "begin a new run", "they")
    return {number for first, last in found for number in range(first, last + 1)}


def _stays(tensors: Mapping[str, Tensor], method: MethodLike, private: tuple[str, ...]) -> list[dict[str, Any]]:
    """Parts that are not sent, by the longest path that is spoken of."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_why(name, method, private), {})[name] = tensor
    return [
        {"part": part, "tensors": len(found), "bytes": nbytes(found), "why": why}
        for (part, why), found in groups.items()
    ]


def _why(name: str, method: MethodLike, private: tuple[str, ...]) -> tuple[str, str]:
    for paths, why in (
        (private, "private module"),
        (method.keeps, "kept by the client"),
        (method.down, "comes down only"),
    ):
        if owner := next((path for path in sorted(paths, key=len, reverse=True) if under(name, (path,))), None):
            return owner, why
    return ".".join(name.split(".")[:2]) if "." in name else name, "made anew in every round"
