"""The task as each party has it: at the server without a single image, at an organisation with its own alone."""

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
from fedloom.deploy.terms import FederationTerms
from fedloom.experiment.build import make_task

OWN_SPLIT = "pooled:0.75"
"""How an organisation's images are divided where neither its folders nor the recipe say."""


def task_elsewhere(
    recipe: Recipe,
    federation: FederationTerms,
    train: list[np.ndarray],
    test: list[np.ndarray],
    name: str | None = None,
) -> Task:
    """Clients and how many samples each has; the images lie with them, and one blank stands for all."""
    dataset = Dataset(
        name=name or federation.name,
        images=torch.zeros(1, *federation.shape, dtype=torch.uint8),
        labels=torch.zeros(1, dtype=torch.int64),
        test=torch.zeros(1, dtype=torch.bool),
        classes=federation.classes,
    )
    return make_task(recipe, dataset, data.Federation(train, test), elsewhere=True)


def samples_elsewhere(count: int) -> np.ndarray:
    """So many samples, of which only the number is known; they take no room."""
    return np.broadcast_to(np.int64(0), (count,))


def own_task(
    recipe: Recipe, federation: FederationTerms, client: int, dataset: Dataset, agreed: Recipe | None = None
) -> Task:
    """One client's images under its own number; the others have none here.

    Folders train/ and test/ (or x_train, x_test) are the client's split; without them the `data.split` and the seed of
    the recipe in its own folder (`agreed`): no other recipe makes training images of its test images.
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
    """An organisation's images, brought to the federation's classes and shape; and what was done to them, in words."""
    found = data.load(str(source.expanduser().resolve()))
    number = {name: label for label, name in enumerate(federation.classes)}
    if strange := [name for name in found.classes if name not in number]:
        raise UserError(
            f"--data {source}: the class '{strange[0]}' is none of the federation's "
            f"({_some(federation.classes)}); rename it, or leave it out"
        )
    channels, height, width = federation.shape
    before = "×".join(map(str, found.images.shape[2:]))
    images = resize(found.images, (height, width))
    if images.shape[1] != channels:
        raise UserError(
            f"--data {source}: images have {images.shape[1]} channels, and the federation's have {channels}; "
            "convert them"
        )
    labels = torch.tensor([number[name] for name in found.classes])[found.labels]
    resized = f" RESIZED to the federation's {height}×{width}" if before != f"{height}×{width}" else ""
    return (
        Dataset(federation.name, images, labels, found.test, federation.classes),
        f"images: {len(images):,} of {before} pixels{',' if resized else ''}{resized}",
    )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
