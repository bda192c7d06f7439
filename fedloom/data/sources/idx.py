"""IDX files, gzipped or not: MNIST, Fashion-MNIST and EMNIST."""

import gzip
import math
import string
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NoReturn, cast

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import CHUNK, decoding
from fedloom.data import hub
from fedloom.data.arrays import TooShortError, fill
from fedloom.data.sources.source import Source

REMEDY = "download it again"


class IdxFile:
    """An IDX file of bytes, `path` or `path`.gz, whose shape is read before its data."""

    def __init__(self, path: Path):
        self.path = path if path.exists() else path.with_name(path.name + ".gz")
        with self._decoding(), self._open() as stream:
            self.shape = self._shape(stream)

    def read_into(self, target: np.ndarray) -> None:
        """Read the values into an array of this shape, which may be a view."""
        start = 4 + 4 * len(self.shape)
        with self._decoding(), self._open() as stream:
            stream.read(start)
            try:
                fill(stream, target, np.dtype(np.uint8))
            except TooShortError:
                self._refuse(stream.tell())
            if more := stream.read(CHUNK):
                self._refuse(start + target.size + len(more))

    def _shape(self, stream: IO[bytes]) -> tuple[int, ...]:
        begin = stream.read(4)
        if len(begin) < 4 or begin[:3] != b"\0\0\x08":
            raise UserError(
                f"{self.path}: is not an IDX file of bytes (it starts with {begin.hex(' ') or 'nothing'}); {REMEDY}"
            )
        if not 1 <= begin[3] <= 3:
            raise UserError(f"{self.path}: has {begin[3]} dimensions, but images have 3 and labels 1; {REMEDY}")
        sizes = stream.read(4 * begin[3])
        if len(sizes) < 4 * begin[3]:
            raise UserError(f"{self.path}: its header promises {begin[3]} dimensions, but is incomplete; {REMEDY}")
        shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
        refuse_without_room(math.prod(shape), f"{self.path}: shape {list(shape)}", REMEDY, "it")
        return shape

    def _refuse(self, found: int) -> NoReturn:
        expected = 4 + 4 * len(self.shape) + math.prod(self.shape)
        raise UserError(f"{self.path}: its header promises {expected} bytes, but it has {found}; {REMEDY}")

    def _open(self) -> IO[bytes]:
        opened = gzip.open if self.path.suffix == ".gz" else open
        return cast(IO[bytes], opened(self.path, "rb"))

    def _decoding(self) -> AbstractContextManager[None]:
        return decoding(self.path, "an IDX file", REMEDY)


class _Idx(Source):
    prefixes: tuple[str, str]
    """Paths of the training and the test files, without '-images-idx3-ubyte'."""
    first_label = 0
    transposed = False

    def __init_subclass__(cls) -> None:
        if "prefixes" in cls.__dict__:
            kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
            cls.layouts = (tuple(f"{prefix}-{kind}" for prefix in cls.prefixes for kind in kinds),)
        super().__init_subclass__()

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read images and labels of both parts, directly into the dataset."""
        x, y = (
            [IdxFile(folder / f"{prefix}-{kind}") for prefix in self.prefixes]
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        for prefix, mine, theirs in zip(self.prefixes, x, y, strict=True):
            if len(mine.shape) != 3 or theirs.shape != mine.shape[:1]:
                raise UserError(
                    f"{folder / prefix}-*: images {list(mine.shape)} and labels {list(theirs.shape)} do not match; "
                    f"{REMEDY}"
                )
        if x[0].shape[1:] != x[1].shape[1:]:
            sizes = " and ".join(str(list(file.shape[1:])) for file in x)
            raise UserError(
                f"{folder / self.prefixes[0]}-* and {self.prefixes[1]}-* differ in an image's size: {sizes}"
            )
        first, count = x[0].shape[0], x[0].shape[0] + x[1].shape[0]
        _, height, width = x[0].shape
        refuse_without_room(count * (height * width + 9), f"{folder / self.prefixes[0]}-*", REMEDY)
        images = np.empty((count, *((width, height) if self.transposed else (height, width))), np.uint8)
        labels = np.empty(count, np.uint8)
        for part, mine, theirs in zip((slice(first), slice(first, None)), x, y, strict=True):
            mine.read_into(images[part].transpose(0, 2, 1) if self.transposed else images[part])
            theirs.read_into(labels[part])
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(images[:, None]),
            labels=torch.from_numpy(labels.astype(np.int64) - self.first_label),
            test=torch.arange(count) >= first,
            classes=self.classes,
        )


class Mnist(_Idx):
    """MNIST in `mnist/`."""

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
    """Fashion-MNIST in `fashion-mnist/`, or in the folder of Debian's package."""

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
    """EMNIST balanced, in `emnist/`."""

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
    """EMNIST letters, in `emnist/`; labels are 1…26 in the files."""

    name = "emnist-letters"
    description = "EMNIST letters: 145,600 handwritten letters, upper and lower case together, 28×28 grey"
    classes = tuple(string.ascii_lowercase)
    prefixes = _parts("letters")
    first_label = 1
    remote = hub.Table("tanganke/emnist_letters", transposed=True)


class EmnistDigits(_Emnist):
    """EMNIST digits, in `emnist/`."""

    name = "emnist-digits"
    description = "EMNIST digits: 280,000 handwritten digits, 28×28 grey"
    classes = tuple(string.digits)
    prefixes = _parts("digits")


class EmnistByclass(_Emnist):
    """EMNIST by class, in `emnist/`: all samples, with unequal class sizes."""

    name = "emnist-byclass"
    description = "EMNIST by class: 814,255 handwritten digits and letters, unequal class sizes, 28×28 grey"
    classes = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    prefixes = _parts("byclass")


class EmnistBymerge(_Emnist):
    """EMNIST by merge, in `emnist/`: all samples, with upper and lower case of similar letters merged."""

    name = "emnist-bymerge"
    description = "EMNIST by merge: 814,255 handwritten digits and letters, similar cases merged, 28×28 grey"
    classes = tuple(string.digits + LETTERS_OF_47)
    prefixes = _parts("bymerge")
