"""Precision of losses: float32 even under autocast, since losses compare numbers that differ little."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

P = ParamSpec("P")


def in_float32(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorate a loss to run without autocast, on inputs converted to at least float32."""

    @wraps(loss)
    def exact(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu"):
            return loss(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(_wide, (args, kwargs))
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return loss(*wide_args, **wide_kwargs)

    return exact


def _wide(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
