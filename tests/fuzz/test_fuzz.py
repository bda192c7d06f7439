"""Mutated inputs of every format are refused with our own errors, or taken: a fixed number, with a fixed seed.

`python -m benchmarks.fuzz` runs as many as one likes.
"""

import logging
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.fuzz.targets import REFUSALS, Target, targets

NAMES = [
    "npz", "idx", "gz", "mat", "hdf5", "cifar", "libsvm", "png", "jpeg", "gif", "other pictures", "deep pictures",
    "csv", "parquet", "wav", "heart", "leaf", "har", "omniglot", "hub", "yaml", "--set", "messages",
    "expected messages", "jobs", "results", "envelopes", "requests", "report", "load", "lock", "ledger", "model",
    "run's model", "checkpoint manifest", "checkpoint tensors",
]  # fmt: skip
BUDGET = 20
TAKEN = ("lock",)
"""A lock that says nonsense is one that nobody holds."""


@cache
def every_target() -> dict[str, Target]:
    return targets(Path(mkdtemp(prefix="fuzz-")))


@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs_are_refused_by_name_or_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    target = every_target()[name]
    if name not in ("envelopes", "requests"):  # these can be changed after they were signed
        target.decode(target.seeds[0])
    said = []
    for number in range(BUDGET):
        try:
            target.decode(target.input(22, number))
        except REFUSALS as refusal:
            said.append(str(refusal))
    assert said or name in TAKEN
    assert max(map(len, said), default=0) < 3000


def test_every_target_is_named_here() -> None:
    assert set(every_target()) == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_more_mutated_inputs_are_refused_or_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    target = every_target()[name]
    for number in range(1000):
        with suppress(*REFUSALS):
            target.decode(target.input(23, number))
