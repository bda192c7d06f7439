"""Decoding of image files of any size, mode and format into one tensor: bytes, or floats for deeper grey values."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Literal, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from fedloom.core.errors import UserError, brief
from fedloom.core.limits import refuse_without_room

T = TypeVar("T")
OnBad = Literal["stop", "skip"]
GREY = {"1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Allowed formats. Pillow supports more, but runs Ghostscript for some of them."""
PIXELS = 2**26
"""Maximum number of pixels of an image: 8,192 × 8,192."""
WORKING = 2**29
"""Memory for images that are being decoded, in bytes, unless a single image takes more."""
LARGE = 2**24
"""JPEGs with more pixels are decoded at the smallest scale with at least twice the wanted height and width."""
COST = 16
"""Maximum memory per pixel while an image is decoded and converted, in bytes."""

LARGEST = 1e30
"""Maximum of a float pixel's absolute value."""
NAMED = 20
"""Maximum number of files that are named in one message."""
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that an EXIF orientation asks for; from 5 on, width and height are swapped."""

# Pillow warns of large images, which `open_picture` rejects.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", "Corrupt EXIF data", UserWarning)  # `orientation` ignores such data


class SizesDifferError(UserError):
    """Images of several sizes where no common size was asked for."""


def open_picture(source: str | Path | IO[bytes]) -> Image.Image:
    """Open an image, reading only its header.

    Raises:
        ValueError: The image has more than `PIXELS` pixels.
        Exception: The file is not an image of an allowed format; Pillow raises many kinds of exceptions.
    """
    picture = Image.open(source, formats=FORMATS)
    width, height = picture.size
    if width * height > PIXELS:
        picture.close()
        raise ValueError(f"the image has {width}×{height} pixels, at most {PIXELS:,} are allowed; make it smaller")
    if picture.format == "TIFF":
        # Without a name Pillow does not map the file into memory, which garbles uncompressed images on their side.
        picture.filename = ""
    return picture


def orientation(picture: Image.Image) -> int:
    """Return the EXIF orientation that is still to be applied to an open image: 2 to 8, or 1 if there is none.

    Reads only the header. Damaged EXIF data count as none. In a PNG file, EXIF data after the pixels are not found.
    """
    if picture.format == "TIFF":
        return 1  # Pillow applies it while it decodes
    try:
        # Not `picture.getexif`: for PNG files it decodes the image.
        value = Image.Image.getexif(picture).get(ExifTags.Base.Orientation)
        return value if value in UPRIGHT else 1
    except Exception:
        return 1


def upright_size(picture: Image.Image) -> tuple[int, int]:
    """Return the width and height of an open image after its EXIF orientation is applied."""
    width, height = picture.size
    return (height, width) if orientation(picture) > 4 else (width, height)


def workers_for(sizes: Sequence[tuple[int, int]], result: int, what: str, workers: int | None = None) -> int | None:
    """Return the number of threads such that images being decoded take at most `WORKING` bytes (at least one thread).

    Raises:
        UserError: The result and the largest image do not fit into memory.
    """
    largest = COST * max((width * height for width, height in sizes), default=0)
    refuse_without_room(result + largest, what)
    most = max(1, WORKING // max(1, largest))
    # ThreadPoolExecutor takes about this number of threads by default.
    return most if workers is None and most < (os.cpu_count() or 1) + 4 else workers


@dataclass(frozen=True)
class Decoded:
    """Decoded images, and the files that were left out."""

    images: Tensor
    """uint8 [M, C, H, W], C is 1 if every image is grey, otherwise 3; or float32 [M, 1, H, W] for deep grey values."""
    kept: list[int]
    """Index of each image among the names that were given, ascending."""
    bad: dict[str, str]
    """Names of files that were left out, with the reason."""
    note: str = ""
    """How deep grey values were scaled; empty for images of bytes."""


def decode(
    names: Sequence[str],
    open_one: Callable[[int], Image.Image],
    size: int | None,
    workers: int | None = None,
    *,
    on_bad: OnBad = "stop",
    hint: str = "",
) -> Decoded:
    """Decode images into one tensor.

    Headers are read first, so that images of mixed sizes, or too large for memory, are rejected before any image is
    decoded. Pixels are written directly into the result: peak memory is that of the result and of the images being
    decoded.

    Grey values of 16 bits and more (and of floats) keep their depth: they become floats, scaled from the range found in
    all images to [0, 1]. Colours of 16 bits are reduced to 8 bits by Pillow.

    Args:
        names: Names of the N images, for error messages.
        open_one: Opens the image of an index, 0 to N − 1.
        size: Height and width to which images are resized (bilinear, antialiased, without keeping the aspect ratio).
        workers: Number of threads; by default chosen by the size of the images.
        on_bad: What to do about images that cannot be read: `stop` raises an error that names all of them, `skip`
            leaves them out.
        hint: End of the error message about images that cannot be read.

    Returns:
        The images, and which of them were left out.

    Raises:
        UserError: An image cannot be read (with `skip`: none can be read), sizes differ and `size` is not given, deep
            images are mixed with others, or memory does not suffice.
    """
    bad: dict[int, BaseException] = {}

    def attempt(index: int, work: Callable[[Image.Image], T]) -> T | None:
        try:
            with open_one(index) as picture:
                return work(picture)
        except UserError:
            raise
        except (Exception, MemoryError) as error:
            bad[index] = error
            return None

    with ThreadPoolExecutor(workers) as pool:
        heads = list(pool.map(lambda index: attempt(index, _head), range(len(names))))
    readable = [index for index in range(len(names)) if index not in bad]
    modes, sizes = [head[0] for head in heads if head], [head[1] for head in heads if head]
    if not readable or (bad and on_bad == "stop" and not size and len(set(sizes)) > 1):
        raise _refusal(names, bad, hint)
    width, height = (size, size) if size else _common_size([names[index] for index in readable], sizes)
    deep = _all_deep([names[index] for index in readable], modes)
    channels = 1 if GREY.issuperset(modes) else 3
    kind, write = (np.float32, write_deep) if deep else (np.uint8, write_picture)
    result = len(names) * channels * height * width * np.dtype(kind).itemsize
    with ThreadPoolExecutor(workers_for(sizes, result, f"data.size = {size or max(height, width)}", workers)) as pool:
        pixels = np.empty((len(names), channels, height, width), kind)
        list(pool.map(lambda index: attempt(index, partial(write, target=pixels[index])), readable))
    kept = [index for index in readable if index not in bad]
    if bad and (on_bad == "stop" or not kept):
        raise _refusal(names, bad, hint)
    for place, index in enumerate(kept if bad else ()):
        pixels[place] = pixels[index]  # in place, since a copy would take as much memory again
    reasons = {names[index]: reason(names[index], bad[index]) for index in sorted(bad)}
    pixels = pixels[: len(kept)]
    note = _scale(pixels) if deep else ""
    return Decoded(torch.from_numpy(pixels), kept, reasons, note)


def _head(picture: Image.Image) -> tuple[str, tuple[int, int]]:
    return picture.mode, upright_size(picture)


def is_deep(mode: str) -> bool:
    """Return whether images of a mode have grey values of more than 8 bits, which are decoded as floats."""
    return mode.startswith("I") or mode == "F"


def _all_deep(names: Sequence[str], modes: Sequence[str]) -> bool:
    """Return whether all images have grey values of more than 8 bits.

    Raises:
        UserError: Some have and some have not.
    """
    deep = [is_deep(mode) for mode in modes]
    if all(deep) or not any(deep):
        return all(deep)
    raise UserError(
        f"the images differ in depth: {names[deep.index(True)]} has grey values of more than 8 bits, "
        f"{names[deep.index(False)]} has 8 bits ({sum(deep):,} and {len(deep) - sum(deep):,} files); save all of them "
        "with the same depth"
    )


def write_deep(picture: Image.Image, target: np.ndarray) -> None:
    """Write an image of deep grey values into float32 [1, H, W], unscaled: upright and resized.

    Raises:
        ValueError: Values are not finite, or too large for further arithmetic.
    """
    turn = orientation(picture)
    values = np.asarray(picture, np.float32)
    if not (np.abs(values) < LARGEST).all():
        raise ValueError(f"has values that are NaN, infinite or above {LARGEST:g}")
    picture = Image.fromarray(values)
    if turn != 1:
        picture = picture.transpose(UPRIGHT[turn])
    if picture.size != target.shape[:0:-1]:
        picture = picture.resize(target.shape[:0:-1], Image.Resampling.BILINEAR)
    target[0] = np.asarray(picture)


def _scale(pixels: np.ndarray) -> str:
    """Scale values in place from their range to [0, 1]; return a note that says so."""
    low, high = float(pixels.min()), float(pixels.max())
    pixels -= low
    pixels /= max(high - low, 1e-30)
    return f"grey values of more than 8 bits, {low:g} to {high:g} in all images, were scaled to 0 to 1"


def listed(reasons: Mapping[str, str], between: str = ", ") -> str:
    """Name the first `NAMED` files that cannot be read, with the reasons, and the number of the others."""
    files = [f"{name} ({why})" for name, why in islice(reasons.items(), NAMED)]
    return between.join(files) + (f"{between}and {len(reasons) - NAMED:,} more" if len(reasons) > NAMED else "")


def reason(name: object, error: BaseException) -> str:
    """Return why a file cannot be read, without its name."""
    return brief(error).replace(f" {str(name)!r}", "").replace(f" '{name}'", "")


def _refusal(names: Sequence[str], bad: Mapping[int, BaseException], hint: str) -> UserError:
    """Return the error that names all files that cannot be read."""
    reasons = {names[index]: reason(names[index], bad[index]) for index in sorted(bad)}
    if len(reasons) == 1:
        ((name, why),) = reasons.items()
        return UserError(f"{name}: cannot be read as an image ({why}); replace or remove it{hint}")
    return UserError(
        f"{len(reasons):,} of {len(names):,} files cannot be read as images; replace or remove them{hint}:\n"
        + listed(reasons, "\n")
    )


def write_picture(picture: Image.Image, target: np.ndarray) -> None:
    """Write an image into uint8 [C, H, W]: turned as its EXIF orientation says, converted to grey or RGB, resized."""
    channels, height, width = target.shape
    turn = orientation(picture)
    if picture.format == "JPEG" and picture.width * picture.height > LARGE:
        picture.draft(None, (2 * height, 2 * width) if turn > 4 else (2 * width, 2 * height))
    if picture.mode.startswith("I"):
        # For models of 8-bit images: Pillow's own conversion clips values at 255, which makes medical images white.
        picture = Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
    picture = picture.convert("L" if channels == 1 else "RGB")
    if turn != 1:
        picture = picture.transpose(UPRIGHT[turn])
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(picture)
    target[:] = array[None] if channels == 1 else array.transpose(2, 0, 1)


def _common_size(names: Sequence[str], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    for name, size in zip(names, sizes, strict=True):
        if size != sizes[0]:
            raise SizesDifferError(
                f"the images differ in size: {names[0]} is {sizes[0][0]}×{sizes[0][1]}, "
                f"{name} is {size[0]}×{size[1]}; set data.size (for example 64) to resize them"
            )
    return sizes[0]
