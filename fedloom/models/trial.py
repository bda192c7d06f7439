"""Trial runs: what a network of someone else returns for made-up inputs, and whether it can be split and trained."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import UserError, brief
from fedloom.core.protocols import Shape
from fedloom.core.rng import Dropout
from fedloom.models.base import SplitModel


class TrialRun:
    """A forward pass of a plain network on made-up images, in eval mode."""

    def __init__(self, module: nn.Module, shape: Shape):
        self.kind, self.shape = type(module).__name__, shape
        self.leaves: list[nn.Module] = []
        """Modules without children, in the order in which they ran."""
        self.children: list[str] = []
        """Names of direct children that returned a tensor [B, …]."""
        self.x = made_up_inputs(module, shape)
        names = {child: name for name, child in module.named_children()}

        def note(inner: nn.Module, inputs: Any, output: Any) -> None:
            if not any(True for _ in inner.children()) and not isinstance(inner, nn.Identity):
                self.leaves.append(inner)
            if inner in names and names[inner] not in self.children and isinstance(output, Tensor) and len(output) == 2:
                self.children.append(names[inner])

        hooks = [inner.register_forward_hook(note) for inner in module.modules()]
        try:
            self.output = self._forward(module)
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, module: nn.Module) -> Any:
        with in_mode(module, training=False), torch.no_grad():
            try:
                return module(self.x)
            except UserError:
                raise
            except Exception as error:
                raise UserError(
                    f"model: {self.kind} cannot process inputs of shape {tuple(self.shape)}: {brief(error)}"
                ) from error

    def refuse_other_outputs(self, classes: int | None) -> None:
        """Raise a UserError unless the network returns logits [B, classes]."""
        if not isinstance(self.output, Tensor):
            raise UserError(f"model: {self.kind} returns a {type(self.output).__name__}; it must return logits")
        got = tuple(self.output.shape)
        if len(got) != 2 or classes not in (None, got[1]):
            wanted = "classes" if classes is None else str(classes)
            raise UserError(
                f"model: {self.kind} returns a tensor of shape {list(got)} for 2 inputs, but must return logits "
                f"[2, {wanted}]; give its constructor a parameter num_classes"
            )

    def checked_features(self, split: SplitModel) -> int:
        """Return the width of the representation; raise a UserError unless head ∘ extractor is the network."""
        place = getattr(split, "place", "head")
        try:
            z = self._forward(split.extractor)
        except UserError as error:
            raise UserError(
                f"model.head = '{place}': {self.kind} cannot run without this layer, so it cannot be split there; name "
                "a layer whose output is the output of the network, or write a SplitModel"
            ) from error
        if not isinstance(z, Tensor) or z.dim() != 2:
            got = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise UserError(
                f"model.head = '{place}': the input of the head must be [B, features], but it is {got} for 2 images; "
                "name the last linear layer"
            )
        out = self._forward(split)
        if not out.is_meta and not torch.allclose(out, self.output, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise UserError(
                f"model.head = '{place}': {self.kind} does something with the output of this layer (a softmax, a "
                "scale?), so it cannot be split there; return the layer's output, or write a SplitModel"
            )
        return z.shape[1]

    def refuse_random_numbers(self, split: SplitModel) -> None:
        """Raise a UserError if the network draws from torch's generator in training."""
        if self.x.is_meta:
            return
        trial = deepcopy(split)
        with torch.random.fork_rng(devices=[]), in_mode(trial, training=True), torch.no_grad():
            # Keyed dropout without a key draws from torch's generator.
            for inner in trial.modules():
                if isinstance(inner, Dropout):
                    inner.p = 0
            before = torch.get_rng_state()
            try:
                trial(self.x)
            except Exception as error:
                raise UserError(
                    f"model: {self.kind} cannot process 2 inputs of shape {tuple(self.shape)} in train mode: "
                    f"{brief(error)}"
                ) from error
            if not torch.equal(before, torch.get_rng_state()):
                raise UserError(
                    f"model: {self.kind} draws random numbers from torch's generator in training (F.dropout, or the "
                    "dropout of attention or recurrent layers), so results would depend on the engine; use nn.Dropout "
                    "modules, or set it to 0"
                )


def made_up_inputs(module: nn.Module, shape: Shape) -> Tensor:
    """Return two samples on the device of a module.

    They are made without a generator, which would need a seed and does not work on torch's meta device.
    """
    device = next((tensor.device for tensor in module.parameters()), None)
    return torch.linspace(-1, 1, 2 * math.prod(shape), device=device).reshape(2, *shape)


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode of all modules, and restore it afterwards."""
    before = [(inner, inner.training) for inner in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for inner, mode in before:
            inner.training = mode
