"""Several runs at a time, each a process of one thread. Ctrl-C is passed on: each stops with a checkpoint."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

import yaml

from fedloom.engines import queues
from fedloom.errors import RunError
from fedloom.recipe import Recipe
from fedloom.runs.interrupts import Interrupts

PATIENCE = 10
"""Seconds that a process has to end, once nobody waits for its result."""


@dataclass
class _Run:
    recipe: Recipe
    process: subprocess.Popen[bytes]
    said: Path


def run_beside(
    recipes: Sequence[Recipe], count: int, interrupts: Interrupts, on_end: Callable[[Recipe], None] = lambda _: None
) -> None:
    """Runs them, `count` at a time. Returns when all are done, or when it was interrupted and all have stopped."""
    waiting, running = deque(recipes), list[_Run]()
    count = min(count, len(waiting))
    failed: _Run | None = None
    asked = False
    with TemporaryDirectory(prefix="fedloom-") as folder:
        try:
            while running or (waiting and not failed and not asked):
                if interrupts.asked is not None and not asked:
                    asked = True
                    for run in running:
                        run.process.send_signal(interrupts.asked)
                while waiting and len(running) < count and not failed and not asked:
                    running.append(_start(waiting.popleft(), Path(folder) / str(len(waiting)), count))
                sleep(0.05)
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    if run.process.returncode == 0:
                        on_end(run.recipe)
                    elif not asked:
                        failed = failed or run
            if failed is not None:
                raise RunError(f"the run in '{failed.recipe.out}' failed: {_last_words(failed.said)}")
        finally:
            _end(running)


def environment(count: int) -> dict[str, str]:
    """Of one of so many processes: one thread, and a share of the queues to a GPU."""
    return os.environ | queues.share(count) | {"OMP_NUM_THREADS": "1"}


def _start(recipe: Recipe, place: Path, count: int) -> _Run:
    """A session of its own: Ctrl-C in a terminal reaches it once, through us."""
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    place.with_suffix(".yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-m", "fedloom", "run", str(place.with_suffix(".yaml")), "--resume"]
    with place.with_suffix(".txt").open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=environment(count),
            start_new_session=True,
        )
    return _Run(recipe, process, place.with_suffix(".txt"))


def _end(running: Sequence[_Run]) -> None:
    """After a second Ctrl-C, or an error here."""
    for run in running:
        run.process.terminate()
    for run in running:
        try:
            run.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


def _last_words(file: Path) -> str:
    """What it said from its error on."""
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("error: ")[2] or "it said nothing"
