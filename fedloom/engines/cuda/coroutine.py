"""Work that can pause anywhere and continue later, in one thread."""

from collections.abc import Callable
from contextlib import suppress

import torch
from greenlet import GreenletExit, getcurrent, greenlet


class Coroutine:
    """Work that can pause anywhere, in this thread. Whether gradients are recorded is restored at every switch."""

    def __init__(self) -> None:
        self._work: greenlet | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Runs this until it pauses or ends; what it raises is raised here."""
        self._work = greenlet(work)
        self.resume()

    def resume(self) -> None:
        """Continues until the next pause or the end."""
        assert self._work is not None
        self._work.parent = getcurrent()
        _switch(self._work.switch)

    def pause(self) -> None:
        """Called by the work itself: returns to the caller of `begin` or `resume`, until it resumes."""
        assert self._work is not None
        assert self._work.parent is not None
        _switch(self._work.parent.switch)

    def cancel(self) -> None:
        """Ends work that is paused."""
        while self._work is not None and not self._work.dead:
            self._work.parent = getcurrent()
            with suppress(Exception):  # nobody waits for what its clean-up raises
                _switch(self._work.throw, GreenletExit)
        self._work = None


def _switch(switch: Callable[..., object], *args: object) -> None:
    """Goes elsewhere and comes back; whether gradients are recorded belongs to the thread, and is restored."""
    before = torch.is_grad_enabled()
    try:
        switch(*args)
    finally:
        if torch.is_grad_enabled() is not before:
            torch.set_grad_enabled(before)
