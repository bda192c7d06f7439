"""A model with built-in preprocessing that takes images as bytes or floats, channels first or last."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.errors import UserError
from fedloom.core.input_format import InputFormat
from fedloom.core.protocols import ModelFactory, Objective
from fedloom.core.task import Task
from fedloom.data import Dataset, Federation

CHUNK = 512
"""Maximum number of images per forward pass when many images are given."""

LARGEST = 2.0
"""Images of floats above this value are bytes that were not divided by 255; resizing may exceed 1 slightly."""


class ImageModel(nn.Module):
    """A frozen model in eval mode that computes logits from images, with preprocessing.

    Images are arrays or tensors of uint8, or of floats in [0, 1]. Their shape is [B, H, W, C], [B, C, H, W], or either
    without the batch dimension; grey images may also lack the channel dimension.

    Example:
        >>> model = fedloom.load("runs/mine").personal(3)   # doctest: +SKIP
        >>> model(images).argmax(1), model.classes   # doctest: +SKIP
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, form: InputFormat):
        super().__init__()
        self.form = form
        mean, std = form.statistics
        self.register_buffer("scale", 1 / (255 * std) if form.dtype == "uint8" else 1 / std, persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of classes or labels, in the order of the logits."""
        return self.form.classes

    @property
    def multilabel(self) -> bool:
        """Whether an image can have several labels, whose probabilities are the sigmoids of the logits."""
        return False

    def forward(self, images: Any) -> Tensor:
        """Compute logits.

        Args:
            images: Images in a supported format; see `ImageModel`.

        Returns:
            Logits [B, classes].

        Raises:
            UserError: The images have an unsupported shape or type, or the model has no classifier.
        """
        return self.logits(self.prepared(images))

    def features(self, images: Any) -> Tensor:
        """Compute representations.

        Args:
            images: Images in a supported format; see `ImageModel`.

        Returns:
            Representations [B, width].

        Raises:
            UserError: The images have an unsupported shape or type.
        """
        return self.represent(self.prepared(images))

    def logits(self, x: Tensor) -> Tensor:
        """Compute logits of preprocessed images, see `prepared`."""
        raise NotImplementedError

    def represent(self, x: Tensor) -> Tensor:
        """Compute representations of preprocessed images, see `prepared`."""
        raise NotImplementedError

    def prepared(self, images: Any) -> Tensor:
        """Convert images or other inputs to the network's input: normalised float32 [B, …]."""
        x = images if isinstance(images, Tensor) else _tensor(images)
        x = x.to(self.scale.device)
        if self.form.dtype != "uint8":
            return torch.addcmul(self.shift, self._batched(x).to(self.scale.dtype), self.scale)
        x = self._channels_first(x)
        factor = 1 if x.dtype == torch.uint8 else 255
        return torch.addcmul(self.shift, x.to(self.scale.dtype), self.scale * factor)

    def _batched(self, x: Tensor) -> Tensor:
        """Add the batch dimension to a single sample.

        Raises:
            UserError: The inputs have another shape than those that the model was trained on.
        """
        shape = self.form.shape
        x = x[None] if tuple(x.shape) == shape else x
        if tuple(x.shape[1:]) != shape:
            raise UserError(f"inputs of shape {list(x.shape)}: this model takes [B, {', '.join(map(str, shape))}]")
        return x

    def _channels_first(self, x: Tensor) -> Tensor:
        channels, height, width = self.form.shape
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise UserError(f"images: type {x.dtype} is not supported; use uint8, or floats in [0, 1]")
        if x.is_floating_point() and x.numel() and float(x.max()) > LARGEST:
            raise UserError(f"images: floats up to {float(x.max()):g}; divide bytes by 255, or give them as uint8")
        given = tuple(x.shape)
        if channels == 1 and x.dim() in (2, 3) and given[-2:] == (height, width):  # no channel dimension
            x = x.reshape(-1, 1, height, width)
        x = x.unsqueeze(0) if x.dim() == 3 else x
        if x.dim() == 4 and tuple(x.shape[1:]) == (height, width, channels):
            return x.permute(0, 3, 1, 2)
        if x.dim() == 4 and tuple(x.shape[1:]) == (channels, height, width):
            return x
        raise UserError(
            f"images of shape {list(given)}: this model takes [B, {height}, {width}, {channels}] "
            f"or [B, {channels}, {height}, {width}]; resize them, or convert their colours"
        )

    @torch.no_grad()
    def probabilities(self, images: Any) -> np.ndarray:
        """Compute the probabilities of classes, or of labels if a sample can have several, in chunks of images.

        Args:
            images: Images in a supported format; see `ImageModel`.

        Returns:
            Probabilities [B, classes], as a NumPy array.

        Raises:
            UserError: The images have an unsupported shape or type, or the model has no classifier.
        """
        logits = torch.cat([self(chunk) for chunk in chunks(images)])
        return (logits.sigmoid() if self.multilabel else logits.softmax(1)).cpu().numpy()


def _tensor(inputs: Any) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(inputs))
    except (TypeError, ValueError):
        raise UserError(
            f"inputs of type {type(inputs).__name__} are not an array of numbers; give an array or a tensor"
        ) from None


def chunks(images: Any) -> Sequence[Any]:
    """Split images into chunks of at most `CHUNK`."""
    if len(images) <= CHUNK:
        return [images]
    return [images[start : start + CHUNK] for start in range(0, len(images), CHUNK)]


def blank_labels(classes: Sequence[str], *, multilabel: bool) -> Tensor:
    """Return the labels of one blank image."""
    return torch.zeros(1, len(classes), dtype=torch.uint8) if multilabel else torch.zeros(1, dtype=torch.int64)


def blank_task(form: InputFormat, network: ModelFactory, objective: Objective) -> Task:
    """Create a task with one blank image, sufficient to build networks."""
    dataset = Dataset(
        name="",
        inputs=torch.zeros(1, *form.shape, dtype=getattr(torch, form.dtype)),
        labels=blank_labels(form.classes, multilabel=objective.multilabel),
        test=torch.zeros(1, dtype=torch.bool),
        classes=form.classes,
    )
    return Task(dataset, Federation([], []), network, objective)
