"""NumPy archives: any `.npz` file of images, and MNIST-M."""

import math
from pathlib import Path

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import decoding
from fedloom.core.task import Dataset
from fedloom.data import hub
from fedloom.data.arrays import Archive, Header
from fedloom.data.sources.source import Source

MOST_CLASSES = 1_000_000
"""Maximum number of classes. More indicate a mistake in the labels, such as identifiers instead of classes."""


def read_npz(path: Path) -> Dataset:
    """Read a dataset from an archive with the arrays x and y, or x_train, y_train, x_test and y_test.

    Images are uint8, [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels. A file with x and y has no official
    test set. Optional arrays are `groups` (or groups_train and groups_test; domains or clients as numbers or strings),
    `classes` and `group_names` (strings). Other arrays are not read. Peak memory is that of the dataset.

    Args:
        path: The `.npz` file.

    Returns:
        The dataset, named after the file.

    Raises:
        UserError: The file is damaged, or an array is missing or of a wrong type or shape.
    """
    with decoding(path, "a NumPy archive of plain arrays", "save it again with numpy.savez"), Archive(path) as archive:
        return _dataset(path, archive)


def _dataset(path: Path, archive: Archive) -> Dataset:
    parts = [""] if "x" in archive else ["_train", "_test"]
    if missing := [f"{k}{part}" for part in parts for k in "xy" if f"{k}{part}" not in archive]:
        names = ", ".join(name[:40] for name in archive.names[:20])
        raise UserError(
            f"{path}: has no '{missing[0]}' (it has: {names or 'nothing'}); "
            "it must have x and y, or x_train, y_train, x_test and y_test"
        )
    shapes = [_image_shape(path, f"x{part}", archive.header(f"x{part}")) for part in parts]
    if shapes[0][1:] != shapes[-1][1:]:
        raise UserError(f"{path}: images in x_train and x_test differ in shape")
    counts = [shape[0] for shape in shapes]
    y = np.concatenate([_labels(path, f"y{part}", archive, n) for part, n in zip(parts, counts, strict=True)])
    classes = _names(path, "classes", archive) or _numbered(path, y)
    groups, group_names = _groups(path, archive, parts, len(y))
    return Dataset(
        name=path.stem,
        images=torch.from_numpy(_images(path, archive, parts, shapes)),
        labels=torch.from_numpy(y),
        test=torch.from_numpy(np.arange(len(y)) >= (len(y) if len(parts) == 1 else counts[0])),
        classes=classes,
        groups=groups,
        group_names=group_names,
    )


def write_npz(path: Path, dataset: Dataset) -> None:
    """Write a dataset for `read_npz`, through a temporary file, so that no incomplete file is ever visible."""
    test = dataset.test.numpy()
    arrays = {"classes": np.array(dataset.classes)}
    fields = {"x": dataset.images, "y": dataset.labels, "groups": dataset.groups}
    for name, tensor in fields.items():
        if tensor is not None and test.any():
            arrays[f"{name}_train"], arrays[f"{name}_test"] = tensor.numpy()[~test], tensor.numpy()[test]
        elif tensor is not None:
            arrays[name] = tensor.numpy()
    if dataset.groups is not None:
        arrays["group_names"] = np.array(dataset.group_names)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial.replace(path)


class MnistM(Source):
    """MNIST-M in `mnist-m-subset/`: train.npz and test.npz with x and y."""

    name = "mnist-m"
    description = "MNIST-M: MNIST's digits over patches of colour photographs, 32×32 colour"
    classes = tuple("0123456789")
    layouts = (("mnist-m-subset/train.npz", "mnist-m-subset/test.npz"),)
    command = "pip install 'fedloom[hub]' (it is then downloaded from the Hugging Face hub)"
    remote = hub.Table("Mike0307/MNIST-M")

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the two archives."""
        return read_pair(self.name, folder / "mnist-m-subset", self.classes)


def read_pair(name: str, folder: Path, classes: tuple[str, ...]) -> Dataset:
    """Read a dataset from folder/train.npz and folder/test.npz, each with x and y."""
    train, test = read_npz(folder / "train.npz"), read_npz(folder / "test.npz")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise UserError(f"{folder}: images in train.npz and test.npz differ in shape")
    return Dataset(
        name=name,
        images=torch.cat([train.images, test.images]),
        labels=torch.cat([train.labels, test.labels]),
        test=torch.arange(len(train) + len(test)) >= len(train),
        classes=classes,
    )


Shape = tuple[int, int, int, int]
"""Number of images, channels, height, width."""


def _image_shape(path: Path, key: str, header: Header) -> Shape:
    shape = header.shape
    if header.dtype != np.uint8:
        raise UserError(f"{path}: {key} must be uint8 (0 to 255), not {header.dtype}; convert it before saving")
    if 0 in shape[1:]:
        raise UserError(f"{path}: {key} has shape {list(shape)}: images without pixels")
    if len(shape) == 3:
        return (shape[0], 1, *shape[1:])
    if len(shape) == 4 and shape[3] in (1, 3):
        return (shape[0], shape[3], *shape[1:3])
    if len(shape) == 4 and shape[1] in (1, 3):
        return shape
    raise UserError(f"{path}: {key} has shape {list(shape)}; expected [N, H, W], [N, H, W, C] or [N, C, H, W]")


def _images(path: Path, archive: Archive, parts: list[str], shapes: list[Shape]) -> np.ndarray:
    """Return the images of all parts in one array, each read directly into its place."""
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    refuse_without_room(math.prod(whole), f"{path}: x of shape {list(whole)}", "leave out images, or make them smaller")
    images = np.empty(whole, np.uint8)
    start = 0
    for part, shape in zip(parts, shapes, strict=True):
        target = images[start : start + shape[0]]
        stored = archive.header(f"x{part}").shape
        if len(stored) == 3:
            target = target[:, 0]
        elif stored != shape:
            target = target.transpose(0, 2, 3, 1)
        archive.read_into(f"x{part}", target)
        start += shape[0]
    return images


def _labels(path: Path, key: str, archive: Archive, count: int) -> np.ndarray:
    header = archive.header(key)
    if header.dtype.kind not in "iu" or header.count != count:
        raise UserError(
            f"{path}: {key} must be {count} whole numbers, one per image, not {header.dtype} {list(header.shape)}"
        )
    archive.refuse_without_room([key], copies=8)
    return archive.read(key).reshape(-1).astype(np.int64)


def _names(path: Path, key: str, archive: Archive) -> tuple[str, ...]:
    if key not in archive:
        return ()
    header = archive.header(key)
    if len(header.shape) != 1 or header.count > MOST_CLASSES:
        raise UserError(f"{path}: {key} must be a list of names, not an array of shape {list(header.shape)}")
    archive.refuse_without_room([key], copies=4)
    names = tuple(map(str, archive.read(key)))
    for name in names:
        name.encode()  # raises if the name has lone surrogates, which cannot be printed
    return names


def _numbered(path: Path, y: np.ndarray) -> tuple[str, ...]:
    largest = int(y.max(initial=-1))
    if largest >= MOST_CLASSES:
        raise UserError(f"{path}: label {largest} would make {largest + 1} classes; number labels from 0 without gaps")
    return tuple(map(str, range(largest + 1)))


def _groups(path: Path, archive: Archive, parts: list[str], count: int) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    keys = ["groups"] if "groups" in archive else [f"groups{part}" for part in parts]
    if not all(key in archive for key in keys):
        return None, ()
    if (found := sum(archive.header(key).count for key in keys)) != count:
        raise UserError(f"{path}: {found} groups for {count} images")
    archive.refuse_without_room(keys, copies=8)
    values = np.concatenate([archive.read(key).reshape(-1) for key in keys])
    if "group_names" in archive:
        if values.dtype.kind not in "iuf":
            raise UserError(f"{path}: {keys[0]} must be whole numbers if there are group_names, not {values.dtype}")
        return torch.from_numpy(values.astype(np.int64)), _names(path, "group_names", archive)
    names, inverse = np.unique(values, return_inverse=True)
    return torch.from_numpy(inverse.astype(np.int64)), tuple(map(str, names))
