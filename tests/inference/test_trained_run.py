"""A finished run, used from its folder alone: every method's models answer as they did in the run."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cohorts import alternately
from tiny import tiny_run, tiny_task
from torch.nn.functional import cross_entropy
from using import PIXELS

import fedloom
from fedloom import UserError
from fedloom.data import Federation
from fedloom.methods import METHODS as REGISTRY
from fedloom.methods import get, hyperparameters

ADDED = ["fedavg+ft", "fedavg+svm", "fedper+logreg", "fedprox+mlp", "fedrep+probe", "apfl+probe"]


def images_of(task, samples):
    """As a camera gives them: uint8, channels last."""
    return task.dataset.inputs[samples].permute(0, 2, 3, 1).numpy()


def score(model, task, samples):
    """Right answers, and the summed cross-entropy as a run has it."""
    logits, y = model(images_of(task, samples)), task.dataset.labels[samples]
    return int((logits.argmax(1) == y).sum()), float(cross_entropy(logits, y, reduction="sum"))


# A third of the methods here, all in `make slow`.
@pytest.mark.parametrize("method", alternately([*sorted(REGISTRY), *ADDED], first=2))
def test_every_method_s_models_answer_as_in_the_run(method, tmp_path):
    short = {
        name: 3 for name in ("head_epochs", "head_steps", "style_epochs") if name in hyperparameters(type(get(method)))
    }
    run = tiny_run(
        {"name": method, **short}, out=str(tmp_path / "run"), training__rounds=2, evaluation__every=2, seed=4
    )
    loaded = fedloom.load(tmp_path / "run")  # without the data
    assert len(loaded.client_rows) == run.task.clients
    for row in loaded.client_rows:
        right, loss = score(loaded.personal(row["client"]), run.task, run.task.federation.test[row["client"]])
        assert (row["client"], right) == (row["client"], sum(row["right"]))
        assert loss == pytest.approx(row["loss"], rel=1e-4)
    if run.method.has_global:
        everybody = np.concatenate(run.task.federation.test)
        right, _ = score(loaded.global_model(), run.task, everybody)
        assert right / len(everybody) == pytest.approx(run.history[-1]["global_accuracy"])


def test_a_run_tells_of_itself_and_its_data(runs: dict[str, Path]) -> None:
    run = fedloom.load(runs["fedavg"])
    assert run.recipe.method.name == "fedavg"
    assert run.summary is not None
    assert len(run.round_records) == run.summary["rounds"] == 3
    assert run.form.classes == tuple("0123456789")
    assert len(run.task.federation.newcomers) == 2
    mean = run.task.dataset.inputs[~run.task.dataset.test].double().div(255).mean()
    assert run.form.mean == pytest.approx([float(mean)], abs=0.02)  # measured, not one half


def test_images_may_come_in_any_layout(runs: dict[str, Path]) -> None:
    model = fedloom.load(runs["fedavg"]).personal(3)
    images = PIXELS[:5]
    expected = model(images[:, :, :, None])
    network = fedloom.load(runs["fedavg"]).personal(3).parts.model
    form = model.form
    by_hand = network(torch.from_numpy((images[:, None] / 255 - form.mean[0]) / form.std[0]).float())
    torch.testing.assert_close(expected, by_hand)
    for other in (images, images[:, None], torch.from_numpy(images), images[:, None] / 255):
        torch.testing.assert_close(model(other), expected)
    torch.testing.assert_close(model(images[2]), expected[2:3])
    torch.testing.assert_close(model.features(images), network.extractor(model.prepared(images)))


@pytest.mark.parametrize(
    ("images", "problem"),
    [(np.zeros((2, 9, 9, 1), np.uint8), r"shape \[2, 9, 9, 1\]: .* \[B, 8, 8, 1\]"), (np.zeros((2, 8, 8)) > 1, "bool")],
)
def test_images_that_do_not_fit_are_refused(runs: dict[str, Path], images: np.ndarray, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        fedloom.load(runs["fedavg"]).global_model()(images)


def test_models_that_are_not_there_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="clients 0 to 7"):
        fedloom.load(runs["fedavg"]).personal(8)
    with pytest.raises(UserError, match="no global classifier.*--client 3"):
        fedloom.load(runs["repper"]).global_model()(PIXELS[:1])
    with pytest.raises(UserError, match="shares no representation"):
        fedloom.load(runs["lgfedavg"]).global_model()
    with pytest.raises(UserError, match="holds no run"):
        fedloom.load(tmp_path)
    fedloom.run(
        method="local", data="digits", clients=2, rounds=1, out=tmp_path / "bare",
        **{"storage.personal_models": False, "data.limit": 100},
    )  # fmt: skip
    with pytest.raises(UserError, match="storage.personal_models was false"):
        fedloom.load(tmp_path / "bare").personal(0)
    (tmp_path / "bare" / "summary.json").unlink()
    with pytest.raises(UserError, match="not finished; resume it with: fedloom resume"):
        fedloom.load(tmp_path / "bare").personal(0)


def test_the_average_of_personal_models_is_their_weighted_mean(runs: dict[str, Path]) -> None:
    run = fedloom.load(runs["lgfedavg"])
    rows = [row for row in run.client_rows if not row["newcomer"]]
    weights = [run.personal(row["client"]).parts.model.extractor.fc1.weight for row in rows]
    mean = np.average([w.double().numpy() for w in weights], axis=0, weights=[row["train"] for row in rows])
    np.testing.assert_allclose(run.averaged().parts.model.extractor.fc1.weight.numpy(), mean, atol=1e-6)


def test_an_average_of_heads_is_the_global_model_and_nobody_s_own(tmp_path):
    run = tiny_run({"name": "fedper", "average_heads": True}, out=str(tmp_path / "run"), training__rounds=2)
    loaded = fedloom.load(tmp_path / "run")
    everybody = np.concatenate(run.task.federation.test)
    right, _ = score(loaded.global_model(), run.task, everybody)
    assert right / len(everybody) == pytest.approx(run.history[-1]["global_accuracy"])
    for row in loaded.client_rows:
        right, _ = score(loaded.personal(row["client"]), run.task, run.task.federation.test[row["client"]])
        assert right == sum(row["right"])


def test_a_representation_without_labels_has_a_classifier_for_each_style(tmp_path):
    task = tiny_task()
    half = torch.arange(len(task.dataset)) % 2
    dataset = replace(task.dataset, groups=half, group_names=("ink", "chalk"))
    order = [np.flatnonzero(half.numpy() == style) for style in (0, 1)]
    task = replace(task, dataset=dataset, federation=Federation([o[:60] for o in order], [o[60:] for o in order]))
    tiny_run(
        {"name": "fedavg+probe", "head_epochs": 3}, task=task, objective="simclr", out=str(tmp_path / "run"),
        training__fraction=1, training__rounds=1,
    )  # fmt: skip
    loaded = fedloom.load(tmp_path / "run")
    for style, samples in zip(("ink", "chalk"), task.federation.test, strict=True):
        right, _ = score(loaded.global_model(style), task, samples)
        assert right / len(samples) == pytest.approx(loaded.round_records[-1]["styles"][style])
    with pytest.raises(UserError, match="style = None.*chalk, ink"):
        loaded.global_model()


def test_a_run_of_a_gpu_is_loaded_where_there_is_none(runs, tmp_path):
    shutil.copytree(runs["fedavg"], tmp_path / "run")
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "  device: auto\n" in recipe
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.replace("  device: auto\n", "  device: cuda\n"))
    assert torch.equal(
        fedloom.load(tmp_path / "run").personal(0)(PIXELS[:3]), fedloom.load(runs["fedavg"]).personal(0)(PIXELS[:3])
    )


def test_other_data_than_the_run_s_are_refused(runs):
    with pytest.raises(UserError, match="the data differ from those that the run was started with"):
        _ = fedloom.load(runs["fedavg"], task=tiny_task()).task
