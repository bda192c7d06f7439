"""Smaller messages: what is lost, what is not, and what is counted."""

import numpy as np
import pytest
import torch
from federated import (
    NAMES,
    LoopGrid,
    make_experiment,
    make_federation,
    make_fleet,
    member,
    small_recipe,
    without_losses,
)
from tiny import same_state, tiny_experiment, tiny_run, tiny_task, without_times

from fedloom.core.compression import RESIDUAL, Codec, WireSettings, parse_encoding
from fedloom.core.errors import UserError
from fedloom.core.message import Message, MessageError
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.experiment.loop import Experiment
from fedloom.methods import get

pytestmark = pytest.mark.full

FORMS = ("fp16", "bf16", "int8", "topk:0.1")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, shape).astype(np.float32))


def _there_and_back(form: str, tensor: torch.Tensor) -> torch.Tensor:
    codec = parse_encoding(form)
    return codec.decode(codec.encode(tensor), tensor)


def test_16_bits_keep_so_many_digits_as_they_have():
    x = _random(50, 40)
    assert ((_there_and_back("fp16", x) - x).abs() <= x.abs() * 2**-11 + 2**-25).all()
    assert ((_there_and_back("bf16", x) - x).abs() <= x.abs() * 2**-8).all()
    extreme = torch.tensor([1e6, -1e6, torch.inf, torch.nan])
    half = _there_and_back("fp16", extreme)
    assert half[:2].tolist() == [65504, -65504] and half[2].isinf() and half[3].isnan()


def test_int8_is_off_by_half_a_step_of_its_row_at_most():
    x = _random(30, 5, 7) * torch.logspace(-6, 6, 30).reshape(-1, 1, 1)
    step = x.abs().amax((1, 2), keepdim=True) / 127
    assert ((_there_and_back("int8", x) - x).abs() <= step * 0.501).all()
    assert torch.equal(_there_and_back("int8", torch.zeros(4, 9)), torch.zeros(4, 9))


def test_topk_keeps_the_largest_and_nothing_else():
    x = _random(20, 20)
    found = _there_and_back("topk:0.1", x)
    kept = found != 0
    assert int(kept.sum()) == 40
    assert torch.equal(found[kept], x[kept])
    assert x[kept].abs().min() >= x[~kept].abs().max()


@pytest.mark.parametrize("form", ["int8", "topk:0.1"])
def test_what_is_not_finite_stays_so(form):
    x = _random(8, 16)
    x[3, 3] = torch.nan
    assert not _there_and_back(form, x).isfinite().all()


def test_error_feedback_loses_nothing_it_only_comes_later():
    wire = Codec(WireSettings(up="topk:0.05"))
    like, received = {"w": torch.zeros(100)}, {"w": _random(100, seed=9)}
    memory, arrived, changed = {}, torch.zeros(100), torch.zeros(100)
    for step in range(12):
        change = _random(100, seed=step)
        sent, memory = wire.encode_up(Message({"w": received["w"] + change}), received, memory)
        arrived += wire.decode_up(sent, received, like)["w"] - received["w"]
        changed += change
        assert torch.allclose(arrived + memory[RESIDUAL + "w"], changed, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_that_travel_and_the_ledger_names_them(form):
    whole = tiny_run("fedavg")
    small = tiny_run("fedavg", wire__up=form, wire__down="bf16")
    sizes = [(tensor.shape, tensor.numel()) for tensor in whole.server.state.values() if tensor.is_floating_point()]
    counts = sum(t.numel() * t.element_size() for t in whole.server.state.values() if not t.is_floating_point())
    expected = {
        "fp16": sum(2 * n for _, n in sizes),
        "bf16": sum(2 * n for _, n in sizes),
        "int8": sum(n + 4 * (s[0] if len(s) > 1 else 1) if n >= 64 else 4 * n for s, n in sizes),
        "topk:0.1": sum(8 * round(0.1 * n) if n >= 64 else 4 * n for _, n in sizes),
    }[form]
    assert {record["up_bytes"] for record in small.history} == {expected + counts}
    assert {record["down_bytes"] for record in small.history} == {sum(2 * n for _, n in sizes) + counts}
    for direction in ("up", "down"):
        (entry,) = [e for e in small.ledger.to_json()["messages"] if e["direction"] == direction]
        bytes_each = entry["bytes"] / entry["messages"]
        assert bytes_each == small.history[0][f"{direction}_bytes"] == sum(t["bytes"] for t in entry["tensors"])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_learnt_is_near_what_whole_messages_teach(form):
    whole, small = tiny_run("fedavg"), tiny_run("fedavg", wire__up=form)
    start = whole.setup.build().named_tensors()
    moved = {n: t - start[n] for n, t in whole.server.state.items() if t.is_floating_point()}
    off = {n: t - whole.server.state[n] for n, t in small.server.state.items() if t.is_floating_point()}
    share = _norm(off) / _norm(moved)
    assert share < {"fp16": 0.01, "bf16": 0.1, "int8": 0.02, "topk:0.1": 0.9}[form]


def _norm(state: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([t.detach().flatten() for t in state.values()]).norm())


@pytest.mark.parametrize("method", ["fedcrl", "fedproto", "scaffold", "fedala", "fedamp", "repper", "fedgh"])
def test_methods_do_not_notice(method):
    experiment = tiny_run(method, wire__up="int8", wire__down="fp16")
    assert all(not record["failed"] for record in experiment.history)
    assert all(tensor.isfinite().all() for name, tensor in experiment.server.state.items() if "queue" not in name)


def test_row_weights_travel_as_they_are():
    wire = Setup(tiny_task(), get("fedcrl"), Training(), seed=0, wire=WireSettings(up="int8")).codec
    message = Message({"means": _random(10, 64), "counts": torch.arange(100.0)})
    sent, _ = wire.encode_up(message, {}, {})
    assert set(sent) == {"means#int8", "means#scale", "counts"}
    assert torch.equal(sent["counts"], message["counts"])


def test_processes_and_a_resumed_run_give_the_same_bits(tmp_path):
    options = {"wire__up": "topk:0.1", "wire__down": "fp16"}
    whole = tiny_run("fedavg", **options)
    workers = tiny_run("fedavg", engine="processes", **options)
    assert same_state(whole.server.state, workers.server.state)

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    out = {"out": tmp_path / "run", "storage__checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        tiny_experiment("fedavg", on_round=stop, **options, **out).run()
    again = tiny_experiment("fedavg", **options, **out)
    again.run(resume=True)
    assert same_state(whole.server.state, again.server.state)


def test_organisations_give_what_a_simulation_gives(tmp_path):
    recipe = small_recipe("fedcrl", wire__up="topk:0.2", wire__down="int8")
    make_federation(tmp_path / "fed", recipe)
    grid = LoopGrid({100 + c: member(tmp_path / "fed", name) for c, name in enumerate(NAMES)})
    fleet = make_fleet(tmp_path / "fed", grid, recipe)
    fleet.wait_for(3, 3, 1)
    federated, simulated = make_experiment(fleet, recipe), Experiment(recipe)
    federated.run()
    simulated.run()
    assert same_state(federated.server.state, simulated.server.state)
    assert without_times(federated.history) == without_losses(without_times(simulated.history))


@pytest.mark.parametrize("form", FORMS)
def test_nan_is_noticed_in_every_form(form):
    experiment = tiny_experiment("fedavg", wire__up=form, faults__nan=1.0)
    with pytest.raises(Exception, match="0 of 4 clients answered \\(4 invalid\\)"):
        experiment.run()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"w#place": torch.tensor([0, 100], dtype=torch.int32)}, "outside its tensor"),
        ({"w#place": torch.tensor([-1, 3], dtype=torch.int32)}, "outside its tensor"),
        ({"w#place": torch.zeros(3, dtype=torch.int32)}, "'w#place' is torch.int32 \\[3\\]"),
        ({"w#value": torch.zeros(2, dtype=torch.float64)}, "'w#value' is torch.float64"),
        ({"v": torch.zeros(1)}, "'v' is not expected"),
    ],
)
def test_what_is_no_encoding_is_refused(parts, why):
    wire = Codec(WireSettings(up="topk:0.02"))
    good = {"w#place": torch.tensor([5, 7], dtype=torch.int32), "w#value": torch.ones(2)}
    assert wire.decode_up(Message(good), {}, {"w": torch.zeros(100)})["w"].sum() == 2
    with pytest.raises(MessageError, match=why):
        wire.decode_up(Message(good | parts), {}, {"w": torch.zeros(100)})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("wire.up=fp61", "wire.up.*'fp61' is unknown; write none, fp16, bf16, int8 or topk:0.05"),
        ("wire.up=topk:2", "wire.up.*above 0 and at most 1"),
        ("wire.down=topk:0.1", "wire.down.*'topk:0.1' is unknown; write none, fp16, bf16, int8"),
        ("wire={up: int8, sideways: fp16}", "wire.sideways"),
        ("attack={kind: noise}", "wire.up = 'int8': cannot be combined with attack"),
    ],
)
def test_recipes_that_are_refused(change, why):
    with pytest.raises(UserError, match=why):
        small_recipe("fedavg", wire__up="int8").with_(change)


def test_an_attack_goes_with_plain_messages_alone():
    """It falsifies an update, the difference to what was received: an encoded one is not what it looks like."""
    with pytest.raises(UserError, match="wire.down = 'fp16': cannot be combined with attack"):
        small_recipe("fedavg", wire__down="fp16").with_("attack={kind: noise}")
