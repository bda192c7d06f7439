"""Reading of a user's picture files into the image format of a model."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.data.decode import open_picture, reason, workers_for, write_picture
from fedloom.data.sources.tree import PICTURES, class_names, one_form, pictures_in


@dataclass(frozen=True)
class Pictures:
    """Pictures that could be read, and the reasons why others were skipped."""

    paths: list[Path]
    """Files that could be read, in the order of `images`."""
    images: Tensor
    """uint8 [N, C, H, W]"""
    skipped: dict[str, str]
    """Reasons why files were skipped, by path."""


def read_pictures(paths: Sequence[Path], shape: tuple[int, int, int]) -> Pictures:
    """Decode and resize picture files in the same way as training images; skip files that cannot be read.

    Args:
        paths: Picture files.
        shape: Channels, height and width of the model's images.

    Raises:
        UserError: Picture files cannot have this number of channels.
    """
    if shape[0] not in (1, 3):
        raise UserError(f"the model takes images with {shape[0]} channels: picture files have 1 (grey) or 3 (colour)")
    sizes: list[tuple[int, int]] = []
    problems: list[str | None] = []
    for path in paths:
        try:
            with open_picture(path) as picture:
                sizes.append(picture.size)
            problems.append(None)
        except (Exception, MemoryError) as error:
            problems.append(reason(path, error))
    readable = [index for index, problem in enumerate(problems) if problem is None]
    result = len(paths) * math.prod(shape)
    workers = workers_for(sizes, result, f"{len(paths)} pictures (give fewer at a time)")
    pixels = np.empty((len(paths), *shape), np.uint8)

    def fill(index: int) -> None:
        try:
            with open_picture(paths[index]) as picture:
                write_picture(picture, pixels[index])
        except (Exception, MemoryError) as error:
            problems[index] = reason(paths[index], error)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(fill, readable))
    good = [index for index, problem in enumerate(problems) if problem is None]
    skipped = {str(path): problem for path, problem in zip(paths, problems, strict=True) if problem is not None}
    return Pictures([paths[index] for index in good], torch.from_numpy(pixels[good]), skipped)


def find_pictures(places: Iterable[Path]) -> list[Path]:
    """List the given files and all pictures inside the given folders, without duplicates.

    Raises:
        UserError: A path does not exist, or a folder has no pictures.
    """
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = [place.joinpath(*parts) for parts in pictures_in(place)]
            if not inside:
                raise UserError(f"'{place}': the folder has no pictures ({', '.join(sorted(PICTURES))})")
            found += inside
        elif place.exists():
            found.append(place)
        else:
            raise UserError(f"'{place}': no such file or folder")
    return list(dict.fromkeys(found))


def labelled_pictures(root: Path, shape: tuple[int, int, int]) -> tuple[Pictures, np.ndarray, tuple[str, ...]]:
    """Read the pictures in a folder that has one subfolder per class.

    Args:
        root: The folder.
        shape: Channels, height and width of the model's images.

    Returns:
        The pictures, their labels, and the class names.

    Raises:
        UserError: The folder does not exist or does not have this structure, or no picture can be read.
    """
    if not root.is_dir():
        raise UserError(f"--images {root}: no such folder; name a folder with one subfolder of pictures per class")
    files = pictures_in(root)
    wrong = next((file for file in files if len(file) != 2), None)
    if wrong or not files:
        found = f"found '{'/'.join(wrong)}'" if wrong else "found no pictures"
        raise UserError(f"--images {root}: expected one subfolder of pictures per class, but {found}")
    pictures = read_pictures([root.joinpath(*file) for file in files], shape)
    if not pictures.paths:
        raise UserError(f"--images {root}: none of its {len(files)} pictures can be read")
    names = [one_form(path.parent.name) for path in pictures.paths]
    classes = class_names(names, f"--images {root}")
    return pictures, np.array([classes.index(name) for name in names]), classes
