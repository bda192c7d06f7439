"""Similarity of clients' networks layer by layer, by linear CKA on the same samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.inference.trained_model import TrainedModel
from fedloom.losses.linear_cka import linear_cka
from fedloom.models.base import SplitModel

SAME = 1 - 1e-6
"""Networks whose layers are all at least this similar are one network."""


@dataclass
class Layers:
    """Linear CKA between clients' networks, by layer."""

    names: list[str]
    mean: list[float]
    """Means over pairs of clients."""
    std: list[float]
    """Standard deviations over pairs of clients."""
    pairs: int


@torch.no_grad()
def compare_layers(models: Sequence[TrainedModel], images: Tensor) -> Layers | None:
    """Compare the layers of clients' networks on the same images.

    The layers are the networks' `taps` that compute the representation, and the representation itself.

    Args:
        models: The clients' personal models.
        images: Images or other inputs of one dataset.

    Returns:
        The similarities, or None if there are fewer than two networks, or all of them are equal.
    """
    outputs = [_outputs(model, images) for model in models]
    if len(outputs) < 2:
        return None
    common = [name for name in outputs[0] if all(name in other for other in outputs)]
    found = {
        name: np.array([float(linear_cka(a[name], b[name])) for a, b in combinations(outputs, 2)]) for name in common
    }
    if all(values.min() >= SAME for values in found.values()):
        return None
    means, stds = ([float(of(values)) for values in found.values()] for of in (np.mean, np.std))
    return Layers(common, means, stds, len(outputs) * (len(outputs) - 1) // 2)


def _outputs(model: TrainedModel, images: Tensor) -> dict[str, Tensor]:
    """Return what the layers put out for the images, flattened, in the order in which they run.

    Layers are named by their place in the extractor; if a method has several networks, with the name of the network.
    """
    found: dict[tuple[str, str], Tensor] = {}
    hooks = []
    for path, network in model.parts.named_modules():
        if isinstance(network, SplitModel):
            layers = dict(network.named_modules())
            for tap in network.taps:
                hooks.append(layers[tap].register_forward_hook(_keep(found, path, tap)))
    try:
        z = model.features(images)
    finally:
        for hook in hooks:
            hook.remove()
    several = len({path for path, _ in found}) > 1
    named = {f"{path}.{tap}" if several else _place(tap): output for (path, tap), output in found.items()}
    return named | {"representation": z.flatten(1)}


def _place(tap: str) -> str:
    """Return the name of a layer in its network: also in one with a projection, which `models.projected` wraps."""
    return tap.removeprefix("extractor.").removeprefix("network.")


def _keep(
    found: dict[tuple[str, str], Tensor], path: str, tap: str
) -> Callable[[nn.Module, tuple[Tensor, ...], object], None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor):  # a recurrent layer returns its state too, and is left out
            found[path, tap] = output.flatten(1)

    return hook
