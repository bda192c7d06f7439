"""Construction of an experiment's task from its recipe: images divided among clients, the network, the objective."""

import logging
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from fedloom.config.recipe import Recipe
from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.protocols import ModelFactory
from fedloom.core.registry import absolute
from fedloom.core.task import Task
from fedloom.data import combine, federate, limit, parse_partition, parts
from fedloom.data.augment import parse_augment
from fedloom.data.dataset import with_channels
from fedloom.data.federation import CLIENTS
from fedloom.data.frames import few
from fedloom.data.shared import shared_dataset
from fedloom.data.sources import load
from fedloom.models import Factory
from fedloom.models.per_client import by_client, dealt
from fedloom.models.settings import ModelSettings, NetworkSettings

VIEWS = {"images": ("crop:4", "flip"), "other inputs": ("gaussian:0.1", "mask:0.2")}
"""Default of `data.views`."""
log = logging.getLogger("fedloom")
_warned: WeakSet[Dataset] = WeakSet()
"""Datasets whose division was warned of: the runs of a comparison share one."""


def load_dataset(recipe: Recipe) -> Dataset:
    """Load the dataset that a recipe names; several datasets (`mnist+usps`) become styles of one dataset.

    A parallel run of a comparison or sweep maps the dataset that the process that started it has loaded.
    """
    data = recipe.data
    if (shared := shared_dataset(data)) is not None:
        return shared
    styles = [load(name, folder=data.dir, options=data.reading) for name in parts(data.name)]
    dataset = styles[0] if len(styles) == 1 else combine(styles, size=data.size)
    return dataset if data.channels is None else replace(dataset, inputs=with_channels(dataset.inputs, data.channels))


def divide(recipe: Recipe, dataset: Dataset) -> tuple[Dataset, Federation]:
    """Return the dataset, cut to `data.limit`, and its division among clients."""
    data = recipe.data
    seed = recipe.seed if data.seed is None else data.seed
    _warn_of_pooled_clients(recipe, dataset)
    if data.limit is not None:
        dataset = limit(dataset, data.limit, seed)
    federation = federate(
        dataset,
        clients=None if data.clients == CLIENTS else data.clients,
        partition=parse_partition(data.partition),
        split=data.split,
        minimum=data.minimum,
        newcomers=data.newcomers,
        resample=data.resample,
        seed=seed,
    )
    return dataset, federation


def _warn_of_pooled_clients(recipe: Recipe, dataset: Dataset) -> None:
    """Log a warning if the default partition ignores the clients that the data have."""
    if dataset.groups is None or dataset.styles or "partition" in recipe.data.model_fields_set or dataset in _warned:
        return
    _warned.add(dataset)
    log.warning(
        "data.partition is not set: the %d clients of '%s' (%s) are pooled, and their samples divided anew among %d "
        "clients by the default, '%s'. --partition natural keeps the data's clients; set a partition to divide them",
        len(dataset.group_names), recipe.data.name, few(dataset.group_names), recipe.data.clients,
        recipe.data.partition,
    )  # fmt: skip


def make_task(
    recipe: Recipe, dataset: Dataset | None = None, federation: Federation | None = None, *, elsewhere: bool = False
) -> Task:
    """Create the task of a recipe.

    Args:
        recipe: The recipe.
        dataset: The dataset; default: loaded as the recipe says.
        federation: Its division among clients; default: divided as the recipe says.
        elsewhere: Whether the images stay at the clients, so that only their number is known here (a deployment's
            server).
    """
    dataset = dataset or load_dataset(recipe)
    if len(dataset.classes) < 2:
        only = dataset.classes[0] if dataset.classes else ""
        raise UserError(f"dataset '{dataset.name}': its only class is '{only}'; at least two classes are needed")
    if federation is None:
        dataset, federation = divide(recipe, dataset)
    shape = tuple(dataset.inputs.shape[1:])
    augment = parse_augment(recipe.data.augment)
    default = dataset.views or VIEWS["images" if len(shape) == 3 else "other inputs"]
    views = parse_augment(default if recipe.data.views is None else recipe.data.views)
    augment.refuse_for(shape, "data.augment")
    views.refuse_for(shape, "data.views")
    return Task(
        dataset,
        federation,
        network=make_network(recipe.model, federation),
        objective=recipe.make_objective(),
        augment=augment,
        views=views,
        normalise=recipe.data.normalise,
        given=(recipe.data.mean, recipe.data.std),
        elsewhere=elsewhere,
    )


def make_network(model: ModelSettings, federation: Federation) -> ModelFactory:
    """Return the network of a recipe, or the networks of different clients."""
    if model.networks:
        return dealt([_factory(network) for network in model.networks], len(federation))
    if model.by_client:
        return by_client({client: _factory(network) for client, network in model.by_client.items()}, federation)
    return _factory(model)


def _factory(network: NetworkSettings) -> Factory:
    return Factory(absolute(network.name), network.options)


def task_facts(task: Task, fingerprint: str) -> dict[str, Any]:
    """Return the facts about the data that are needed to use a model without the data, see `TaskFacts`."""
    styles = task.dataset.group_names or (task.dataset.name,)
    return task.input_format.to_json() | {
        "model": task.network.facts(),
        "clients": task.clients,
        "newcomers": task.federation.newcomers,
        "names": task.federation.names,
        "styles": styles,
        "fingerprint": fingerprint,
    }
