"""Robust centres against closed forms and brute force."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedloom.trust.centres import (
    clip_factor,
    geometric_weights,
    joint_norm,
    krum_scores,
    median,
    squared_distances,
    trimmed_mean,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def geometric_median(vectors: torch.Tensor) -> np.ndarray:
    return (geometric_weights(squared_distances([vectors])) @ vectors.double()).numpy()


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_median_is_numpys(n):
    values = draw(n, 3, 4)
    assert np.allclose(median(values), np.median(values.double().numpy(), axis=0), rtol=0, atol=1e-15)


def test_the_median_of_three_is_the_middle_one_exactly():
    values = torch.tensor([[0.1], [7.0], [0.3]])
    assert torch.equal(median(values).float(), values[2])


@pytest.mark.parametrize(("n", "cut"), [(5, 1), (8, 3), (4, 0), (7, 3)])
def test_the_trimmed_mean_drops_as_many_from_both_ends(n, cut):
    values = draw(n, 6)
    expected = [np.mean(sorted(column)[cut : n - cut]) for column in values.double().numpy().T]
    assert np.allclose(trimmed_mean(values, cut), expected, rtol=0, atol=1e-15)


def test_the_trimmed_mean_cannot_cut_everything():
    with pytest.raises(ValueError, match="cut 2 from both ends of 4"):
        trimmed_mean(draw(4, 1), 2)


def test_distances_are_those_of_all_tensors_as_one_vector():
    one, other = draw(5, 3, 2), draw(5, 7, seed=1)
    flat = np.concatenate([one.reshape(5, -1), other], axis=1).astype(np.float64)
    expected = [[((a - b) ** 2).sum() for b in flat] for a in flat]
    assert np.allclose(squared_distances([one, other]), expected, rtol=1e-12)


@pytest.mark.parametrize(("n", "attackers"), [(5, 1), (9, 2), (9, 3), (3, 0)])
def test_krum_scores_are_brute_force_sums_over_the_nearest(n, attackers):
    vectors = draw(n, 6)
    points = vectors.double().numpy()
    expected = []
    for i in range(n):
        others = [((points[i] - points[j]) ** 2).sum() for j in range(n) if j != i]
        expected.append(min(sum(c) for c in itertools.combinations(others, n - attackers - 2)))
    assert np.allclose(krum_scores(squared_distances([vectors]), attackers), expected, rtol=1e-12)


def test_krum_refuses_fewer_than_two_f_plus_three():
    with pytest.raises(ValueError, match="needs 7 vectors, not 6"):
        krum_scores(squared_distances([draw(6, 2)]), 2)


@pytest.mark.parametrize("n", [1, 3, 5, 9])
def test_the_geometric_median_on_a_line_is_the_median(n):
    values = draw(n, 1)
    assert np.allclose(geometric_median(values), np.median(values.numpy()), rtol=0, atol=1e-12)


def test_the_geometric_median_of_a_convex_quadrilateral_is_where_its_diagonals_cross():
    corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [6.0, 3.0], [0.0, 5.0]])
    # (0,0)–(6,3): y = x/2; (4,0)–(0,5): y = 5 − 5x/4
    x = 5 / (1 / 2 + 5 / 4)
    assert np.allclose(geometric_median(corners), [x, x / 2], rtol=0, atol=1e-9)


def test_the_geometric_median_of_a_triangle_is_its_fermat_point():
    side = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]])
    assert np.allclose(geometric_median(side), [0.5, 3**0.5 / 6], rtol=0, atol=1e-7)
    blunt = torch.tensor([[0.0, 0.0], [10.0, 1.0], [-10.0, 1.0]])  # an angle above 120°: that corner itself
    assert geometric_median(blunt).tolist() == [0.0, 0.0]


def test_a_point_that_most_vectors_share_is_the_geometric_median():
    vectors = torch.cat([torch.ones(3, 4), 100 * draw(2, 4)])
    assert geometric_median(vectors).tolist() == [1.0] * 4
    assert geometric_median(torch.ones(4, 2)).tolist() == [1.0, 1.0]


def test_no_other_point_is_nearer_to_all_than_the_geometric_median():
    vectors = draw(7, 5)
    points = vectors.double().numpy()

    def total(y):
        return np.linalg.norm(points - y, axis=1).sum()

    best = minimize(total, points.mean(0), method="BFGS", options={"gtol": 1e-10}).fun
    assert total(geometric_median(vectors)) <= best + 1e-9


def test_clipping_brings_a_vector_onto_the_ball_and_leaves_what_is_inside():
    update = [draw(3, 4), draw(5, seed=1)]
    norm = float(np.sqrt(sum((u.double().numpy() ** 2).sum() for u in update)))
    assert joint_norm(update) == pytest.approx(norm, rel=1e-14)
    assert joint_norm([u * clip_factor(norm, 0.5) for u in update]) == pytest.approx(0.5, rel=1e-6)
    assert clip_factor(norm, norm) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert joint_norm([]) == 0.0
    assert clip_factor(float("nan"), 1.0) == clip_factor(float("inf"), 1.0) == 0.0
