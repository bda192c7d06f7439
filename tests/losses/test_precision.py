"""Losses stay exact where networks run in bf16."""

import pytest
import torch

from fedloom import losses

CASES = {
    "linear_cka": lambda z, other: losses.linear_cka(z, other),
    "supcon": lambda z, other: losses.supcon(torch.cat([z, other]), torch.arange(8).repeat(2) % 3, 0.1),
    "nt_xent": lambda z, other: losses.nt_xent(z, other, 0.1),
    "layerwise": lambda z, other: losses.layerwise_contrastive([z], [other], [z + other], 0.5),
}


@pytest.mark.parametrize("loss", CASES.values(), ids=CASES)
def test_autocast_does_not_reach_into_a_loss(loss):
    generator = torch.Generator().manual_seed(0)
    z, other = (torch.randn(8, 16, generator=generator, requires_grad=True) for _ in range(2))
    expected = loss(z, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(z, other), expected)
        assert loss(z.bfloat16(), other.bfloat16()).dtype == torch.float32
