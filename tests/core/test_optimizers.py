import math

import numpy as np
import pytest
import torch

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.optimizers import TORCH_OPTIMIZERS, Optimizer, OptimizerSettings
from fedloom.core.torch_optimizer import TorchOptimizer
from fedloom.core.training import Training

SETTINGS = [
    OptimizerSettings(name="sgd", lr=0.1),
    OptimizerSettings(name="sgd", lr=0.1, momentum=0.9, weight_decay=1e-2),
    OptimizerSettings(name="adam", lr=0.01),
    OptimizerSettings(name="adam", lr=0.01, weight_decay=1e-2, betas=(0.8, 0.95)),
    OptimizerSettings(name="adamw", lr=0.01),
    OptimizerSettings(name="adamw", lr=0.01, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6),
    OptimizerSettings(name="rmsprop", lr=0.01),
    OptimizerSettings(name="rmsprop", lr=0.01, momentum=0.9, weight_decay=1e-2, alpha=0.8, eps=1e-6),
    OptimizerSettings(name="adagrad", lr=0.1),
    OptimizerSettings(name="adagrad", lr=0.1, weight_decay=1e-2, eps=1e-6),
]
KINDS = {
    "sgd": (torch.optim.SGD, ("momentum",)),
    "adam": (torch.optim.Adam, ("betas", "eps")),
    "adamw": (torch.optim.AdamW, ("betas", "eps")),
    "rmsprop": (torch.optim.RMSprop, ("momentum", "alpha", "eps")),
    "adagrad": (torch.optim.Adagrad, ("eps",)),
}


def reference(parameters, settings):
    """The optimizer of torch; without `decay_norms`, vectors are in a group without weight decay."""
    kind, names = KINDS[settings.name]
    decay = settings.weight_decay
    groups = [
        {"params": [p], "weight_decay": decay if settings.decay_norms or p.dim() > 1 else 0.0} for p in parameters
    ]
    return kind(groups, lr=settings.lr, **{name: getattr(settings, name) for name in names})


def start():
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 4), (5,), (2, 3, 2, 2), ()
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes], generator


def equals_torch_at_every_step(settings, prepare=lambda parameters: None):
    values, generator = start()
    ours = [p.clone() for p in values]
    theirs = [p.clone().requires_grad_() for p in values]
    optimizer, torch_optimizer = Optimizer(ours, settings), reference(theirs, settings)
    lr = torch.tensor(settings.lr, dtype=torch.float64)
    for _ in range(10):
        gradients = tuple(torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in values)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step(gradients, lr)
        prepare(theirs)
        torch_optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ten_steps_equal_torch_optim(settings):
    equals_torch_at_every_step(settings)


@pytest.mark.parametrize("name", KINDS)
def test_weight_decay_can_leave_out_norms_and_biases(name):
    equals_torch_at_every_step(OptimizerSettings(name=name, lr=0.01, weight_decay=0.3, decay_norms=False))


@pytest.mark.parametrize("most", [0.5, 6.0, 100.0])  # always, sometimes, never
@pytest.mark.parametrize("name", ["sgd", "rmsprop"])
def test_gradients_are_clipped_as_by_torch_before_weight_decay(most, name):
    settings = OptimizerSettings(name=name, lr=0.01, weight_decay=0.3, clip=most)
    equals_torch_at_every_step(settings, lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, most))


@pytest.mark.parametrize("decay_norms", [True, False])
@pytest.mark.parametrize("betas", [None, (0.7, 0.8)])
def test_ten_steps_of_lion_equal_its_algorithm_in_numpy(decay_norms, betas):
    chosen = {} if betas is None else {"betas": betas}
    settings = OptimizerSettings(name="lion", lr=0.01, weight_decay=0.3, decay_norms=decay_norms, **chosen)
    beta1, beta2 = betas or (0.9, 0.99)
    values, generator = start()
    ours, theirs = [p.clone() for p in values], [p.numpy().copy() for p in values]
    momentum = [np.zeros_like(p) for p in theirs]
    optimizer = Optimizer(ours, settings)
    for _ in range(10):
        gradients = tuple(torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in values)
        optimizer.step(gradients, torch.tensor(0.01, dtype=torch.float64))
        for i, g in enumerate(g.numpy() for g in gradients):
            update = np.sign(beta1 * momentum[i] + (1 - beta1) * g)
            decay = 0.3 if decay_norms or theirs[i].ndim > 1 else 0.0
            theirs[i] = theirs[i] - 0.01 * (update + decay * theirs[i])
            momentum[i] = beta2 * momentum[i] + (1 - beta2) * g
            np.testing.assert_allclose(ours[i].numpy(), theirs[i], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 1), ({"name": "adam"}, 3), ({"name": "adamw"}, 3),
        ({"name": "rmsprop"}, 1), ({"name": "rmsprop", "momentum": 0.9}, 2), ({"name": "adagrad"}, 1),
        ({"name": "lion"}, 1),
    ],
)  # fmt: skip
def test_zeroed_state_starts_anew(settings, count):
    parameters = [torch.ones(2, 2), torch.ones(2)]
    optimizer = Optimizer(parameters, OptimizerSettings(**settings))
    assert len(optimizer.state()) == count
    assert all(tensor.dim() <= 1 and not tensor.any() for tensor in optimizer.state())
    gradients, ends = (torch.full((2, 2), 3.0), torch.tensor([-1.0, 2.0])), []
    for _ in range(2):
        for tensor in optimizer.state():
            tensor.zero_()
        for parameter in parameters:
            parameter.fill_(1)
        for _ in range(3):
            optimizer.step(gradients, torch.tensor(0.1))
        assert all(tensor.any() for tensor in optimizer.state())
        ends.append([parameter.tolist() for parameter in parameters])
    assert ends[0] == ends[1]
    assert ends[0][1][0] > 1 > ends[0][1][1]  # against the gradient


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_a_parameter_without_gradient_stays(name):
    parameters = [torch.ones(2), torch.ones(2)]
    optimizer = Optimizer(parameters, OptimizerSettings(name=name, lr=1.0, weight_decay=0.5))
    optimizer.step((None, torch.ones(2)), 1.0 if name == "sgd" else torch.tensor(1.0))
    assert parameters[0].tolist() == [1, 1]
    torch.testing.assert_close(parameters[1], torch.full((2,), -0.5))


def grouped(monkeypatch, first, second):
    def make(parameters):
        groups = [{"params": parameters[:1], "lr": first}, {"params": parameters[1:], "lr": second}]
        return torch.optim.SGD(groups)

    monkeypatch.setitem(TORCH_OPTIMIZERS, "grouped", make)
    parameters = [torch.zeros(2), torch.zeros(2)]
    return parameters, TorchOptimizer(parameters, OptimizerSettings(name="grouped", lr=first or 1))


def test_parameter_groups_keep_the_ratio_of_their_learning_rates(monkeypatch):
    parameters, optimizer = grouped(monkeypatch, 0.01, 0.1)
    optimizer.step((torch.ones(2), torch.ones(2)), 0.02)
    torch.testing.assert_close(parameters, [torch.full((2,), -0.02), torch.full((2,), -0.2)])
    _, optimizer = grouped(monkeypatch, 0.0, 0.1)
    with pytest.raises(UserError, match="the first must not be 0"):
        optimizer.step((torch.ones(2), torch.ones(2)), 0.02)


def test_the_learning_rate_of_a_torch_optimizer_is_read_once_per_fit(monkeypatch):
    class Counted(torch.Tensor):
        reads = 0

        def __float__(self):
            Counted.reads += 1
            return super().__float__()

    parameters, optimizer = grouped(monkeypatch, 0.1, 0.1)
    rate = torch.tensor(0.1).as_subclass(Counted)
    for _ in range(3):
        optimizer.step((torch.ones(2), torch.ones(2)), rate)
    assert Counted.reads == 1
    optimizer.reset()
    rate.fill_(1.0)  # the next fit has another learning rate, in the same memory
    optimizer.step((torch.ones(2), torch.ones(2)), rate)
    torch.testing.assert_close(parameters, [torch.full((2,), -1.3)] * 2)
    optimizer.step((torch.ones(2), torch.ones(2)), 0.1)  # a step of the method with its own learning rate
    torch.testing.assert_close(parameters, [torch.full((2,), -1.4)] * 2)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("cosine", [0.5 * (1 + math.cos(math.pi * r / 6)) for r in range(6)]),
        ("exponential:0.5", [0.5**r for r in range(6)]),
        ("step:2=0.5,5=0.1", [1, 0.5, 0.5, 0.5, 0.1, 0.1]),
    ],
)
def test_warm_up_multiplies_the_schedule(schedule, factors):
    training = Training(rounds=6, schedule=schedule, warmup=3, optimizer=OptimizerSettings(lr=0.4))
    warm = [0.25, 0.5, 0.75, 1, 1, 1]
    expected = [0.4 * w * f for w, f in zip(warm, factors, strict=True)]
    assert [training.lr(round) for round in range(1, 7)] == pytest.approx(expected, rel=1e-12)
    without = training.model_copy(update={"warmup": 0})
    assert [without.lr(round) for round in range(1, 7)] == pytest.approx([0.4 * f for f in factors], rel=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        "exponential:nan", "exponential:inf", "exponential:-1", "exponential:", "step:2=-3", "step:2=nan", "step:0=0.5",
        "step:-2=0.5", "step:2=0.5,2=0.1", "step:", "step:2", "cosine:1",
    ],
)  # fmt: skip
def test_a_schedule_with_an_impossible_factor_or_round_is_refused(schedule):
    with pytest.raises(UserError, match=f"training.schedule: '{schedule}' is not a schedule; write constant"):
        Recipe.parse({"training": {"schedule": schedule}})


def test_a_schedule_that_overflows_before_the_last_round_is_refused():
    Recipe.parse({"training": {"schedule": "exponential:2", "rounds": 1000}})
    with pytest.raises(UserError, match="training.schedule: 'exponential:2' is infinite in round 2000; choose"):
        Recipe.parse({"training": {"schedule": "exponential:2", "rounds": 2000}})
