"""SCAFFOLD: where FedAvg stops at the wrong point, it does not; c is the mean of all c_i, always."""

import pytest
import torch
from by_hand import ByHand, Quadratic, even_task
from tiny import same_state, tiny_run, tiny_task

from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.scaffold import SCAFFOLD


class DriftingFedAvg(Quadratic, FedAvg, abstract=True):
    pass


class DriftingSCAFFOLD(Quadratic, SCAFFOLD, abstract=True):
    pass


TEN_STEPS = {"epochs": 10, "optimizer": {"lr": 0.1}}


def test_fedavg_stops_at_the_wrong_point_and_scaffold_reaches_the_optimum():
    fedavg, scaffold = (ByHand(m, even_task(), **TEN_STEPS) for m in (DriftingFedAvg(), DriftingSCAFFOLD()))
    for _ in range(60):
        fedavg.round()
        scaffold.round()
    k = [1 - (1 - 0.1 * a) ** 10 for a in (1, 4)]
    stops = (k[0] * 0 + k[1] * 4) / sum(k)
    assert stops == pytest.approx(2.4165, abs=5e-5)
    assert fedavg.server.state["model.w"].item() == pytest.approx(stops, abs=1e-5)
    assert scaffold.server.state["model.w"].item() == pytest.approx((1 * 0 + 4 * 4) / 5, abs=1e-4)


def test_option_one_reaches_it_too():
    scaffold = ByHand(DriftingSCAFFOLD(option="I"), even_task(), **TEN_STEPS)
    for _ in range(60):
        scaffold.round()
    assert scaffold.server.state["model.w"].item() == pytest.approx(3.2, abs=1e-4)


@pytest.mark.parametrize("option", ["I", "II"])
def test_two_rounds_are_those_of_the_paper_s_algorithm(option):
    """An independent scalar loop, with one client left out of the first round."""
    run = ByHand(DriftingSCAFFOLD(option=option, global_lr=0.7), even_task(), **TEN_STEPS)
    a, b, x, c, own = (1.0, 4.0), (0.0, 4.0), 0.0, 0.0, [0.0, 0.0]
    for chosen in ([1], [0, 1]):
        run.round(chosen)
        moves, changes = [], []
        for i in chosen:
            y = x
            for _ in range(10):
                y -= 0.1 * (a[i] * (y - b[i]) - own[i] + c)
            new = a[i] * (x - b[i]) if option == "I" else own[i] - c + (x - y) / (10 * 0.1)
            moves.append(y - x)
            changes.append(new - own[i])
            own[i] = new
        x += 0.7 * sum(moves) / len(chosen)
        c += len(chosen) / 2 * sum(changes) / len(chosen)
        assert run.server.state["model.w"].item() == pytest.approx(x, rel=1e-5)
        assert run.server.state["control.0"].item() == pytest.approx(c, rel=1e-5)


@pytest.mark.parametrize("option", ["I", "II"])
def test_c_is_the_mean_of_all_c_i_after_every_round(option):
    run = ByHand(get("scaffold", option=option), tiny_task())
    for chosen in ([0, 2, 4], [1, 2, 5], [0, 1, 2, 3]):
        run.round(chosen)
        for name, c in run.server.state.items():
            if name.startswith("control."):
                own = [run.memories[i]["own_" + name] for i in run.memories]
                torch.testing.assert_close(c, torch.stack(own).sum(0) / 6, rtol=1e-4, atol=1e-6)
                assert c.abs().sum() > 0


def test_the_first_round_is_uniform_fedavg_with_plain_sgd():
    """All controls are zero then; momentum and weight decay of the recipe do not count."""
    plain = {"optimizer": {"lr": 0.05}}
    rich = {"optimizer": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}}
    fedavg, scaffold = ByHand(get("fedavg"), even_task(3), **plain), ByHand(get("scaffold"), even_task(3), **rich)
    fedavg.round()
    scaffold.round()
    for name, value in fedavg.server.state.items():
        torch.testing.assert_close(scaffold.server.state[name], value, rtol=1e-5, atol=1e-6)


def test_clients_weigh_alike_whatever_their_size():
    run = ByHand(get("scaffold"))
    sent = run.round([0, 4])  # 52 samples and 5
    mean = (sent[0]["model.head.weight"] + sent[4]["model.head.weight"]) / 2
    torch.testing.assert_close(run.server.state["model.head.weight"], mean)


def test_option_one_is_the_gradient_at_the_received_model():
    run = ByHand(get("scaffold", option="I"), tiny_task(augment=(), norm=False))
    client = run.at_work(0)
    x = client._workspace.stored.plain(torch.from_numpy(run.task.samples(0)))
    y = client._workspace.stored.labels[torch.from_numpy(run.task.samples(0))]
    client.model.requires_grad_(True)
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(client.model(x), y), list(client.model.parameters())
    )
    run.round([0])
    for i, gradient in enumerate(expected):
        torch.testing.assert_close(run.memories[0][f"own_control.{i}"], gradient, rtol=1e-4, atol=1e-6)


def test_batch_norm_statistics_travel_and_controls_have_none():
    state = tiny_run("scaffold", task=tiny_task(norm=True)).server.state
    assert state["model.extractor.bn1.running_mean"].abs().sum() > 0
    assert all(v.is_floating_point() for name, v in state.items() if name.startswith("control."))


def test_no_epochs_change_nothing():
    run = ByHand(get("scaffold"), epochs=0)
    before = {name: value.clone() for name, value in run.server.state.items()}
    run.round()
    assert same_state(run.server.state, before)
