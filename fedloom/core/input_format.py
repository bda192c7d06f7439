"""The input format of a trained model, which is stored with its weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.protocols import Shape


@dataclass(frozen=True)
class InputFormat:
    """Input format of a trained model: classes, shape and type of a sample, and normalisation."""

    classes: tuple[str, ...]
    shape: Shape
    """Channels, height and width of images; any other shape of other inputs."""
    mean: tuple[float, ...]
    """Per entry of the first dimension: channels of images, columns of tables."""
    std: tuple[float, ...]
    dtype: Literal["uint8", "float32"] = "uint8"
    """Type of the inputs: images of bytes, which are scaled to [0, 1], or floats."""

    @property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation as tensors that broadcast over samples."""
        ones = [1] * (len(self.shape) - 1)
        mean, std = (torch.tensor(values, dtype=torch.float32).reshape(-1, *ones) for values in (self.mean, self.std))
        return mean, std

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width.

        Raises:
            UserError: The model does not take images.
        """
        if self.dtype != "uint8" or len(self.shape) != 3:
            shape = ", ".join(map(str, self.shape))
            raise UserError(f"this model takes {self.dtype} inputs [B, {shape}], not image files; use it from Python")
        channels, height, width = self.shape
        return channels, height, width

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "InputFormat":
        """Return the format described by such a dictionary.

        Raises:
            UserError: Mean and standard deviation do not have one entry per channel.
        """
        lists = {name: tuple(values[name]) for name in ("classes", "shape", "mean", "std")}
        form = cls(**lists, dtype=values.get("dtype", "uint8"))
        if not len(form.mean) == len(form.std) == form.shape[0]:
            raise UserError(f"mean and std must have {form.shape[0]} entries, one per channel")
        return form
