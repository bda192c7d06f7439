"""A finished run, used from its folder alone: every method's models answer as they did in the run."""

import numpy as np
import pytest
from tiny import tiny_run
from torch.nn.functional import cross_entropy

import fedloom
from fedloom.methods import REGISTRY, get, hyperparameters

ADDED = ["fedavg+ft", "fedavg+svm", "fedper+logreg", "fedprox+mlp", "fedrep+probe", "apfl+probe"]


def images_of(task, samples):
    """As a camera gives them: uint8, channels last."""
    return task.dataset.images[samples].permute(0, 2, 3, 1).numpy()


def score(model, task, samples):
    """Right answers, and the summed cross-entropy as a run has it."""
    logits, y = model(images_of(task, samples)), task.dataset.labels[samples]
    return int((logits.argmax(1) == y).sum()), float(cross_entropy(logits, y, reduction="sum"))


@pytest.mark.parametrize("method", [*sorted(REGISTRY), *ADDED])
def test_every_method_s_models_answer_as_in_the_run(method, tmp_path):
    short = {
        name: 3 for name in ("head_epochs", "head_steps", "style_epochs") if name in hyperparameters(type(get(method)))
    }
    run = tiny_run(
        {"name": method, **short}, out=str(tmp_path / "run"), training__rounds=2, evaluation__every=2, seed=4
    )
    loaded = fedloom.load(tmp_path / "run")  # without the data
    assert len(loaded.clients) == run.task.clients
    for row in loaded.clients:
        right, loss = score(loaded.personal(row["client"]), run.task, run.task.federation.test[row["client"]])
        assert (row["client"], right) == (row["client"], sum(row["right"]))
        assert loss == pytest.approx(row["loss"], rel=1e-4)
    if run.method.has_global:
        everybody = np.concatenate(run.task.federation.test)
        right, _ = score(loaded.global_model(), run.task, everybody)
        assert right / len(everybody) == pytest.approx(run.history[-1]["global_accuracy"])
