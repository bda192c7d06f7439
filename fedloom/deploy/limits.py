"""What one job may cost an organisation: parameters, bytes, epochs, seconds and memory, checked beforehand."""

import logging
import math
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.limits import gigabytes
from fedloom.core.state import tensors_of
from fedloom.core.task import Task

DEFAULT_MEMORY_SHARE = 0.5
"""Of the machine's memory, unless the consent says otherwise."""
STEPS = ("steps", "inner")
"""In the names of hyperparameters that count steps."""
STEPS_OF_AN_EPOCH = 100
"""What such a hyperparameter may be, for each epoch that is allowed; `seconds` limit the rest."""
COPIES = 4
"""Of what a method builds, while a job runs: at work, as it was received, as it began, and gradients."""
AGAIN_SECONDS, MISSES = 0.05, 100
"""After the time is up, how often a job is interrupted again, and how often a bad moment is let pass."""
log = logging.getLogger("fedloom")


class LimitError(UserError):
    """A job exceeds what this organisation allows."""


class TimeLimitError(LimitError):
    """A job takes longer than this organisation allows."""


@dataclass(frozen=True)
class JobLimits:
    """Of one job; defaults suit the networks of this field."""

    parameters: int = 100_000_000
    """Numbers in all parts that a method holds: networks, copies, buffers."""
    message_bytes: int = 2**30
    """Of a message that comes, or leaves."""
    epochs: int = 100
    """Of `training.epochs`, and of every hyperparameter of the method that counts epochs."""
    seconds: float = 3600
    memory_bytes: int = 0
    """Beyond what the process holds when a job begins; 0: half of the machine's memory."""

    @property
    def memory(self) -> int:
        """Bytes that a job may take."""
        if self.memory_bytes:
            return self.memory_bytes
        return int(DEFAULT_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def check(self, recipe: Recipe, task: Task) -> None:
        """Raises LimitError unless a job of this recipe stays within parameters, bytes and epochs."""
        options = {f"method.{name}": value for name, value in vars(recipe.make_method()).items()}
        for field, value in {"training.epochs": recipe.training.epochs, **options}.items():
            steps = any(word in field for word in STEPS)
            most = self.epochs * STEPS_OF_AN_EPOCH if steps else self.epochs
            if (steps or "epochs" in field) and isinstance(value, int | float) and value > most:
                raise LimitError(f"{field} = {value}: this organisation allows {most} (--max-epochs)")
        tensors = _tensors(recipe, task)
        count = sum(tensor.numel() for tensor in tensors)
        if count > self.parameters:
            raise LimitError(
                f"model.name = '{recipe.model.name}': {recipe.method.name} holds {count:,} parameters with it, and "
                f"this organisation allows {self.parameters:,} (--max-parameters)"
            )
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size > self.message_bytes or COPIES * size > self.memory:
            raise LimitError(
                f"model.name = '{recipe.model.name}': {recipe.method.name} holds {gigabytes(size)} with it, {COPIES} "
                f"times over, and this organisation allows {gigabytes(self.message_bytes)} for a message and "
                f"{gigabytes(self.memory)} of memory (--max-message-mb, --max-memory-gb)"
            )

    def lines(self) -> Iterator[str]:
        """In words, for the organisation that is asked for its consent."""
        yield (
            f"limits of a job: {self.parameters:,} parameters, messages of {self.message_bytes / 2**20:,.0f} MiB, "
            f"{self.epochs} epochs, {self.seconds:g} s, {gigabytes(self.memory)} of memory"
        )

    @contextmanager
    def enforced(self, *, interruptible: bool) -> Iterator[None]:
        """Ends what takes longer than `seconds`, and refuses memory beyond `memory`, while a job runs.

        A thread on a GPU cannot be ended: unless the job is `interruptible`, this process ends instead.
        """
        with self._memory_limit(), self._time_limit(interruptible):
            yield

    @contextmanager
    def _memory_limit(self) -> Iterator[None]:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.memory / total))
        before, held = resource.getrlimit(resource.RLIMIT_DATA), _data_bytes()
        if held is None:
            yield
            return
        most = held + self.memory
        if before[1] != resource.RLIM_INFINITY:
            most = min(most, before[1])
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    @contextmanager
    def _time_limit(self, interruptible: bool) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread() or math.isinf(self.seconds):
            yield  # signals reach the main thread alone; `fedloom deploy client` works there
            return

        missed = 0

        def late(number: int, frame: FrameType | None) -> None:
            nonlocal missed
            inside = frame is not None and str(frame.f_globals.get("__name__")).startswith(("fedloom.", "torch."))
            if not inside and missed < MISSES:  # perhaps a callback of the garbage collector, where errors are lost
                missed += 1
                return
            words = f"a job took longer than {self.seconds:g} s (--max-seconds)"
            if not interruptible:
                log.error(f"{words}; it cannot be stopped on a GPU, so this client ends: start it again")
                os._exit(1)
            raise TimeLimitError(words)

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _tensors(recipe: Recipe, task: Task) -> list[Tensor]:
    """All that the method builds, on torch's meta device, where nothing is allocated."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            parts = recipe.make_method().build(task)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise LimitError(
            f"model.name = '{recipe.model.name}': its size cannot be counted ({type(error).__name__}); choose another"
        ) from None
    return [tensor for part in parts.values() for tensor in tensors_of(part)]


def _data_bytes() -> int | None:
    """What RLIMIT_DATA counts of this process now; unknown outside Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData")), None)
