"""A cohort's steps as CUDA graphs."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedloom.core.workspace import StepCache, Workspace
from fedloom.engines.cuda.capture import Pool, capture
from fedloom.engines.cuda.feed import Feed
from fedloom.engines.cuda.graphs import SMALLEST, Shared, attempted
from fedloom.engines.cuda.tracing import Function, compile_batched


class CohortGraphs:
    """How a cohort records its steps: as CUDA graphs in this stream."""

    def __init__(self, shared: Shared, stream: torch.cuda.Stream, nearly_done: torch.cuda.Event):
        self._shared, self._stream, self._event = shared, stream, nearly_done
        self._pool = Pool()

    def feed(self, capacity: int) -> Feed:
        """Room for so many samples."""
        return Feed(max(SMALLEST, capacity), self._stream.device)

    def compiled(self, function: Function, inputs: list[Tensor]) -> Function:
        """By torch's inductor, with `engine.compile`."""
        if not self._shared.compile:
            return function

        def made() -> Function:
            compiled = compile_batched(function, inputs)
            with torch.no_grad():
                compiled(*inputs)  # warm-up: the first call tunes kernels
            return compiled

        with self._shared.turn.aside(), self._shared.capturing:
            return attempted(made) or function

    def record(self, work: Callable[[], None], drawing: Sequence[Workspace]) -> Callable[[], None] | None:
        """The work as a graph; none, and a warning, if that is not possible."""
        with self._shared.turn.aside():
            work()  # warm-up: libraries load what they need
            self._stream.synchronize()
            with self._shared.capturing:
                try:
                    return capture(work, drawing, self._pool).replay
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    warnings.warn(f"engine.cohort: steps in step cannot be captured: {error}", stacklevel=2)
                    return None

    def settle(self) -> None:
        """Waits for this stream."""
        self._stream.synchronize()

    def refuse(self, site: StepCache, error: Exception) -> None:
        """These steps run eagerly, and it is said once."""
        self._shared.give_up(site, error)

    def separate(self, error: Exception) -> None:
        """Says so."""
        warnings.warn(f"engine.cohort: some training steps are taken alone, not together: {error}", stacklevel=2)

    def nearly_done(self) -> None:
        """Time to prepare what follows."""
        self._event.record(self._stream)
