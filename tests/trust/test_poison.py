"""Data attacks: whose samples change and how, and the success of a backdoor that evaluations measure."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import same_state, task_of_kind, tiny_experiment, tiny_run, tiny_task, without_times

from fedloom import objectives
from fedloom.core.errors import UserError
from fedloom.core.trigger import Trigger
from fedloom.trust.attack import Attack, AttackSettings
from fedloom.trust.poison import make_trigger


def attack(kind: str, **settings) -> Attack:
    return Attack(AttackSettings(kind=kind, share=0.34, **settings), range(6), 3)


def held(task, client):
    samples = task.federation.train[client]
    return task.dataset.inputs[samples], task.dataset.labels[samples]


def test_flipped_labels_are_mirrored_for_hostile_clients_only():
    task = tiny_task()
    flip = attack("labelflip")
    poisoned = flip.poisoned(task)
    for client in range(6):
        (x, y), (was_x, was_y) = held(poisoned, client), held(task, client)
        assert torch.equal(x, was_x)
        assert torch.equal(y, 3 - was_y if client in flip.hostile else was_y)


def test_test_samples_and_the_given_task_stay_as_they_were():
    task = tiny_task()
    inputs, labels = task.dataset.inputs.clone(), task.dataset.labels.clone()
    poisoned = attack("backdoor").poisoned(task)
    assert torch.equal(task.dataset.inputs, inputs) and torch.equal(task.dataset.labels, labels)
    assert torch.equal(poisoned.dataset.inputs[:240], inputs) and torch.equal(poisoned.dataset.labels[:240], labels)
    assert all(np.array_equal(a, b) for a, b in zip(poisoned.federation.test, task.federation.test, strict=True))
    assert max(map(max, poisoned.federation.test)) < 240


@pytest.mark.parametrize(("portion", "expected"), [(None, 0.5), (0.25, 0.25), (1.0, 1.0)])
def test_a_backdoor_stamps_a_portion_of_the_images_and_gives_them_the_target_class(portion, expected):
    task, door = tiny_task(), attack("backdoor", target=1, patch=3, portion=portion)
    poisoned = door.poisoned(task)
    for client in door.hostile:
        (x, y), (was_x, was_y) = held(poisoned, client), held(task, client)
        stamped = was_x.clone().numpy()
        stamped[:, :, 5:, 5:] = 255
        chosen = np.array([np.array_equal(image, new) for image, new in zip(x.numpy(), stamped, strict=True)])
        assert chosen.sum() == round(expected * len(y))
        assert y.tolist() == np.where(chosen, 1, was_y).tolist()
        assert torch.equal(x[~chosen], was_x[~chosen])


def test_the_poisoned_samples_follow_from_the_seed():
    one, again = (attack("backdoor").poisoned(tiny_task()).dataset for _ in range(2))
    assert torch.equal(one.inputs, again.inputs)
    other = Attack(AttackSettings(kind="backdoor", share=0.34), range(6), 4).poisoned(tiny_task()).dataset
    assert one.inputs.shape != other.inputs.shape or not torch.equal(one.inputs, other.inputs)


def test_a_trigger_is_as_bright_as_the_brightest_value():
    images = torch.rand(2, 3, 8, 8)
    stamped = Trigger(target=0, size=2, value=0.9).stamp(images)
    assert torch.equal(stamped[..., 6:, 6:], torch.full((2, 3, 2, 2), 0.9))
    stamped[..., 6:, 6:] = images[..., 6:, 6:]
    assert torch.equal(stamped, images)
    task = tiny_task()
    floats = replace(task, dataset=replace(task.dataset, inputs=task.dataset.inputs.float() / 100), augment=None)
    assert make_trigger(floats, 0, 2).value == pytest.approx(2.55)


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        (task_of_kind("labels", table=True), {"kind": "backdoor"}, "attack.kind = 'backdoor': needs images"),
        (tiny_task(), {"kind": "backdoor", "target": 4}, "attack.target = 4: must be below 4"),
        (tiny_task(), {"kind": "backdoor", "patch": 8}, "attack.patch = 8: must be smaller than the images"),
        (task_of_kind("multilabel"), {"kind": "labelflip"}, "several labels per sample"),
        (
            replace(tiny_task(), objective=objectives.get("byol")), {"kind": "labelflip"},
            "attack.kind = 'labelflip': has no effect, because the objective 'byol' trains without labels",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_poisoned_is_refused(task, settings, words):
    with pytest.raises(UserError, match=words):
        attack(**settings).poisoned(task)


@pytest.mark.parametrize("kind", ["labelflip", "backdoor"])
def test_engines_agree_and_the_attack_has_an_effect(kind):
    one, other = (tiny_run("fedavg", engine=e, attack={"kind": kind, "share": 0.34}) for e in ("inline", "processes"))
    assert without_times(one.history) == without_times(other.history)
    assert same_state(one.server.state, other.server.state)
    assert not same_state(one.server.state, tiny_run("fedavg").server.state)
    assert ("personal_backdoor" in one.history[-1]) == (kind == "backdoor")


def test_success_is_the_share_of_triggered_images_of_other_classes_predicted_as_the_target():
    attacked = {"kind": "backdoor", "share": 0.5, "portion": 1.0, "target": 1}
    run = tiny_run("fedavg", task=tiny_task(norm=False), attack=attacked, training__rounds=5)
    workspace_task = run.setup.task
    model = workspace_task.model()
    prefix = "model."
    model.load_state_dict({name.removeprefix(prefix): value for name, value in run.server.state.items()})
    model.eval()
    each = {}
    for scores in run.scores:
        samples = workspace_task.federation.test[scores.client]
        images = workspace_task.dataset.inputs[samples].float().div(255)
        images[:, :, 6:, 6:] = 1.0
        others = workspace_task.dataset.labels[samples] != 1
        with torch.no_grad():
            predicted = model((images - 0.5) / 0.5).argmax(1)
        each[scores.client] = (predicted[others] == 1).float().mean().item() if others.any() else None
        assert scores.metrics["backdoor"] == pytest.approx(each[scores.client])
    known = [value for value in each.values() if value is not None]
    assert run.history[-1]["personal_backdoor"] == pytest.approx(np.mean(known))
    assert run.history[-1]["global_mean_backdoor"] == pytest.approx(np.mean(known))
    assert np.mean(known) > 0.8


def test_resumed_runs_and_later_use_see_the_data_that_the_recipe_names(tmp_path):
    fields = {"attack": {"kind": "labelflip", "share": 0.34}, "out": str(tmp_path / "run")}
    short = tiny_run("fedavg", training__rounds=2, **fields)
    assert short.task.dataset is not short.setup.task.dataset
    longer = tiny_experiment("fedavg", training__rounds=3, **fields)
    longer.run(resume=True, extend=True)
    whole = tiny_run("fedavg", training__rounds=3, attack=fields["attack"])
    assert same_state(longer.server.state, whole.server.state)
