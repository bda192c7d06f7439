"""Bucketing against NumPy: which clients share a bucket, and how rows, sums and integers are averaged in it."""

import numpy as np
import pytest
import torch
from test_robust import messages, server
from tiny import same_state, tiny_run, without_times

from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.rng import numpy_generator
from fedloom.methods import get
from fedloom.trust.buckets import bucketed, seeded_orders, system_orders
from fedloom.trust.robust import RobustAverage, RobustSettings

VALUES = np.random.default_rng(0).normal(size=(9, 4))


def vectors(values=VALUES):
    return [Message({"w": torch.from_numpy(v)}, client=i, samples=i + 1) for i, v in enumerate(values)]


def bucket_means(round, size, values=VALUES):
    order = numpy_generator(0, round, "buckets").permutation(len(values))
    return np.stack([values[order[i : i + size]].mean(0) for i in range(0, len(values), size)])


def seeded(**settings):
    made = server(9, **settings)
    made._combination._orders = seeded_orders(0)
    return made


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rule", [{"rule": "median"}, {"rule": "clip", "clip": 1e9}, {"rule": "geometric"}])
def test_the_rule_combines_the_means_of_random_buckets(rule, size):
    made = seeded(**rule, bucket=size)
    made.begin(7)
    means = bucket_means(7, size)
    expected = server(len(means), **rule).average(vectors(means))["w"]
    assert np.allclose(made.average(vectors())["w"], expected, rtol=0, atol=1e-9)
    if rule["rule"] == "median":
        assert np.allclose(expected, np.median(means, axis=0), rtol=0, atol=1e-12)


def test_krum_chooses_one_bucket_and_multikrum_leaves_some_out():
    values = VALUES / 10
    values[4] = 100.0
    made, several = (seeded(rule=r, attackers=1, bucket=2) for r in ("krum", "multikrum"))
    means = bucket_means(0, 2, values)
    found = made.average(vectors(values))["w"].numpy()
    assert min(np.abs(means - found).max(1)) < 1e-7
    kept = means[np.abs(means).max(1) < 10]
    assert len(kept) == 4
    assert np.allclose(several.average(vectors(values))["w"], kept.mean(0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("rule", [{"rule": "median"}, {"rule": "krum", "attackers": 1}, {"rule": "geometric"}])
def test_buckets_of_one_are_no_buckets(rule):
    plain, ones = server(9, **rule), server(9, **rule, bucket=1)
    assert torch.equal(plain.average(vectors())["w"], ones.average(vectors())["w"])
    alone = list(bucketed(vectors(), 1, numpy_generator(0), {}, ()))
    assert sorted(m["w"].tolist() for m in alone) == sorted(VALUES.tolist())


def test_buckets_differ_between_rounds_and_deployments_do_not_follow_the_seed():
    assert not np.array_equal(bucket_means(1, 2), bucket_means(2, 2))
    assert system_orders(1).permutation(50).tolist() != system_orders(1).permutation(50).tolist()


def test_rows_are_averaged_over_holders_sums_keep_their_total_and_integers_take_the_maximum():
    sent = [
        Message(
            {
                "means": torch.tensor([[m], [5.0 * h]]), "counts": torch.tensor([1.0, h]),
                "change": torch.tensor([c]), "n": torch.tensor(n),
            },
            client=i, samples=1,
        )
        for i, (m, h, c, n) in enumerate([(1.0, 0.0, 1.0, 3), (3.0, 1.0, 2.0, 9), (5.0, 0.0, 4.0, 4)])
    ]  # fmt: skip
    rows, sums = {"means": "counts"}, ("counts", "change")
    (one,) = bucketed(sent, 3, numpy_generator(0), rows, sums)
    assert one["means"][:, 0].tolist() == [3.0, 5.0]
    assert one["counts"].tolist() == [3.0, 1.0]
    assert (one["change"].item(), one["n"].item()) == (pytest.approx(7.0), 9)
    two = list(bucketed(sent, 2, numpy_generator(0), rows, sums))
    order = numpy_generator(0).permutation(3)
    change = np.array([1.0, 2.0, 4.0])[order]
    assert sum(m["change"].item() for m in two) == pytest.approx(3 * (change[:2].mean() + change[2]) / 2)
    made = server(3, rule="clip", clip=1e9, bucket=3)
    made.state["means"] = torch.zeros(2, 1)
    got = made.average(sent, by=rows, sums=sums)
    assert (got["counts"].tolist(), got["means"][:, 0].tolist()) == ([3.0, 1.0], [3.0, 5.0])


def test_too_few_buckets_are_refused_before_the_run_and_in_a_round():
    words = r"robust\.attackers = 4: krum needs 11 buckets .* but 10 are formed from the 20 clients .*at most 3"
    with pytest.raises(UserError, match=words):
        RobustAverage(RobustSettings(rule="krum", attackers=4, bucket=2), get("fedavg"), 20)
    with pytest.raises(UserError, match="4 are formed from the 7 clients that sent a usable message in round 0"):
        server(9, rule="krum", attackers=1, bucket=2).average(messages([[1.0]] * 7, samples=(1,) * 7))


@pytest.mark.parametrize("method", ["fedcrl", "scaffold"])
def test_engines_agree(method):
    fields = {"robust": {"rule": "median", "bucket": 2}, "training__fraction": 1.0, "training__rounds": 2}
    one, other = (tiny_run(method, engine=e, **fields) for e in ("inline", "processes"))
    assert without_times(one.history) == without_times(other.history)
    assert same_state(one.server.state, other.server.state)
