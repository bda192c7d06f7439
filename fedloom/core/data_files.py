"""Locations of a dataset's original files. Does not import torch, so that `fedloom datasets` starts fast."""

import os
from collections.abc import Iterable
from pathlib import Path

Layout = tuple[str, ...]
"""Files or folders of a dataset, relative to the data folder. Each may also be present as `.gz`."""


def data_folder(folder: Path | str | None = None) -> Path:
    """Return the folder that holds original files: the argument, else $FEDLOOM_DATA, else the user's cache."""
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get("FEDLOOM_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fedloom" / "data"


def present(path: Path) -> bool:
    """Return whether a file or folder exists, as it is or gzipped."""
    return path.exists() or path.with_name(path.name + ".gz").exists()


def complete_layout(layouts: Iterable[Layout], folder: Path) -> Layout | None:
    """Return the first layout whose files are all in this folder."""
    return next((files for files in layouts if all(present(folder / file) for file in files)), None)


def folder_with(layouts: Iterable[Layout], folders: Iterable[Path]) -> Path | None:
    """Return the first folder that holds all files of a layout."""
    layouts = tuple(layouts)
    return next((folder for folder in folders if complete_layout(layouts, folder) is not None), None)


def cached_download(name: str, folder: Path, size: int | None = None) -> Path:
    """Return where a dataset that came from the Hugging Face hub is cached in the data folder."""
    return folder / "hub" / (f"{name}-{size}.npz" if size else f"{name}.npz")
