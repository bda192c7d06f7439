"""Reader of run folders, finished or not: recipe, rounds, results per client, summary, log."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, with_config
from typing_extensions import TypedDict

from fedloom.config.loading import flat, is_free
from fedloom.core.errors import UserError
from fedloom.core.reading import CHECKED, Count, conforming, decoding
from fedloom.experiment.records import ClientRow, Figures, Named, RoundRecord, Summary, measure
from fedloom.experiment.run_folder import (
    FAILURE,
    RECIPE,
    REPEAT,
    TASK,
    RunState,
    finished,
    holds_run,
    read_clients,
    read_facts,
    read_rounds,
    run_state,
    stored_values,
    stored_versions,
)
from fedloom.experiment.summary import summary_of

LOG_LINES = 200
LOG_BYTES = 2**20


@with_config(CHECKED)
class _Training(TypedDict):
    rounds: Count


@with_config(CHECKED)
class _Evaluation(TypedDict):
    summary: Annotated[str, Field(pattern=r"^(last|(median|mean):[1-9]\d{0,8})$")]


@with_config(CHECKED)
class StoredRecipe(TypedDict):
    """The fields of a run's recipe that a report needs; Python files named in the recipe are not imported."""

    method: Named
    model: Named
    data: Named
    training: _Training
    evaluation: _Evaluation
    seed: Count


@dataclass(frozen=True)
class Run:
    """Content of a run folder, of a finished or unfinished run."""

    path: Path
    recipe: dict[str, Any]
    history: list[RoundRecord]
    clients: list[ClientRow]
    """Results of each client in the last evaluation, without newcomers; empty until the run has finished."""
    done: Summary | None
    """The summary of a finished run; None while it is unfinished."""
    log: list[str]
    versions: dict[str, str]
    classes: list[str]
    """Names of the classes; empty if they are unknown."""
    state: RunState = "finished"
    error: str = ""
    """The error that ended a failed run."""
    members: int | None = None
    """Number of clients, without newcomers; None if it is unknown."""
    newcomers: int = 0
    """Number of clients held out of training."""

    @property
    def seed(self) -> int:
        """The seed of the recipe."""
        return int(self.recipe["seed"])

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.recipe["method"]["name"])

    @property
    def rounds(self) -> int:
        """The number of rounds in the recipe."""
        return int(self.recipe["training"]["rounds"])

    @cached_property
    def tested(self) -> list[RoundRecord]:
        """The records of rounds with an evaluation."""
        return [record for record in self.history if "evaluated" in record]

    @cached_property
    def summary(self) -> Figures | Summary:
        """The run's summary; of the rounds so far if it is unfinished, empty before the first round."""
        if self.done is not None or not self.history:
            return self.done or Figures()
        evaluation = self.recipe["evaluation"]
        figures = summary_of(self.history, evaluation["summary"], (), name=evaluation.get("measure", "accuracy"))
        figures["seconds"] = sum(record["seconds"] for record in self.history)
        return figures


@dataclass
class Entry:
    """Runs that differ only in the seed."""

    label: str
    runs: list[Run] = field(default_factory=list)

    @property
    def first(self) -> Run:
        """The run with the smallest seed, used where only one run can be shown."""
        return self.runs[0]

    def known(self, name: str) -> list[float]:
        """Return a value of the summary of every run that has it."""
        return [value for run in self.runs if (value := measure(run.summary, name)) is not None]

    @property
    def group(self) -> str:
        """The name of this entry's legend group."""
        return f"method:{self.label}"

    @property
    def state(self) -> str:
        """The states of its unfinished runs in words, such as `running` or `killed, failed`; empty if all finished."""
        return ", ".join(dict.fromkeys(run.state for run in self.runs if run.done is None))


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read the runs in some folders.

    Args:
        paths: Folders of single runs, or folders with runs below them (of a comparison or a sweep).

    Returns:
        The runs, each once.

    Raises:
        UserError: If a folder holds no run, or a file in it cannot be read.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        folders = [path] if holds_run(path) else sorted(file.parent for file in path.glob(f"**/{RECIPE}"))
        if not folders:
            raise UserError(
                f"'{path}' holds no run (no {RECIPE} in it or in a subfolder): give the folder that `fedloom run` or "
                "`fedloom compare` printed, such as runs/20250101-120000-compare"
            )
        found |= {folder.resolve(): read_run(folder) for folder in folders}
    return list(found.values())


def read_run(path: Path) -> Run:
    """Read one run folder.

    Args:
        path: The folder.

    Returns:
        The run.

    Raises:
        UserError: If a file cannot be read, or files contradict each other.
    """
    recipe: dict[str, Any] = {**conforming(stored_values(path), StoredRecipe, f"'{path / RECIPE}'", REPEAT)}
    facts = read_facts(path) if (path / TASK).exists() else None
    classes = facts["classes"] if facts else []
    clients = read_clients(path)
    for row in clients if facts else ():
        if facts and (row["client"] >= facts["clients"] or len(row["total"]) not in (1, len(classes))):
            raise UserError(
                f"'{path}': clients.jsonl has client {row['client']} with {len(row['total'])} classes, but task.json "
                f"has {facts['clients']} clients (numbered from 0) and {len(classes)} classes; {REPEAT}"
            )
    versions = {name: str(version) for name, version in stored_versions(path).items()}
    state, log, error = run_state(path), _lines(path / "log.txt"), " ".join(_lines(path / FAILURE))
    held_out = facts["newcomers"] if facts else [row["client"] for row in clients if row["newcomer"]]
    return Run(
        path, recipe, read_rounds(path), [row for row in clients if not row["newcomer"]], finished(path), log, versions,
        classes, state, error, facts["clients"] - len(held_out) if facts else None, len(held_out),
    )  # fmt: skip


def _lines(path: Path) -> list[str]:
    """Return the last lines of a text file; none if there is no such file."""
    if not path.is_file():
        return []
    with decoding(f"'{path}'", "a log", "remove it"), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()[-LOG_LINES:]


def entries_of(runs: Iterable[Run]) -> list[Entry]:
    """Group runs that differ only in the seed.

    Args:
        runs: The runs.

    Returns:
        The groups, sorted by seed inside. A group is labelled with its method; if a method occurs with several
        settings, with the settings that differ too.
    """
    same: dict[str, list[Run]] = defaultdict(list)
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        values = {name: value for name, value in flat(run.recipe) if name != "seed" and not is_free(name)}
        key = repr(sorted(values.items()))
        same[key].append(run)
        settings[key] = values
    times = Counter(group[0].method for group in same.values())
    entries = []
    for key, group in same.items():
        method = group[0].method
        others = [settings[k] for k, g in same.items() if g[0].method == method]
        words = [method] if times[method] == 1 else [method, *_differences(settings[key], others)]
        entries.append(Entry(" ".join(words), sorted(group, key=lambda run: run.seed)))
    return entries


def _differences(mine: dict[str, Any], others: list[dict[str, Any]]) -> list[str]:
    names = [name for name in mine if any(other.get(name) != mine[name] for other in others)]
    return [f"{name.rpartition('.')[2]}={mine[name]}" for name in names]
