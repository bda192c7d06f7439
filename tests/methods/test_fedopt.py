"""Server optimizers: plain steps of rate 1 are FedAvg; the others are the paper's Alg. 2, number for number."""

import math

import pytest
import torch
from by_hand import ByHand, Quadratic, even_task
from tiny import tiny_experiment, tiny_run, tiny_task

from fedloom.core.errors import UserError
from fedloom.methods import get
from fedloom.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedloom.trust.ledger import _why

ALL = ["fedavgm", "fedadagrad", "fedadam", "fedyogi"]


class DriftingFedAvgM(Quadratic, FedAvgM, abstract=True):
    pass


class DriftingFedAdagrad(Quadratic, FedAdagrad, abstract=True):
    pass


class DriftingFedAdam(Quadratic, FedAdam, abstract=True):
    pass


class DriftingFedYogi(Quadratic, FedYogi, abstract=True):
    pass


def test_plain_steps_of_rate_one_are_fedavg():
    same, fedavg = ByHand(get("fedavgm", beta=0, server_lr=1), tiny_task()), ByHand(get("fedavg"), tiny_task())
    for chosen in ([0, 1, 2], [3, 4, 5]):
        same.round(chosen)
        fedavg.round(chosen)
    for name, value in fedavg.server.state.items():
        torch.testing.assert_close(same.server.state[name], value, rtol=1e-5, atol=1e-6)


def paper(name, delta, m, v):
    """One coordinate of Alg. 2, and of Hsu's momentum."""
    if name == "fedavgm":
        m = 0.9 * m + delta
        return m, v, m
    beta = 0.0 if name == "fedadagrad" else 0.9
    m = beta * m + (1 - beta) * delta
    if name == "fedadagrad":
        v = v + delta**2
    elif name == "fedadam":
        v = 0.99 * v + 0.01 * delta**2
    else:
        v = v - 0.01 * delta**2 * math.copysign(1, v - delta**2)
    return m, v, m / (math.sqrt(v) + 1e-3)


@pytest.mark.parametrize("method", [DriftingFedAvgM, DriftingFedAdagrad, DriftingFedAdam, DriftingFedYogi])
def test_rounds_are_those_of_the_paper_s_algorithm(method):
    run = ByHand(method(server_lr=0.05), even_task(), epochs=3, optimizer={"lr": 0.1})
    name = method.__name__.lower().removeprefix("drifting")
    x, m, v = 0.0, 0.0, 1e-6
    for _ in range(6):
        run.round()
        ends = []
        for a, b in ((1.0, 0.0), (4.0, 4.0)):
            y = x
            for _ in range(3):
                y -= 0.1 * a * (y - b)
            ends.append(y)
        m, v, direction = paper(name, sum(ends) / 2 - x, m, v)
        x += 0.05 * direction
        assert run.server.state["model.w"].item() == pytest.approx(x, rel=1e-4)


@pytest.mark.parametrize("method", ALL)
def test_moments_stay_at_the_server_and_batch_norm_statistics_are_averaged(method):
    run = ByHand(get(method), tiny_task())
    sent = run.round([0])
    assert set(run.received[0]) == set(sent[0]) == {name for name in run.server.state if name.startswith("model.")}
    assert run.server.state["first.0"].abs().sum() > 0
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(run.server.state[f"model.extractor.bn1.{buffer}"], sent[0][f"model.extractor.bn1.{buffer}"])
    assert not run.memories[0]


@pytest.mark.parametrize("method", ALL)
def test_a_checkpoint_has_the_moments(method):
    """Two rounds after a restored first one are bit for bit those of an uninterrupted run."""
    whole, half = ByHand(get(method)), ByHand(get(method))
    whole.round()
    saved = {name: tensor.clone() for name, tensor in whole.server.saved().items()}
    half.server.restore(saved)
    half.rounds = 1
    for run in (whole, half):
        run.round()
        run.round()
    assert all(torch.equal(whole.server.state[name], value) for name, value in half.server.state.items())
    assert whole.server.state["first.0"].abs().sum() > 0


@pytest.mark.parametrize("field", [{"server_lr": 0}, {"tau": 0}, {"beta_1": 1.0}])
def test_values_that_divide_by_zero_are_refused(field):
    with pytest.raises(UserError, match=f"method.{next(iter(field))}"):
        get("fedadam", **field)


def test_a_frozen_part_has_no_moments():
    run = tiny_run("fedadam", task=tiny_task(norm=True, freeze=("extractor",)))
    assert {name for name in run.server.state if name.startswith("second.")} == {"second.0", "second.1"}


def test_they_work_under_a_robust_rule_and_without_labels():
    robust = tiny_experiment("fedyogi", robust={"rule": "median"})
    robust.run()
    assert all(torch.isfinite(value).all() for value in robust.server.state.values())
    assert tiny_run("fedadam", objective="byol").server.state["first.0"].abs().sum() > 0


def test_the_ledger_says_where_moments_are():
    workspace = ByHand(get("fedadam")).lane
    assert _why("second.0", workspace) == ("second", "held by the server, never sent")
