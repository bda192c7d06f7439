import pytest
import torch

from fedloom.core.errors import UserError
from fedloom.models import build, tapped

torch.set_num_threads(1)


def digits_model(**options):
    torch.manual_seed(0)
    return build("mlp", shape=(1, 8, 8), classes=10, **options)


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_taps_are_the_outputs_of_the_named_submodules_in_the_order_asked():
    model, x = digits_model(), torch.rand(3, 1, 8, 8)
    logits, (second, first, own) = tapped(model, x, ["extractor.relu2", "extractor.fc1", "head"])
    inner = x.flatten(1) @ model.extractor.fc1.weight.T + model.extractor.fc1.bias
    outer = (inner.clamp_min(0) @ model.extractor.fc2.weight.T + model.extractor.fc2.bias).clamp_min(0)
    torch.testing.assert_close(first, inner)
    torch.testing.assert_close(second, outer)
    torch.testing.assert_close(own, logits)
    assert logits.equal(model(x))


def test_maps_are_flattened_and_later_layers_do_not_change_them():
    model = build("cnn3", shape=(3, 32, 32), classes=10)
    x = torch.rand(2, 3, 32, 32)
    _, (raw, rectified) = tapped(model, x, ["extractor.conv1", "extractor.relu1"])
    assert raw.shape == (2, 8 * 30 * 30)
    assert raw.min() < 0  # an in-place ReLU would have overwritten it
    assert rectified.equal(raw.clamp_min(0))


def test_gradients_flow_through_taps():
    model = digits_model()
    _, (layer,) = tapped(model, torch.rand(3, 1, 8, 8), ["extractor.relu1"])
    layer.sum().backward()
    assert model.extractor.fc1.weight.grad.abs().sum() > 0
    assert model.extractor.fc2.weight.grad is None


def test_hooks_are_gone_afterwards_even_after_an_error():
    model = digits_model()
    tapped(model, torch.rand(3, 1, 8, 8), model.taps)
    assert hooks(model) == 0
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tapped(model, torch.rand(3, 1, 9, 9), model.taps)
    assert hooks(model) == 0


@pytest.mark.parametrize("name", ["extractor.relu3", "", "extractor.relu1.deeper"])
def test_an_unknown_layer_is_refused_before_any_hook_is_set(name):
    model = digits_model()
    with pytest.raises(UserError, match=r"(?s)MLP has no such layer.*extractor\.relu1"):
        tapped(model, torch.rand(3, 1, 8, 8), ["extractor.fc1", name])
    assert hooks(model) == 0
