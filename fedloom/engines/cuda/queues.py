"""Queues to a GPU, which streams share: 8 in a process by default. Lanes ask for more; MPS has few for them all."""

import os

import torch

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
MANY = 32
_asked: set[str] = set()
"""What was asked for here, not by who started this process."""


def ask() -> None:
    """For as many as lanes can use, unless somebody has said how many; of use before CUDA is."""
    if NAME not in os.environ and not torch.cuda.is_initialized():
        os.environ[NAME] = str(MANY)
        _asked.add(os.environ[NAME])


def share(count: int) -> dict[str, str]:
    """Of one of so many processes, as its environment; nothing if somebody has said how many."""
    said = os.environ.get(NAME)
    return {NAME: str(max(1, MANY // count))} if said is None or said in _asked else {}
