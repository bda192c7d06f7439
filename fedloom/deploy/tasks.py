"""Task of each party: without images at the server, with only its own images at an organisation."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from fedloom import data
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.task import Task
from fedloom.data import Dataset, federate
from fedloom.data.dataset import resize
from fedloom.data.sources.tree import one_form
from fedloom.deploy.terms import FederationTerms
from fedloom.experiment.build import make_task

OWN_SPLIT = "pooled:0.75"
"""Split of an organisation's images into training and test images if neither its folders nor the recipe define it."""


def task_elsewhere(
    recipe: Recipe,
    federation: FederationTerms,
    train: list[np.ndarray],
    test: list[np.ndarray],
    name: str | None = None,
) -> Task:
    """Return the server's task: the clients' numbers of samples, with one blank image as a placeholder.

    Args:
        recipe: The recipe.
        federation: The terms of the federation.
        train: Placeholders of each client's training samples (`samples_elsewhere`).
        test: Placeholders of each client's test samples.
        name: Name of the dataset; by default the federation's.
    """
    dataset = Dataset(
        name=name or federation.name,
        inputs=torch.zeros(1, *federation.shape, dtype=torch.uint8),
        labels=torch.zeros(1, dtype=torch.int64),
        test=torch.zeros(1, dtype=torch.bool),
        classes=federation.classes,
    )
    return make_task(recipe, dataset, data.Federation(train, test, names=federation.organisations), elsewhere=True)


def samples_elsewhere(count: int) -> np.ndarray:
    """Return a placeholder for `count` samples that are stored at a client; it takes no memory."""
    return np.broadcast_to(np.int64(0), (count,))


def own_task(
    recipe: Recipe, federation: FederationTerms, client: int, dataset: Dataset, agreed: Recipe | None = None
) -> Task:
    """Return the task of one client: its images under its number, and no images of other clients.

    If the images are in folders train/ and test/ (or arrays x_train and x_test), these are the split. Otherwise the
    split and seed are those of the recipe in the client's folder (`agreed`), so that no other recipe can turn test
    images into training images.
    """
    own = agreed or recipe
    split = "common" if bool(dataset.test.any()) else own.data.split
    seed = own.seed if own.data.seed is None else own.data.seed
    if not split.startswith(("pooled", "common")):
        split = OWN_SPLIT
    held = federate(dataset, clients=1, partition="iid", split=split, minimum=1, seed=seed)
    train, test = (
        [part[0] if c == client else np.empty(0, np.int64) for c in range(len(federation.organisations))]
        for part in (held.train, held.test)
    )
    return make_task(recipe, dataset, data.Federation(train, test))


def own_images(source: Path, federation: FederationTerms) -> tuple[Dataset, str]:
    """Load an organisation's images, converted to the federation's classes and shape.

    Args:
        source: The images.
        federation: The terms of the federation.

    Returns:
        The dataset, and a line of text that describes the images and whether they were resized.

    Raises:
        UserError: If the images have a class or a number of channels that the federation does not have.
    """
    found = data.load(str(source.expanduser().resolve()))
    number = {one_form(name): label for label, name in enumerate(federation.classes)}
    if strange := [name for name in found.classes if one_form(name) not in number]:
        raise UserError(
            f"--data {source}: the class '{strange[0]}' is not one of the federation's "
            f"({_some(federation.classes)}); rename it or remove it"
        )
    if not found.bytes:
        raise UserError(f"--data {source}: deployments take images of 8 bits; convert them")
    channels, height, width = federation.shape
    before = "×".join(map(str, found.inputs.shape[2:]))
    images = resize(found.inputs, (height, width))
    if images.shape[1] != channels:
        raise UserError(
            f"--data {source}: images have {images.shape[1]} channels, but the federation's have {channels}; "
            "convert them"
        )
    labels = torch.tensor([number[one_form(name)] for name in found.classes])[found.labels]
    resized = f" RESIZED to the federation's {height}×{width}" if before != f"{height}×{width}" else ""
    return (
        Dataset(federation.name, images, labels, found.test, federation.classes),
        f"images: {len(images):,} of {before} pixels{',' if resized else ''}{resized}",
    )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
