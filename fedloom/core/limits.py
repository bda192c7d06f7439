"""Memory limits: what does not fit into memory is refused before it is allocated."""

import os
from pathlib import Path

import torch

from fedloom.core.errors import UserError
from fedloom.core.task import Task


def refuse_without_room(size: int, what: str) -> None:
    """Before images are made at another size."""
    room = free_memory()
    if room is not None and size > room:
        raise UserError(
            f"{what}: the images would take {gigabytes(size)}, and {gigabytes(room)} are free; use fewer pixels"
        )


def free_memory() -> int | None:
    """Bytes that could be had, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def gigabytes(size: int) -> str:
    """For messages."""
    return f"{size / 1e9:,.1f} GB"


COPIES = 4
"""Of a network, at the least: at the server, at work, as it was received, and as it began."""


def refuse_model_without_room(task: Task) -> None:
    """Counts the network's bytes on torch's meta device, where nothing is allocated."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            tensors = list(task.model().state_dict().values())
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            return  # building it in earnest will show what is wrong
        raise UserError(
            f"model.name = '{task.network.name}': with {_options(task)} it is larger than can be counted; choose "
            "smaller options"
        ) from None
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    room = free_memory()
    if room is not None and COPIES * size > room:
        pixels = "×".join(map(str, task.shape))
        raise UserError(
            f"model.name = '{task.network.name}': with {_options(task)} and images of {pixels} it takes "
            f"{gigabytes(size)}, {COPIES} times over; {gigabytes(room)} of memory are free: choose a smaller "
            "model or data.size"
        )


def _options(task: Task) -> str:
    options = ", ".join(f"{name}: {value}" for name, value in task.network.options.items())
    return f"{{{options}}}" if options else "its defaults"
