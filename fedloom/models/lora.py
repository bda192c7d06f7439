"""Low-rank adapters on frozen layers, for `model.lora` (Hu et al., "LoRA", ICLR 2022).

The weight W of a linear layer becomes W + (alpha / rank) · up · down, where W is frozen and `up` starts at zero. The
adapters are a submodule of the extractor, so methods that share, keep, mix or copy the extractor do the same with its
adapters, and methods can also name them: `model.extractor.adapters`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn
from torch.nn.functional import linear

from fedloom.core.checking import Section
from fedloom.core.errors import UserError, nearest
from fedloom.core.frozen import fix_tensors
from fedloom.core.protocols import Shape
from fedloom.core.state import under
from fedloom.models.base import SplitModel
from fedloom.models.trial import in_mode, made_up_inputs

PLACE = "adapters"
"""Name of the adapters in the extractor."""


class LoraSettings(Section):
    """The recipe section `model.lora`: low-rank adapters on the frozen layers of the extractor."""

    rank: int = Field(8, ge=1, description="rank of the adapters")
    alpha: float | None = Field(
        None, gt=0, description="scale of the adapters: they are multiplied by alpha / rank; default: 2 · rank"
    )
    layers: Annotated[tuple[str, ...], BeforeValidator(lambda names: [names] if isinstance(names, str) else names)] = (
        Field(
            (),
            description="names or patterns of the layers with adapters: qkv, extractor.block1, block*.attention; "
            "default: all linear and attention layers of the extractor",
        )
    )

    @property
    def scale(self) -> float:
        """Factor of the adapters."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


def from_rank(value: Any) -> Any:
    """Expand the short form of the section, which is the rank."""
    return {"rank": value} if isinstance(value, int) and not isinstance(value, bool) else value


class Adapter(nn.Module):
    """A low-rank change of a weight [outputs, inputs]: scale · up · down. It is zero until `up` is trained."""

    def __init__(self, weight: Tensor, rank: int, scale: float):
        super().__init__()
        outputs, inputs = weight.shape
        self.scale = scale
        self.down = nn.Parameter(weight.new_empty(rank, inputs))
        self.up = nn.Parameter(weight.new_zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as torch initialises linear layers

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs [..., inputs] to the change of outputs [..., outputs]."""
        return linear(self.scale * linear(x, self.down), self.up)

    def change(self) -> Tensor:
        """Return the change of the weight."""
        return self.scale * (self.up @ self.down)


class Adapters(nn.Module):
    """The adapters of an extractor, in a tree of the layers' names.

    An extractor that is an `nn.Sequential` calls it like a layer; then it returns its input.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x

    def put(self, name: str, adapter: Adapter) -> Adapter:
        """Register an adapter under the dotted name of its layer."""
        *parents, last = name.split(".")
        place: nn.Module = self
        for parent in parents:
            if parent not in place._modules:
                place.add_module(parent, Adapters())
            place = place.get_submodule(parent)
        place.add_module(last, adapter)
        return adapter


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter. The adapter is registered in the extractor's `adapters`, not here."""

    adapter: Adapter

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the layer plus those of the adapter."""
        return super().forward(x) + self.adapter(x)


class MergedLinear(nn.Linear):
    """A linear layer whose weight others read, as attention reads that of its `out_proj`; it includes the adapter."""

    __jit_unused_properties__ = ("weight",)
    adapter: Adapter

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight with its adapter."""
        return _merged(self, "weight", self.adapter)


class AdaptedAttention(nn.MultiheadAttention):
    """Attention with adapters for its projections, which are parameters rather than layers."""

    __jit_unused_properties__ = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    adapters_by_name: dict[str, Adapter]

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        """The joint projection of queries, keys and values, with its adapter."""
        return _merged(self, "in_proj_weight", self.adapters_by_name.get("in_proj_weight"))

    @property
    def q_proj_weight(self) -> Tensor:  # type: ignore[override]
        """The projection of queries, with its adapter."""
        return _merged(self, "q_proj_weight", self.adapters_by_name.get("q_proj_weight"))

    @property
    def k_proj_weight(self) -> Tensor:  # type: ignore[override]
        """The projection of keys, with its adapter."""
        return _merged(self, "k_proj_weight", self.adapters_by_name.get("k_proj_weight"))

    @property
    def v_proj_weight(self) -> Tensor:  # type: ignore[override]
        """The projection of values, with its adapter."""
        return _merged(self, "v_proj_weight", self.adapters_by_name.get("v_proj_weight"))


PROJECTIONS = AdaptedAttention.__jit_unused_properties__


def _merged(layer: nn.Module, name: str, adapter: Adapter | None) -> Any:
    base = layer._buffers[name]
    return base if adapter is None or base is None else base + adapter.change()


def add_adapters(model: SplitModel, settings: LoraSettings, frozen: Sequence[str], shape: Shape) -> None:
    """Freeze the extractor of a network and add adapters to its layers.

    Args:
        model: The network; changed in place. Its outputs stay the same, since adapters start at zero.
        settings: Rank, scale and layers.
        frozen: Parts that `model.freeze` names; they get no adapters.
        shape: Shape of a sample, for a forward pass that shows which layers run.

    Raises:
        UserError: A pattern matches no layer, no layer can have an adapter, or the extractor cannot be changed.
    """
    extractor = model.extractor
    if under("extractor", frozen):
        raise UserError(
            "model.freeze = 'extractor': model.lora trains adapters in it and freezes everything else; remove one of "
            "them, or freeze parts of the extractor, which then get no adapters"
        )
    if hasattr(extractor, PLACE):
        raise UserError(f"model.lora: the extractor has an attribute '{PLACE}' already; rename it")
    candidates, x = dict(_layers(extractor)), made_up_inputs(model, shape)
    before, ran = _run(extractor, x, candidates)
    chosen = _chosen(
        {n: m for n, m in candidates.items() if n in ran and not under(f"extractor.{n}", frozen)}, settings
    )
    for inner in extractor.modules():
        fix_tensors(inner)
    adapters = Adapters()
    for name, layer in chosen.items():
        _adapt(name, layer, adapters, settings)
    extractor.add_module(PLACE, adapters)
    after, _ = _run(extractor, x, {})
    if not after.is_meta and not torch.allclose(before, after, rtol=1e-5, atol=1e-6, equal_nan=True):
        raise UserError(
            f"model.lora: {type(extractor).__name__} computes something else with a submodule '{PLACE}' in it, because "
            "it uses all of its submodules; name them in forward"
        )


def adapters_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, Adapter]]:
    """Yield the layers that have adapters, the name of the weight and its adapter."""
    for layer in module.modules():
        if isinstance(layer, (AdaptedLinear, MergedLinear)):
            yield layer, "weight", layer.adapter
        elif isinstance(layer, AdaptedAttention):
            yield from ((layer, name, adapter) for name, adapter in layer.adapters_by_name.items())


@torch.no_grad()
def merge_adapters(model: SplitModel) -> SplitModel:
    """Add the adapters of a network to the weights of their layers, and remove them.

    Args:
        model: The network; changed in place. Its outputs stay the same within rounding.

    Returns:
        The network with ordinary layers, for use outside of fedloom.

    Example:
        >>> model = build("vit", shape=(1, 8, 8), classes=4, lora={"rank": 2})
        >>> sorted(name for name, _ in merge_adapters(model).extractor.block1.attention.named_children())
        ['out', 'qkv']
    """
    for layer, name, adapter in list(adapters_in(model)):
        base = layer._buffers[name]
        assert base is not None
        base.add_(adapter.change())
    for layer in {layer for layer, _, _ in adapters_in(model)}:
        layer.__dict__.pop("adapter", None)
        layer.__dict__.pop("adapters_by_name", None)
        layer.__class__ = nn.MultiheadAttention if isinstance(layer, AdaptedAttention) else nn.Linear
    model.extractor._modules.pop(PLACE, None)
    return model


def _layers(extractor: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that can have adapters. Subclasses of torch's layers may compute something else."""
    inside: list[str] = []
    for name, module in extractor.named_modules():
        if type(module) is nn.MultiheadAttention:
            inside.append(name)
            yield name, module
        elif type(module) is nn.Linear and not under(name, inside):
            yield name, module


def _run(extractor: nn.Module, x: Tensor, layers: Mapping[str, nn.Module]) -> tuple[Tensor, list[str]]:
    """Return the extractor's output in eval mode, and the names of the layers that were called."""
    ran: list[str] = []
    hooks = [layer.register_forward_hook(lambda *_, name=name: ran.append(name)) for name, layer in layers.items()]
    try:
        with in_mode(extractor, training=False), torch.no_grad():
            return extractor(x), ran
    finally:
        for hook in hooks:
            hook.remove()


def _chosen(layers: Mapping[str, nn.Module], settings: LoraSettings) -> Mapping[str, nn.Module]:
    if not layers:
        raise UserError(
            "model.lora: the extractor has no linear or attention layer that is called and not frozen; choose another "
            "network, or remove model.lora"
        )
    for pattern in settings.layers:
        if not any(_matches(name, pattern) for name in layers):
            raise UserError(
                f"model.lora.layers = '{pattern}': there is no such layer: {nearest(pattern, list(layers))}"
            )
    wanted = settings.layers or ("*",)
    return {n: layer for n, layer in layers.items() if any(_matches(n, pattern) for pattern in wanted)}


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a layer's name, its last components, or a module that contains it."""
    parts = ["extractor", *name.split(".")]
    starts = range(len(parts))
    return any(fnmatchcase(".".join(parts[i:j]), pattern) for i in starts for j in range(i + 1, len(parts) + 1))


def _adapt(name: str, layer: nn.Module, adapters: Adapters, settings: LoraSettings) -> None:
    """Make a layer, whose tensors are frozen, use adapters, and register those."""

    def adapter_of(where: str, weight: Tensor) -> Adapter:
        return adapters.put(where or "layer", Adapter(weight, settings.rank, settings.scale))

    if isinstance(layer, nn.MultiheadAttention):
        weights = {key: w for key in PROJECTIONS if (w := layer._buffers.get(key)) is not None}
        layer.__dict__["adapters_by_name"] = {
            key: adapter_of(f"{name}.{key.removesuffix('_weight')}".lstrip("."), w) for key, w in weights.items()
        }
        out: nn.Linear = layer.out_proj
        out.__dict__["adapter"] = adapter_of(f"{name}.out_proj".lstrip("."), out.weight)
        out.__class__ = MergedLinear
        layer.__class__ = AdaptedAttention
        return
    assert isinstance(layer, nn.Linear)
    layer.__dict__["adapter"] = adapter_of(name, layer.weight)
    layer.__class__ = AdaptedLinear
