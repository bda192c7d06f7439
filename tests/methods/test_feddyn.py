"""FedDyn: the optimum where FedAvg stops elsewhere, and the paper's Alg. 1 with clients left out."""

import pytest
import torch
from by_hand import ByHand, Quadratic, Scalar, even_task
from tiny import tiny_run, tiny_task

from fedloom.core.errors import UserError
from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.feddyn import FedDyn


class DriftingFedAvg(Quadratic, FedAvg, abstract=True):
    pass


class OneWeight:
    def model(self):
        return Scalar()


class DriftingFedDyn(FedDyn, DriftingFedAvg, abstract=True):
    """In this order, so that FedDyn's loss adds its terms to the quadratic one."""

    def build(self, task):
        return FedDyn.build(self, OneWeight()) | {"a": torch.zeros(()), "b": torch.zeros(())}


TEN_STEPS = {"epochs": 10, "optimizer": {"lr": 0.1}}


def test_it_reaches_the_optimum_where_fedavg_stops_at_another_point():
    fedavg, feddyn = (ByHand(m, even_task(), **TEN_STEPS) for m in (DriftingFedAvg(), DriftingFedDyn(alpha=1.0)))
    for _ in range(60):
        fedavg.round()
        feddyn.round()
    assert fedavg.server.state["model.w"].item() == pytest.approx(2.4165, abs=1e-4)
    assert feddyn.server.state["model.w"].item() == pytest.approx(3.2, abs=1e-4)


def test_rounds_are_those_of_the_paper_s_algorithm():
    """An independent scalar loop, with one client left out of the first round."""
    run = ByHand(DriftingFedDyn(alpha=0.5), even_task(), **TEN_STEPS)
    a, b, x, h, g = (1.0, 4.0), (0.0, 4.0), 0.0, 0.0, [0.0, 0.0]
    for chosen in ([1], [0, 1], [0]):
        run.round(chosen)
        ends = []
        for i in chosen:
            y = x
            for _ in range(10):
                y -= 0.1 * (a[i] * (y - b[i]) - g[i] + 0.5 * (y - x))
            g[i] -= 0.5 * (y - x)
            ends.append(y)
        h -= 0.5 / 2 * sum(y - x for y in ends)
        x = sum(ends) / len(ends) - h / 0.5
        assert run.server.state["model.w"].item() == pytest.approx(x, rel=1e-4)
        assert run.server.state["h.0"].item() == pytest.approx(h, rel=1e-4)


def test_without_its_regulariser_clients_train_as_in_fedavg_and_the_server_adds_the_earlier_updates():
    """α → 0: the clients' terms vanish, −h/α does not."""
    dyn, fedavg = ByHand(get("feddyn", alpha=1e-6), even_task(3)), ByHand(get("fedavg"), even_task(3))
    start = {name: value.clone() for name, value in fedavg.server.state.items()}
    dyn_sent, avg_sent = dyn.round(), fedavg.round()
    for name, old in start.items():
        torch.testing.assert_close(dyn_sent[1][name], avg_sent[1][name], rtol=1e-5, atol=1e-6)
        mean = fedavg.server.state[name]
        torch.testing.assert_close(dyn.server.state[name], mean + (mean - old), rtol=1e-3, atol=1e-5)


def test_h_is_the_mean_of_all_clients_gradients_after_every_round():
    run = ByHand(get("feddyn", alpha=0.1), tiny_task())
    for chosen in ([0, 2, 4], [1, 2, 5]):
        run.round(chosen)
        for name in (name for name in run.server.state if name.startswith("h.")):
            own = [run.memories[i]["gradient" + name.removeprefix("h")] for i in run.memories]
            torch.testing.assert_close(run.server.state[name], torch.stack(own).sum(0) / 6, rtol=1e-3, atol=1e-6)


def test_batch_norm_statistics_are_averaged_and_h_stays_at_the_server():
    run = ByHand(get("feddyn"), tiny_task())
    sent = run.round([0, 1])
    assert not any(name.startswith(("h.", "gradient.")) for name in (*sent[0], *run.received[0]))
    assert set(run.memories[0]) == {name for name in run.lane.tensors if name.startswith("gradient.")}
    name = "model.extractor.bn1.running_mean"
    torch.testing.assert_close(run.server.state[name], (sent[0][name] + sent[1][name]) / 2)


def test_a_weight_of_zero_is_refused():
    with pytest.raises(UserError, match="method.alpha"):
        get("feddyn", alpha=0)


def test_frozen_parts_have_no_gradient():
    run = tiny_run("feddyn", task=tiny_task(norm=True, freeze=("extractor",)))
    assert {name for name in run.server.state if name.startswith("h.")} == {"h.0", "h.1"}
