"""Noise under secure aggregation: each client's share, the variance of any sum, and the bound on an update."""

import math

import numpy as np
import pytest
import torch

from fedloom.core.errors import UserError
from fedloom.core.message import Message, signature
from fedloom.trust.access import Averaging
from fedloom.trust.privacy import PrivacySettings, system_normals
from fedloom.trust.secure.private import PrivateSum
from fedloom.trust.secure.ring import FixedPoint
from fedloom.trust.secure.settings import SecureSettings
from fedloom.trust.secure.simulation import client_normals

PLAIN = Averaging(None, {}, (), uniform=False)


def private(size: int, **settings) -> PrivateSum:
    return PrivateSum(PrivacySettings(**settings), PLAIN, signature({"w": torch.zeros(size)}))


def silent(shape):
    return torch.zeros(shape, dtype=torch.float64)


@pytest.mark.parametrize("normals", [lambda c: client_normals(3, c), lambda c: system_normals], ids=["seed", "system"])
@pytest.mark.parametrize("survivors", [14, 17, 20])
def test_the_noise_of_a_sum_has_at_least_the_asked_for_variance_for_any_dropouts(survivors, normals):
    members, size, clip, noise = 20, 20_000, 0.5, 1.3
    needed = SecureSettings().needed(members)
    assert needed == 14
    plan, fixed_point = private(size, clip=clip, noise=noise), FixedPoint(64, 2.0**20, members)
    start = {"w": torch.zeros(size)}
    total = np.zeros(size, fixed_point.unsigned)
    for client in range(survivors):
        total += plan.vector(Message(start), start, fixed_point, needed, normals(client)(1))
    found = fixed_point.decode(total)
    expected = noise * clip * math.sqrt(survivors / needed)
    assert found.std() == pytest.approx(expected, rel=0.02)  # its standard error is 0.5%
    assert expected >= noise * clip
    assert (np.abs(found) < expected).mean() == pytest.approx(0.6827, abs=0.015)


def test_shares_of_noise_are_independent_between_clients_and_rounds():
    draws = [client_normals(0, c)(r)(torch.Size([2000])) for c in range(3) for r in (1, 2)]
    correlation = np.corrcoef(torch.stack(draws).numpy()) - np.eye(len(draws))
    assert np.abs(correlation).max() < 0.1


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 1e20])
def test_a_rounded_update_has_at_most_the_norm_clip(scale, bits):
    size = 10_000
    plan, fixed_point = private(size, clip=1.0), FixedPoint(bits, 16.0, 4)
    update = {"w": scale * torch.randn(size, generator=torch.Generator().manual_seed(1)) / size**0.5}
    vector = plan.vector(Message(update), {"w": torch.zeros(size)}, fixed_point, 3, silent)
    norm = np.linalg.norm(fixed_point.decode(vector))
    assert norm <= 1.0
    assert norm == pytest.approx(min(1.0, update["w"].double().norm().item()), rel=1e-3)


def test_an_update_that_is_not_finite_counts_as_zero():
    plan, fixed_point = private(2), FixedPoint(64, 16.0, 4)
    vector = plan.vector(Message({"w": torch.tensor([torch.nan, 1.0])}), {"w": torch.zeros(2)}, fixed_point, 3, silent)
    assert not fixed_point.decode(vector).any()


def test_the_mean_is_over_the_planned_number_of_clients():
    plan = private(2)
    found, error = plan.result(np.array([3.0, -6.0]), 4, {"w": torch.ones(2)}, 1e-3)
    assert found["w"].tolist() == [1.75, -0.5]
    assert error == 1e-3 / 4


def test_a_range_without_room_for_the_noise_is_refused():
    with pytest.raises(UserError, match=r"secure.range = 4: .* reach 6.77 .*; set it to 8 or more"):
        private(2, noise=1.0).check_range(FixedPoint(64, 4.0, 4), 3)
    with pytest.raises(UserError, match="secure.bits = 32: .* use 64 bits"):
        private(10**8, clip=0.01, noise=1.0).check_range(FixedPoint(32, 64.0, 20), 14)


def test_noise_of_a_few_steps_is_refused():
    fixed_point = FixedPoint(32, 64.0, 4)
    with pytest.raises(UserError, match="secure.bits = 32: .* would change its distribution; use 64 bits"):
        private(2, noise=9 * fixed_point.step * math.sqrt(3)).check_range(fixed_point, 3)
    private(2, noise=11 * fixed_point.step * math.sqrt(3)).check_range(fixed_point, 3)
