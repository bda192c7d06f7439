"""Initial weights from a file, for `model.weights`."""

from collections.abc import Iterable, Mapping
from hashlib import file_digest
from pathlib import Path

import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.state import under
from fedloom.core.tensor_files import read_state_dict
from fedloom.models.base import SplitModel

PREFIXES = ("module.", "model.", "parts.")
"""Prefixes of names that wrappers add: DataParallel, training scripts, fedloom's model files."""
REMEDY = "give a state dict: safetensors, or a file of torch.save(model.state_dict(), …)"
SHOWN = 6
"""Maximum number of names in a list of a note."""
_read: dict[str, str] = {}


def files() -> dict[str, str]:
    """Return the weight files that this process has read, with the SHA-256 of their content."""
    return dict(_read)


@torch.no_grad()
def load_weights(model: SplitModel, file: str) -> str:
    """Copy the tensors of a file into a network, by name.

    Names are those of the network (`extractor.conv1.weight`) or of published state dicts (`conv1.weight`, see
    `SplitModel.published_name`), after a common prefix such as `module.`. Tensors of other shapes are skipped.

    Args:
        model: The network; changed in place.
        file: Path of a state dict.

    Returns:
        What was loaded, skipped, missing and unused, for the user.

    Raises:
        UserError: The file cannot be read, none of its tensors fits, or a value is not finite.
    """
    path = Path(file).expanduser().resolve()
    where = f"model.weights = '{file}'"
    if not path.is_file():
        raise UserError(f"{where}: there is no such file; {REMEDY}")
    found = read_state_dict(path, REMEDY)
    with path.open("rb") as opened:
        _read[str(path)] = f"sha256 {file_digest(opened, 'sha256').hexdigest()}"
    own: dict[str, Tensor] = model.state_dict()
    known = {model.published_name(name): name for name in own} | {name: name for name in own}
    prefix = _prefix(found, known)
    theirs = {known.get(name.removeprefix(prefix)): name for name in found if name.startswith(prefix)}
    pairs = {name: theirs[name] for name in own if name in theirs}
    loaded = [name for name, other in pairs.items() if found[other].shape == own[name].shape]
    if not loaded:
        kind = "tensors' names" if not pairs else "tensors' shapes"
        raise UserError(
            f"{where}: none of its {kind} fits the network, which has {_listed(known)}; the file has {_listed(found)}"
        )
    for name in loaded:
        _copy(own[name], found[pairs[name]], f"{where}: {pairs[name]}")
    apart = [
        f"{name} ({_shape(found[pairs[name]])} in the file, {_shape(own[name])} here)"
        for name in pairs
        if name not in loaded
    ]
    # Adapters are added to networks whose files have none.
    wanted = [name for name in own if name in pairs or not under(name, ("extractor.adapters",))]
    missing = [name for name in wanted if name not in pairs and not name.endswith("num_batches_tracked")]
    unused = [name for name in found if name not in pairs.values()]
    lists = {"skipped because of their shapes": apart, "not in the file": missing, "not in the network": unused}
    remarks = [f"{what}: {_listed(names)}" for what, names in lists.items() if names]
    return "; ".join([f"{where}: loaded {len(loaded)} of {len(wanted)} tensors", *remarks])


def _prefix(found: Iterable[str], known: Mapping[str, str]) -> str:
    """Return the prefix with which most names are known; the shortest one of several."""
    counts = {"": 0}
    for name in found:
        prefix = ""
        while True:
            counts[prefix] = counts.get(prefix, 0) + (name.removeprefix(prefix) in known)
            more = next((p for p in PREFIXES if name.startswith(prefix + p)), None)
            if more is None:
                break
            prefix += more
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)))


def _copy(target: Tensor, source: Tensor, where: str) -> None:
    if source.layout != torch.strided or source.is_quantized or source.is_complex() != target.is_complex():
        raise UserError(f"{where} is a sparse, quantised or complex tensor; {REMEDY}")
    if source.is_floating_point() != target.is_floating_point():
        raise UserError(f"{where} has dtype {source.dtype}, but {target.dtype} is expected; {REMEDY}")
    if not bool(torch.isfinite(source).all()):
        raise UserError(f"{where} contains NaN or infinite values; use another file")
    target.copy_(source)


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _listed(names: Iterable[str]) -> str:
    names = [name[:80] for name in names]
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
