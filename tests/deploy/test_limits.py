"""What one job may cost an organisation, enforced before memory and time are taken."""

import json
import resource
from dataclasses import replace
from time import monotonic

import numpy as np
import pytest
import torch
from federated import NAMES, LoopGrid, make_experiment, make_federation, make_fleet, member, small_recipe

from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.deploy.limits import JobLimits
from fedloom.deploy.terms import fingerprint, protocol_versions
from fedloom.experiment.build import make_task
from fedloom.experiment.sampling import Sampling
from fedloom.trust.privacy import seeded_normals


class Joining:
    """North, which allows any recipe of a method, and a server that asks for one."""

    def __init__(self, folder, **consent):
        self.recipe = small_recipe("fedavg")
        make_federation(folder / "fed", self.recipe)
        self.north = member(folder / "fed", "north", methods=("fedavg", "fedrep", "ditto"), **consent)

    def header(self, recipe, **more):
        agreed = fingerprint(recipe, self.north.federation)
        return {"to": 0, "run": "one", "recipe": agreed, "versions": protocol_versions(), "accepted": None} | more

    def join(self, *changes):
        recipe = self.recipe.with_(*changes)
        return self.north.answer(self.header(recipe, what="join"), json.dumps(recipe.resolved()).encode())

    def refusal(self, *changes):
        about, body = self.join(*changes)
        assert about["what"] == "result", "it joined"
        return Result.from_bytes(body).error.why

    def update(self, recipe):
        engine = self.north._ready(fingerprint(recipe, self.north.federation)).engine
        job = Job("update", 1, Message(engine.server_workspace.downward()), client=0)
        return Result.from_bytes(self.north.answer(self.header(recipe, what="job", round=1), job.to_bytes())[1])


def test_a_network_over_the_limit_is_refused_before_it_is_built(tmp_path):
    joining = Joining(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    why = joining.refusal("model={name: mlp, hidden: 20000000}")
    assert "has 2,580,000,714 parameters" in why and "--max-parameters" in why
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (["training.epochs=1000000000"], "training.epochs = 1000000000: this organisation allows at most 100"),
        (["method={name: fedrep, personal_epochs: 101}"], "method.personal_epochs = 101"),
        (["model={name: mlp, hidden: 1000}"], "--max-message-mb"),
    ],
)
def test_epochs_and_bytes_have_limits(tmp_path, change, why):
    assert why in Joining(tmp_path, limits=JobLimits(message_bytes=200_000)).refusal(*change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("method={name: fedavg+linear, head_steps: 1000000}", "method.head_steps = 1000000: this organisation allows"),
        ("method={name: pfedme, inner: 1000000000}", "method.inner = 1000000000"),
    ],
)
def test_hyperparameters_that_count_steps_have_limits(tmp_path, change, why):
    make_federation(tmp_path / "fed", small_recipe("fedavg"))
    north = member(tmp_path / "fed", "north", methods=("fedavg+linear", "pfedme"))
    recipe = small_recipe("fedavg").with_(change)
    header = {"to": 0, "run": "one", "recipe": fingerprint(recipe, north.federation), "versions": protocol_versions()}
    body = json.dumps(recipe.resolved()).encode()
    assert why in Result.from_bytes(north.answer(header | {"what": "join"}, body)[1]).error.why


def test_one_agreement_is_held_at_a_time(tmp_path):
    joining = Joining(tmp_path)
    for seed in range(4):
        assert joining.join(f"seed={seed}")[0]["what"] == "joined"
    assert len(joining.north._agreed) == 1


def test_a_server_cannot_make_training_images_of_test_images(tmp_path):
    """With --allow-methods it chooses the recipe; the division is that of the organisation's own."""
    joining = Joining(tmp_path)
    images = dict(np.load(tmp_path / "fed" / "data" / "north.npz"))
    x = np.concatenate([images["x_train"], images["x_test"]])
    y = np.concatenate([images["y_train"], images["y_test"]])
    np.savez(tmp_path / "fed" / "data" / "north.npz", x=x, y=y, classes=images["classes"])
    north = member(tmp_path / "fed", "north", methods=("fedavg",))
    own = north.task(joining.recipe).federation.test[0]
    other = north.task(joining.recipe.with_("seed=9", "data.split=pooled:0.9", "data.seed=4")).federation.test[0]
    assert np.array_equal(own, other)


def test_an_update_is_counted_before_it_is_computed(tmp_path, monkeypatch):
    joining = Joining(tmp_path, max_rounds=2)
    joining.join()
    monkeypatch.setattr(joining.north, "_run", lambda *_: 1 / 0)
    for _ in range(2):
        assert "ZeroDivisionError" in joining.update(joining.recipe).error.why
    assert "--max-rounds 2: all these updates have already been sent" in joining.update(joining.recipe).error.why


def test_all_networks_of_a_method_count(tmp_path):
    joining = Joining(tmp_path, limits=JobLimits(parameters=30_000))
    assert joining.join()[0]["what"] == "joined"
    assert "ditto has" in joining.refusal("method=ditto")


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    joining = Joining(tmp_path, limits=JobLimits(seconds=0.5, epochs=10**6))
    recipe = joining.recipe.with_("training.epochs=100000")
    assert joining.join("training.epochs=100000")[0]["what"] == "joined"
    start = monotonic()
    error = joining.update(recipe).error
    assert monotonic() - start < 60
    assert error.kind == "timed_out" and "longer than 0.5 s (--max-seconds)" in error.why
    short = joining.recipe.with_("training.epochs=1")
    joining.join("training.epochs=1")
    assert joining.update(short).error is None  # it works on


def test_a_job_gets_no_memory_beyond_its_limit():
    with JobLimits(memory_bytes=2**28).enforced(interruptible=True):
        kept = torch.ones(2**24)
        with pytest.raises(RuntimeError, match="allocate"):
            torch.ones(2**28)
    assert len(kept) == 2**24
    torch.ones(2**26)  # the limit is the job's


def test_the_consent_names_the_limits(tmp_path):
    north = Joining(tmp_path, limits=JobLimits(seconds=60, epochs=50, memory_bytes=10**9)).north
    text = "\n".join(north.consent.lines(north.federation, north.task(north.consent.recipe), north.name))
    assert "100,000,000 parameters" in text and "50 epochs, 60 s, 1.0 GB of memory" in text


def test_images_of_another_size_are_resized_with_a_word(tmp_path):
    make_federation(tmp_path / "fed", small_recipe("fedavg"))
    path = tmp_path / "fed" / "data" / "north.npz"
    assert member(tmp_path / "fed", "north").what_images.endswith("of 8×8 pixels")
    held = dict(np.load(path))
    for name in ("x_train", "x_test"):
        held[name] = held[name].repeat(2, -1).repeat(2, -2)
    np.savez(path, **held)
    assert "of 16×16 pixels, RESIZED to the federation's 8×8" in member(tmp_path / "fed", "north").what_images


def test_deployed_noise_does_not_follow_from_the_seed(tmp_path):
    """Every member has the seed: subtracting the noise of a simulation must leave the noise where it is."""
    privacy = {"clip": 1.0, "noise": 20.0}
    recipe = small_recipe("fedavg", privacy=privacy, training__rounds=1, training__min_clients=3)
    make_federation(tmp_path / "fed", recipe)
    members = {100 + c: member(tmp_path / "fed", name) for c, name in enumerate(NAMES)}
    fleet = make_fleet(tmp_path / "fed", LoopGrid(members), recipe)
    fleet.wait_for(3, 3, 1)
    experiment = make_experiment(fleet, recipe)
    experiment.run()
    engine = members[100]._ready(fingerprint(recipe, members[100].federation)).engine
    before = engine.server_workspace.initial
    normal = seeded_normals(recipe.seed)(1)
    update = {name: value - before[name] for name, value in experiment.server.state.items()}
    guessed = {name: value - 20 / 3 * normal(value.shape) for name, value in update.items()}
    norm = {name: float(torch.cat([t.flatten() for t in found.values()]).norm()) for name, found in
            (("noisy", update), ("subtracted", guessed))}  # fmt: skip
    assert norm["noisy"] > 100
    assert norm["subtracted"] > norm["noisy"]
    assert "privacy is simulated" not in str(experiment.trust.notes)


def test_deployed_with_privacy_nobody_knows_who_is_drawn():
    recipe = small_recipe("fedavg", privacy={"sampling": "poisson"}, training__fraction=0.5, data__clients=10)
    task = make_task(recipe)
    drawn = {
        where: [Sampling(recipe, replace(task, elsewhere=where), pooled=False).draw(round) for round in range(1, 30)]
        for where in (False, True)
    }
    again = [Sampling(recipe, task, pooled=False).draw(round) for round in range(1, 30)]
    assert drawn[False] == again  # a simulation can be repeated
    assert drawn[True] != again
