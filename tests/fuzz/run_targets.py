"""Fuzzed files of a run: its folder, its ledger, its checkpoints, and models of it."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

import fedloom
from fedloom.core.input_format import InputFormat
from fedloom.core.message import signature
from fedloom.experiment.checkpoint import Checkpoints, _sha256
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.lock import RunLock
from fedloom.experiment.resume import checked_notes
from fedloom.experiment.run_folder import finished, read_clients, read_facts, read_rounds, stored_versions
from fedloom.inference.trained_model import load_model
from fedloom.inference.trained_run import TrainedRun
from fedloom.report.ledger import ledger_lines
from fedloom.report.page.page import as_json, page_of
from fedloom.report.page.runs import entries_of, read_runs
from fedloom.trust.ledger import Ledger
from fedloom.trust.ledger_file import read_ledger
from tests.fuzz import mutate
from tests.fuzz.mutate import Mutate

RECIPE = b"""{"method": {"name": "fedavg"}, "model": {"name": "mlp", "hidden": 4, "features": 4}, "seed": 0,
 "data": {"name": "digits", "clients": 3, "limit": 60}, "training": {"rounds": 2}, "evaluation": {"summary": "last"}}
"""
Row = tuple[str, Sequence[bytes], Callable[[bytes], object], Sequence[Mutate], float]
"""The fields of a `Target`."""


def run_targets(folder: Path) -> Iterator[Row]:
    """Targets that need a finished run, which is made first."""
    out = folder / "run"
    if not (out / "summary.json").exists():
        fedloom.run(
            method="fedavg", data="digits", clients=3, rounds=2, out=str(out), engine="inline",
            **{"data.limit": 60, "model": {"name": "mlp", "hidden": 4, "features": 4}},
        )  # fmt: skip
    # as short as a recipe can be: most of the time would go into parsing it
    (out / "recipe.yaml").write_bytes(RECIPE)
    files = ("versions.json", "task.json", "metrics.jsonl", "clients.jsonl", "summary.json", "recipe.yaml")
    for name in ("metrics.jsonl", "summary.json"):  # without times and paths: the same inputs in every process
        text = re.sub(r'("(train_)?seconds": )[^,}\s]+', r"\g<1>0.5", (out / name).read_text())
        (out / name).write_text(re.sub(r'("run_dir": )"[^"]*"', r'\1"run"', text))
    whole = {name: (out / name).read_bytes() for name in files}
    seeds = [name.encode() + b"\0" + content for name, content in whole.items()]
    yield "report", seeds, _Folder(out, whole, _report), [_in_file], 0.5
    yield "load", seeds, _Folder(out, whole, _load), [_in_file], 1
    yield "lock", [b'{"pid": 1, "host": "x", "since": "", "began": null}'], _Lock(folder), [mutate.in_json], 2
    ledger = (out / "ledger.json").read_bytes()
    entered = _Folder(out, {"ledger.json": ledger}, _ledger)
    yield "ledger", [ledger], lambda data: entered(b"ledger.json\0" + data), [mutate.in_json], 4
    model = TrainedRun(out).global_model().to_bytes()
    tensors = [mutate.in_safetensors, mutate.in_own_header, mutate.in_own_header]
    yield "model", [model], _Model(folder / "model.safetensors"), tensors, 0.5
    state = (out / "models" / "server.safetensors").read_bytes()
    place = "models/server.safetensors"
    personal = _Folder(out, {place: state}, _Personal(out))
    yield "run's model", [state], lambda data: personal(place.encode() + b"\0" + data), [mutate.in_safetensors], 0.3
    checkpoint = _Checkpoints(folder / "resumed", whole, ledger)
    yield "checkpoint manifest", [checkpoint.manifest], checkpoint.with_manifest, [mutate.in_json], 1.5
    yield "checkpoint tensors", [checkpoint.tensors], checkpoint.with_tensors, [mutate.in_safetensors], 1.5


def _in_file(rng: Random, data: bytes) -> bytes:
    """Changes a file of a run folder after the rules of its format; its name stays."""
    name, _, content = data.partition(b"\0")
    if name.endswith(b".yaml"):
        change = rng.choice((mutate.tokens, mutate.in_json, mutate.plain))
    else:
        change = mutate.in_json_lines if name.endswith(b"l") else mutate.in_json
    return name + b"\0" + change(rng, content)


class _Folder:
    """Reads the folder with one file replaced by the input, which begins with its name; then it is as it was."""

    def __init__(self, out: Path, whole: dict[str, bytes], read: Callable[[Path], object]):
        self.out, self.whole, self.read = out, whole, read

    def __call__(self, data: bytes) -> object:
        begin, _, content = data.partition(b"\0")
        name = begin.decode("latin1")
        name, content = (name, content) if name in self.whole else ("metrics.jsonl", data)
        (self.out / name).write_bytes(content)
        try:
            return self.read(self.out)
        finally:
            (self.out / name).write_bytes(self.whole[name])


def _report(out: Path) -> object:
    return as_json(page_of(entries_of(read_runs([out])), {}))


def _load(out: Path) -> object:
    """What loading and resuming a run read."""
    return (
        stored_versions(out),
        finished(out),
        read_rounds(out),
        read_clients(out),
        InputFormat.from_json(read_facts(out)),
    )


def _ledger(out: Path) -> object:
    found = read_ledger(out)
    Ledger.from_json(found)
    return list(ledger_lines(found))


class _Personal:
    """A client's model, which depends on the server's; the recipe is read once."""

    def __init__(self, out: Path):
        self.run = TrainedRun(out)

    def __call__(self, out: Path) -> object:
        self.run.__dict__.pop("_server", None)  # what it has read before
        return self.run.personal(0)


class _Lock:
    def __init__(self, folder: Path):
        self.folder = folder / "locked"
        self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, data: bytes) -> None:
        (self.folder / ".lock").write_bytes(data)
        RunLock(self.folder).release()


class _Model:
    def __init__(self, path: Path):
        self.path = path

    def __call__(self, data: bytes) -> object:
        self.path.write_bytes(data)
        model = load_model(self.path)
        return model(torch.zeros(1, *model.form.shape, dtype=torch.uint8))


class _Checkpoints:
    """Checkpoints whose checksums are right, whatever they say."""

    def __init__(self, folder: Path, whole: dict[str, bytes], ledger: bytes):
        self.folder = folder / "checkpoints"
        self.folder.mkdir(parents=True, exist_ok=True)
        history = [json.loads(line) for line in whole["metrics.jsonl"].splitlines()]
        notes = {"task": "x", "seconds": 1.0, "history": history, "ledger": json.loads(ledger)}
        self.parts = {"model.weight": torch.ones(2, 3)}
        stores = {"memory": ClientStore(2**20), "remembered": ClientStore(2**20)}
        stores["memory"][0] = stores["memory"][2] = self.parts
        Checkpoints(self.folder).save(2, {"state/model.weight": torch.ones(2, 3)}, stores, notes)
        self.path = self.folder / "round-000002.json"
        self.said = json.loads(self.path.read_bytes())["checkpoint"]
        self.shard = self.folder / "round-000002-clients-000.safetensors"
        self.manifest, self.tensors = json.dumps(self.said).encode(), self.shard.read_bytes()
        self.whole = self.path.read_bytes()

    def with_manifest(self, data: bytes) -> object:
        """The manifest says what the input says."""
        try:
            said: Any = json.loads(data)
            data = json.dumps({"sha256": _sha256(json.dumps(said)), "checkpoint": said}).encode()
        except (ValueError, RecursionError):
            pass
        self.path.write_bytes(data)
        try:
            return self.load()
        finally:
            self.path.write_bytes(self.whole)

    def with_tensors(self, data: bytes) -> object:
        """A file of clients' memories is the input, and the manifest agrees with it."""
        self.shard.write_bytes(data)
        said = self.said | {"files": dict(self.said["files"])}
        said["files"][self.shard.name] = {
            **said["files"][self.shard.name], "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()
        }  # fmt: skip
        self.path.write_bytes(json.dumps({"sha256": _sha256(json.dumps(said)), "checkpoint": said}).encode())
        try:
            return self.load()
        finally:
            self.shard.write_bytes(self.tensors)
            self.path.write_bytes(self.whole)

    def load(self) -> object:
        stores = {"memory": ClientStore(2**20), "remembered": ClientStore(2**20)}
        checkpoint, server = Checkpoints(self.folder).load(stores, "cpu", lambda client: signature(self.parts))
        notes = checked_notes(checkpoint, self.folder.parent)
        return Ledger.from_json(notes["ledger"]), server
