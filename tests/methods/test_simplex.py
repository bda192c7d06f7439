"""The quadratic program on the simplex, against a grid and against SciPy's general solver."""

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import minimize

from fedloom.methods.fedpac import least_quadratic


def on_a_grid(quadratic, steps):
    """The best of all weights that are multiples of 1/steps."""
    bars = np.array(list(combinations(range(steps + len(quadratic) - 1), len(quadratic) - 1)))
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, steps + len(quadratic) - 1)))
    points = (np.diff(edges) - 1) / steps
    assert points.min() == 0 and np.allclose(points.sum(1), 1)
    return points[np.argmin(np.einsum("ni,ij,nj->n", points, quadratic, points))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("size", "steps"), [(2, 400), (3, 100), (4, 30)])
def test_no_point_of_a_grid_is_better(size, steps, seed):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, size))
    quadratic = root @ root.T + np.diag(rng.uniform(0, 0.1, size))
    alpha, best = least_quadratic(quadratic), on_a_grid(quadratic, steps)
    assert alpha.min() >= 0 and alpha.sum() == pytest.approx(1, abs=1e-12)
    assert alpha @ quadratic @ alpha <= best @ quadratic @ best + 1e-12
    assert np.abs(alpha - best).max() < 3 / steps + 0.05


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("rank", [1, 3, 20, 60])
def test_it_is_optimal_at_any_scale_and_rank(rank, scale):
    """Karush–Kuhn–Tucker: the gradient is least, and equal, where a weight is positive."""
    rng = np.random.default_rng(rank)
    root = rng.normal(size=(40, rank)) + 1
    quadratic = scale * (root @ root.T)
    alpha = least_quadratic(quadratic)
    gradient = quadratic @ alpha
    lowest = alpha @ gradient
    assert gradient.min() >= lowest - 1e-8 * scale * rank
    assert np.abs(gradient[alpha > 0] - lowest).max() <= 1e-8 * scale * rank
    start = np.full(40, 1 / 40)
    general = minimize(
        lambda a: a @ quadratic @ a / scale, start, jac=lambda a: 2 * quadratic @ a / scale, method="SLSQP",
        bounds=[(0, 1)] * 40, constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
    )  # fmt: skip
    assert alpha @ quadratic @ alpha <= scale * general.fun + 1e-6 * scale


def test_a_diagonal_has_a_closed_form():
    spreads = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(least_quadratic(np.diag(spreads)), (1 / spreads) / (1 / spreads).sum(), rtol=1e-12)


def test_awkward_matrices_have_an_answer():
    assert least_quadratic(np.array([[3.0]])).tolist() == [1.0]
    assert least_quadratic(np.array([[0.0]])).tolist() == [1.0]
    assert least_quadratic(np.zeros((4, 4))).sum() == pytest.approx(1)
    np.testing.assert_allclose(least_quadratic(np.diag([0.0, 1.0, 1.0])), [1, 0, 0], atol=1e-12)
    slightly_negative = np.diag([1.0, 2.0]) - 1e-13
    assert least_quadratic(slightly_negative).sum() == pytest.approx(1)
    assert np.isfinite(least_quadratic(np.diag([1.0, -1.0]))).all()  # clipped to zero: all weight there
    np.testing.assert_allclose(least_quadratic(np.diag([1.0, -1.0])), [0, 1], atol=1e-12)
