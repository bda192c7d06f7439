"""Flat state: named tensors are views of one buffer per dtype; what is done to the buffer is done to all of them."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import same_state, tiny_dataset, tiny_experiment, tiny_run, tiny_task
from torch import nn

from fedloom.core.execution import handle
from fedloom.core.flat_state import FlatState, Layout, nbytes
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.server import WeightedMean
from fedloom.core.setup import Precision
from fedloom.core.state import Parts, snapshot, under
from fedloom.core.workspace import Workspace
from fedloom.methods import METHODS as REGISTRY

LAST = torch.channels_last


def tensors(seed=0):
    """Of several types and sizes: scalars, nothing at all, a multiple of the alignment, channels last."""
    made = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=made),
        "steps": torch.randint(0, 9, (), generator=made),
        "b": torch.randn(64, generator=made),
        "conv": torch.randn(4, 3, 5, 5, generator=made).to(memory_format=LAST),
        "exact": torch.randn(7, generator=made, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "c": torch.randn((), generator=made),
        "counts": torch.randint(0, 9, (70,), generator=made),
    }


def same(one, other):
    return same_state(dict(one), dict(other))


def test_every_tensor_starts_where_kernels_want_it_and_none_overlap():
    given = tensors()
    layout = Layout.of(given)
    assert list(layout.spans) == list(given)
    ends = {}
    for name, span in layout.spans.items():
        assert span.start % Layout.ALIGNMENT == 0
        assert span.start >= ends.get(span.dtype, 0)
        ends[span.dtype] = span.start + given[name].numel()
        assert (span.dtype, span.shape, span.stride) == (given[name].dtype, given[name].shape, given[name].stride())
    for dtype, end in ends.items():
        assert layout.sizes[dtype] >= end
        assert layout.sizes[dtype] % Layout.ALIGNMENT == 0
    assert layout.sizes.keys() == {torch.float32, torch.float64, torch.int64}


def test_a_copy_has_the_same_contents_and_layout_and_other_memory():
    given = tensors()
    flat = FlatState.of(given)
    assert same(flat, given)
    assert flat["conv"].is_contiguous(memory_format=LAST)
    assert not flat["conv"].is_contiguous()
    given["a"].zero_()
    assert flat["a"].abs().sum() > 0
    copied = flat.copy()
    flat.buffers[torch.float32].zero_()
    assert copied["a"].abs().sum() > 0
    assert copied.layout is flat.layout


def test_it_is_a_mapping_of_its_names():
    flat = FlatState.of(tensors())
    assert list(flat) == list(tensors()) == [name for name, _ in flat.items()]
    assert len(flat) == 8 == len(list(flat.values()))
    assert "a" in flat
    assert "z" not in flat
    with pytest.raises(KeyError):
        flat["z"]
    assert FlatState.of({}).buffers == {}


def test_views_and_buffers_are_the_same_memory():
    flat = FlatState.of(tensors())
    flat["conv"][1, 2, 3, 4] = 99
    assert (flat.buffers[torch.float32] == 99).sum() == 1
    flat.buffers[torch.float32].fill_(5)
    assert (flat["conv"] == 5).all()
    assert (flat["c"] == 5).all()
    assert (flat["exact"] != 5).all()


def test_equal_layouts_are_one_object_and_different_ones_are_not():
    one = Layout.of(tensors(0))
    assert Layout.of(tensors(1)) is one
    assert FlatState.of(tensors(2)).layout is one
    other = tensors()
    assert Layout.of(dict(reversed(other.items()))) is not one
    assert Layout.of(other | {"conv": other["conv"].contiguous()}) is not one
    assert Layout.of(other | {"a": other["a"].double()}) is not one
    assert Layout.of({**other, "b": torch.zeros(65)}) is not one


def test_what_lies_apart_in_a_view_lies_together_in_a_copy():
    wide = torch.arange(24.0).reshape(4, 6)
    flat = FlatState.of({"columns": wide[:, ::2], "expanded": wide[:1].expand(3, 6), "turned": wide.t()})
    assert torch.equal(flat["columns"], wide[:, ::2])
    assert torch.equal(flat["expanded"], wide[:1].expand(3, 6))
    assert torch.equal(flat["turned"], wide.t())


def test_nbytes_counts_no_gaps():
    given = tensors()
    assert nbytes(FlatState.of(given)) == nbytes(given) == Layout.of(given).nbytes
    held = sum(buffer.numel() * buffer.element_size() for buffer in FlatState.of(given).buffers.values())
    assert held > nbytes(given)
    assert Message(FlatState.of(given)).nbytes == Message(given).nbytes


def test_signature_and_contents_are_those_of_named_tensors():
    given = tensors()
    flat, plain = Message(FlatState.of(given)), Message(given)
    assert flat.signature == plain.signature
    assert flat.contents == plain.contents == Message(FlatState.of(dict(reversed(given.items())))).contents
    assert flat.contents != Message(FlatState.of(given | {"a": torch.zeros(5, 3)})).contents


SUBSETS = {
    "all": list,
    "some": lambda names: names[1:5],
    "every other": lambda names: names[::2],
    "one": lambda names: ["conv"],
    "whole numbers": lambda names: ["steps", "counts"],
    "nothing": lambda names: [],
}


@pytest.mark.parametrize("choose", SUBSETS.values(), ids=SUBSETS.keys())
def test_a_selection_is_a_copy_of_its_part(choose):
    given = tensors()
    flat, names = FlatState.of(given), choose(list(given))
    part = flat.select(Layout.of({name: given[name] for name in names}))
    assert same(part, {name: given[name] for name in names})
    for buffer in flat.buffers.values():
        buffer.zero_()
    assert same(part, {name: given[name] for name in names})


def test_a_selection_in_another_order():
    given = tensors()
    order = {name: given[name] for name in ("c", "conv", "a", "b")}
    assert same(FlatState.of(given).select(Layout.of(order)), order)


@pytest.mark.parametrize("rows", [(), (3,)])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("choose", SUBSETS.values(), ids=SUBSETS.keys())
def test_taking_overwrites_what_both_have_and_nothing_else(choose, order, rows):
    given, mine = tensors(0), tensors(1)
    names = choose(list(given))[::order]
    source = FlatState.of({name: given[name] for name in names} | {"elsewhere": torch.ones(9)})
    layout = Layout.of(mine)
    target = FlatState(layout, layout.zeros(torch.device("cpu"), rows))
    for name, value in mine.items():
        target[name].copy_(value)
    target.take(source)
    for name in mine:
        expected = given[name] if name in names else mine[name]
        assert torch.equal(target[name], expected.expand((*rows, *expected.shape)))


def test_rows_are_taken_row_by_row():
    given = [tensors(seed) for seed in range(3)]
    layout = Layout.of(given[0])
    source = FlatState(layout, layout.zeros(torch.device("cpu"), (3,)))
    for i, one in enumerate(given):
        source.row(i).take(FlatState.of(one))
    some = Layout.of({name: given[0][name] for name in ("conv", "c", "counts")})
    target = FlatState(some, some.zeros(torch.device("cpu"), (3,)))
    target.take(source)
    for i, one in enumerate(given):
        assert same(source.row(i), one)
        assert same(target.row(i), {name: one[name] for name in some.spans})
        assert same(source.select(some).row(i), target.row(i))
    assert source["conv"].shape == (3, 4, 3, 5, 5)


def test_neighbours_are_copied_in_one_operation():
    given = {name: t for name, t in tensors().items() if t.dtype == torch.float32}
    layout = Layout.of(given)
    assert len(layout.ranges(layout)[0]) == 1
    apart = Layout.of({name: given[name] for name in ("a", "c")})
    assert len(layout.ranges(apart)[0]) == 2
    assert sum(length for *_, length in layout.ranges(layout)[0]) == layout.sizes[torch.float32]


@pytest.mark.parametrize("wrong", [torch.zeros(5, 3), torch.zeros(3, 5).double(), torch.zeros(15)])
def test_tensors_of_one_name_that_differ_are_refused(wrong):
    target, source = FlatState.of(tensors()), FlatState.of({"a": wrong})
    with pytest.raises(ValueError, match="'a' is"):
        target.take(source)


@pytest.mark.parametrize("other", [torch.contiguous_format, LAST])
def test_channels_last_and_not_are_the_same_tensor(other):
    """A server's state is contiguous after a resume or a robust mean, whatever the workspaces' layout."""
    mine, theirs = tensors(0), tensors(1)
    mine["conv"] = mine["conv"].contiguous(memory_format=other)
    target = FlatState.of(mine)
    target.take(FlatState.of(theirs))
    assert same(target, theirs)
    assert target["conv"].is_contiguous(memory_format=other)


def convolutional(**fields):
    return tiny_experiment(
        "fedavg", task=replace(tiny_task("cnn4", norm=True), dataset=tiny_dataset(shape=(1, 22, 22))), **fields
    ).setup


@pytest.mark.parametrize("last", [False, True])
def test_parts_of_a_workspace_are_views_of_its_buffers(last):
    setup = convolutional()
    workspace = Workspace(setup, precision=Precision(channels_last=last))
    for parts, flat in ((workspace.parts, workspace.flat), (workspace.received, workspace.flat_received)):
        named = parts.named_tensors()
        assert set(flat) == set(named)
        for name, tensor in named.items():
            assert tensor.data_ptr() == flat[name].data_ptr()
            assert tensor.untyped_storage().data_ptr() == flat.buffers[tensor.dtype].untyped_storage().data_ptr()
            assert tensor.stride() == flat[name].stride()
    assert same_state(workspace.initial, snapshot(setup.build()))
    held = {b.untyped_storage().data_ptr() for f in (workspace.flat, workspace.flat_received) for b in f.floating()}
    assert len(held) == 2
    convolutions = [m.weight for m in workspace.parts.modules() if isinstance(m, nn.Conv2d) and m.weight.shape[1] > 1]
    assert convolutions
    assert all(weight.is_contiguous(memory_format=LAST) is last for weight in convolutions)


def test_a_part_is_a_slice():
    for method in ("fedavg", "fedrep", "fedstyle", "scaffold", "apfl"):
        workspace = Workspace(replace(convolutional(), method=tiny_experiment(method).method))
        paths = [name for name, _ in workspace.parts.named_modules() if name]
        for path in paths:
            mine = [s for name, s in workspace.flat.layout.spans.items() if under(name, (path,))]
            for dtype in {span.dtype for span in mine}:
                starts = sorted(span.start for span in mine if span.dtype == dtype)
                everyone = sorted(s.start for s in workspace.flat.layout.spans.values() if s.dtype == dtype)
                first = everyone.index(starts[0])
                assert everyone[first : first + len(starts)] == starts, path


def test_tree_order_is_the_order_of_modules_with_all_that_is_theirs():
    parts = Parts({"net": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), "alpha": torch.ones(())})
    order = list(parts.in_tree_order())
    assert set(order) == set(parts.named_tensors())
    modules = [name.rpartition(".")[0] for name in order]
    assert modules == sorted(modules, key=["", "net", "net.0", "net.1", "net.2"].index)


def test_a_message_goes_into_parts_and_received_parts_whatever_its_form():
    setup = convolutional()
    message = {name: value + 1 for name, value in Workspace(setup).downward().items()}
    memory = {"model.head.bias": torch.full((4,), 7.0)}
    found = []
    for form in (message, Message(message), FlatState.of(message), Message(FlatState.of(message))):
        workspace = Workspace(setup)
        workspace.flat.buffers[torch.float32].fill_(9)
        workspace.load(form, memory)
        found.append((snapshot(workspace.parts), snapshot(workspace.received)))
        assert (workspace.parts.model.head.bias == 7).all()
        assert same_state(snapshot(workspace.received), message)
    assert all(same_state(a, b) for pair in found for a, b in zip(pair, found[0], strict=True))


def test_what_a_message_lacks_is_at_its_initial_value():
    setup = convolutional()
    workspace = Workspace(setup)
    some = {"model.head.bias": torch.full((4,), 3.0)}
    for form in (some, FlatState.of(some)):
        workspace.flat.buffers[torch.float32].fill_(9)
        workspace.flat_received.buffers[torch.float32].fill_(9)
        workspace.load(form, None)
        expected = workspace.initial | some
        assert same_state(snapshot(workspace.parts), expected)
        assert same_state(snapshot(workspace.received), expected)


def test_what_is_sent_is_a_copy_of_what_the_method_sends():
    setup = replace(convolutional(), method=tiny_experiment("fedrep").method)
    workspace = Workspace(setup)
    sent = workspace.outgoing()
    assert set(sent) == set(workspace.sent)
    assert same(sent, workspace.sent)
    workspace.flat.buffers[torch.float32].zero_()
    assert any(value.abs().sum() > 0 for value in sent.values())


def test_deep_copies_of_flat_messages_stand_alone():
    flat = FlatState.of(tensors())
    twin = deepcopy(flat)
    flat.buffers[torch.float32].zero_()
    assert same(twin, tensors())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tensor_that_was_rebound_is_refused_or_sent(when):
    """On every engine: what is sent, kept and loaded is the flat state, which does not have it."""

    class Rebinding(REGISTRY["fedavg"]):
        def update(self, client):
            if when == "after":
                super().update(client)
            client.model.head.bias.data = torch.full_like(client.model.head.bias, 7.0)
            if when == "before":
                client.fit("model.extractor", self.loss)

    setup = replace(convolutional(), method=Rebinding())
    workspace = Workspace(setup)
    job = Job("update", 1, Message(workspace.downward()), client=0)
    result = handle(workspace, job)
    if result.error is None:
        assert (result.message["model.head.bias"] == 7).all()
    else:
        assert "was rebound" in result.error.why


# means


def mean_of(forms, old, weights=(3, 1, 4, 1, 5)):
    """Of what a server knows; where it knows nothing, means of named tensors are float32."""
    mean = WeightedMean(old, None, {}, ())
    for (seed, n), form in zip(enumerate(weights), forms, strict=False):
        sent = {name: value for name, value in tensors(seed).items() if old or name != "exact"}
        mean.add(Message(form(sent), samples=n), float(n))
    return mean.result()


def plain(given):
    return given


def backwards(given):
    return FlatState.of(dict(reversed(given.items())))


@pytest.mark.parametrize("weights", [(3, 1, 4, 1, 5), (1,), (0, 2), (0, 0)])
@pytest.mark.parametrize("known", [False, True])
def test_the_mean_of_flat_messages_is_that_of_named_tensors_to_the_bit(weights, known):
    old = tensors(77) if known else {}
    expected = mean_of([plain] * len(weights), old, weights)
    got = mean_of([FlatState.of] * len(weights), old, weights)
    assert {name: value.dtype for name, value in got.items()} == {n: v.dtype for n, v in expected.items()}
    assert same_state(got, expected)


def test_the_mean_is_the_mean():
    found = mean_of([FlatState.of] * 5, tensors(77))
    weights = np.array([3, 1, 4, 1, 5]) / 14
    for name in ("a", "b", "conv", "exact", "c"):
        expected = sum(w * tensors(seed)[name].double() for seed, w in enumerate(weights))
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-6, atol=1e-7)
    for name in ("steps", "counts"):
        assert torch.equal(found[name], torch.stack([tensors(seed)[name] for seed in range(5)]).amax(0))


@pytest.mark.parametrize(
    "forms",
    [
        [FlatState.of, plain, FlatState.of, plain, plain],
        [plain, FlatState.of, plain],
        [FlatState.of, backwards, FlatState.of, backwards, backwards],
        [backwards, plain, FlatState.of, plain],
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_messages_of_several_forms_have_the_same_mean(forms, known):
    old = tensors(77) if known else {}
    got, expected = mean_of(forms, old), mean_of([plain] * len(forms), old)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7)  # sums come in another order


def test_messages_stay_as_they_were():
    sent = [FlatState.of(tensors(seed)) for seed in range(3)]
    mean = WeightedMean(tensors(9), None, {}, ())
    for flat in sent:
        mean.add(Message(flat), 2.0)
    result = mean.result()
    for value in result.values():
        value.add_(1)
    assert all(same(flat, tensors(seed)) for seed, flat in enumerate(sent))


def test_messages_that_have_different_names_are_averaged_name_by_name():
    mean = WeightedMean({}, None, {}, ())
    mean.add(Message(FlatState.of({"x": torch.ones(3), "y": torch.ones(2)})), 1.0)
    mean.add(Message(FlatState.of({"x": torch.full((3,), 4.0)})), 2.0)
    found = mean.result()
    assert torch.equal(found["x"], torch.full((3,), 3.0))
    assert torch.equal(found["y"], torch.ones(2))


@pytest.mark.parametrize("options", [(("a", "c"), {}, ()), (None, {}, ("steps", "b")), (None, {"a": "exact"}, ())])
def test_parts_rows_and_sums_are_treated_as_in_named_tensors(options):
    found = []
    for form in (plain, FlatState.of):
        mean = WeightedMean(tensors(77), *options)
        for seed, n in enumerate((3, 1, 4)):
            given = tensors(seed)
            given["exact"] = given["exact"][:3].abs()
            mean.add(Message(form(given)), float(n))
        found.append(mean.result())
    assert same_state(*found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["a", "conv", "exact", "c"])
def test_the_first_tensor_that_is_not_finite_is_named(name, value):
    given = tensors()
    assert Message(FlatState.of(given)).not_finite() is None
    given[name][(0,) * given[name].dim()] = value
    assert Message(FlatState.of(given)).not_finite() == Message(given).not_finite() == name


def test_a_message_without_numbers_is_finite():
    assert Message(FlatState.of({"n": torch.ones(3, dtype=torch.int64)})).not_finite() is None
    assert Message(FlatState.of({})).not_finite() is None


def test_bytes_of_a_flat_message_are_those_of_its_tensors():
    given = tensors()
    back = Message.from_bytes(Message(FlatState.of(given), client=3, samples=9).to_bytes())
    assert same_state(dict(back), given)
    assert (back.client, back.samples, list(back)) == (3, 9, list(given))
    assert Message(FlatState.of(given)).to_bytes() == Message(given).to_bytes()


# whole runs


def channels_last(**fields):
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16)))
    return {"task": task, "engine__channels_last": True, **fields}


def test_a_run_with_channels_last_is_resumed(tmp_path):
    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    fields = channels_last(storage__checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        tiny_run("fedavg", out=str(tmp_path / "run"), on_round=stop, **fields)
    resumed = tiny_experiment("fedavg", out=str(tmp_path / "run"), **fields)
    resumed.run(resume=True)
    assert same_state(resumed.server.state, tiny_run("fedavg", **fields).server.state)


def test_a_robust_mean_with_channels_last():
    last, plain = (
        tiny_run("fedavg", robust__rule="median", **channels_last(engine__channels_last=on)) for on in (True, False)
    )
    for name, value in plain.server.state.items():
        torch.testing.assert_close(last.server.state[name], value, rtol=1e-3, atol=1e-4)
