"""Simulated runs with the section `secure`: equal to plain ones, with dropouts, records, the ledger and refusals."""

import json

import numpy as np
import pytest
import torch
from tiny import tiny_experiment, tiny_run
from typer.testing import CliRunner

from fedloom.cli import commands
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.failures import RoundError
from fedloom.experiment.middleware import RecordMessages
from fedloom.methods.fedavg import FedAvg
from fedloom.report.ledger import ledger_lines


def distance(one, other) -> float:
    return max(
        (one.server.state[name].double() - other.server.state[name].double()).abs().max().item()
        for name, value in one.server.state.items()
        if value.is_floating_point()
    )


@pytest.mark.parametrize(
    "method",
    ["fedavg", "fedprox", "repper", "fedper", "fedrep", "fedbabu", "fedintr", "fedcrc", "fedcrl", "fedproto",
     "scaffold", "feddyn", "fednova", "fedas", "feddbe", "fedadam"],
)  # fmt: skip
def test_one_round_gives_the_plain_mean_within_the_recorded_error(method):
    plain, secure = (tiny_run(method, training__rounds=1, **more) for more in ({}, {"secure": {}}))
    allowed = secure.history[0]["quantisation"] + 5e-7  # float32: plain sums of changes are in it
    assert secure.history[0]["quantisation"] < 1e-6
    assert distance(plain, secure) <= (1e-4 if method == "fedadam" else allowed)  # a division by √v
    assert secure.history[0]["up_bytes"] <= 2 * plain.history[0]["up_bytes"]


def test_32_bits_send_no_more_than_float32_and_are_as_good_as_recorded():
    plain, secure = (tiny_run("fedavg", training__rounds=1, **more) for more in ({}, {"secure": {"bits": 32}}))
    assert secure.history[0]["up_bytes"] == plain.history[0]["up_bytes"] - 8  # without the counter of batches
    assert 1e-8 < distance(plain, secure) <= secure.history[0]["quantisation"] + 1e-7


def test_runs_repeat_although_masks_do_not():
    one, other = tiny_run("fedcrl", secure={}), tiny_run("fedcrl", secure={})
    assert distance(one, other) == 0


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_clients_that_drop_out_after_the_keys_are_left_out_of_the_mean(engine):
    """The plain run with the same faults averages the same survivors."""
    fields = {"faults__drop": 0.15, "training__fraction": 1.0, "training__rounds": 2, "engine": engine}
    plain, secure = tiny_run("fedavg", **fields), tiny_run("fedavg", secure={"threshold": 0.51}, **fields)
    assert any(record["failed"] for record in plain.history)
    assert [record["failed"] for record in secure.history] == [record["failed"] for record in plain.history]
    assert distance(plain, secure) < 1e-6


def test_too_few_survivors_end_the_run_with_the_reason():
    fields = {"faults__drop": 0.7, "training__fraction": 1.0, "training__min_clients": 1}
    with pytest.raises(RoundError, match="secure.threshold needs 6 of them"):
        tiny_run("fedavg", secure={"threshold": 1.0}, **fields)


def test_values_beyond_the_range_leave_a_client_out():
    with pytest.raises(RoundError, match="secure.threshold needs") as caught:
        tiny_run("fedavg", secure={"range": 1e-3, "threshold": 1.0})
    assert "invalid" in str(caught.value)


@pytest.fixture
def received(monkeypatch):
    """The messages that the server gets, as they reach the ledger."""
    found = []
    run = RecordMessages.run

    def keep(self, jobs):
        for result in run(self, jobs):
            found.append(result.message)
            yield result

    monkeypatch.setattr(RecordMessages, "run", keep)
    return found


def test_the_server_gets_masked_values_only(received):
    tiny_run({"name": "fedavg"}, training__rounds=1, training__fraction=1.0, secure={"bits": 32})
    first = list(received)
    received.clear()
    tiny_run({"name": "fedavg"}, training__rounds=1, training__fraction=1.0, secure={"bits": 32})
    assert len(first) == len(received) == 6
    for message, again in zip(first, received, strict=True):
        assert message.signature.keys() == {"masked"} and message["masked"].dtype == torch.int32
        data = np.frombuffer(message["masked"].numpy().tobytes(), np.uint8)
        counts, expected = np.bincount(data, minlength=256), len(data) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 400  # χ² with 255 degrees of freedom: 5.7e-8
        same = (message["masked"] == again["masked"]).float().mean().item()
        assert same < 1e-3  # the same update under other masks


def test_privacy_is_spent_as_without_masks_and_the_ledger_says_who_adds_noise():
    fields = {"training__fraction": 1.0, "privacy": {"clip": 1.0, "noise": 1.0}}
    central, secure = tiny_run("fedavg", **fields), tiny_run("fedavg", secure={}, **fields)
    assert [r["epsilon"] for r in central.history] == [r["epsilon"] for r in secure.history]
    assert distance(secure, tiny_run("fedavg", secure={}, **fields)) == 0  # seeded
    text = "\n".join(ledger_lines(secure.ledger.to_json()))
    assert "each client clipped its update to 1 and added its share of noise" in text
    assert "the messages that the server received are not" not in text


def test_participants_that_the_server_chooses_do_not_amplify_privacy_towards_it():
    """ε is that of clients that take part in every round, because the server knows who took part."""
    privacy = {"clip": 1.0, "noise": 4.0}
    half, whole, central = (
        tiny_run("fedavg", training__fraction=fraction, privacy=privacy, **more).history[-1]["epsilon"]
        for fraction, more in ((0.5, {"secure": {}}), (1.0, {"secure": {}}), (0.5, {}))
    )
    assert half == whole > central


def test_almost_without_noise_it_is_the_private_mean():
    fields = {"training__rounds": 1, "training__fraction": 1.0, "privacy": {"clip": 0.5, "noise": 1e-9}}
    assert distance(tiny_run("fedavg", **fields), tiny_run("fedavg", secure={}, **fields)) < 1e-6


def test_compressed_messages_to_clients_work():
    plain, secure = (tiny_run("fedavg", wire__down="fp16", **more) for more in ({}, {"secure": {}}))
    assert distance(plain, secure) < 1e-4  # fp16 can amplify the last bit of a mean
    tiny_run("fedavg", wire__down="fp16", training__fraction=1.0, secure={}, privacy={"noise": 0.1})


def test_the_ledger_has_masked_contributions_and_the_bytes_of_keys_and_shares():
    run = tiny_run("fedrep", training__rounds=2, training__fraction=1.0, secure={})
    ledger = json.loads(json.dumps(run.ledger.to_json()))
    (up,) = [e for e in ledger["messages"] if (e["direction"], e["purpose"]) == ("up", "training")]
    (tensor,) = up["tensors"]
    assert tensor["name"] == "masked" and tensor["dtype"] == "int64"
    assert up["bytes"] == 12 * tensor["bytes"]
    (keys,) = [e for e in ledger["messages"] if (e["direction"], e["purpose"]) == ("up", "secure")]
    assert keys["messages"] == 2 * 3 * 6  # two rounds, three stages, six clients
    assert 6 * 2 * 1000 < keys["bytes"] < 6 * 2 * 5000
    text = "\n".join(ledger_lines(ledger))
    assert "'masked' is a contribution to a sum, of 64 bits per number" in text
    assert "  model.extractor.fc1.weight" in text.split("In the sum:")[1]
    assert "model.head" in text.split("never left a client")[1]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"robust": {"rule": "median"}},
            "robust.rule = 'median': cannot be combined with secure, because a robust rule",
        ),
        ({"wire": {"up": "int8"}}, "wire.up = 'int8': cannot be combined with secure, because compressed messages"),
        ({"wire": {"up": "fp16"}}, "wire.up = 'fp16': cannot be combined with secure"),
        ({"privacy": {"sampling": "poisson"}}, "privacy.sampling = 'poisson': cannot be combined with secure"),
    ],
)
def test_sections_that_need_single_messages_are_refused(fields, why):
    with pytest.raises(UserError, match=why):
        Recipe.parse({"secure": {}, **fields})


@pytest.mark.parametrize("method", ["fedamp", "fedpac", "fedgh", "fedtgp"])
def test_methods_that_need_single_messages_are_refused(method):
    with pytest.raises(UserError, match=f"method.name = '{method}' reads single clients' messages, but secure"):
        tiny_experiment(method, secure={})


class LooksLater(FedAvg, abstract=True):
    def combine(self, server, messages):
        server.move(server.average(messages))
        next(iter(messages))


class AveragesTwice(FedAvg, abstract=True):
    def combine(self, server, messages):
        server.move(server.average(messages))
        server.average(messages)


@pytest.mark.parametrize(("kind", "why"), [(LooksLater, "reads single"), (AveragesTwice, "averages twice in a round")])
def test_a_combine_that_wants_more_than_the_rehearsal_showed_ends_the_run(kind, why):
    experiment = tiny_experiment("fedavg", secure={})
    object.__setattr__(experiment, "method", kind())
    experiment.trust.secure.average.refusal = "it reads single messages"
    with pytest.raises(UserError, match=why):
        experiment.run()


def test_two_clients_per_round_are_too_few():
    with pytest.raises(UserError, match="secure: 2 clients take part in a round"):
        tiny_experiment("fedavg", training__fraction=0.3, secure={})


def test_attacks_are_masked_like_honest_messages():
    """Secure aggregation does not protect against poisoned updates."""
    fields = {"attack": {"kind": "signflip", "share": 0.3}, "training__rounds": 1, "training__fraction": 1.0}
    assert distance(tiny_run("fedavg", **fields), tiny_run("fedavg", secure={}, **fields)) < 1e-6


def test_methods_says_whether_secure_aggregation_is_possible():
    said = json.loads(CliRunner().invoke(commands.app, ["methods", "fedpac", "--json"]).stdout)["methods"][0]
    assert not said["secure"] and "reveals only their sum" in said["not_secure"]
    assert "secure aggregation: yes" in CliRunner().invoke(commands.app, ["methods", "fedcrl"]).stdout
