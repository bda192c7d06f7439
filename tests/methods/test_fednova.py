"""FedNova: with unequal steps it reaches the optimum of the weighted objective; with equal steps it is FedAvg."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import ByHand, Quadratic, even_task
from tiny import tiny_run, tiny_task

from fedloom.data import Federation
from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fednova import FedNova


class DriftingFedAvg(Quadratic, FedAvg, abstract=True):
    a = (1.0, 1.0)


class DriftingFedNova(Quadratic, FedNova, abstract=True):
    a = (1.0, 1.0)


def uneven_task():
    """32 and 96 samples: with batches of 16, two steps per epoch and six."""
    parts = [np.arange(32), np.arange(32, 128)]
    return replace(tiny_task(norm=False), federation=Federation(parts, parts))


def test_with_unequal_steps_it_reaches_the_weighted_optimum_and_fedavg_does_not():
    """Small steps: what remains is of the order of the learning rate. The optimum is Σ p_i b_i = 3/4 · 4."""
    slow = {"epochs": 1, "optimizer": {"lr": 0.002}}
    fedavg, fednova = (ByHand(m, uneven_task(), **slow) for m in (DriftingFedAvg(), DriftingFedNova()))
    for run in (fedavg, fednova):
        run.server.move({"model.w": torch.tensor(3.0)})
        for _ in range(600):
            run.round()
    k = [0.25 * (1 - (1 - 0.002) ** 2), 0.75 * (1 - (1 - 0.002) ** 6)]
    assert fedavg.server.state["model.w"].item() == pytest.approx(4 * k[1] / sum(k), abs=5e-3)
    assert 4 * k[1] / sum(k) == pytest.approx(3.6, abs=0.01)
    assert fednova.server.state["model.w"].item() == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_round_is_that_of_the_paper(momentum):
    """‖a_i‖₁ by the paper's formula: τ, or (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ) with momentum ρ."""
    run = ByHand(DriftingFedNova(), uneven_task(), epochs=2, optimizer={"lr": 0.1, "momentum": momentum})
    run.round()
    x, taus, p = 0.0, (4, 12), (0.25, 0.75)
    lengths = [(tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum) for tau in taus]
    total = 0.0
    for tau, b, weight, length in zip(taus, (0.0, 4.0), p, lengths, strict=True):
        y, velocity = x, 0.0
        for _ in range(tau):
            velocity = momentum * velocity + (y - b)
            y -= 0.1 * velocity
        total += weight * (y - x) / length
    for client, length in enumerate(lengths):
        assert run.sent[client]["travel.0"].item() == pytest.approx(0.1 * length, rel=1e-5)
    effective = sum(weight * length for weight, length in zip(p, lengths, strict=True))
    assert run.server.state["model.w"].item() == pytest.approx(x + effective * total, rel=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "norm"), [({"momentum": 0.9, "weight_decay": 1e-3}, True), ({"name": "adam", "lr": 0.01}, False)]
)
def test_with_equal_steps_it_is_fedavg(optimizer, norm):
    """Adam without batch-norm: it would enlarge the rounding errors of the bias before that layer."""
    training = {"epochs": 2, "optimizer": {"lr": 0.05} | optimizer}
    task = replace(even_task(3), network=tiny_task(norm=norm).network)
    fednova, fedavg = ByHand(get("fednova"), task, **training), ByHand(get("fedavg"), task, **training)
    for _ in range(2):
        fednova.round()
        fedavg.round()
    assert fednova.server.state.keys() == fedavg.server.state.keys()
    for name, value in fedavg.server.state.items():
        torch.testing.assert_close(fednova.server.state[name], value, rtol=1e-4, atol=1e-4)


def test_no_epochs_change_nothing():
    run = ByHand(get("fednova"), epochs=0)
    before = {name: value.clone() for name, value in run.server.state.items()}
    run.round()
    assert all(torch.equal(run.server.state[name], value) for name, value in before.items())


def test_batch_norm_statistics_are_averaged():
    run = ByHand(get("fednova"), tiny_task())
    sent = run.round([0, 1])
    name = "extractor.bn1.running_mean"
    sizes = [len(run.task.samples(client)) for client in (0, 1)]
    mean = sum(n * sent[c][f"change.{name}"] for c, n in enumerate(sizes)) / sum(sizes)
    torch.testing.assert_close(run.server.state[f"model.{name}"], mean)


def test_frozen_parts_do_not_travel():
    run = tiny_run("fednova", task=tiny_task(norm=True, freeze=("extractor",)))
    assert set(run.server.state) == {"model.head.weight", "model.head.bias"}
