"""NumPy archives: any `.npz` of images, and MNIST-M."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.task import Dataset
from fedloom.data import hub
from fedloom.data.sources.source import Source

MOST_CLASSES = 1_000_000
"""More than that is a mistake in the labels, such as identifiers in their place."""


def read_npz(path: Path) -> Dataset:
    """A dataset out of x, y (all training data) or x_train, y_train, x_test, y_test.

    Images are uint8, [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels. There may be `groups`
    (or groups_train and groups_test; domains or clients as numbers or texts), and `classes` and
    `group_names` as arrays of texts.
    """
    arrays = _arrays(path)
    parts = [""] if "x" in arrays else ["_train", "_test"]
    if missing := [f"{k}{part}" for part in parts for k in "xy" if f"{k}{part}" not in arrays]:
        raise UserError(
            f"{path}: has no '{missing[0]}' (it has: {', '.join(sorted(arrays)) or 'nothing'}); "
            "expected are x and y, or x_train, y_train, x_test and y_test"
        )
    images = [_images(path, f"x{part}", arrays[f"x{part}"]) for part in parts]
    if images[0].shape[1:] != images[-1].shape[1:]:
        raise UserError(f"{path}: x_train and x_test differ in the shape of an image")
    labels = [_labels(path, f"y{part}", arrays[f"y{part}"], len(x)) for part, x in zip(parts, images, strict=True)]
    y = np.concatenate(labels)
    classes = _names(path, "classes", arrays) or _numbered(path, y)
    groups, group_names = _groups(path, arrays, parts, len(y))
    return Dataset(
        name=path.stem,
        images=torch.from_numpy(np.concatenate(images)),
        labels=torch.from_numpy(y),
        test=torch.from_numpy(np.arange(len(y)) >= (len(y) if len(parts) == 1 else len(labels[0]))),
        classes=classes,
        groups=groups,
        group_names=group_names,
    )


def write_npz(path: Path, dataset: Dataset) -> None:
    """Writes what `read_npz` reads back, by way of a temporary file, so that nobody meets half of it."""
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
    """`mnist-m-subset/`: train.npz and test.npz with x and y."""

    name = "mnist-m"
    description = "MNIST-M: MNIST's digits over patches of colour photographs, 32×32 colour"
    classes = tuple("0123456789")
    layouts = (("mnist-m-subset/train.npz", "mnist-m-subset/test.npz"),)
    command = "pip install 'fedloom[hub]' (it is then fetched from the Hugging Face hub)"
    remote = hub.Table("Mike0307/MNIST-M")

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Reads the two archives."""
        return read_pair(self.name, folder / "mnist-m-subset", self.classes)


def read_pair(name: str, folder: Path, classes: tuple[str, ...]) -> Dataset:
    """A dataset kept as folder/train.npz and folder/test.npz, each with x and y."""
    train, test = read_npz(folder / "train.npz"), read_npz(folder / "test.npz")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise UserError(f"{folder}: train.npz and test.npz differ in the shape of an image")
    return Dataset(
        name=name,
        images=torch.cat([train.images, test.images]),
        labels=torch.cat([train.labels, test.labels]),
        test=torch.arange(len(train) + len(test)) >= len(train),
        classes=classes,
    )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as a NumPy archive of plain arrays ({error})") from error


def _images(path: Path, key: str, x: np.ndarray) -> np.ndarray:
    if x.dtype != np.uint8:
        raise UserError(f"{path}: {key} must be uint8 (0 to 255), not {x.dtype}; convert it before saving")
    if 0 in x.shape[1:]:
        raise UserError(f"{path}: {key} has shape {list(x.shape)}: images without a pixel")
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim == 4 and x.shape[1] in (1, 3):
        return x
    raise UserError(f"{path}: {key} has shape {list(x.shape)}; expected [N, H, W], [N, H, W, C] or [N, C, H, W]")


def _labels(path: Path, key: str, y: np.ndarray, count: int) -> np.ndarray:
    if y.dtype.kind not in "iu" or y.size != count:
        raise UserError(f"{path}: {key} must be {count} whole numbers, one per image, not {y.dtype} {list(y.shape)}")
    return y.reshape(-1).astype(np.int64)


def _names(path: Path, key: str, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    if key in arrays and arrays[key].ndim != 1:
        raise UserError(f"{path}: {key} must be a list of names, not an array of shape {list(arrays[key].shape)}")
    return tuple(map(str, arrays[key])) if key in arrays else ()


def _numbered(path: Path, y: np.ndarray) -> tuple[str, ...]:
    largest = int(y.max(initial=-1))
    if largest >= MOST_CLASSES:
        raise UserError(f"{path}: label {largest} makes {largest + 1} classes; number labels from 0 without gaps")
    return tuple(map(str, range(largest + 1)))


def _groups(
    path: Path, arrays: dict[str, np.ndarray], parts: list[str], count: int
) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    keys = ["groups"] if "groups" in arrays else [f"groups{part}" for part in parts]
    if not all(key in arrays for key in keys):
        return None, ()
    values = np.concatenate([arrays[key].reshape(-1) for key in keys])
    if len(values) != count:
        raise UserError(f"{path}: {len(values)} groups for {count} images")
    if "group_names" in arrays:
        return torch.from_numpy(values.astype(np.int64)), _names(path, "group_names", arrays)
    names, inverse = np.unique(values, return_inverse=True)
    return torch.from_numpy(inverse.astype(np.int64)), tuple(map(str, names))
