"""Keyed draws: as random as they must be, the same everywhere, and never the same twice.

Nothing here is left to chance: seeds are fixed, so that a bound of 4.5 standard deviations either holds or does not.
"""

import math
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from scipy import stats

from fedloom.core import rng
from fedloom.core.rng import SMALL, Dropout, Random, key, numpy_generator, permutation

DEVIATIONS = 4.5
N = 200_000


def step_keys(seed, steps):
    """Keys of the steps of one fit."""
    return rng.step_keys(np.array([seed], np.uint64), steps)[0]


def keyed(value, device="cpu"):
    random = Random(torch.device(device))
    random.begin(torch.tensor([value], dtype=torch.int64, device=device))
    return random


def bits(value, count=N):
    """The first numbers of a key, as unsigned ones."""
    return keyed(value).bits((count,)).numpy().view(np.uint32)


def keys_of_all_kinds():
    """Small keys, which only a few bits tell apart, and keys as fits have them."""
    return [0, 1, 2, 3, -1, 1 << 31, 1 << 32, 1 << 62, *step_keys(key(3, 1, 0, "update"), 4).tolist()]


def correlation(one, other):
    return abs(np.corrcoef(one.astype(np.float64), other.astype(np.float64))[0, 1]) * math.sqrt(len(one))


def flipped(one, other):
    """By how many standard deviations the share of differing bits is not a half, over all bits and bit by bit."""
    found = np.unpackbits((one ^ other).view(np.uint8).reshape(-1, 4), axis=1)
    shares, n = found.mean(0), len(one)
    return abs(shares.mean() - 0.5) * 2 * math.sqrt(32 * n), abs(shares - 0.5).max() * 2 * math.sqrt(n)


@pytest.mark.parametrize("value", keys_of_all_kinds())
def test_every_bit_is_set_half_of_the_time(value):
    share = np.unpackbits(bits(value).view(np.uint8).reshape(-1, 4), axis=1).mean(0)
    assert share.shape == (32,)
    assert abs(share - 0.5).max() < DEVIATIONS * 0.5 / math.sqrt(N)


@pytest.mark.parametrize("value", keys_of_all_kinds())
def test_numbers_fill_all_buckets_alike(value):
    uniform = keyed(value).uniform((N,)).numpy()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    counts = np.bincount((uniform * 500).astype(int), minlength=500)
    assert 1e-5 < stats.chisquare(counts).pvalue < 1 - 1e-5  # neither uneven nor evener than chance
    low = np.bincount(bits(value) & 0xFF, minlength=256)
    assert 1e-5 < stats.chisquare(low).pvalue < 1 - 1e-5


@pytest.mark.parametrize("value", keys_of_all_kinds())
def test_pairs_of_neighbours_fill_the_square(value):
    uniform = keyed(value).uniform((2 * N,)).numpy().reshape(-1, 2)
    cells = (uniform * 20).astype(int) @ [20, 1]
    assert 1e-5 < stats.chisquare(np.bincount(cells, minlength=400)).pvalue < 1 - 1e-5


@pytest.mark.parametrize("value", keys_of_all_kinds())
@pytest.mark.parametrize("lag", [1, 2, 3, 64, 1024, 4096])
def test_neighbouring_counters_say_nothing_about_each_other(value, lag):
    drawn = bits(value)
    assert correlation(drawn[:-lag], drawn[lag:]) < DEVIATIONS
    assert max(flipped(drawn[:-lag], drawn[lag:])) < DEVIATIONS


@pytest.mark.parametrize("bit", range(56))
def test_seeds_that_differ_in_one_bit_have_nothing_in_common(bit):
    one, other = (bits(int(step_keys(seed, 1)[0])) for seed in (5, 5 ^ (1 << bit)))
    assert correlation(one, other) < DEVIATIONS
    assert max(flipped(one, other)) < DEVIATIONS


def test_keys_that_share_their_second_word_have_nothing_in_common():
    first, *others = step_keys(21, 40).tolist()
    common = ~0xFFFFFFFF
    for other in others:
        one, same = bits(first, 20_000), bits(first & common | other & ~common, 20_000)
        assert correlation(one, same) < DEVIATIONS
        assert max(flipped(one, same)) < DEVIATIONS


def test_hardly_any_two_keys_share_a_word():
    """Where two share the first one, some bits of what they draw agree more often than by chance."""
    words = np.concatenate([step_keys(key(0, 1, client), 400) for client in range(200)]).view(np.uint32).reshape(-1, 2)
    for word in words.T:
        assert len(word) - len(np.unique(word)) <= 6  # 0.75 expected


def test_neighbouring_steps_of_a_fit_draw_independently():
    drawn = [bits(int(k), 20_000) for k in step_keys(key(0, 1, 2, "update", "train", 0), 40)]
    for one, other in pairwise(drawn):
        assert correlation(one, other) < DEVIATIONS
        assert max(flipped(one, other)) < DEVIATIONS


def test_clients_rounds_and_seeds_draw_independently():
    def first(*parts):
        return bits(int(step_keys(key(*parts), 1)[0]), 20_000)

    reference = first(0, 1, 0, "update", "train", 0)
    others = [first(0, 1, client, "update", "train", 0) for client in range(1, 20)]
    others += [first(0, round, 0, "update", "train", 0) for round in range(2, 10)]
    others += [first(seed, 1, 0, "update", "train", 0) for seed in range(1, 10)]
    for other in others:
        assert correlation(reference, other) < DEVIATIONS
        assert max(flipped(reference, other)) < DEVIATIONS


def test_the_first_number_of_every_key_is_uniform_too():
    """What one draw of each step is: over steps, over clients."""
    steps = step_keys(7, 20_000)
    clients = np.concatenate([step_keys(key(0, 1, client), 1) for client in range(20_000)])
    for chosen in (steps, clients):
        first = torch.func.vmap(_first, chunk_size=500)(torch.from_numpy(chosen)[:, None]).numpy().ravel()
        assert stats.kstest(first, "uniform").pvalue > 1e-5
        assert correlation(first[:-1], first[1:]) < DEVIATIONS


def _first(k):
    random = Random(torch.device("cpu"))
    random.begin(k)
    return random.uniform((1,))


def test_no_two_keys_give_the_same_sequence_not_even_shifted():
    width = 8
    seen = Counter()
    for value in [*step_keys(11, 60).tolist(), *(int(step_keys(seed, 1)[0]) for seed in range(100, 140))]:
        drawn = bits(value, 2000)
        windows = np.lib.stride_tricks.sliding_window_view(drawn, width)
        seen.update(window.tobytes() for window in np.ascontiguousarray(windows))
    assert max(seen.values()) == 1
    assert len(seen) == 100 * (2000 - width + 1)


def test_step_keys_differ_within_and_between_fits():
    many = np.concatenate([step_keys(key(0, round, client), 200) for round in range(5) for client in range(40)])
    assert len(np.unique(many)) == len(many) == 40_000
    # one seed's keys are not another's, some steps later
    assert not set(step_keys(5, 500)) & set(step_keys(6, 500))
    assert (step_keys(5, 10) == step_keys(5, 500)[:10]).all()
    assert (rng.step_keys(np.array([4, 5], np.uint64), 10) == [step_keys(4, 10), step_keys(5, 10)]).all()
    spread = np.unpackbits(many.view(np.uint8).reshape(-1, 8), axis=1).mean(0)
    assert abs(spread - 0.5).max() < DEVIATIONS * 0.5 / math.sqrt(len(many))


def test_a_key_is_made_of_every_part():
    made = {key(seed, round, client, job) for seed in range(3) for round in range(3) for client in range(9)
            for job in ("update", "train")}  # fmt: skip
    assert len(made) == 3 * 3 * 9 * 2
    assert key(1, 23) != key(12, 3)
    assert key("a", "b") != key("ab")
    assert 0 <= min(made) <= max(made) < 2**56
    assert numpy_generator(1, "a").integers(2**40) == numpy_generator(1, "a").integers(2**40)
    assert numpy_generator(1, "a").integers(2**40) != numpy_generator(1, "b").integers(2**40)


@pytest.mark.parametrize("value", keys_of_all_kinds())
def test_normal_numbers_have_the_moments_of_a_normal_distribution(value):
    drawn = keyed(value).normal((N,)).numpy().astype(np.float64)
    assert abs(drawn.mean()) < DEVIATIONS / math.sqrt(N)
    assert abs(drawn.var() - 1) < DEVIATIONS * math.sqrt(2 / N)
    assert abs(stats.skew(drawn)) < DEVIATIONS * math.sqrt(6 / N)
    assert abs(stats.kurtosis(drawn)) < DEVIATIONS * math.sqrt(24 / N)
    assert stats.kstest(drawn, "norm").pvalue > 1e-5
    assert abs(drawn).max() < 6  # √(2 ln 2²⁴): the tails end there
    assert correlation(drawn[:-1], drawn[1:]) < DEVIATIONS


def test_a_normal_number_is_finite_wherever_its_uniform_ones_lie(monkeypatch):
    edges = torch.tensor([-(2**31), -1, 0, 2**31 - 1], dtype=torch.int32)
    random = keyed(0)
    monkeypatch.setattr(random, "bits", lambda shape: edges)
    assert random.normal((4,)).isfinite().all()
    assert random.uniform((4,)).tolist() == [0.5, 1 - 2**-24, 0, 0.5 - 2**-24]


@pytest.mark.parametrize("high", [1, 2, 3, 7, 10, 1000, 50_000])
def test_integers_are_unbiased(high):
    drawn = keyed(int(step_keys(high, 1)[0])).integers(high, (N,)).numpy()
    assert drawn.dtype == np.int64
    assert drawn.min() >= 0
    assert drawn.max() < high
    if high > 1:
        assert stats.chisquare(np.bincount(drawn, minlength=high)).pvalue > 1e-5


def test_integers_reach_both_ends(monkeypatch):
    random = keyed(0)
    monkeypatch.setattr(random, "bits", lambda shape: torch.tensor([0, -1], dtype=torch.int32))
    assert random.integers(7, (2,)).tolist() == [0, 6]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("p", [0.0, 1e-3, 0.25, 0.5, 0.9, 1 - 1e-3, 1.0])
def test_so_many_are_chosen(p, small):
    random = keyed(int(step_keys(17, 1)[0]))
    drawn = torch.cat([random.chosen((1000,), p) for _ in range(200)]) if small else random.chosen((N,), p)
    assert drawn.dtype == torch.bool
    assert drawn.shape == (N,)
    assert abs(drawn.float().mean().item() - p) <= DEVIATIONS * math.sqrt(p * (1 - p) / N)
    if 0 < p < 1:
        taken = drawn.numpy()
        for lag in (1, 2, 1000, N // 2):
            assert correlation(taken[:-lag], taken[lag:]) < DEVIATIONS


@pytest.mark.parametrize("count", [100, 10_001])
@pytest.mark.parametrize("p", [1e-12, 1 - 1e-12, math.nextafter(1, 0)])
def test_probabilities_that_are_too_fine_are_never_or_always(p, count):
    drawn = keyed(1).chosen((count,), p)
    assert drawn.shape == (count,)
    assert drawn.float().mean().item() == round(p)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.2, 0.9), (3.0, 7.0)])
def test_uniform_numbers_lie_between_their_bounds(low, high):
    drawn = keyed(2).uniform((N,), low, high).numpy()
    assert drawn.dtype == np.float32
    assert np.float32(low) <= drawn.min() < low + 1e-3 * (high - low)
    assert high - 1e-3 * (high - low) < drawn.max() <= np.float32(high)
    assert stats.kstest(drawn, "uniform", (low, high - low)).pvalue > 1e-5


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_permutation_is_any_of_them_alike(size):
    trials = 6000
    counts = Counter(tuple(permutation(key("order", seed), size)) for seed in range(trials))
    assert counts.keys() == set(permutations(range(size)))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-5


@pytest.mark.parametrize("size", [0, 1, 5, 1000])
def test_a_permutation_has_every_number_once(size):
    assert sorted(permutation(3, size)) == list(range(size))
    assert (permutation(3, size) == permutation(3, size)).all()
    if size > 4:
        assert (permutation(3, size) != permutation(4, size)).any()


@pytest.mark.parametrize("shapes", [[(3,), (5, 7), (1,)], [(SMALL,)] * 9, [(7,), (5000,), (7,), (SMALL + 1,), (2, 2)]])
def test_what_is_drawn_after_something_else_is_new(shapes):
    random = keyed(9)
    drawn = torch.cat([random.bits(shape).flatten() for shape in shapes])
    assert len(drawn) == sum(math.prod(shape) for shape in shapes)
    # a key's numbers are a permutation of all 32-bit ones: two that are equal have the same counter
    assert len(drawn.unique()) == len(drawn)


def test_draws_of_all_kinds_do_not_overlap(monkeypatch):
    random, small, large = keyed(9), [], []
    bits_of, hashed = random.bits, random._hashed

    def noting_bits(shape):
        made = bits_of(shape)
        if made.numel() <= SMALL:  # large ones come from `_hashed` as they are
            small.append(made.flatten())
        return made

    def noting_hashes(count):
        made = hashed(count)
        if count != 4 * SMALL:  # what small draws are cut from
            large.append(made)
        return made

    monkeypatch.setattr(random, "bits", noting_bits)
    monkeypatch.setattr(random, "_hashed", noting_hashes)
    random.uniform((4, 5))
    random.normal((3000,))
    random.chosen((2, SMALL), 0.5)
    random.integers(9, (SMALL,))
    random.chosen((7,), 0.5)
    random.normal((2,))
    everything = torch.cat([*small, *large])
    assert len(everything) == 20 + 2 * 3000 + SMALL + SMALL + 7 + 2 * 2  # two numbers are chosen by one hash
    assert len(everything.unique()) == len(everything)


def test_beginning_again_repeats_and_another_key_does_not():
    random, value = Random(torch.device("cpu")), torch.tensor([5])
    found = []
    for k in (value, value, torch.tensor([6])):
        random.begin(k)
        found.append([random.bits((3,)), random.bits((2000,)), random.normal((4,))])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def test_drawing_leaves_what_was_drawn_before_as_it_was():
    random = keyed(4)
    first = random.bits((10,))
    kept = first.clone()
    random.uniform((10,))
    random.normal((10,))
    assert torch.equal(first, kept)


def test_without_a_key_nothing_is_drawn():
    with pytest.raises(RuntimeError, match="inside a training step only"):
        Random(torch.device("cpu")).uniform((2,))


def test_counters_grow_and_the_old_ones_stay(monkeypatch):
    monkeypatch.setattr(Random, "_counters", {})
    random = keyed(3)
    before = random.counters
    many = random.bits((3 * len(before),))
    assert len(random.counters) >= len(many)
    assert len(many.unique()) == len(many)
    assert torch.equal(before, torch.arange(len(before), dtype=torch.int32))
    assert Random._counters[random.device][0] is before
    assert torch.equal(many[: len(before)], keyed(3).bits((len(before),)))


def everything(k):
    """One of each, small ones and large ones."""
    random = Random(k.device)
    random.begin(k)
    return (
        random.bits((3, 5)), random.uniform((2000,)), random.uniform((7,), -0.5, 2.5), random.integers(10, (50,)),
        random.chosen((64,), 0.3), random.chosen((1501,), 0.3), random.bits((1500,)),
        random.normal((1100,)), random.normal((9,)),
    )  # fmt: skip


def assert_the_same(got, expected):
    *exact, large, small = zip(got, expected, strict=True)
    for mine, theirs in exact:
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)
    for mine, theirs in (large, small):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-6)


def test_many_keys_at_once_draw_what_each_draws_alone():
    keys = torch.from_numpy(step_keys(5, 6))[:, None]
    together = torch.func.vmap(everything)(keys)
    for i, one in enumerate(keys):
        for mine, theirs in zip(together, everything(one), strict=True):
            assert torch.equal(mine[i], theirs)


@pytest.mark.slow
def test_a_compiled_function_draws_the_same():
    k = torch.from_numpy(step_keys(8, 1))
    assert len(Random(k.device).counters)
    assert_the_same(torch.compile(everything, fullgraph=True)(k), everything(k))


@pytest.mark.cuda
@pytest.mark.parametrize("value", keys_of_all_kinds())
def test_a_gpu_draws_what_a_cpu_draws(value):
    k = torch.tensor([value])
    assert_the_same(everything(k.cuda()), everything(k))
    many = keyed(value, "cuda").normal((N,)).cpu()
    torch.testing.assert_close(many, keyed(value).normal((N,)), rtol=1e-4, atol=1e-5)
    assert torch.equal(keyed(value, "cuda").bits((N,)).cpu(), keyed(value).bits((N,)))


@pytest.mark.cuda
@pytest.mark.slow
def test_a_function_compiled_for_a_gpu_draws_the_same():
    k = torch.from_numpy(step_keys(8, 1)).cuda()
    assert len(Random(k.device).counters)
    assert_the_same(torch.compile(everything, fullgraph=True)(k), everything(k.cpu()))


def test_seeded_is_a_key_of_its_parts():
    assert torch.equal(Random.seeded(1, "a").bits((9,)), Random.seeded(1, "a").bits((9,)))
    assert not torch.equal(Random.seeded(1, "a").bits((9,)), Random.seeded(1, "b").bits((9,)))
    assert torch.equal(Random.seeded(1, "a").bits((9,)), keyed(int(step_keys(key(1, "a"), 1)[0])).bits((9,)))


def test_dropout_zeroes_rescales_and_follows_its_key():
    module, x = Dropout(0.3), torch.ones(500, 200)
    module.random = keyed(6)
    first, second = module(x), module(x)
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert (first == 0).float().mean().item() == pytest.approx(0.3, abs=DEVIATIONS * math.sqrt(0.21 / x.numel()))
    assert not torch.equal(first, second)
    module.random = keyed(6)
    assert torch.equal(module(x), first)
    assert module.eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_dropout_without_keys_uses_torchs_generator():
    torch.manual_seed(0)
    first = Dropout(0.5)(torch.ones(100))
    assert 20 < (first == 0).sum() < 80
    assert not torch.equal(Dropout(0.5)(torch.ones(100)), first)


@pytest.mark.parametrize(
    "weak",
    [
        lambda x, by, mask: x,  # no mixing
        lambda x, by, mask: x ^ (x >> by),  # the sign repeated by the shift
    ],
    ids=["none", "signed"],
)
def test_these_tests_notice_a_weaker_hash(monkeypatch, weak):
    monkeypatch.setattr(rng, "_mixed", weak)
    drawn = bits(int(step_keys(5, 1)[0]))
    worst = max(
        *flipped(drawn[:-1], drawn[1:]),
        correlation(drawn[:-1], drawn[1:]),
        abs(np.unpackbits(drawn.view(np.uint8).reshape(-1, 4), axis=1).mean(0) - 0.5).max() * 2 * math.sqrt(N),
    )
    assert worst > DEVIATIONS
