"""FedBN: normalisation layers stay where they are; without any it is FedAvg."""

import pytest
import torch
from by_hand import ByHand
from tiny import same_state, tiny_run, tiny_task
from torch import nn

from fedloom.core.method import METHODS
from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedbn import FedBN


def test_normalisation_layers_are_neither_sent_nor_received_but_kept_with_their_statistics():
    run = ByHand(get("fedbn"), tiny_task(norm=True))
    sent = run.round()
    every = set(run.lane.tensors)
    norms = {name for name in every if "bn1" in name}
    assert any(name.endswith("running_var") for name in norms)
    assert any(name.endswith("bn1.weight") for name in norms)
    for client in (0, 1):
        assert set(sent[client]) == set(run.server.state) == every - norms
        assert set(run.memories[client]) == norms
    assert not torch.equal(
        run.memories[0]["model.extractor.bn1.running_mean"], run.memories[1]["model.extractor.bn1.running_mean"]
    )


def test_a_client_goes_on_with_its_own_layers():
    run = ByHand(get("fedbn"), tiny_task(norm=True))
    run.round()
    kept = {name: value.clone() for name, value in run.memories[0].items()}
    served = dict(run.personal(0).parts.named_tensors())
    assert all(torch.equal(served[name], value) for name, value in kept.items())


def test_without_normalisation_layers_it_is_fedavg():
    fedbn, fedavg = (tiny_run(name, task=tiny_task(norm=False)) for name in ("fedbn", "fedavg"))
    assert same_state(fedbn.server.state, fedavg.server.state)
    assert [s.loss for s in fedbn.scores] == pytest.approx([s.loss for s in fedavg.scores])  # other test batches


def test_with_them_the_first_messages_are_fedavg_s():
    fedbn, fedavg = (ByHand(get(name), tiny_task(norm=True)).round([0])[0] for name in ("fedbn", "fedavg"))
    assert len(fedbn) < len(fedavg)
    assert all(torch.equal(value, fedavg[name]) for name, value in fedbn.items())


@pytest.mark.parametrize(("norms", "kept"), [("all", ["bn", "gn", "ln"]), ("batch", ["bn"])])
def test_every_kind_is_kept_unless_only_batch_norm_is_meant(norms, kept):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.gn, self.ln, self.fc = nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    class Networks:
        def model(self):
            return Mixed()

    class FedBNOnMixed(FedBN, abstract=True):
        def build(self, task):
            return super().build(Networks())

    lane = ByHand(FedBNOnMixed(norms=norms)).lane
    assert list(lane.private) == [f"model.{name}" for name in kept]
    assert {name.split(".")[1] for name in lane.kept()} == set(kept)
    assert {name.split(".")[1] for name in lane.sent} == {"bn", "gn", "ln", "fc"} - set(kept)


def test_a_frozen_layer_is_neither_sent_nor_kept():
    run = ByHand(get("fedbn"), tiny_task(norm=True, freeze=("extractor.bn1",)))
    sent = run.round([0])
    assert not any("bn1" in name for name in (*sent[0], *run.memories[0]))
    assert run.lane.fixed == ("model.extractor.bn1",)


def test_any_method_may_keep_layers():
    class KeepsLinear(FedAvg, abstract=True):
        keeps_layers = (nn.Linear,)

    assert "keepslinear" not in METHODS
    run = ByHand(KeepsLinear(), tiny_task(norm=True))
    run.round([0])
    assert run.server.state
    assert not any("head" in name for name in run.server.state)
    assert {"model.head.weight", "model.head.bias"} <= set(run.memories[0])
