"""Addresses of a tree's tensors, to find parts whose memory was replaced: others may share it or have recorded it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedloom.core.state import Parts


class Addresses:
    """The tensor objects of a tree and their addresses."""

    def __init__(self, parts: Parts):
        self._places: list[tuple[str, dict[str, Any], str, Tensor, int]] = [
            (f"{path}.{name}".lstrip("."), table, name, tensor, tensor.data_ptr())
            for path, module in parts.named_modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]
        """Path, containing table, name, tensor and address."""

    def moved(self) -> str | None:
        """Return the path of the first tensor that is not at its address; None if there is none."""
        for path, table, name, tensor, address in self._places:
            if table.get(name) is not tensor or tensor.data_ptr() != address:
                return path
        return None

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Put the tensor objects back into the tree, with the memory of the tensors in `memory`."""
        for path, table, name, tensor, _ in self._places:
            table[name] = tensor
            if path in memory:  # a tensor that several modules share has only its first path
                tensor.data = memory[path]
