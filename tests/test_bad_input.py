"""Whatever a user gives that cannot be: one message that names it, exit code 2, no traceback, nothing half-written."""

import bz2
import gzip
import pickle
import sys
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_origin

import numpy as np
import pytest
import yaml
from PIL import Image
from using import refused

from fedloom import cli
from fedloom.config.recipe import Recipe
from fedloom.data.sources.idx import FashionMnist

X = np.random.default_rng(0).integers(0, 256, (24, 8, 8), dtype=np.uint8)
Y = np.arange(24) % 3
TINY = ["--rounds", "1", "--clients", "3"]


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(FashionMnist, "also", ())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


# What a case writes before the command runs.


def npz(path="own.npz", cut=None, **arrays):
    def write():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **({"x": X, "y": Y} | arrays))
        if cut is not None:
            Path(path).write_bytes(Path(path).read_bytes()[:cut])

    return write


def text(path, content):
    def write():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def picture(path, size=(8, 8)):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (9, 9, 9)).save(path)


def mixed_sizes():
    picture("pics/a/1.png")
    picture("pics/b/2.png", (9, 8))


def damaged_picture():
    picture("pics/a/1.png")
    picture("pics/b/2.png")
    Path("pics/b/2.png").write_bytes(Path("pics/b/2.png").read_bytes()[:40])


def uneven_folders():
    picture("pics/a/1.png")
    picture("pics/b/c/2.png")


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def mnist(**changed):
    """MNIST's four files in d/, some of them other than they should be."""

    def write():
        files = {
            "train-images-idx3-ubyte": idx(np.zeros((12, 8, 8))), "train-labels-idx1-ubyte": idx(np.arange(12) % 10),
            "t10k-images-idx3-ubyte": idx(np.zeros((4, 8, 8))), "t10k-labels-idx1-ubyte": idx(np.arange(4)),
        }  # fmt: skip
        for name, content in changed.items():
            key = next(k for k in files if k.startswith(name.replace("_", "-")))
            del files[key]
            key += ".gz" if content[:2] == b"\x1f\x8b" else ""
            files[key] = content
        for name, content in files.items():
            text(f"d/mnist/{name}", content)()

    return write


def swapped_mnist():
    mnist()()
    images, labels = Path("d/mnist/train-images-idx3-ubyte"), Path("d/mnist/train-labels-idx1-ubyte")
    images.rename("x")
    labels.rename(images)
    Path("x").rename(labels)


CIFAR = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]})


def cifar(batch, meta=None):
    def write():
        for number in range(1, 6):
            text(f"d/cifar-10-batches-py/data_batch_{number}", CIFAR)()
        text("d/cifar-10-batches-py/test_batch", batch)()
        text("d/cifar-10-batches-py/batches.meta", meta or pickle.dumps({"label_names": list("abcdefghij")}))()

    return write


def usps(lines):
    def write():
        for name in ("usps.bz2", "usps.t.bz2"):
            text(f"d/usps/{name}", bz2.compress(lines.encode()) if isinstance(lines, str) else lines)()

    return write


def recipe(values):
    return text("r.yaml", values if isinstance(values, (bytes, str)) else yaml.safe_dump(values))


LETTERS = "abcdefghijklmnopqrstuvwxyz"
LAUGHS = "seed: [&a [x, x]" + "".join(f", &{b} [*{a}, *{a}]" for a, b in pairwise(LETTERS)) + "]"

NESTED = "a: &a {x: 1}\n" + "".join(f"{b}: &{b} {{l: *{a}, r: *{a}}}\n" for a, b in pairwise(LETTERS))


def own(*more):
    return ["run", *TINY, "--data", "own.npz", "--partition", "iid", *more]


def digits(*more):
    return ["run", *TINY, "--data", "digits", "--set", "data.limit=120", *more]


def original(name):
    return ["run", *TINY, "--data", name, "--data-dir", "d", "--partition", "iid"]


def taken():
    text("mine/recipe.yaml", "seed: 1")()


FILES = {
    # one's own archives
    "npz: truncated": (npz(cut=300), own(), ["own.npz", "cannot be read"]),
    "npz: not one": (text("own.npz", b"hello"), own(), ["own.npz", "cannot be read"]),
    "npz: empty file": (text("own.npz", b""), own(), ["own.npz", "cannot be read"]),
    "npz: pickled objects": (npz(x=np.array([len], dtype=object)), own(), ["own.npz", "plain arrays"]),
    "npz: no labels": (lambda: np.savez("own.npz", x=X), own(), ["own.npz", "has no 'y'", "it must have x and y"]),
    "npz: a label below zero": (
        npz(y=Y - 1, classes=np.array(["a", "b", "c"])), own(), ["label -1 of sample 0 is out of range"]),
    "npz: a label above the classes": (npz(classes=np.array(["a"])), own(), ["label 2 of sample 2", "for 1 classes"]),
    "npz: missing values": (npz(x=np.full((24, 4), np.nan)), own(), ["24 of 24 samples contain NaN"]),
    "npz: texts for images": (npz(x=Y.astype(str)), own(), ["x must be numbers", "convert it"]),
    "npz: images of no known shape": (npz(x=X.reshape(24, 2, 4, 8)), own(), ["x has shape", "must be [N, H, W]"]),
    "npz: fewer labels than images": (npz(y=Y[:5]), own(), ["y must be 24 labels"]),
    "npz: halves for labels": (npz(y=Y / 2), own(), ["labels must be whole numbers or texts"]),
    "npz: no images": (npz(x=X[:0], y=Y[:0]), own(), ["it has no samples"]),
    "npz: images without pixels": (npz(x=X[:, :0]), own(), ["own.npz", "x has shape [24, 0, 8]", "without values"]),
    "npz: groups that do not fit": (npz(groups=np.zeros(3)), own(), ["3 groups for 24 samples"]),
    "npz: a group without a name": (
        npz(groups=Y, group_names=np.array(["a"])), own(), ["group 2 of sample 2 is out of range"]),
    "npz: test images of another size": (
        lambda: np.savez("own.npz", x_train=X, y_train=Y, x_test=X[:, :4], y_test=Y),
        own(), ["x_train and x_test differ"]),
    "npz: one class name too long a list": (npz(classes=np.zeros((2, 2))), own(), ["own.npz", "classes"]),
    "npz: a single class": (npz(y=Y * 0), own(), ["its only class is '0'", "at least two classes"]),
    "a file of another kind": (text("own.txt", "1,2"), [*digits()[:6], "own.txt"], ["a file must be an .npz"]),
    "a table without a label": (text("own.csv", "a,b\n1,2\n"), [*digits()[:6], "own.csv"], ["data.label=b"]),
    # folders of pictures
    "pictures of mixed sizes": (
        mixed_sizes, ["run", "--data", "pics"], ["a/1.png is 8×8", "b/2.png is 9×8", "set data.size"]),
    "a damaged picture": (damaged_picture, ["run", "--data", "pics"], ["pics/b/2.png: cannot be read as an image"]),
    "a text as a picture": (text("pics/a/1.png", "hi"), ["run", "--data", "pics"], ["a/1.png: cannot be read"]),
    "folders of uneven depth": (uneven_folders, ["run", "--data", "pics"], ["expected class/picture or"]),
    "an empty folder": (lambda: Path("pics").mkdir(), ["run", "--data", "pics"], ["there are no pictures in it"]),
    "natural clients without folders": (
        npz(), ["run", "--data", "own.npz", "--partition", "natural"], ["natural", "no clients or styles"]),
    # original files
    "idx: truncated": (
        mnist(train_images=idx(np.zeros((12, 8, 8)))[:-9]), original("mnist"), ["train-images", "promises"]),
    "idx: images and labels swapped": (swapped_mnist, original("mnist"), ["mnist", "do not match"]),
    "idx: no idx": (mnist(t10k_labels=b"<html>404</html>"), original("mnist"), ["t10k-labels", "is not an IDX file"]),
    "idx: damaged gzip": (
        mnist(t10k_labels=gzip.compress(idx(np.arange(4)))[:-9]), original("mnist"), ["t10k-labels", "cannot be read"]),
    "idx: a label out of range": (
        mnist(t10k_labels=idx(np.array([1, 2, 3, 77]))), original("mnist"), ["label 77", "out of range"]),
    "idx: fewer labels": (mnist(train_labels=idx(np.zeros(3))), original("mnist"), ["[12, 8, 8]", "[3]"]),
    "idx: test images of another size": (
        mnist(t10k_images=idx(np.zeros((4, 5, 5)))), original("mnist"), ["mnist", "[8, 8]", "[5, 5]"]),
    "cifar: truncated": (cifar(b"\x80\x04abc"), original("cifar10"), ["test_batch", "cannot be read"]),
    "cifar: a pickle that runs something": (
        cifar(pickle.dumps(len)), original("cifar10"), ["test_batch", "builtins.len, which is not allowed"]),
    "cifar: a batch without data": (cifar(pickle.dumps({"labels": [1]})), original("cifar10"), ["has no 'data'"]),
    "cifar: meta and batch swapped": (
        cifar(pickle.dumps({"label_names": list("abcdefghij")})), original("cifar10"), ["test_batch", "has no 'data'"]),
    "cifar: class names that are no list": (
        cifar(CIFAR, pickle.dumps({"label_names": 3})),
        original("cifar10"), ["batches.meta", "label_names"]),
    "usps: not bzip2": (usps(b"hello"), original("usps"), ["usps.bz2", "cannot be read"]),
    "usps: cut off": (usps(bz2.compress(b"1 1:2")[:-4]), original("usps"), ["usps.bz2", "cannot be read"]),
    "usps: no libsvm": (usps("1 1:2 x"), original("usps"), ["line 1", "libsvm"]),
    "usps: a pixel too many": (usps("1 257:2"), original("usps"), ["line 1", "libsvm"]),
    "usps: a label out of range": (usps("99 1:2"), original("usps"), ["label 98", "out of range"]),
    "usps: a pixel that is not a number": (usps("1 1:nan"), original("usps"), ["usps.bz2", "line 1"]),
    "files that are not there": (None, original("cifar10"), ["cifar10", "data folder d", "get it with: "]),
    "a data folder that is a file": (text("d", "x"), original("mnist"), ["data folder d", "get it with"]),
    # recipes
    "recipe: not there": (None, ["run", "nowhere.yaml"], ["recipe 'nowhere.yaml' cannot be read"]),
    "recipe: a folder": (lambda: Path("r.yaml").mkdir(), ["run", "r.yaml"], ["cannot be read: Is a directory"]),
    "recipe: not UTF-8": (recipe(b"caf\xe9: 1"), ["run", "r.yaml"], ["cannot be read", "not UTF-8"]),
    "recipe: not YAML": (recipe(b"data: ["), ["run", "r.yaml"], ["is not YAML"]),
    "recipe: control characters": (recipe(b"seed: 1\x00"), ["run", "r.yaml"], ["is not YAML"]),
    "recipe: a call": (recipe(b"!!python/object:os.system {}"), ["run", "r.yaml"], ["is not YAML"]),
    "recipe: a list": (recipe([1]), ["run", "r.yaml"], ["must be a mapping of sections, not list"]),
    "recipe: empty": (recipe(b""), ["run", "r.yaml"], ["is empty"]),
    "recipe: billions of laughs": (
        recipe(LAUGHS), ["run", "r.yaml"], ["r.yaml", "its aliases expand to", "the maximum is 50,000"]),
    "recipe: a mapping of laughs": (
        recipe(NESTED), ["run", "r.yaml"], ["r.yaml", "its aliases expand to", "the maximum is 50,000"]),
    "recipe: an alias of itself": (recipe("seed: &a [*a]"), ["run", "r.yaml"], ["r.yaml", "its aliases expand to"]),
    "recipe: a seed of 5,000 digits": (
        recipe(f"seed: {'9' * 5000}"), ["run", "r.yaml"], ["r.yaml", "a number has 5000 digits", "the maximum is 40"]),
    "--set: a seed of 5,000 digits": (None, digits("--set", f"seed={'9' * 5000}"), ["--set seed=", "5000 digits"]),
    "recipe: a day that is none": (recipe("seed: 2020-13-45"), ["run", "r.yaml"], ["r.yaml", "cannot be", "month"]),
    "recipe: a switch that is none": (recipe("seed: !!bool maybe"), ["run", "r.yaml"], ["r.yaml", "YAML", "maybe"]),
    "recipe: half of a character": (recipe('seed: "\\ud800"'), ["run", "r.yaml"], ["r.yaml", "YAML", "utf-8"]),
    "recipe: a field twice": (recipe("seed: 1\nseed: 2"), ["run", "r.yaml"], ["r.yaml", "'seed' is there twice"]),
    "recipe: a date for a name": (recipe("2020-01-01: 4"), ["run", "r.yaml"], ["r.yaml", "is not a field name"]),
    "recipe: two million characters": (
        recipe("seed: 0" + " " * 2 * 10**6), ["run", "r.yaml"], ["r.yaml", "more than 1,048,576 characters"]),
    "recipe: nested too deeply": (recipe(b"[" * 5000), ["run", "r.yaml"], ["r.yaml", "YAML"]),
    "recipe: a date for a seed": (recipe(b"seed: 2020-01-01"), ["run", "r.yaml"], ["seed = ", "whole number"]),
    # impossible runs
    "rounds = 0": (None, digits("--rounds", "0"), ["training.rounds = 0: must be at least 1"]),
    "a fraction that selects nobody": (None, digits("--fraction", "0"), ["training.fraction = 0", "above 0"]),
    "a fraction of less than half a client": (None, digits("--fraction", "0.01"), ["training.fraction = 0.01", "3 "]),
    "more clients than samples": (npz(), own("--clients", "25"), ["25", "24", "clients"]),
    "more clients than samples, skewed": (
        npz(), ["run", "--data", "own.npz", "--clients", "30", "--rounds", "1"], ["30", "24", "clients"]),
    "a client with no data": (
        npz(), ["run", "--data", "own.npz", "--clients", "3", "--partition", "pathological:9"], ["pathological"]),
    "more shards than samples": (npz(), own("--partition", "shards:20"), ["shards:20"]),
    "no official test set": (npz(), own("--set", "data.split=official"), ["official", "use pooled:0.75"]),
    "no groups to resample": (npz(), own("--set", "data.resample=true"), ["resample", "no groups"]),
    "no domains": (npz(), own("--partition", "domain:2"), ["domain"]),
    "more answers than clients": (
        None, digits("--set", "training.min_clients=9"), ["training.min_clients = 9", "3 of 3"]),
    "a time limit where it cannot be kept": (
        None, digits("--engine", "inline", "--set", "engine.client_timeout=3"),
        ["engine.client_timeout = 3", "'inline'", "processes"]),
    "faults that exceed one": (
        None, digits("--set", "faults.drop=0.7", "--set", "faults.nan=0.7"), ["faults = 1.4", "at most 1"]),
    "Adam's betas": (
        None, digits("--set", "training.optimizer={name: adam, betas: [0.9, 1.0]}"),
        ["training.optimizer.betas", "below 1"]),
    "a model too large for memory": (
        None, digits("--set", "model={name: mlp, hidden: 3000000, features: 3000000}"),
        ["model.name = 'mlp'", "GB", "smaller"]),
    "a model that cannot even be counted": (
        None, digits("--set", "model={name: mlp, hidden: 10000000000000000000}"), ["model"]),
    "images too small for the model": (None, digits("--model", "cnn2", "--set", "data.size=4"), ["cnn2", "at least"]),
    "images larger than memory": (npz(), own("--set", "data.size=1000000"), ["data.size = 1000000", "GB"]),
    "crops larger than the image": (None, digits("--set", "data.augment=[crop:99999]"), ["data.augment", "crop"]),
    "a GPU that is not there": (
        None, digits("--set", "engine.device=cuda", "--engine", "inline"), ["engine.device = 'cuda'"]),
    "lanes without a GPU": (None, digits("--engine", "lanes"), ["engine.name = 'lanes' needs an NVIDIA GPU"]),
    "styles with different classes": (
        npz(), ["run", "--data", "own.npz+digits", "--rounds", "1"], ["cannot be combined", "3 and 10 classes"]),
    # where it goes
    "a run folder that is taken": (taken, digits("--out", "mine"), ["out = 'mine' already holds a run"]),
    "a run folder inside a file": (text("f", "x"), digits("--out", "f/run"), ["out = 'f/run' cannot be created"]),
    "a run folder that is a file": (text("f", "x"), digits("--out", "f"), ["out = 'f'", "choose another"]),
    "a name of half the alphabet": (None, digits("--out", "x" * 300), ["out = ", "cannot be created"]),
    # the command
    "seeds that are none": (None, ["compare", "--seeds", "0,x"], ["--seeds: 'x' is not a seed"]),
    "no methods": (None, ["compare", "--methods", ""], ["method"]),
    "a setting without a value": (None, digits("--set", "seed"), ["--set seed: write field=value"]),
    "a picture that cannot be": (None, ["data", "plot", "--to", "no/x.png"], ["--to no/x.png: cannot be written"]),
}  # fmt: skip

# Every field of a recipe, wrong in turn.
WRONG = {
    "method.name": ("fedavgg", "did you mean 'fedavg'"), "method.mu": (3, "fedavg has none"),
    "data.name": ("digitz", "did you mean 'digits'"), "data.dir": (3, "a path"), "data.size": (1, "at least 4"),
    "data.channels": (1, "at least 3"), "data.limit": (0, "at least 1"), "data.clients": (0, "at least 1"),
    "data.partition": ("dirichlet:-1", "above 0"),
    "data.split": ("pooled:2", "between 0 and 1"), "data.minimum": (0, "at least 1"),
    "data.newcomers": (-1, "at least 0"), "data.resample": (7, "true or false"), "data.augment": (["x"], "choose"),
    "data.views": (["x"], "choose"), "data.normalise": ("haf", "did you mean 'half'"), "data.seed": ("x", "whole"),
    "data.on_bad": ("skipp", "did you mean 'skip'"), "data.label": (3, "must be text"),
    "data.client": (3, "must be text"),
    "data.mean": (["x"], "number"), "data.std": ([0], "above 0"),
    "data.seconds": (0, "above 0"), "data.mels": (1, "at least 4"),
    "model.name": ("mpl", "did you mean 'mlp'"), "model.hidden": (0, "at least 1"), "model.head": (3, "must be text"),
    "model.weights": (3, "must be text"), "model.freeze": (3, "must be a list"),
    "model.lora.rank": (0, "at least 1"), "model.lora.alpha": (0, "above 0"),
    "model.lora.layers": (3, "must be a list"), "model.project": (0, "at least 1"),
    "model.networks": (3, "must be a list"), "model.by_client": (3, "must be a mapping"),
    "objective.name": ("simclrr", "did you mean 'simclr'"),
    "training.rounds": (-1, "at least 1"), "training.fraction": (1.5, "at most 1"),
    "training.epochs": (-1, "at least 0"), "training.batch_size": (0, "at least 1"),
    "training.schedule": ("cosin", "cosine"), "training.patience": (0, "at least 1"),
    "training.min_clients": (0, "at least 1"), "training.on_error": ("skp", "did you mean 'skip'"),
    "training.optimizer.name": ("adamm", "did you mean 'adam'"), "training.optimizer.lr": (-1, "above 0"),
    "training.optimizer.momentum": (1, "below 1"), "training.optimizer.weight_decay": (-1, "at least 0"),
    "training.optimizer.betas": ([2, 0.9], "below 1"), "training.optimizer.keep": ("x", "true or false"),
    "training.optimizer.eps": (0, "above 0"), "training.optimizer.alpha": (1, "below 1"),
    "training.optimizer.clip": (0, "above 0"), "training.optimizer.decay_norms": ("x", "true or false"),
    "training.warmup": (-1, "at least 0"),
    "evaluation.every": (0, "at least 1"), "evaluation.clients": (0, "at least 1"),
    "evaluation.distance": ("model.haed", "name a part that they keep"),
    "evaluation.summary": ("best", "median:10"), "evaluation.measure": ("los", "did you mean 'loss'"),
    "evaluation.metrics": (["aucc"], "did you mean 'auc'"),
    "engine.name": ("inlne", "did you mean 'inline'"), "engine.workers": (0, "at least 1"),
    "engine.device": ("gpu", "choices"), "engine.precision": ("fp8", "choose"),
    "engine.channels_last": ("x", "true or false"), "engine.deterministic": ("x", "true or false"),
    "engine.cohort": (0, "at least 1"),
    "engine.compile": ("x", "true or false"), "engine.client_timeout": (0, "above 0"),
    "engine.address": ("ray://head", "host:port"), "engine.worker_cpus": (0, "above 0"),
    "engine.worker_gpus": (-1, "at least 0"), "engine.lost_after": (0, "above 0"),
    "storage.memory_mb": (0, "at least 1"), "storage.checkpoint_every": (-1, "at least 0"),
    "storage.checkpoint_seconds": (-1, "at least 0"),
    "storage.personal_models": ("x", "true or false"), "storage.final_checkpoint": ("x", "true or false"),
    "faults.drop": (1.5, "at most 1"), "faults.crash": (-1, "at least 0"), "faults.raises": ("x", "a number"),
    "faults.nan": (2, "at most 1"), "faults.lost": (-1, "at least 0"),
    "faults.slow": (2, "at most 1"), "faults.slow_seconds": (-1, "at least 0"),
    "robust.rule": ("x", "geometric"), "robust.clip": (0, "above 0"), "robust.trim": (0.7, "below 0.5"),
    "robust.attackers": (-1, "at least 0"), "robust.momentum": (1, "below 1"), "robust.bucket": (0, "at least 1"),
    "attack.portion": (2, "at most 1"), "attack.target": (-1, "at least 0"), "attack.patch": (0, "at least 1"),
    "attack.kind": ("x", "signflip"), "attack.share": (2, "below 1"),
    "attack.strength": (-1, "above 0"), "privacy.clip": (0, "above 0"), "privacy.noise": (-1, "above 0"),
    "privacy.delta": (2, "below 1"), "privacy.sampling": ("x", "poisson"),
    "secure.threshold": (0.5, "above 0.5"), "secure.bits": (16, "32"), "secure.range": (0, "above 0"),
    "wire.up": ("fp61", "topk:0.05"), "wire.down": ("topk:0.1", "bf16"),
    "seed": (-1, "at least 0"), "out": (3, "a path"), "log": ("tensorbord", "did you mean 'tensorboard'"),
}  # fmt: skip


def leaves_nothing(capsys, monkeypatch, arguments):
    """The one message of a command that must end in 2 and leave nothing behind."""
    before = files()
    said = refused(capsys, monkeypatch, *arguments)
    assert len(said) < 2000
    assert files() == before
    return said


def files():
    return sorted(path for path in Path().rglob("*") if path.parts[0] != "cache")  # matplotlib keeps its fonts there


@pytest.mark.parametrize("case", FILES)
def test_bad_input_is_one_message_and_exit_code_2(case, capsys, monkeypatch):
    write, arguments, words = FILES[case]
    if write is not None:
        write()
    said = leaves_nothing(capsys, monkeypatch, arguments)
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize("field", WRONG)
def test_every_field_wrong_in_turn_is_named_with_its_value_and_a_remedy(field, capsys, monkeypatch):
    value, remedy = WRONG[field]
    said = leaves_nothing(
        capsys, monkeypatch, ["run", "--set", f"{field}={yaml.safe_dump(value, default_flow_style=True)}"]
    )
    assert ("dataset" if field == "data.name" else field.split(".")[-1]) in said
    assert str(value[0] if isinstance(value, list) else value) in said
    assert remedy in said


def test_no_field_of_the_recipe_is_missing_here():
    def fields(model, prefix=""):
        for name, field in model.model_fields.items():
            several = get_origin(field.annotation) in (tuple, dict)  # of sections
            kinds = () if several else (field.annotation, *get_args(field.annotation))  # a section may be missing
            section = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
            if section is not None and name != "objective":
                yield from fields(section, f"{prefix}{name}.")
            elif name != "objective":
                yield prefix + name

    assert set(fields(Recipe)) <= WRONG.keys()
    assert len(FILES) + len(WRONG) >= 60


def test_debug_shows_the_traceback(monkeypatch):
    npz(cut=300)()
    monkeypatch.setattr(sys, "argv", ["fedloom", "--debug", *own()])
    with pytest.raises(cli.UserError, match="cannot be read"):
        cli.main()


def test_a_run_that_cannot_go_on_is_one_message_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedloom", *digits("--set", "faults.drop=1")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 1
    assert "error: round 1: 0 of 3 clients answered (3 dropped)" in said.err
    assert "Traceback" not in said.err
