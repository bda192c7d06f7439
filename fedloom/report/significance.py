"""Statistics of results tables: sample deviations, confidence intervals, paired tests with Holm's correction."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

FEWEST_SEEDS = 6
"""With fewer pairs, the two-sided signed-rank test cannot reach p < 0.05: five pairs have p ≥ 2 / 2⁵ = 0.0625."""
LEVEL = 0.05
"""Corrected p-values below this are marked."""
EXACT = 50
"""Largest number of pairs with an exact test; beyond, the normal approximation is as good."""
Name = TypeVar("Name")


def sample_std(values: Sequence[float]) -> float:
    """Return the sample standard deviation, which divides by n − 1; 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def half_width(values: Sequence[float], confidence: float = 0.95) -> float:
    """Return half the width of the mean's confidence interval by Student's t; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    from scipy.stats import t

    n = len(values)
    return float(t.ppf((1 + confidence) / 2, n - 1)) * sample_std(values) / n**0.5


def signed_rank(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the p-value of Wilcoxon's two-sided signed-rank test of paired values; 1 if all pairs are equal.

    Equal pairs are left out, equal differences share their mean rank. Up to `EXACT` pairs the p-value is exact, also
    with shared ranks, where the normal approximation is too small: 0.014 instead of 0.031 for six equal differences.
    Differences are rounded to twelve decimals first, because means of equal shares may differ by a rounding error,
    which would count as a difference and as a rank.
    """
    from scipy.stats import rankdata, wilcoxon

    differences = np.round(np.subtract(one, other), 12)
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    if len(differences) > EXACT:
        return float(wilcoxon(differences, method="approx").pvalue)
    ranks = np.round(2 * rankdata(np.abs(differences))).astype(int)  # doubled: shared ranks may be halves
    signs = np.array([1.0])  # number of choices of signs by the sum of the positive ranks
    for rank in ranks:
        signs = np.pad(signs, (0, rank)) + np.pad(signs, (rank, 0))
    found = ranks[differences > 0].sum()
    tail = min(signs[: found + 1].sum(), signs[found:].sum()) / signs.sum()
    return min(1.0, 2 * float(tail))


def smallest_p(pairs: int, comparisons: int) -> float:
    """Return the smallest p-value that this many pairs can reach after the correction of this many comparisons."""
    return min(1.0, comparisons * 2.0 ** (1 - pairs))


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Return p-values corrected for several comparisons by Holm's step-down method."""
    corrected: dict[Name, float] = {}
    highest = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        highest = max(highest, min(1.0, (len(p_values) - place) * p))
        corrected[name] = highest
    return {name: corrected[name] for name in p_values}
