"""Separation scores by hand, and what real runs give to look at."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_run
from torch import nn

import fedloom
from fedloom.inference.trained_run import TrainedRun
from fedloom.models import split_model
from fedloom.report.page.insight import Insights
from fedloom.report.page.layers import compare_layers
from fedloom.report.page.maps import _within, in_the_plane, silhouette
from fedloom.report.page.png import write_pngs
from fedloom.report.page.report import write_report
from fedloom.report.page.runs import entries_of, read_runs


def test_separation_by_hand():
    """Cosine distances 0 within a class and 1 between: silhouette 1; the other way round: −1/2 and below."""
    z = np.array([[1.0, 0], [2, 0], [0, 1], [0, 3]])
    assert silhouette(z, np.array([0, 0, 1, 1])) == pytest.approx(1)
    assert silhouette(z, np.array([0, 1, 0, 1])) == pytest.approx(-0.5)
    assert silhouette(z, np.array([0, 0, 0, 0])) is None
    assert silhouette(z, np.array([0, 1, 2, 3])) is None


def test_within_clients_is_weighted_by_samples():
    z = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1], [1, 0], [1, 0], [0, 1], [0, 1], [1, 1]])
    labels = np.array([0, 0, 1, 1, 0, 1, 0, 1, 0])
    owners = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2])
    assert _within(z, labels, owners) == pytest.approx((4 * 1 + 4 * -0.5) / 8)


def test_neighbours_stay_neighbours_in_the_plane():
    rng = np.random.default_rng(0)
    z = np.concatenate([rng.normal(centre, 0.05, (20, 3)) for centre in ([1, 0, 0], [0, 1, 0])])
    plane = in_the_plane(z)
    assert plane.shape == (40, 2)
    assert silhouette(plane - plane.mean(0), np.repeat([0, 1], 20)) > 0.5


FIELDS = {
    "data": "digits", "data.limit": 300, "clients": 4, "rounds": 1, "engine": "inline", "model": "mlp", "epochs": 1,
    "partition": "dirichlet:1",
}  # fmt: skip


def insight(method, points=60, **fields):
    fedloom.run(method=method, out="run", **FIELDS | fields)
    entries = entries_of(read_runs([Path("run")]))
    (found,) = Insights(points).of(entries).values()
    return found


def test_a_shared_network_is_seen_once_and_clients_one_by_one():
    found = insight("fedavg")
    assert found.problem == ""
    assert [m.what for m in found.maps[:1]] == ["global"]
    assert all(m.what.startswith("client ") for m in found.maps[1:]) and len(found.maps) == 5
    assert found.maps[0].within is not None
    assert len(found.maps[0].x) == 60
    assert np.array(found.holdings.counts).shape == (4, 10)


def test_local_has_no_global_network():
    assert [m.what for m in insight("local").maps if not m.what.startswith("client ")] == ["clients' own"]


def test_styles_are_seen_where_there_are_style_networks():
    found = insight({"name": "fedstyle", "style_epochs": 1, "head_epochs": 1, "head_steps": 1})
    assert set(found.styles[0].names.values()) == {f"client {c}" for c in range(4)}
    assert {m.what for m in found.maps} >= {"global", "clients' own"}
    assert [one.what for one in found.styles] == ["styles", "stylised"]
    assert found.styles[0].labels == found.styles[1].labels
    assert found.styles[0].x != found.styles[1].x


def cka(a, b):
    """Linear CKA from the Gram matrices (Kornblith et al., Eq. 3)."""
    h = np.eye(len(a)) - 1 / len(a)
    k, other = h @ (a @ a.T) @ h, h @ (b @ b.T) @ h
    return np.sum(k * other) / np.sqrt(np.sum(k * k) * np.sum(other * other))


def test_layers_of_clients_networks_are_compared_pair_by_pair_on_the_same_samples():
    fedloom.run(method="local", out="run", **FIELDS)
    trained = TrainedRun(Path("run"))
    images = trained.task.dataset.inputs[:50]
    models = [trained.personal(client) for client in (0, 1, 2)]
    found = compare_layers(models, images)
    assert found.names == ["relu1", "relu2", "representation"]
    z = [model.features(images).numpy().astype(float) for model in models]
    each = [cka(z[a], z[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert found.pairs == 3
    assert found.mean[-1] == pytest.approx(np.mean(each), abs=1e-5)
    assert found.std[-1] == pytest.approx(np.std(each), abs=1e-5)
    assert found.mean[1] == pytest.approx(found.mean[-1]), "the last layer is the representation"
    assert compare_layers([models[0]] * 2, images) is None


class Blocks(nn.Module):
    """A network whose layers have the same names in two blocks, and a recurrent layer, which returns its state too."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.one = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.two = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.memory = nn.GRU(8, 8, batch_first=True)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(self.memory(self.two(self.one(x))[:, None])[0][:, 0])


def test_layers_of_a_network_of_ones_own_have_their_dotted_names():
    networks = [split_model(Blocks(), head="fc", taps=("one.2", "two.1", "memory")) for _ in range(2)]
    models = [SimpleNamespace(parts=nn.ModuleDict({"model": n}), features=n.extractor) for n in networks]
    assert compare_layers(models, torch.rand(50, 1, 8, 8)).names == ["one.2", "two.1", "representation"]


def test_the_report_has_layers_only_of_methods_whose_clients_have_networks_of_their_own(tmp_path):
    fedloom.compare(methods=["fedavg", "local", "fedper"], out="both", **FIELDS)
    page = write_report([Path("both")], tmp_path / "report.html", points=20)
    (section,) = (section for section in page.sections if section.name == "layers")
    (figure,) = section.figures
    assert [marks.name for marks in figure.marks] == ["local"]
    assert [path.name for path in write_pngs(page, tmp_path) if "layers" in path.name] == ["layers-cka.png"]


def test_what_was_not_kept_is_told_and_the_rest_shown():
    found = insight("fedper", **{"storage.personal_models": False})
    assert "storage.personal_models was false" in found.problem
    assert [m.what for m in found.maps] == ["global"]
    assert found.holdings is not None


def test_data_that_are_not_there_are_told(tmp_path):
    tiny_run("fedavg", out=str(tmp_path / "run"))  # its data were made in Python: nobody finds them again
    (found,) = Insights().of(entries_of(read_runs([tmp_path / "run"]))).values()
    assert found.problem and found.holdings is None
