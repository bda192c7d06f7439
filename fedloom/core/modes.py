"""Modes of a module tree: which parts are trained, and which only evaluate."""

from torch import nn

from fedloom.core.frozen import is_fixed_itself
from fedloom.core.state import Parts, under


class Modes:
    """Sets train and eval modes in a tree, and which parameters need gradients.

    Args:
        parts: The tree.
        fixed: Paths of frozen parts, which are always in eval mode.
    """

    def __init__(self, parts: Parts, fixed: tuple[str, ...]):
        self._parts, self._fixed = parts, fixed
        self._known: dict[object, tuple[list[tuple[nn.Module, bool]], list[tuple[nn.Parameter, bool]]]] = {}

    def train_only(self, paths: tuple[str, ...], *, norms: bool) -> None:
        """Set the parts under `paths` to train mode; freeze all others, including buffers, and set them to eval mode.

        Without `norms`, all batch-norm layers are in eval mode: one sample has no variance.
        """
        if (paths, norms) not in self._known:  # every `fit` calls this
            self._known[paths, norms] = self._modules(paths, norms), self._parameters(paths)
        modules, parameters = self._known[paths, norms]
        for module, training in modules:
            if module.training is not training:
                module.training = training
        for parameter, learns in parameters:
            if parameter.requires_grad is not learns:
                parameter.requires_grad_(learns)

    def evaluate_only(self) -> None:
        """Set everything to eval mode."""
        self._parts.eval()

    def _modules(self, paths: tuple[str, ...], norms: bool) -> list[tuple[nn.Module, bool]]:
        modules = []
        for name, module in self._parts.named_modules():
            batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            fixed = under(name, self._fixed) or is_fixed_itself(module)
            trained = bool(name) and under(name, paths) and not fixed
            modules.append((module, trained and (norms or not batch_norm)))
        return modules

    def _parameters(self, paths: tuple[str, ...]) -> list[tuple[nn.Parameter, bool]]:
        for name, buffer in self._parts.named_buffers():
            if buffer.requires_grad:
                raise RuntimeError(
                    f"part '{name}' is a tensor that requires a gradient; make it an nn.Parameter of a module"
                )
        return [(parameter, under(name, paths)) for name, parameter in self._parts.named_parameters()]
