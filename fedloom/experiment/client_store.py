"""A store of clients' states with bounded RAM; the least recently used states are moved to disk."""

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from fedloom.core.flat_state import nbytes
from fedloom.core.state import State, serialisable
from fedloom.experiment.files import unwritable

Key = tuple[int, bool]
"""A client, and whether its state is staged."""


class ClientStore(MutableMapping[int, State]):
    """A mapping from clients to named tensors that uses at most `budget` bytes of RAM.

    A round stages new states; `commit` replaces the old states by them, all at once.

    Args:
        budget: Bytes of tensors in RAM. States beyond it are written to disk; one state is always in RAM.
        inside: Folder in which the temporary folder for these files is created; `close` removes it.
    """

    def __init__(self, budget: int, inside: Path | None = None):
        self.budget = budget
        self._inside = inside
        self._temporary: Path | None = None
        self._warm: OrderedDict[Key, State] = OrderedDict()
        self._size = 0
        self._spilled: set[Key] = set()
        self._staged: set[int] = set()
        self._devices: dict[Key, torch.device] = {}
        """Devices to which states on disk are moved when they are read."""
        self.changed: set[int] = set()
        """Clients set or deleted since this set was last cleared (by a checkpoint)."""
        self._tracked = [self.changed]

    def track(self) -> set[int]:
        """Return a further set to which clients are added when they are set or deleted; its user clears it."""
        self._tracked.append(set(self))
        return self._tracked[-1]

    def __getitem__(self, client: int) -> State:
        key = client, False
        if key in self._warm:
            self._warm.move_to_end(key)
            return self._warm[key]
        if key not in self._spilled:
            raise KeyError(client)
        state = self._read(key)
        self._admit(key, state)
        return state

    def peek(self, client: int) -> State:
        """Return a client's state without moving it from disk to RAM, for reading all states once."""
        key = client, False
        if key in self._warm or key not in self._spilled:
            return self._warm[key]
        return self._read(key)

    def _read(self, key: Key) -> State:
        device = self._devices.get(key, torch.device("cpu"))
        return {name: tensor.to(device) for name, tensor in load_file(self._path(key)).items()}

    def __setitem__(self, client: int, state: State) -> None:
        self._forget((client, False))
        self._note_change(client)
        self._admit((client, False), _in_own_memory(state))

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self._forget((client, False))
        self._note_change(client)

    def __contains__(self, client: object) -> bool:
        return (client, False) in self._warm or (client, False) in self._spilled

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(client for client, staged in self._warm.keys() | self._spilled if not staged))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def stage(self, client: int, state: State) -> None:
        """Store a state that replaces the client's state at the next `commit`."""
        self._forget((client, True))
        self._staged.add(client)
        self._admit((client, True), _in_own_memory(state))

    def commit(self) -> None:
        """Replace clients' states by the staged ones."""
        for client in sorted(self._staged):
            old, new = (client, False), (client, True)
            self._forget(old)
            if new in self._warm:
                self._warm[old] = self._warm.pop(new)
            if new in self._spilled:
                self._spilled.remove(new)
                self._spilled.add(old)
                try:
                    self._path(new).rename(self._path(old))
                except OSError as error:
                    raise unwritable(self._path(old), error) from error
                self._devices[old] = self._devices.pop(new)
            self._note_change(client)
        self._staged.clear()

    def discard(self) -> None:
        """Delete the staged states."""
        for client in self._staged:
            self._forget((client, True))
        self._staged.clear()

    @property
    def resident(self) -> int:
        """Bytes of tensors in RAM."""
        return self._size

    def close(self) -> None:
        """Delete all states and remove the temporary folder."""
        self._warm.clear()
        self._spilled.clear()
        self._staged.clear()
        self.changed.clear()
        self._devices.clear()
        self._size = 0
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _note_change(self, client: int) -> None:
        for changed in self._tracked:
            changed.add(client)

    def _admit(self, key: Key, state: State) -> None:
        self._warm[key] = state
        self._size += nbytes(state)
        while self._size > self.budget and len(self._warm) > 1:
            self._evict(next(iter(self._warm)))

    def _evict(self, key: Key) -> None:
        state = self._warm.pop(key)
        self._size -= nbytes(state)
        if key not in self._spilled:
            try:
                path = self._path(key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(save(serialisable(state)))
            except OSError as error:
                raise unwritable(Path(error.filename or self._inside or "."), error) from error
            self._spilled.add(key)
            self._devices[key] = next((tensor.device for tensor in state.values()), torch.device("cpu"))

    def _forget(self, key: Key) -> None:
        if key in self._warm:
            self._size -= nbytes(self._warm.pop(key))
        if key in self._spilled:
            self._spilled.remove(key)
            # unlink, never overwrite: tensors loaded from the file may still be memory-mapped to it
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: Key) -> Path:
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix=".memory-", dir=self._inside))
        client, staged = key
        return self._temporary / f"{client // 1000:04d}" / f"{client:07d}{'.staged' if staged else ''}.safetensors"


def _in_own_memory(state: State) -> State:
    """Copy tensors that are a small part of larger memory, such as all messages of a round, which they would hold."""
    memories = {name: tensor.untyped_storage() for name, tensor in state.items()}
    used: dict[int, int] = {}
    for name, memory in memories.items():
        used[memory.data_ptr()] = used.get(memory.data_ptr(), 0) + state[name].nbytes
    small = {name for name, memory in memories.items() if memory.nbytes() > 2 * used[memory.data_ptr()]}
    return {n: tensor.clone() if n in small else tensor for n, tensor in state.items()} if small else state
