"""Fed-Heart-Disease: patients of four hospitals (UCI heart disease), prepared as by FLamby."""

import math
from pathlib import Path

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.reading import read_bytes
from fedloom.data.sources.source import Source

HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Budapest", "switzerland": "Switzerland", "va": "Long Beach"}
"""Names of the hospitals by the names of their files."""
COLUMNS = 14
DROPPED = (10, 11, 12)
"""Slope of the ST segment, vessels in fluoroscopy and thallium test: missing for most patients outside Cleveland."""
LEVELS = {2: (1, 2, 3, 4), 6: (0, 1, 2)}
"""Values of the categories: kind of chest pain, resting electrocardiogram. The first value is the reference."""
TRAINED, SEED = 0.66, 43
"""FLamby's share of training data and the seed of its division."""
MOST = 2**20
REMEDY = "download it again"


class FedHeart(Source):
    """Heart disease in `heart-disease/processed.*.data`, 740 patients without missing values, 13 inputs.

    The preparation is FLamby's (Ogier du Terrail et al., NeurIPS 2022): three columns with many missing values are
    dropped, then patients with missing values; two categories become 0/1 inputs without their first value; the label is
    whether there is any disease; each hospital's inputs are standardised with the mean and deviation of that hospital's
    training data. The official test set is FLamby's: 34% of each hospital, stratified by label where possible.
    """

    name = "fed-heart"
    description = "Fed-Heart-Disease: 740 patients of 4 hospitals, 13 numbers each; disease or not (UCI, FLamby)"
    classes = ("healthy", "disease")
    layouts = (tuple(f"heart-disease/processed.{hospital}.data" for hospital in HOSPITALS),)
    command = (
        "curl --create-dirs --output-dir {folder}/heart-disease -O "
        "'https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
        "processed.{{cleveland,hungarian,switzerland,va}}.data'"
    )
    inputs = "a table"
    takes = ()

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the four files."""
        x, y, test, groups = [], [], [], []
        for group, file in enumerate(self.layouts[0]):
            inputs, labels = read_hospital(folder / file)
            held_out = official_test(labels)
            inputs = _standardised(inputs, ~held_out)
            x.append(inputs)
            y.append(labels)
            test.append(held_out)
            groups.append(np.full(len(labels), group))
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(np.concatenate(x).astype(np.float32)),
            labels=torch.from_numpy(np.concatenate(y)),
            test=torch.from_numpy(np.concatenate(test)),
            classes=self.classes,
            groups=torch.from_numpy(np.concatenate(groups)),
            group_names=tuple(HOSPITALS.values()),
            notes=("inputs are standardised with FLamby's training patients; test on the others: data.split=official",),
        )


def read_hospital(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the patients of one file that have no missing values: inputs [N, 13] and labels [N] (0 or 1).

    Raises:
        UserError: The file is damaged.
    """
    text = read_bytes(path, "a table of patients", REMEDY, MOST).decode("ascii", "replace")
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != COLUMNS:
            raise UserError(f"{path}: line {number} has {len(cells)} values instead of {COLUMNS}; {REMEDY}")
        kept = [cell for place, cell in enumerate(cells) if place not in DROPPED]
        if "?" in kept:
            continue
        try:
            values = [float(cell) for cell in kept]
        except ValueError:
            values = [math.nan]
        if not all(abs(value) < 1e6 for value in values):
            raise UserError(f"{path}: line {number} has a value that is not a number; {REMEDY}")
        rows.append(values)
    if len(rows) < 4:
        raise UserError(f"{path}: has {len(rows)} patients without missing values, too few to divide; {REMEDY}")
    table = np.array(rows)
    columns = []
    for place in range(table.shape[1] - 1):
        if place not in LEVELS:
            columns.append(table[:, place])
            continue
        if not np.isin(table[:, place], LEVELS[place]).all():
            raise UserError(f"{path}: column {place + 1} must have the values {LEVELS[place]}; {REMEDY}")
    columns += [table[:, place] == level for place, levels in LEVELS.items() for level in levels[1:]]
    return np.stack(columns, axis=1).astype(np.float64), (table[:, -1] > 0).astype(np.int64)


def official_test(labels: np.ndarray) -> np.ndarray:
    """Return a mask of the samples that FLamby tests on: the same on every machine."""
    from sklearn.model_selection import train_test_split  # imported here: it takes a second

    counts = np.bincount(labels, minlength=2)
    stratify = labels if counts.min() > 2 else None
    _, test = train_test_split(
        np.arange(len(labels)), test_size=1 - TRAINED, train_size=TRAINED, random_state=SEED, stratify=stratify
    )
    mask = np.zeros(len(labels), bool)
    mask[test] = True
    return mask


def _standardised(inputs: np.ndarray, train: np.ndarray) -> np.ndarray:
    mean, deviation = inputs[train].mean(0), inputs[train].std(0, ddof=1)
    scaled: np.ndarray = (inputs - mean) / np.where(deviation > 1e-9, deviation, 1.0)
    return scaled
