"""Where datasets come from: original files in a data folder, one's own files, or the Hugging Face hub."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction
from pathlib import Path

from fedloom.core.data_files import cached_download, data_folder
from fedloom.core.errors import UserError, nearest
from fedloom.core.registry import file_of, import_all, place_of
from fedloom.core.task import Dataset
from fedloom.data import hub
from fedloom.data.dataset import combine, resize
from fedloom.data.sources import npz, tree
from fedloom.data.sources.source import SOURCES, Source

__all__ = ["SOURCES", "Source", "data_folder", "load", "parts"]

import_all(__name__)


def parts(name: str) -> list[str]:
    """The datasets that a name joins as styles, one for most."""
    whole = Path(name).exists() or ((file := file_of(name)) is not None and file.is_file())
    return [name] if whole else name.split("+")


def load(name: str, *, folder: Path | str | None = None, size: int | None = None) -> Dataset:
    """A dataset by name, several joined as styles (`mnist+usps+svhn`), an image folder or an `.npz` file.

    A path may be relative to where one is or to the data folder. With a `size`, images come as size × size.
    """
    if size is not None and size < 1:
        raise UserError(f"data.size: {size} is not a number of pixels")
    root = data_folder(folder)
    if isinstance(source := SOURCES.get(name), Source):
        dataset = _load_source(source, root, size)
    elif (path := _own_files(name, root)) is not None:
        dataset = tree.read_tree(path, size) if path.is_dir() else _read_file(path)
    elif len(parts(name)) == 1 and isfunction(make := SOURCES.look_up(name)):
        dataset = _made(name, make)
    elif "+" in name:
        return combine([load(part, folder=root, size=size) for part in name.split("+")], size)
    elif "/" in name or "\\" in name or name.endswith(".npz"):
        raise UserError(f"dataset '{name}': there is no such folder or file, here or in the data folder {root}")
    else:
        raise UserError(
            f"unknown dataset '{name}': {nearest(name, SOURCES.names())}, or a path to images "
            "or an .npz file, or a function of yours: path/to/file.py:name"
        )
    return replace(dataset, images=resize(dataset.images, size)) if size else dataset


def _load_source(source: Source, root: Path, size: int | None) -> Dataset:
    if (place := source.where(root)) is not None:
        return source.read(place, size)
    if source.remote is None:
        raise source.missing(root)
    # What the hub gave once is kept in the data folder: decoding it again takes longer than reading this.
    kept = cached_download(source.name, root, size)
    if kept.exists():
        return replace(npz.read_npz(kept), name=source.name)
    if not hub.installed():
        raise source.missing(root, "with fedloom[hub] installed it is fetched from the Hugging Face hub")
    try:
        if isinstance(source.remote, hub.Files):
            hub.download(source.remote, root)
            return source.read(root, size)
        dataset = hub.fetch(source.remote, source.name, source.classes, size)
    except hub.UnreachableError as error:
        raise source.missing(root, str(error)) from error
    with contextlib.suppress(OSError):  # a data folder that cannot be written to is no reason to fail
        npz.write_npz(kept, dataset)
    return dataset


def _made(name: str, make: Callable[[], Dataset]) -> Dataset:
    """What a function of the user's makes."""
    try:
        dataset = make()
    except UserError:
        raise
    except Exception as error:
        where = place_of(error, Path(make.__code__.co_filename))
        raise UserError(f"dataset '{name}': {make.__name__}() failed, {where}") from error
    if not isinstance(dataset, Dataset):
        raise UserError(f"dataset '{name}': {make.__name__}() returned a {type(dataset).__name__}, no Dataset")
    return dataset


def _own_files(name: str, root: Path) -> Path | None:
    for path in (Path(name).expanduser(), root / name):
        if path.exists():
            return path
    return None


def _read_file(path: Path) -> Dataset:
    if path.suffix != ".npz":
        raise UserError(f"dataset '{path}': a file must be an .npz; images go in a folder with a folder per class")
    return npz.read_npz(path)
