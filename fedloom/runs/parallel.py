"""Parallel runs, each in a single-threaded process. Ctrl-C is forwarded, so that each run stops with a checkpoint."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import IO, Any

import yaml

from fedloom.config.recipe import Recipe
from fedloom.core import signals, trusted_code
from fedloom.core.errors import RunError
from fedloom.core.signals import Interrupts
from fedloom.data.shared import SharedDatasets
from fedloom.engines.cuda import connections

Process = subprocess.Popen[bytes]

PATIENCE = 10
"""Seconds between SIGTERM and SIGKILL for a process whose result is not needed any more."""


@dataclass
class _Run:
    recipe: Recipe
    process: Process
    stderr: Path


def keep_busy(
    begin: Callable[[], Process | None], count: int, interrupts: Interrupts, on_end: Callable[[Process], None]
) -> None:
    """Keep `count` processes running until all work is done.

    An interrupt is forwarded to the running processes, and no process is started after it.

    Args:
        begin: Starts the next process; returns None if all have been started.
        count: Maximum number of processes at a time.
        interrupts: Signals received by this process.
        on_end: Called with each process that has ended.
    """
    running: list[Process] = []
    asked = False
    try:
        while True:
            if interrupts.asked is not None and not asked:
                asked = True
                for process in running:
                    process.send_signal(interrupts.asked)
            while interrupts.asked is None and len(running) < count and (begun := begin()) is not None:
                running.append(begun)
            if not running:
                return
            sleep(0.05)
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                on_end(process)
    finally:
        _end(running)


def safe_path() -> dict[str, str]:
    """Return environment variables for a child process: it imports this fedloom and no file of the current folder."""
    here = str(Path(__file__).parents[2])
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}


def fedloom_process(
    arguments: Sequence[str],
    count: int,
    stderr: IO[bytes] | None = None,
    own: Mapping[str, str] | None = None,
    inherited: Sequence[int] = (),
) -> Process:
    """Start a `fedloom` command as a child process, in a new session.

    Because of the session, Ctrl-C in a terminal reaches the child once, forwarded by this process. The child stops when
    this process ends. It may import the Python files that this process may import, if their content is unchanged.

    Args:
        arguments: Arguments of the command.
        count: Number of such processes that run at a time; they share the GPU's connections.
        stderr: File for the child's stderr; default: this process's stderr.
        own: Additional environment variables.
        inherited: File descriptors that the child inherits.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "fedloom", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=environment(count)
        | safe_path()
        | trusted_code.environment()
        | {signals.LEADER: str(os.getpid())}
        | dict(own or {}),
        start_new_session=True,
        pass_fds=inherited,
    )


def run_parallel(
    recipes: Sequence[Recipe],
    count: int,
    interrupts: Interrupts,
    on_end: Callable[[Recipe], None] = lambda _: None,
    datasets: SharedDatasets | None = None,
) -> None:
    """Run recipes, `count` at a time; return when all are finished, or all have stopped after an interrupt.

    Args:
        recipes: Recipes to run.
        count: Maximum number of runs at a time.
        interrupts: Signals received by this process.
        on_end: Called with the recipe of each run that has finished.
        datasets: Datasets that the runs map instead of loading them.

    Raises:
        RunError: A run failed. No run is started after that, and runs that were already started have ended.
    """
    waiting, running, failed = deque(recipes), list[_Run](), list[_Run]()
    count = min(count, len(waiting))
    with TemporaryDirectory(prefix="fedloom-") as folder:

        def begin() -> Process | None:
            if failed or not waiting:
                return None
            running.append(_start(waiting.popleft(), Path(folder) / str(len(waiting)), count, datasets))
            return running[-1].process

        def end(process: Process) -> None:
            run = next(run for run in running if run.process is process)
            if process.returncode == 0:
                on_end(run.recipe)
            elif interrupts.asked is None:
                failed.append(run)

        keep_busy(begin, count, interrupts, end)
        if failed:
            raise RunError(f"the run in '{failed[0].recipe.out}' failed: {_error_text(failed[0].stderr)}")


def environment(count: int) -> dict[str, str]:
    """Return the environment of one of `count` processes: one thread, and its share of the GPU's connections."""
    return os.environ | connections.share(count) | {"OMP_NUM_THREADS": "1"}


def _start(recipe: Recipe, place: Path, count: int, datasets: SharedDatasets | None) -> _Run:
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    place.with_suffix(".yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with place.with_suffix(".txt").open("wb") as stderr:
        arguments = ["run", str(place.with_suffix(".yaml")), "--resume"]
        own, inherited = ({}, []) if datasets is None else (datasets.environment, datasets.inherited)
        process = fedloom_process(arguments, count, stderr, own, inherited)
    return _Run(recipe, process, place.with_suffix(".txt"))


def _end(running: Sequence[Process]) -> None:
    """Terminate the processes that are still running, after a second Ctrl-C or an error in this process."""
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _error_text(file: Path) -> str:
    """Return the text after the last `error: ` of a process's stderr."""
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("error: ")[2] or "it wrote no message"
