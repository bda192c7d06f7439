import subprocess
import sys

import pytest
import torch
from tiny import same_state, tiny_run, tiny_task

from fedloom.core.errors import UserError
from fedloom.core.flat_state import nbytes
from fedloom.methods import Method, get, hyperparameters, method_class


def test_fedprox_without_pull_is_fedavg_bit_for_bit():
    assert same_state(tiny_run({"name": "fedprox", "mu": 0.0}).server.state, tiny_run("fedavg").server.state)


def test_fedprox_stays_nearer_to_where_it_started():
    start = tiny_run("fedavg", training__epochs=0, training__rounds=1).server.state

    def moved(mu, norm="squared"):
        method = {"name": "fedprox", "mu": mu, "norm": norm}
        state = tiny_run(method, training__rounds=1, training__epochs=5).server.state
        return sum((state[k] - start[k]).square().sum() for k in state if k.endswith(("weight", "bias"))).item()

    assert moved(2.0) < moved(0.1) < moved(0.0)
    assert moved(2.0, norm="l2") < moved(0.0)


def test_no_epochs_leave_the_average_where_it_was():
    once = tiny_run("fedavg", training__epochs=0, training__rounds=1)
    assert same_state(once.server.state, tiny_run("fedavg", training__epochs=0, training__rounds=3).server.state)


def test_local_sends_nothing_and_serves_everybody():
    run = tiny_run("local")
    assert run.server.state == {}
    assert {r["up_bytes"] + r["down_bytes"] for r in run.history} == {0}
    assert run.history[-1]["global_accuracy"] is None
    assert len(run.scores) == 6
    assert run.history[0]["evaluated"] == run.history[0]["clients"] == 4  # of six, the others wait for the end


def test_what_travels_is_what_is_shared():
    run = tiny_run("fedavg")
    assert run.history[0]["up_bytes"] == run.history[0]["down_bytes"] == nbytes(run.server.state)


def test_batch_norm_statistics_are_averaged():
    state = tiny_run("fedavg").server.state
    running = [v for name, v in state.items() if "running_mean" in name]
    assert running
    assert all((v != 0).any() for v in running)


def test_centralized_trains_on_everything_in_one_place():
    run = tiny_run("centralized")
    record = run.history[-1]
    assert (record["clients"], record["up_bytes"], len(run.scores)) == (1, 0, 6)
    assert len(run.task.samples(-1)) == sum(len(samples) for samples in run.task.federation.train)
    assert not same_state(run.server.state, tiny_run("fedavg").server.state)


def test_fine_tuning_leaves_the_global_model_alone_and_changes_the_clients():
    plain, tuned = tiny_run("fedavg"), tiny_run("fedavg+ft")
    assert same_state(plain.server.state, tuned.server.state)
    assert [s.loss for s in plain.scores] != [s.loss for s in tuned.scores]
    head_only = tiny_run({"name": "fedavg+ft", "ft_epochs": 0})
    assert [s.right for s in head_only.scores] == [s.right for s in plain.scores]


def test_fine_tuning_serves_what_was_fine_tuned():
    plain, tuned = tiny_run("fedcrc"), tiny_run("fedcrc+ft")
    assert [s.loss for s in plain.scores] != [s.loss for s in tuned.scores]


def test_a_method_can_be_redefined_but_not_one_of_ours():

    class Again(Method):
        sign: float = 1.0

    assert get("again").sign == 1.0

    class Again(Method):  # noqa: F811
        sign: float = -1.0

    assert get("again").sign == -1.0
    with pytest.raises(UserError, match="FedProx: method.name = 'fedprox' is already part of fedloom; choose"):

        class FedProx(Method):
            pass


def test_one_of_ours_cannot_be_redefined_before_it_is_imported():
    script = "import fedloom\nclass FedProx(fedloom.Method): ..."
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "errors.UserError: FedProx: method.name = 'fedprox' is already part of fedloom" in done.stderr


def test_hyperparameters_are_checked_as_the_recipe_is():
    with pytest.raises(UserError, match=r"method.mu = True: must be a number, not true or false"):
        get("fedprox", mu=True)
    with pytest.raises(UserError, match=r"method.norm = 'l3': is unknown; did you mean 'l2'"):
        get("fedprox", norm="l3")
    with pytest.raises(UserError, match=r"'\+ft' is given twice"):
        get("fedavg+ft+ft")


def test_fine_tuning_needs_a_global_model():
    with pytest.raises(UserError, match="local has no global model"):
        get("local+ft")


def test_a_method_is_frozen():
    method = get("fedprox")
    with pytest.raises(AttributeError, match="methods are frozen"):
        method.mu = 1.0
    with pytest.raises(AttributeError, match="methods are frozen"):
        method.anything = 1.0


def test_hyperparameters_are_checked():
    with pytest.raises(UserError, match=r"method.muu = 1: fedprox has no such option: did you mean 'mu'"):
        get("fedprox", muu=1)
    with pytest.raises(UserError, match=r"method.mu = 'much'"):
        get("fedprox", mu="much")
    with pytest.raises(UserError, match="did you mean 'fedprox'"):
        get("fedprocks")
    with pytest.raises(UserError, match=r"'\+tf' is unknown: did you mean 'ft'"):
        get("fedavg+tf")


def test_a_method_takes_ten_lines():
    class Shrunk(Method):
        """FedAvg whose local models are drawn to zero."""

        shrink: float = 0.5

        def loss(self, client, batch):
            norm = torch.stack([p.square().sum() for p in client.model.parameters()]).sum()
            return super().loss(client, batch) + self.shrink / 2 * norm

    assert hyperparameters(method_class("shrunk")) == {"shrink": 0.5}
    small = tiny_run({"name": "shrunk", "shrink": 5.0}).server.state["model.head.weight"].norm()
    assert small < 0.5 * tiny_run("fedavg").server.state["model.head.weight"].norm()


def test_newcomers_never_train_and_are_reported_apart():
    from dataclasses import replace

    task = tiny_task()
    task = replace(task, federation=replace(task.federation, newcomers=(1, 3)))
    run = tiny_run("fedavg", task=task, training__fraction=1.0)
    assert run.history[-1]["clients"] == 4
    assert set(run.memory) == set()
    assert run.sampling.participants == [0, 2, 4, 5]
    assert run.history[-1]["newcomer_accuracy"] is not None


def test_the_personal_models_of_local_differ_between_clients(tmp_path):
    from safetensors.torch import load_file

    tiny_run("local", out=str(tmp_path / "run"))
    one, other = (load_file(tmp_path / "run" / "models" / f"client-0000{c}.safetensors") for c in (0, 1))
    assert not torch.equal(one["model.head.weight"], other["model.head.weight"])


@pytest.mark.parametrize("method", ["repper", "fedintr", "fedcrc", "fedcrl", "fedprox", "fedavg+svm", "local"])
def test_every_method_starts_from_the_same_model(method):
    from fedloom.core.setup import Setup
    from fedloom.core.training import Training

    def start(name):
        return Setup(tiny_task(), get(name), Training(), seed=0).build().named_tensors()

    plain, other = start("fedavg"), start(method)
    assert all(torch.equal(other[name], value) for name, value in plain.items())
