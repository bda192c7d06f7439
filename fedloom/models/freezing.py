"""Parts of a network that stay fixed, for `model.freeze`."""

from collections.abc import Sequence

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
        raise UserError(f"model.freeze = {list(names)}: nothing of the network is left to train; freeze less")
