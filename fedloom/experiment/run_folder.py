"""The run folder: recipe, versions, metrics of every round, per-client results, summary and final models."""

import json
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from fedloom.config.loading import read_yaml
from fedloom.core import registry, trusted_code
from fedloom.core.errors import UserError, brief
from fedloom.core.reading import read_json, read_lines, without_nan
from fedloom.core.state import serialisable
from fedloom.experiment.files import unwritable, write_whole
from fedloom.experiment.lock import RunLock, holder
from fedloom.experiment.records import ROUND, SUMMARISED, ClientRow, Newcomers, RoundRecord, Summary, TaskFacts
from fedloom.models import weights

RECIPE, METRICS, SUMMARY, VERSIONS = "recipe.yaml", "metrics.jsonl", "summary.json", "versions.json"
CLIENTS, TASK, ENGINE = "clients.jsonl", "task.json", "engine.json"
NEWCOMERS = "newcomers.json"
"""File in a comparison's folder with the accuracies of newcomers."""
FAILURE = "failed.txt"
"""File with the error that ended a run; removed when the run is resumed."""
INITIAL = "initial"
"""Name of the model file with the initial values of parts that the server does not hold."""
REPEAT = "repeat the run with its recipe.yaml"
FORMAT = 2
"""Format of run folders, stored in versions.json. Version 0.1 wrote format 1, without storing the number."""
PACKAGES = ("fedloom", "torch", "numpy", "scikit-learn", "safetensors", "pydantic")
"""Packages whose versions are stored in versions.json."""


def initial_file(kind: int) -> str:
    """Return the name of the model file with the initial values of one of the clients' networks."""
    return INITIAL if kind == 0 else f"{INITIAL}-{kind:05d}"


RunState = Literal["finished", "running", "killed", "failed", "stopped"]


class RunFolder:
    """Writes a run's files; the folder is locked for this process until `close`.

    Args:
        path: The folder; created if it does not exist.
        resume: Accept a folder that already holds a run.

    Raises:
        UserError: The folder already holds a run, is used by another process, or cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool = False):
        self.path = path
        self._refuse_a_run(resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out = '{path}' cannot be created: {error.strerror}; choose another folder") from None
        self._lock = RunLock(path)
        try:
            # again: another process may have started a run before this one got the lock
            self._refuse_a_run(resume, locked=True)
            for left in path.glob(".memory-*"):  # left by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            self._metrics = (path / METRICS).open("ab", buffering=0)
            self._begun = False
        except OSError as error:
            self._lock.release()
            raise unwritable(Path(error.filename or path), error) from error
        except UserError:
            self._lock.release()
            raise

    def _refuse_a_run(self, resume: bool, locked: bool = False) -> None:
        if not resume and holds_run(self.path):
            if not locked and run_state(self.path) == "running":
                raise UserError(
                    f"out = '{self.path}' holds a run, and another process is using this folder: wait for it, or "
                    "choose another folder"
                )
            raise UserError(
                f"out = '{self.path}' already holds a run: choose another folder, remove this one, "
                f"or resume the run: {_resume_command(self.path)}"
            )

    @staticmethod
    def fresh(parent: Path, name: str) -> Path:
        """Return a path under `parent` that does not exist yet: the time, then the name."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
        candidates = (parent / (stem if i == 0 else f"{stem}-{i}") for i in range(10_000))
        return next(path for path in candidates if not path.exists())

    def describe(self, recipe: str, method: str) -> None:
        """Write the versions and the resolved recipe; with the recipe, the folder holds a run.

        Classes that this process got as objects for runs of other methods than `method` are left out.
        """
        mine = registry.source_name(method.split("+")[0])
        used = {n: version for n, version in versions().items() if n == mine or not registry.is_object_source(n)}
        self.write_json(VERSIONS, used | {"format": FORMAT})
        write_whole(self.path / RECIPE, recipe.encode())

    def refuse_if_lost(self) -> None:
        """Raise a UserError if another process has taken the folder over."""
        if self._lock.lost:
            raise UserError(
                f"out = '{self.path}': another process has taken this folder over ({self._lock.lost}), because this "
                "one gave no sign of life; this run ends, and the other one repeats its rounds"
            )

    def record(self, line: RoundRecord) -> None:
        """Append a round's record to metrics.jsonl."""
        self.refuse_if_lost()
        data = _line(line)
        try:
            while data:
                data = data[self._metrics.write(data) :]
        except OSError as error:
            raise unwritable(self.path / METRICS, error) from error

    def cut_back(self, history: Iterable[RoundRecord]) -> None:
        """Replace metrics.jsonl by these records; later rounds are dropped."""
        self._metrics.close()
        self.write_lines(METRICS, history)
        self._metrics = (self.path / METRICS).open("ab", buffering=0)

    def write_json(self, name: str, value: Any) -> None:
        """Write an indented JSON file."""
        self.refuse_if_lost()
        write_json(self.path / name, value)

    def write_lines(self, name: str, rows: Iterable[RoundRecord | ClientRow]) -> None:
        """Write a file of JSON lines."""
        self.refuse_if_lost()
        write_whole(self.path / name, b"".join(map(_line, rows)))

    def write_model(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Write named tensors to models/NAME.safetensors."""
        self.refuse_if_lost()
        path = self.path / "models" / f"{name}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path.parent, error) from error
        write_whole(path, save(serialisable(state)))

    def begin(self) -> None:
        """Note that rounds follow: from now on the folder's former failure is past, and an error is a new one."""
        (self.path / FAILURE).unlink(missing_ok=True)
        self._begun = True

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Write the error that ends the run to failed.txt; nothing is written before `begin`, or if it is finished."""
        try:
            yield
        except Exception as error:
            if not self._begun or self._lock.lost:
                raise
            if (self.path / SUMMARY).exists():
                error.add_note(f"the run in '{self.path}' is finished")
                raise
            with suppress(OSError, UserError):
                write_whole(self.path / FAILURE, f"{type(error).__name__}: {brief(error)}\n".encode())
            raise

    def close(self) -> None:
        """Close the metrics file and release the lock."""
        self._metrics.close()
        self._lock.release()


def holds_run(path: Path) -> bool:
    """Return whether a folder holds a run, finished or not."""
    try:
        return (path / RECIPE).exists()
    except OSError as error:  # for example, a name that is too long
        raise UserError(f"out = '{path}' cannot be created: {error.strerror}; choose another folder") from None


def run_state(folder: Path) -> RunState:
    """Return the state of the run in a folder: `stopped` runs have written a checkpoint, `killed` ones may not."""
    if (folder / SUMMARY).exists():
        return "finished"
    if (held := holder(folder)) is not None:
        return "running" if held == "alive" else "killed"
    return "failed" if (folder / FAILURE).exists() else "stopped"


def stored_values(folder: Path) -> dict[str, Any]:
    """Return the values of the recipe of the run in a folder.

    Raises:
        UserError: The folder holds no run, or has an unsupported format.
    """
    if not holds_run(folder):
        raise UserError(
            f"'{folder}' holds no run (it has no {RECIPE}): give the folder that `fedloom run` printed, "
            "such as runs/20250101-120000-fedavg-digits-s0"
        )
    found = stored_versions(folder).get("format", 1)
    if found != FORMAT:
        raise UserError(
            f"'{folder}' has format {found}, but this fedloom reads format {FORMAT}: repeat the run with `fedloom run "
            f"{folder / RECIPE}`, or use the fedloom version that wrote it"
        )
    return read_yaml(folder / RECIPE)


def stored_versions(folder: Path) -> dict[str, str | int]:
    """Return the versions that a run was started with; empty if they cannot be read."""
    try:
        return read_json(folder / VERSIONS, dict[str, str | int], REPEAT)
    except UserError:
        return {}


def _resume_command(folder: Path) -> str:
    try:
        return trusted_code.resume_command(folder, read_yaml(folder / RECIPE))
    except UserError:  # the recipe cannot be read: `fedloom resume` will report it
        return trusted_code.resume_command(folder)


def finished(path: Path) -> Summary | None:
    """Return the summary of a run, or None if the run is not finished: a run writes its summary last."""
    if not (path / SUMMARY).exists():
        return None
    try:
        return read_json(path / SUMMARY, Summary, "remove it", SUMMARISED)
    except UserError as error:
        raise UserError(f"{error}, then `{_resume_command(path)}` creates it again if possible") from None


def read_rounds(folder: Path) -> list[RoundRecord]:
    """Read the records of all rounds so far."""
    return read_lines(folder / METRICS, RoundRecord, REPEAT, ROUND)


def read_clients(folder: Path) -> list[ClientRow]:
    """Read the clients' results of the last evaluation; empty before the end of the run."""
    rows = read_lines(folder / CLIENTS, ClientRow, REPEAT)
    for number, row in enumerate(rows, 1):
        if len(row["right"]) != len(row["total"]):
            raise UserError(
                f"'{folder / CLIENTS}', line {number} cannot be used: right has {len(row['right'])} entries, but total "
                f"has {len(row['total'])}; {REPEAT}"
            )
    return rows


def read_facts(folder: Path) -> TaskFacts:
    """Read the facts about the data that are needed to use a run's models without the data."""
    return read_json(folder / TASK, TaskFacts, REPEAT)


def read_newcomers(folder: Path) -> Newcomers | None:
    """Return the accuracies of newcomers in a comparison's folder; None if there are none."""
    file = folder / NEWCOMERS
    return read_json(file, Newcomers, "remove it and resume the comparison") if file.exists() else None


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file atomically; NaN and infinity become null."""
    write_whole(path, (json.dumps(without_nan(value), indent=1) + "\n").encode())


def _line(row: RoundRecord | ClientRow) -> bytes:
    return (json.dumps(without_nan(row)) + "\n").encode()


def versions() -> dict[str, str]:
    """Return the versions of Python, packages, the system, the user's code and files of weights."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    found["torch"] = torch.__version__  # includes the build (cpu, cu130)
    return found | registry.sources() | weights.files()
