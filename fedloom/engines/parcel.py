"""Python objects as NumPy arrays, for Ray's object store: a reader maps large ones instead of copying them.

What is mapped is read-only; a tensor that is written to all the same ends its process. It is pickle, for one's own
machines: nothing here is for data from strangers.
"""

import io
import pickle
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 2**12
"""Bytes up to which an array stays inside the pickle."""

Parcel = list[np.ndarray]


def pack(value: Any) -> Parcel:
    """The pickle, then the arrays that it refers to."""
    from ray import cloudpickle  # also of methods that were written in a notebook

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return _array(value) if type(value) is Tensor else cloudpickle.Pickler.reducer_override(self, value)

    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes > SMALL:
            buffers.append(raw)
        return raw.nbytes <= SMALL

    file = io.BytesIO()
    pickler: Any = Pickler
    pickler(file, protocol=5, buffer_callback=keep_inside).dump(value)
    return [np.frombuffer(part, np.uint8) for part in (file.getbuffer(), *buffers)]


def unpack(parcel: Parcel, *, copy: bool = False) -> Any:
    """The inverse; with `copy` nothing of it stays in the store."""
    data, *buffers = parcel
    return pickle.loads(data.data, buffers=[buffer.copy() for buffer in buffers] if copy else buffers)


def _array(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor is pickled: NumPy has no bfloat16, whose bits travel as integers."""
    flat = tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format)
    brief = flat.dtype == torch.bfloat16
    return _tensor, ((flat.view(torch.int16) if brief else flat).numpy(), brief)


def _tensor(array: np.ndarray, brief: bool) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if brief else tensor
