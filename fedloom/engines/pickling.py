"""Transfer of objects between worker processes: pickles, with tensors' contents as raw buffers.

Unpickling can execute code, so this is for processes of one run only. Organisations exchange `Message.to_bytes`.
"""

import copyreg
import io
import pickle
import socket
import warnings
from collections import ChainMap
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

INLINE = 2**14
"""Tensors of at most this number of bytes are stored inside the pickle, which saves system calls."""

Array = np.ndarray[Any, Any]


def to_array(tensor: Tensor) -> tuple[Array, bool]:
    """Return a contiguous array on the CPU, and whether its int16 values are bits of bfloat16 (missing in NumPy)."""
    flat = tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format)
    bfloat16 = flat.dtype == torch.bfloat16
    return (flat.view(torch.int16) if bfloat16 else flat).numpy(), bfloat16


def to_tensor(contents: tuple[Array, bool]) -> Tensor:
    """Return the tensor of `to_array`'s result. It shares the array's memory, which may be read-only."""
    array, bfloat16 = contents
    if array.flags.writeable:
        tensor = torch.from_numpy(array)
    else:
        with warnings.catch_warnings(action="ignore"):  # torch warns about read-only arrays
            tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def to_new_tensor(contents: tuple[Array, bool]) -> Tensor:
    """Return the tensor of `to_array`'s result, in new memory."""
    return to_tensor(contents).clone()


class ByValue:
    """An object whose pickle contains classes and functions that a worker cannot import, for `multiprocessing`.

    Those of a script, of a notebook or inside a function are pickled by value if cloudpickle is installed. Tensors in
    shared memory stay there.
    """

    def __init__(self, *values: Any):
        self.values = values
        """Pickled in this order: a class before an object that refers to it by name."""

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            cloudpickle = import_module("cloudpickle")
        except ImportError:
            return ByValue, self.values
        file = io.BytesIO()
        reducers = getattr(ForkingPickler, "_extra_reducers")  # noqa: B009  those of torch.multiprocessing
        pickler = cloudpickle.Pickler(file, protocol=5)
        pickler.dispatch_table = ChainMap(reducers, pickler.dispatch_table)
        pickler.dump(self.values)
        return _loaded, (file.getvalue(),)


def _loaded(data: bytes) -> ByValue:
    return ByValue(*pickle.loads(data))


def send(to: socket.socket, value: object) -> None:
    """Send an object: the number of parts and their sizes, the pickle, the contents of large tensors."""
    file = io.BytesIO()
    large: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes > INLINE:
            large.append(raw)
        return raw.nbytes <= INLINE

    pickler = pickle.Pickler(file, protocol=5, buffer_callback=keep_inside)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: lambda tensor: (to_tensor, (to_array(tensor),))}
    pickler.dump(value)
    sizes = np.array([1 + len(large), file.tell(), *(part.nbytes for part in large)], np.int64)
    to.sendall(sizes.tobytes() + file.getbuffer())
    for part in large:
        to.sendall(part)


def receive(source: socket.socket) -> Any:
    """Receive an object.

    Raises:
        EOFError: The other end is closed.
    """
    (count,) = _read(source, 8).view(np.int64)
    data, *buffers = [_read(source, int(size)) for size in _read(source, 8 * int(count)).view(np.int64)]
    return pickle.loads(data.data, buffers=buffers)


def _read(source: socket.socket, size: int) -> Array:
    buffer = torch.empty(size, dtype=torch.uint8).numpy()  # aligned like torch's memory, and not zeroed
    left = buffer.data
    while left:
        received = source.recv_into(left)
        if not received:
            raise EOFError
        left = left[received:]
    return buffer
