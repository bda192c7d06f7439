"""FedLC: the calibrated loss by hand; τ = 0 is FedAvg; class counts of a client."""

import pytest
import torch
from by_hand import ByHand, Fixed
from tiny import same_state, tiny_run, tiny_task

from fedloom.core.fit import StaleValueError
from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedlc import FedLC


def test_without_calibration_it_is_fedavg():
    fedlc, fedavg = tiny_run({"name": "fedlc", "tau": 0.0}), tiny_run("fedavg")
    assert same_state(fedlc.server.state, fedavg.server.state)


def test_with_it_the_model_differs():
    assert not same_state(tiny_run("fedlc").server.state, tiny_run("fedavg").server.state)


@pytest.mark.parametrize("denominator", ["all", "others"])
def test_the_loss_is_the_paper_s(denominator):
    method = get("fedlc", tau=0.7, denominator=denominator)
    client, batch = ByHand(method, tiny_task(norm=False)).at_work(0), Fixed()
    counts = torch.tensor([3.0, 1.0, 20.0, 9.0])
    client.counts.copy_(counts)
    f = (client.model(batch.x) - 0.7 * counts**-0.25).double()
    expected = []
    for row, y in zip(f, batch.y.tolist(), strict=True):
        classes = [c for c in range(4) if denominator == "all" or c != y]
        expected.append(-torch.log(row[y].exp() / sum(row[c].exp() for c in classes)))
    assert method.loss(client, batch).mean().item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)


@pytest.mark.parametrize("denominator", ["all", "others"])
def test_clients_of_one_class_or_one_sample_send_finite_weights(denominator):
    sent = ByHand(FedLC(denominator=denominator)).round([4, 5])
    assert all(torch.isfinite(value).all() for message in sent.values() for value in message.values())


def test_class_counts_are_those_of_the_client_s_training_samples():
    run = ByHand(get("fedlc"))
    for client in range(run.task.clients):
        labels = run.task.dataset.labels[torch.from_numpy(run.task.samples(client))]
        assert run.at_work(client).class_counts.tolist() == torch.bincount(labels, minlength=4).tolist()


def test_class_counts_cannot_be_read_inside_a_step():
    class Counting(FedAvg, abstract=True):
        def loss(self, client, batch):
            return super().loss(client, batch) + client.class_counts.sum()

    with pytest.raises(StaleValueError, match="class_counts"):
        ByHand(Counting()).round([0])
