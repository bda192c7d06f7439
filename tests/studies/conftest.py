"""A CIFAR-10 of 300 images."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from fedloom.studies import results


@pytest.fixture
def no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without stored results, outside a checkout."""
    monkeypatch.setattr(results, "SHIPPED", tmp_path / "package" / "studies" / "stored")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        labels = rng.integers(0, 10, 50)
        images = np.clip(labels[:, None] * 25 + rng.normal(0, 20, (50, 3072)), 0, 255).astype(np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": images, "labels": labels.tolist()}, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"c{i}" for i in range(10)]}, protocol=2))
    return tmp_path / "data"
