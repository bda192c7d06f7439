import pytest
import torch
import torch.nn.functional as F
from tiny import same_state, tiny_run, tiny_task
from torch import nn

import fedloom
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.rng import ChannelDropout, Dropout, Random
from fedloom.models import Factory, build, split_model, tapped

torch.set_num_threads(1)
SHAPE = (1, 8, 8)


class Net(nn.Module):
    """Code before, between and after layers; the head is not registered last."""

    def __init__(self, num_classes: int = 4, width: int = 12, drop: float = 0.5):
        super().__init__()
        self.fc = nn.Linear(width, num_classes)
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(drop)
        self.squeeze = nn.Linear(6, width)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(2 * x - 0.1)))
        x = self.drop(x.mean((2, 3)))
        return self.fc(torch.tanh(self.squeeze(x)))


class VGG(nn.Module):
    """A head inside a Sequential, as in torchvision's VGG."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.3))
        self.classifier = nn.Sequential(nn.Linear(144, 10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 4))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


@pytest.mark.parametrize(
    ("make", "head", "features", "taps"),
    [
        (Net, "fc", 12, ("extractor.conv", "extractor.norm", "extractor.drop", "extractor.squeeze")),
        (VGG, "classifier.3", 10, ("extractor.features", "extractor.classifier")),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_split_network_is_the_network(make, head, features, taps, named):
    torch.manual_seed(0)
    net, x = make(), torch.rand(5, *SHAPE)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    split = split_model(net, head if named else None, shape=SHAPE)
    assert (split.features, split.place, split.taps) == (features, head, taps)
    seen = []
    hook = net.get_submodule(head).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert split.eval()(x).equal(net.eval()(x))
    hook.remove()
    assert split.extractor(x).equal(seen[0])  # the representation is what the last layer reads
    assert split.head(split.extractor(x)).equal(net(x))
    assert same_state(net.state_dict(), before)  # the original is unchanged
    assert {split.published_name(name) for name in split.state_dict()} == set(net.state_dict())


def test_it_learns_like_the_network_it_was():
    torch.manual_seed(0)
    net, x, y = Net(drop=0.0), torch.rand(8, *SHAPE), torch.arange(8) % 4
    split = split_model(net, "fc").train()
    for model in (net, split):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert all(value.equal(net.state_dict()[split.published_name(n)]) for n, value in split.state_dict().items())


def test_a_shape_is_needed_only_where_the_head_does_not_say_its_width():
    assert split_model(Net(), "fc").features == 12
    with pytest.raises(UserError, match=r"give the name of its last layer \(head='fc'\), or the shape of images"):
        split_model(Net())


def test_a_linear_layer_is_a_head_without_an_extractor():
    layer = nn.Linear(5, 3)
    split = split_model(layer, shape=(5,), classes=3)
    x = torch.randn(4, 5)
    assert torch.equal(split(x), layer(x)) and torch.equal(split.extractor(x), x) and split.features == 5
    assert {split.published_name(name) for name in split.state_dict()} == {"weight", "bias"}


class Scaled(Net):
    def forward(self, x):
        return F.log_softmax(super().forward(x), 1)


class Reused(Net):
    def forward(self, x):
        return self.fc(self.squeeze(F.relu(self.conv(x)).mean((2, 3)))) + 0 * self.drop(x).mean()


class Pair(Net):
    def forward(self, x):
        return super().forward(x), x


class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

    def forward(self, x):
        return self.last(x)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 8)
        self.last = nn.Conv2d(1, 4, 3)

    def forward(self, x):
        return self.last(self.hidden(x)).mean((2, 3))


class Functional(Net):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


@pytest.mark.parametrize(
    ("make", "head", "wanted"),
    [
        (Net, "fd", "model.head = 'fd': Net has no such layer: did you mean 'fc'"),
        (Scaled, "fc", "model.head = 'fc': Scaled does something with the output of this layer"),
        (Reused, None, "Reused has no obvious last layer.* with 4 outputs runs last; name it, .* one of 'fc'"),
        (Pair, "fc", "Pair returns a tuple; it must return logits"),
        (Maps, "last", r"the input of the head must be \[B, features\], but it is \[2, 1, 8, 8\]"),
        (Convolutional, None, r"no linear layer with 4 outputs.* \(linear layers: 'hidden' \(8 → 8\)\)"),
        (Functional, "fc", "Functional draws random numbers from torch's generator in training"),
        (lambda: Net(num_classes=3), "fc", r"shape \[2, 3\] for 2 inputs, but must return logits \[2, 4\]"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_remedy(make, head, wanted):
    with pytest.raises(UserError, match=wanted):
        split_model(make(), head, shape=SHAPE, classes=4)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"VGG cannot process inputs of shape \(3, 8, 8\): .*channels"):
        split_model(VGG(), shape=(3, 8, 8))


def test_the_modes_of_the_original_stay():
    net = Net()
    net.norm.eval()
    split = split_model(net, shape=SHAPE)
    assert (net.training, net.norm.training) == (True, False)
    assert (split.extractor.training, split.extractor.norm.training) == (True, False)


def test_dropout_becomes_keyed_dropout():
    split = split_model(VGG(), shape=SHAPE).train()
    kinds = {name: (type(m), m.p) for name, m in split.named_modules() if isinstance(m, Dropout)}
    assert kinds == {
        "extractor.features.2": (ChannelDropout, 0.3), "extractor.classifier.2": (Dropout, 0.2)
    }  # fmt: skip
    x, outputs = torch.rand(3, *SHAPE), []
    for seed in (1, 1, 2):
        random = Random.seeded(seed)
        for module in split.modules():
            module.random = random
        torch.manual_seed(len(outputs))  # makes no difference
        outputs.append(split(x))
    assert outputs[0].equal(outputs[1])
    assert not outputs[0].equal(outputs[2])


def test_dropout_of_channels_keeps_or_drops_whole_channels():
    module = ChannelDropout(0.25).train()
    module.random = Random.seeded("channels")
    kept = module(torch.ones(200, 50, 3, 3))
    assert kept.flatten(2).std(2).max() == 0
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((kept[:, :, 0, 0] == 0).float().mean().item() - 0.25) < 0.01
    assert module.eval()(torch.ones(2, 3, 4, 4)).equal(torch.ones(2, 3, 4, 4))


def test_taps_have_dotted_names():
    net = VGG()
    split = split_model(net, shape=SHAPE, taps=("features.1", "classifier.0")).eval()
    assert split.taps == ("extractor.features.1", "extractor.classifier.0")
    x = torch.rand(2, *SHAPE)
    logits, (maps, hidden) = tapped(split, x, split.taps)
    expected = net.eval().features[:2](x).flatten(1)
    assert maps.equal(expected)
    assert hidden.equal(net.classifier[0](expected))
    assert logits.equal(net(x))


FILE = """
import torch.nn.functional as F
from torch import nn


class Plain(nn.Module):
    def __init__(self, num_classes, in_channels=1, width: int = 8, drop=0.25):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(drop)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.drop(F.relu(self.norm(self.conv(x))).mean((2, 3))))


class Shaped(nn.Sequential):
    def __init__(self, shape, classes, *, width: int = 8):
        size = shape[0] * shape[1] * shape[2]
        super().__init__(nn.Flatten(), nn.Linear(size, width), nn.Tanh(), nn.Linear(width, classes))


class Attention(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        rows = x.squeeze(1)
        return self.fc(self.attend(rows, rows, rows, need_weights=False)[0].mean(1))


def of_four():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 4))


def needy(depth, num_classes):
    return of_four()


def wrong():
    return 3


NUMBER = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(FILE)
    return path


def test_constructors_get_what_they_have_parameters_for(file):
    plain = build(f"{file}:Plain", shape=(3, 8, 8), classes=5, width=6)
    assert plain.extractor.conv.weight.shape == (6, 3, 3, 3)
    assert plain.head.weight.shape == (5, 6)
    assert build(f"{file}:Shaped", shape=SHAPE, classes=5).head.weight.shape == (5, 8)
    assert build(f"{file}:of_four", shape=SHAPE, classes=4).features == 6


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("of_four", {}, r"returns a tensor of shape \[2, 4\] for 2 inputs, but must return logits \[2, 5\]"),
        ("Plain", {"widht": 3}, "model.widht = 3: .*has no such option: did you mean 'width'"),
        ("Plain", {"width": "wide"}, "model.width = 'wide': must be a whole number"),
        ("Plain", {"head": "conv1"}, "model.head = 'conv1': Plain has no such layer: did you mean 'conv'"),
        ("needy", {}, "model.depth: .*:needy needs it; set it in the recipe"),
        ("wrong", {}, "it returned a int, but must return an nn.Module"),
        ("NUMBER", {}, "it is of type int, but must be an nn.Module"),
    ],
)
def test_a_plain_network_that_cannot_be_built_is_refused(file, name, options, wanted):
    with pytest.raises(UserError, match=wanted):
        build(f"{file}:{name}", shape=SHAPE, classes=5, **options)


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedcrl"])
@pytest.mark.parametrize("name", ["Attention", pytest.param("Plain", marks=pytest.mark.slow)])
def test_a_plain_network_trains_alike_on_every_engine(file, method, name):
    trusted_code.allow(f"{file}:{name}")
    task = tiny_task(f"{file}:{name}", head="fc")
    inline = tiny_run(method, task=task)
    assert any(not value.equal(inline.setup.build().named_tensors()[n]) for n, value in inline.server.state.items())
    for engine in ("replay", "processes"):
        assert same_state(tiny_run(method, task=task, engine=engine).server.state, inline.server.state), engine


def test_a_recipe_names_a_plain_network(file, tmp_path):
    fields = {"data": "digits", "clients": 2, "partition": "iid", "rounds": 3, "epochs": 4, "lr": 0.2}
    model = {"name": f"{file}:Shaped", "width": 24}
    summary = fedloom.run(model=model, out=tmp_path / "run", **fields)
    assert summary["global_accuracy"] > 0.8
    trained = fedloom.load(tmp_path / "run").global_model()
    assert trained(torch.zeros(2, 8, 8, 1, dtype=torch.uint8)).shape == (2, 10)
    again = fedloom.run(model=model | {"head": "3"}, out=tmp_path / "again", **fields)
    assert again["global_accuracy"] == summary["global_accuracy"]


def test_a_split_network_has_no_field_head():
    with pytest.raises(UserError, match="model.head = 'fc': mlp has no such option"):
        Factory("mlp", {"head": "fc"})(SHAPE, 4)
