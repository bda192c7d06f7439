"""What is remembered of each client: a store with a bound on RAM that spills the least recently used to disk."""

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from fedloom.parts import State, nbytes
from fedloom.storage.files import unwritable


class ClientStore(MutableMapping[int, State]):
    """client → named tensors. As many clients as the disk holds, in `budget` bytes of RAM.

    Files go to `folder`; by default to a temporary one `inside` a given place, which `close` removes.
    """

    def __init__(self, budget: int, folder: Path | None = None, inside: Path | None = None):
        self.budget = budget
        self._folder, self._inside = folder, inside
        self._temporary: Path | None = None
        self._warm: OrderedDict[int, State] = OrderedDict()
        self._size = 0
        self._spilled: set[int] = set()
        self._devices: dict[int, torch.device] = {}
        """Where what is spilled came from, and goes back to."""
        self.changed: set[int] = set()
        """Clients set or deleted since somebody cleared this (a checkpoint does)."""

    def __getitem__(self, client: int) -> State:
        if client in self._warm:
            self._warm.move_to_end(client)
            return self._warm[client]
        if client not in self._spilled:
            raise KeyError(client)
        state = self._read(client)
        self._admit(client, state)
        return state

    def peek(self, client: int) -> State:
        """The same, but what is on disk stays there: for reading through all of them."""
        if client in self._warm or client not in self._spilled:
            return self._warm[client]
        return self._read(client)

    def _read(self, client: int) -> State:
        device = self._devices.get(client, torch.device("cpu"))
        return {name: tensor.to(device) for name, tensor in load_file(self._path(client)).items()}

    def __setitem__(self, client: int, state: State) -> None:
        self._forget(client)
        self.changed.add(client)
        self._admit(client, state)

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self._forget(client)
        self.changed.add(client)

    def __contains__(self, client: object) -> bool:
        return client in self._warm or client in self._spilled

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._warm.keys() | self._spilled))

    def __len__(self) -> int:
        return len(self._warm.keys() | self._spilled)

    @property
    def resident(self) -> int:
        """Bytes of tensors in RAM."""
        return self._size

    def close(self) -> None:
        """Forgets everything; removes the temporary folder."""
        self._warm.clear()
        self._spilled.clear()
        self.changed.clear()
        self._size = 0
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _admit(self, client: int, state: State) -> None:
        self._warm[client] = state
        self._size += nbytes(state)
        while self._size > self.budget and len(self._warm) > 1:
            self._evict(next(iter(self._warm)))

    def _evict(self, client: int) -> None:
        state = self._warm.pop(client)
        self._size -= nbytes(state)
        if client not in self._spilled:
            # copies: safetensors refuses tensors that are views of the same memory
            flat = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in state.items()}
            try:
                path = self._path(client)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(save(flat))
            except OSError as error:
                raise unwritable(Path(error.filename or self._inside or self._folder or "."), error) from error
            self._spilled.add(client)
            self._devices[client] = next((tensor.device for tensor in state.values()), torch.device("cpu"))

    def _forget(self, client: int) -> None:
        if client in self._warm:
            self._size -= nbytes(self._warm.pop(client))
        if client in self._spilled:
            self._spilled.remove(client)
            # a tensor that was loaded from the file may still be mapped to it: unlinked, never overwritten
            self._path(client).unlink(missing_ok=True)

    def _path(self, client: int) -> Path:
        if self._folder is None and self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix=".memory-", dir=self._inside))
        folder = self._folder or self._temporary
        assert folder is not None
        return folder / f"{client // 1000:04d}" / f"{client:07d}.safetensors"
