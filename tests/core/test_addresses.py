import torch
from torch import nn

from fedloom.core.addresses import Addresses
from fedloom.core.state import Parts


def tied():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return first, second, Parts({"model": nn.Sequential(first, second), "count": torch.zeros(3)})


def test_a_tensor_that_was_replaced_or_has_other_memory_is_named():
    first, second, parts = tied()
    addresses = Addresses(parts)
    assert addresses.moved() is None
    first.bias.data = first.bias + 1
    assert addresses.moved() == "model.0.bias"
    first.bias.data = torch.zeros(2)
    second.bias = nn.Parameter(torch.ones(2))
    parts.count = torch.ones(3)
    assert addresses.moved() == "count"


def test_everything_is_put_back_also_a_tensor_that_two_modules_share():
    first, second, parts = tied()
    addresses, memory = Addresses(parts), {name: t.detach() for name, t in parts.named_tensors().items()}
    weight = first.weight
    first.bias.data = first.bias + 1
    second.weight = nn.Parameter(torch.ones(2, 2))
    parts.count = torch.ones(3)
    addresses.restore(memory)
    assert addresses.moved() is None
    assert first.weight is second.weight is weight
    assert not parts.count.any()
