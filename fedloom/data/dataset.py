"""A dataset is one uint8 tensor with its labels; federations are lists of positions into it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.rng import numpy_generator
from fedloom.core.task import Dataset


def resize(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Bilinear with antialiasing, uint8 in and out, a chunk at a time so that memory stays bounded.

    images: uint8 [N, C, H, W] → uint8 [N, C, size, size], or [N, C, *size].
    """
    height, width = (size, size) if isinstance(size, int) else size
    if images.shape[-2:] == (height, width):
        return images
    refuse_without_room(len(images) * images.shape[1] * height * width, f"data.size = {max(height, width)}")
    resized = torch.empty(*images.shape[:2], height, width, dtype=torch.uint8)
    for start in range(0, len(images), 1024):
        chunk = images[start : start + 1024]
        resized[start : start + 1024] = F.interpolate(chunk, size=(height, width), mode="bilinear", antialias=True)
    return resized


def combine(datasets: Sequence[Dataset], size: int | None = None) -> Dataset:
    """One dataset of several that show the same classes in different styles; its groups are the styles.

    Images are brought to `size`, or to the largest height and width among them; if any is in colour, grey
    ones are repeated to three channels. Groups that a part had of its own give way to the styles.
    """
    if not datasets:
        raise UserError("combine: no datasets were given")
    first = datasets[0]
    for other in datasets[1:]:
        if len(other.classes) != len(first.classes):
            raise UserError(
                f"datasets '{first.name}' and '{other.name}' cannot be combined: "
                f"they have {len(first.classes)} and {len(other.classes)} classes"
            )
    channels = max(d.images.shape[1] for d in datasets)
    largest = (max(d.images.shape[2] for d in datasets), max(d.images.shape[3] for d in datasets))
    images = [resize(d.images, size or largest) for d in datasets]
    styles = torch.arange(len(datasets))
    return Dataset(
        name="+".join(d.name for d in datasets),
        images=torch.cat([with_channels(x, channels) for x in images]),
        labels=torch.cat([d.labels for d in datasets]),
        test=torch.cat([d.test for d in datasets]),
        classes=first.classes,
        groups=styles.repeat_interleave(torch.tensor([len(d) for d in datasets])),
        group_names=tuple(d.name for d in datasets),
    )


def limit(dataset: Dataset, n: int, seed: int) -> Dataset:
    """At most n training and n test images of each group (of all, where there are no groups), at random."""
    if n < 1:
        raise UserError(f"limit: {n} images cannot be kept, at least 1 must be")
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
        images=dataset.images[positions],
        labels=dataset.labels[positions],
        test=dataset.test[positions],
        groups=None if dataset.groups is None else dataset.groups[positions],
    )


def with_channels(images: Tensor, channels: int) -> Tensor:
    """Grey images repeated to that many channels."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] != 1:
        raise UserError(f"images with {images.shape[1]} channels cannot be combined with {channels} channels")
    return images.expand(-1, channels, -1, -1).contiguous()
