"""What a party can learn, according to the threat model in docs/explanation/trust.md."""

import sys

import numpy as np
import pytest
import torch
from federated import NAMES, LoopGrid, make_experiment, make_federation, make_fleet, member, small_recipe
from tiny import tiny_experiment

from benchmarks import attack
from fedloom.core.job import Job
from fedloom.core.message import Message


@pytest.mark.parametrize("privacy", [None, {"clip": 1.0, "noise": 1.0}], ids=["plain", "privacy"])
def test_a_server_reads_training_images_out_of_one_update_with_privacy_or_without(tmp_path, privacy):
    victim = attack.make_victim(tmp_path, batch=512, privacy=privacy)
    found = attack.read_update(attack.HostileServer(victim))
    assert (attack.closest(found, victim.train) < 1).sum() >= 10


@pytest.mark.parametrize("method", ["fedcrl", "fedproto", "fedgh", "fedpac"])
def test_methods_with_class_means_send_the_exact_numbers_of_training_samples_of_each_class(method):
    run = tiny_experiment(method)
    with run._make_engine(run.setup, run.recipe.engine) as engine:
        message = Message(engine.server_workspace.downward())
        for result in engine.run([Job("update", 1, message, client=client) for client in range(run.task.clients)]):
            labels = run.task.dataset.labels[torch.from_numpy(run.task.samples(result.client))]
            assert result.message["counts"].tolist() == torch.bincount(labels, minlength=run.task.classes).tolist()
    assert run.method.reveals["counts"].endswith("exactly")


def test_of_two_organisations_each_can_compute_the_others_update(tmp_path):
    recipe = small_recipe("fedavg", training__rounds=1)
    make_federation(tmp_path / "fed", recipe)
    members = {100 + c: member(tmp_path / "fed", name) for c, name in enumerate(NAMES)}
    grid = LoopGrid(members)
    grid.online = {100, 101}
    updates = {}
    for number, one in members.items():
        run = one._run

        def spy(agreed, job, run=run, number=number):
            result = run(agreed, job)
            if job.kind == "update":
                updates[number] = result.message
            return result

        one._run = spy
    fleet = make_fleet(tmp_path / "fed", grid, recipe)
    fleet.wait_for(2, 2, 1)
    experiment = make_experiment(fleet, recipe)
    experiment.run()
    mine, theirs = updates[100], updates[101]
    whole = mine.samples + theirs.samples
    for name, average in experiment.server.state.items():
        computed = (average.double() * whole - mine[name].double() * mine.samples) / theirs.samples
        np.testing.assert_allclose(computed, theirs[name].double(), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("update --batch 512", "training images: 449; reconstructed within one grey level: "),
        ("evaluation --consent --rounds 2", "answered: 2\n"),
    ],
)
def test_the_attacks_by_their_commands(monkeypatch, capsys, words, line):
    monkeypatch.setattr(sys, "argv", ["attack", *words.split()])
    attack.main()
    assert line in capsys.readouterr().out
