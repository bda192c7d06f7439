"""RepPer: two stages, heads of four kinds, and what leaves a client."""

import numpy as np
import pytest
import torch
from references import reference
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from tiny import same_state, tiny_run, tiny_task
from torch import nn

from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import METHODS as REGISTRY
from fedloom.methods import get, hyperparameters
from fedloom.methods.addons.classifiers import write_linear

pytestmark = pytest.mark.full


def lane_of(method, **training):
    return Workspace(Setup(tiny_task(), method, Training(batch_size=16, **training), seed=0))


@pytest.mark.parametrize("projection", ["none", "mlp"])
def test_only_the_extractor_and_the_optional_projection_leave_in_stage_one(projection):
    lane = lane_of(get("repper", projection=projection))
    message = perform(lane, Job("update", 1, Message(lane.downward()), client=0)).message
    assert {name.split(".")[0] for name in message} == ({"model", "projection"} if projection == "mlp" else {"model"})
    assert all(name.startswith(("model.extractor.", "projection.")) for name in message)


def test_nothing_leaves_in_stage_two_and_the_extractor_stays():
    lane = lane_of(get("repper"))
    down = Message(lane.downward())
    result = perform(lane, Job("evaluate", 1, down, client=0, keep_model=True))
    assert result.message is None
    assert result.memory is None
    assert set(result.personal) == {"classifier.linear.weight", "classifier.linear.bias"}
    assert all(torch.equal(lane.parts.named_tensors()[name], value) for name, value in down.items())


def test_clients_that_never_took_part_get_a_head_too():
    run = tiny_run("repper", training__fraction=0.2, training__rounds=1)
    assert run.history[-1]["clients"] == 1
    assert len(run.scores) == 6


def test_heads_can_differ_between_clients():
    run = tiny_run({"name": "repper", "head": "linear", "heads": {0: "svm", 1: "mlp"}})
    everywhere = {kind: tiny_run({"name": "repper", "head": kind}) for kind in ("linear", "svm", "mlp")}
    losses = {kind: [s.loss for s in r.scores] for kind, r in everywhere.items()}
    mixed = [s.loss for s in run.scores]
    assert mixed[0] == losses["svm"][0]
    assert mixed[2:] == losses["linear"][2:]
    assert mixed[1] not in (losses["linear"][1], losses["svm"][1])


HEADS = ["linear", "mlp", "svm", "logreg"]
METHODS = sorted(set(REGISTRY) - {"repper", "fedstyle", "centralized"})


@pytest.mark.parametrize(("method", "head"), [(m, HEADS[i % 4]) for i, m in enumerate(METHODS)])  # every head often
def test_heads_work_on_the_extractor_of_any_method(method, head):
    short = {"training__rounds": 1}
    plain, headed = reference(method, **short), tiny_run(f"{method}+{head}", **short)
    assert same_state(plain.state, headed.server.state)
    assert plain.history[-1]["global_accuracy"] == headed.history[-1]["global_accuracy"]
    assert [s.loss for s in plain.scores] != [s.loss for s in headed.scores]


@pytest.mark.parametrize("head", ["linear", "mlp", "svm", "logreg"])
@pytest.mark.parametrize("method", ["repper", "fedstyle"])
def test_an_added_head_changes_the_head_and_no_other_hyperparameter(method, head):
    plain, headed = get(method), get(f"{method}+{head}")
    differing = {n for n in hyperparameters(type(plain)) if getattr(plain, n) != getattr(headed, n)}
    assert differing == (set() if head == "linear" else {"head"})


def features(classes, n=60, width=5, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.choice(classes, n)
    return torch.from_numpy(rng.normal(size=(n, width)) + 2 * y[:, None] * np.eye(width)[0]).float(), torch.from_numpy(
        y
    )


@pytest.mark.parametrize("head", ["svm", "logreg"])
@pytest.mark.parametrize("classes", [[1, 3], [0, 2, 5]])
def test_a_written_head_answers_as_scikit_learn_does_and_never_names_an_absent_class(head, classes):
    z, y = features(classes)
    linear = nn.Linear(5, 7)
    write_linear(linear, head, z, y)
    fitted = (LinearSVC(random_state=0, max_iter=10_000) if head == "svm" else LogisticRegression(max_iter=1000)).fit(
        z.double(), y
    )
    fresh = torch.randn(500, 5) * 3
    assert np.array_equal(linear(fresh).argmax(1).numpy(), fitted.predict(fresh.double().numpy()))
    assert set(linear(fresh).argmax(1).tolist()) <= set(classes)


@pytest.mark.parametrize("head", ["svm", "logreg"])
def test_with_one_class_the_answer_is_constant(head):
    z, _ = features([0, 1])
    linear = nn.Linear(5, 7)
    write_linear(linear, head, z, torch.full((len(z),), 4))
    assert set(linear(torch.randn(50, 5)).argmax(1).tolist()) == {4}


def test_the_loss_is_eq_5_on_normalised_representations():
    from fedloom.core.client import Client
    from fedloom.losses import supcon

    lane = lane_of(get("repper"))
    lane.load({}, None)
    client = Client(lane, id=0, round=1, job="update", samples=lane.setup.task.samples(0), first=True)

    class Fixed:
        views = (torch.rand(8, 1, 8, 8), torch.rand(8, 1, 8, 8))
        y = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])

    lane.parts.eval()
    z = nn.functional.normalize(client.model.extractor(torch.cat(Fixed.views)), dim=1)
    expected = supcon(z, torch.cat([Fixed.y, Fixed.y]), 0.1, "in")
    torch.testing.assert_close(lane.setup.method.loss(client, Fixed), expected)
