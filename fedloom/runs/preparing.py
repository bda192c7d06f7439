"""From a recipe to a task: the images it names, dealt out to clients."""

from dataclasses import replace

from fedloom.data import Dataset, combine, federate, limit, load, parts
from fedloom.data.augment import parse_augment
from fedloom.data.dataset import with_channels
from fedloom.plugins import absolute
from fedloom.recipe import Recipe
from fedloom.task import Task


def load_dataset(recipe: Recipe) -> Dataset:
    """The images that a recipe names, several datasets as styles of one."""
    data = recipe.data
    styles = [load(name, folder=data.dir, size=data.size) for name in parts(data.name)]
    dataset = styles[0] if len(styles) == 1 else combine(styles, size=data.size)
    return dataset if data.channels is None else replace(dataset, images=with_channels(dataset.images, data.channels))


def make_task(recipe: Recipe, dataset: Dataset | None = None) -> Task:
    """Loads the data, unless they are given, and deals them out."""
    data = recipe.data
    seed = recipe.seed if data.seed is None else data.seed
    dataset = dataset or load_dataset(recipe)
    if data.limit is not None:
        dataset = limit(dataset, data.limit, seed)
    federation = federate(
        dataset,
        clients=data.clients,
        partition=data.partition,
        split=data.split,
        minimum=data.minimum,
        newcomers=data.newcomers,
        resample=data.resample,
        seed=seed,
    )
    return Task(
        dataset,
        federation,
        model_name=absolute(recipe.model.name),
        model_options=recipe.model.options,
        augment=parse_augment(data.augment),
        views=parse_augment(data.views),
        normalise=data.normalise,
        objective=recipe.make_objective(),
    )
