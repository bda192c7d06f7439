"""Statistics for normalisation: measured on training samples only, also if values are small or constant."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedloom
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.task import Task
from fedloom.data import from_arrays
from fedloom.models import Factory
from fedloom.objectives import get


def task(x: np.ndarray, normalise: str) -> Task:
    """Two clients: the first half of the samples is for training, the rest for testing."""
    dataset = from_arrays(x, np.arange(len(x)) % 2)
    train, test = np.split(np.arange(len(x)), 2)
    federation = Federation(train=list(np.split(train, 2)), test=list(np.split(test, 2)))
    return Task(dataset, federation, Factory("mlp"), get("labels"), normalise=normalise)


@pytest.mark.parametrize("normalise", ["channels", "federated"])
def test_test_samples_are_not_measured(normalise):
    x = np.random.default_rng(0).normal(3, 2, (40, 5)).astype(np.float32)
    x[20:] += 100
    mean, std = task(x, normalise).statistics
    assert torch.allclose(mean, torch.from_numpy(x[:20].mean(0)), atol=1e-5)
    assert torch.allclose(std, torch.from_numpy(x[:20].std(0)), atol=1e-5)


def test_small_values_are_scaled_and_constant_ones_are_not():
    x = np.random.default_rng(0).normal(1, 1, (40, 3)).astype(np.float32) * np.array([1e-5, 1, 1e6], np.float32)
    x = np.concatenate([x, np.full((40, 1), 7e5, np.float32), np.zeros((40, 1), np.float32)], 1)
    found = task(x, "federated")
    plain = found.stored.plain(torch.arange(20))
    assert torch.allclose(plain[:, :3].std(0, correction=0), torch.ones(3), atol=1e-3)
    assert plain[:, 3:].abs().max() == 0


def test_a_method_for_images_refuses_other_inputs():
    x = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    with pytest.raises(UserError, match=r"'fedstyle': it needs images, but samples have the shape \(5,\)"):
        fedloom.run(data=(x, np.arange(40) % 2), method="fedstyle", clients=2, partition="iid", rounds=1)


def test_the_area_of_images_and_other_inputs():
    x = np.zeros((4, 6, 5), np.float32)
    flat = from_arrays(x, [0, 1, 0, 1])
    assert flat.area == 30 and replace(flat, inputs=torch.zeros(4, 3, 6, 5)).area == 30


def test_given_statistics():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    given = replace(task(x, "given"), given=((1.0, 2.0, 3.0), (4.0,)))
    expected = (torch.from_numpy(x[:5]) - torch.tensor([1.0, 2.0, 3.0])) / 4
    assert torch.allclose(given.stored.plain(torch.arange(5)), expected, atol=1e-6)
    with pytest.raises(UserError, match=r"data.mean: has 2 numbers; give one, or 3, one per channel"):
        replace(given, given=((1.0, 2.0), (4.0,))).statistics  # noqa: B018
    with pytest.raises(UserError, match="data.normalise = given needs data.mean and data.std"):
        Recipe.parse({"data": {"normalise": "given", "mean": [0.5]}})
