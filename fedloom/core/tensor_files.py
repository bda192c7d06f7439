"""Reading of untrusted files of tensors: safetensors and torch files, within the free memory, executing nothing.

Apart from `core/reading.py`, because commands that only list things do not import torch.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import decoding


def read_tensors(path: Path, what: str, remedy: str) -> tuple[dict[str, Tensor], str]:
    """Read the tensors of a safetensors file and its metadata entry `fedloom` (empty if it has none).

    Raises:
        UserError: The file cannot be read, or does not fit into memory.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"'{path}' is not a file; {remedy}")
    with decoding(f"'{path}'", what, remedy):
        refuse_without_room(2 * path.stat().st_size, f"'{path}'", remedy, "it")
        with safe_open(str(path), "pt") as file:
            metadata = (file.metadata() or {}).get("fedloom", "")
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def read_state_dict(path: Path, remedy: str) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, or of a state dict that `torch.save` has written.

    A torch file is a pickle. Only tensors and plain containers are unpickled; files that contain anything else, that
    are compressed, or that have torch's format before version 1.6 (2020) are refused.

    Args:
        path: The file.
        remedy: What the user can do about an unusable file; end of the error message.

    Returns:
        The tensors by name, on the CPU. A dictionary inside `state_dict`, `model_state_dict` or `model` is unwrapped.

    Raises:
        UserError: The file cannot be read, does not fit into memory, or is not a state dict.
    """
    if path.suffix == ".safetensors":
        return read_tensors(path, "safetensors", remedy)[0]
    if path.exists() and not path.is_file():
        raise UserError(f"'{path}' is not a file; {remedy}")
    with decoding(f"'{path}'", "a state dict", remedy):
        size = path.stat().st_size
        if not zipfile.is_zipfile(path):
            raise UserError(f"'{path}' is neither safetensors nor a file of torch.save since torch 1.6; {remedy}")
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise UserError(f"'{path}' has compressed entries, which torch.save does not write; {remedy}")
            # entries may overlap, so that their sum is far above the size of the file
            refuse_without_room(2 * sum(entry.file_size for entry in archive.infolist()), f"'{path}'", remedy, "it")
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise UserError(f"'{path}' has overlapping entries; {remedy}")
        found = torch.load(path, map_location="cpu", weights_only=True)
    return _state_dict(found, path, remedy)


def _state_dict(found: Any, path: Path, remedy: str) -> dict[str, Tensor]:
    """Return the tensors of a loaded object; entries that are not tensors (a step count) are left out."""
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    entries = found.items() if isinstance(found, Mapping) else ()
    tensors = {name: t.detach() for name, t in entries if isinstance(name, str) and isinstance(t, Tensor)}
    if not tensors:
        raise UserError(f"'{path}' is not a state dict: it contains a {type(found).__name__} without tensors; {remedy}")
    return tensors
