"""FEMNIST: handwritten digits and letters by writer, from the JSON files that LEAF makes."""

from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np
import torch
from pydantic import with_config
from typing_extensions import TypedDict

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import CHECKED, decoding, parse_json, read_bytes
from fedloom.data.sources.source import Source

SIDE = 28
COST = 12
"""Bytes of memory that one byte of LEAF's JSON takes: a number of 4 to 18 characters is a reference and a float."""
REMEDY = "make it again with LEAF's preprocess.sh"


@with_config(CHECKED)
class Samples(TypedDict):
    """The samples of a writer."""

    x: list[list[float]]
    y: list[int]


@with_config(CHECKED)
class File(TypedDict):
    """The part of LEAF's JSON files that is read."""

    users: list[str]
    user_data: dict[str, Samples]


class Femnist(Source):
    """FEMNIST in `femnist/train/*.json` and `femnist/test/*.json`, or `femnist/all_data/*.json`, as LEAF writes them.

    Natural clients are the writers. LEAF's grey values (0 to 1) become bytes. With train/ and test/, the latter is the
    official test set.
    """

    name = "femnist"
    description = "FEMNIST: handwritten digits and letters of up to 3,597 writers, 28×28 grey (LEAF)"
    classes = tuple(digits + ascii_uppercase + ascii_lowercase)
    layouts = (("femnist/train", "femnist/test"), ("femnist/all_data",))
    command = (
        "git clone https://github.com/TalwalkarLab/leaf && cd leaf/data/femnist && ./preprocess.sh -s niid --sf 0.05 "
        "-k 0 -t sample && mkdir -p {folder}/femnist && cp -r data/train data/test {folder}/femnist"
    )

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read all JSON files of the first layout that is there."""
        layout = self.layout(folder) or self.layouts[0]
        images: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        writers: list[str] = []
        test: list[bool] = []
        for part in layout:
            files = sorted((folder / part).glob("*.json"))
            if not files:
                raise UserError(f"{folder / part}: there are no .json files in it; {REMEDY}")
            for file in files:
                for writer, x, y in read_leaf(file, len(self.classes)):
                    images.append(x)
                    labels.append(y)
                    writers += [writer] * len(y)
                    test += [part.endswith("test")] * len(y)
        names = tuple(sorted(set(writers)))
        number = {name: group for group, name in enumerate(names)}
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(np.concatenate(images)),
            labels=torch.from_numpy(np.concatenate(labels)),
            test=torch.tensor(test),
            classes=self.classes,
            groups=torch.tensor([number[writer] for writer in writers]),
            group_names=names,
        )


def read_leaf(path: Path, classes: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Read a JSON file of LEAF: for each writer with samples, the name, uint8 [N, 1, 28, 28] and labels [N].

    Raises:
        UserError: The file is damaged or too large.
    """
    with decoding(path, "LEAF's JSON", REMEDY):
        refuse_without_room(COST * path.stat().st_size, str(path), "use a smaller --sf in LEAF's preprocess.sh", "it")
        content = parse_json(read_bytes(path, "LEAF's JSON", REMEDY), File, str(path), REMEDY)
    found = []
    for writer in content["users"]:
        data = content["user_data"].get(writer)
        if data is None or len(data["x"]) != len(data["y"]):
            raise UserError(f"{path}: the writer '{writer[:40]}' has no user_data with as many x as y; {REMEDY}")
        if not data["y"]:
            continue
        if any(len(row) != SIDE * SIDE for row in data["x"]):
            raise UserError(f"{path}: a picture of the writer '{writer[:40]}' has not {SIDE * SIDE} values; {REMEDY}")
        pixels, labels = np.array(data["x"], np.float32), np.array(data["y"])
        if not ((pixels >= 0) & (pixels <= 1)).all():
            raise UserError(f"{path}: grey values of the writer '{writer[:40]}' are not between 0 and 1; {REMEDY}")
        if not ((labels >= 0) & (labels < classes)).all():
            raise UserError(
                f"{path}: labels of the writer '{writer[:40]}' are not between 0 and {classes - 1}; {REMEDY}"
            )
        images = np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)
        found.append((writer, images, labels.astype(np.int64)))
    if not found:
        raise UserError(f"{path}: has no samples; {REMEDY}")
    return found
