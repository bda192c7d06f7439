"""Execution of a queue, with one process and log per run, and estimates of the remaining time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from fedloom.config.recipe import Recipe
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.runs.parallel import Process, keep_busy
from fedloom.studies.outcome import machine
from fedloom.studies.plan import StudyPlan, values_of
from fedloom.studies.queue import Entry, QueuedRun, State
from fedloom.studies.report import command
from fedloom.studies.results import stored
from fedloom.studies.running import SAME, next_in_time, start
from fedloom.studies.table import BOARDS, PAPERS, Cell
from fedloom.studies.workload import Cost, Workload, cost_of, duration_in_words, speeds

LAST_LINES = 5
"""Number of lines of a failed run's log that are shown."""


@dataclass(frozen=True)
class Failure:
    """A failed run and its log."""

    command: str
    exit_code: int
    log: Path

    @property
    def last_lines(self) -> str:
        """The last lines of the log."""
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-LAST_LINES:])


def arguments_of(cells: Sequence[Cell], plan: StudyPlan) -> list[str]:
    """Return the arguments of the `fedloom` command that executes a run and stores its result."""
    line = [*command(cells[0])[1:], "--seed", str(plan.seed), "--scale", f"{plan.scale}"]
    line += ["--results", str(plan.results)] + ["--reduced"] * bool(plan.shortened) + ["--again"] * plan.again
    return line + [f"--set={path}={value}" for path, value in plan.trial.items()]


def run_queue(
    runs: Sequence[QueuedRun], parallel: int, plan: StudyPlan, interrupts: Interrupts, tell: Callable[[str], None]
) -> list[Failure]:
    """Run a queue: all runs without a stored result, in order, `parallel` at a time.

    A run stores its result when it has finished. A failed run does not stop the others. No run is started after the
    plan's deadline.

    Args:
        runs: The queue's runs.
        parallel: Number of concurrent processes.
        plan: The plan with the deadline.
        interrupts: Received signals. They are forwarded to the runs, which stop with a checkpoint.
        tell: Called with a line of text for each run that has ended.

    Returns:
        The runs that failed.

    Raises:
        Interrupted: After a signal, when all runs have stopped.
    """
    waiting = deque(run for run in runs if run.state not in ("done", "running"))
    total, ended = len(waiting), 0
    parallel = max(1, min(parallel, total))
    busy: dict[int, tuple[QueuedRun, float]] = {}
    failures: list[Failure] = []

    def begin() -> Process | None:
        run = next_in_time(waiting, plan, tell)
        if run is None:
            return None
        run.log.parent.mkdir(parents=True, exist_ok=True)
        run.failure.unlink(missing_ok=True)
        with run.log.open("wb") as log:
            process = start(arguments_of(run.cells, run.plan), parallel, plan, log)
        busy[process.pid] = run, monotonic()
        return process

    def end(process: Process) -> None:
        nonlocal ended
        run, began = busy.pop(process.pid)
        words = f"{described(run)} after {duration_in_words(monotonic() - began)}"
        ended += 1
        if process.returncode and interrupts.asked is None:
            run.log.replace(run.failure)
            failures.append(Failure(described(run), process.returncode, run.failure))
            tell(f"[{ended}/{total}] failed with exit code {process.returncode}: {words}; log: {run.failure}")
            return
        run.log.unlink(missing_ok=True)
        how = "done" if run.result.exists() else f"stopped after round {run.round} of {run.recipe.training.rounds}"
        tell(f"[{ended}/{total}] {how}: {words}")

    keep_busy(begin, parallel, interrupts, end)
    if interrupts.asked is not None:
        raise Interrupted(f"stopped with {len(waiting)} of {total} runs not started", SAME, interrupts.asked)
    return failures


def described(run: QueuedRun) -> str:
    """Describe a run: `fedcrc/table1 cifar10-beta0.1 fedavg, seed 0`."""
    cell = run.cells[0]
    return f"{cell.table} {cell.place} {cell.row}, seed {run.plan.seed}"


@dataclass(frozen=True)
class EntryStatus:
    """States of an entry's runs, and the cost of those that remain."""

    entry: Entry
    runs: tuple[tuple[QueuedRun, State], ...]
    steps: float
    """Remaining image-steps."""
    seconds: float
    """Remaining seconds of the runs whose speed is known."""
    unknown: int
    """Number of remaining runs whose speed is unknown."""

    def count(self, state: State) -> int:
        """Return the number of runs in a state."""
        return sum(other == state for _, other in self.runs)


def _cost(run: QueuedRun) -> Cost:
    return cost_of(values_of(run.cells[0], run.plan))


def _machine(left: Sequence[QueuedRun], known: dict[Workload, float]) -> str:
    here = machine(Recipe.parse({"method": "fedavg"}))
    workloads = [(cost.network, cost.size) for cost in map(_cost, left)]
    of = {name: sum((name, *one) in known for one in workloads) for name in {name for name, _, _ in known}}
    return max([here, *sorted(of)], key=lambda name: of.get(name, 0))  # in a tie, the first: this machine


def status(entries: Sequence[tuple[Entry, list[QueuedRun]]], results: Path) -> tuple[list[EntryStatus], str]:
    """Return the status of each entry, and the machine whose speeds the estimates use.

    That is the machine with known speeds for most of the remaining runs; in a tie, this machine. Times assume a machine
    that is kept busy with several runs. A run that two entries share is listed in both; its cost is counted in the
    first.
    """
    own = [run.cells[0].paper for _, runs in entries for run in runs]
    studies = dict.fromkeys((*PAPERS, *BOARDS, *own))
    known = speeds((result for study in studies for result in stored(results, study)), shared=True)
    where = _machine([run for _, runs in entries for run in runs if run.state != "done"], known)
    counted: set[Path] = set()
    found = []
    for entry, runs in entries:
        states = tuple((run, run.state) for run in runs)
        left = [run for run, state in states if state != "done" and run.result not in counted]
        counted |= {run.result for run in left}
        shares = {run.result: 1 - run.round / run.recipe.training.rounds for run in left}
        times = [(run, _cost(run).seconds(known, where)) for run in left]
        found.append(
            EntryStatus(
                entry,
                states,
                steps=sum(_cost(run).steps * shares[run.result] for run in left),
                seconds=sum(time * shares[run.result] for run, time in times if time is not None),
                unknown=sum(time is None for _, time in times),
            )
        )
    return found, where


def time_left(found: Sequence[EntryStatus], machine: str) -> str:
    """Say how long the remaining runs take: `time left: 4.0 h on NVIDIA H200, kept busy with several runs`."""
    known, unknown = sum(one.seconds for one in found), sum(one.unknown for one in found)
    if not any(one.count("done") < len(one.runs) for one in found):
        return "all runs are done"
    if not known:
        return f"time left: unknown; no run of the networks of {unknown} runs is stored"
    words = f"time left: {duration_in_words(known)} on {machine}, kept busy with several runs"
    return words + (f", and {unknown} runs of unknown speed" if unknown else "")
