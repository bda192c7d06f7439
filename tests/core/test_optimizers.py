import pytest
import torch

from fedloom.core.optimizers import Optimizer, OptimizerSettings

SETTINGS = [
    OptimizerSettings(name="sgd", lr=0.1),
    OptimizerSettings(name="sgd", lr=0.1, momentum=0.9, weight_decay=1e-2),
    OptimizerSettings(name="adam", lr=0.01),
    OptimizerSettings(name="adam", lr=0.01, weight_decay=1e-2, betas=(0.8, 0.95)),
]


def reference(parameters, settings):
    if settings.name == "adam":
        kind, options = torch.optim.Adam, {"betas": settings.betas, "eps": settings.eps}
    else:
        kind, options = torch.optim.SGD, {"momentum": settings.momentum}
    return kind(parameters, lr=settings.lr, weight_decay=settings.weight_decay, **options)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ten_steps_equal_torch_optim(settings):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(3, 4, generator=generator, dtype=torch.float64), torch.randn(5, generator=generator).double()]
    ours = [p.clone() for p in start]
    theirs = [p.clone().requires_grad_() for p in start]
    optimizer, torch_optimizer = Optimizer(ours, settings), reference(theirs, settings)
    for _ in range(10):
        gradients = tuple(torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in start)
        optimizer.step(gradients, torch.tensor(settings.lr, dtype=torch.float64))
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        torch_optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-6, atol=1e-8)


def test_a_parameter_without_gradient_stays():
    parameters = [torch.ones(2), torch.ones(2)]
    optimizer = Optimizer(parameters, OptimizerSettings(name="sgd", lr=1.0, weight_decay=0.5))
    optimizer.step((None, torch.ones(2)), 1.0)
    assert parameters[0].tolist() == [1, 1]
    assert parameters[1].tolist() == [-0.5, -0.5]
