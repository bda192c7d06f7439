"""`untrained`: the initial network, and heads fitted on it."""

import torch
from by_hand import ByHand
from tiny import tiny_run, tiny_task

from fedloom.methods import get


def test_nothing_is_trained_sent_or_kept():
    run = ByHand(get("untrained"), tiny_task())
    sent = run.round()
    assert not run.server.state
    assert not any(len(message) for message in sent.values())
    assert not any(run.memories.values())
    assert all(torch.equal(value, run.lane.initial[name]) for name, value in run.lane.tensors.items())


def test_its_global_model_is_that_of_fedavg_before_the_first_step():
    task = tiny_task(norm=False)
    still = tiny_run({"name": "fedavg"}, task=task, training__epochs=0)
    untrained = tiny_run("untrained", task=task)
    assert untrained.history[-1]["global_accuracy"] == still.history[-1]["global_accuracy"]
    assert untrained.history[-1]["up_bytes"] == untrained.history[-1]["down_bytes"] == 0


def test_a_head_on_it_learns_from_the_frozen_extractor():
    plain, headed = tiny_run("untrained"), tiny_run("untrained+logreg")
    assert headed.history[-1]["personal_accuracy"] > plain.history[-1]["personal_accuracy"] + 0.2
    assert headed.history[-1]["global_accuracy"] == plain.history[-1]["global_accuracy"]
