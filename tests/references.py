"""Reference runs, made once for all tests and all pytest workers."""

import fcntl
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from tiny import tiny_run_with_memory
from torch import Tensor

from fedloom.core.scores import Scores

folder = Path()
"""Shared by the workers of a test session; set by conftest.py."""
T = TypeVar("T")
_loaded: dict[str, Any] = {}


@dataclass
class Reference:
    """Results of a finished experiment."""

    state: dict[str, Tensor]
    """of the server"""
    history: list[dict]
    scores: list[Scores]
    memory: dict[int, dict[str, Tensor]]
    """of each client, at the end"""


def reference(method: str | dict, **fields) -> Reference:
    """Results of `tiny_run(method, **fields)`; fields are plain values (no task, no folder)."""

    def make() -> Reference:
        with TemporaryDirectory() as out:
            run, memory = tiny_run_with_memory(method, out=f"{out}/run", **fields)
        return Reference(dict(run.server.state), run.history, run.scores, memory)

    return shared(repr((method, sorted(fields.items()))), make)


def shared(key: str, make: Callable[[], T]) -> T:
    """What `make` returns, made by the first worker that asks for this key; it is pickled."""
    if key not in _loaded:
        with (folder / sha256(key.encode()).hexdigest()[:24]).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits for another worker that is making it
            file.seek(0)
            stored = file.read()
            if not stored:
                stored = pickle.dumps(make())
                file.write(stored)
            _loaded[key] = pickle.loads(stored)
    return _loaded[key]


def figures(scores: list[Scores]) -> list[tuple]:
    """All figures of an evaluation, client by client."""
    return [(s.client, s.right, s.total, s.loss) for s in scores]
