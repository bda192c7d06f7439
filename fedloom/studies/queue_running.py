"""Runs a queue: each run in its own process with a log, several at once, and what a queue's rest would take."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from fedloom.config.recipe import Recipe
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.runs.parallel import Process, fedloom_process, keep_busy
from fedloom.studies import cost
from fedloom.studies.queue import Entry, QueuedRun, State
from fedloom.studies.report import command
from fedloom.studies.results import BESIDE, machine, stored
from fedloom.studies.running import SAME, StudyPlan
from fedloom.studies.table import PAPERS, Cell

LAST_LINES = 5
"""Of a failed run's log, in the report of failures."""


@dataclass(frozen=True)
class Failure:
    """A run that failed, with the end of its log."""

    command: str
    exit_code: int
    log: Path

    @property
    def said(self) -> str:
        """The last lines of the log."""
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-LAST_LINES:])


def arguments_of(cells: Sequence[Cell], plan: StudyPlan) -> list[str]:
    """The arguments of `fedloom` that make this run in another process, and store its result."""
    line = [*command(cells[0])[1:], "--seed", str(plan.seed), "--scale", f"{plan.scale}"]
    line += ["--results", str(plan.results)] + ["--reduced"] * bool(plan.shortened) + ["--again"] * plan.again
    return line + [f"--set={path}={value}" for path, value in plan.trial.items()]


def run_queue(
    runs: Sequence[QueuedRun], many: int, plan: StudyPlan, interrupts: Interrupts, tell: Callable[[str], None]
) -> list[Failure]:
    """Run what is not stored, in order, `many` at a time. None is started after the plan's deadline.

    A run stores its result when it is finished; one that fails does not stop the others.

    Args:
        runs: The queue's runs.
        many: Processes at a time.
        plan: Has the deadline.
        interrupts: A signal is passed on: each run stops with a checkpoint.
        tell: Called with a line of text for each run that has ended.

    Returns:
        The runs that failed.

    Raises:
        Interrupted: A signal came; all runs have stopped.
    """
    waiting = deque(run for run in runs if run.state not in ("done", "running"))
    total, ended = len(waiting), 0
    many = max(1, min(many, total))
    busy: dict[int, tuple[QueuedRun, float]] = {}
    failures: list[Failure] = []

    def begin() -> Process | None:
        if waiting and plan.left <= 0:
            tell(f"time is up: {len(waiting)} of {total} runs were not started")
            waiting.clear()
        if not waiting:
            return None
        run = waiting.popleft()
        run.log.parent.mkdir(parents=True, exist_ok=True)
        run.failure.unlink(missing_ok=True)
        limit = [] if plan.deadline is None else ["--limit-seconds", f"{plan.left:.0f}"]
        with run.log.open("wb") as log:
            process = fedloom_process([*arguments_of(run.cells, run.plan), *limit], many, log, {BESIDE: str(many)})
        busy[process.pid] = run, monotonic()
        return process

    def end(process: Process) -> None:
        nonlocal ended
        run, began = busy.pop(process.pid)
        words = f"{described(run)} after {cost.in_words(monotonic() - began)}"
        ended += 1
        if process.returncode and interrupts.asked is None:
            run.log.replace(run.failure)
            failures.append(Failure(described(run), process.returncode, run.failure))
            tell(f"[{ended}/{total}] failed with exit code {process.returncode}: {words}; log: {run.failure}")
            return
        run.log.unlink(missing_ok=True)
        how = "done" if run.result.exists() else f"stopped after round {run.round} of {run.recipe.training.rounds}"
        tell(f"[{ended}/{total}] {how}: {words}")

    keep_busy(begin, many, interrupts, end)
    if interrupts.asked is not None:
        raise Interrupted(f"stopped with {len(waiting)} of {total} runs not started", SAME, interrupts.asked)
    return failures


def described(run: QueuedRun) -> str:
    """`fedcrc/table1 cifar10-beta0.1 fedavg, seed 0`"""
    cell = run.cells[0]
    return f"{cell.table} {cell.place} {cell.row}, seed {run.plan.seed}"


@dataclass(frozen=True)
class EntryStatus:
    """What has become of an entry's runs, and what the rest would take."""

    entry: Entry
    runs: tuple[tuple[QueuedRun, State], ...]
    steps: float
    """image-steps that are left"""
    seconds: float
    """that these take, as far as speeds are known"""
    unknown: int
    """runs that are left and whose speed is not known"""

    def count(self, state: State) -> int:
        """How many runs are in this state."""
        return sum(other == state for _, other in self.runs)


def _machine(left: Sequence[QueuedRun], known: dict[cost.Workload, float]) -> str:
    here = machine(Recipe.parse({"method": "fedavg"}))
    of = {name: sum(cost.kind(run.recipe, name) in known for run in left) for name in {name for name, _, _ in known}}
    return max([here, *sorted(of)], key=lambda name: of.get(name, 0))  # the first of several


def status(entries: Sequence[tuple[Entry, list[QueuedRun]]], results: Path) -> tuple[list[EntryStatus], str]:
    """The state of each entry, and the machine whose speed the times are of.

    That is the machine on which most of what is left has a known speed, this one if it is among several. Times are of a
    machine that is kept busy with several runs. A run that two entries have is in both, and its cost in the first.
    """
    known = cost.speeds((result for paper in PAPERS for result in stored(results, paper)), shared=True)
    where = _machine([run for _, runs in entries for run in runs if run.state != "done"], known)
    counted: set[Path] = set()
    found = []
    for entry, runs in entries:
        states = tuple((run, run.state) for run in runs)
        left = [run for run, state in states if state != "done" and run.result not in counted]
        counted |= {run.result for run in left}
        shares = {run.result: 1 - run.round / run.recipe.training.rounds for run in left}
        times = [(run, cost.seconds(run.recipe, known, where)) for run in left]
        found.append(
            EntryStatus(
                entry,
                states,
                steps=sum(cost.image_steps(run.recipe) * shares[run.result] for run in left),
                seconds=sum(time * shares[run.result] for run, time in times if time is not None),
                unknown=sum(time is None for _, time in times),
            )
        )
    return found, where
