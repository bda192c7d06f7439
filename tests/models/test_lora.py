"""Low-rank adapters: what they compute, what is trained, sent and kept, on every engine and in every file."""

import pickle
import warnings
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from cohorts import LaneEngine, alternately, same_run
from safetensors.torch import save_file
from tiny import same_state, tiny_run, tiny_run_with_memory, tiny_task
from torch import nn

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.flat_state import nbytes
from fedloom.core.state import under
from fedloom.core.workspace import Workspace
from fedloom.inference.export import export
from fedloom.methods.fedper import FedPer
from fedloom.models import MODELS, SplitModel, build, merge_adapters
from fedloom.models.lora import adapters_in

torch.set_num_threads(1)
SMALL = {"width": 16, "depth": 1, "heads": 2}
PART = ("model.extractor.adapters", "personal.extractor.adapters")


class Encoder(nn.Module):
    """A plain network with torch's attention, direct parameters and dropout."""

    def __init__(self, num_classes: int, in_channels: int = 1):
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, 16))
        self.patches = nn.Conv2d(in_channels, 16, 2, 2)
        self.drop = nn.Dropout(0.1)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, kdim=8, vdim=4, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        tokens = self.drop(self.block(self.patches(x).flatten(2).transpose(1, 2) + self.positions))
        tokens = tokens + self.cross(tokens, tokens[..., :8], tokens[..., 8:12], need_weights=False)[0]
        return self.fc(self.norm(tokens.mean(1)))


@pytest.fixture(autouse=True)
def _encoder():
    MODELS["lora-encoder"] = Encoder


def made(name="vit", seed=0, **options):
    torch.manual_seed(seed)
    options = (SMALL if name == "vit" else {}) | options
    return build(name, shape=(1, 8, 8), classes=4, **options)


def trained(model):
    """The network with adapters that are not zero."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(".up"):
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def lora_task(name="vit", rank=2, **options):
    return tiny_task(name, augment=(), lora={"rank": rank}, **((SMALL if name == "vit" else {}) | options))


X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
KINDS = ["vit", "mlp", "lora-encoder"]


@pytest.mark.parametrize("name", KINDS)
def test_a_network_starts_as_its_base_and_trains_adapters_and_head_only(name):
    base, model = made(name).eval(), made(name, lora=2).eval()
    assert torch.equal(base(X), model(X))
    assert {n.rpartition(".")[2] for n, _ in model.extractor.named_parameters()} == {"down", "up"}
    assert all(under(n, ("extractor.adapters", "head")) for n, _ in model.named_parameters())
    own = dict(model.named_buffers()) | dict(model.named_parameters())
    assert all(own[n].equal(t) for n, t in base.named_parameters())
    model(X).square().sum().backward()
    ups = [p.grad for n, p in model.named_parameters() if n.endswith(".up")]
    assert len(ups) == sum(1 for _ in adapters_in(model)) and all(g.abs().sum() > 0 for g in ups)


@pytest.mark.parametrize("name", KINDS)
def test_merged_weights_compute_what_the_adapters_compute(name):
    model = trained(made(name, lora={"rank": 3, "alpha": 5}))
    expected, base = model(X), made(name).eval()(X)
    assert not torch.allclose(expected, base, atol=1e-3)
    for layer, weight, adapter in adapters_in(model):
        assert torch.linalg.matrix_rank(adapter.change()) == 3
        torch.testing.assert_close(adapter.change(), 5 / 3 * adapter.up @ adapter.down)
        assert layer._buffers[weight].shape == adapter.change().shape
    torch.testing.assert_close(deepcopy(model)(X), expected, rtol=0, atol=0)
    merged = merge_adapters(model)
    torch.testing.assert_close(merged(X), expected, rtol=1e-4, atol=1e-5)
    assert not list(adapters_in(merged)) and not list(merged.extractor.parameters())


def test_the_default_scale_is_two():
    model = made(lora={"rank": 4})
    assert {adapter.scale for _, _, adapter in adapters_in(model)} == {2.0}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["qkv"], {"block1.attention.qkv", "block2.attention.qkv"}),
        ("extractor.block2", {"block2.attention.qkv", "block2.attention.out", "block2.mlp.0", "block2.mlp.2"}),
        (["block*.attention.out", "block1.mlp"], {"block1.attention.out", "block2.attention.out", "block1.mlp.0",
                                                  "block1.mlp.2"}),
    ],
)  # fmt: skip
def test_layers_are_chosen_by_names_and_patterns(layers, expected):
    model = made(depth=2, lora={"rank": 1, "layers": layers})
    names = {n.removesuffix(".up") for n, _ in model.extractor.adapters.named_parameters() if n.endswith(".up")}
    assert names == expected


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        (
            "vit",
            {"lora": {"layers": ["qvk"]}},
            r"model.lora.layers = 'qvk': there is no such layer: .*block1.attention.qkv",
        ),
        ("vit", {"lora": {"rank": 0}}, "model.lora.rank = 0: must be at least 1"),
        ("vit", {"lora": {"alpha": -1}}, "model.lora.alpha = -1: must be above 0"),
        ("vit", {"lora": {"ranks": 1}}, "model.lora.ranks = 1: there is no such field"),
        ("vit", {"lora": 2, "freeze": ["extractor"]}, "model.freeze = 'extractor': model.lora trains adapters in it"),
        ("resnet20", {"lora": 2}, "model.lora: the extractor has no linear or attention layer"),
    ],
)
def test_adapters_that_cannot_be_added_are_refused(name, options, wanted):
    with pytest.raises(UserError, match=wanted):
        made(name, **options)


def test_parts_that_the_recipe_freezes_get_no_adapters():
    model = made(depth=2, lora=2, freeze=["extractor.block1", "head"])
    assert {n.split(".")[2] for n, _ in model.named_parameters()} == {"block2"}


@pytest.mark.parametrize("name", ["vit", pytest.param("lora-encoder", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", alternately(["fedavg", "fedrep", "fedcrl", "ditto", "repper", "fedproto"], 0))
def test_engines_agree_and_only_adapters_of_the_extractor_travel(method, name):
    task = lora_task(name)
    runs = {e: tiny_run_with_memory(method, task=task, engine=e) for e in ("inline", "processes", "replay")}
    inline, memory = runs["inline"]
    for experiment, kept in runs.values():
        assert same_state(experiment.server.state, inline.server.state)
        assert kept.keys() == memory.keys() and all(same_state(kept[client], memory[client]) for client in kept)
    start = inline.setup.build().named_tensors()
    stored = [inline.server.state, *memory.values()]
    inside = {n for state in stored for n in state if under(n, ("model.extractor", "personal.extractor"))}
    assert inside and all(under(n, PART) for n in inside)
    assert any(n.endswith(".up") and t.abs().sum() > 0 for state in stored for n, t in state.items())
    sent = {n: t for n, t in start.items() if under(n, inline.method.up) and n in inline.server.state}
    assert {record["up_bytes"] for record in inline.history} == {nbytes(sent)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_vectorised_clients_share_the_frozen_weights(method):
    assert LaneEngine.name
    task = lora_task()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a training step|training steps|engine.co")
        got = tiny_run_with_memory(method, engine="lane-for-tests", workers=3, task=task)
    same_run(got, tiny_run_with_memory(method, task=task))


@pytest.mark.parametrize("options", [{"lora": 2}, {"freeze": ["extractor"]}])
def test_workspaces_have_one_copy_of_frozen_tensors(options):
    setup = tiny_run("ditto", task=tiny_task("vit", **SMALL, **options), training__rounds=1).setup
    one, other = Workspace(setup), Workspace(setup)
    frozen = [name for name in one.tensors if under(name, one.fixed)]
    assert frozen and one.flat.layout.nbytes == nbytes(one.changing()) < nbytes(one.tensors)
    received = one.received.named_tensors()
    for name in frozen:
        places = {w.tensors[name].data_ptr() for w in (one, other)} | {one.initial[name].data_ptr()}
        assert len(places | {received[name].data_ptr() for _ in (0,) if name in received}) == 1
    for name in one.changing():
        assert one.tensors[name].data_ptr() != other.tensors[name].data_ptr()
    again = pickle.loads(pickle.dumps(setup))
    assert "frozen_tensors" not in vars(again)
    assert same_state(Workspace(again).tensors, one.tensors)


def test_batch_norm_is_fixed_and_dropout_still_drops():
    setup = tiny_run("fedavg", task=lora_task("lora-encoder"), training__rounds=1).setup
    workspace = Workspace(setup)
    workspace.modes.train_only(("model",), norms=True)
    extractor = workspace.parts.model.extractor
    assert extractor.drop.training and not extractor.norm.training and not extractor.cross.training
    assert extractor.norm.running_mean.equal(torch.zeros(16))


def test_a_method_can_share_the_adapters_alone():
    class Lent(FedPer):
        """Shared adapters, personal heads."""

        shares = ("model.extractor.adapters",)

    lent, per = (tiny_run(method, task=lora_task()) for method in ("lent", "fedper"))
    assert same_state(lent.server.state, per.server.state) and lent.server.state


def _adapters(model):
    return dict(model.parts.model.extractor.adapters.named_parameters())


def test_runs_and_models_with_adapters_load_again(tmp_path):
    torch.manual_seed(5)
    source = build("vit", shape=(1, 8, 8), classes=3, **SMALL)
    save_file(source.state_dict(), tmp_path / "net.safetensors")
    model = {"name": "vit", **SMALL, "lora": {"rank": 2}, "weights": str(tmp_path / "net.safetensors")}
    fields = {"data": "digits", "clients": 2, "partition": "iid", "rounds": 2, "method": "ditto", "data.limit": 200}
    summary = fedloom.run(model=model, out=tmp_path / "run", **fields)
    assert any("model.lora: model.extractor, personal.extractor" in note for note in summary["notes"])
    assert not any("adapters" in note for note in summary["notes"])
    (tmp_path / "net.safetensors").unlink()
    run = fedloom.load(tmp_path / "run")
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1), dtype=np.uint8)
    personal = run.personal(1)
    personal.save(tmp_path / "model.safetensors")
    loaded = fedloom.load_model(tmp_path / "model.safetensors")
    assert torch.equal(loaded(images), personal(images))
    network = loaded.parts.personal
    assert network.extractor.block1.attention.qkv.weight.equal(source.extractor.block1.attention.qkv.weight)
    assert network.extractor.adapters.block1.attention.qkv.up.abs().sum() > 0
    # the global model with its adapters as the weights of a network with adapters
    run.global_model().save(tmp_path / "global.safetensors")
    again = made(lora=2, weights=str(tmp_path / "global.safetensors")).extractor.adapters
    assert all(t.equal(dict(again.named_parameters())[n]) for n, t in _adapters(run.global_model()).items())


@pytest.mark.parametrize("name", ["vit", "lora-encoder"])
@pytest.mark.parametrize("kind", ["onnx", "torchscript", "safetensors"])
def test_networks_with_adapters_can_be_exported(kind, name, tmp_path):
    experiment = tiny_run("fedavg", task=lora_task(name), training__rounds=1)
    model = fedloom.load(experiment.folder.path, task=experiment.task).global_model()
    assert export(model, kind, tmp_path / "model") < 1e-4


def test_a_run_with_adapters_is_resumed(tmp_path):
    fields = {
        "data": "digits",
        "clients": 2,
        "partition": "iid",
        "data.limit": 200,
        "model": {"name": "mlp", "lora": 2},
    }
    fedloom.run(out=tmp_path / "long", rounds=3, **fields)
    fedloom.run(out=tmp_path / "short", rounds=1, **fields)
    fedloom.resume(tmp_path / "short", rounds=3)
    runs = [fedloom.load(tmp_path / name).global_model().workspace.tensors for name in ("long", "short")]
    assert same_state(*runs)
    assert fedloom.load(tmp_path / "short").recipe.model.lora.rank == 2


def test_self_supervised_targets_have_adapters_too():
    experiment = tiny_run("fedavg", task=replace(lora_task(), views=tiny_task().views), objective="byol")
    names = set(Workspace(experiment.setup).changing())
    assert any(n.startswith("model.target.extractor.adapters") for n in names)
    assert not any(n.startswith("model.target.extractor.block1") for n in names)


class Encoded(SplitModel):
    """A network with torch's encoder layer, whose fast path in evaluation reads weights without adapters."""

    images = False

    def __init__(self, shape, classes):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.extractor = nn.Sequential(layer, nn.Flatten())
        self.head = nn.Linear(8 * shape[0], classes)
        self.features = 8 * shape[0]


def test_evaluation_of_attention_layers_uses_the_adapters(monkeypatch):
    monkeypatch.setitem(MODELS, "encoded", Encoded)
    torch.backends.mha.set_fastpath_enabled(True)
    model = trained(build("encoded", shape=(4, 8), classes=3, lora={"rank": 2}))
    x = torch.randn(5, 4, 8)
    with torch.no_grad():
        evaluated = model(x)
    assert torch.allclose(model(x), evaluated, atol=1e-5)
