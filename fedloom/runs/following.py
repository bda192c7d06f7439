"""A process that another `fedloom` started beside others: when that one ends, however it does, this one stops too."""

import os
import signal
import sys

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
