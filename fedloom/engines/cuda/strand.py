"""A function that runs one stretch at a time: a coroutine for code that knows nothing of coroutines."""

from collections.abc import Callable

import torch
from greenlet import GreenletExit, getcurrent, greenlet


class Strand:
    """Work that pauses wherever it is, and goes on when it is resumed; all in one thread.

    Threads that wake each other go from core to core, and find their caches cold. What torch keeps per thread is then
    everybody's in turn: whether gradients are recorded is put back at every switch, other contexts (autocast, modes)
    must not be open at a pause.
    """

    def __init__(self) -> None:
        self._work: greenlet | None = None

    def begin(self, work: Callable[[], None]) -> bool:
        """Runs this until it pauses (true) or ends (false); what it raises is raised here."""
        self._work = greenlet(work)
        return self.resume()

    def resume(self) -> bool:
        """Goes on until the next pause (true) or the end (false)."""
        assert self._work is not None
        self._work.parent = getcurrent()
        with _own_mode():
            self._work.switch()
        return self._paused

    def pause(self) -> None:
        """Called by the work itself: back to whoever resumed it, until it does so again."""
        assert self._work is not None
        assert self._work.parent is not None
        with _own_mode():
            self._work.parent.switch()

    def cancel(self) -> None:
        """If it is in a pause, it does not go on from there."""
        while self._paused:
            assert self._work is not None
            self._work.parent = getcurrent()
            try:
                with _own_mode():
                    self._work.throw(GreenletExit)
            except Exception:  # what its cleaning up raises is nobody's answer any more
                pass
        self._work = None

    @property
    def _paused(self) -> bool:
        return self._work is not None and not self._work.dead


def _own_mode() -> torch.set_grad_enabled:
    """Whether gradients are recorded belongs to the thread, and so to whoever comes back into it."""
    return torch.set_grad_enabled(torch.is_grad_enabled())
