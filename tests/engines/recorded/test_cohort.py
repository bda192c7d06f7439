"""Clients that take their steps together end where each of them ends alone: every method, on any machine."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from cohorts import LaneEngine, Recorder, alternately, check, close, lane_of, same_run, updates
from tiny import same_state, tiny_dataset, tiny_experiment, tiny_run_with_memory, tiny_task
from torch.nn.functional import cross_entropy

from fedloom.core.execution import perform
from fedloom.core.failures import Failure
from fedloom.core.flat_state import FlatState
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.methods import METHODS as REGISTRY

FedAvg = REGISTRY["fedavg"]


pytestmark = pytest.mark.usefixtures("_no_fallback")


def few_sizes(task):
    """Batches of 16 and of 5 only: every size is traced anew, which takes its time."""
    train = [samples[:size] for samples, size in zip(task.federation.train, (37, 32, 21), strict=False)]
    return replace(task, federation=Federation(train, task.federation.test[:3]))


def setup_of(method=None, **fields):
    setup = tiny_experiment("fedavg", **({"task": few_sizes(tiny_task(norm=False))} | fields)).setup
    return setup if method is None else replace(setup, method=method())


def of_size(setup, *sizes):
    """The same setup, with clients of these sizes."""
    train = [samples[:size] for samples, size in zip(tiny_task().federation.train, sizes, strict=False)]
    task = replace(setup.task, federation=Federation(train, setup.task.federation.test[: len(sizes)]))
    return replace(setup, task=task)


def together_and_alone(method, slots=4, **fields):
    got = tiny_run_with_memory(method, engine="lane-for-tests", workers=slots, **fields)
    same_run(got, tiny_run_with_memory(method, **fields))
    return LaneEngine.recorder


TRAINED = sorted(REGISTRY.keys() - {"untrained"})


# A third of the methods in a cohort here, a third in a lane of one client in test_lane.py; all in `make slow`.
@pytest.mark.parametrize("method", alternately([*TRAINED, "fedavg+ft", "fedavg+linear"], first=0))
def test_every_method_ends_where_it_ends_alone(method):
    task = few_sizes(tiny_task(norm=False))
    recorder = together_and_alone(method, 2, training__rounds=2, training__fraction=1.0, task=task)
    assert recorder.replays > 1


@pytest.mark.slow
@pytest.mark.parametrize("method", [
    {"name": "fedcp", "uploads": "mean", "noise": True}, {"name": "gpfl", "magnitude": "batch"},
    {"name": "fedlc", "denominator": "others"}, {"name": "feddbe", "momentum": 0.5},
])  # fmt: skip
def test_other_readings_end_where_they_end_alone(method):
    task = few_sizes(tiny_task(norm=False))
    assert together_and_alone(method, 3, training__rounds=2, training__fraction=1.0, task=task).replays > 1


@pytest.mark.slow
@pytest.mark.parametrize("method", alternately(TRAINED, first=1))
def test_every_method_with_clients_of_all_sizes(method):
    fields = {"training__epochs": 2, "training__fraction": 1.0, "task": tiny_task(norm=False)}
    assert together_and_alone(method, **fields).replays > 3


@pytest.mark.parametrize("objective", ["simclr", "byol", "moco"])
def test_unsupervised_objectives(objective):
    task = few_sizes(tiny_task(norm=False))
    fields = {"training__rounds": 2, "training__fraction": 1.0, "objective": objective, "task": task}
    together_and_alone("fedavg+probe" if objective == "simclr" else "fedavg", 3, **fields)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("cnn2", {"dropout": 0.3}),
        pytest.param("cnn4", {"norm": True}, marks=pytest.mark.slow),
        pytest.param("cnn4", {"norm": False, "flat": True}, marks=pytest.mark.slow),
    ],
)
def test_convolutions_dropout_and_batch_norm(model, options):
    task = few_sizes(replace(tiny_task(model, **options), dataset=tiny_dataset(shape=(1, 22, 22))))
    fields = {"task": task, "training__rounds": 2, "training__fraction": 1.0, "training__optimizer__lr": 0.01}
    together_and_alone("fedprox", 3, **fields)


@pytest.mark.parametrize("augment", [(), ("crop:1", "noise:0.05")])
def test_channels_last(augment):
    task = few_sizes(replace(tiny_task("cnn2", augment=augment, dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16))))
    fields = {"task": task, "training__rounds": 2, "training__fraction": 1.0, "engine__channels_last": True}
    together_and_alone("fedavg", 3, **fields)


@pytest.mark.parametrize("spec", ["flip", "jitter:0.4", "grayscale:0.2", "resized-crop:0.2"])
def test_every_augmentation_is_each_clients_own(spec):
    setup = of_size(setup_of(task=replace(tiny_task(augment=(spec,)), dataset=tiny_dataset(shape=(3, 8, 8)))), 32, 32)
    check(setup, lane_of(setup, 2), updates(setup, range(2)))


def test_adam_whose_state_is_kept():
    # without batch-norm, before which a bias has no gradient but rounding, which Adam makes as large as any
    fields = {"task": few_sizes(tiny_task(norm=False)), "training__epochs": 2, "training__fraction": 1.0}
    fields["training__optimizer"] = {"name": "adam", "lr": 0.003, "keep": True}
    together_and_alone("fedrep", 3, **fields)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adamw", "lr": 0.003, "weight_decay": 0.1, "decay_norms": False},
        pytest.param({"name": "rmsprop", "lr": 0.003, "momentum": 0.5, "clip": 0.5}, marks=pytest.mark.slow),
        pytest.param({"name": "adagrad", "lr": 0.003, "weight_decay": 0.01}, marks=pytest.mark.slow),
        pytest.param({"name": "lion", "lr": 1e-5, "weight_decay": 0.1}, marks=pytest.mark.slow),
        {"name": "sgd", "lr": 0.1, "weight_decay": 0.1, "decay_norms": False, "clip": 0.5},
    ],
    ids=lambda optimizer: optimizer["name"],
)
def test_every_optimizer(optimizer, monkeypatch):
    """One by one, together, and with the graph that the compiler gets."""
    made = []
    monkeypatch.setattr("fedloom.engines.recorded.tracing.compile_graph", lambda graph, _: made.append(1) or graph)
    fields = {"task": few_sizes(tiny_task(norm=False)), "training__fraction": 1.0, "training__epochs": 2}
    fields["training__optimizer"] = optimizer
    together_and_alone("fedrep", 1, training__optimizer__keep=True, **fields)
    together_and_alone("fedrep", 3, training__optimizer__keep=True, **fields)
    setup = of_size(setup_of(**fields), 32, 32, 32)
    cohort = lane_of(setup, 3, compile=True)
    for round in (1, 2):
        check(setup, cohort, updates(setup, range(3), round))
    assert made


def test_alone_and_together_in_any_order():
    setup = setup_of(task=tiny_task())
    cohort = lane_of(setup, 3)
    for round, clients in enumerate(([1], [0, 1, 2], [2, 0], [3], [4, 1, 5], [5, 5, 1], [0, 1, 2]), start=1):
        check(setup, cohort, updates(setup, clients, round))


def test_even_clients_are_one_graph():
    setup, recorder = of_size(setup_of(), 32, 32, 32), Recorder()
    cohort = lane_of(setup, 3, recorder)
    for round in (1, 2, 3):
        check(setup, cohort, updates(setup, range(3), round))
    assert (recorder.recorded, recorder.replays) == (1, 3)


def test_remainders_of_all_clients_are_one_graph():
    setup, recorder = of_size(setup_of(), 21, 21, 21), Recorder()
    cohort = lane_of(setup, 3, recorder)
    for round in (1, 2, 3):
        check(setup, cohort, updates(setup, range(3), round))
    assert (recorder.recorded, recorder.replays) == (2, 4)  # 16 and 5 together, each captured when it came again
    uneven = of_size(setup_of(), 21, 20, 19)
    recorder = Recorder()
    cohort = lane_of(uneven, 3, recorder)
    for round in (1, 2, 3):
        check(uneven, cohort, updates(uneven, range(3), round))
    assert (recorder.recorded, recorder.replays) == (4, 8)  # 16 together; 5, 4 and 3 alone, in the row for that


@pytest.mark.parametrize("compile", [False, True])
def test_a_client_that_has_finished_makes_room_for_the_next(compile, monkeypatch):
    monkeypatch.setattr("fedloom.engines.recorded.tracing.compile_graph", lambda graph, _: graph)
    setup, recorder = of_size(setup_of(), 48, 16, 21, 64, 32, 16), Recorder()
    cohort = lane_of(setup, 2, recorder, compile=compile)
    for round, clients in enumerate(([0, 1, 2, 3, 4, 5], [5, 0, 3], [2, 2, 2, 2], [1]), start=1):
        check(setup, cohort, updates(setup, clients, round))
    assert recorder.replays > 3


def test_clients_that_finish_beside_a_longer_one_are_replaced_without_touching_it():
    """Slots 1 and 2 become free at once, twice, while the client in slot 0 is in the middle of its steps."""
    setup = of_size(setup_of(), 96, 32, 32, 32, 32, 16)
    cohort = lane_of(setup, 3)
    for round in (1, 2):
        check(setup, cohort, updates(setup, range(6), round))


def test_even_clients_are_replaced_all_at_once(monkeypatch):
    setup = of_size(setup_of(), 32, 32, 32, 32, 32)
    cohort = lane_of(setup, 2)
    common = []
    monkeypatch.setattr(cohort, "_spread", lambda jobs: common.append([job.client for job in jobs]))
    check(setup, cohort, updates(setup, range(5)))
    assert common == [[0, 1], [2, 3]]


def test_the_memory_of_clients_in_other_calls_is_restored():
    """Clients of the head and of the whole model, of all sizes, in rows among each other; with kept optimizers."""

    class Phases(FedAvg):
        keeps = ("model.head",)

        def update(self, client):
            client.fit("model.head", self.loss, keep_optimizer=True)
            if client.id % 2:
                client.fit("model.extractor", self.loss, epochs=2)
            z, y = client.features()
            client.fit("model.head", self.head_loss, data=(z, y))

        def head_loss(self, client, batch):
            return cross_entropy(client.model.head(batch.x), batch.y)

    fields = {"training__optimizer": {"name": "adam", "lr": 0.003, "keep": True}}
    setup = of_size(setup_of(Phases, **fields), 48, 16, 21, 64, 32, 16)
    cohort = lane_of(setup, 3)
    for round, clients in enumerate(([0, 1, 2, 3, 4, 5], [5, 3, 0, 1], [4, 2, 1, 0, 3, 5]), start=1):
        check(setup, cohort, updates(setup, clients, round))


def test_a_client_that_fails_makes_room_for_the_next():
    class Failing(FedAvg):
        def update(self, client):
            if client.id == 1:
                raise ValueError("no more")
            client.fit("model", self.broken if client.id == 2 else self.loss)

        def broken(self, client, batch):
            return self.loss(client, batch) + client.no_such_part

    cohort = lane_of(setup := of_size(setup_of(Failing), 32, 32, 32, 48, 21), 2)
    jobs = updates(setup, [1, 0, 2, 3, 1, 2, 4])
    for got, job in zip(cohort.launch(jobs), jobs, strict=True):
        assert (got.error is not None) is (job.client in (1, 2))
        if got.error is None:
            close(got.message, perform(Workspace(setup), job).message)


def test_clients_are_spread_over_two_cohorts():
    """The second one takes what the first one has traced: with its statistics."""
    setup = of_size(setup_of(training__epochs=2), 32, 21, 32)
    one, other = lane_of(setup, 3), lane_of(setup, 3)
    other.shared = one.shared
    for round in (1, 2):
        for cohort in (one, other):
            check(setup, cohort, updates(setup, range(3), round))


def test_every_client_has_its_own_learning_rate():
    class Varying(FedAvg):
        def update(self, client):
            client.fit("model", self.loss, lr=0.2 / (1 + client.id + client.round))

    setup, recorder = of_size(setup_of(Varying), 32, 32, 21), Recorder()
    cohort = lane_of(setup, 3, recorder)
    for round, clients in enumerate(([0, 1, 2], [2, 1, 0], [1, 2]), start=1):
        check(setup, cohort, updates(setup, clients, round))


def test_clients_that_come_to_different_calls():
    class Diverging(FedAvg):
        def update(self, client):
            if client.id % 2:
                client.fit("model.head", self.loss)
            client.fit("model", self.loss)

    setup = setup_of(Diverging)
    cohort = lane_of(setup, 3)
    for round, clients in enumerate(([0, 1, 2], [1, 2, 0], [2, 1]), start=1):
        check(setup, cohort, updates(setup, clients, round))


def test_a_client_without_steps_beside_others():
    setup = setup_of()
    task = setup.task
    train = [task.federation.train[0], task.federation.train[1][:0], task.federation.train[2]]
    setup = replace(setup, task=replace(task, federation=Federation(train, task.federation.test[:3])))
    for clients in ([0, 1, 2], [1, 0, 2]):
        check(setup, lane_of(setup, 3), updates(setup, clients))


def test_a_method_that_changes_modes_itself():
    """A client leaves its model in eval mode; the next one in its slot comes to a size that nobody has traced yet."""

    class Evaluating(FedAvg):
        def update(self, client):
            super().update(client)
            client.model.eval()
            client.model.requires_grad_(False)

    task = replace(tiny_task("cnn2", dropout=0.5), dataset=tiny_dataset(shape=(1, 16, 16)))
    setup = of_size(setup_of(Evaluating, task=task), 32, 32, 21)
    cohort = lane_of(setup, 2)
    check(setup, cohort, updates(setup, [0, 1], 1))
    check(setup, cohort, updates(setup, [0, 2], 2))


@pytest.mark.parametrize("slots", [1, 3])
def test_after_a_fit_every_clients_parts_are_in_the_modes_of_its_steps(slots):
    class Looking(FedAvg):
        @torch.no_grad()
        def update(self, client):
            client.features()  # everything evaluates
            with torch.enable_grad():
                client.fit("model.head", self.loss)
            client.model.head.bias.fill_(10 * client.model.head.training + client.model.extractor.training)

    lane = lane_of(setup := setup_of(Looking), slots)
    for got in lane.launch(updates(setup, range(slots))):
        assert got.error is None
        assert (got.message["model.head.bias"] == 10).all()


@pytest.mark.parametrize("slots", [1, 3])
def test_features_that_outgrow_their_memory(slots):
    setup = tiny_experiment("fedstyle", objective="simclr").setup
    message = Message(Workspace(setup).downward())
    cohort = lane_of(setup, slots)
    for third in ((2,), (0, 1, 2), (3,)):  # slot 2's features need more memory than before, and are fewer again
        groups = enumerate([(0,), (1,), third])
        jobs = [Job("generalise", 1, message, client=i, clients=group, keep_model=True) for i, group in groups]
        check(setup, cohort, jobs)


def test_features_of_one_client_grow():
    class Growing(FedAvg):
        def update(self, client):
            z, y = client.features()
            if client.round == 2 and client.id == 2:
                z, y = torch.cat([z] * 4), torch.cat([y] * 4)
            client.fit("model.head", self.head_loss, data=(z * client.round, y))

        def head_loss(self, client, batch):
            return cross_entropy(client.model.head(batch.x), batch.y)

    setup = setup_of(Growing)
    cohort = lane_of(setup, 3)
    for round in (1, 2, 3):
        check(setup, cohort, updates(setup, range(3), round))


def test_what_is_noted_may_depend_on_the_size_of_a_batch():
    class Noting(FedAvg):
        def update(self, client):
            super().update(client)
            means = client.fit("model", self.loss)
            client.seen.copy_(means.get("small", torch.zeros(())))

        def build(self, task):
            return super().build(task) | {"seen": torch.zeros(())}

        def loss(self, client, batch):
            value = super().loss(client, batch)
            if batch.size < 16:
                client.note("small", value)
            return value

    setup = setup_of(Noting)
    for clients in ((0, 1, 2), (0, 0)):
        cohort = lane_of(setup, len(clients))
        check(setup, cohort, updates(setup, clients))


def test_steps_that_cannot_be_captured_are_taken_eagerly():
    class Peeking(FedAvg):
        def loss(self, client, batch):
            value = super().loss(client, batch)
            return value * (2.0 if value.item() > 0 else 1.0)

    setup, recorder = setup_of(Peeking), Recorder()
    cohort = lane_of(setup, 3, recorder)
    jobs = updates(setup, range(3))
    with pytest.warns(UserWarning, match="runs eagerly.*reads a tensor's value on the host"):
        results = cohort.launch(jobs)
    for got, again, job in zip(results, cohort.launch(jobs), jobs, strict=True):  # named once
        alone = dict(perform(Workspace(setup), job).message)
        assert same_state(dict(got.message), alone)
        assert same_state(dict(again.message), alone)
    assert recorder.recorded == 0


@pytest.mark.parametrize("of", ["counted", "written"])
def test_steps_that_cannot_be_vectorised_are_taken_one_by_one(of):
    class Odd(FedAvg):
        def loss(self, client, batch):
            return super().loss(client, batch) * (1 + self.odd(client, batch))

        def counted(self, client, batch):
            return torch.zeros(4).index_add_(0, batch.y, torch.ones_like(batch.y, dtype=torch.float)).square().mean()

        def written(self, client, batch):
            out = torch.zeros(len(batch.y))
            out[:] = batch.x[:, 0, 0, 0]
            return out.mean()

    Odd.odd = getattr(Odd, of)
    setup, recorder = setup_of(Odd), Recorder()
    cohort = lane_of(setup, 3, recorder)
    with pytest.warns(UserWarning, match="not vectorised over clients"):
        check(setup, cohort, updates(setup, range(3)))
    check(setup, cohort, updates(setup, range(3), 2))
    assert recorder.replays > 0


def test_random_numbers_of_a_method_are_each_clients_own():
    class Drawing(FedAvg):
        def loss(self, client, batch):
            return super().loss(client, batch) * (1 + client.random.chosen((batch.size,), 0.5).float().mean())

    setup = setup_of(Drawing)
    check(setup, lane_of(setup, 3), updates(setup, range(3)))


def test_a_client_that_raises_leaves_the_others_alone():
    class Failing(FedAvg):
        def update(self, client):
            super().update(client)
            if client.id == 1:
                raise ValueError("no more")
            super().update(client)

    setup = setup_of(Failing)
    cohort = lane_of(setup, 3)
    for clients in ([0, 1, 2], [1, 0, 2], [0, 1, 2]):  # the cohort is usable afterwards
        jobs = updates(setup, clients)
        for got, job in zip(cohort.launch(jobs), jobs, strict=True):
            if job.client == 1:
                assert "no more" in got.error.why
                assert got.message is got.memory is None
            else:
                close(got.message, perform(Workspace(setup), job).message)


@pytest.mark.parametrize("clients", [(0, 1, 2), (1, 0, 2)])
def test_a_step_of_one_client_that_raises_is_its_own_failure(clients):
    class Failing(FedAvg):
        def update(self, client):
            loss = self.broken if client.id == 1 else self.loss
            client.fit("model", loss)

        def broken(self, client, batch):
            return self.loss(client, batch) + client.no_such_part

    cohort = lane_of(setup := setup_of(Failing), 3)
    for _ in range(2):
        jobs = updates(setup, clients)
        for got, job in zip(cohort.launch(jobs), jobs, strict=True):
            if job.client == 1:
                assert "client.no_such_part: there is no such part" in got.error.why
            else:
                close(got.message, perform(Workspace(setup), job).message)


def test_a_step_of_all_clients_that_raises_is_everybodys_failure():
    class Failing(FedAvg):
        def loss(self, client, batch):
            return super().loss(client, batch) * client.size  # a value that a recording would keep

    cohort = lane_of(setup := setup_of(Failing), 3)
    assert all(
        "cannot be read inside a training step" in result.error.why
        for result in cohort.launch(updates(setup, range(3)))
    )


def test_a_part_that_was_rebound_is_refused():
    class Rebinding(FedAvg):
        def update(self, client):
            super().update(client)
            client.model.head.bias.data = client.model.head.bias + 1
            super().update(client)

    cohort = lane_of(setup := setup_of(Rebinding), 3)
    assert all("was rebound" in result.error.why for result in cohort.launch(updates(setup, range(3))))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_rebound_is_refused_or_sent(slots, when):
    """Whenever it was: the flat state does not have it."""

    class Rebinding(FedAvg):
        def update(self, client):
            if when == "after":
                super().update(client)
            client.model.head.bias.data = torch.full_like(client.model.head.bias, 7.0)
            if when == "before":
                client.fit("model.extractor", self.loss)

    lane = lane_of(setup := setup_of(Rebinding), slots)
    for got in lane.launch(updates(setup, range(slots))):
        if got.error is not None:
            assert "was rebound" in got.error.why
        else:
            assert (got.message["model.head.bias"] == 7).all()


@pytest.mark.parametrize("slots", [1, 3])
def test_what_was_rebound_after_the_last_fit_does_not_outlive_its_client(slots):
    class Rebinding(FedAvg):
        def update(self, client):
            super().update(client)
            client.model.head.bias.data = client.model.head.bias + 1

    cohort = lane_of(setup := setup_of(Rebinding), slots)
    cohort.launch(updates(setup, range(slots)))
    message = Message(Workspace(setup).downward())
    for got in cohort.launch([Job("global", 2, message, clients=(client,)) for client in range(slots)]):
        got.read()
        alone = perform(Workspace(setup), Job("global", 2, message, clients=(got.scores[0].client,)))
        assert got.scores[0].loss == pytest.approx(alone.scores[0].loss)


@pytest.mark.parametrize("context", [lambda: torch.autocast("cpu"), lambda: torch.device("meta")])
def test_what_is_open_around_a_fit_is_that_clients_alone(context):
    class Around(FedAvg):
        def update(self, client):
            product = client.model.head.weight @ client.model.head.weight.t()
            assert product.dtype == torch.float32
            assert torch.empty(0).device.type == "cpu"
            with context():
                super().update(client)

    cohort = lane_of(setup := setup_of(Around), 3)
    check(setup, cohort, updates(setup, range(3)))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_gradients_that_are_switched_off_are_that_clients_alone():
    class Without(FedAvg):
        def update(self, client):
            assert torch.is_grad_enabled()
            torch.set_grad_enabled(client.id != 1)
            with torch.enable_grad():
                super().update(client)
            assert torch.is_grad_enabled() is (client.id != 1)
            torch.set_grad_enabled(True)

    cohort = lane_of(setup := setup_of(Without), 3)
    check(setup, cohort, updates(setup, range(3)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), torch.zeros(5), torch.zeros(4, dtype=torch.int64)])
def test_a_message_that_does_not_fit_is_its_clients_failure(wrong, flat):
    cohort = lane_of(setup := setup_of(), 3)
    jobs = updates(setup, range(3))
    tensors = dict(jobs[0].message) | {"model.head.bias": wrong}
    message = Message(FlatState.of(tensors) if flat else tensors)
    results = cohort.launch([replace(job, message=message) for job in jobs])
    for got, job in zip(results, jobs, strict=True):
        try:
            alone = perform(Workspace(setup), replace(job, message=message))
        except Exception:
            assert got.error is not None
        else:
            close(got.message, alone.message)
    check(setup, cohort, jobs)


def test_every_client_gets_its_own_message():
    setup = setup_of()
    jobs = updates(setup, range(3))
    own = [Message({n: t + 0.01 * i for n, t in jobs[0].message.items() if t.is_floating_point()}) for i in range(3)]
    cohort = lane_of(setup, 3)
    check(setup, cohort, [replace(job, message=message) for job, message in zip(jobs, own, strict=True)])
    check(setup, cohort, jobs)


def test_a_flat_message_for_all_is_that_of_named_tensors():
    setup = setup_of()
    jobs = updates(setup, range(3))
    flat = Message(FlatState.of(dict(jobs[0].message)))
    got = [lane_of(setup, 3).launch([replace(job, message=m) for job in jobs]) for m in (jobs[0].message, flat)]
    for one, other in zip(*got, strict=True):
        assert same_state(dict(one.message), dict(other.message))


def test_a_common_message_is_let_go_of_and_reaches_those_who_work():
    def drops_client_1(work, workspace, job):
        if (job.client, job.round) == (1, 2):
            return Result(1, error=Failure("dropped", "it does not answer"))
        return work(workspace, job)

    cohort = lane_of(setup := replace(setup_of(), intercept=drops_client_1), 3)
    check(setup, cohort, updates(setup, range(3)))
    for clients in ([0, 1], [1, 0]):
        jobs = updates(setup, clients, 2)
        for got, job in zip(cohort.launch(jobs), jobs, strict=True):
            if job.client == 1:
                assert got.error is not None
            else:
                close(got.message, perform(Workspace(setup), job).message)
        assert all(workspace.holds is None for workspace in cohort.workspaces)
        assert all(workspace.outbox is None for workspace in cohort.workspaces)
    check(setup, cohort, updates(setup, range(3), 3))


def test_results_do_not_change_when_the_cohort_works_on():
    cohort = lane_of(setup := setup_of(), 3)
    first = cohort.launch(updates(setup, range(3)))
    before = [({n: t.clone() for n, t in r.message.items()}, float(r.loss)) for r in first]
    cohort.launch(updates(setup, [2, 1, 0], 2))
    for result, (message, loss) in zip(first, before, strict=True):
        assert same_state(dict(result.message), message)
        assert float(result.loss) == loss


def test_what_is_compressed_is_sent_compressed():
    setup = setup_of(wire__up="fp16")
    cohort = lane_of(setup, 3)
    jobs = updates(setup, range(3))
    for got, alone in zip(cohort.launch(jobs), lane_of(setup).launch(jobs), strict=True):
        assert got.error is None, got.error
        assert got.message.signature == alone.message.signature
        close(got.message, alone.message, 2e-3)
    assert cohort.largest(cohort.launch(jobs)) is None


def test_nothing_beyond_the_last_row_is_read_while_capturing(monkeypatch):
    monkeypatch.setattr("fedloom.engines.recorded.lane.CAPACITY", 1)  # as many as twice what the first round needs
    setup = of_size(setup_of(training__batch_size=12), 24, 24, 24)
    check(setup, lane_of(setup, 3), updates(setup, range(3)))


def test_a_capture_that_fails_is_done_eagerly_and_not_tried_again():
    class Unable(Recorder):
        tries = 0

        def capture(self, work):
            self.tries += 1
            raise RuntimeError("no capture today")

    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(1, 16, 16)))
    setup, recorder = of_size(setup_of(task=task), 32, 32, 32), Unable()
    cohort = lane_of(setup, 3, recorder)
    with pytest.warns(UserWarning, match="run eagerly: no capture today"):
        check(setup, cohort, updates(setup, range(3)))
    check(setup, cohort, updates(setup, range(3), 2))
    assert recorder.tries == 1


@pytest.mark.parametrize("where", ["capture", "client", "step"])
def test_after_it_ran_out_of_memory_a_cohort_can_be_used_or_let_go_of(where):
    class Scarce(Recorder):
        def capture(self, work):
            if where == "capture" and Large.scarce:
                raise torch.OutOfMemoryError("so says the test")
            return super().capture(work)

    class Large(FedAvg):
        scarce = True

        def update(self, client):
            super().update(client)
            if self.where == "client" and client.id == 1 and self.scarce:
                raise torch.OutOfMemoryError("so says the test")

        def loss(self, client, batch):
            if self.where == "step" and self.scarce:
                raise torch.OutOfMemoryError("so says the test")
            return super().loss(client, batch)

    Large.where = where  # a class knows it: a loss closes over nothing
    setup = of_size(setup_of(Large), 32, 32, 32)
    cohort = lane_of(setup, 3, Scarce())
    failed = None
    try:
        cohort.launch(updates(setup, range(3)))
    except torch.OutOfMemoryError as error:
        failed = error.with_traceback(None)
    assert failed is not None
    Large.scarce = False
    check(setup, cohort, updates(setup, range(3)))
    held = weakref.ref(cohort.workspaces[0])
    del cohort
    gc.collect()
    assert held() is None


def test_nothing_of_jobs_that_were_ended_by_an_error_reaches_the_next_ones():
    class Stubborn(FedAvg):
        scarce = True

        def update(self, client):
            try:
                super().update(client)
                super().update(client)
                if client.id == 1 and self.scarce:
                    raise torch.OutOfMemoryError("so says the test")
            finally:  # trains while the cohort ends the job
                super().update(client)

    setup = of_size(setup_of(Stubborn), 32, 16, 0)
    cohort = lane_of(setup, 2)
    with pytest.raises(torch.OutOfMemoryError):
        cohort.launch(updates(setup, [0, 1]))
    assert cohort._sent is None
    assert all(slot.steps is None and not slot.means for slot in cohort._slots)
    Stubborn.scarce = False
    check(setup, cohort, updates(setup, [2, 2]))  # without samples: nothing changes what they received


def test_a_compiled_cohort_is_the_same(monkeypatch):
    """With the traced operations in place of the compiler's, which are the same up to rounding."""
    made = []
    monkeypatch.setattr("fedloom.engines.recorded.tracing.compile_graph", lambda graph, _: made.append(1) or graph)
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(1, 16, 16)))
    setup = of_size(setup_of(task=task), 32, 37, 32)
    cohort = lane_of(setup, 3, compile=True)
    for round, clients in enumerate(([1, 0, 2], [0, 2], [1, 0, 2]), start=1):
        check(setup, cohort, updates(setup, clients, round))
    assert len(made) == 1  # for the full cohort's steps of 16
