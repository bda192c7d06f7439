"""A run's folder: recipe, versions, metrics as they come, per-client results, summary, final models."""

import json
import platform
import shutil
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fedloom.config.loading import read_yaml
from fedloom.core import registry, trusted_code
from fedloom.core.errors import UserError
from fedloom.core.reading import read_json, read_lines, without_nan
from fedloom.core.state import serialisable
from fedloom.experiment.files import unwritable, write_whole
from fedloom.experiment.lock import RunLock
from fedloom.experiment.records import ROUND, SUMMARISED, ClientRow, RoundRecord, Summary, TaskFacts

RECIPE, METRICS, SUMMARY, VERSIONS = "recipe.yaml", "metrics.jsonl", "summary.json", "versions.json"
CLIENTS, TASK, ENGINE = "clients.jsonl", "task.json", "engine.json"
REPEAT = "repeat the run with its recipe.yaml"
FORMAT = 2
"""Of run folders. Version 0.1 wrote format 1, without this number in versions.json."""
PACKAGES = ("fedloom", "torch", "numpy", "scikit-learn", "safetensors", "pydantic")


class RunFolder:
    """Writes; it is this process's alone until `close`. One that holds a run already is refused, unless to go on."""

    def __init__(self, path: Path, *, resume: bool = False):
        self.path = path
        self._refuse_a_run(resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out = '{path}' cannot be made: {error.strerror}; choose another folder") from None
        self._lock = RunLock(path)
        try:
            self._refuse_a_run(resume)  # another process may have begun one in the meantime
            for left in path.glob(".memory-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            self._metrics = (path / METRICS).open("ab", buffering=0)
        except OSError as error:
            self._lock.release()
            raise unwritable(Path(error.filename or path), error) from error
        except UserError:
            self._lock.release()
            raise

    def _refuse_a_run(self, resume: bool) -> None:
        if not resume and holds_run(self.path):
            raise UserError(
                f"out = '{self.path}' holds a run already: choose another folder, remove it, "
                f"or go on with it: {_resume_command(self.path)}"
            )

    @staticmethod
    def fresh(parent: Path, name: str) -> Path:
        """A path under `parent` that nothing has yet: the time, then the name."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
        candidates = (parent / (stem if i == 0 else f"{stem}-{i}") for i in range(10_000))
        return next(path for path in candidates if not path.exists())

    def describe(self, recipe: str) -> None:
        """The resolved recipe and the versions that ran it. From then on the folder holds a run."""
        self.write_json(VERSIONS, versions() | {"format": FORMAT})
        write_whole(self.path / RECIPE, recipe.encode())

    def record(self, line: RoundRecord) -> None:
        """One more round."""
        data = _line(line)
        try:
            while data:
                data = data[self._metrics.write(data) :]
        except OSError as error:
            raise unwritable(self.path / METRICS, error) from error

    def cut_back(self, history: Iterable[RoundRecord]) -> None:
        """These are the rounds so far; what was written after them is forgotten."""
        self._metrics.close()
        self.write_lines(METRICS, history)
        self._metrics = (self.path / METRICS).open("ab", buffering=0)

    def write_json(self, name: str, value: Any) -> None:
        """A small JSON file, indented."""
        write_json(self.path / name, value)

    def write_lines(self, name: str, rows: Iterable[RoundRecord | ClientRow]) -> None:
        """JSON lines."""
        write_whole(self.path / name, b"".join(map(_line, rows)))

    def write_model(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Named tensors as safetensors, under models/."""
        path = self.path / "models" / f"{name}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path.parent, error) from error
        write_whole(path, save(serialisable(state)))

    def close(self) -> None:
        """No more rounds; another process may have the folder."""
        self._metrics.close()
        self._lock.release()


def holds_run(path: Path) -> bool:
    """Whether a run was begun in this folder."""
    try:
        return (path / RECIPE).exists()
    except OSError as error:  # a name that is too long, say
        raise UserError(f"out = '{path}' cannot be made: {error.strerror}; choose another folder") from None


def stored_values(folder: Path) -> dict[str, Any]:
    """The recipe of the run in a folder, as it was written.

    Raises:
        UserError: There is no run, or its folder has another format.
    """
    if not holds_run(folder):
        raise UserError(
            f"'{folder}' holds no run (there is no {RECIPE} in it): give the folder that `fedloom run` named, "
            "such as runs/20250101-120000-fedavg-digits-s0"
        )
    found = stored_versions(folder).get("format", 1)
    if found != FORMAT:
        raise UserError(
            f"'{folder}' has format {found}, and this fedloom reads format {FORMAT}: repeat it with `fedloom run "
            f"{folder / RECIPE}`, or use the version that wrote it"
        )
    return read_yaml(folder / RECIPE)


def stored_versions(folder: Path) -> dict[str, str | int]:
    """The versions that a run was begun with; none where they cannot be read."""
    try:
        return read_json(folder / VERSIONS, dict[str, str | int], REPEAT)
    except UserError:
        return {}


def _resume_command(folder: Path) -> str:
    try:
        return trusted_code.resume_command(folder, read_yaml(folder / RECIPE))
    except UserError:  # the recipe cannot be read: then resume says so
        return trusted_code.resume_command(folder)


def finished(path: Path) -> Summary | None:
    """The summary of a run that has ended; it is the last thing that a run writes."""
    if not (path / SUMMARY).exists():
        return None
    try:
        return read_json(path / SUMMARY, Summary, "remove it", SUMMARISED)
    except UserError as error:
        raise UserError(f"{error}, then `{_resume_command(path)}` makes it if it can") from None


def read_rounds(folder: Path) -> list[RoundRecord]:
    """A record per round, as far as the run has come."""
    return read_lines(folder / METRICS, RoundRecord, REPEAT, ROUND)


def read_clients(folder: Path) -> list[ClientRow]:
    """What the last evaluation said of each client; empty before the end."""
    rows = read_lines(folder / CLIENTS, ClientRow, REPEAT)
    for number, row in enumerate(rows, 1):
        if len(row["right"]) != len(row["total"]):
            raise UserError(
                f"'{folder / CLIENTS}', line {number} cannot be used: right has {len(row['right'])} entries, and total "
                f"has {len(row['total'])}; {REPEAT}"
            )
    return rows


def read_facts(folder: Path) -> TaskFacts:
    """What must be known of the data to use a run's models without them."""
    return read_json(folder / TASK, TaskFacts, REPEAT)


def write_json(path: Path, value: Any) -> None:
    """A small JSON file, indented; wholly or not at all."""
    write_whole(path, (json.dumps(without_nan(value), indent=1) + "\n").encode())


def _line(row: RoundRecord | ClientRow) -> bytes:
    return (json.dumps(without_nan(row)) + "\n").encode()


def versions() -> dict[str, str]:
    """What this ran on, users' own files included."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found | registry.files() | {"torch": torch.__version__}  # its own word tells the build (cpu, cu130)
