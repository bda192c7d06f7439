"""Construction of an experiment's task from its recipe: images divided among clients, the network, the objective."""

from dataclasses import replace
from typing import Any

from fedloom.config.recipe import Recipe
from fedloom.core.registry import absolute
from fedloom.core.task import Dataset, Federation, InputFormat, Task
from fedloom.data import combine, federate, limit, parse_partition, parts
from fedloom.data.augment import parse_augment
from fedloom.data.dataset import with_channels
from fedloom.data.settings import DataSettings
from fedloom.data.sources import load
from fedloom.models import Factory

VIEWS_OF_OTHER_INPUTS = ("gaussian:0.1", "mask:0.2")
"""Default of `data.views` for inputs that are not images."""


def load_dataset(recipe: Recipe) -> Dataset:
    """Load the dataset that a recipe names; several datasets (`mnist+usps`) become styles of one dataset."""
    data = recipe.data
    styles = [load(name, folder=data.dir, size=data.size, on_bad=data.on_bad) for name in parts(data.name)]
    dataset = styles[0] if len(styles) == 1 else combine(styles, size=data.size)
    return dataset if data.channels is None else replace(dataset, images=with_channels(dataset.images, data.channels))


def divide(recipe: Recipe, dataset: Dataset) -> tuple[Dataset, Federation]:
    """Return the dataset, cut to `data.limit`, and its division among clients."""
    data = recipe.data
    seed = recipe.seed if data.seed is None else data.seed
    if data.limit is not None:
        dataset = limit(dataset, data.limit, seed)
    federation = federate(
        dataset,
        clients=data.clients,
        partition=parse_partition(data.partition),
        split=data.split,
        minimum=data.minimum,
        newcomers=data.newcomers,
        resample=data.resample,
        seed=seed,
    )
    return dataset, federation


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
    if federation is None:
        dataset, federation = divide(recipe, dataset)
    augment, views = parse_augment(recipe.data.augment), parse_augment(recipe.data.views)
    shape = tuple(dataset.images.shape[1:])
    if len(shape) != 3 and recipe.data.views == DataSettings().views:  # the default, which is for images
        views = parse_augment(VIEWS_OF_OTHER_INPUTS)
    augment.refuse_for(shape, "data.augment")
    views.refuse_for(shape, "data.views")
    return Task(
        dataset,
        federation,
        network=Factory(absolute(recipe.model.name), recipe.model.options),
        objective=recipe.make_objective(),
        augment=augment,
        views=views,
        normalise=recipe.data.normalise,
        elsewhere=elsewhere,
    )


def task_facts(task: Task, fingerprint: str) -> dict[str, Any]:
    """Return the facts about the data that are needed to use a model without the data, see `TaskFacts`."""
    styles = task.dataset.group_names or (task.dataset.name,)
    return InputFormat.of(task).to_json() | {
        "model": task.network.facts(),
        "clients": task.clients,
        "newcomers": task.federation.newcomers,
        "names": task.federation.names,
        "styles": styles,
        "fingerprint": fingerprint,
    }
