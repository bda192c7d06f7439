"""Clients that take their steps together end where each of them ends alone: every method, on any machine."""

import gc
import weakref
from dataclasses import replace
from threading import Thread

import pytest
import torch
from cohorts import CohortEngine, Recorder, check, close, cohort_of, same_run, updates
from tiny import same_state, tiny_dataset, tiny_experiment, tiny_run_with_memory, tiny_task
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import conv2d, cross_entropy

from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result, perform
from fedloom.core.message import Message
from fedloom.core.workspace import Eager, Workspace
from fedloom.data import Federation
from fedloom.engines.cuda.batching import batched
from fedloom.methods import METHODS as REGISTRY

FedAvg = REGISTRY["fedavg"]


@pytest.fixture
def registry():
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def setup_of(method=None, **fields):
    setup = tiny_experiment("fedavg", **fields).setup
    return setup if method is None else replace(setup, method=method())


def in_step_and_alone(method, **fields):
    got = tiny_run_with_memory(method, engine="cohort-for-tests", workers=4, **fields)
    same_run(got, tiny_run_with_memory(method, **fields))
    assert not CohortEngine.last.refused
    return CohortEngine.last


@pytest.mark.parametrize("method", [*sorted(REGISTRY), "fedavg+ft", "fedavg+linear"])
def test_every_method_ends_where_it_ends_alone(method):
    fields = {"training__epochs": 2, "training__fraction": 1.0, "task": tiny_task(norm=False)}
    device = in_step_and_alone(method, **fields)
    assert method == "centralized" or device.replays > 3
    assert not device.separated


@pytest.mark.parametrize("objective", ["simclr", "byol", "moco"])
def test_unsupervised_objectives(objective):
    fields = {"training__rounds": 2, "training__fraction": 1.0, "objective": objective, "task": tiny_task(norm=False)}
    assert not in_step_and_alone("fedstyle", **fields).separated


@pytest.mark.parametrize(
    ("model", "options"),
    [("cnn2", {"dropout": 0.3}), ("cnn4", {"norm": True}), ("cnn4", {"norm": False, "flat": True})],
)
def test_convolutions_dropout_and_batch_norm(model, options):
    task = replace(tiny_task(model, **options), dataset=tiny_dataset(shape=(1, 22, 22)))
    fields = {"task": task, "training__rounds": 2, "training__fraction": 1.0, "training__optimizer__lr": 0.01}
    assert not in_step_and_alone("fedprox", **fields).separated


@pytest.mark.parametrize("augment", [(), ("crop:1", "noise:0.05")])
def test_channels_last(augment):
    task = replace(tiny_task("cnn2", augment=augment, dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16)))
    fields = {"task": task, "training__rounds": 2, "training__fraction": 1.0, "engine__channels_last": True}
    assert not in_step_and_alone("fedavg", **fields).separated


def test_adam_whose_state_is_kept():
    # without batch-norm, before which a bias has no gradient but rounding, which Adam makes as large as any
    fields = {"task": tiny_task(norm=False), "training__epochs": 3, "training__fraction": 1.0}
    fields["training__optimizer"] = {"name": "adam", "lr": 0.003, "keep": True}
    in_step_and_alone("fedrep", **fields)


def test_alone_and_together_in_any_order():
    setup = setup_of()
    cohort = cohort_of(setup)
    for round, clients in enumerate(([1], [0, 1, 2], [2, 0], [3], [4, 1, 5], [5, 5, 1], [0, 1, 2]), start=1):
        check(setup, cohort, updates(setup, clients, round))


@pytest.mark.parametrize("stepper", [Eager, None])
def test_features_that_outgrow_their_memory(stepper):
    setup = tiny_experiment("fedstyle", objective="simclr").setup
    message = Message(Workspace(setup).downward())
    cohort = cohort_of(setup, **({} if stepper is None else {"stepper": stepper}))
    for third in ((2,), (0, 1, 2), (3,)):  # lane 2's features need more memory than before, and are fewer again
        groups = enumerate([(0,), (1,), third])
        jobs = [Job("generalise", 1, message, client=i, clients=group, keep_model=True) for i, group in groups]
        check(setup, cohort, jobs)


@pytest.mark.usefixtures("registry")
def test_features_of_one_lane_grow():
    class Growing(FedAvg):
        def update(self, client):
            z, y = client.features()
            if client.round == 2 and client.id == 2:
                z, y = torch.cat([z] * 4), torch.cat([y] * 4)
            client.fit("model.head", self.head_loss, data=(z * client.round, y))

        def head_loss(self, client, batch):
            return cross_entropy(client.model.head(batch.x), batch.y)

    setup = setup_of(Growing)
    cohort = cohort_of(setup, stepper=Eager)
    for round in (1, 2, 3):
        check(setup, cohort, updates(setup, range(3), round))


@pytest.mark.usefixtures("registry")
def test_what_is_noted_may_depend_on_the_size_of_a_batch():
    class Noting(FedAvg):
        def loss(self, client, batch):
            value = super().loss(client, batch)
            if batch.size < 16:
                client.note("small", value)
            return value

    setup = setup_of(Noting)
    for clients in ((0, 1, 2), (0, 0)):
        cohort = cohort_of(setup, len(clients))
        check(setup, cohort, updates(setup, clients))


@pytest.mark.usefixtures("registry")
def test_steps_that_cannot_be_recorded_are_taken_alone():
    class Peeking(FedAvg):
        def loss(self, client, batch):
            value = super().loss(client, batch)
            return value * (2.0 if value.item() > 0 else 1.0)

    setup, device = setup_of(Peeking), Recorder()
    cohort = cohort_of(setup, stepper=Eager, device=device)
    jobs = updates(setup, range(3))
    for got, job in zip(cohort.attempt(jobs), jobs, strict=True):
        assert same_state(got.message.tensors, perform(Workspace(setup), job).message.tensors)
    assert "reads a tensor's value on the host" in str(device.refused[0])


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("of", ["drawn", "counted", "written"])
def test_steps_that_cannot_be_batched_are_taken_alone(of):
    class Odd(FedAvg):
        def loss(self, client, batch):
            return super().loss(client, batch) * (1 + self.odd(client, batch))

        def drawn(self, client, batch):
            return torch.bernoulli(
                torch.full_like(batch.x[:, 0, 0, 0], 0.5), generator=client._workspace.generator
            ).mean()

        def counted(self, client, batch):
            return torch.zeros(4).index_add_(0, batch.y, torch.ones_like(batch.y, dtype=torch.float)).square().mean()

        def written(self, client, batch):
            out = torch.zeros(len(batch.y))
            out[:] = batch.x[:, 0, 0, 0]
            return out.mean()

    Odd.odd = getattr(Odd, of)
    setup, device = setup_of(Odd), Recorder()
    cohort = cohort_of(setup, device=device)
    check(setup, cohort, updates(setup, range(3)))
    assert device.separated
    assert not device.refused


@pytest.mark.usefixtures("registry")
def test_a_client_that_raises_leaves_the_others_alone():
    class Failing(FedAvg):
        def update(self, client):
            super().update(client)
            if client.id == 1:
                raise ValueError("no more")
            super().update(client)

    setup = setup_of(Failing)
    jobs = updates(setup, range(3))
    cohort = cohort_of(setup)
    for _ in range(2):  # and the cohort goes on with other jobs
        first, failed, third = cohort.attempt(jobs)
        assert "no more" in failed.error.why
        for got, job in ((first, jobs[0]), (third, jobs[2])):
            close(got.message.tensors, perform(Workspace(setup), job).message.tensors)


@pytest.mark.usefixtures("registry")
def test_a_step_that_raises_is_its_clients_failure():
    class Failing(FedAvg):
        def loss(self, client, batch):
            return super().loss(client, batch) * client.size  # a value that a recording would keep

    cohort = cohort_of(setup := setup_of(Failing))
    assert all("Python values" in result.error.why for result in cohort.attempt(updates(setup, range(3))))


@pytest.mark.usefixtures("registry")
def test_a_part_that_was_rebound_is_refused():
    class Rebinding(FedAvg):
        def update(self, client):
            client.model.head.bias.data = client.model.head.bias + 1
            super().update(client)

    cohort = cohort_of(setup := setup_of(Rebinding))
    assert all("was rebound" in result.error.why for result in cohort.attempt(updates(setup, range(3))))


def test_what_was_rebound_after_the_last_fit_does_not_outlive_its_client():
    class Rebinding(FedAvg):
        def update(self, client):
            super().update(client)
            client.model.head.bias.data = client.model.head.bias + 1

    cohort = cohort_of(setup := setup_of(Rebinding))
    cohort.attempt(updates(setup, range(3)))
    message = Message(Workspace(setup).downward())
    for got in cohort.attempt([Job("global", 2, message, clients=(client,)) for client in range(3)]):
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

    cohort = cohort_of(setup := setup_of(Around))
    check(setup, cohort, updates(setup, range(3)))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("shape", [(3, 4), (5,)])
def test_a_message_of_other_shapes_is_its_clients_failure(shape):
    cohort = cohort_of(setup := setup_of())
    jobs = updates(setup, range(3))
    message = Message(jobs[0].message.tensors | {"model.head.bias": torch.zeros(shape)})
    results = cohort.attempt([replace(job, message=message) for job in jobs])
    assert all(result.error is not None for result in results)
    check(setup, cohort, jobs)


def test_a_common_message_is_let_go_of_and_reaches_those_who_work():
    def drops_client_1(work, workspace, job):
        if (job.client, job.round) == (1, 2):
            return Result(1, error=Failure("dropped", "it does not answer"))
        return work(workspace, job)

    cohort = cohort_of(setup := replace(setup_of(), intercept=drops_client_1))
    check(setup, cohort, updates(setup, range(3)))
    jobs = updates(setup, range(2), 2)
    first, second = cohort.attempt(jobs)
    assert second.error is not None
    close(first.message.tensors, perform(Workspace(setup), jobs[0]).message.tensors)
    assert all(lane.holds is None for lane in cohort.lanes)
    check(setup, cohort, updates(setup, range(3), 3))


def test_nothing_beyond_a_plan_is_read_while_recording():
    class Exact(Recorder):
        least = 2 * 3 * 12  # as many as two steps of three lanes

    setup = setup_of(training__batch_size=12)
    federation = setup.task.federation
    task = replace(setup.task, federation=Federation([held[:24] for held in federation.train], federation.test))
    setup = replace(setup, task=task)
    cohort = cohort_of(setup, device=Exact())
    check(setup, cohort, updates(setup, range(3)))


@pytest.mark.parametrize("draws", [False, True])
def test_a_recording_that_fails_is_not_tried_again(draws):
    class Unable(Recorder):
        tries = 0

        def record(self, work, drawing):
            self.tries += 1
            for lane in drawing:  # as where a capture breaks off
                lane.renew_generator()

    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(1, 16, 16)))
    setup, device = setup_of(task=task) if draws else setup_of(), Unable()
    cohort = cohort_of(setup, device=device)
    for round in range(1, 5):
        check(setup, cohort, updates(setup, range(3), round))
    assert 0 < device.tries <= 3


def test_a_generator_that_was_renewed_is_drawn_from():
    setup = setup_of()
    cohort = cohort_of(setup)
    check(setup, cohort, updates(setup, range(3), 1))
    check(setup, cohort, updates(setup, range(3), 2))
    cohort.lanes[1].renew_generator()  # as where a capture breaks off
    for site in cohort.lanes[1].caches.values():
        site.captures.clear()
    check(setup, cohort, updates(setup, range(3), 3))


def test_a_generator_that_is_renewed_in_the_middle_of_a_fit():
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(1, 16, 16)))
    setup, breaks = setup_of(task=task, training__epochs=3), []

    class Breaking(Eager):  # as where the capture of a remainder breaks off
        fixed_memory = True

        def run(self, lane, site, step, plan):
            if breaks and lane is cohort.lanes[1]:
                breaks.clear()
                state = lane.generator.get_state()
                lane.renew_generator()
                lane.generator.set_state(state)
            super().run(lane, site, step, plan)

    cohort = cohort_of(setup, stepper=Breaking)
    for round in range(1, 4):
        breaks += [round] if round == 3 else []
        check(setup, cohort, updates(setup, range(3), round))
    assert not breaks


def test_two_cohorts_trace_at_once():
    setup, errors = setup_of(), []

    def work():
        for _ in range(4):
            cohort = cohort_of(setup)
            try:
                cohort.attempt(updates(setup, range(3)))
            except BaseException as error:
                errors.append(error)

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("where", ["steps", "client"])
def test_what_a_cohort_held_is_free_after_it_ran_out_of_memory(where):
    class Scarce(Recorder):
        def record(self, work, drawing):
            if where == "steps":
                raise torch.OutOfMemoryError("so says the test")
            return super().record(work, drawing)

    class Large(FedAvg):
        def update(self, client):
            super().update(client)
            if where == "client" and client.id == 1:
                raise torch.OutOfMemoryError("so says the test")

    setup = setup_of(Large)
    cohort = cohort_of(setup, device=Scarce())
    held = weakref.ref(cohort.lanes[0])
    failed = None
    try:
        cohort.attempt(updates(setup, range(3)))
    except torch.OutOfMemoryError as error:
        failed = error.with_traceback(None)
    assert failed is not None
    del cohort
    gc.collect()
    assert held() is None


def applied(function, *blocks):
    """A function of one lane's tensors, batched, and what it is lane by lane."""
    graph = make_fx(function)(*(block[0] for block in blocks))
    expected = torch.stack([function(*rows) for rows in zip(*(block.clone() for block in blocks), strict=True)])
    return batched(graph, [False] * len(blocks))(*blocks), expected


def test_an_image_that_changes_between_two_convolutions():
    def twice(x, weight):
        x = x + 1
        first = conv2d(x, weight)
        x.mul_(2)
        return first + conv2d(x, weight)

    torch.testing.assert_close(*applied(twice, torch.randn(2, 3, 4, 6, 6), torch.randn(2, 5, 4, 3, 3)))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:1].add_(1),
        lambda x: x.copy_(2 * x),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.data.add_(1),
        lambda x: x.add_(1),
    ],
)
def test_an_image_that_changes_between_two_gradients(change, kernel):
    def twice(x, weight):
        x, weight = x + 0, weight.detach().requires_grad_()
        (first,) = torch.autograd.grad(conv2d(x, weight).square().sum(), weight)
        with torch.no_grad():
            change(x)
        y = conv2d(x, weight)
        (second,) = torch.autograd.grad(y.square().sum(), weight)
        return torch.cat([first.flatten(), second.flatten(), y.detach().flatten()])

    blocks = torch.randn(2, 3, 4, 6, 6), torch.randn(2, 5, 4, kernel, kernel)
    torch.testing.assert_close(*applied(twice, *blocks), rtol=1e-4, atol=1e-4)


def test_a_view_that_is_written_is_a_view_or_refused():
    def doubled(x, weight):
        y = conv2d(x, weight)
        y.view(len(y), -1).mul_(2)
        return y

    with pytest.raises(RuntimeError, match="view size is not compatible"):
        applied(doubled, torch.randn(2, 3, 4, 6, 6), torch.randn(2, 5, 4, 3, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.stack(torch._foreach_norm([a, b])),
        lambda a, b: torch._foreach_mul([a, b], [a.sum(), b.sum()])[0],
        lambda a, b: torch._foreach_lerp([a, b], [b, a], 0.3)[1],
        lambda a, b: torch._foreach_addcmul([a, b], [b, a], [a, a], 0.5)[0],
    ],
)
def test_operations_on_lists(function):
    torch.testing.assert_close(*applied(function, torch.randn(4, 4), torch.randn(4, 4)))
