"""Engines on a CPU name the memory layout that is faster for convolutions, which only the user may choose."""

import logging

import pytest
from tiny import tiny_run, tiny_task


@pytest.mark.parametrize(
    ("network", "fields", "hinted"),
    [
        ("cnn4", {}, True),
        ("cnn4", {"engine": "processes"}, True),
        ("cnn4", {"engine__channels_last": True}, False),
        ("mlp", {}, False),
    ],
)
def test_channels_last_is_a_hint_for_networks_with_convolutions(caplog, network, fields, hinted):
    caplog.set_level(logging.INFO, "fedloom.engines")
    task = tiny_task(network, **({"width": 4} if network == "cnn4" else {}))
    tiny_run("untrained", task=task, training__rounds=1, **fields)
    assert ("engine.channels_last=true" in caplog.text) is hinted
