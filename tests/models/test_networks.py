from itertools import pairwise

import pytest
import torch
from torch import nn

from fedloom.core.errors import UserError
from fedloom.models import MODELS, build, tapped
from fedloom.models.norms import norm2d

torch.set_num_threads(1)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def conv(before, after, kernel):
    return before * after * kernel**2 + after


def linear(before, after):
    return before * after + after


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("resnet18", (3, 224, 224), 1000, 11_689_512),
        ("resnet34", (3, 224, 224), 1000, 21_797_672),
        ("mobilenet", (3, 224, 224), 1000, 4_231_976),
        ("resnet20", (3, 32, 32), 10, 269_722),
        # A 3×3 stem has 3·64·(49 − 9) weights less.
        ("resnet18", (3, 32, 32), 1000, 11_689_512 - 7_680),
        ("mobilenet", (3, 32, 32), 1000, 4_231_976),
    ],
)
def test_known_networks_have_their_known_number_of_parameters(name, shape, classes, count):
    with torch.device("meta"):
        assert parameters(build(name, shape=shape, classes=classes)) == count


@pytest.mark.parametrize(("shape", "left"), [((1, 28, 28), 4 * 4), ((3, 32, 32), 5 * 5), ((3, 16, 20), 1 * 2)])
def test_cnn2_has_as_many_parameters_as_its_layers(shape, left):
    expected = conv(shape[0], 32, 5) + conv(32, 64, 5) + linear(64 * left, 128) + linear(128, 10)
    assert parameters(build("cnn2", shape=shape, classes=10)) == expected


@pytest.mark.parametrize(("shape", "left"), [((3, 32, 32), 2 * 2), ((1, 28, 28), 1), ((3, 22, 32), 2)])
def test_cnn3_has_as_many_parameters_as_its_layers(shape, left):
    convolutions = conv(shape[0], 8, 3) + conv(8, 16, 3) + conv(16, 32, 3)
    expected = convolutions + linear(32 * left, 128) + linear(128, 96) + linear(96, 10)
    assert parameters(build("cnn3", shape=shape, classes=10)) == expected


def test_cnn4_and_mlp_have_as_many_parameters_as_their_layers():
    widths = [3, 32, 64, 128, 256]
    convolutions = sum(conv(a, b, 3) for a, b in pairwise(widths))
    assert parameters(build("cnn4", shape=(3, 8, 8), classes=10)) == convolutions + linear(256, 10)
    with_norm = build("cnn4", shape=(3, 64, 64), classes=10, norm=True)
    assert parameters(with_norm) == convolutions + linear(256, 10) + 2 * sum(widths[1:])
    assert parameters(build("cnn4", shape=(3, 32, 32), classes=10, flat=True)) == convolutions + linear(1024, 10)
    with pytest.raises(UserError, match="flat = true: needs images of at least 16×16"):
        build("cnn4", shape=(3, 8, 8), classes=10, flat=True)
    expected = linear(64, 128) + linear(128, 64) + linear(64, 10)
    assert parameters(build("mlp", shape=(1, 8, 8), classes=10)) == expected
    assert parameters(build("mlp", shape=(1, 8, 8), classes=10, norm=True)) == expected + 2 * 128


SHAPES = {
    "mlp": [(1, 8, 8), (3, 5, 9)],
    "cnn2": [(1, 28, 28), (3, 32, 32), (1, 16, 16)],
    "cnn3": [(3, 32, 32), (1, 28, 28), (3, 22, 22)],
    "cnn4": [(1, 8, 8), (3, 32, 32), (3, 64, 64)],
    "resnet18": [(1, 28, 28), (3, 32, 32), (3, 64, 64)],
    "resnet34": [(3, 32, 32), (3, 64, 64)],
    "resnet20": [(1, 28, 28), (3, 32, 32), (3, 33, 35)],
    "mobilenet": [(1, 28, 28), (3, 32, 32), (3, 64, 64)],
    "vit": [(1, 8, 8), (3, 32, 32), (3, 40, 64)],
}


def test_every_network_is_in_the_table_of_shapes():
    assert set(SHAPES) == {name for name in MODELS.names() if MODELS.is_shipped(name)}


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in SHAPES for shape in SHAPES[name]])
def test_a_network_splits_into_representation_and_logits_and_its_taps_are_layers(name, shape):
    model = build(name, shape=shape, classes=7).eval()
    x = torch.rand(2, *shape)
    with torch.no_grad():
        z = model.extractor(x)
        logits, layers = tapped(model, x, model.taps)
    assert z.shape == (2, model.features)
    assert isinstance(model.head, nn.Linear)
    assert logits.shape == (2, 7)
    assert logits.equal(model.head(z))
    assert all(layer.shape[0] == 2 and layer.ndim == 2 for layer in layers)
    assert name == "vit" or min(layer.min().item() for layer in layers) >= 0  # each is read after its ReLU


@pytest.mark.parametrize(
    ("name", "shape", "widths"),
    [
        ("cnn3", (3, 32, 32), [8 * 15**2, 16 * 6**2, 32 * 2**2, 128, 96]),
        ("resnet20", (3, 32, 32), [16 * 32**2, 16 * 32**2, 32 * 16**2, 64 * 8**2]),
        ("cnn2", (3, 32, 32), [32 * 14**2, 64 * 5**2, 128]),
        ("resnet18", (3, 64, 64), [64 * 32**2, 64 * 16**2, 128 * 8**2, 256 * 4**2, 512 * 2**2]),
        ("resnet18", (3, 32, 32), [64 * 32**2, 64 * 32**2, 128 * 16**2, 256 * 8**2, 512 * 4**2]),
    ],
)
def test_taps_have_the_sizes_of_the_papers_layers(name, shape, widths):
    model = build(name, shape=shape, classes=10).eval()
    with torch.no_grad():
        _, layers = tapped(model, torch.rand(1, *shape), model.taps)
    assert [layer.shape[1] for layer in layers] == widths


def test_a_resnets_stem_can_be_chosen():
    with torch.device("meta"):
        large = build("resnet18", shape=(3, 32, 32), classes=1000, stem="large")
        assert parameters(large) == 11_689_512
        assert large.extractor.stage4(large.extractor[:-3](torch.rand(2, 3, 32, 32))).shape == (2, 512, 1, 1)
        assert parameters(build("resnet18", shape=(3, 64, 64), classes=1000, stem="small")) == 11_689_512 - 7_680


@pytest.mark.parametrize("name", ["resnet18", "resnet20"])
def test_residual_networks_start_from_he_initialisation(name):
    torch.manual_seed(0)
    model = build(name, shape=(3, 32, 32), classes=10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5000:
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)


def test_resnet20_shortcuts_take_every_second_pixel_and_pad_channels_with_zeros():
    model = build("resnet20", shape=(3, 32, 32), classes=10)
    x = torch.rand(2, 16, 7, 8)
    y = model.extractor.stage2[0].shortcut(x)
    assert y.shape == (2, 32, 4, 4)
    assert y[:, 8:24].equal(x[:, :, ::2, ::2])
    assert y[:, :8].abs().sum() + y[:, 24:].abs().sum() == 0


def test_dropout_of_cnn2_leaves_no_trace_in_eval_mode_and_whole_representations_in_training():
    torch.manual_seed(0)
    model = build("cnn2", shape=(1, 28, 28), classes=10, dropout=0.5)
    x = torch.rand(4, 1, 28, 28)
    flat = []
    model.extractor.fc3.register_forward_hook(lambda module, inputs, output: flat.append(inputs[0]))
    model.train()
    assert not model.extractor(x).equal(model.extractor(x))
    model.eval()
    assert model.extractor(x).equal(model.extractor(x))
    dropped, whole = flat[0], flat[2]
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, 2 * whole, 0))
    assert kept.float().mean().item() == pytest.approx((whole != 0).float().mean().item() / 2, rel=0.1)


def test_features_of_cnn2_may_have_a_sign():
    torch.manual_seed(0)
    x = torch.rand(4, 1, 28, 28)
    assert build("cnn2", shape=(1, 28, 28), classes=10).extractor(x).min() == 0
    assert build("cnn2", shape=(1, 28, 28), classes=10, signed=True).extractor(x).min() < 0


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_gradients_reach_every_parameter(name):
    torch.manual_seed(0)
    shape = (3, 32, 32)
    model = build(name, shape=shape, classes=5)
    model(torch.rand(4, *shape)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.head.parameters())


def test_cnn4_keeps_the_signal_alive_through_its_layers():
    torch.manual_seed(0)
    model = build("cnn4", shape=(3, 32, 32), classes=10)
    with torch.no_grad():
        _, layers = tapped(model, torch.randn(32, 3, 32, 32), model.taps[:3])
    scales = [layer.square().mean().sqrt().item() for layer in layers]
    assert scales[2] > scales[0]  # torch's default initialisation leaves a third of it


@pytest.mark.parametrize("name", ["resnet18", "resnet20"])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_group_norm_replaces_every_batch_norm(name, norm):
    torch.manual_seed(0)
    plain = build(name, shape=(3, 32, 32), classes=10)
    torch.manual_seed(0)
    grouped = build(name, shape=(3, 32, 32), classes=10, norm=norm)
    norms = [module for module in grouped.modules() if isinstance(module, nn.GroupNorm)]
    batch = [module for module in plain.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [module.num_channels for module in norms] == [module.num_features for module in batch]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in grouped.modules())
    wanted = [1 if norm == "layer" else min(32, module.num_channels) for module in norms]
    assert [module.num_groups for module in norms] == wanted
    named = dict(plain.named_parameters())
    assert all(parameter.equal(named[key]) for key, parameter in grouped.named_parameters())
    x = torch.rand(2, 3, 32, 32)
    one_by_one = torch.cat([grouped.train()(x[:1]), grouped(x[1:])])
    torch.testing.assert_close(grouped(x), one_by_one, rtol=1e-4, atol=1e-5)  # images do not affect each other
    assert not list(grouped.buffers())


def test_groups_divide_the_channels():
    assert [norm2d("group", channels).num_groups for channels in (7, 16, 48, 33, 64)] == [7, 16, 24, 11, 32]
