"""Torch's global switches, set for an engine's life and put back afterwards."""

import os
from contextlib import ExitStack
from typing import Any

import torch


def set_flags(undo: ExitStack, *, cuda: bool, tf32: bool, deterministic: bool) -> None:
    """One thread per process; on a GPU the precision of float32 products; and, if asked for, nothing but fixed sums."""
    # Two threads in one process collapse when the other core is busy; and one gives the same sums everywhere.
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)
    if not cuda:
        return
    _set_precision(undo, tf32)
    _set(undo, torch.backends.cudnn, "benchmark", False)  # its choice may differ from lane to lane and run to run
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _set(undo, torch.backends.cudnn, "deterministic", True)
        _set(undo, torch.utils.deterministic, "fill_uninitialized_memory", False)
        asked = torch.are_deterministic_algorithms_enabled()
        undo.callback(torch.use_deterministic_algorithms, asked)
        # A warning, no error: max-pooling is on torch's list, though windows that do not overlap are safe.
        torch.use_deterministic_algorithms(True, warn_only=True)


def _set_precision(undo: ExitStack, tf32: bool) -> None:
    convolutions = getattr(torch.backends.cudnn, "conv", None)
    if hasattr(convolutions, "fp32_precision"):
        for where in (torch.backends.cuda.matmul, convolutions):
            _set(undo, where, "fp32_precision", "tf32" if tf32 else "ieee")
    else:  # before torch 2.9
        for where in (torch.backends.cuda.matmul, torch.backends.cudnn):
            _set(undo, where, "allow_tf32", tf32)


def _set(undo: ExitStack, where: Any, name: str, value: object) -> None:
    undo.callback(setattr, where, name, getattr(where, name))
    setattr(where, name, value)
