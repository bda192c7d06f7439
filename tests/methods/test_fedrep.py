"""FedRep: first the head, then the extractor, each with the other frozen."""

import pytest
from test_fedcrc import Watched
from tiny import same_state, tiny_run, tiny_task

from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get, hyperparameters, method_class


def watched(**parameters):
    lane = Workspace(
        Setup(tiny_task(norm=True), get("fedrep", **parameters), Training(batch_size=16, epochs=2), seed=0)
    )
    Watched.moved = []
    lane.setup.method.update(Watched(lane, id=0, round=1, job="update", samples=lane.setup.task.samples(0), first=True))
    return lane, Watched.moved


def test_the_head_first_then_the_extractor_and_frozen_parts_do_not_move_buffers_included():
    lane, ((first, h, _), (second, f, _)) = watched(personal_epochs=3)
    assert (first, second) == ("model.head", "model.extractor")
    assert h == {"model.head.weight", "model.head.bias"}
    assert f == {n for n in lane.initial if n.startswith("model.extractor.")}
    assert any("running_mean" in n for n in f)


@pytest.mark.parametrize(("personal_epochs", "ratio"), [(10, 5), (1, 0.5), (None, 1)])
def test_the_head_has_epochs_of_its_own_and_the_extractor_the_recipes(personal_epochs, ratio):
    _, ((_, _, head), (_, _, extractor)) = watched(personal_epochs=personal_epochs)
    assert head == ratio * extractor


def test_the_default_is_the_papers_ten_epochs():
    assert hyperparameters(method_class("fedrep"))["personal_epochs"] == 10


def test_without_personal_epochs_and_with_a_common_head_it_is_fedbabu_bit_for_bit():
    """Heads start alike, and without epochs they stay so."""
    run, babu = tiny_run({"name": "fedrep", "personal_epochs": 0}), tiny_run({"name": "fedbabu", "ft_epochs": 0})
    assert same_state(run.server.state, babu.server.state)
    assert [(s.client, s.right, s.loss) for s in run.scores] == [(s.client, s.right, s.loss) for s in babu.scores]


def test_what_travels_and_stays_is_fedpers():
    run, fedper = tiny_run("fedrep"), tiny_run("fedper")
    assert run.server.state.keys() == fedper.server.state.keys()
    assert run.history[0]["up_bytes"] == fedper.history[0]["up_bytes"]
    assert not same_state(run.server.state, fedper.server.state)
