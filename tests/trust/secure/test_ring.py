"""Fixed-point numbers: sums are exact within half a step per member, never wrap, and refuse what does not fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.message import MessageError
from fedloom.trust.secure.masks import add_mask
from fedloom.trust.secure.ring import FixedPoint

bits = st.sampled_from([32, 64])
limits = st.floats(1e-3, 1e6)


@given(bits, limits, st.integers(1, 500))
def test_the_largest_sum_does_not_wrap_and_half_the_step_would(bits, limit, members):
    fixed_point = FixedPoint(bits, limit, members)
    largest = fixed_point.encode(np.array([limit, -limit]), "x")
    total = np.zeros_like(largest)
    for _ in range(members):
        total += largest
    assert np.allclose(fixed_point.decode(total), [members * limit, -members * limit], rtol=1e-5)
    assert members * (limit / (fixed_point.step / 2) + 0.5) >= 2 ** (bits - 1)


@given(bits, limits, st.integers(1, 20), st.integers(0, 2**32))
def test_a_sum_differs_from_the_exact_one_by_at_most_half_a_step_per_member(bits, limit, members, seed):
    fixed_point = FixedPoint(bits, limit, members)
    values = np.random.default_rng(seed).uniform(-limit, limit, (members, 7))
    total = np.zeros(7, fixed_point.unsigned)
    for row in values:
        total += fixed_point.encode(row, "x")
    exact = values.astype(np.longdouble).sum(0)
    rounding = members * limit * 2.0**-50  # of float64, in which the sum is returned
    assert np.abs(fixed_point.decode(total) - exact).max() <= fixed_point.error(members) + rounding


@pytest.mark.parametrize("value", [1.0001, -1.0001, np.inf, -np.inf, np.nan])
def test_values_beyond_the_range_are_refused_by_name_and_without_their_size(value):
    with pytest.raises(MessageError, match=r"'model.w' has values beyond ±1, .* raise secure.range") as caught:
        FixedPoint(32, 1.0, 4).encode(np.array([0.0, value]), "model.w")
    assert "1.0001" not in str(caught.value)


@given(bits, st.binary(min_size=32, max_size=32), st.integers(0, 700_000))
def test_a_mask_that_is_added_and_subtracted_leaves_the_vector(bits, key, size):
    vector = np.arange(size, dtype=FixedPoint(bits, 1.0, 1).unsigned)
    masked = vector.copy()
    add_mask(masked, key)
    assert size < 8 or not np.array_equal(masked, vector)
    add_mask(masked, key, subtract=True)
    assert np.array_equal(masked, vector)


def test_a_mask_looks_uniform_and_does_not_repeat_at_chunks():
    mask = np.zeros(1_000_000, np.dtype("<u4"))
    add_mask(mask, bytes(32))
    counts = np.bincount(mask.view(np.uint8), minlength=256)
    expected = mask.nbytes / 256
    assert ((counts - expected) ** 2 / expected).sum() < 400  # χ² with 255 degrees of freedom: 5.7e-8
    assert len(np.unique(mask[:: 2**18])) == len(mask[:: 2**18])
