"""Functions that can pause anywhere and continue later, in one thread."""

from collections.abc import Callable
from contextlib import suppress

import torch
from greenlet import GreenletExit, getcurrent, greenlet


class Coroutine:
    """A function that can pause anywhere, run as a greenlet in this thread. Switching preserves torch's grad mode."""

    def __init__(self) -> None:
        self._work: greenlet | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Run a function until it pauses or ends. Its exceptions are raised here."""
        self._work = greenlet(work)
        self.resume()

    def resume(self) -> None:
        """Continue until the next pause or the end."""
        assert self._work is not None
        self._work.parent = getcurrent()
        _switch(self._work.switch)

    def pause(self) -> None:
        """Return to the caller of `begin` or `resume`. Called by the running function."""
        assert self._work is not None
        assert self._work.parent is not None
        _switch(self._work.parent.switch)

    def cancel(self) -> None:
        """End a paused function."""
        while self._work is not None and not self._work.dead:
            self._work.parent = getcurrent()
            with suppress(Exception):  # exceptions of its clean-up code have no receiver
                _switch(self._work.throw, GreenletExit)
        self._work = None


def _switch(switch: Callable[..., object], *args: object) -> None:
    """Switch to another greenlet; afterwards restore the grad mode, which belongs to the thread."""
    before = torch.is_grad_enabled()
    try:
        switch(*args)
    finally:
        if torch.is_grad_enabled() is not before:
            torch.set_grad_enabled(before)
