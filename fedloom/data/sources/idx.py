"""IDX files, gzipped or not: MNIST, Fashion-MNIST and EMNIST."""

import gzip
import string
import zlib
from pathlib import Path

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.task import Dataset
from fedloom.data import hub
from fedloom.data.sources.source import Source


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array of an IDX file, `path` or `path`.gz."""
    if not path.exists():
        path = path.with_name(path.name + ".gz")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise UserError(f"{path}: is not an IDX file of bytes (it starts with {content[:4].hex(' ') or 'nothing'})")
    dims = content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4 : 4 + 4 * dims], ">u4"))
    expected = 4 + 4 * dims + int(np.prod(shape, dtype=np.int64))
    if len(shape) != dims or len(content) != expected:
        raise UserError(f"{path}: its header promises {expected} bytes, but it has {len(content)}")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape).copy()


class _Idx(Source):
    prefixes: tuple[str, str]
    """path of the training and of the test files up to '-images-idx3-ubyte'"""
    first_label = 0
    transposed = False

    def __init_subclass__(cls) -> None:
        if "prefixes" in cls.__dict__:
            kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
            cls.layouts = (tuple(f"{prefix}-{kind}" for prefix in cls.prefixes for kind in kinds),)
        super().__init_subclass__()

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Reads images and labels of both parts."""
        images, labels = [], []
        for prefix in self.prefixes:
            x = read_idx(folder / f"{prefix}-images-idx3-ubyte")
            y = read_idx(folder / f"{prefix}-labels-idx1-ubyte")
            if x.ndim != 3 or y.shape != x.shape[:1]:
                raise UserError(f"{folder / prefix}-*: images {list(x.shape)} and labels {list(y.shape)} do not match")
            images.append(x.transpose(0, 2, 1) if self.transposed else x)
            labels.append(y.astype(np.int64) - self.first_label)
        if images[0].shape[1:] != images[1].shape[1:]:
            sizes = " and ".join(str(list(x.shape[1:])) for x in images)
            raise UserError(
                f"{folder / self.prefixes[0]}-* and {self.prefixes[1]}-* differ in an image's size: {sizes}"
            )
        return Dataset(
            name=self.name,
            images=torch.from_numpy(np.concatenate(images)[:, None]),
            labels=torch.from_numpy(np.concatenate(labels)),
            test=torch.arange(sum(map(len, labels))) >= len(labels[0]),
            classes=self.classes,
        )


class Mnist(_Idx):
    """`mnist/`."""

    name = "mnist"
    description = "MNIST: 70,000 handwritten digits, 28×28 grey"
    classes = tuple(string.digits)
    prefixes = ("mnist/train", "mnist/t10k")
    command = (
        "curl --create-dirs --output-dir {folder}/mnist -O "
        "'https://ossci-datasets.s3.amazonaws.com/mnist/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte.gz'"
    )
    remote = hub.Table("ylecun/mnist")


class FashionMnist(_Idx):
    """`fashion-mnist/`, or where Debian's package puts it."""

    name = "fashion-mnist"
    description = "Fashion-MNIST: 70,000 pieces of clothing, 28×28 grey"
    classes = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
    prefixes = ("fashion-mnist/train", "fashion-mnist/t10k")
    command = (
        "curl --create-dirs --output-dir {folder}/fashion-mnist -O 'http://fashion-mnist.s3-website."
        "eu-central-1.amazonaws.com/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte.gz'"
        " (on Debian and Ubuntu also: apt-get install dataset-fashion-mnist)"
    )
    also = (Path("/usr/share/datasets"),)
    remote = hub.Table("zalando-datasets/fashion_mnist")


class _Emnist(_Idx):
    transposed = True
    command = (
        "curl -Lo emnist.zip https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
        " && unzip -j emnist.zip -d {folder}/emnist"
    )


def _parts(name: str) -> tuple[str, str]:
    return f"emnist/emnist-{name}-train", f"emnist/emnist-{name}-test"


LETTERS_OF_47 = string.ascii_uppercase + "abdefghnqrt"


class Emnist(_Emnist):
    """`emnist/`: the balanced part."""

    name = "emnist"
    description = "EMNIST balanced: 131,600 handwritten digits and letters, 28×28 grey"
    classes = tuple(string.digits + LETTERS_OF_47)
    prefixes = _parts("balanced")
    remote = hub.Files(
        "Royc30ne/emnist-balanced",
        tuple(
            f"emnist-balanced-{part}-{kind}-ubyte.gz"
            for part in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ),
        into="emnist",
    )


class EmnistLetters(_Emnist):
    """Labels are 1…26 in the files."""

    name = "emnist-letters"
    description = "EMNIST letters: 145,600 handwritten letters, upper and lower case together, 28×28 grey"
    classes = tuple(string.ascii_lowercase)
    prefixes = _parts("letters")
    first_label = 1
    remote = hub.Table("tanganke/emnist_letters", transposed=True)


class EmnistDigits(_Emnist):
    """The digits alone."""

    name = "emnist-digits"
    description = "EMNIST digits: 280,000 handwritten digits, 28×28 grey"
    classes = tuple(string.digits)
    prefixes = _parts("digits")


class EmnistByclass(_Emnist):
    """All of it, as uneven as people write."""

    name = "emnist-byclass"
    description = "EMNIST by class: 814,255 handwritten digits and letters, uneven, 28×28 grey"
    classes = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    prefixes = _parts("byclass")


class EmnistBymerge(_Emnist):
    """All of it, with the letters merged whose cases look alike."""

    name = "emnist-bymerge"
    description = "EMNIST by merge: 814,255 handwritten digits and letters, cases that look alike merged, 28×28 grey"
    classes = tuple(string.digits + LETTERS_OF_47)
    prefixes = _parts("bymerge")
