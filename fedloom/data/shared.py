"""Datasets in shared memory: the processes of parallel runs map the same pages instead of reading files themselves."""

import json
import os
from dataclasses import fields
from types import TracebackType
from typing import IO, Self

import torch

from fedloom.core.dataset import Dataset
from fedloom.core.limits import refuse_without_room
from fedloom.data.settings import DataSettings
from fedloom.data.sources import ReadOptions

NAME = "FEDLOOM_SHARED_DATASETS"
"""Environment variable of child processes: the inherited file of each dataset, by `reading_of`."""
READING = {"name", "dir", "channels", *(field.name for field in fields(ReadOptions))}


def reading_of(settings: DataSettings) -> str:
    """Return the fields that say which files are read, and how, as text: equal for sections that share a dataset."""
    return settings.model_dump_json(include=READING)


class SharedDatasets:
    """Datasets that child processes can map; use it as a context manager.

    They are anonymous files in memory, which the kernel frees when the last process that holds them has ended. Systems
    without such files (other than Linux) share nothing: each process reads the data.
    """

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def add(self, settings: DataSettings, dataset: Dataset) -> Dataset:
        """Share a dataset, and return it with its tensors in shared memory, so that other copies can be freed.

        Raises:
            UserError: The memory does not suffice for another copy.
        """
        if not hasattr(os, "memfd_create"):
            return dataset
        values = {field.name: getattr(dataset, field.name) for field in fields(dataset)}
        size = sum(value.nbytes for value in values.values() if isinstance(value, torch.Tensor))
        refuse_without_room(size, "parallel", "run one after another", f"a shared copy of dataset '{dataset.name}'")
        file = os.fdopen(os.memfd_create("fedloom-dataset"), "wb")
        torch.save(values, file)
        file.flush()
        self._files[reading_of(settings)] = file
        return _mapped(file.fileno())

    @property
    def inherited(self) -> list[int]:
        """File descriptors that child processes must inherit."""
        return [file.fileno() for file in self._files.values()]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for child processes."""
        return {NAME: json.dumps({reading: file.fileno() for reading, file in self._files.items()})}


def shared_dataset(settings: DataSettings) -> Dataset | None:
    """Return the dataset that the parent process shares for these settings, if there is one."""
    number = json.loads(os.environ.get(NAME, "{}")).get(reading_of(settings))
    return None if number is None else _mapped(number)


def _mapped(number: int) -> Dataset:
    """Map a dataset's file; a process that writes into a tensor gets its own copy of the page."""
    return Dataset(**torch.load(f"/proc/self/fd/{number}", mmap=True, weights_only=True))
