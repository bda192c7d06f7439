"""Sources of datasets: original files in a data folder, the user's own files, or the Hugging Face hub.

To add a dataset, write a function without arguments that returns a `Dataset` and name it in a recipe as
`path/to/file.py:function`, or register it with `SOURCES.add(name, function)`. A dataset with files to look for and a
download command is a subclass of `Source`, which registers itself.

Example:
    def noise() -> Dataset:  # data.name: mine.py:noise
        images = torch.randint(256, (100, 1, 8, 8), dtype=torch.uint8)
        labels, test = torch.arange(100) % 2, torch.zeros(100, dtype=torch.bool)
        return Dataset("noise", images, labels, test, classes=("a", "b"))
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction
from pathlib import Path

from fedloom.core.data_files import cached_download, data_folder
from fedloom.core.dataset import Dataset
from fedloom.core.errors import MissingDataError, UserError, nearest
from fedloom.core.registry import file_of, import_all, place_of, refuse_object
from fedloom.data import hub
from fedloom.data.dataset import combine, resize
from fedloom.data.sources import npz, recordings, table, tree
from fedloom.data.sources.source import SOURCES, ReadOptions, Source

__all__ = ["SOURCES", "ReadOptions", "Source", "data_folder", "load", "missing", "parts"]

FILES = (".npz", *table.TABLES)
"""Endings of files that are a dataset."""
DEFAULT = ReadOptions()

import_all(__name__)


def parts(name: str) -> list[str]:
    """Return the names of the datasets that a name joins as styles: `mnist+usps` → [`mnist`, `usps`]."""
    whole = Path(name).exists() or ((file := file_of(name)) is not None and file.is_file())
    return [name] if whole else name.split("+")


def load(name: str, *, folder: Path | str | None = None, options: ReadOptions = DEFAULT) -> Dataset:
    """Load a dataset by a name that may come from an untrusted recipe.

    As `fedloom.data.load`, except that a Python file in the name is imported only if the user has already consented to
    it.

    Args:
        name: A dataset, several joined as styles (`mnist+usps+svhn`), a folder of images, recordings or tables, an
            `.npz`, `.csv` or `.parquet` file or `path/to/file.py:function`. Paths may be relative to the current folder
            or to the data folder.
        folder: The data folder; by default `$FEDLOOM_DATA`, then the user's cache.
        options: How files are read.

    Returns:
        The dataset.

    Raises:
        UserError: The dataset is unknown, its files are missing or damaged, or it does not fit into memory.
    """
    size = options.size
    if size is not None and size < 1:
        raise UserError(f"data.size: {size} must be at least 1")
    root = data_folder(folder)
    if isinstance(source := SOURCES.get(name), Source):
        dataset = _load_source(source, root, options)
    elif (path := _own_files(name, root)) is not None:
        dataset = _read_own(path, options)
    elif len(parts(name)) == 1 and isfunction(make := SOURCES.look_up(name)):
        options.refuse_others(name, "the inputs that a function makes", ("size",))
        dataset = _made(name, make)
    elif "+" in name:
        return combine([load(part, folder=root, options=options) for part in name.split("+")], size)
    elif "/" in name or "\\" in name or Path(name).suffix.lower() in FILES:
        raise UserError(
            f"dataset '{name}': no such folder or file, neither in the current folder nor in the data folder {root}"
        )
    else:
        refuse_object("data.name", name)
        raise UserError(
            f"unknown dataset '{name}': {nearest(name, SOURCES.names())}, or a path to images, recordings, tables "
            "or an .npz file, or a function of yours: path/to/file.py:name"
        )
    return replace(dataset, inputs=resize(dataset.inputs, size)) if size else dataset


def missing(name: str, folder: Path | str | None = None, size: int | None = None) -> MissingDataError | None:
    """Return the error that loading a shipped dataset would raise because its files are missing, or None.

    A dataset that can be downloaded counts as available.

    Args:
        name: A dataset, or several joined as styles (`mnist+usps+svhn`).
        folder: The data folder; by default `$FEDLOOM_DATA`, then the user's cache.
        size: The size to which images are resized, which the cache of a download depends on.
    """
    root = data_folder(folder)
    for part in parts(name):
        source = SOURCES.get(part)
        if not isinstance(source, Source) or source.where(root) is not None:
            continue
        if source.remote is None or not (cached_download(part, root, size).exists() or hub.installed()):
            return source.missing(root)
    return None


def _load_source(source: Source, root: Path, options: ReadOptions) -> Dataset:
    options.refuse_others(source.name, source.inputs, source.takes)
    if (place := source.where(root)) is not None:
        return source.read_files(place, options)
    if source.remote is None:
        raise source.missing(root)
    size = options.size
    # A downloaded dataset is cached in the data folder, since decoding it again takes longer than reading the cache.
    kept = cached_download(source.name, root, size)
    if kept.exists():
        return replace(npz.read_npz(kept), name=source.name)
    if not hub.installed():
        raise source.missing(root, "after pip install 'fedloom[hub]' it is downloaded from the Hugging Face hub")
    try:
        if isinstance(source.remote, hub.Files):
            hub.download(source.remote, root)
            return source.read(root, size)
        dataset = hub.fetch(source.remote, source.name, source.classes, size)
    except hub.UnreachableError as error:
        raise source.missing(root, str(error)) from error
    with contextlib.suppress(OSError):  # the cache is optional: the data folder may be read-only
        npz.write_npz(kept, dataset)
    return dataset


def _made(name: str, make: Callable[[], Dataset]) -> Dataset:
    """Return the dataset that a user's function makes."""
    try:
        dataset = make()
    except UserError:
        raise
    except Exception as error:
        where = place_of(error, Path(make.__code__.co_filename))
        raise UserError(f"dataset '{name}': {make.__name__}() failed, {where}") from error
    if not isinstance(dataset, Dataset):
        raise UserError(f"dataset '{name}': {make.__name__}() returned a {type(dataset).__name__} instead of a Dataset")
    return dataset


def _own_files(name: str, root: Path) -> Path | None:
    for path in (Path(name).expanduser(), root / name):
        if path.exists():
            return path
    return None


def _read_own(path: Path, options: ReadOptions) -> Dataset:
    """Read a file or folder of the user's. A folder with pictures is one of images, whatever else is in it."""
    if path.is_dir() and (tree.pictures_in(path) or not _other_kind(path)):
        options.refuse_others(str(path), "images", ("size",))
        return tree.read_tree(path, options.size, on_bad=options.on_bad)
    if table.is_table(path):
        options.refuse_others(str(path), "tables", ("label", "client"))
        return table.read_table(path, options.label, options.client)
    if path.is_dir():
        options.refuse_others(str(path), "recordings", ("seconds", "mels"))
        return recordings.read_recordings(path, options.seconds, options.mels, options.on_bad)
    if path.suffix.lower() != ".npz":
        raise UserError(
            f"dataset '{path}': a file must be an {', '.join(FILES)}; put image files or recordings into a folder with "
            "one folder per class"
        )
    options.refuse_others(str(path), "arrays", ("size",))
    return npz.read_npz(path)


def _other_kind(folder: Path) -> bool:
    return table.is_table(folder) or bool(tree.files_in(folder, recordings.RECORDINGS))
