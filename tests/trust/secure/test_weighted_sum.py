"""What clients add up gives what `server.average` gives: means, row weights, sums, and parts that nobody holds."""

import numpy as np
import pytest
import torch

from fedloom.core.message import Message, signature
from fedloom.core.server import WeightedMean
from fedloom.methods import METHODS, get
from fedloom.trust.access import Averaging
from fedloom.trust.secure.ring import FixedPoint
from fedloom.trust.secure.settings import unsummable
from fedloom.trust.secure.weighted import WeightedSum

OLD = {
    "model.w": torch.full((2, 3), 7.0),
    "means": torch.full((4, 3), 8.0),
    "counts": torch.full((4,), 9.0),
    "extra": torch.zeros(2),
    "model.n": torch.tensor(5),
}
LARGEST = 64


def messages(count: int) -> list[Message]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for client in range(count):
        counts = torch.randint(0, 3, (4,), generator=generator).float()
        counts[3] = 0  # nobody has this class
        state = {
            "model.w": torch.randn(2, 3, generator=generator),
            "means": torch.randn(4, 3, generator=generator),
            "counts": counts,
            "extra": torch.randn(2, generator=generator),
            "model.n": torch.tensor(client),
        }
        found.append(Message(state, client=client, samples=10 + client))
    return found


def summed(averaging, sent, bits):
    plan = WeightedSum(averaging, signature(sent[0]))
    fixed_point = FixedPoint(bits, 64.0 if bits == 32 else 2.0**20, len(sent))
    total = np.zeros(plan.size, fixed_point.unsigned)
    for message in sent:
        total += plan.vector(message, LARGEST, fixed_point)
    weight = sum(1.0 if averaging.uniform else message.samples / LARGEST for message in sent)
    return plan.result(fixed_point.decode(total), weight, LARGEST, OLD, fixed_point.error(len(sent)))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(
    "averaging",
    [
        Averaging(None, {}, (), uniform=False),
        Averaging(None, {}, (), uniform=True),
        Averaging(("model",), {}, (), uniform=False),
        Averaging(None, {"means": "counts"}, ("counts",), uniform=False),
        Averaging(("means",), {"means": "counts"}, (), uniform=False),
        Averaging(None, {}, ("extra",), uniform=True),
    ],
)
def test_it_equals_the_plain_mean_within_the_stated_error(averaging, bits):
    sent = messages(5)
    got, error = summed(averaging, sent, bits)
    plain = WeightedMean(OLD, averaging.parts, averaging.rows, averaging.sums)
    expected = plain.of((m, 1.0 if averaging.uniform else float(m.samples)) for m in sent)
    expected.pop("model.n", None)  # the maximum of integers is not a sum
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        allowed = error + 2e-7 * value.abs().max().item()  # and float32
        assert (got[name] - value).abs().max().item() <= allowed, name
    if "means" in got and averaging.rows:
        assert torch.equal(got["means"][3], OLD["means"][3])
    assert error < (1e-3 if bits == 32 else 1e-6)


def test_the_stated_error_grows_where_rows_have_little_weight():
    averaging = Averaging(None, {"means": "counts"}, ("counts",), uniform=False)
    few, many = messages(5), messages(5)
    for message in many:
        message.tensors["counts"] *= 30
    assert summed(averaging, few, 32)[1] > 10 * summed(averaging, many, 32)[1] / LARGEST


READS = {"centralized", "fedamp", "fedgh", "fedpac", "fedtgp"}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_that_average_are_supported_and_others_have_a_reason(method):
    reason = unsummable(get(method))
    assert (reason is not None) == (method in READS)


def test_reasons():
    assert "reveals only their sum" in unsummable(get("fedpac"))
    assert "pools all data" in unsummable(get("centralized"))
    assert "reveals only their sum" in unsummable(get("fedper", average_heads=True, heads_of="all"))


def test_a_class_that_one_client_has_is_not_hidden_by_the_sum():
    """A limit, not a promise: its row of class means has one addend that is not zero."""
    sent = messages(3)
    counts = [message["counts"].clone() for message in sent]
    for client, count in enumerate(counts):
        count[0] = 2.0 if client == 1 else 0.0
    sent = [Message({**m, "counts": c}, client=m.client, samples=m.samples) for m, c in zip(sent, counts, strict=True)]
    found, _ = summed(Averaging(None, {"means": "counts"}, ("counts",), uniform=False), sent, 64)
    assert found["means"][0].tolist() == pytest.approx(sent[1]["means"][0].tolist(), abs=1e-6)
