"""The ledger says what travelled, to the byte, and what stayed."""

import json

import pytest
import torch
from tiny import tiny_run, tiny_task
from typer.testing import CliRunner

from fedloom.cli import commands
from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.trust.ledger import Ledger, ranges
from fedloom.trust.ledger_file import read_ledger


def entries(ledger, direction):
    return [entry for entry in ledger["messages"] if entry["direction"] == direction]


def sent_names(ledger):
    return {tensor["name"] for entry in entries(ledger, "up") for tensor in entry["tensors"]}


@pytest.mark.parametrize(
    "method", ["fedavg", "fedrep", "scaffold", "fedproto", "fedpac", "fedamp", "fedstyle", "local"]
)
def test_bytes_are_those_of_the_metrics(method, tmp_path):
    run = tiny_run(method, out=str(tmp_path / "run"))
    ledger = read_ledger(tmp_path / "run")
    for direction in ("up", "down"):
        total = sum(record[f"{direction}_bytes"] * record["clients"] for record in run.history)
        assert sum(entry["bytes"] for entry in entries(ledger, direction)) == total
        assert sum(entry["messages"] for entry in entries(ledger, direction)) == 3 * 4
        for entry in entries(ledger, direction):
            assert entry["bytes"] == entry["messages"] * sum(tensor["bytes"] for tensor in entry["tensors"])


def test_names_shapes_and_types_are_those_of_the_messages(tmp_path):
    run = tiny_run("fedrep", out=str(tmp_path / "run"))
    (entry,) = entries(read_ledger(tmp_path / "run"), "up")
    expected = {name: (list(t.shape), str(t.dtype)) for name, t in run.server.state.items()}
    assert {t["name"]: (t["shape"], "torch." + t["dtype"]) for t in entry["tensors"]} == expected
    assert entry["rounds"] == [[1, 3]]
    took_part = {client for r in (1, 2, 3) for client in run.sampling.draw(r)}
    assert entry["clients"] == len(took_part)
    assert entry["client_ids"] == ranges(took_part)


@pytest.mark.parametrize(
    ("method", "stays"),
    [("fedrep", {"model.head"}), ("local", {"model"}), ("ditto", {"personal"}), ("fedamp", {"mixture"}),
     ("fedproto", {"model"}), ("fedavg", set())],
)  # fmt: skip
def test_what_is_not_sent_is_listed_and_what_is_sent_is_not(method, stays, tmp_path):
    run = tiny_run(method, out=str(tmp_path / "run"))
    ledger = read_ledger(tmp_path / "run")
    assert {row["part"] for row in ledger["never"]} == stays | {"images", "labels"}
    everything = sum(t.numel() * t.element_size() for t in run.server.parts.named_tensors().values())
    stayed = sum(row["bytes"] for row in ledger["never"] if row["why"] != "data")
    sent = sum(t["bytes"] for entry in entries(ledger, "up") for t in entry["tensors"])
    assert stayed + sent == everything


def test_slow_copies_inside_a_shared_part_are_listed_as_private(tmp_path):
    tiny_run("fedavg", objective="byol", out=str(tmp_path / "run"))
    ledger = read_ledger(tmp_path / "run")
    private = [row["part"] for row in ledger["never"] if row["why"] == "private module"]
    assert private
    assert not [name for name in sent_names(ledger) if any(name.startswith(part + ".") for part in private)]


def test_the_file_is_small_and_grows_with_kinds_of_messages_only(tmp_path):
    sizes = []
    for rounds in (1, 8):
        tiny_run("fedavg", training__rounds=rounds, out=str(tmp_path / str(rounds)))
        sizes.append((tmp_path / str(rounds) / "ledger.json").stat().st_size)
    assert sizes[1] - sizes[0] < 300


def test_it_goes_on_from_its_file():
    whole, first = Ledger(), Ledger()
    for round in (1, 2, 3, 4):
        for client in (5, 6, 9):
            message = Message({"w": torch.zeros(2, 3), "n": torch.tensor(1)} if client < 9 else {"w": torch.zeros(2)})
            whole.add("up", round, client, message)
            if round == 3 and client == 5:
                first = Ledger.from_json(json.loads(json.dumps(first.to_json())))
            first.add("up", round, client, message)
    assert first.to_json() == whole.to_json()
    assert [(e["messages"], e["bytes"]) for e in whole.to_json()["messages"]] == [(8, 8 * 32), (4, 4 * 8)]


def test_pooled_training_has_nothing_that_travels(tmp_path):
    tiny_run("centralized", out=str(tmp_path / "run"))
    assert read_ledger(tmp_path / "run")["messages"] == []


def test_the_command_prints_every_tensor_and_json(tmp_path):
    tiny_run("fedrep", task=tiny_task(norm=False), privacy={}, out=str(tmp_path / "run"))
    shown = CliRunner().invoke(commands.app, ["ledger", str(tmp_path / "run")])
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    ledger = read_ledger(tmp_path / "run")
    for tensor in entries(ledger, "up")[0]["tensors"]:
        assert sum(line.split()[0] == tensor["name"] and f"{tensor['bytes']:,} bytes" in line for line in lines) == 2
    assert any(line.split()[:1] == ["model.head"] and "kept by the client" in line for line in lines)
    assert "the messages that the server received are not" in shown.stdout
    as_json = CliRunner().invoke(commands.app, ["ledger", str(tmp_path / "run"), "--json"])
    assert json.loads(as_json.stdout) == ledger


def test_of_a_comparison_one_of_its_runs_is_named(tmp_path):
    for name in ("01-fedavg", "00-local"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ledger.json").write_text("{}")
    with pytest.raises(UserError, match=r"give the folder of a run, such as .*/00-local$"):
        read_ledger(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_without_a_ledger_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "ledger.json").write_text(content)
    with pytest.raises(UserError, match=r"ledger\.json'.*; give the folder of a run, such as runs/NAME$"):
        read_ledger(tmp_path)


def test_methods_says_what_leaves_a_client_and_which_protection_is_possible():
    said = json.loads(CliRunner().invoke(commands.app, ["methods", "fedproto", "--json"]).stdout)["methods"][0]
    assert (said["leaves"], said["robust"], said["private"]) == (["means", "counts"], True, False)
    assert "class counts" in said["not_private"]
    shown = CliRunner().invoke(commands.app, ["methods", "fedrep"]).stdout
    assert "leaves a client: model.extractor," in shown
    assert "differential privacy: yes" in shown
