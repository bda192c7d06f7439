"""The format of ledger.json, and reading it. Light on purpose: `fedloom ledger` must not import torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, with_config
from typing_extensions import TypedDict

from fedloom.core.reading import CHECKED, Count, read_json

Direction = Literal["up", "down"]
Purpose = Literal["training", "evaluation", "error"]
FILE = "ledger.json"
DType = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128",
]  # fmt: skip
"""Names of the tensor types that a message can hold."""
Interval = Annotated[list[Annotated[int, Field(ge=-1, le=2**53)]], Field(min_length=2, max_length=2)]
"""First and last."""


@with_config(CHECKED)
class TensorRow(TypedDict):
    """A tensor of a message."""

    name: str
    shape: list[Count]
    dtype: DType
    bytes: Count


@with_config(CHECKED)
class EntryRow(TypedDict):
    """An entry, as the file has it."""

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
    """The recipe's privacy, and whether the run was a simulation."""

    clip: float
    noise: float
    simulated: bool


@with_config(CHECKED)
class LedgerFile(TypedDict):
    """ledger.json."""

    method: str
    pooled: bool
    never: list[PartRow]
    reveals: dict[str, str]
    numbers: list[str]
    models: bool
    privacy: PrivacyRow | None
    messages: list[EntryRow]


def read_ledger(run: Path) -> dict[str, Any]:
    """A run folder's ledger."""
    inner = None if (run / FILE).exists() else min(run.glob(f"*/{FILE}"), default=None)  # a comparison or a sweep
    such_as = "runs/NAME" if inner is None else inner.parent
    return {**read_json(run / FILE, LedgerFile, f"give the folder of a run, such as {such_as}")}
