"""Shares determine a secret from the threshold on, and say nothing below it."""

import secrets
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.trust.secure.shamir import PRIME, SHARE_BYTES, join, split


def test_the_modulus_is_prime():
    """Miller–Rabin with random bases; 2**256 + 297 is written as q · 2**s + 1."""
    q, s = PRIME - 1, 0
    while q % 2 == 0:
        q, s = q // 2, s + 1
    for _ in range(40):
        x = pow(2 + secrets.randbelow(PRIME - 3), q, PRIME)
        if x in (1, PRIME - 1):
            continue
        squares = [pow(x, 2**power, PRIME) for power in range(1, s)]
        assert PRIME - 1 in squares


@given(st.binary(min_size=32, max_size=32), st.integers(2, 12), st.data())
def test_any_threshold_of_shares_give_the_secret(secret, members, data):
    threshold = data.draw(st.integers(2, members))
    holders = data.draw(st.lists(st.integers(0, 10**6), min_size=members, max_size=members, unique=True))
    shares = split(secret, threshold, holders)
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    chosen = data.draw(st.permutations(holders))[: data.draw(st.integers(threshold, members))]
    assert join({holder: shares[holder] for holder in chosen}) == secret


@given(st.binary(min_size=32, max_size=32))
def test_fewer_shares_fit_every_secret(secret):
    """Two of three shares: for any other secret there is a third share that gives it."""
    shares = split(secret, 3, range(3))
    known = {0: shares[0], 1: shares[1]}
    wanted = int.from_bytes(bytes(31) + b"\x07")
    # Lagrange at 0 for the points 1, 2, 3: 3·f(1) − 3·f(2) + f(3)
    third = (wanted - 3 * int.from_bytes(known[0]) + 3 * int.from_bytes(known[1])) % PRIME
    assert join({**known, 2: third.to_bytes(SHARE_BYTES)}) == wanted.to_bytes(32)


def test_a_wrong_share_gives_another_secret_or_none():
    secret = secrets.token_bytes(32)
    shares = split(secret, 3, range(5))
    shares[2] = (int.from_bytes(shares[2]) ^ 1).to_bytes(SHARE_BYTES)
    for chosen in combinations(range(5), 3):
        assert (join({holder: shares[holder] for holder in chosen}) == secret) == (2 not in chosen)


def test_two_splits_of_a_secret_differ():
    secret = bytes(32)
    assert split(secret, 2, range(3)) != split(secret, 2, range(3))


@pytest.mark.parametrize("size", [31, 33])
def test_a_secret_has_32_bytes(size):
    with pytest.raises(AssertionError):
        split(bytes(size), 2, range(3))
