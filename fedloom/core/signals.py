"""Signals: Ctrl-C and SIGTERM finish the round and write a checkpoint; a second signal ends the process.

A follower is a process started by another fedloom process, its leader.
"""

import os
import signal
import sys
import threading
from time import monotonic
from types import FrameType
from typing import Any

LEADER = "FEDLOOM_FOLLOWS"
"""Environment variable of followers: the leader's process id."""
PR_SET_PDEATHSIG = 1


def follows() -> bool:
    """Return whether this process is a follower."""
    return LEADER in os.environ


def follow() -> None:
    """Send SIGTERM to this process when its leader ends, for any reason. Does nothing outside Linux."""
    if sys.platform == "linux":
        import ctypes  # imported here to keep shell completion fast

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[LEADER]):  # the leader ended before the call of prctl
            signal.raise_signal(signal.SIGTERM)


SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWO_WAYS = 1.0
"""Seconds within which a second signal is ignored: the same signal may reach a follower directly and via its leader."""


class Interrupted(KeyboardInterrupt):
    """A run was stopped by a signal after writing a checkpoint.

    Args:
        when: Text that says when the run stopped, such as `stopped after round 3`.
        command: The command that resumes the run.
        signal: The signal's number.
    """

    def __init__(self, when: str, command: str, signal: int):
        super().__init__(f"{when}; resume with: {command}")
        self.when, self.signal = when, signal

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal


class Interrupts:
    """Context manager that stores the first signal in `asked`; the second signal ends the process.

    A nested instance passes its signal to the enclosing one on exit, so that a signal in the last round of a run also
    stops the series of runs.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}
        self._since = 0.0

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
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
        # not print: the signal may have interrupted a print
        os.write(2, b"\nfinishing this round, then writing a checkpoint; a second Ctrl-C (or SIGTERM) stops at once\n")


def ignore_in_worker() -> None:
    """Ignore signals in a worker process: Ctrl-C also reaches workers, but they are needed to finish the round."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
