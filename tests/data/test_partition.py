import time

import numpy as np
import pytest

from fedloom.core.errors import UserError
from fedloom.data import Pool, parse_partition
from fedloom.data.partitions import PARTITIONS

LABELS = np.random.default_rng(7).permutation(np.repeat(np.arange(10), 300))
GROUPS = np.random.default_rng(8).permutation(np.repeat(np.arange(4), [300, 600, 900, 1200]))
SPECS = [
    "iid",
    "dirichlet:0.1",
    "dirichlet:5",
    "capped-dirichlet:0.1",
    "equal-dirichlet:0.5",
    "pathological:2",
    "uneven-pathological:2",
    "grouped-pathological:2",
    "shards:2",
    "quantity:0.5",
    "domain",
    "domain:5",
    "domain:5:0.5",
    "natural",
]


def divide(
    spec: str,
    clients: int = 20,
    labels: np.ndarray = LABELS,
    groups: np.ndarray | None = GROUPS,
    seed: int = 0,
    minimum: int = 10,
    notes: list[str] | None = None,
) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    pool = Pool(labels, clients, rng, groups, minimum, [] if notes is None else notes)
    return parse_partition(spec)(pool)


def sizes(parts: list[np.ndarray]) -> np.ndarray:
    return np.array([len(part) for part in parts])


def table(parts: list[np.ndarray], labels: np.ndarray = LABELS) -> np.ndarray:
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


@pytest.mark.parametrize("spec", SPECS)
def test_every_sample_goes_to_one_client(spec: str) -> None:
    parts = divide(spec)
    assert len(parts) == (4 if spec == "natural" else 20)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(3000))
    assert all(np.all(np.diff(part) > 0) for part in parts)
    assert all(part.dtype == np.int64 for part in parts)


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_seed_divides_the_same_way(spec: str) -> None:
    for once, again in zip(divide(spec), divide(spec), strict=True):
        assert np.array_equal(once, again)
    if spec != "natural":
        other = divide(spec, seed=1)
        assert not all(np.array_equal(a, b) for a, b in zip(divide(spec), other, strict=True))


def test_every_division_is_tried_here() -> None:
    assert {spec.split(":")[0] for spec in SPECS} == set(PARTITIONS)


def test_iid_sizes_differ_by_one_at_most_and_labels_are_alike() -> None:
    assert sorted(set(sizes(divide("iid", clients=7)))) == [428, 429]
    assert np.abs(table(divide("iid", clients=3)) - 100).max() < 35


def test_dirichlet_shares_have_the_mean_and_variance_of_theory() -> None:
    # One share of Dir(alpha, …, alpha) over K has mean 1/K and variance (K−1) / (K² (K·alpha + 1)).
    alpha, clients = 0.5, 10
    labels = np.repeat(np.arange(400), 500)
    shares = table(divide(f"dirichlet:{alpha}", clients, labels, None, minimum=1), labels).T / 500
    assert shares.mean() == pytest.approx(0.1)
    assert shares.var() == pytest.approx((clients - 1) / (clients**2 * (clients * alpha + 1)), rel=0.1)


def test_rounding_favours_neither_the_first_nor_the_last_client() -> None:
    labels = np.repeat(np.arange(2000), 7)
    totals = sizes(divide("dirichlet:100", 20, labels, None, minimum=1))
    assert totals[0] == pytest.approx(700, abs=80)
    assert totals[-1] == pytest.approx(700, abs=80)


def test_smaller_alpha_means_fewer_classes_that_matter() -> None:
    def largest_share(spec: str) -> float:
        held = table(divide(spec))
        return float((held.max(1) / held.sum(1)).mean())

    assert largest_share("dirichlet:0.05") > 0.7 > largest_share("dirichlet:1") > 0.2 > largest_share("dirichlet:100")


@pytest.mark.parametrize("spec", ["dirichlet:0.05", "quantity:0.1"])
def test_random_sizes_leave_everyone_the_minimum(spec: str) -> None:
    notes: list[str] = []
    parts = divide(spec, clients=100, minimum=10, notes=notes)
    assert sizes(parts).min() >= 10
    assert sizes(parts).max() > 60
    assert any("samples were moved to them from the largest" in note for note in notes)


def test_redrawing_satisfies_the_minimum_without_moving_samples() -> None:
    for seed in range(10):  # a single draw is good enough in three of five cases
        notes: list[str] = []
        assert sizes(divide("dirichlet:0.3", clients=10, seed=seed, minimum=100, notes=notes)).min() >= 100
        assert notes == []


def test_a_minimum_out_of_reach_is_lowered_to_half_the_mean_and_said() -> None:
    notes: list[str] = []
    assert sizes(divide("dirichlet:0.1", clients=500, minimum=10, notes=notes)).min() == 3
    assert any("there are too few samples for the minimum of 10" in note for note in notes)


def test_capped_dirichlet_gives_nothing_more_to_who_has_an_even_share() -> None:
    for seed in range(20):
        held = table(divide("capped-dirichlet:0.3", clients=5, seed=seed, minimum=1))
        before = held.cumsum(1) - held
        assert not held[before >= 600].any()
    capped, plain = (np.concatenate([sizes(divide(spec, seed=seed)) for seed in range(20)])
                     for spec in ("capped-dirichlet:0.1", "dirichlet:0.1"))  # fmt: skip
    assert capped.std() < 0.8 * plain.std()


def test_equal_dirichlet_gives_all_the_same_size_with_skewed_labels() -> None:
    parts = divide("equal-dirichlet:0.3", clients=20)
    assert set(sizes(parts)) == {150}
    held = table(parts)
    assert (held.max(1) / 150).mean() > 0.4
    notes: list[str] = []
    assert set(sizes(divide("equal-dirichlet:0.3", clients=7, notes=notes))) == {428}
    assert notes == ["partition 'equal-dirichlet:0.3' leaves 4 of 3000 samples unused"]


def test_equal_dirichlet_proportions_are_those_drawn_while_classes_last() -> None:
    # With far more samples than clients use up, the first client's counts are multinomial in its own share.
    labels = np.repeat(np.arange(5), 20_000)
    held = table(divide("equal-dirichlet:0.5", 2000, labels, None, seed=3), labels)[:400] / 50
    # variance of a Dir(0.5) share over 5 classes, and of 50 draws in it: (1 + (n−1)ρ)/n with ρ = 1/(K·beta + 1)
    rho = 1 / (5 * 0.5 + 1)
    expected = 0.2 * 0.8 * (1 + 49 * rho) / 50
    assert held.var() == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("classes", [1, 2, 5, 10])
def test_pathological_clients_hold_exactly_k_classes_and_classes_as_many_clients(classes: int) -> None:
    held = table(divide(f"pathological:{classes}", clients=20)) > 0
    assert set(held.sum(1)) == {classes}
    assert held.sum(0).max() - held.sum(0).min() <= 1


def test_pathological_portions_of_a_class_are_even() -> None:
    held = table(divide("pathological:2", clients=15))
    for column in held.T:
        assert np.ptp(column[column > 0]) <= 1


def test_pathological_classes_that_nobody_holds_are_said() -> None:
    notes: list[str] = []
    parts = divide("pathological:2", clients=3, notes=notes)
    assert sizes(parts).sum() == 1800
    assert notes == ["partition 'pathological:2' leaves 1200 of 3000 samples unused"]


def test_shards_hold_few_labels_and_are_equal() -> None:
    parts = divide("shards:2", clients=20)
    assert set(sizes(parts)) == {150}
    # 40 shards of 75 cut 10 classes of 300 without remainder: each shard has one label
    assert (table(parts) > 0).sum(1).max() <= 2


def test_quantity_skews_sizes_and_not_labels() -> None:
    parts = divide("quantity:0.5", clients=10, minimum=1)
    assert sizes(parts).max() > 2 * 300
    large = max(parts, key=len)
    share = np.bincount(LABELS[large], minlength=10) / len(large)
    assert np.abs(share - 0.1).max() < 0.05


def test_domain_clients_have_one_domain_each() -> None:
    for spec in ("domain", "domain:5", "domain:5:0.5"):
        parts = divide(spec)
        owned = [set(GROUPS[part].tolist()) for part in parts]
        assert owned == [{client // 5} for client in range(20)]
        assert [len(part) for part in parts[::5]] == [60, 120, 180, 240]
    skew = table(divide("domain:5:0.2")).max(1) / sizes(divide("domain:5:0.2"))
    assert skew.mean() > 2 * (table(divide("domain:5")).max(1) / sizes(divide("domain:5"))).mean()


def test_natural_clients_are_the_groups_whatever_number_was_asked() -> None:
    notes: list[str] = []
    parts = divide("natural", clients=20, notes=notes)
    assert all(np.array_equal(part, np.flatnonzero(g == GROUPS)) for g, part in enumerate(parts))
    assert notes == ["partition 'natural' makes 4 clients (not 20)"]
    assert len(divide("domain:3", clients=20)) == 12


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dirichlett:0.1", "partition 'dirichlett:0.1': 'dirichlett' is unknown: did you mean 'dirichlet'"),
        ("dirichlet", r"has 0 value\(s\); write it as dirichlet:alpha"),
        ("iid:3", r"has 1 value\(s\); write it as iid"),
        ("domain:1:2:3", r"has 3 value\(s\); write it as domain:\[each\]:\[beta\]"),
        ("dirichlet:x", "partition 'dirichlet:x': alpha = 'x': must be a number"),
        ("dirichlet:0", "partition 'dirichlet:0': alpha = '0': must be above 0"),
        ("dirichlet:inf", "partition 'dirichlet:inf': alpha = 'inf': must be a finite number"),
        ("dirichlet:nan", "partition 'dirichlet:nan': alpha = 'nan': must be above 0"),
        ("pathological:2.5", "classes = '2.5': must be a whole number"),
        ("shards:-1", "each = '-1': must be at least 1"),
        ("domain:", "each = '': must be a whole number"),
    ],
)
def test_a_spec_that_cannot_be_read_is_refused(spec: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_partition(spec)


def test_divisions_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(UserError, match="3001 clients cannot share 3000 samples"):
        divide("iid", clients=3001)
    with pytest.raises(UserError, match="clients: 0 is too few"):
        divide("iid", clients=0)
    with pytest.raises(UserError, match="name the column of the client in a table"):
        divide("natural", groups=None)
    with pytest.raises(UserError, match="18 clients cannot be spread evenly over 4 domains; use a multiple of 4"):
        divide("domain", clients=18)
    with pytest.raises(UserError, match="domain 0 has only 300 samples"):
        divide("domain:301")
    with pytest.raises(UserError, match="there are only 10 classes"):
        divide("pathological:11")
    with pytest.raises(UserError, match="class 0 has 300 samples for 400 clients"):
        divide("pathological:2", clients=2000)
    with pytest.raises(UserError, match="4000 shards cannot be cut from 3000 samples"):
        divide("shards:2", clients=2000)


@pytest.mark.parametrize(
    "spec",
    [
        "iid",
        "dirichlet:0.1",
        "capped-dirichlet:0.1",
        "equal-dirichlet:0.5",
        "pathological:2",
        "shards:2",
        "quantity:0.5",
    ],
)
def test_ten_thousand_clients_are_a_matter_of_seconds(spec: str) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))
    start = time.perf_counter()
    parts = divide(spec, 10_000, labels, None)
    assert time.perf_counter() - start < 5
    assert len(parts) == 10_000
    assert sizes(parts).min() >= 1
    assert sizes(parts).sum() == 60_000
