"""Functions that resize, combine and limit datasets."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.rng import numpy_generator


def resize(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Resize images bilinearly with antialiasing, in chunks, so that memory stays bounded.

    Args:
        images: uint8 or float32 [N, C, H, W].
        size: Height and width, or one number for both.

    Returns:
        [N, C, height, width] of the same type; the same tensor if the size does not change.

    Raises:
        UserError: The samples are not images, or the resized images do not fit into memory.
    """
    if images.dim() != 4:
        raise UserError(f"data.size = {size}: only images can be resized, not samples of {list(images.shape[1:])}")
    height, width = (size, size) if isinstance(size, int) else size
    if images.shape[-2:] == (height, width):
        return images
    count = len(images) * images.shape[1] * height * width
    refuse_without_room(count * images.element_size(), f"data.size = {max(height, width)}")
    resized = torch.empty(*images.shape[:2], height, width, dtype=images.dtype)
    for start in range(0, len(images), 1024):
        chunk = images[start : start + 1024]
        resized[start : start + 1024] = F.interpolate(chunk, size=(height, width), mode="bilinear", antialias=True)
    return resized


def combine(datasets: Sequence[Dataset], size: int | None = None) -> Dataset:
    """Combine datasets that show the same classes in different styles into one, whose groups are the styles.

    If any dataset is in colour, grey images are repeated to three channels. Groups within the datasets are replaced by
    the styles.

    Args:
        datasets: Datasets with the same number of classes; the class names are those of the first.
        size: Height and width to which images are resized; by default the largest height and width among them.

    Returns:
        The combined dataset.

    Raises:
        UserError: There are no datasets, or their numbers of classes or channels do not match.

    Example:
        >>> from fedloom.data import load
        >>> digits = load("digits")
        >>> combine([digits, digits]).group_names
        ('digits', 'digits')
    """
    if not datasets:
        raise UserError("combine: datasets is empty; give at least one dataset")
    first = datasets[0]
    for other in datasets[1:]:
        if len(other.classes) != len(first.classes):
            raise UserError(
                f"datasets '{first.name}' and '{other.name}' cannot be combined: "
                f"they have {len(first.classes)} and {len(other.classes)} classes"
            )
        if other.inputs.dtype != first.inputs.dtype or not other.inputs.dim() == first.inputs.dim() == 4:
            raise UserError(
                f"datasets '{first.name}' and '{other.name}' cannot be combined: only images of the same depth can be "
                "styles of one dataset"
            )
    if len({d.multilabel for d in datasets}) > 1:
        raise UserError("datasets cannot be combined: some have one class per sample, some several labels")
    channels = max(d.inputs.shape[1] for d in datasets)
    largest = (max(d.inputs.shape[2] for d in datasets), max(d.inputs.shape[3] for d in datasets))
    images = [resize(d.inputs, size or largest) for d in datasets]
    styles = torch.arange(len(datasets))
    return Dataset(
        name="+".join(d.name for d in datasets),
        inputs=torch.cat([with_channels(x, channels) for x in images]),
        labels=torch.cat([d.labels for d in datasets]),
        test=torch.cat([d.test for d in datasets]),
        classes=first.classes,
        groups=styles.repeat_interleave(torch.tensor([len(d) for d in datasets])),
        group_names=tuple(d.name for d in datasets),
        notes=tuple(note for d in datasets for note in d.notes),
        styles=True,
    )


def limit(dataset: Dataset, n: int, seed: int) -> Dataset:
    """Draw at most n training and n test images of each group at random (of the whole dataset without groups).

    Args:
        dataset: The dataset.
        n: Number of images, at least 1.
        seed: Seed of the random choice.

    Returns:
        A dataset with the chosen images, in their original order.

    Raises:
        UserError: `n` is below 1.

    Example:
        >>> from fedloom.data import load
        >>> len(limit(load("digits"), 100, seed=0))
        100
    """
    if n < 1:
        raise UserError(f"limit = {n}: must be at least 1")
    groups = np.zeros(len(dataset), np.int64) if dataset.groups is None else dataset.groups.numpy()
    test = dataset.test.numpy()
    kept = []
    for group in np.unique(groups):
        for is_test in (False, True):
            members = np.flatnonzero((groups == group) & (test == is_test))
            rng = numpy_generator(seed, "limit", int(group), is_test)
            kept.append(rng.permutation(members)[:n])
    positions = torch.from_numpy(np.sort(np.concatenate(kept)))
    return replace(
        dataset,
        inputs=dataset.inputs[positions],
        labels=dataset.labels[positions],
        test=dataset.test[positions],
        groups=None if dataset.groups is None else dataset.groups[positions],
    )


def with_channels(images: Tensor, channels: int) -> Tensor:
    """Repeat grey images to a number of channels.

    Args:
        images: [N, C, H, W].
        channels: Number of channels wanted.

    Returns:
        [N, channels, H, W]; the same tensor if it already has this number of channels.

    Raises:
        UserError: The images have another number of channels than 1 or `channels`.
    """
    if images.shape[1] == channels:
        return images
    if images.shape[1] != 1:
        raise UserError(f"images with {images.shape[1]} channels cannot be combined with {channels} channels")
    return images.expand(-1, channels, -1, -1).contiguous()
