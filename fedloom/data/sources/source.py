"""What a source is: a name, the original files, how to get them, and how to read them."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from typing import ClassVar

from fedloom.core.data_files import Layout, complete_layout, folder_with
from fedloom.core.errors import UserError
from fedloom.core.registry import Registry
from fedloom.core.task import Dataset
from fedloom.data import hub


class Source(ABC):
    """A subclass that has a name is a dataset that `load` knows; nothing else is needed to add one."""

    name: ClassVar[str] = ""
    description: ClassVar[str]
    """one line"""
    classes: ClassVar[tuple[str, ...]] = ()
    """names of the labels, in order; empty where the files say"""
    count: ClassVar[int] = 0
    """number of classes, where `classes` is empty"""
    layouts: ClassVar[tuple[Layout, ...]]
    """alternative sets of files (or folders) relative to the data folder; each may also be there as .gz"""
    command: ClassVar[str] = ""
    """the shell command that gets them into {folder}"""
    also: ClassVar[tuple[Path, ...]] = ()
    """further data folders, where a distribution's package puts the files"""
    remote: ClassVar[hub.Table | hub.Files | None] = None

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            SOURCES.add(cls.name, cls())

    @abstractmethod
    def read(self, folder: Path, size: int | None) -> Dataset:
        """The dataset out of the files in this data folder; a source may leave resizing to `load`."""

    def where(self, folder: Path) -> Path | None:
        """The first data folder that holds all files of a layout."""
        return folder_with(self.layouts, (folder, *self.also))

    def layout(self, folder: Path) -> Layout | None:
        """The first layout that is complete in this folder."""
        return complete_layout(self.layouts, folder)

    def missing(self, folder: Path, reason: str = "") -> UserError:
        """What to say where the files are not there: which, where, and the one command that gets them."""
        expected = ", or ".join(", ".join(files) for files in self.layouts)
        words = f"dataset '{self.name}' is not in the data folder {folder}: expected there {expected}"
        if reason:
            words += f"; {reason}"
        return UserError(f"{words}\nget it with: {self.how(folder)}")

    def how(self, folder: Path) -> str:
        """The command that gets the files into this data folder."""
        return self.command.format(folder=shlex.quote(str(folder)))


SOURCES: Registry[Source | Callable[[], Dataset]] = Registry(
    "data.name", "a function without arguments that returns a fedloom.data.Dataset", isfunction,
    package="fedloom.data.sources", group="fedloom.datasets",
)  # fmt: skip
"""Shipped sources; what users bring is a function that makes a dataset."""
