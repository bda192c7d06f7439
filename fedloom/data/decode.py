"""Pictures of any size, mode and file format → one uint8 tensor."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedloom.core.errors import UserError, brief
from fedloom.core.limits import refuse_without_room

GREY = {"1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Formats that are decoded. Pillow knows more, and runs Ghostscript for some of them."""
PIXELS = 2**26
"""Of one picture, at most: 8,192 × 8,192."""
WORKING = 2**29
"""Bytes for pictures that are being decoded, unless a single one takes more."""
LARGE = 2**24
"""JPEGs with more pixels are decoded at the smallest scale that has twice the pixels wanted in each direction."""
COST = 16
"""Bytes that a pixel takes while a picture is decoded and converted, at most."""

# Pillow warns of pictures that `open_picture` refuses.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def open_picture(source: str | Path | IO[bytes]) -> Image.Image:
    """Opens a picture, reading its header alone.

    Raises:
        ValueError: It has more than `PIXELS` pixels.
        Exception: It is no picture; Pillow raises nearly anything.
    """
    picture = Image.open(source, formats=FORMATS)
    width, height = picture.size
    if width * height > PIXELS:
        picture.close()
        raise ValueError(f"it has {width}×{height} pixels, and {PIXELS:,} are the most; make it smaller")
    return picture


def workers_for(sizes: Sequence[tuple[int, int]], result: int, what: str, workers: int | None = None) -> int | None:
    """How many pictures may be decoded at a time, so that they take `WORKING` bytes at most; large ones one by one.

    Raises:
        UserError: The result and the largest picture do not fit into memory.
    """
    largest = COST * max((width * height for width, height in sizes), default=0)
    refuse_without_room(result + largest, what)
    most = max(1, WORKING // max(1, largest))
    return most if workers is None and most < (os.cpu_count() or 1) + 4 else workers  # + 4: as the thread pool has it


def decode(
    names: Sequence[str], open_one: Callable[[int], Image.Image], size: int | None, workers: int | None = None
) -> Tensor:
    """uint8 [N, C, H, W] of the pictures that `open_one(0…N-1)` opens; `names` are for error messages.

    C is 1 if every picture is grey, else 3. With a `size` each is resized to size × size (bilinear,
    antialiased; the aspect ratio is not kept). Headers are read first, so that mixed sizes and what does not fit into
    memory are refused before anything is decoded, and pixels land in the final tensor: memory is that of the result
    and of the few pictures that are being decoded.
    """

    @contextmanager
    def opened(index: int) -> Iterator[Image.Image]:
        try:
            with open_one(index) as picture:
                yield picture
        except UserError:
            raise
        except (Exception, MemoryError) as error:
            raise UserError(
                f"{names[index]}: cannot be read as an image ({brief(error)}); replace it, or leave it out"
            ) from error

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
    result = len(names) * channels * height * width
    with ThreadPoolExecutor(workers_for(sizes, result, f"data.size = {size or max(height, width)}", workers)) as pool:
        pixels = np.empty((len(names), channels, height, width), np.uint8)
        list(pool.map(fill, everything))
    return torch.from_numpy(pixels)


def write_picture(picture: Image.Image, target: np.ndarray) -> None:
    """Into uint8 [C, H, W]: grey or RGB, resized if need be."""
    channels, height, width = target.shape
    if picture.format == "JPEG" and picture.width * picture.height > LARGE:
        picture.draft(None, (2 * width, 2 * height))
    if picture.mode.startswith("I"):
        # Pillow clips 16-bit greys at 255 when it converts; a medical picture would come out white.
        picture = Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
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
