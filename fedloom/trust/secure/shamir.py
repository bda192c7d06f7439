"""Shamir's secret sharing of 32 bytes, over the integers modulo the smallest prime above 2**256."""

import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33


def split(secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, bytes]:
    """Split a secret into shares: `threshold` of them determine it, and fewer say nothing about it.

    Args:
        secret: 32 bytes.
        threshold: Number of shares that are needed.
        holders: Numbers from 0, one per share.

    Returns:
        The share of each holder, 33 bytes.
    """
    assert len(secret) == SECRET_BYTES
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {holder: _value(coefficients, holder + 1).to_bytes(SHARE_BYTES) for holder in holders}


def join(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret of these shares; None if they belong to no secret of 32 bytes, so that one must be wrong.

    Args:
        shares: At least as many shares as the threshold, by holder.
    """
    points = {holder + 1: int.from_bytes(share) for holder, share in shares.items()}
    total = 0
    for x, y in points.items():
        numerator = denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        total = (total + y * numerator * pow(denominator, -1, PRIME)) % PRIME
    return total.to_bytes(SECRET_BYTES) if total < 2**256 else None


def _value(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
