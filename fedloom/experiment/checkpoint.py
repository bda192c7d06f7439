"""Checkpoints: everything that the next round depends on, so that a run can go on as if it had never stopped.

A checkpoint is a manifest (JSON) and the safetensors files that it names with size and SHA-256. It counts from the
moment the manifest has its name; everything it refers to is on the disk by then. Clients whose memory has not changed
are not written again: the manifest names an older file that has them. That is one of the checkpoint before the last,
never of the last: the two that are kept have no file in common, so no single damage reaches both. Randomness is keyed
by round: there are no generators to save.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import safetensors.torch
import torch
from pydantic import Field
from typing_extensions import TypedDict

from fedloom.core.errors import UserError
from fedloom.core.message import Signature
from fedloom.core.reading import Count, decoding, parse_json, read_bytes
from fedloom.core.state import State, nbytes, serialisable
from fedloom.core.task import EVERYONE
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.files import sync_folder, unwritable, write_whole

FORMAT = 1
KEPT = 2
SHARD = 32 * 2**20
"""Bytes of clients' memory that are gathered into one file. In RAM they are there up to four times for a moment."""
log = logging.getLogger("fedloom")

Stores = Mapping[str, ClientStore]


class DamagedError(Exception):
    """A checkpoint that cannot be used; says why."""


FileName = Annotated[str, Field(pattern=r"^round-\d{6,12}-(server|clients-\d{3,9})\.safetensors$")]
"""Beside the manifest, and of a name that `save` gives: a manifest cannot point anywhere else."""


ClientNumber = Annotated[int, Field(ge=EVERYONE, le=2**53)]


@dataclass(frozen=True)
class File:
    """A safetensors file. `clients` are those whose latest memory it has, out of `written` that it was made with."""

    bytes: Count
    sha256: str
    clients: dict[str, list[ClientNumber]] = field(default_factory=dict)
    written: Count = 0


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says."""

    round: Count
    server: FileName
    files: dict[FileName, File]
    notes: dict[str, Any]
    """What else belongs to the run's state and is JSON: metrics so far, what identifies the data."""
    format: int = FORMAT

    def to_json(self) -> bytes:
        """With a checksum of itself."""
        return json.dumps({"sha256": _digest(asdict(self)), "checkpoint": asdict(self)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Checkpoint":
        """The inverse; anything wrong is a `DamagedError`."""
        try:
            whole = json.loads(data)
            if _digest(whole["checkpoint"]) != whole["sha256"]:
                raise DamagedError("the manifest has changed since it was written")
            checkpoint = parse_json(data, Manifest, "the manifest", "another checkpoint is needed")["checkpoint"]
        except UserError as error:
            raise DamagedError(str(error)) from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DamagedError("the manifest is no whole JSON") from None
        if checkpoint.format != FORMAT:
            raise DamagedError(f"its format is {checkpoint.format}, and this fedloom reads {FORMAT}")
        if checkpoint.server not in checkpoint.files:
            raise DamagedError(f"{checkpoint.server} is none of its files")
        return checkpoint


class Manifest(TypedDict):
    """The file, with a checksum of what it says."""

    sha256: str
    checkpoint: Checkpoint


class Checkpoints:
    """The checkpoints of a run folder, the last two of them kept."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._kept: list[Checkpoint] = []
        self._changed: dict[str, set[int]] = {}
        """Clients whose memory changed between the two that are kept."""

    @property
    def round(self) -> int | None:
        """The round after which the newest was written, or loaded."""
        return self._kept[-1].round if self._kept else None

    def save(self, round: int, server: State, stores: Stores, notes: dict[str, Any]) -> None:
        """Writes what changed, then the manifest; then what nobody needs any more goes."""
        if self.round == round:
            return
        if not self.folder.is_dir():
            try:
                self.folder.mkdir(parents=True)
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
        """Files of the checkpoint before the last that stay, and the clients to be written.

        A file of whose clients only half are up to date is not kept for them, so space stays bounded.
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
        """Old manifests first: without its files a checkpoint would be a damaged one."""
        manifests = {f"{_stem(kept.round)}.json" for kept in self._kept}
        needed = manifests.union(*(kept.files for kept in self._kept))
        others = [path for path in self.folder.iterdir() if path.name not in needed]
        for path in sorted(others, key=lambda path: path.suffix != ".json"):
            if path.name.lstrip(".").startswith("round-"):
                path.unlink(missing_ok=True)

    def load(
        self, stores: Stores, device: torch.device | str = "cpu", parts: Signature | None = None
    ) -> tuple[Checkpoint, State]:
        """Fills the stores from the newest checkpoint that is whole; returns it and the server's state.

        A checkpoint in which a client's tensor has another type or shape than the part of that name is not used.
        """
        found = sorted(self.folder.glob("round-*.json"), reverse=True)
        for path in found:
            try:
                checkpoint = self._checked(path)
                self._fill(stores, checkpoint, device, parts or {})
                server = self._read(checkpoint.server)
                self._kept = [checkpoint]
                return checkpoint, {name: tensor.to(device) for name, tensor in server.items()}
            except DamagedError as why:
                log.warning("checkpoint %s is damaged (%s): the one before it is taken", path, why)
        wrong = f"none of the {len(found)} checkpoints in it can be used" if found else "there is no checkpoint in it"
        raise UserError(
            f"'{self.folder.parent}' cannot be resumed: {wrong}; nothing was changed. Start again with "
            f"`fedloom run {self.folder.parent / 'recipe.yaml'} --out ANOTHER`"
        )

    def _fill(self, stores: Stores, checkpoint: Checkpoint, device: torch.device | str, parts: Signature) -> None:
        """Puts clients' memories into the stores, file by file."""
        for store in stores.values():
            store.close()
        for name, file in checkpoint.files.items():
            latest = {kind: set(clients) for kind, clients in file.clients.items() if clients}
            if unknown := latest.keys() - stores.keys():
                raise DamagedError(f"{name} has clients' '{min(unknown):.40}', which is unknown")
            states: dict[tuple[str, int], State] = {(k, c): {} for k, clients in latest.items() for c in clients}
            if not states:
                continue
            for path, tensor in self._read(name).items():
                kind, client, part = _parts(name, path)
                if client in latest.get(kind, ()):
                    if parts.get(part, (tensor.dtype, tuple(tensor.shape))) != (tensor.dtype, tuple(tensor.shape)):
                        raise DamagedError(f"client {client}'s {part:.80} is {tensor.dtype} {list(tensor.shape)}")
                    states[kind, client][part] = tensor.to(device, copy=True)
            for (kind, c), state in states.items():
                stores[kind][c] = state
        for store in stores.values():
            store.changed.clear()

    def _read(self, name: str) -> State:
        """The tensors of a file."""
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

    def remove(self) -> None:
        """When a run is finished nothing needs them any more."""
        self._kept = []
        if self.folder.is_dir():
            self._prune()
            if not any(self.folder.iterdir()):
                self.folder.rmdir()


def _shards(outdated: Mapping[str, set[int]], stores: Stores) -> Iterator[dict[tuple[str, int], State]]:
    """Memories of these clients, as many together as make a file; few are in RAM at once."""
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
    """Store, client and part of a tensor's name in a file of clients' memories."""
    kind, _, rest = path.partition("/")
    client, _, part = rest.partition("/")
    if not re.fullmatch(r"-1|[0-9]{1,15}", client):
        raise DamagedError(f"{name} has the tensor '{path:.80}', which is no client's")
    return kind, int(client), part


def _stem(round: int) -> str:
    return f"round-{round:06d}"


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


SHARE = 20
"""Checkpoints that are due by the clock take no more than one part in so many of the time."""


class CheckpointSchedule:
    """Every so many rounds, and earlier where rounds are long: when the last one is so many seconds old."""

    def __init__(self, rounds: int, seconds: float):
        self._rounds, self._seconds = rounds, seconds
        self._since, self._took = perf_counter(), 0.0

    def __call__(self, round: int) -> bool:
        """Whether one is, after this round."""
        if not self._rounds:
            return False
        late = perf_counter() - self._since >= max(self._seconds, SHARE * self._took)
        return round % self._rounds == 0 or (late and self._seconds > 0)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around the writing of one."""
        start = perf_counter()
        yield
        self._since = perf_counter()
        self._took = self._since - start
