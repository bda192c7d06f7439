"""What is fuzzed: for each format valid inputs, how they are mutated, and the code that decodes them in fedloom."""

import bz2
import io
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedloom.config.loading import read_yaml
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message, MessageError, signature
from fedloom.core.scores import Scores
from fedloom.data import hub
from fedloom.data.decode import decode, open_picture
from fedloom.data.sources.cifar import Cifar100
from fedloom.data.sources.fed_heart import FedHeart
from fedloom.data.sources.femnist import Femnist
from fedloom.data.sources.har import Har
from fedloom.data.sources.idx import Mnist
from fedloom.data.sources.npz import read_npz
from fedloom.data.sources.omniglot import Omniglot
from fedloom.data.sources.recordings import read_recordings
from fedloom.data.sources.svhn import Svhn
from fedloom.data.sources.table import read_table
from fedloom.data.sources.usps import Usps
from tests.fuzz import mutate
from tests.fuzz.mutate import Mutate
from tests.fuzz.request_target import Requests, nested, request_seeds
from tests.fuzz.run_targets import run_targets

REFUSALS = (UserError, MessageError)
"""What a decoder may raise; anything else is a finding."""


@dataclass
class Target:
    """A format: `decode` gets a mutated input and raises one of `REFUSALS`, or takes it."""

    name: str
    seeds: Sequence[bytes]
    decode: Callable[[bytes], object]
    mutations: Sequence[Mutate] = field(default_factory=tuple)
    weight: float = 1.0
    """Share of the inputs, relative to the others."""

    def input(self, seed: int, number: int) -> bytes:
        """The input of this number: the same for the same seed, on every machine."""
        rng = Random(f"{seed} {self.name} {number}")
        data = rng.choice(self.seeds)
        if rng.random() < 0.02:
            return data
        chosen = rng.choice((mutate.plain, mutate.spliced(self.seeds), *self.mutations, *self.mutations))
        try:
            return chosen(rng, data)
        except Exception:  # the mutation is for another kind of seed
            return mutate.plain(rng, data)


def targets(folder: Path) -> dict[str, Target]:
    """All formats by name; `folder` is where they put their files."""
    requests = Target("requests", request_seeds(), Requests(folder), (nested,))
    found = [*_data(folder), *_text(folder), *_messages(), requests, *(Target(*rest) for rest in run_targets(folder))]
    return {target.name: target for target in found}


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
LABELS = np.arange(6) % 3


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{"x": PIXELS, "y": LABELS} | arrays)
    return file.getvalue()


def _idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def _saved(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    source = Image.fromarray(np.random.default_rng(1).integers(0, 256, (9, 11, 3), dtype=np.uint8))
    source = source.convert("I").convert("I;16") if mode == "I;16" else source.convert(mode)
    source.save(file, kind, **options)
    return file.getvalue()


def _matlab(compressed: bool) -> bytes:
    from scipy.io import savemat

    file = io.BytesIO()
    x = np.zeros((4, 4, 3, 2), np.uint8) + 7
    savemat(file, {"X": x, "y": np.array([[10], [3]], np.uint8)}, do_compression=compressed)
    return b"MATLAB 5.0 MAT-file".ljust(124) + file.getvalue()[124:]  # without the time


def _hdf5(**options: Any) -> bytes:
    import h5py

    file = io.BytesIO()
    with h5py.File(file, "w") as archive:
        for part, count in (("train", 3), ("test", 2)):
            archive.create_dataset(f"{part}/data", data=np.full((count, 256), 0.5, np.float32), **options)
            archive[f"{part}/target"] = np.arange(count)
    return file.getvalue()


def _batch(protocol: int) -> bytes:
    data = np.zeros((2, 3072), np.uint8) + 5
    return pickle.dumps({"data": data, "fine_labels": [0, 1], "batch_label": "x"}, protocol)


class Files:
    """Valid files in a folder, one of which is replaced by the input for each decoding."""

    def __init__(self, folder: Path, files: dict[str, bytes], read: Callable[[Path], object]):
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        self.folder, self.files, self.read = folder, files, read

    def __call__(self, name: str) -> Callable[[bytes], object]:
        """A decoder that puts its input in the place of this file."""

        def decode(data: bytes) -> object:
            (self.folder / name).write_bytes(data)
            return self.read(self.folder)

        return decode


def _data(folder: Path) -> Iterator[Target]:
    archive = Files(folder / "npz", {}, lambda root: read_npz(root / "own.npz"))
    (folder / "npz").mkdir(parents=True, exist_ok=True)
    full = _npz(classes=np.array(["a", "b", "c"]), groups=np.array(["u", "v"] * 3))
    split = _npz(x=PIXELS, x_train=PIXELS[..., None], y_train=LABELS, x_test=PIXELS[:2, ..., None], y_test=LABELS[:2])
    floats = _npz(x=PIXELS[..., 0] / 255, y=np.array(["a", "b"] * 3), clients=np.array([b"u", b"v"] * 3))
    deep = _npz(x=PIXELS.astype(np.uint16) * 9, y=LABELS * 1000.0)
    seeds = [_npz(), full, split, _npz(x=np.asfortranarray(PIXELS)), floats, deep]
    yield Target("npz", seeds, archive("own.npz"), [mutate.in_zip], 3)
    four = {
        "train-images-idx3-ubyte": _idx(PIXELS), "train-labels-idx1-ubyte": _idx(LABELS),
        "t10k-images-idx3-ubyte": _idx(PIXELS[:2]), "t10k-labels-idx1-ubyte": _idx(LABELS[:2]),
    }  # fmt: skip
    mnist = Files(
        folder / "idx", {f"mnist/{name}": data for name, data in four.items()}, lambda r: Mnist().read(r, None)
    )
    images = "train-images-idx3-ubyte"
    yield Target("idx", [four[images]], mnist(f"mnist/{images}"), [mutate.numbered], 6)
    from gzip import compress

    zipped = {f"mnist/{name}.gz": compress(data, mtime=0) for name, data in four.items()}
    packed = Files(folder / "gz", zipped, lambda root: Mnist().read(root, None))
    yield Target("gz", [zipped[f"mnist/{images}.gz"]], packed(f"mnist/{images}.gz"), [mutate.in_gzip], 5)
    mats = {f"svhn/{part}_32x32.mat": _matlab(True) for part in ("train", "test")}
    svhn = Files(folder / "mat", mats, lambda root: Svhn().read(root, None))
    seeds = [_matlab(True), _matlab(False)]
    yield Target("mat", seeds, svhn("svhn/train_32x32.mat"), [mutate.in_matlab, mutate.numbered], 5)
    usps = Files(folder / "hdf5", {"usps/usps.h5": b""}, lambda root: Usps().read(root, None))
    yield Target("hdf5", [_hdf5(), _hdf5(compression="gzip")], usps("usps/usps.h5"), [mutate.numbered], 0.6)
    batches = {"train": _batch(2), "test": _batch(2), "meta": pickle.dumps({"fine_label_names": ["a", "b"]}, 2)}
    named = {f"cifar-100-python/{name}": data for name, data in batches.items()}
    cifar = Files(folder / "cifar", named, lambda root: Cifar100().read(root, None))
    yield Target("cifar", [_batch(p) for p in (0, 2, 4, 5)], cifar("cifar-100-python/train"), [mutate.numbered], 4)
    lines = b"7 1:-1 2:1 256:0.5\n10 1:0.25\n3\n"
    texts = Files(
        folder / "libsvm", dict.fromkeys(("usps/usps.bz2", "usps/usps.t.bz2"), bz2.compress(lines)),
        lambda root: Usps().read(root, None),
    )  # fmt: skip
    tokens = mutate.inside(bz2.decompress, bz2.compress, mutate.tokens)
    plain = mutate.inside(bz2.decompress, bz2.compress)
    yield Target("libsvm", [bz2.compress(lines)], texts("usps/usps.bz2"), [plain, tokens], 1.5)
    for kind, seeds, weight in (
        ("png", [_saved("PNG"), _saved("PNG", "L"), _saved("PNG", "P"), _saved("PNG", "I;16")], 3),
        ("jpeg", [_saved("JPEG"), _saved("JPEG", "L"), _saved("JPEG", progressive=True)], 3),
        ("gif", [_saved("GIF"), _saved("GIF", interlace=1)], 3),
        ("other pictures", [*map(_saved, ("BMP", "WEBP", "TIFF", "PPM")), _saved("TIFF", compression="tiff_lzw")], 3),
    ):  # fmt: skip
        (folder / kind).mkdir(parents=True, exist_ok=True)
        special = [mutate.in_png] if kind == "png" else [mutate.numbered]
        yield Target(kind, seeds, partial(_picture, folder / kind / "1.png"), special, weight)
    grey = np.random.default_rng(1).integers(0, 2**16, (9, 11)).astype(np.uint16)
    seeds = [_stored("PNG", grey), _stored("TIFF", grey), _stored("TIFF", grey / np.float32(9)), _stored("PPM", grey)]
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    special = [mutate.in_png, mutate.numbered]
    yield Target("deep pictures", seeds, partial(_picture, folder / "deep/1.png"), special, 2)
    yield from _others(folder)
    yield Target("hub", [_saved("PNG"), _saved("JPEG")], _hub, [mutate.in_png], 1)


def _stored(kind: str, values: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values.astype(np.int32) if kind == "PPM" else values).save(file, kind)
    return file.getvalue()


TABLE = b"a,b,when,label\n1,x,2,0\n2.5,y,3,1\n-3e4,x,4,1\n"
LEAF = {"users": ["u", "v"], "user_data": {u: {"x": [[0.5] * 784] * 2, "y": [0, 61]} for u in "uv"}}


def _others(folder: Path) -> Iterator[Target]:
    """Tables, recordings and federations."""
    import pandas
    from scipy.io import wavfile

    texts = [TABLE, b'\xef\xbb\xbf"a b";label\n"1";"u"\n', TABLE.replace(b"\n", b"\r\n"), b"y,t\n0,2020-01-01\n1,NA\n"]
    tables = Files(folder / "csv", {}, lambda root: read_table(root / "t.csv"))
    (folder / "csv").mkdir(parents=True, exist_ok=True)
    yield Target("csv", texts, tables("t.csv"), [mutate.tokens], 2)
    frame, packed = pandas.read_csv(io.BytesIO(TABLE)), []
    for compression in (None, "snappy", "gzip"):
        file = io.BytesIO()
        frame.to_parquet(file, compression=compression)
        packed.append(file.getvalue())
    stored = Files(folder / "parquet", {}, lambda root: read_table(root / "t.parquet"))
    (folder / "parquet").mkdir(parents=True, exist_ok=True)
    yield Target("parquet", packed, stored("t.parquet"), [mutate.numbered], 0.5)
    waves, tone = [], np.sin(np.arange(2000) / 9)
    for values in ((tone * 3e4).astype(np.int16), tone.astype(np.float32), (tone * 99 + 128).astype(np.uint8)):
        file = io.BytesIO()
        wavfile.write(file, 8000, values)
        waves.append(file.getvalue())
    sounds = Files(folder / "wav", {"a/1.wav": waves[0], "b/1.wav": waves[0]}, read_recordings)
    yield Target("wav", waves, sounds("a/1.wav"), [mutate.numbered], 2)
    yield from _federations(folder)


def _federations(folder: Path) -> Iterator[Target]:
    line = b"63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,"
    rows = b"".join(line + b"%d\n" % (number % 2) for number in range(8)) + b"38,1,1,105,?,0,0,166,0,2.8,1,?,?,2\n"
    files = dict.fromkeys(FedHeart.layouts[0], rows)
    heart = Files(folder / "heart", files, lambda root: FedHeart().read(root, None))
    yield Target("heart", [rows], heart(FedHeart.layouts[0][3]), [mutate.tokens], 0.5)
    leaf = json.dumps(LEAF).encode()
    written = Files(folder / "leaf", {"femnist/all_data/1.json": leaf}, lambda root: Femnist().read(root, None))
    yield Target("leaf", [leaf], written("femnist/all_data/1.json"), [mutate.in_json, mutate.tokens], 0.5)
    features, numbers = b" 2.5e-01" * 561 + b"\n", b"1\n2\n"
    parts = {file: features * 2 if "/X_" in file else numbers for file in Har.layouts[0]}
    har = Files(folder / "har", parts, lambda root: Har().read(root, None))
    yield Target("har", [features * 2], har(Har.layouts[0][0]), [mutate.tokens], 0.3)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        for drawer in (1, 2):
            writer.writestr(f"images_background/Greek/character01/0395_0{drawer}.png", _saved("PNG", "1"))
    drawn = Files(
        folder / "omniglot", {"omniglot/images_background.zip": b""}, lambda root: Omniglot().read(root, None)
    )
    yield Target("omniglot", [archive.getvalue()], drawn("omniglot/images_background.zip"), [mutate.in_zip], 0.5)


def _picture(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    return decode([str(path)], lambda _: open_picture(path), 8, workers=1)


class _Split:
    """A table of the hub with one row."""

    def __init__(self, data: bytes):
        self.row = {"image": {"bytes": data, "path": None}, "label": 0}

    def cast_column(self, name: str, kind: object) -> "_Split":
        return self

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: Any) -> Any:
        return self.row if isinstance(key, int) else [self.row[key]]


def _hub(data: bytes) -> object:
    library: Any = ModuleType("datasets")
    library.load_dataset = lambda repo, config: {"train": _Split(data), "test": _Split(data)}
    library.Image = lambda decode: None
    with _module("datasets", library):
        return hub.fetch(hub.Table("someone/something"), "x", ("a",), 8)


@contextmanager
def _module(name: str, module: ModuleType) -> Iterator[None]:
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


RECIPE = b"""seed: 1
method: {name: fedprox, mu: 0.1}
data: {name: digits, clients: 3, partition: iid, split: common}
model: {name: mlp, hidden: 8}
training:
  rounds: 2
  schedule: cosine
  optimizer: {name: adam, lr: 1e-3, betas: [0.9, 0.99]}
evaluation: {summary: "median:3"}
"""


def _text(folder: Path) -> Iterator[Target]:
    (folder / "yaml").mkdir(parents=True, exist_ok=True)
    as_json = json.dumps(read_yaml("demo")).encode()
    recipes = [RECIPE, b"a: &a [1, 2]\nb: [*a, *a]\n", as_json]
    mutations = [mutate.tokens, mutate.tokens, mutate.in_json]
    yield Target("yaml", recipes, partial(_recipe, folder / "yaml/r.yaml"), mutations, 1)
    given = [b"training.rounds=5", b"method.mu=0.1", b"training.optimizer={name: adam, betas: [0.9, 0.99]}", b"seed=3"]
    yield Target("--set", given, _assignment, [mutate.tokens], 1.5)


def _recipe(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    return Recipe.parse(read_yaml(path)).to_yaml()


BASE = Recipe.parse({"method": {"name": "fedprox"}, "model": {"name": "mlp"}})


def _assignment(data: bytes) -> object:
    return BASE.with_(data.decode("utf-8", "surrogateescape"))


TENSORS = {
    "model.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model.half": torch.ones(3, dtype=torch.bfloat16),
    "counts": torch.tensor([1, 2, 3]),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 5),
}


def _messages() -> Iterator[Target]:
    message = Message(TENSORS, client=4, samples=77)
    expected = signature(TENSORS)
    inner = [mutate.in_safetensors, mutate.in_own_header, mutate.numbered]
    yield Target("messages", [message.to_bytes()], lambda data: Message.from_bytes(data), inner, 14)
    yield Target(
        "expected messages", [message.to_bytes()], lambda d: Message.from_bytes(d, expected=expected), inner, 10
    )
    jobs = [
        Job("update", 3, message, 4, {"a": torch.ones(2)}).to_bytes(),
        Job("global", 1, message, clients=(0, 1)).to_bytes(),
    ]
    yield Target("jobs", jobs, lambda data: Job.from_bytes(data), inner, 10)
    from fedloom.core.failures import Failure

    scores = [Scores(3, [1, 2], [3, 4], 0.5)]
    results = [
        Result(3, message, {"a": torch.ones(2)}, scores=scores, loss=0.5).to_bytes(),
        Result(3, error=Failure("raised", "ValueError: x")).to_bytes(),
    ]
    yield Target("results", results, lambda data: Result.from_bytes(data), inner, 10)
    yield Target("envelopes", [*jobs, *results], _Envelopes(), inner, 3)


class _Envelopes:
    """Sealed jobs and results: signed by the right key with hostile content, or changed after they were signed."""

    def __init__(self) -> None:
        from fedloom.deploy.certificates import new_key

        self.key = new_key()
        self.public = self.key.public_key()

    def __call__(self, data: bytes) -> object:
        from flwr.app import ConfigRecord, RecordDict

        from fedloom.deploy.sealing import RECORD, opened, sealed

        rng = Random(data)
        content = sealed({"what": "job", "round": 1}, data, self.key)
        if rng.random() < 0.5:
            record: Any = dict(content.config_records[RECORD])
            name = rng.choice(list(record))
            old = record[name].encode() if isinstance(record[name], str) else record[name]
            new = mutate.plain(rng, old)
            record[name] = new.decode("utf-8", "replace") if isinstance(record[name], str) else new
            if rng.random() < 0.1:
                record.pop(rng.choice(list(record)))
            content = RecordDict({RECORD: ConfigRecord(record)})
        _, body = opened(content, self.public)
        return Job.from_bytes(body) if b"keep_model" in body else Result.from_bytes(body)
