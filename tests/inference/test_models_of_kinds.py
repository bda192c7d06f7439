"""Models of binary and multilabel runs: probabilities, files, export, and what needs one class."""

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import UserError
from fedloom.data import from_arrays
from fedloom.inference.adapt import adapt
from fedloom.inference.export import export

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 255, (240, 8, 8), np.uint8)
BRIGHT = np.stack([IMAGES[:, :4].mean((1, 2)) > 127, IMAGES[:, 4:].mean((1, 2)) > 127, IMAGES[:, 0, 0] > 127], 1)


@pytest.fixture(scope="module", params=["binary", "multilabel"])
def trained(request, tmp_path_factory):
    y = BRIGHT if request.param == "multilabel" else BRIGHT[:, 0]
    names = ["top", "bottom", "corner"] if request.param == "multilabel" else None
    out = tmp_path_factory.mktemp(request.param) / "run"
    fedloom.run(
        data=from_arrays(IMAGES, y.astype(int), classes=names), objective=request.param, method="fedper",
        partition="iid", clients=3, rounds=2, out=str(out),
    )  # fmt: skip
    return request.param, fedloom.load(out)


def test_probabilities_have_a_column_per_class_or_label(trained, tmp_path):
    kind, run = trained
    model = run.personal(1)
    logits, found = model(IMAGES[:7]), model.probabilities(IMAGES[:7])
    assert logits.shape == found.shape == (7, 2 if kind == "binary" else 3)
    if kind == "binary":
        assert torch.equal(logits[:, 0], torch.zeros(7))
        assert np.allclose(found[:, 1], logits[:, 1].sigmoid(), atol=1e-6) and np.allclose(found.sum(1), 1)
    else:
        assert np.allclose(found, logits.sigmoid(), atol=1e-6)
    model.save(str(tmp_path / "model.safetensors"))
    again = fedloom.load_model(tmp_path / "model.safetensors")
    assert np.array_equal(again.probabilities(IMAGES[:7]), found)


def test_an_exported_model_returns_the_same_logits(trained, tmp_path):
    _, run = trained
    assert export(run.personal(0), "torchscript", tmp_path / "model.pt") < 1e-5
    loaded = torch.jit.load(tmp_path / "model.pt")
    expected = run.personal(0)(IMAGES[:3])
    assert torch.allclose(loaded(torch.from_numpy(IMAGES[:3, ..., None])), expected, atol=1e-5)


def test_heads_for_newcomers_need_one_class(trained):
    kind, run = trained
    images, labels = torch.from_numpy(IMAGES[:60, None]), BRIGHT[:60, 0].astype(int)
    if kind == "binary":
        adapt(run.representation(), images, labels, ["dark", "bright"])
        return
    with pytest.raises(UserError, match="heads for newcomers need one class per sample"):
        adapt(run.representation(), images, labels, ["dark", "bright"])
