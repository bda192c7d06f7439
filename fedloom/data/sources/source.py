"""Base class of sources: the name of a dataset, its original files, how to download and how to read them."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import ClassVar

from fedloom.core.data_files import Layout, complete_layout, folder_with
from fedloom.core.dataset import Dataset
from fedloom.core.errors import MissingDataError, UserError
from fedloom.core.registry import Registry
from fedloom.data import hub
from fedloom.data.decode import OnBad


@dataclass(frozen=True)
class ReadOptions:
    """Fields of the `data` section that say how files are read. A reader refuses those that it does not take."""

    size: int | None = None
    """Height and width to which images are resized."""
    on_bad: OnBad = "stop"
    """What to do about files in folders that cannot be read."""
    label: str | None = None
    """Column of the label in a table."""
    client: str | None = None
    """Column of the client in a table."""
    seconds: float | None = None
    """Length to which recordings are cut or padded."""
    mels: int | None = None
    """Number of frequency bands of recordings."""

    def refuse_others(self, name: str, what: str, takes: Collection[str]) -> None:
        """Raise a UserError if a field is set that a reader does not take.

        Args:
            name: Name of the dataset.
            what: What the reader reads, for the message.
            takes: Fields that it takes.
        """
        for field, use in (
            ("size", "images"), ("label", "tables"), ("client", "tables"), ("seconds", "recordings"),
            ("mels", "recordings"),
        ):  # fmt: skip
            if getattr(self, field) is not None and field not in takes:
                value = getattr(self, field)
                raise UserError(f"data.{field} = {value}: is for {use}, but '{name}' has {what}; leave it out")


class Source(ABC):
    """Base class of datasets with original files. A subclass with a `name` is registered for `load`.

    Example:
        class Blobs(Source):
            name = "blobs"
            description = "two kinds of blobs, 8×8 grey"
            classes = ("round", "square")
            layouts = (("blobs/blobs.npz",),)
            command = "curl --create-dirs -o {folder}/blobs/blobs.npz https://example.org/blobs.npz"

            def read(self, folder: Path, size: int | None) -> Dataset:
                return replace(read_npz(folder / "blobs/blobs.npz"), name=self.name)
    """

    name: ClassVar[str] = ""
    """Name in recipes; a subclass without one is a base class."""
    description: ClassVar[str]
    """One line for `fedloom datasets`."""
    classes: ClassVar[tuple[str, ...]] = ()
    """Names of the labels, in order; empty if they are in the files."""
    count: ClassVar[int] = 0
    """Number of classes, if `classes` is empty."""
    layouts: ClassVar[tuple[Layout, ...]]
    """Alternative sets of files or folders, relative to the data folder.

    `FILE.gz` counts as FILE. If the files are distributed gzipped, `read` must open both.
    """
    command: ClassVar[str] = ""
    """Shell command that downloads the files into {folder}."""
    also: ClassVar[tuple[Path, ...]] = ()
    """Additional data folders, such as those of a Linux package."""
    remote: ClassVar[hub.Table | hub.Files | None] = None
    """The dataset on the Hugging Face hub, if it is there."""
    inputs: ClassVar[str] = "images"
    """What it contains, for messages."""
    takes: ClassVar[tuple[str, ...]] = ("size",)
    """Fields of `ReadOptions` that `read_files` uses, besides `on_bad`."""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            SOURCES.add(cls.name, cls())

    @abstractmethod
    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the dataset from the files in a data folder.

        Args:
            folder: The data folder.
            size: Height and width to which images are resized. A source may ignore it: `load` resizes the result.

        Returns:
            The dataset.

        Raises:
            UserError: A file is damaged.
        """

    def read_files(self, folder: Path, options: ReadOptions) -> Dataset:
        """Read the dataset with further options, such as `on_bad` for a source of single files."""
        return self.read(folder, options.size)

    def where(self, folder: Path) -> Path | None:
        """Return the first data folder that contains all files of a layout, or None."""
        return folder_with(self.layouts, (folder, *self.also))

    def layout(self, folder: Path) -> Layout | None:
        """Return the first layout whose files are all in a folder, or None."""
        return complete_layout(self.layouts, folder)

    def missing(self, folder: Path, reason: str = "") -> MissingDataError:
        """Return the error for missing files: which files, in which folder, and the command that downloads them."""
        expected = ", or ".join(", ".join(files) for files in self.layouts)
        message = f"dataset '{self.name}' is not in the data folder {folder}: expected files {expected}"
        if reason:
            message += f"; {reason}"
        return MissingDataError(f"{message}\nget it with: {self.how(folder)}")

    def how(self, folder: Path) -> str:
        """Return the shell command that downloads the files into a data folder."""
        return self.command.format(folder=shlex.quote(str(folder)))


SOURCES: Registry[Source | Callable[[], Dataset]] = Registry(
    "data.name", "a function without arguments that returns a fedloom.data.Dataset", isfunction,
    package="fedloom.data.sources", group="fedloom.datasets",
)  # fmt: skip
"""Datasets by name: shipped sources, and users' functions that return a dataset."""
