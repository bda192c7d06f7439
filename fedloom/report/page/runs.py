"""Reads run folders: what was asked for, every round, every client, the summary; finished or not."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, with_config
from typing_extensions import TypedDict

from fedloom.core.errors import UserError
from fedloom.core.reading import CHECKED, Count, conforming, decoding
from fedloom.experiment.records import ClientRow, Figures, Named, RoundRecord, Summary, measure
from fedloom.experiment.resume import flat, is_free
from fedloom.experiment.run_folder import (
    RECIPE,
    REPEAT,
    TASK,
    finished,
    holds_run,
    read_clients,
    read_facts,
    read_rounds,
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
    """As much of a run's recipe as a report needs; files of code that it names are not imported for that."""

    method: Named
    model: Named
    data: Named
    training: _Training
    evaluation: _Evaluation
    seed: Count


@dataclass(frozen=True)
class Run:
    """One run's folder, as far as it has come."""

    path: Path
    recipe: dict[str, Any]
    history: list[RoundRecord]
    clients: list[ClientRow]
    """A line per client of the last evaluation; empty before the end."""
    done: Summary | None
    """The summary of a finished run."""
    log: list[str]
    versions: dict[str, str]
    classes: list[str]
    """Their names, where they are known."""

    @property
    def seed(self) -> int:
        """Of everything random."""
        return int(self.recipe["seed"])

    @property
    def method(self) -> str:
        """Its name."""
        return str(self.recipe["method"]["name"])

    @property
    def rounds(self) -> int:
        """That were asked for."""
        return int(self.recipe["training"]["rounds"])

    @cached_property
    def tested(self) -> list[RoundRecord]:
        """Rounds with an evaluation."""
        return [record for record in self.history if "evaluated" in record]

    @cached_property
    def summary(self) -> Figures | Summary:
        """The run's figures; those so far while it is not finished; none before the first round."""
        if self.done is not None or not self.history:
            return self.done or Figures()
        figures = summary_of(self.history, self.recipe["evaluation"]["summary"], ())
        figures["seconds"] = sum(record["seconds"] for record in self.history)
        return figures


@dataclass
class Entry:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: list[Run] = field(default_factory=list)

    @property
    def first(self) -> Run:
        """The one that stands for all where there is room for one."""
        return self.runs[0]

    def known(self, name: str) -> list[float]:
        """This figure of every run that has it."""
        return [value for run in self.runs if (value := measure(run.summary, name)) is not None]

    @property
    def group(self) -> str:
        """Its name in legends."""
        return f"method:{self.label}"


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in these folders: a run's own, or those below a comparison's or a sweep's."""
    found: dict[Path, Run] = {}
    for path in paths:
        folders = [path] if holds_run(path) else sorted(file.parent for file in path.glob(f"**/{RECIPE}"))
        if not folders:
            raise UserError(
                f"'{path}' holds no run (there is no {RECIPE} in it or below it): give the folder that `fedloom run` "
                "or `fedloom compare` named, such as runs/20250101-120000-compare"
            )
        found |= {folder.resolve(): read_run(folder) for folder in folders}
    return list(found.values())


def read_run(path: Path) -> Run:
    """One run."""
    recipe: dict[str, Any] = {**conforming(stored_values(path), StoredRecipe, f"'{path / RECIPE}'", REPEAT)}
    facts = read_facts(path) if (path / TASK).exists() else None
    classes = facts["classes"] if facts else []
    clients = read_clients(path)
    for row in clients if facts else ():
        if facts and (row["client"] >= facts["clients"] or len(row["total"]) not in (1, len(classes))):
            raise UserError(
                f"'{path}': clients.jsonl has client {row['client']} with {len(row['total'])} classes, and task.json "
                f"{facts['clients']} clients and {len(classes)} classes; {REPEAT}"
            )
    versions = {name: str(version) for name, version in stored_versions(path).items()}
    return Run(path, recipe, read_rounds(path), clients, finished(path), _log(path), versions, classes)


def _log(folder: Path) -> list[str]:
    """The end of a run's log."""
    path = folder / "log.txt"
    if not path.is_file():
        return []
    with decoding(f"'{path}'", "a log", "remove it"), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()[-LOG_LINES:]


def entries_of(runs: Iterable[Run]) -> list[Entry]:
    """Runs with the same settings together, named by the method and by what else tells them apart."""
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
