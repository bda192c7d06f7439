"""FedStyle: style first, then infusion; labels are never read in training; two linear evaluations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_dataset, tiny_run, tiny_task, without_labels
from torch.nn.functional import normalize

from fedloom import objectives
from fedloom.config.recipe import Recipe
from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.data.augment.images import sobel
from fedloom.inference.trained_run import TrainedRun
from fedloom.losses import supcon
from fedloom.methods import get
from fedloom.objectives import OBJECTIVES, Views

UNSUPERVISED = [name for name, kind in OBJECTIVES.items() if not kind.supervised]


def styled_task(objective="simclr", **options):
    """Two styles, two clients each, with a test set per style."""
    dataset = tiny_dataset(samples=240)
    groups = torch.arange(240) % 2
    images = torch.where(groups[:, None, None, None] == 1, 255 - dataset.inputs, dataset.inputs)
    dataset = replace(dataset, inputs=images, groups=groups, group_names=("plain", "inverted"))
    own = [np.flatnonzero(groups.numpy() == g) for g in (0, 1)]
    train = [own[0][:40], own[0][40:80], own[1][:40], own[1][40:80]]
    tests = [own[0][80:], own[1][80:]]
    federation = Federation(train, [tests[0], tests[0], tests[1], tests[1]])
    return replace(tiny_task(**options), dataset=dataset, federation=federation, objective=objectives.get(objective))


def lane_of(objective="simclr", task=None, **parameters):
    parameters = {"style_epochs": 1} | parameters
    task = task or styled_task(objective)
    return Workspace(Setup(task, get("fedstyle", **parameters), Training(batch_size=16), seed=0))


@pytest.mark.parametrize("objective", UNSUPERVISED)
def test_labels_are_never_read_in_training(objective):
    task = without_labels(styled_task(objective))
    for method in ("fedstyle", "fedavg+probe", "fedprox+probe"):
        setup = Setup(task, get(method), Training(batch_size=16), seed=0)
        lane = Workspace(setup)
        down = Message(lane.downward())
        first = perform(lane, Job("update", 1, down, client=0))
        perform(lane, Job("update", 2, Message(dict(first.message)), client=0, memory=first.memory))
        with pytest.raises(AssertionError, match="a label was read"):
            perform(lane, Job("evaluate", 2, down, client=0, memory=first.memory))


@pytest.mark.parametrize("objective", UNSUPERVISED)
def test_the_content_network_travels_and_all_else_stays(objective):
    lane = lane_of(objective)
    result = perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    assert all(n.startswith(("model.extractor.", "model.head.")) for n in result.message)
    kept = {name.split(".")[0] for name in result.memory}
    assert {"style", "style_projector", "generator"} <= kept
    slow = {name for name in result.memory if name.startswith("model.target.")}
    assert bool(slow) == (objective in ("byol", "moco"))
    assert not any(name.startswith(("model.extractor", "model.head")) for name in result.memory)


def test_style_is_extracted_once_before_the_first_round_and_frozen_after():
    lane = lane_of()
    down = Message(lane.downward())
    first = perform(lane, Job("update", 1, down, client=0)).memory
    again = perform(lane, Job("update", 2, down, client=0, memory=first)).memory
    style = [n for n in first if n.startswith("style")]
    assert any(not torch.equal(first[n], lane.initial[n]) for n in style)
    assert all(torch.equal(first[n], again[n]) for n in style)
    assert any(not torch.equal(first[n], again[n]) for n in first if n.startswith("generator"))


def test_a_literal_reading_leaves_the_generator_alone():
    lane = lane_of(train_generator=False)
    memory = perform(lane, Job("update", 1, Message(lane.downward()), client=0)).memory
    assert all(torch.equal(memory[n], lane.initial[n]) for n in memory if n.startswith("generator"))


class Fixed:
    """A batch that is always the same."""

    size = 8
    plain = torch.rand(8, 1, 8, 8)
    image = torch.rand(8, 1, 8, 8)
    normalise = staticmethod(lambda image: 2 * image - 1)
    views = (torch.rand(8, 1, 8, 8), torch.rand(8, 1, 8, 8))


def client_in(lane):
    lane.load({}, None)
    lane.parts.eval()
    return Client(lane, id=0, round=1, job="update", samples=lane.setup.task.samples(0), first=True)


def test_the_style_loss_is_eq_2():
    lane = lane_of()
    client = client_in(lane)
    z = (
        normalize(client.style_projector(client.style(torch.cat([Fixed.plain, 2 * sobel(Fixed.image) - 1]))), dim=1)
        .detach()
        .double()
        .numpy()
    )
    styles = np.repeat([0, 1], 8)
    terms = 0.0
    for i in range(16):
        others = [n for n in range(16) if n != i]
        logits = np.array([z[i] @ z[n] / 0.07 for n in others])
        log_z = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        terms += sum(log_z - z[i] @ z[j] / 0.07 for j in others if styles[j] == styles[i])
    loss = lane.setup.method.style_loss(client, Fixed).item()
    printed = lane_of(anchors="sum").setup.method.style_loss(client, Fixed).item()
    assert abs(printed - terms / 15) < 1e-5 * terms / 15  # Eq. 2 sums over 2B anchors with 1/(2B − 1)
    assert abs(loss - supcon(torch.from_numpy(z), torch.from_numpy(styles), 0.07, "out").item()) < 1e-5


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_the_loss_is_eq_3(lam):
    lane = lane_of(lam=lam)
    client = client_in(lane)
    objective = lane.setup.task.objective
    h1, h2 = (client.model.extractor(v) for v in Fixed.views)
    s, edges = client.style(Fixed.plain), client.style(2 * sobel(Fixed.image) - 1)
    first = client.generator(torch.cat([h1, s], 1))
    second = client.generator(torch.cat([h2, edges], 1))
    expected = objective.contrast(client.model, Views((h1, h2)))
    expected = expected + lam * objective.contrast(client.model, Views((first, second)))
    torch.testing.assert_close(lane.setup.method.loss(client, Fixed), expected)


def test_personal_features_are_eq_4():
    lane = lane_of()
    client = client_in(lane)
    x = Fixed.plain
    content = client.model.extractor(x)
    expected = content + client.generator(torch.cat([content, client.style(x)], 1))
    torch.testing.assert_close(lane.setup.method.represent(client, x), expected)
    plain = lane_of(stylised=False)
    torch.testing.assert_close(plain.setup.method.represent(client, x), content)


def test_personalisation_tunes_generator_and_classifier_and_nothing_else():
    lane = lane_of()
    down = Message(lane.downward())
    memory = perform(lane, Job("update", 1, down, client=0)).memory
    personal = perform(lane, Job("evaluate", 1, down, client=0, memory=memory, keep_model=True)).personal
    tuned = {n for n in personal if n.split(".")[0] in ("classifier", "generator")}
    assert any(not torch.equal(personal[n], memory[n]) for n in tuned if n in memory)
    for name, value in personal.items():
        if name.startswith(("style", "own")):
            assert torch.equal(value, memory[name])
        assert not name.startswith("model.")


@pytest.mark.parametrize("method", ["fedstyle", "fedavg+probe"])
def test_personal_features_are_those_of_the_clients_own_network(method):
    lane = Workspace(Setup(styled_task(), get(method), Training(batch_size=16), seed=0))
    result = perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    for name, value in result.message.items():
        if name.startswith("model.extractor."):
            assert torch.equal(result.memory["own" + name[len("model.extractor") :]], value)
    shared = Workspace(Setup(styled_task(), get(method, personal_network="global"), Training(batch_size=16), seed=0))
    kept = perform(shared, Job("update", 1, Message(shared.downward()), client=0)).memory
    assert not any(name.startswith("own") for name in kept)


@pytest.mark.parametrize("head", ["linear", "mlp", "svm", "logreg"])
def test_the_chosen_head_is_the_one_that_answers(head):
    method = {"name": "fedstyle", "style_epochs": 1, "head": head}
    run = tiny_run(method, task=styled_task(), training__rounds=1, training__fraction=1.0)
    assert run.history[-1]["personal_accuracy"] > 0.6
    assert run.history[-1]["global_accuracy"] > 0.6


def test_without_labels_a_head_of_ones_own_choice_judges_the_global_network_too():
    run = tiny_run("fedavg+svm", task=styled_task(), training__rounds=1, objective="simclr")
    assert run.method.head == "svm"
    assert run.history[-1]["global_accuracy"] > 0.6


def test_local_has_no_global_accuracy_without_labels_either():
    assert tiny_run("local", task=styled_task(), objective="simclr").history[-1]["global_accuracy"] is None


@pytest.mark.parametrize("objective", ["byol", "moco"])
def test_a_late_joiners_slow_copy_starts_where_the_network_is(objective):
    lane = Workspace(Setup(styled_task(objective), get("fedavg+probe"), Training(batch_size=16, epochs=0), seed=0))
    moved = {n: t + 1 if t.is_floating_point() else t for n, t in lane.downward().items()}
    memory = perform(lane, Job("update", 7, Message(moved), client=0)).memory
    name = "extractor.fc1.weight"
    assert torch.equal(memory[f"model.target.{name}"], moved[f"model.{name}"])


def test_generalisation_is_judged_in_every_style_and_personalisation_on_the_own_style():
    run = tiny_run({"name": "fedstyle", "style_epochs": 1}, task=styled_task(), training__fraction=1.0)
    record = run.history[-1]
    assert set(record["styles"]) == {"plain", "inverted"}
    assert np.isclose(record["global_accuracy"], np.mean(list(record["styles"].values())))
    assert np.isclose(
        record["personal_accuracy"], np.mean(list(record["personal_styles"].values()))
    )  # two clients each
    assert [sum(s.total) for s in run.scores] == [40, 40, 40, 40]
    assert record["personal_accuracy"] > 0.4  # four classes


def with_newcomers(*newcomers, garbled=False):
    """The styled task with these clients held out and own test sets; `garbled`: their labels are wrong."""
    task = styled_task()
    test = [part[i % 2 :: 2] for i, part in enumerate(task.federation.test)]
    labels = task.dataset.labels.clone()
    if garbled:
        for client in newcomers:
            labels[task.federation.train[client]] = (labels[task.federation.train[client]] + 1) % 4
    federation = replace(task.federation, test=test, newcomers=newcomers)
    return replace(task, dataset=replace(task.dataset, labels=labels), federation=federation)


def test_a_styles_classifier_is_fitted_without_newcomers_and_then_scored_on_them(tmp_path):
    run, other = (
        tiny_run(
            {"name": "fedstyle", "style_epochs": 1}, task=with_newcomers(1, garbled=garbled), training__rounds=1,
            training__fraction=1.0, objective="simclr", out=tmp_path / f"{garbled}",
        )
        for garbled in (False, True)
    )  # fmt: skip
    record, task = run.history[-1], run.task
    for name in ("styles", "global_accuracy", "newcomer_global_accuracy", "personal_styles"):
        assert record[name] == other.history[-1][name], name
    model = TrainedRun(tmp_path / "False").global_model("plain")

    def accuracy(client):
        samples = task.federation.test[client]
        right = model(task.dataset.inputs[samples] / 255).argmax(1) == task.dataset.labels[samples]
        return right.double().mean().item()

    assert record["styles"]["plain"] == pytest.approx(accuracy(0))
    assert record["newcomer_global_accuracy"] == pytest.approx(accuracy(1))


def test_a_style_that_only_newcomers_have_has_no_classifier(tmp_path):
    run = tiny_run(
        "fedavg", task=with_newcomers(2, 3), training__rounds=1, objective="simclr", out=tmp_path / "run",
    )  # fmt: skip
    record = run.history[-1]
    assert set(record["styles"]) == set(record["personal_styles"]) == {"plain"}
    assert record["global_accuracy"] == record["styles"]["plain"]
    assert "newcomer_accuracy" in record
    assert "newcomer_global_accuracy" not in record
    assert [path.name for path in (tmp_path / "run/models").glob("style-*")] == ["style-00000.safetensors"]


BASELINES = ["fedavg", {"name": "fedprox", "mu": 0.2, "start": "own"}, "centralized", "local"]


@pytest.mark.parametrize(
    ("method", "objective"),
    [(BASELINES[(i + j) % 4], objective) for i, objective in enumerate(UNSUPERVISED) for j in (0, 1)],
)
def test_baselines_run_unsupervised_through_the_same_objective(method, objective):
    run = tiny_run(method, task=styled_task(), training__rounds=2, training__fraction=1.0, objective=objective)
    assert np.isfinite(run.history[-1]["loss"])
    assert run.history[-1]["personal_accuracy"] > 0.25


def test_fedprox_of_the_appendix_goes_on_from_its_own_model():
    lane = Workspace(Setup(styled_task(), get("fedprox+probe", mu=0.2, start="own"), Training(batch_size=16), seed=0))
    down = Message(lane.downward())
    memory = perform(lane, Job("update", 1, down, client=0)).memory
    assert "model.extractor.fc1.weight" in memory
    lane.load(down, memory)
    assert torch.equal(lane.parts.named_tensors()["model.extractor.fc1.weight"], memory["model.extractor.fc1.weight"])
    assert torch.equal(lane.received.model.extractor.fc1.weight, down["model.extractor.fc1.weight"])


def test_what_a_method_cannot_learn_from_is_refused():
    with pytest.raises(UserError, match=r"objective.name = 'labels': the method fedstyle cannot be trained on it"):
        Recipe.parse({"method": "fedstyle", "objective": "labels"})
    with pytest.raises(UserError, match=r"objective.name = 'simclr': the method fedcrl cannot be trained on it"):
        Recipe.parse({"method": "fedcrl", "objective": "simclr"})
    with pytest.raises(UserError, match="did you mean 'simclr'"):
        Recipe.parse({"method": "fedavg", "objective": "simclear"})
    with pytest.raises(UserError, match=r"objective.tauu = 1: simclr has no such option: did you mean 'tau'"):
        Recipe.parse({"method": "fedavg", "objective": {"name": "simclr", "tauu": 1}})
