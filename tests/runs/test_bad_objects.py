"""Bad input from Python: each is refused with one line that names it and a remedy."""

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.core.errors import UserError
from fedloom.methods.fedavg import FedAvg

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 5))
Y = (X[:, 0] > 0).astype(int)
PICTURES = RNG.random((90, 8, 8, 3))
SETTING = {"data": (X, Y), "clients": 3, "partition": "iid", "rounds": 1}


def refused(words, call=fedloom.run, **fields):
    with pytest.raises(UserError, match=words) as error:
        call(**SETTING | fields)
    assert "\n" not in str(error.value)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, x):
        return self.fc(x), x


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        z = self.body(x)
        return self.a(z) + self.b(z)


def layers(outputs):
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, outputs))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": layers(7)}, r"Sequential returns a tensor of shape \[2, 7\] .* must return logits \[2, 2\]"),
        ({"model": Pair()}, "model: Pair returns a tuple; it must return logits"),
        ({"model": layers(2), "model.head": "fcc"}, r"model.head = 'fcc': Sequential has no such layer: choose one"),
        ({"model": layers(2), "data": (X[:, :4], Y)}, r"Sequential cannot process inputs of shape \(4,\)"),
        ({"model": lambda num_classes: nn.Linear(None, num_classes)}, "the call with num_classes=2 failed"),
        ({"model": nn.Sequential(layers(2), nn.Softmax(1))}, "Sequential ends with a Softmax, but must return logits"),
        ({"model": layers(2).double()}, r"the parameter '0.weight' of Sequential is torch.float64; .* with .float\(\)"),
        ({"model": nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))}, "Sequential has a layer without a shape"),
        ({"model": layers(2).requires_grad_(False)}, "nothing of the network is left to train; .* requires_grad_.True"),
        (
            {"model": TwoHeads()},
            "model.head = 'b': TwoHeads cannot run without this layer, so it cannot be split there",
        ),
        ({"model": nn.Linear(7, 2)}, r"Linear cannot process inputs of shape \(5,\)"),
        ({"partition": lambda labels, clients, rng: 1 / 0}, "partition: lambda failed: .*division by zero"),
        ({"clients": 0}, "data.clients = 0: must be at least 1"),
        ({"evaluation.metrics": ["acuracy"]}, r"evaluation.metrics.0 = 'acuracy': is unknown; did you mean 'auc'"),
        ({"evaluation.measure": "f2"}, "evaluation.measure = 'f2': is unknown"),
        ({"data": (np.where(X > 2, np.nan, X), Y)}, "samples contain NaN or infinity, first sample"),
        ({"data": (X, np.zeros(90, int))}, "all labels are '0'; at least two classes"),
        ({"data": (X, [None] * 90)}, "90 of 90 labels are missing"),
        ({"data": (X, [1, "a"] * 44 + [None, 2])}, "1 of 90 labels are missing"),
        ({"data": (X * 1j, Y)}, "x is complex"),
        ({"data": X}, "data: an object of type ndarray cannot be used; give a name, a pair"),
        ({"data": {"a": (X,)}}, "client 'a' must have a pair"),
        ({"data": {"x": X, "y": Y}}, r"data.x: an array is not a field of a recipe; give data=\(x, y\)"),
        ({"data": {}}, "data: the mapping is empty; leave it out for the default data"),
        ({"recipe": (X, Y)}, "recipe: an object of type tuple is not a recipe; .* data as data=…"),
        ({"data": (X, Y), "split": "official"}, "there is no such field; did you mean 'data.split'"),
        ({"data.split": "official"}, "data.split = 'official': dataset 'arrays' has no official test set"),
        (
            {"data": (PICTURES, Y), "model": "resnet18"},
            r"shape .* \(8, 8, 3\), with channels last; give channels first: x.transpose",
        ),
        ({"data": (PICTURES[..., 0], Y), "model": "cnn2"}, r"choose mlp, .*, or give grey images as x\[:, None\]"),
        ({"data.views": ["crop:4", "flip"]}, r"data.views = 'crop:4': needs images, but samples have the shape \(5,\)"),
        ({"optimizer": "adma"}, "training.optimizer.name = 'adma': is unknown; did you mean 'adam'"),
    ],
)
def test_fields_of_a_run(fields, words):
    refused(words, **fields)


def test_labels_may_be_any_numbers():
    run = fedloom.run(**SETTING | {"data": (X, 1000 * (np.arange(90) % 3))})
    assert run.facts["classes"] == ["0", "1000", "2000"]
    assert run.personal(0)(X[:4]).shape == (4, 3)


def test_a_partition_may_leave_the_list_of_a_client_empty_only_with_a_reason():
    refused("2 of 3 clients get no samples", partition=lambda labels, clients, rng: [np.arange(90), [], []])


def test_clients_of_the_data_replace_the_number_of_clients_with_a_note():
    halves = {"north": (X[:45], Y[:45]), "south": (X[45:], Y[45:])}
    run = fedloom.run(data=halves, clients=5, rounds=1)
    assert run["clients"] == 2 and "partition 'natural' makes 2 clients (not 5)" in run["notes"]


def test_predictions_refuse_what_a_model_was_not_trained_on():
    run = fedloom.run(**SETTING | {"data": ((255 * PICTURES).astype("u1"), Y), "model": "mlp"})
    model = run.personal(0)
    with pytest.raises(UserError, match=r"images: floats up to 2\d\d.*; divide bytes by 255, or give them as uint8"):
        model(255 * PICTURES[:2])
    for wrong in ("picture.png", None, [[1, 2], [3]]):
        with pytest.raises(UserError, match="are not an array of numbers; give an array or a tensor"):
            model(wrong)
    assert torch.allclose(model(PICTURES[:2]), model(PICTURES[:2].transpose(0, 3, 1, 2)))
    with pytest.raises(KeyError, match="'personal_acuracy' is not in summary.json: did you mean 'personal_accuracy'"):
        run["personal_acuracy"]


def matrix(self, client, batch):
    return client.model(batch.x)


def number(self, client, batch):
    return 0.5


def three(self, client, batch):
    return client.model(batch.x)[:1, 0].repeat(7)


def detached(self, client, batch):
    return client.model(batch.x).detach().mean()


def whole(self, client, batch):
    return client.model(batch.x).argmax(1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("loss", matrix, r"a loss returned a torch.float32 tensor of shape \[22, 2\]; it must return .* scalar"),
        ("loss", three, r"of shape \[7\]; it must return .* one entry per sample"),
        ("loss", number, "a loss returned a float; it must return a tensor"),
        ("loss", detached, "the loss does not depend on model"),
        ("loss", whole, "a loss returned a torch.int64 tensor"),
        ("shares", ("modle",), r"wrong.shares = \('modle',\): there is no part 'modle'; did you mean 'model'"),
        ("keeps", ("model.haed",), "wrong.keeps = .* there is no part 'model.haed'; did you mean 'model.head'"),
        ("shares", "model", r"wrong.shares = 'model': must be a tuple of parts: \(\"model\",\)"),
        ("by", {"model": "counts"}, "wrong.by = .* there is no part 'counts'"),
        ("update", lambda self, client: client.fit("modle", self.loss), "there is no part 'modle'; did you mean"),
    ],
)
@pytest.mark.parametrize("engine", ["inline", "replay"])
def test_methods_with_mistakes(name, value, words, engine):
    kind = type("Wrong", (FedAvg,), {name: value, "__module__": __name__})
    refused(words, method=kind, engine=engine, **{"training.batch_size": 64})


def test_one_entry_per_sample_is_averaged():
    class Vector(FedAvg):
        def loss(self, client, batch):
            return torch.nn.functional.cross_entropy(client.model(batch.x), batch.y, reduction="none")

    ours = fedloom.run(**SETTING, method=Vector)
    assert ours.round_records[0]["loss"] == pytest.approx(fedloom.run(**SETTING).round_records[0]["loss"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"methods": ["fedavg", "fedavg"]}, "compare.methods: 'fedavg' is given twice with the same hyperparameters"),
        ({"methods": ["fedprox", {"name": "fedprox", "mu": 0.1}]}, "compare.methods: 'fedprox' is given twice"),
        ({"methods": ["fedavg"], "seeds": [0, 1, 0]}, r"compare.seeds = \[0, 1, 0\]: 0 is given twice"),
        ({"methods": "fedavg"}, r"methods = 'fedavg': must be a list"),
    ],
)
def test_comparisons(fields, words):
    refused(words, fedloom.compare, **fields)


def test_sweeps():
    refused(r"sweep.seeds = \[0, 0\]: 0 is given twice", fedloom.sweep, over={"lr": [0.1]}, seeds=[0, 0])
    words = "parallel = 2: each run is another process, .* Python object data.name = 'object-arrays"
    refused(words, fedloom.sweep, over={"lr": [0.1, 0.2]}, parallel=2)
