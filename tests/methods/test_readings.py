"""Readings of the papers that differ from our defaults: each a named option, each as it says, on every engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import ByHand, assert_mean_by_samples
from tiny import same_state, tiny_run, tiny_task
from torch.nn.functional import cosine_similarity, logsigmoid

from fedloom import objectives
from fedloom.core.batches import Batch
from fedloom.core.dataset import Dataset
from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.rng import Random
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.state import snapshot
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.data import Pool, federate, parse_partition
from fedloom.losses import model_contrastive
from fedloom.methods import get
from fedloom.models import Factory
from fedloom.models.projected import Tapped, batch_statistics

pytestmark = pytest.mark.full

READINGS = [
    {"name": "fedcrl", "reg_over": "sum", "judged": "mixed"},
    {"name": "moon", "similarity": "batch", "judged": "local"},
    {"name": "fedper", "average_heads": True, "heads_of": "all"},
    {"name": "fedavg+ft", "ft_optimizer": "sgd"},
    {"name": "repper", "head_optimizer": "sgd"},
    {"name": "ditto", "averages": "personal"},
    {"name": "apfl", "averages": "personal"},
    {"name": "fedintr", "references": "train", "hidden": "input"},
]


@pytest.mark.parametrize(
    ("method", "engine"),
    [*((method, "replay") for method in READINGS), *((method, "processes") for method in READINGS[:3])],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_a_reading_is_the_same_on_every_engine(method, engine):
    """An option changes the steps, which are replayed; of what workers do, some change what clients and server keep."""
    ours, inline = (tiny_run(method, engine=name, training__rounds=2) for name in (engine, "inline"))
    assert same_state(ours.server.state, inline.server.state)
    assert ours.scores == inline.scores


def test_fedstyles_sum_over_anchors_is_the_same_when_it_is_replayed():
    method = {"name": "fedstyle", "anchors": "sum"}
    runs = {
        name: tiny_run(method, engine=name, objective="simclr", training__rounds=1) for name in ("replay", "inline")
    }
    assert same_state(runs["replay"].server.state, runs["inline"].server.state)


def test_fedcrls_reg_is_the_mean_over_batches_or_their_sum():
    found = {}
    for over in ("mean", "sum"):
        run = ByHand(get("fedcrl", reg_over=over))
        run.round()
        run.round()
        found[over] = {client: float(memory["reg"]) for client, memory in run.memories.items()}
    for client in found["mean"]:
        batches = -(-len(run.task.samples(client)) // 16)
        assert found["sum"][client] == pytest.approx(batches * found["mean"][client], rel=1e-5)


def test_fedcrl_is_judged_after_training_or_after_one_more_mixture():
    trained, mixed = (ByHand(get("fedcrl", judged=judged)) for judged in ("trained", "mixed"))
    for run in (trained, mixed):
        run.round()
        run.round()
    own = {name: value.clone() for name, value in snapshot(trained.personal(0).parts).items() if "extractor" in name}
    kept = trained.memories[0]
    assert all(torch.equal(value, kept[name]) for name, value in own.items())
    share = torch.exp(-0.8 * kept["reg"])
    for name, value in snapshot(mixed.personal(0).parts).items():
        if name.startswith("model.extractor."):
            expected = share * own[name] + (1 - share) * mixed.server.state[name]
            torch.testing.assert_close(value, expected)


def test_moons_cosine_is_averaged_before_the_logarithm():
    z, z_global, z_previous = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    to_global, to_previous = (cosine_similarity(z, other).mean() for other in (z_global, z_previous))
    found = model_contrastive(z, z_global, z_previous, 0.5, "batch")
    assert float(found) == pytest.approx(float(-logsigmoid((to_global - to_previous) / 0.5)), rel=1e-5)
    plain, batch = (tiny_run({"name": "moon", "similarity": s}, training__rounds=2) for s in ("sample", "batch"))
    assert not same_state(plain.server.state, batch.server.state)


def test_moon_is_judged_by_the_shared_model_or_by_the_local_one():
    shared, local = (tiny_run({"name": "moon", "judged": judged}) for judged in ("global", "local"))
    assert same_state(shared.server.state, local.server.state)  # it changes nothing in training
    assert shared.history[-1]["global_accuracy"] == local.history[-1]["global_accuracy"]
    assert shared.method.personal_is_global and not local.method.personal_is_global
    assert [s.loss for s in shared.scores] != [s.loss for s in local.scores]
    run = ByHand(get("moon", judged="local"))
    run.round()
    worker = run.personal(0)
    state = run.method.network(worker).state_dict()
    assert all(torch.equal(value, run.memories[0][f"previous.{name}"]) for name, value in state.items())


def test_fedper_averages_the_last_heads_of_all_clients():
    setup = Setup(tiny_task(), get("fedper", average_heads=True, heads_of="all"), Training(batch_size=16), seed=0)
    lane, home = Workspace(setup), Workspace(setup)
    server = Server(home, federation=6)
    last = {}
    for round, clients in ((1, (0, 1, 2)), (2, (2, 3))):
        server.begin(round)
        down = Message(setup.method.message_for(server, 0))
        sent = [perform(lane, Job("update", round, down, client=c)).message for c in clients]
        setup.method.combine(server, iter(sent))
        last |= {message.client: message for message in sent}
    assert sorted(last) == [0, 1, 2, 3]
    whole = sum(message.samples for message in last.values())
    for name in ("model.head.weight", "model.head.bias"):
        expected = sum(message.samples * message[name].double() for message in last.values()) / whole
        torch.testing.assert_close(server.state[name].double(), expected, rtol=0, atol=1e-6)
    assert_mean_by_samples(server, sent, "model.extractor.fc1.bias")


@pytest.mark.parametrize("method", ["fedavg+ft", "repper"])
def test_fine_tuning_by_plain_sgd_takes_no_notice_of_the_recipes_optimizer(method):
    option = "ft_optimizer" if "+ft" in method else "head_optimizer"
    runs = {
        (whose, name): tiny_run({"name": method, option: whose}, training__rounds=1, training__epochs=0,
                                training__optimizer={"name": name, "lr": 0.01})
        for whose in ("recipe", "sgd")
        for name in ("sgd", "adam")
    }  # fmt: skip
    losses = {key: [scores.loss for scores in run.scores] for key, run in runs.items()}
    assert losses["sgd", "sgd"] == losses["sgd", "adam"] == losses["recipe", "sgd"]
    assert losses["recipe", "adam"] != losses["recipe", "sgd"]


@pytest.mark.parametrize("method", ["ditto", "apfl"])
def test_as_fedstyles_appendix_prints_it_the_personal_models_are_averaged(method):
    run = ByHand(get(method, averages="personal"))
    run.round()
    whole = sum(message.samples for message in run.sent.values())
    for name in ("model.head.weight", "model.extractor.fc1.weight"):
        own = name.replace("model.", "personal.", 1)
        expected = sum(m.samples * run.memories[c][own].double() for c, m in run.sent.items()) / whole
        torch.testing.assert_close(run.server.state[name].double(), expected, rtol=0, atol=1e-6)


def test_fedstyles_style_loss_is_a_mean_or_eq_2_as_printed():
    """Eq. 2 sums over 2B anchors, and divides sums over B − 1 positives by 2B − 1: 63.5 times our mean for B = 64."""
    found = {}
    for anchors in ("mean", "sum"):
        run = ByHand(get("fedstyle", anchors=anchors), task=replace(tiny_task(), objective=objectives.get("simclr")))
        index = torch.from_numpy(run.task.samples(0))[:6]
        batch = Batch(run.lane.stored, index, Random.seeded(0), 2)
        found[anchors] = run.method.style_loss(run.at_work(0), batch).item()
    assert found["sum"] == pytest.approx(12 * 5 / 11 * found["mean"], rel=1e-5)  # 6 images and their filtered copies


def test_fedintrs_references_take_the_statistics_of_the_batch_and_keep_their_own():
    model = Tapped(Factory("resnet20")((3, 8, 8), 4), (), (3, 8, 8), 16, hidden="input").eval()
    assert [project[0].out_features for project in model.projections] == [
        project[0].in_features for project in model.projections
    ]
    assert {project[2].out_features for project in model.projections} == {16}
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), batch_statistics(model):
        inside = model(x)
    outside = model(x)
    trained = model.train()(x)
    torch.testing.assert_close(inside, trained)
    assert not torch.allclose(inside, outside)
    model.load_state_dict(before)
    with torch.no_grad(), batch_statistics(model.eval()):
        model(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training and all(not module.training for module in model.modules())


def test_resnet20_starts_from_fan_out_or_fan_in():
    torch.manual_seed(0)
    std = {fan: Factory("resnet20", {"fan": fan})((3, 32, 32), 100) for fan in ("fan_out", "fan_in")}
    conv = {fan: model.extractor.conv1.weight.std().item() for fan, model in std.items()}
    assert conv["fan_out"] == pytest.approx((2 / (16 * 9)) ** 0.5, rel=0.15)
    assert conv["fan_in"] == pytest.approx((2 / (3 * 9)) ** 0.5, rel=0.15)
    assert float(std["fan_in"].head.weight.std()) == pytest.approx((2 / 64) ** 0.5, rel=0.1)


def test_uneven_portions_lie_between_a_tenth_and_the_rest_and_leave_everyone_the_minimum():
    labels = np.repeat(np.arange(10), 600)
    parts = parse_partition("uneven-pathological:2")(Pool(labels, 20, np.random.default_rng(0), None, 40))
    held = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    assert ((held > 0).sum(1) == 2).all() and ((held > 0).sum(0) == 4).all()
    assert held.sum() == len(labels) and held.sum(1).min() >= 40
    for portions in held.T:
        mine = np.sort(portions[portions > 0])
        assert mine[0] >= 20 and (mine[:-1] < 150).all() and mine[-1] >= 150
    assert held.sum(1).std() > 50


def test_groups_of_clients_hold_the_same_classes_and_the_last_of_a_group_gets_the_rest():
    """PFLlib's division: classes 0 and 1 for clients 0 to 3, and so on."""
    labels = np.repeat(np.arange(10), 600)
    parts = parse_partition("grouped-pathological:2")(Pool(labels, 20, np.random.default_rng(0), None, 40))
    held = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    for client, counts in enumerate(held):
        first = client // 4 * 2
        assert np.flatnonzero(counts).tolist() == [first, first + 1]
        portions = counts[first : first + 2]
        assert (portions >= 150).all() if client % 4 == 3 else ((portions >= 15) & (portions < 150)).all()
    assert held.sum() == len(labels)


def test_of_each_domain_a_part_is_kept_for_tests_before_clients_get_any():
    count = 120
    groups = torch.arange(count) % 3
    data = Dataset(
        "styles", torch.zeros(count, 1, 4, 4, dtype=torch.uint8), torch.arange(count) % 2,
        torch.zeros(count, dtype=torch.bool), ("a", "b"), groups=groups, group_names=("x", "y", "z"),
    )  # fmt: skip
    found = federate(data, clients=6, partition="domain:2", split="domain:0.7", minimum=1, seed=0)
    of = groups.numpy()
    for client, (train, test) in enumerate(zip(found.train, found.test, strict=True)):
        assert set(of[train]) == set(of[test]) == {client // 2}
        assert len(test) == 12 and len(train) == 14
        assert np.array_equal(test, found.test[client ^ 1]) and not set(train) & set(test)
