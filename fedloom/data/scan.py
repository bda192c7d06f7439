"""Facts about each picture file of a folder, read in bounded memory: size, bit depth, orientation, a thumbnail."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock

import numpy as np
from PIL import ExifTags, Image

from fedloom.data.decode import COST, UPRIGHT, WORKING, is_deep, open_picture, orientation, reason, upright_size
from fedloom.data.near_duplicates import SIDE

WORKERS = 8
"""Maximum number of files that are decoded at once."""
CHUNK = 512
"""Number of files between two progress messages."""
DRAFT = 4 * SIDE
"""JPEG files are decoded at the smallest scale with at least this height and width, which is several times faster."""
FLOAT = -1
"""Bit depth of floating-point pixels."""


@dataclass(frozen=True)
class Scan:
    """Facts about picture files, in the order in which they were given."""

    sizes: np.ndarray
    """Width and height, upright: int32 [N, 2]; 0 for files that cannot be read."""
    depths: np.ndarray
    """Bits per channel, int8 [N]; `FLOAT` for floating-point pixels."""
    turned: np.ndarray
    """Whether EXIF data ask for the image to be turned or mirrored, bool [N]."""
    grey: np.ndarray
    """Whether the image is decoded as deep grey values rather than bytes, bool [N]."""
    thumbnails: np.ndarray
    """uint8 [N, 9, 9], upright and grey; 0 for files that cannot be read."""
    bad: dict[int, str] = field(default_factory=dict)
    """Reasons why files cannot be read, by position."""


def scan(paths: Sequence[Path], progress: Callable[[int], None] = lambda done: None) -> Scan:
    """Decode picture files one by one and keep about a hundred bytes of each.

    Args:
        paths: The files.
        progress: Called with the number of files read so far.
    """
    count = len(paths)
    found = Scan(
        np.zeros((count, 2), np.int32), np.zeros(count, np.int8), np.zeros(count, bool),
        np.zeros(count, bool), np.zeros((count, SIDE, SIDE), np.uint8),
    )  # fmt: skip
    one_large = Lock()

    def read(index: int) -> None:
        try:
            with open_picture(paths[index]) as picture:
                width, height = picture.size
                large = COST * width * height > WORKING // WORKERS
                size, depth, turned = upright_size(picture), bit_depth(picture), _is_turned(picture)
                found.grey[index] = is_deep(picture.mode)
                with one_large if large else nullcontext():
                    found.thumbnails[index] = thumbnail(picture)
                found.sizes[index], found.depths[index], found.turned[index] = size, depth, turned
        except (Exception, MemoryError) as error:
            found.bad[index] = reason(paths[index], error)

    positions = iter(range(count))
    with ThreadPoolExecutor(WORKERS) as pool:
        done = 0
        while chunk := list(islice(positions, CHUNK)):
            list(pool.map(read, chunk))
            progress(done := done + len(chunk))
    return found


def thumbnail(picture: Image.Image) -> np.ndarray:
    """Decode an image and return it upright as grey values, uint8 [9, 9]."""
    turn = orientation(picture)
    if picture.format == "JPEG":
        picture.draft("L", (DRAFT, DRAFT))
    if picture.mode.startswith("I") or picture.mode == "F":
        pixels = np.asarray(picture, np.float32)
        low, high = float(pixels.min()), float(pixels.max())
        picture = Image.fromarray(((pixels - low) * (255 / max(high - low, 1e-9))).astype(np.uint8))
    picture = picture.convert("L")
    if turn != 1:
        picture = picture.transpose(UPRIGHT[turn])
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def bit_depth(picture: Image.Image) -> int:
    """Return the bits per channel of an open image as stored in its file; `FLOAT` for floating-point pixels.

    The colours of palettes have 8 bits.
    """
    mode = picture.mode
    if mode == "F":
        return FLOAT
    if mode in ("P", "PA"):
        return 8
    if picture.format == "TIFF":
        bits = picture.tag_v2.get(ExifTags.Base.BitsPerSample, (1,))  # type: ignore[attr-defined]
        return int(max(bits) if isinstance(bits, tuple) else bits)
    if mode == "1":
        return 1
    tiles = getattr(picture, "tile", None)
    # Pillow reduces colours of 16 bits to 8; the stored form is in the tile, as `RGB;16B`.
    if picture.format == "PNG" and tiles and (stored := re.search(r";(\d+)", str(tiles[0][3]))):
        return int(stored[1])
    return 16 if mode.startswith("I") else 8


def _is_turned(picture: Image.Image) -> bool:
    if picture.format != "TIFF":
        return orientation(picture) != 1
    tags = picture.tag_v2  # type: ignore[attr-defined]
    return tags.get(ExifTags.Base.Orientation, 1) in UPRIGHT
