"""Several runs at a time, each a process of one thread. Ctrl-C is passed on: each stops with a checkpoint."""

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
from fedloom.core import signals as following
from fedloom.core import trusted_code
from fedloom.core.errors import RunError
from fedloom.core.signals import Interrupts
from fedloom.engines.cuda import connections

Process = subprocess.Popen[bytes]

PATIENCE = 10
"""Seconds that a process has to end, once nobody waits for its result."""


@dataclass
class _Run:
    recipe: Recipe
    process: Process
    said: Path


def keep_busy(
    begin: Callable[[], Process | None], count: int, interrupts: Interrupts, on_end: Callable[[Process], None]
) -> None:
    """So many processes at a time; `begin` starts the next one, or has none. Returns when all have ended.

    A signal is passed on, and nothing begins after it.
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
    """For a child process: it imports this fedloom, and nothing because it lies in the current folder."""
    here = str(Path(__file__).parents[2])
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}


def fedloom_process(
    arguments: Sequence[str], count: int, said: IO[bytes] | None = None, own: Mapping[str, str] | None = None
) -> Process:
    """A command of `fedloom`, one of so many, with variables of its `own`; what it tells goes into `said`, or on.

    It has its own session: Ctrl-C in a terminal reaches it once, through this process, and it stops when this process
    has ended. It may import the Python files that this process may, with the same content.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "fedloom", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        env=environment(count)
        | safe_path()
        | trusted_code.environment()
        | {following.NAME: str(os.getpid())}
        | dict(own or {}),
        start_new_session=True,
    )


def run_beside(
    recipes: Sequence[Recipe], count: int, interrupts: Interrupts, on_end: Callable[[Recipe], None] = lambda _: None
) -> None:
    """Runs them, `count` at a time. Returns when all are done, or when it was interrupted and all have stopped."""
    waiting, running, failed = deque(recipes), list[_Run](), list[_Run]()
    count = min(count, len(waiting))
    with TemporaryDirectory(prefix="fedloom-") as folder:

        def begin() -> Process | None:
            if failed or not waiting:
                return None
            running.append(_start(waiting.popleft(), Path(folder) / str(len(waiting)), count))
            return running[-1].process

        def end(process: Process) -> None:
            run = next(run for run in running if run.process is process)
            if process.returncode == 0:
                on_end(run.recipe)
            elif interrupts.asked is None:
                failed.append(run)

        keep_busy(begin, count, interrupts, end)
        if failed:
            raise RunError(f"the run in '{failed[0].recipe.out}' failed: {_last_words(failed[0].said)}")


def environment(count: int) -> dict[str, str]:
    """Of one of so many processes: one thread, and a share of the queues to a GPU."""
    return os.environ | connections.share(count) | {"OMP_NUM_THREADS": "1"}


def _start(recipe: Recipe, place: Path, count: int) -> _Run:
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    place.with_suffix(".yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with place.with_suffix(".txt").open("wb") as said:
        process = fedloom_process(["run", str(place.with_suffix(".yaml")), "--resume"], count, said)
    return _Run(recipe, process, place.with_suffix(".txt"))


def _end(running: Sequence[Process]) -> None:
    """After a second Ctrl-C, or an error here."""
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(file: Path) -> str:
    """What it said from its error on."""
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("error: ")[2] or "it said nothing"
