"""FedDBE: a personal vector is added to representations, and their mean is drawn to the first round's."""

import pytest
import torch
from by_hand import ByHand, Fixed
from tiny import tiny_run, tiny_task
from torch.nn.functional import cross_entropy

from fedloom.core.errors import UserError
from fedloom.methods import get
from fedloom.methods.feddbe import FedDBE


class WithoutVector(FedDBE, abstract=True):
    def update(self, client):
        client.fit("model", self.loss)


def at_work(**parameters):
    run = ByHand(get("feddbe", **parameters))
    run.server.state["mean"] = torch.linspace(-1, 1, 64)
    run.server.state["known"] = torch.ones(())
    client = run.at_work(0)
    client.prbm[0].data.copy_(torch.linspace(0, 1, 64))
    client.running.fill_(0.3)
    return client


@pytest.mark.parametrize("momentum", [1.0, 0.1])
def test_the_loss_is_that_of_the_paper_and_the_running_mean_moves(momentum):
    client, batch = at_work(kappa=7.0, momentum=momentum), Fixed()
    z = client.model.extractor(batch.x)
    mean = (1 - momentum) * torch.full((64,), 0.3) + momentum * z.mean(0)
    expected = cross_entropy(client.model.head(z + torch.linspace(0, 1, 64)), batch.y)
    expected = expected + 7 * (0.5 * (mean - torch.linspace(-1, 1, 64)) ** 2).mean()
    assert get("feddbe", kappa=7.0, momentum=momentum).loss(client, batch).item() == pytest.approx(expected.item())
    torch.testing.assert_close(client.running, mean.detach())


def test_without_vector_and_regulariser_it_is_fedavg():
    same, fedavg = ByHand(WithoutVector(kappa=0.0), tiny_task()), ByHand(get("fedavg"), tiny_task())
    for chosen in ([0, 1, 2], [3, 4, 5]):
        same.round(chosen)
        fedavg.round(chosen)
    for name, value in fedavg.server.state.items():
        torch.testing.assert_close(same.server.state[name], value)


def test_the_regulariser_starts_in_the_second_round():
    strong, none = ByHand(get("feddbe", kappa=100.0)), ByHand(get("feddbe", kappa=0.0))
    name = "model.extractor.fc1.weight"
    strong.round()
    none.round()
    assert torch.equal(strong.server.state[name], none.server.state[name])
    strong.round()
    none.round()
    assert not torch.allclose(strong.server.state[name], none.server.state[name])


def test_the_common_mean_is_the_mean_of_the_first_rounds_means_and_stays():
    run = ByHand(get("feddbe"))
    sent = run.round([0, 1])
    sizes = [len(run.task.samples(client)) for client in (0, 1)]
    expected = sum(n * sent[c]["mean"] for c, n in enumerate(sizes)) / sum(sizes)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(run.server.state["mean"], expected)
    run.round([2, 3])
    torch.testing.assert_close(run.server.state["mean"], expected)


def test_a_client_keeps_its_vector_and_is_served_with_it():
    run = ByHand(get("feddbe"), tiny_task())
    sent = run.round()
    assert set(run.memories[1]) == {"prbm.0"}
    assert run.memories[1]["prbm.0"].abs().sum() > 0
    assert not any(name.startswith("prbm") for name in sent[1])
    client, x = run.personal(1), Fixed().x
    run.lane.modes.evaluate_only()
    z = client.model.extractor(x)
    torch.testing.assert_close(run.method.predict(client, x), client.model.head(z + run.memories[1]["prbm.0"]))
    torch.testing.assert_close(run.method.predict_global(client, x), client.model.head(z))


def test_there_are_two_results_and_bounds():
    record = tiny_run("feddbe").history[-1]
    assert record["global_accuracy"] is not None
    assert record["personal_accuracy"] is not None
    with pytest.raises(UserError, match=r"method\.momentum"):
        get("feddbe", momentum=0)
