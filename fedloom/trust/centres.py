"""Robust centres of vectors, some of which may be hostile: pure functions of tensors [n, …], one row per client.

docs/explanation/trust.md states what each of them withstands and what it costs; `robust.py` applies them to messages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 1000
CLOSE = 1e-12
"""Weiszfeld's iteration ends when no weight changes by more than `CLOSE`, or after `STEPS` steps."""


def clip_factor(norm: float, bound: float) -> float:
    """Return min(1, bound / norm), which scales an update into the ball of radius `bound`; 0 for NaN or infinity."""
    if norm <= bound:
        return 1.0
    return bound / norm if norm < float("inf") else 0.0


def joint_norm(updates: Sequence[Tensor]) -> float:
    """Return ‖·‖₂ of several tensors taken as one vector, in float64."""
    if not updates:
        return 0.0
    return float(torch.stack([update.double().square().sum() for update in updates]).sum().sqrt())


def trimmed_mean(values: Tensor, cut: int) -> Tensor:
    """Return, per coordinate, the mean without the `cut` smallest and largest of n values (Yin et al., 2018)."""
    n = len(values)
    if not 0 <= 2 * cut < n:
        raise ValueError(f"cannot cut {cut} from both ends of {n} values")
    return values.double().sort(0).values[cut : n - cut].mean(0)


def median(values: Tensor) -> Tensor:
    """Return, per coordinate, the median of n values; for even n, the mean of the two middle values."""
    return trimmed_mean(values, (len(values) - 1) // 2)


def squared_distances(tensors: Sequence[Tensor]) -> Tensor:
    """Return ‖x_i − x_j‖² as [n, n]; x_i is row i of all the [n, …] tensors, taken as one vector."""
    n = len(tensors[0])
    total = torch.zeros(n, n, dtype=torch.float64)
    for tensor in tensors:  # one at a time, so that only one float64 copy exists
        flat = tensor.reshape(n, -1).double()
        for i in range(n - 1):  # differences, not a Gram matrix, which loses digits for vectors close to each other
            total[i, i + 1 :] += (flat[i + 1 :] - flat[i]).square().sum(1).cpu()
    return total + total.T


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """Return each vector's sum of squared distances to its n − f − 2 nearest (Blanchard et al., 2017); low is good."""
    n = len(distances)
    if n < krum_needs(attackers):
        raise ValueError(f"Krum with {attackers} attackers needs {krum_needs(attackers)} vectors, not {n}")
    others = distances.clone().fill_diagonal_(torch.inf).sort(1).values
    return others[:, : n - attackers - 2].sum(1)


def krum_needs(attackers: int) -> int:
    """Return the number of vectors that Krum's proof requires with f attackers: 2f + 3."""
    return 2 * attackers + 3


def geometric_weights(distances: Tensor) -> Tensor:
    """Return convex weights a such that Σ a_i x_i is the geometric median, argmin_y Σ ‖y − x_i‖.

    Weiszfeld's iteration needs only the squared distances D between the vectors, not the vectors: with Σ a = 1,
    ‖Σ a_j x_j − x_i‖² = (D a)_i − aᵀ D a / 2. The case that one of the vectors is the median is tested first (Vardi &
    Zhang, 2000, Eq. 2.9): x_i is the median if ‖Σ_j (x_j − x_i)/‖x_j − x_i‖‖, the pull of the other vectors, does not
    exceed the number of vectors that coincide with x_i.
    """
    n = len(distances)
    apart = distances.sqrt()
    scale = float(apart.max())
    if scale == 0:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    same = apart <= scale * CLOSE
    for i in range(n):
        pull = torch.where(same[i], 0.0, 1 / apart[i].clamp_min(scale * CLOSE))
        # ‖Σ_j p_j (x_j − x_i)‖² = P Σ_j p_j D_ij − ½ pᵀ D p, with P = Σ_j p_j
        square = pull.sum() * (pull @ distances[i]) - pull @ distances @ pull / 2
        if square <= same[i].sum() ** 2:
            return same[i].double() / same[i].sum()
    weights = torch.full((n,), 1 / n, dtype=torch.float64)
    for _ in range(STEPS):
        reach = (distances @ weights - weights @ distances @ weights / 2).clamp_min((scale * CLOSE) ** 2).sqrt()
        new = 1 / reach / (1 / reach).sum()
        if float((new - weights).abs().max()) <= CLOSE:
            return new
        weights = new
    return weights
