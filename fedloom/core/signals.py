"""Signals: Ctrl-C and SIGTERM finish the round and write a checkpoint; a second one ends the process."""

import os
import signal
import sys
import threading
from time import monotonic
from types import FrameType
from typing import Any

NAME = "FEDLOOM_FOLLOWS"
"""The leader's process id, in the follower's environment."""
PR_SET_PDEATHSIG = 1


def follows() -> bool:
    """Whether this is one."""
    return NAME in os.environ


def follow() -> None:
    """SIGTERM when the leader is gone, killed or by a lost terminal (Linux only: others let it run on)."""
    if sys.platform == "linux":
        import ctypes  # not at every Tab

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[NAME]):  # it went before we asked
            signal.raise_signal(signal.SIGTERM)


SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWO_WAYS = 1.0
"""Seconds in which a process that follows another takes a second signal for the first: it may have come to both."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and did so with a checkpoint. `signal` asked; `command` goes on."""

    def __init__(self, when: str, command: str, signal: int):
        super().__init__(f"{when}; go on with: {command}")
        self.when, self.signal = when, signal

    @property
    def exit_code(self) -> int:
        """As a shell has it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal


class Interrupts:
    """While entered, the first signal is remembered in `asked`; the second ends the program.

    One inside another tells it at its end: a run that was asked in its last round ends, and its series stops.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}
        self._since = 0.0

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # nobody else may set handlers
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            outer = getattr(handler, "__self__", None)
            if self.asked is not None and isinstance(outer, Interrupts):
                outer.asked = self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and monotonic() - self._since < TWO_WAYS:
            return
        if self.asked is not None or not follows():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.asked is not None:
            signal.raise_signal(number)
            return
        self.asked, self._since = number, monotonic()
        # not print: the signal may have come in the middle of one
        os.write(2, b"\nfinishing this round, then a checkpoint; a second Ctrl-C (or SIGTERM) leaves at once\n")


def ignore_in_worker() -> None:
    """A worker process ends when its engine does: Ctrl-C reaches it too, but the round is to be finished."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
