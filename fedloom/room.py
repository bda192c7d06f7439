"""What cannot fit into memory is refused before it is tried: the system would end the process without a word."""

import torch

from fedloom.errors import UserError
from fedloom.memory import free_memory, gigabytes
from fedloom.task import Task

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
            f"model.name = '{task.model_name}': with {_options(task)} it is larger than can be counted; choose smaller "
            "options"
        ) from None
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    room = free_memory()
    if room is not None and COPIES * size > room:
        raise UserError(
            f"model.name = '{task.model_name}': with {_options(task)} and images of {_pixels(task)} it takes "
            f"{gigabytes(size)}, {COPIES} times over, and {gigabytes(room)} of memory are free; choose a smaller model "
            "or data.size"
        )


def _options(task: Task) -> str:
    options = ", ".join(f"{name}: {value}" for name, value in task.model_options.items())
    return f"{{{options}}}" if options else "its defaults"


def _pixels(task: Task) -> str:
    return "×".join(map(str, task.shape))
