"""Python objects under names that describe them: what an object is called, and a hash of its content or source."""

import hashlib
import inspect
import json
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError, brief
from fedloom.core.optimizers import MOMENTS, add_own
from fedloom.core.registry import OBJECT
from fedloom.data.partitions import PARTITIONS, Pool
from fedloom.data.sources import SOURCES
from fedloom.models import MODELS
from fedloom.models.plain import refuse_other_parameters
from fedloom.runs.object_names import add_module, described, label, name_of


def register_dataset(dataset: Dataset) -> str:
    """Register a dataset in this process and return its name."""
    digest = hashlib.sha256()
    for tensor in (dataset.inputs, dataset.labels, dataset.test, dataset.groups):
        if tensor is not None:
            digest.update(tensor.contiguous().numpy().data)
    digest.update(repr((dataset.classes, dataset.group_names)).encode())
    shape = "x".join(map(str, dataset.inputs.shape))
    name = re.sub(r"[^\w-]", "-", f"{OBJECT}{dataset.name}-{shape}-{digest.hexdigest()[:8]}")

    def load() -> Dataset:
        return dataset

    SOURCES[name] = load
    return name


def register_model(model: Any) -> str:
    """Register a network in this process and return its name.

    Args:
        model: An `nn.Module`, which also gives the initial weights; a class of modules; or a function that returns one.
    """
    digest = hashlib.sha256()
    if isinstance(model, nn.Module):
        refuse_other_parameters(model)
        kind, make = type(model), partial(deepcopy, model)
        add_module(digest, model)
    else:
        kind = make = model
    name = name_of(kind, digest)
    MODELS[name] = _without_arguments(make) if isinstance(model, nn.Module) else make
    return name


def register_partition(divide: Callable[..., Any]) -> str:
    """Register a partition in this process and return its name.

    Args:
        divide: A function of (labels, clients, rng), or of a `fedloom.data.Pool`. It returns the positions of each
            client's samples, or masks of them (a list of arrays), or the client of each sample (an array, −1 for none).
    """
    name = name_of(divide, hashlib.sha256())
    parameters = inspect.signature(divide).parameters.values()
    count = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if count not in (1, 3):
        raise UserError(
            f"partition: {label(divide)} has {count} parameters; it must be a function of (labels, clients, rng) or "
            "of a fedloom.data.Pool"
        )

    def owners(pool: Pool) -> np.ndarray:
        try:
            made = divide(pool) if count == 1 else divide(pool.labels, pool.clients, pool.rng)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"partition: {label(divide)} failed: {brief(error)}") from error
        return _owners(made, pool, label(divide)) if isinstance(made, list | tuple) else np.asarray(made)

    PARTITIONS[name] = owners
    return name


def _owners(positions: list[Any] | tuple[Any, ...], pool: Pool, label: str) -> np.ndarray:
    """Return the client of each sample, given the positions of each client's samples."""
    if len(positions) != pool.clients:
        raise UserError(
            f"partition: {label} returned {len(positions)} arrays for {pool.clients} clients; set clients="
            f"{len(positions)}, or return the positions of each client's samples"
        )
    owner = np.full(len(pool.labels), -1)
    for client, samples in enumerate(np.asarray(one).reshape(-1) for one in positions):
        if not samples.size:
            continue
        if samples.dtype == bool and len(samples) == len(owner):
            samples = np.flatnonzero(samples)
        if samples.dtype.kind not in "iu" or samples.min() < 0 or samples.max() >= len(owner):
            raise UserError(f"partition: {label} returned positions of client {client} outside 0 to {len(owner) - 1}")
        if len(np.unique(samples)) < len(samples) or (owner[samples] >= 0).any():
            raise UserError(f"partition: {label} gave a sample to client {client} that was given before")
        owner[samples] = client
    return owner


def register_optimizer(optimizer: Any) -> tuple[str, float | None]:
    """Register an optimizer in this process.

    Args:
        optimizer: An object with a function `direction` (see `fedloom.core.optimizers.OwnRule`), its class, or a
            function of parameters that returns an optimizer of torch.optim.

    Returns:
        Its name, and the learning rate of an optimizer of torch.optim.

    Raises:
        UserError: The object is neither, or a trial step fails.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer: this {type(optimizer).__name__} belongs to the parameters of one network, but every client "
            f"has its own; pass a function: optimizer=lambda parameters: {type(optimizer).__name__}(parameters, …)"
        )
    rule = optimizer() if isinstance(optimizer, type) and hasattr(optimizer, "direction") else optimizer
    if not hasattr(rule, "direction") and not callable(rule):
        raise UserError(
            f"optimizer: a {type(rule).__name__} cannot be used; give a name, a function of parameters that returns a "
            "torch.optim optimizer, or an object with a function direction(gradient, moments, count)"
        )
    direct = hasattr(rule, "direction")
    kind = rule if isinstance(rule, partial) or inspect.isroutine(rule) or inspect.isclass(rule) else type(rule)
    values = {} if isinstance(rule, partial) or inspect.isclass(rule) else getattr(rule, "__dict__", {})
    text = json.dumps(described(f"optimizer: {label(kind)}", values), sort_keys=True)
    lr = None
    if direct:
        _try_rule(rule)
    else:
        lr = _tried_factory(rule)
    name = name_of(kind, hashlib.sha256(text.encode()))
    add_own(name, rule)
    return name, lr


def _try_rule(rule: Any) -> None:
    moments = getattr(rule, "moments", None)
    if not isinstance(moments, int) or not 0 <= moments <= len(MOMENTS):
        raise UserError(f"optimizer: {label(type(rule))}.moments = {moments!r}: must be from 0 to {len(MOMENTS)}")
    try:
        found = rule.direction(torch.ones(3, 2), [torch.zeros(3, 2) for _ in range(moments)], torch.ones(()).double())
    except Exception as error:
        raise UserError(f"optimizer: a trial call of {label(type(rule))}.direction failed: {brief(error)}") from error
    if not isinstance(found, torch.Tensor) or found.shape != (3, 2):
        got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise UserError(f"optimizer: {label(type(rule))}.direction returned {got} for a gradient of shape [3, 2]")


def _tried_factory(make: Callable[..., Any]) -> float:
    parameter = nn.Parameter(torch.ones(3, 2))
    try:
        optimizer = make([parameter])
        if isinstance(optimizer, torch.optim.Optimizer):
            parameter.grad = torch.ones(3, 2)
            optimizer.step()
    except Exception as error:
        raise UserError(f"optimizer: a trial step of {label(make)} failed: {brief(error)}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer: {label(make)} returned a {type(optimizer).__name__}; it must return a torch.optim optimizer"
        )
    return float(optimizer.param_groups[0]["lr"])


def _without_arguments(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def copy_of_the_module() -> nn.Module:
        return make()

    return copy_of_the_module
