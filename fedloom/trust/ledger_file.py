"""The format of ledger.json, and reading it. Does not import torch, so that `fedloom ledger` starts fast."""

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from fedloom.core.reading import CHECKED, Count, read_json

Direction = Literal["up", "down"]
Purpose = Literal["training", "evaluation", "error", "secure"]
FILE = "ledger.json"
DType = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128",
]  # fmt: skip
"""Names of the tensor types that a message can hold."""
Interval = Annotated[list[Annotated[int, Field(ge=-1, le=2**53)]], Field(min_length=2, max_length=2)]
"""First and last number of a range."""


@with_config(CHECKED)
class TensorRow(TypedDict):
    """A tensor of a message."""

    name: str
    shape: list[Count]
    dtype: DType
    bytes: Count


@with_config(CHECKED)
class EntryRow(TypedDict):
    """An entry of ledger.json: all messages of one purpose with the same tensors in one direction."""

    direction: Direction
    purpose: Purpose
    messages: Count
    bytes: Count
    rounds: list[Interval]
    clients: Count
    client_ids: list[Interval]
    tensors: list[TensorRow]


@with_config(CHECKED)
class PartRow(TypedDict):
    """A part that never leaves a client."""

    part: str
    tensors: Count
    bytes: Count
    why: str


@with_config(CHECKED)
class PrivacyRow(TypedDict):
    """The recipe's privacy settings, and whether the run was a simulation."""

    clip: float
    noise: float
    simulated: bool
    distributed: NotRequired[bool]
    """Whether clients clip and add noise themselves, under secure aggregation."""


@with_config(CHECKED)
class SecureRow(TypedDict):
    """The recipe's settings of secure aggregation."""

    threshold: float
    bits: int
    range: float
    tensors: list[str]
    """Names of the tensors that are in the sum."""


@with_config(CHECKED)
class LedgerFile(TypedDict):
    """The contents of ledger.json."""

    method: str
    pooled: bool
    """Whether the method trains on all clients' data in one place, without messages."""
    never: list[PartRow]
    """Parts and data that never left a client."""
    reveals: dict[str, str]
    """By sent part: what it reveals about a client's data."""
    numbers: list[str]
    """Numbers that clients report in addition to tensors, in words."""
    models: bool
    """Whether clients' personal models are stored with the run."""
    privacy: PrivacyRow | None
    secure: NotRequired[SecureRow | None]
    messages: list[EntryRow]


def read_ledger(run: Path) -> dict[str, Any]:
    """Read the ledger of a run.

    Args:
        run: Folder of the run.

    Returns:
        The contents of ledger.json, see `LedgerFile`.

    Raises:
        UserError: The file does not exist or is damaged. For a comparison or sweep, the message names one of its runs.

    Example:
        >>> ledger = read_ledger(Path("runs/mine"))   # doctest: +SKIP
        >>> [(row["direction"], row["bytes"]) for row in ledger["messages"]]   # doctest: +SKIP
    """
    inner = None if (run / FILE).exists() else min(run.glob(f"*/{FILE}"), default=None)  # a comparison or a sweep
    example = "runs/NAME" if inner is None else inner.parent
    return {**read_json(run / FILE, LedgerFile, f"give the folder of a run, such as {example}")}
