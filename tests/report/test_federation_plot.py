from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data import Dataset, federate
from fedloom.report.federation_plot import plot_federation


def make(classes: int, styles: int) -> Dataset:
    count = 40 * classes
    return Dataset(
        "toy",
        torch.zeros(count, 1, 1, 1, dtype=torch.uint8),
        torch.arange(count) % classes,
        torch.zeros(count, dtype=torch.bool),
        tuple(f"class {i}" for i in range(classes)),
        torch.arange(count) // classes % styles if styles else None,
        tuple(f"style {i}" for i in range(styles)),
    )


@pytest.mark.parametrize(
    ("clients", "partition", "classes", "styles"),
    [(10, "dirichlet:0.3", 10, 0), (20, "domain:5", 10, 4), (20, "iid", 10, 4), (300, "iid", 47, 0)],
)
def test_a_federation_is_drawn_within_its_picture(
    tmp_path: Path, clients: int, partition: str, classes: int, styles: int
) -> None:
    dataset = make(classes, styles)
    federation = federate(dataset, clients=clients, partition=partition, newcomers=0.1, seed=0)
    plot_federation(dataset, federation, tmp_path / "who.png")
    pixels = np.asarray(Image.open(tmp_path / "who.png").convert("RGB"))
    assert 600 < pixels.shape[0] < 2200
    assert 1000 < pixels.shape[1] < 2800
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (edge == 255).all()
    colours = {tuple(colour) for colour in pixels.reshape(-1, 3)[::7]}
    assert len(colours) > 50
