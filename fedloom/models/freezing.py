"""Parts of a network that stay fixed: those of `model.freeze`, and layers with `requires_grad` = False."""

from collections.abc import Sequence

from torch import nn

from fedloom.core.errors import UserError, nearest
from fedloom.core.frozen import fix_part
from fedloom.core.state import under
from fedloom.models.base import SplitModel


def freeze(model: SplitModel, names: Sequence[str]) -> None:
    """Fix parts of a network: they are not trained, not sent, and stay in eval mode.

    Their parameters become buffers, so that optimizers, proximal terms and control variates do not include them, and
    `stays_fixed` tells workspaces to leave them out of messages and clients' memory.

    Args:
        model: The network; changed in place.
        names: Dotted names of submodules: `extractor`, `extractor.conv1`.

    Raises:
        UserError: There is no such submodule, or nothing is left to train.
    """
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            choices = [known for known in modules if known and known.count(".") < 2]
            raise UserError(f"model.freeze = '{name}': the network has no such part: {nearest(name, choices)}")
        fix_part(modules[name])
    if under("extractor", names):
        model.extractor.__dict__["takes_inputs"] = True  # so its features can be cached, see core/features.py
    if names and not any(True for _ in model.parameters()):
        raise UserError(
            f"model.freeze = {list(names)}: nothing of the network is left to train; freeze less, or call "
            "requires_grad_(True) on the layers that should be trained"
        )


def untrained_parts(model: SplitModel) -> list[str]:
    """Return the largest parts of a network whose parameters all have `requires_grad` = False.

    Raises:
        UserError: A layer has some parameters with and some without.
    """
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if not any(True for _ in module.parameters()):
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            found.append(name)
            return
        if fixed := [own for own, tensor in module.named_parameters(recurse=False) if not tensor.requires_grad]:
            raise UserError(
                f"model: the parameter '{fixed[0]}' of '{name}' has requires_grad = False, but others of this layer "
                "have not; freeze whole layers"
            )
        for child, inner in module.named_children():
            visit(f"{name}.{child}", inner)

    for part, inner in model.named_children():
        visit(part, inner)
    return found
