"""Sends objects between worker processes: pickles, with the contents of tensors as raw buffers.

Pickle can run code, so this is only for processes of one run; what organisations exchange is `Message.to_bytes`.
"""

import copyreg
import io
import pickle
import socket
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

INLINE = 2**14
"""Bytes up to which the contents of a tensor stay inside the pickle: they need no system calls of their own."""

Array = np.ndarray[Any, Any]


def to_array(tensor: Tensor) -> tuple[Array, bool]:
    """Returns a contiguous array on the CPU, and whether its integers are the bits of bfloat16, which NumPy lacks."""
    flat = tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format)
    bfloat16 = flat.dtype == torch.bfloat16
    return (flat.view(torch.int16) if bfloat16 else flat).numpy(), bfloat16


def to_tensor(contents: tuple[Array, bool]) -> Tensor:
    """Reverses `to_array`. The tensor shares the array's memory, which may be read-only."""
    array, bfloat16 = contents
    if array.flags.writeable:
        tensor = torch.from_numpy(array)
    else:
        with warnings.catch_warnings(action="ignore"):  # that it is read-only
            tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def to_new_tensor(contents: tuple[Array, bool]) -> Tensor:
    """Reverses `to_array`, in new memory."""
    return to_tensor(contents).clone()


def send(to: socket.socket, value: object) -> None:
    """Sends an object: the number of its parts and their sizes, the pickle, the contents of large tensors."""
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
    """Receives an object. Raises EOFError if the other end is closed."""
    (count,) = _read(source, 8).view(np.int64)
    data, *buffers = [_read(source, int(size)) for size in _read(source, 8 * int(count)).view(np.int64)]
    return pickle.loads(data.data, buffers=buffers)


def _read(source: socket.socket, size: int) -> Array:
    buffer = torch.empty(size, dtype=torch.uint8).numpy()  # aligned as torch aligns memory, and not zeroed
    left = buffer.data
    while left:
        received = source.recv_into(left)
        if not received:
            raise EOFError
        left = left[received:]
    return buffer
