"""Pictures of any size, mode and file format → one uint8 tensor."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room

GREY = {"1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"}
BROKEN = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


def decode(
    names: Sequence[str], open_picture: Callable[[int], Image.Image], size: int | None, workers: int | None = None
) -> Tensor:
    """uint8 [N, C, H, W] of the pictures that `open_picture(0…N-1)` opens; `names` are for error messages.

    C is 1 if every picture is grey, else 3. With a `size` each is resized to size × size (bilinear,
    antialiased; the aspect ratio is not kept). Headers are read first, so that mixed sizes are
    refused before anything is decoded, and pixels land in the final tensor: memory is that of the result.
    """

    @contextmanager
    def opened(index: int) -> Iterator[Image.Image]:
        try:
            with open_picture(index) as picture:
                yield picture
        except BROKEN as error:
            raise UserError(f"{names[index]}: cannot be read as an image ({error})") from error

    def head(index: int) -> tuple[str, tuple[int, int]]:
        with opened(index) as picture:
            return picture.mode, picture.size

    def fill(index: int) -> None:
        with opened(index) as picture:
            write_picture(picture, pixels[index])

    everything = range(len(names))
    with ThreadPoolExecutor(workers) as pool:
        modes, sizes = zip(*pool.map(head, everything), strict=True)
        width, height = (size, size) if size else _common_size(names, sizes)
        channels = 1 if GREY.issuperset(modes) else 3
        refuse_without_room(len(names) * channels * height * width, f"data.size = {size or max(height, width)}")
        pixels = np.empty((len(names), channels, height, width), np.uint8)
        list(pool.map(fill, everything))
    return torch.from_numpy(pixels)


def write_picture(picture: Image.Image, target: np.ndarray) -> None:
    """Into uint8 [C, H, W]: grey or RGB, resized if need be."""
    channels, height, width = target.shape
    if picture.mode.startswith("I"):
        # Pillow clips 16-bit greys at 255 when it converts; a medical picture would come out white.
        picture = Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    picture = picture.convert("L" if channels == 1 else "RGB")
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(picture)
    target[:] = array[None] if channels == 1 else array.transpose(2, 0, 1)


def _common_size(names: Sequence[str], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    for name, size in zip(names, sizes, strict=True):
        if size != sizes[0]:
            raise UserError(
                f"the images differ in size: {names[0]} is {sizes[0][0]}×{sizes[0][1]}, "
                f"{name} is {size[0]}×{size[1]}; set data.size (for example 64) to bring them to one"
            )
    return sizes[0]
