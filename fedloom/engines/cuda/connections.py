"""Hardware connections to a GPU, which streams share: 8 per process by default. Lanes request more."""

import os

import torch

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST = 32
_set_here: set[str] = set()
"""Values that were set by this process, not by the user."""


def request() -> None:
    """Request as many connections as lanes can use, unless the user has set a number.

    Has no effect once CUDA is initialised.
    """
    if NAME not in os.environ and not torch.cuda.is_initialized():
        os.environ[NAME] = str(MOST)
        _set_here.add(os.environ[NAME])


def share(count: int) -> dict[str, str]:
    """Return the environment of one of `count` processes that share the connections (MPS has few).

    Empty if the user has set a number.
    """
    value = os.environ.get(NAME)
    return {NAME: str(max(1, MOST // count))} if value is None or value in _set_here else {}
