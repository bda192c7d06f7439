from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.core.federation import Federation
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


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The matplotlib figures that are drawn, to look at their texts and places."""
    from matplotlib.figure import Figure

    found: list = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (found.append(self), save(self, *a, **k)))
    return found


def test_the_caption_counts_all_samples_and_newcomers_separately(tmp_path: Path, drawn: list) -> None:
    dataset = make(10, 0)
    federation = federate(dataset, clients=10, partition="iid", newcomers=2, split="pooled:0.5:0.25", seed=0)
    plot_federation(dataset, federation, tmp_path / "who.png")
    (bars, dots) = drawn[0].axes
    assert (
        bars.texts[1].get_text()
        == "200 training + 100 validation + 100 test samples,\n10 classes, 8 clients + 2 newcomers"
    )
    assert dots.get_ylabel() == "class"


def test_few_clients_have_a_legend_whose_dots_do_not_touch(tmp_path: Path, drawn: list) -> None:
    dataset, every = make(2, 0), np.arange(80)
    held = Federation([every[::2], every[1:40:2], every[:10]], [every[:4]] * 3)  # 40, 20 and 5 samples of a class
    plot_federation(dataset, held, tmp_path / "who.png")
    drawn[0].canvas.draw()  # at the figure's resolution, not the file's
    (legend,) = drawn[0].legends
    dots = [handle.get_window_extent() for handle in legend.legend_handles]
    assert [text.get_text() for text in legend.get_texts()] == ["40 samples", "10 samples", "2 samples"]
    assert all(above.y0 > below.y1 + 5 for above, below in pairwise(dots))


def test_groups_that_are_the_clients_have_no_colours_of_their_own(tmp_path: Path, drawn: list) -> None:
    dataset = make(2, 3)
    federation = federate(dataset, clients=3, partition="natural", seed=0)
    assert federation.names == ("style 0", "style 1", "style 2")
    plot_federation(dataset, federation, tmp_path / "who.png")
    texts = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert not {"style 0", "style 1", "style 2"}.intersection(texts)
    plot_federation(dataset, federate(dataset, clients=6, partition="domain:2", seed=0), tmp_path / "who.png")
    texts = [text.get_text() for text in drawn[1].legends[0].get_texts()]
    assert texts[:3] == ["style 0", "style 1", "style 2"]
