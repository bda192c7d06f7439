import pytest
import torch
from tiny import same_state, tiny_run, tiny_task

import fedloom
from fedloom.core.errors import UserError
from fedloom.models import build

torch.set_num_threads(1)


@pytest.mark.parametrize("pool", ["mean", "token"])
@pytest.mark.parametrize(("shape", "patch"), [((1, 8, 8), 2), ((3, 32, 32), 8), ((3, 28, 20), 4), ((3, 64, 64), 16)])
def test_shapes_and_number_of_parameters(shape, patch, pool):
    width, depth, classes = 24, 3, 5
    model = build("vit", shape=shape, classes=classes, width=width, depth=depth, heads=3, pool=pool)
    assert model(torch.rand(2, *shape)).shape == (2, classes)
    assert model.extractor(torch.rand(2, *shape)).shape == (2, width)
    tokens = shape[1] * shape[2] // patch**2 + (pool == "token")
    embedding = shape[0] * patch**2 * width + width + tokens * width + (width if pool == "token" else 0)
    block = 4 * width**2 + 4 * width + 8 * width**2 + 5 * width + 4 * width
    expected = embedding + depth * block + 2 * width + (width + 1) * classes
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model.taps == ("extractor.block1", "extractor.block2", "extractor.block3")


def test_attention_is_a_softmax_of_scaled_products():
    torch.manual_seed(0)
    attention = build("vit", shape=(1, 8, 8), classes=2, width=6, heads=2).extractor.block1.attention
    x = torch.randn(2, 5, 6)
    q, k, v = (x @ attention.qkv.weight.T + attention.qkv.bias).split(6, -1)
    parts = []
    for head in (slice(0, 3), slice(3, 6)):
        scores = torch.einsum("bie,bje->bij", q[..., head], k[..., head]) / 3**0.5
        parts.append(torch.einsum("bij,bje->bie", scores.exp() / scores.exp().sum(-1, keepdim=True), v[..., head]))
    expected = torch.cat(parts, -1) @ attention.out.weight.T + attention.out.bias
    torch.testing.assert_close(attention(x), expected)


def test_only_positions_tell_patches_apart():
    torch.manual_seed(0)
    model = build("vit", shape=(1, 8, 8), classes=4, patch=4).eval()
    x = torch.rand(3, 1, 8, 8)
    swapped = torch.cat([x[..., 4:], x[..., :4]], -1)  # left and right patches change places
    assert not torch.allclose(model(x), model(swapped), atol=1e-4)
    with torch.no_grad():
        model.extractor.embedding.positions.zero_()
    torch.testing.assert_close(model(x), model(swapped))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"patch": 3}, "model.patch = 3: must divide the height and width of the images, 8 and 8; choose one of 1, 2"),
        ({"patch": -2}, "model.patch = -2: must divide"),
        ({"width": 10, "heads": 4}, "model.heads = 4: must divide model.width = 10"),
        ({"pool": "max"}, r"model.pool = 'max': is unknown; did you mean 'mean'\? \(choices: mean, token\)"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, wanted):
    with pytest.raises(UserError, match=wanted):
        build("vit", shape=(1, 8, 8), classes=4, **options)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedintr", marks=pytest.mark.slow)])
def test_every_engine_trains_it_alike(method):
    task = tiny_task("vit", width=16, depth=2, heads=2, pool="token", dropout=0.1)
    inline = tiny_run(method, task=task).server.state
    for engine in ("replay", "processes"):
        assert same_state(tiny_run(method, task=task, engine=engine).server.state, inline)


@pytest.mark.slow
def test_it_learns_digits(tmp_path):
    fields = {"data": "digits", "clients": 2, "partition": "iid", "rounds": 3, "epochs": 4, "lr": 0.003}
    model = {"name": "vit", "width": 32, "depth": 2}
    optimizer = {"training.optimizer.name": "adam"}
    assert fedloom.run(model=model, out=tmp_path / "run", **fields, **optimizer)["global_accuracy"] > 0.85
