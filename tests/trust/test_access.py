"""What methods do with messages is found out before anything runs."""

import pytest

from fedloom.methods import METHODS as REGISTRY
from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.trust.access import use_of_messages


class Unready(FedAvg, abstract=True):
    def combine(self, server, messages):
        raise KeyError("what a rehearsal has not")


READS = {"fedamp", "fedgh", "fedpac", "fedtgp"}
ADDS_UP = {"fedas", "fedcrl", "feddyn", "fedproto", "scaffold"}


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_the_use_of_messages_is_known(method):
    expected = "reads" if method in READS else "adds up" if method in ADDS_UP else "averages"
    assert use_of_messages(get(method)) == expected


def test_a_combine_that_fails_in_the_rehearsal_is_unknown():
    assert use_of_messages(Unready()) == "unknown"
