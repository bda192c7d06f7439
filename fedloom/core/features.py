"""Cached features: the representations of all samples by a frozen extractor, computed once per run.

Methods do not know about them. `StoredSamples.plain` marks the inputs that it returns with their positions in the
dataset, and a frozen extractor that is called with such an input looks its features up. All other inputs (augmented
images, views, anything computed from an input) have no mark, so their features are computed as usual. The same holds
while a layer of the extractor has a hook (`fedloom.models.tapped`) or is in train mode.

Looked-up features equal recomputed ones within float rounding, not bit for bit: matrix products and convolutions of
another batch size may add in another order. All engines use the same features, so they still agree bit for bit.
"""

from collections.abc import Hashable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.batches import StoredSamples, origin_of
from fedloom.core.limits import free_memory, gigabytes
from fedloom.core.state import Parts, tensors_of, under

SHARE = 0.5
"""Largest share of the free memory that features may take."""
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference between features of one sample in different batches, relative to the largest feature."""
OTHERWISE = 1e-3
"""The same for other dtypes."""
AGAIN = "model.freeze: features of the frozen extractor are recomputed in every step, because"


@dataclass
class FeatureCache:
    """Features of the frozen extractors of one device and precision."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Features [N, k] by the extractor's path. Equal extractors have the same tensor."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: that features are cached, or why they are not."""

    def attach(self, stored: StoredSamples, *trees: Parts) -> list[Tensor]:
        """Let the extractors in some trees look up the features of `stored`; return the features, each tensor once."""
        for tree in trees:
            for path, module in tree.named_modules():
                if path in self.tensors:
                    module.__dict__["forward"] = LookUp(module, stored, self.tensors[path])
        return list({id(z): z for z in self.tensors.values()}.values())


FeatureCaches = dict[Hashable, FeatureCache]
"""Features for each device and precision."""


class LookUp:
    """Replacement of a frozen extractor's `forward` that looks up the features of marked inputs."""

    def __init__(self, module: nn.Module, stored: StoredSamples, features: Tensor):
        self.module, self.stored, self.features = module, stored, features

    @cached_property
    def _inside(self) -> list[nn.Module]:
        return list(self.module.modules())

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the features of a batch."""
        index = None if args or kwargs else origin_of(x, self.stored)
        if index is None or any(m.training or m._forward_hooks or m._forward_pre_hooks for m in self._inside):
            return type(self.module).forward(self.module, x, *args, **kwargs)
        return self.features[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> "LookUp":
        """Return the replacement for a copy of the module; the features are not copied."""
        return LookUp(deepcopy(self.module, memo), self.stored, self.features)


@torch.no_grad()
def compute_features(
    parts: Parts, fixed: tuple[str, ...], stored: StoredSamples, batch: int, *, supervised: bool
) -> FeatureCache:
    """Compute the features of all samples by every extractor that is frozen as a whole.

    Args:
        parts: The module tree.
        fixed: Paths of frozen parts.
        stored: The samples.
        batch: Samples per forward pass.
        supervised: Whether the objective reads inputs without views.

    Returns:
        The features and a remark. There are no features if inputs are augmented, if features do not fit into memory, or
        if those of a sample depend on other samples in the batch.
    """
    found = dict(_extractors(parts, fixed))
    if not found:
        return FeatureCache()
    if stored.augment:
        return FeatureCache(notes=(f"{AGAIN} data.augment changes the images",))
    tensors: dict[str, Tensor] = {}
    for path, module in found.items():
        alike = next((known for known in tensors if _equal(found[known], module)), None)
        z = _features(module.eval(), stored, batch) if alike is None else tensors[alike]
        if isinstance(z, str):
            return FeatureCache(notes=(f"{AGAIN} {z}",))
        tensors[path] = z
    size = sum(z.nbytes for z in {id(z): z for z in tensors.values()}.values())
    note = (
        f"model.freeze: features of the frozen extractor are computed once for {len(stored.labels):,} samples "
        f"({size / 1e6:,.1f} MB); training and evaluation reuse them"
    )
    if not supervised:
        note += ", except for views, whose features are recomputed in every step"
    return FeatureCache(tensors, (note,))


def _extractors(parts: Parts, fixed: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    for path, module in parts.named_modules():
        if getattr(module, "takes_inputs", False) and under(path, fixed):
            yield path, module


def _equal(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two frozen modules compute the same: they have the same structure and equal tensors."""
    pairs = zip(tensors_of(one), tensors_of(other), strict=False)
    return repr(one) == repr(other) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _features(module: nn.Module, stored: StoredSamples, batch: int) -> Tensor | str:
    """Return the features of all samples, or the reason why they cannot be cached."""
    index = torch.arange(len(stored.labels), device=stored.labels.device)
    first = module(stored.plain(index[:batch]))
    if not isinstance(first, Tensor) or len(first) != len(index[:batch]):
        return "the extractor does not return one row per sample"
    few = module(stored.plain(index[:1]))
    scale = TOLERANCE.get(first.dtype, OTHERWISE) * first.abs().max()
    if (first[:1] - few).abs().max() > scale:
        return "those of a sample depend on the other samples in its batch"
    room = _free(first.device)
    needed = len(index) * first[0].nbytes
    if room is not None and needed > SHARE * room:
        return f"they need {gigabytes(needed)}, and only {gigabytes(room)} of memory are free"
    z = first.new_empty(len(index), *first.shape[1:])
    z[: len(first)] = first
    for start in range(batch, len(index), batch):
        z[start : start + batch] = module(stored.plain(index[start : start + batch]))
    return z


def _free(device: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()


def notes_of(caches: Mapping[Hashable, FeatureCache]) -> list[str]:
    """Return the remarks of all caches, each once."""
    return list(dict.fromkeys(note for cache in caches.values() for note in cache.notes))
