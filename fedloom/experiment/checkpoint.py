"""Checkpoints: the state that the next round depends on, so that a resumed run equals an uninterrupted one.

A checkpoint is a manifest (JSON) and the safetensors files that it lists with size and SHA-256. It becomes valid when
the manifest is renamed to its final name; all its files are on disk by then. Clients whose memory has not changed are
not written again. The manifest of checkpoint N then lists a file of checkpoint N − 2, never of N − 1. So the two
checkpoints that are kept share no file, and one damaged file cannot invalidate both. Randomness is keyed by round, so
there are no generators to save.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from pydantic import Field
from typing_extensions import TypedDict

from fedloom.core.errors import UserError
from fedloom.core.flat_state import nbytes
from fedloom.core.message import Signature
from fedloom.core.reading import Count, decoding, parse_json, read_bytes
from fedloom.core.state import State, serialisable
from fedloom.core.task import EVERYONE
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.files import sync_folder, unwritable, write_whole

FORMAT = 1
"""Format of checkpoints; other formats are refused."""
FOLDER = "checkpoints"
"""Name of the folder of checkpoints in a run folder."""
KEPT = 2
"""Number of checkpoints that are kept."""
SHARD = 32 * 2**20
"""Bytes of clients' memory per file. While a file is written, up to four copies of them are in RAM."""
log = logging.getLogger("fedloom")

Stores = Mapping[str, ClientStore]


class DamagedError(Exception):
    """A checkpoint that cannot be used; the message says why."""


FileName = Annotated[str, Field(pattern=r"^round-\d{6,12}-(server|clients-\d{3,9})\.safetensors$")]
"""Name of a file next to the manifest, in the form that `save` uses: a manifest cannot refer to any other file."""


ClientNumber = Annotated[int, Field(ge=EVERYONE, le=2**53)]


@dataclass(frozen=True)
class File:
    """A safetensors file of a checkpoint."""

    bytes: Count
    sha256: str
    clients: dict[str, list[ClientNumber]] = field(default_factory=dict)
    """By store: the clients whose latest memory the file holds."""
    written: Count = 0
    """Number of clients' memories in the file, including outdated ones."""


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a manifest."""

    round: Count
    """The last round that the checkpoint includes."""
    server: FileName
    """File of the server's state."""
    files: dict[FileName, File]
    notes: dict[str, Any]
    """Other state of the run, as JSON: the metrics so far, a fingerprint of the data, the ledger."""
    format: int = FORMAT

    def to_json(self) -> bytes:
        """Return the manifest as JSON, with a checksum of its contents.

        Notes are encoded once and not copied: after 1,500 rounds they have a megabyte of metrics.
        """
        contents = json.dumps(vars(self) | {"files": {name: vars(file) for name, file in self.files.items()}})
        return f'{{"sha256": "{_sha256(contents)}", "checkpoint": {contents}}}'.encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Checkpoint":
        """Parse and check the JSON of a manifest.

        Raises:
            DamagedError: The manifest is damaged, or has an unsupported format.
        """
        try:
            whole = json.loads(data)
            if _sha256(json.dumps(whole["checkpoint"])) != whole["sha256"]:
                raise DamagedError("the manifest has changed since it was written")
            checkpoint = parse_json(data, Manifest, "the manifest", "another checkpoint is needed")["checkpoint"]
        except UserError as error:
            raise DamagedError(str(error)) from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DamagedError("the manifest is not complete JSON") from None
        if checkpoint.format != FORMAT:
            raise DamagedError(f"its format is {checkpoint.format}, but this fedloom reads {FORMAT}")
        if checkpoint.server not in checkpoint.files:
            raise DamagedError(f"{checkpoint.server} is not listed among its files")
        return checkpoint


class Manifest(TypedDict):
    """A manifest file: the checkpoint's description and its checksum."""

    sha256: str
    checkpoint: Checkpoint


class Checkpoints:
    """The checkpoints of a run folder; the last two are kept."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._kept: list[Checkpoint] = []
        self._changed: dict[str, set[int]] = {}
        """Clients whose memory changed between the two kept checkpoints."""

    @property
    def round(self) -> int | None:
        """Round of the newest checkpoint that was written or loaded."""
        return self._kept[-1].round if self._kept else None

    def save(self, round: int, server: State, stores: Stores, notes: dict[str, Any]) -> None:
        """Write a checkpoint: first the files that changed, then the manifest; then remove files no longer needed."""
        if self.round == round:
            return
        if not self.folder.is_dir():
            try:
                self.folder.mkdir()  # no parents: a run folder that was moved is not made anew
                sync_folder(self.folder.parent)
            except OSError as error:
                raise unwritable(self.folder, error) from error
        files, outdated = self._unchanged(stores)
        name = f"{_stem(round)}-server.safetensors"
        files[name] = self._write(name, server)
        for i, shard in enumerate(_shards(outdated, stores)):
            name = f"{_stem(round)}-clients-{i:03d}.safetensors"
            tensors = {f"{kind}/{c}/{n}": t for (kind, c), state in shard.items() for n, t in state.items()}
            clients = {kind: [c for k, c in shard if k == kind] for kind in stores}
            files[name] = replace(self._write(name, tensors), clients=clients, written=len(shard))
        made = Checkpoint(round, f"{_stem(round)}-server.safetensors", files, notes)
        write_whole(self.folder / f"{_stem(round)}.json", made.to_json())
        self._changed = {kind: set(store.changed) for kind, store in stores.items()}
        for store in stores.values():
            store.changed.clear()
        self._kept = [*self._kept, made][-KEPT:]
        self._prune()

    def _unchanged(self, stores: Stores) -> tuple[dict[str, File], dict[str, set[int]]]:
        """Return the reusable files of checkpoint N − 2, and the clients that must be written.

        A file is reused only if more than half of its clients are up to date, so that disk space stays bounded.
        """
        outdated = {kind: set(store) for kind, store in stores.items()}
        files: dict[str, File] = {}
        if len(self._kept) < KEPT:
            return files, outdated
        same = {kind: outdated[kind] - store.changed - self._changed[kind] for kind, store in stores.items()}
        for name, file in self._kept[0].files.items():
            valid = {kind: [c for c in clients if c in same[kind]] for kind, clients in file.clients.items()}
            if 2 * sum(map(len, valid.values())) > file.written:
                files[name] = replace(file, clients=valid)
                for kind, clients in valid.items():
                    outdated[kind].difference_update(clients)
        return files, outdated

    def _write(self, name: str, state: State) -> File:
        data = safetensors.torch.save(serialisable(state))
        write_whole(self.folder / name, data)
        return File(len(data), hashlib.sha256(data).hexdigest())

    def _prune(self) -> None:
        """Remove files that the kept checkpoints do not need, manifests first: none may refer to a missing file."""
        manifests = {f"{_stem(kept.round)}.json" for kept in self._kept}
        needed = manifests.union(*(kept.files for kept in self._kept))
        others = [path for path in self.folder.iterdir() if path.name not in needed]
        for path in sorted(others, key=lambda path: path.suffix != ".json"):
            if path.name.lstrip(".").startswith("round-"):
                path.unlink(missing_ok=True)

    def load(
        self,
        stores: Stores,
        device: torch.device | str = "cpu",
        shapes_of: Callable[[int], Signature] = lambda client: {},
        before: int | None = None,
    ) -> tuple[Checkpoint, State]:
        """Load the newest undamaged checkpoint.

        Args:
            stores: Stores that are filled with the clients' memories.
            device: Device for the tensors.
            shapes_of: Returns the types and shapes of a client's parts; a checkpoint with a tensor that differs
                from its part is damaged.
            before: Ignore checkpoints of this round and later ones.

        Returns:
            The checkpoint, and the server's state.

        Raises:
            UserError: No checkpoint can be used.
        """
        found, late = sorted(self.folder.glob("round-*.json"), reverse=True), 0
        for path in found:
            try:
                checkpoint = self._checked(path)
                if before is not None and checkpoint.round >= before:
                    late += 1
                    continue
                self._fill(stores, checkpoint, device, shapes_of)
                server = self._read(checkpoint.server)
                self._kept = [checkpoint]
                return checkpoint, {name: tensor.to(device) for name, tensor in server.items()}
            except DamagedError as why:
                log.warning("checkpoint %s is damaged (%s): trying the previous checkpoint", path, why)
        wrong = f"none of its {len(found)} checkpoints can be used" if found else "it has no checkpoint"
        wrong += f" ({late} not before round {before}, the last one)" if late else ""
        raise UserError(
            f"'{self.folder.parent}' cannot be resumed: {wrong}; nothing was changed. Start the run again with "
            f"`fedloom run {self.folder.parent / 'recipe.yaml'} --out ANOTHER`"
        )

    def _fill(
        self, stores: Stores, checkpoint: Checkpoint, device: torch.device | str, shapes_of: Callable[[int], Signature]
    ) -> None:
        """Load clients' memories into the stores, file by file."""
        for store in stores.values():
            store.close()
        for name, file in checkpoint.files.items():
            latest = {kind: set(clients) for kind, clients in file.clients.items() if clients}
            if unknown := latest.keys() - stores.keys():
                raise DamagedError(f"{name} belongs to the store '{min(unknown):.40}', which is unknown")
            states: dict[tuple[str, int], State] = {(k, c): {} for k, clients in latest.items() for c in clients}
            if not states:
                continue
            for path, tensor in self._read(name).items():
                kind, client, part = _parts(name, path)
                if client in latest.get(kind, ()):
                    here = tensor.dtype, tuple(tensor.shape)
                    if shapes_of(client).get(part, here) != here:
                        raise DamagedError(
                            f"client {client}'s {part:.80} has an unexpected type or shape: {tensor.dtype} "
                            f"{list(tensor.shape)}"
                        )
                    states[kind, client][part] = tensor.to(device, copy=True)
            for (kind, c), state in states.items():
                stores[kind][c] = state
        for store in stores.values():
            store.changed.clear()

    def _read(self, name: str) -> State:
        """Read the tensors of a file."""
        try:
            with decoding(name, "safetensors", "another checkpoint is needed"):
                return safetensors.torch.load(read_bytes(self.folder / name, "safetensors", "free some memory"))
        except UserError as error:
            raise DamagedError(str(error)) from None

    def _checked(self, path: Path) -> Checkpoint:
        try:
            checkpoint = Checkpoint.from_json(read_bytes(path, "JSON", "another checkpoint is needed"))
            for name, file in checkpoint.files.items():
                data = self.folder / name
                if data.stat().st_size != file.bytes:
                    raise DamagedError(f"{name} has {data.stat().st_size} bytes instead of {file.bytes}")
                if not data.is_file():
                    raise DamagedError(f"{name} is not a file")
                with data.open("rb") as opened:
                    if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                        raise DamagedError(f"{name} has changed since it was written")
        except OSError as error:
            raise DamagedError(f"{Path(error.filename or path).name}: {error.strerror}") from None
        except UserError as error:
            raise DamagedError(str(error)) from None
        return checkpoint

    def keep_last(self) -> None:
        """Remove all checkpoints but the newest."""
        self._kept = self._kept[-1:]
        self._prune()

    def remove(self) -> None:
        """Remove all checkpoints."""
        self._kept = []
        if self.folder.is_dir():
            self._prune()
            if not any(self.folder.iterdir()):
                self.folder.rmdir()


def _shards(outdated: Mapping[str, set[int]], stores: Stores) -> Iterator[dict[tuple[str, int], State]]:
    """Yield the memories of these clients, grouped by file; only one group is in RAM at a time."""
    shard: dict[tuple[str, int], State] = {}
    size = 0
    for kind, clients in outdated.items():
        for client in sorted(clients):
            state = stores[kind].peek(client)
            if shard and size + nbytes(state) > SHARD:
                yield shard
                shard, size = {}, 0
            shard[kind, client] = state
            size += nbytes(state)
    if shard:
        yield shard


def _parts(name: str, path: str) -> tuple[str, int, str]:
    """Split a tensor's name in a file of clients' memories into store, client and part."""
    kind, _, rest = path.partition("/")
    client, _, part = rest.partition("/")
    if not re.fullmatch(r"-1|[0-9]{1,15}", client):
        raise DamagedError(f"{name} has the tensor '{path:.80}', which does not belong to a client")
    return kind, int(client), part


def _stem(round: int) -> str:
    return f"round-{round:06d}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
