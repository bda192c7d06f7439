"""What holds for every registered method, shipped or not, on a federation with every awkward client.

That all engines give the same numbers, and a rerun too, is in tests/engines/test_engines_agree.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from references import reference
from tiny import same_state, tiny_run, tiny_task

from fedloom import objectives
from fedloom.core.execution import perform
from fedloom.core.flat_state import nbytes
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.state import under
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import ADDONS, field_docs, get, hyperparameters
from fedloom.methods import METHODS as REGISTRY
from fedloom.methods.addons.finetune import FineTuned
from fedloom.methods.addons.heads import Headed

pytestmark = pytest.mark.full

METHODS = sorted(REGISTRY)
FEDERATED = [name for name in METHODS if not REGISTRY[name].pooled]
PERSONAL = [name for name in FEDERATED if not get(name).personal_is_global]
NOT_WEIGHTS_TO_ZERO = {
    "mu",
    "lam",
    "alpha",
    "beta",
    "gamma",
    "tau",
    "eta",
    "global_lr",
    "alpha_k",
    "sigma",
    "server_lr",
}


class Round:
    """Clients 0 and 1 do their first round in one lane, tested on the same samples; then the server combines."""

    def __init__(self, method):
        made = get(method)
        task = tiny_task()
        common = np.arange(0, len(task.dataset.labels), 2)
        federation = replace(task.federation, test=[common] * task.clients)
        task = replace(task, federation=federation, objective=objectives.get(made.objective))
        self.lane = Workspace(Setup(task, made, Training(batch_size=16), seed=1))
        self.server = Server(self.lane, federation=task.clients)
        self.server.begin(1)
        self.down = [Message(made.message_for(self.server, client)) for client in (0, 1)]
        self.results = [perform(self.lane, Job("update", 1, self.down[c], client=c)) for c in (0, 1)]

    def personal_losses(self):
        method, home = self.lane.setup.method, self.server
        method.combine(home, iter([result.message for result in self.results]))
        jobs = [
            Job("evaluate", 1, Message(method.message_for(home, c)), client=c, memory=self.results[c].memory)
            for c in (0, 1)
        ]
        return [perform(self.lane, job).scores[0].loss for job in jobs]


@pytest.mark.parametrize("method", FEDERATED)
def test_what_travels_and_what_stays_is_what_the_method_says(method):
    done = Round(method)
    lane, result, says = done.lane, done.results[0], done.lane.setup.method
    public = {name: tensor for name, tensor in lane.tensors.items() if not under(name, lane.private)}
    assert set(result.message) == {name for name in public if under(name, says.up)}
    assert set(done.down[0]) == {name for name in public if under(name, says.down)}
    assert {name: t.shape for name, t in result.message.items()} == {n: public[n].shape for n in result.message}
    assert result.message.nbytes == nbytes({name: public[name] for name in result.message})
    kept = {name for name in lane.tensors if under(name, (*says.keeps, *lane.private))}
    assert {name for name in result.memory if not name.startswith("optim.")} == kept


@pytest.mark.parametrize("method", FEDERATED)
def test_the_record_counts_the_bytes_that_travel(method):
    assert {r["up_bytes"] for r in reference(method).history} == {Round(method).results[0].message.nbytes}


@pytest.mark.parametrize("method", FEDERATED)
def test_a_message_holds_copies_that_the_next_client_cannot_change(method):
    done = Round(method)
    alone = perform(done.lane, Job("update", 1, done.down[0], client=0)).message
    assert same_state(alone.tensors, done.results[0].message.tensors)


@pytest.mark.parametrize("method", FEDERATED)
def test_personal_models_differ_where_the_method_personalises_and_only_there(method):
    one, other = Round(method).personal_losses()
    assert (one == other) is (method not in PERSONAL)


@pytest.mark.parametrize("method", METHODS)
def test_a_client_that_never_takes_part_is_evaluated_too(method):
    run = tiny_run(method, training__fraction=0.2, training__rounds=1)
    assert [s.client for s in run.scores] == list(range(run.task.clients))
    assert all(np.isfinite(s.loss) for s in run.scores)


@pytest.mark.parametrize("method", METHODS)
def test_every_hyperparameter_is_explained_and_none_switches_the_method_off(method):
    found = REGISTRY[method]
    docs = field_docs(found)
    assert found.__doc__
    assert found.paper or method in ("local", "untrained")
    for name, default in hyperparameters(found).items():
        assert docs.get(name), f"{method}.{name} has no docstring"
        assert not (name in NOT_WEIGHTS_TO_ZERO and default == 0), f"{method}.{name} = 0 switches something off"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("extra", ADDONS)
def test_an_addition_never_takes_a_hyperparameter_of_another_meaning(method, extra):
    own, added = hyperparameters(REGISTRY[method]), hyperparameters(ADDONS[extra])
    related = any(issubclass(REGISTRY[method], base) for base in (Headed, FineTuned))
    assert related or not own.keys() & added.keys()


@pytest.mark.parametrize("method", ["ditto", "apfl"])
def test_a_latecomer_s_personal_model_starts_where_the_shared_one_is(method):
    task = tiny_task()
    lane = Workspace(Setup(task, get(method), Training(epochs=0), seed=1))
    moved = {name: value + 1 for name, value in Server(lane, federation=task.clients).state.items()}
    kept = perform(lane, Job("update", 9, Message(moved), client=0)).memory
    assert all(torch.equal(kept["personal" + name.removeprefix("model")], value) for name, value in moved.items())


@pytest.mark.parametrize("method", ["moon", "fedcka", "scaffold", "fedintr", "fedavg"])
def test_a_probe_of_a_client_s_own_network_needs_that_client_s_network(method):
    assert get(f"{method}+probe").personal_parts == ("own",)
    assert get(f"{method}+probe", personal_network="global").personal_parts == ()
