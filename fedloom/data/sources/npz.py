"""NumPy archives: any `.npz` file of inputs and labels, and MNIST-M."""

import math
from pathlib import Path

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import decoding
from fedloom.data import hub
from fedloom.data.arrays import Archive, Header
from fedloom.data.coding import coded
from fedloom.data.sources.source import Source

MOST_CLASSES = 1_000_000
"""Maximum number of classes. More indicate a mistake in the labels, such as identifiers instead of classes."""


def read_npz(path: Path, classes: tuple[str, ...] = ()) -> Dataset:
    """Read a dataset from an archive with the arrays x and y, or x_train, y_train, x_test and y_test.

    uint8 and uint16 arrays with three or four dimensions are images: [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or
    3 channels. All other numbers keep their shape [N, …]. uint8 images stay bytes, everything else becomes float32. The
    distinct labels (whole numbers or strings), sorted, are the classes. A file with x and y has no official test set.
    Optional arrays are `groups` or `clients` (or groups_train and groups_test …; domains or clients as numbers or
    strings), `classes` (then y are positions in it) and `group_names`. Other arrays are not read. Peak memory is that
    of the dataset.

    Args:
        path: The `.npz` file.
        classes: Names of the labels 0, 1, …, if they are known and not in the file.

    Returns:
        The dataset, named after the file.

    Raises:
        UserError: The file is damaged, or an array is missing or of a wrong type or shape.
    """
    with decoding(path, "a NumPy archive of plain arrays", "save it again with numpy.savez"), Archive(path) as archive:
        return _dataset(path, archive, classes)


def _dataset(path: Path, archive: Archive, classes: tuple[str, ...]) -> Dataset:
    parts = [""] if "x" in archive else ["_train", "_test"]
    if missing := [f"{k}{part}" for part in parts for k in "xy" if f"{k}{part}" not in archive]:
        names = ", ".join(name[:40] for name in archive.names[:20])
        raise UserError(
            f"{path}: has no '{missing[0]}' (it has: {names or 'nothing'}); "
            "it must have x and y, or x_train, y_train, x_test and y_test"
        )
    headers = [archive.header(f"x{part}") for part in parts]
    shapes = [_shape(path, f"x{part}", header) for part, header in zip(parts, headers, strict=True)]
    if shapes[0][1:] != shapes[-1][1:]:
        raise UserError(f"{path}: samples in x_train and x_test differ in shape")
    if headers[0].dtype != headers[-1].dtype:
        raise UserError(f"{path}: x_train is {headers[0].dtype}, but x_test is {headers[-1].dtype}; save one type")
    counts = [shape[0] for shape in shapes]
    each = [_labels(path, f"y{part}", archive, n) for part, n in zip(parts, counts, strict=True)]
    if each[0].shape[1:] != each[-1].shape[1:]:
        raise UserError(f"{path}: labels in y_train and y_test differ in shape")
    y = np.concatenate(each)
    labels, classes = _classes(path, y, _names(path, "classes", archive) or classes)
    groups, group_names = _groups(path, archive, parts, len(y))
    bytes_ = headers[0].dtype == np.uint8 and len(headers[0].shape) in (3, 4)
    return Dataset(
        name=path.stem,
        inputs=torch.from_numpy(_inputs(path, archive, parts, shapes, np.uint8 if bytes_ else np.float32)),
        labels=labels,
        test=torch.from_numpy(np.arange(len(y)) >= (len(y) if len(parts) == 1 else counts[0])),
        classes=classes,
        groups=groups,
        group_names=group_names,
    )


def write_npz(path: Path, dataset: Dataset) -> None:
    """Write a dataset for `read_npz`, through a temporary file, so that no incomplete file is ever visible."""
    test = dataset.test.numpy()
    arrays = {"classes": np.array(dataset.classes)}
    fields = {"x": dataset.inputs, "y": dataset.labels, "groups": dataset.groups}
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
    train, test = read_npz(folder / "train.npz", classes), read_npz(folder / "test.npz", classes)
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise UserError(f"{folder}: images in train.npz and test.npz differ in shape")
    return Dataset(
        name=name,
        inputs=torch.cat([train.inputs, test.inputs]),
        labels=torch.cat([train.labels, test.labels]),
        test=torch.arange(len(train) + len(test)) >= len(train),
        classes=classes,
    )


def _shape(path: Path, key: str, header: Header) -> tuple[int, ...]:
    """Return the shape that inputs get: number of samples, then channels, height and width of images."""
    shape = header.shape
    if header.dtype.kind not in "biuf":
        raise UserError(f"{path}: {key} must be numbers, not {header.dtype}; convert it before saving")
    if 0 in shape[1:]:
        raise UserError(f"{path}: {key} has shape {list(shape)}: samples without values")
    if len(shape) < 2:
        raise UserError(f"{path}: {key} has shape {list(shape)}; expected [N, …]")
    if header.dtype not in (np.uint8, np.uint16) or len(shape) not in (3, 4):
        return shape
    if len(shape) == 3:
        return (shape[0], 1, *shape[1:])
    if shape[3] in (1, 3):
        return (shape[0], shape[3], *shape[1:3])
    if shape[1] in (1, 3):
        return shape
    raise UserError(
        f"{path}: {key} has shape {list(shape)}; images must be [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 "
        "channels; save other inputs as float32"
    )


def _inputs(
    path: Path, archive: Archive, parts: list[str], shapes: list[tuple[int, ...]], kind: type[np.generic]
) -> np.ndarray:
    """Return the inputs of all parts in one array, each read directly into its place."""
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    size = math.prod(whole) * np.dtype(kind).itemsize
    refuse_without_room(size, f"{path}: x of shape {list(whole)}", "leave out samples, or make them smaller")
    inputs = np.empty(whole, kind)
    start = 0
    for part, shape in zip(parts, shapes, strict=True):
        target = inputs[start : start + shape[0]]
        stored = archive.header(f"x{part}").shape
        if len(stored) < len(shape):
            target = target[:, 0]
        elif stored != shape:
            target = target.transpose(0, 2, 3, 1)
        with np.errstate(over="ignore", invalid="ignore"):  # `Dataset` refuses the infinities that this makes
            archive.read_into(f"x{part}", target)
        start += shape[0]
    return inputs


def _labels(path: Path, key: str, archive: Archive, count: int) -> np.ndarray:
    header = archive.header(key)
    several = len(header.shape) == 2 and header.shape[0] == count and 1 < header.shape[1] <= MOST_CLASSES
    if header.dtype.kind not in "biufUS" or not (several or header.count == count):
        raise UserError(
            f"{path}: {key} must be {count} labels, one per sample (whole numbers or strings), or 0 and 1 of shape "
            f"[{count}, labels], not {header.dtype} {list(header.shape)}"
        )
    archive.refuse_without_room([key], copies=8)
    if several:
        y = archive.read(key)
        if header.dtype.kind not in "biu" or y.min(initial=0) < 0 or y.max(initial=0) > 1:
            raise UserError(f"{path}: {key} of shape {list(header.shape)} must contain only 0 and 1")
        return y.astype(np.uint8)
    labels = archive.read(key).reshape(-1)
    return labels.astype(str) if header.dtype.kind == "S" else labels


def _classes(path: Path, y: np.ndarray, classes: tuple[str, ...]) -> tuple[torch.Tensor, tuple[str, ...]]:
    if y.ndim == 2:
        return torch.from_numpy(y), classes or tuple(map(str, range(y.shape[1])))
    if classes and y.dtype.kind in "biu":
        return torch.from_numpy(y.astype(np.int64)), classes
    labels, found = coded(path.stem, "labels", y, len(y), classes or None)
    for name in found:
        name.encode()  # raises if the name has lone surrogates, which cannot be printed
    return labels, found


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


def _groups(path: Path, archive: Archive, parts: list[str], count: int) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    options = [[f"{name}{part}" for part in given] for name in ("groups", "clients") for given in ([""], parts)]
    keys = next((keys for keys in options if all(key in archive for key in keys)), None)
    if keys is None:
        return None, ()
    if (found := sum(archive.header(key).count for key in keys)) != count:
        raise UserError(f"{path}: {found} groups for {count} samples")
    archive.refuse_without_room(keys, copies=8)
    values = np.concatenate([archive.read(key).reshape(-1) for key in keys])
    if "group_names" in archive:
        if values.dtype.kind not in "iuf":
            raise UserError(f"{path}: {keys[0]} must be whole numbers if there are group_names, not {values.dtype}")
        return torch.from_numpy(values.astype(np.int64)), _names(path, "group_names", archive)
    distinct, inverse = np.unique(values.astype(str) if values.dtype.kind == "S" else values, return_inverse=True)
    return torch.from_numpy(inverse.astype(np.int64)), tuple(map(str, distinct))
