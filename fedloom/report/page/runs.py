"""Reads run folders: what was asked for, every round, every client, the summary; finished or not."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.experiment.records import ClientRow, Figures, RoundRecord, Summary, measure
from fedloom.experiment.resume import flat, is_free
from fedloom.experiment.run_folder import RECIPE, finished, holds_run, read_lines, stored_values
from fedloom.experiment.summary import summary_of

LOG_LINES = 200


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
    recipe = stored_values(path)
    for name in ("method", "data", "training", "evaluation", "seed"):
        if name not in recipe:
            raise UserError(f"'{path / RECIPE}' is no run's recipe: it has no {name}")
    log = _text(path / "log.txt").splitlines()[-LOG_LINES:]
    versions, facts = (json.loads(_text(path / name) or "{}") for name in ("versions.json", "task.json"))
    history, clients = (read_lines(path / name) for name in ("metrics.jsonl", "clients.jsonl"))
    return Run(path, recipe, history, clients, finished(path), log, versions, facts.get("classes", []))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def entries_of(runs: Iterable[Run]) -> list[Entry]:
    """Runs with the same settings together, named by the method and by what else tells them apart."""
    same: dict[str, list[Run]] = defaultdict(list)
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        values = {name: value for name, value in flat(run.recipe) if name != "seed" and not is_free(name)}
        key = json.dumps(values, sort_keys=True, default=str)
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
