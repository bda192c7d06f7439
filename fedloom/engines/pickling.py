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

Array = np.ndarray[Any, Any]


def to_array(tensor: Tensor) -> tuple[Array, bool]:
    """Returns a contiguous array on the CPU, and whether its integers are the bits of bfloat16, which NumPy lacks."""
    flat = tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format)
    bfloat16 = flat.dtype == torch.bfloat16
    return (flat.view(torch.int16) if bfloat16 else flat).numpy(), bfloat16


def to_tensor(contents: tuple[Array, bool]) -> Tensor:
    """Reverses `to_array`. The tensor shares the array's memory, which may be read-only."""
    array, bfloat16 = contents
    with warnings.catch_warnings():
        if not array.flags.writeable:
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def to_new_tensor(contents: tuple[Array, bool]) -> Tensor:
    """Reverses `to_array`, in new memory."""
    return to_tensor(contents).clone()


def send(to: socket.socket, value: object) -> None:
    """Sends an object: the number of its parts and their sizes, the pickle, the tensors' contents."""
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=buffers.append)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: lambda tensor: (to_tensor, (to_array(tensor),))}
    pickler.dump(value)
    parts = [file.getbuffer(), *(buffer.raw() for buffer in buffers)]
    to.sendall(np.array([len(parts), *(part.nbytes for part in parts)], np.int64).data)
    for part in parts:
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
