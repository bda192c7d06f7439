"""Limits of a job at an organisation: parameters, bytes, epochs, seconds and memory."""

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
"""Default memory limit as a fraction of the machine's memory."""
STEPS = ("steps", "inner")
"""Words in the names of hyperparameters that count steps."""
STEPS_OF_AN_EPOCH = 100
"""Allowed steps per allowed epoch; the actual time is limited by `seconds`."""
COPIES = 4
"""Copies of a method's tensors while a job runs: current, received and initial values, and gradients."""
AGAIN_SECONDS, MISSES = 0.05, 100
"""After the time limit: seconds between two attempts to interrupt a job, and attempts that wait for a safe moment."""
log = logging.getLogger("fedloom")


class LimitError(UserError):
    """Raised if a job exceeds a limit of the organisation."""


class TimeLimitError(LimitError):
    """Raised if a job takes longer than the organisation allows."""


@dataclass(frozen=True)
class JobLimits:
    """Limits of one job; the defaults suit common networks in federated learning."""

    parameters: int = 100_000_000
    """Maximum number of elements in all parts of a method: networks, copies, buffers."""
    message_bytes: int = 2**30
    """Maximum size of a received or sent message."""
    epochs: int = 100
    """Maximum of `training.epochs` and of every hyperparameter of the method that counts epochs."""
    seconds: float = 3600
    """Maximum duration of a job."""
    memory_bytes: int = 0
    """Memory that a job may allocate in addition to what the process already uses; 0 means half of the machine's."""

    @property
    def memory(self) -> int:
        """Bytes that a job may allocate."""
        if self.memory_bytes:
            return self.memory_bytes
        return int(DEFAULT_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def check(self, recipe: Recipe, task: Task) -> None:
        """Check a recipe before it runs.

        Args:
            recipe: The recipe.
            task: The organisation's part of the recipe's task.

        Raises:
            LimitError: If a job of this recipe would exceed the limits of parameters, bytes or epochs.
        """
        options = {f"method.{name}": value for name, value in vars(recipe.make_method()).items()}
        for field, value in {"training.epochs": recipe.training.epochs, **options}.items():
            steps = any(word in field for word in STEPS)
            most = self.epochs * STEPS_OF_AN_EPOCH if steps else self.epochs
            if (steps or "epochs" in field) and isinstance(value, int | float) and value > most:
                raise LimitError(f"{field} = {value}: this organisation allows at most {most} (--max-epochs)")
        tensors = _tensors(recipe, task)
        count = sum(tensor.numel() for tensor in tensors)
        if count > self.parameters:
            raise LimitError(
                f"model.name = '{recipe.model.name}': {recipe.method.name} has {count:,} parameters with it, and this "
                f"organisation allows {self.parameters:,} (--max-parameters)"
            )
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size > self.message_bytes or COPIES * size > self.memory:
            raise LimitError(
                f"model.name = '{recipe.model.name}': {recipe.method.name} needs {COPIES} copies of {gigabytes(size)} "
                f"with it, and this organisation allows {gigabytes(self.message_bytes)} for a message and "
                f"{gigabytes(self.memory)} of memory (--max-message-mb, --max-memory-gb)"
            )

    def lines(self) -> Iterator[str]:
        """Yield lines that describe the limits to the organisation before it consents."""
        yield (
            f"limits of a job: {self.parameters:,} parameters, messages of {self.message_bytes / 2**20:,.0f} MiB, "
            f"{self.epochs} epochs, {self.seconds:g} s, {gigabytes(self.memory)} of memory"
        )

    @contextmanager
    def enforced(self, *, interruptible: bool) -> Iterator[None]:
        """Enforce the limits of time and memory while a job runs.

        Args:
            interruptible: Whether an exception in the main thread can stop the job. If not (threads that use a GPU),
                this process ends instead.

        Raises:
            TimeLimitError: If the job takes longer than `seconds`.
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
            yield  # Python handles signals only in the main thread, where `fedloom deploy client` runs its jobs
            return

        missed = 0

        def late(number: int, frame: FrameType | None) -> None:
            nonlocal missed
            inside = frame is not None and str(frame.f_globals.get("__name__")).startswith(("fedloom.", "torch."))
            if not inside and missed < MISSES:  # this may be a garbage collector callback, which swallows exceptions
                missed += 1
                return
            words = f"a job took longer than {self.seconds:g} s (--max-seconds)"
            if not interruptible:
                log.error(f"{words}; a job on a GPU cannot be stopped, so this client exits: start it again")
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
    """Return all tensors that the method builds, on torch's meta device, which allocates no memory."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            parts = recipe.make_method().build(task)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise LimitError(
            f"model.name = '{recipe.model.name}': its size cannot be determined ({type(error).__name__}); choose "
            "another model"
        ) from None
    return [tensor for part in parts.values() for tensor in tensors_of(part)]


def _data_bytes() -> int | None:
    """Return the current memory of this process that RLIMIT_DATA limits; None outside Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData")), None)
