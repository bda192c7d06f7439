"""Files of a run, a checkpoint or a model that say what they should not: one error with file and field."""

import hashlib
import json
import re

import pytest
import torch
from safetensors.torch import save
from tiny import tiny_run
from written import a_client, a_round, write_run

from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message, MessageError, pack, signature
from fedloom.experiment.checkpoint import Checkpoints, _sha256
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.run_folder import finished, read_clients, read_facts, read_rounds
from fedloom.inference.trained_model import load_model
from fedloom.inference.trained_run import TrainedRun
from fedloom.report.page.runs import read_run
from fedloom.trust.ledger import Ledger
from fedloom.trust.ledger_file import read_ledger

PARTS = {"model.weight": torch.ones(2, 3)}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"round": 1', "line 2 cannot be used: it is not JSON"),
        ("[" * 100_000, "line 2 cannot be used: it is not JSON"),
        ("[]", "line 2 cannot be used"),
        ('{"round": "1"}', "round = '1': must be a whole number"),
        ('{"round": %s}' % ("9" * 5000), "round|not JSON"),
        (json.dumps(a_round(2) | {"up_bytes": -1}), "up_bytes = -1: must be at least 0"),
        (json.dumps(a_round(2) | {"loss": 1e400}).replace("Infinity", "1e999"), "loss"),
        (json.dumps(a_round(2) | {"failed": [1]}), r"failed = \[1\]: must be a mapping"),
        ('{"round": 2}', "lr is missing"),
        ("\xff", "line 2"),
    ],
)
def test_a_line_of_metrics_that_is_none_is_named(tmp_path, line, words):
    run = write_run(tmp_path / "run", history=[a_round(1)])
    with (run / "metrics.jsonl").open("a", encoding="latin1") as file:
        file.write(line + "\n")
    for read in (read_rounds, read_run):
        with pytest.raises(UserError, match=rf"metrics\.jsonl', .*({words}).*; repeat the run"):
            read(run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"notes": 3}, "notes = 3: must be a list"),
        ({"seconds": "x"}, "seconds = 'x': must be a number"),
        ({"best": {}}, r"best\.global_accuracy is missing"),
        ({"failed": {"died": 1.5}}, r"failed\.died = 1\.5: must be a whole number"),
    ],
)
def test_a_summary_of_another_form_is_named_with_the_command_that_makes_it(tmp_path, change, words):
    run = write_run(tmp_path / "run", summary=change)
    with pytest.raises(UserError, match=rf"summary\.json' cannot be used: {words}; remove it, then `fedloom resume"):
        finished(run)


def test_clients_whose_counts_do_not_match_are_named(tmp_path):
    run = write_run(tmp_path / "run", clients=[a_client(0, [1, 2], [3, 4, 5])])
    with pytest.raises(
        UserError, match=r"clients\.jsonl', line 1 cannot be used: right has 2 entries, but total has 3"
    ):
        read_clients(run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": []}, "shape"), ({"shape": [1, 8, 2**40]}, r"shape\.2 = 1099511627776: must be at most"),
        ({"std": [0.0]}, r"std\.0 = 0\.0: must be above 0"), ({"classes": []}, "classes"), ({"model": "mlp"}, "model"),
    ],
)  # fmt: skip
def test_facts_that_cannot_be_are_named(tmp_path, change, words):
    tiny_run("fedavg", out=str(tmp_path / "run"))
    path = tmp_path / "run" / "task.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=rf"task\.json' cannot be used: {words}"):
        read_facts(tmp_path / "run")


def test_a_ledger_is_checked_before_it_takes_memory(tmp_path):
    tiny_run("fedavg", out=str(tmp_path / "run"))
    path = tmp_path / "run" / "ledger.json"
    good = json.loads(path.read_text())
    for field, value, words in (
        ("tensors", [{"name": "x", "shape": [], "dtype": "nn", "bytes": 1}], "dtype = 'nn'.*'float32'"),
        ("direction", "sideways", "direction = 'sideways'"),
        ("rounds", [[1, 2, 3]], "rounds"),
        ("bytes", 2**60, "bytes"),
    ):
        entries = [good["messages"][0] | {field: value}]
        path.write_text(json.dumps(good | {"messages": entries}))
        with pytest.raises(UserError, match=rf"ledger\.json' cannot be used: messages\.0\..*{words}"):
            read_ledger(tmp_path / "run")
    with pytest.raises(UserError, match=r"ledger\.json: rounds and clients: they would take .* GB"):
        Ledger.from_json({"messages": [good["messages"][0] | {"rounds": [[0, 10**12]]}]})


def checkpoint(folder, change=None, tensors=None):
    """A checkpoint whose manifest is changed and whose checksums are right."""
    stores = {"memory": ClientStore(2**20), "remembered": ClientStore(2**20)}
    stores["memory"][3] = PARTS
    Checkpoints(folder).save(1, {"state/model.weight": torch.ones(2, 3)}, stores, {"history": []})
    path, shard = folder / "round-000001.json", folder / "round-000001-clients-000.safetensors"
    said = json.loads(path.read_text())["checkpoint"]
    if tensors is not None:
        shard.write_bytes(tensors)
        data = {"bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}
        said["files"][shard.name] |= data
    said = change(said) if change else said
    path.write_text(json.dumps({"sha256": _sha256(json.dumps(said)), "checkpoint": said}))


def loaded(folder):
    stores = {"memory": ClientStore(2**20), "remembered": ClientStore(2**20)}
    Checkpoints(folder).load(stores, "cpu", lambda client: signature(PARTS))
    return stores["memory"]


def renamed(said, name):
    return said | {"files": {name: next(iter(said["files"].values()))}, "server": name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda said: renamed(said, "../../recipe.yaml"), "must match"),
        (lambda said: renamed(said, "/dev/zero"), "must match"),
        (lambda said: said | {"server": "round-000009-server.safetensors"}, "not listed among its files"),
        (lambda said: said | {"round": "1"}, "round = '1': must be a whole number"),
        (lambda said: said | {"files": []}, "files"),
        (lambda said: said | {"notes": None}, "notes"),
        (lambda said: [said], "not complete JSON|checkpoint"),
    ],
)
def test_a_hostile_manifest_with_the_right_checksum_is_a_damaged_checkpoint(tmp_path, caplog, change, words):
    checkpoint(tmp_path / "checkpoints", change)
    with pytest.raises(UserError, match="cannot be resumed: none of its 1 checkpoints can be used"):
        loaded(tmp_path / "checkpoints")
    assert "is damaged" in caplog.text
    assert re.search(words, caplog.text)


@pytest.mark.parametrize(
    "tensors",
    [
        b"", b"\xff" * 64, save({"x": torch.ones(1)}), save({"memory/three/x": torch.ones(1)}),
        save({"memory/3/model.weight": torch.ones(5)}), save({"memory/3/model.weight": torch.ones(2, 3).long()}),
    ],
    ids=["empty", "no safetensors", "no client's", "no number", "shape", "type"],
)  # fmt: skip
def test_hostile_tensors_with_the_right_checksum_are_a_damaged_checkpoint(tmp_path, tensors):
    checkpoint(tmp_path / "checkpoints", tensors=tensors)
    with pytest.raises(UserError, match="cannot be resumed: none of its 1 checkpoints can be used"):
        loaded(tmp_path / "checkpoints")


def test_an_unchanged_checkpoint_is_loaded(tmp_path):
    checkpoint(tmp_path / "checkpoints")
    assert list(loaded(tmp_path / "checkpoints")) == [3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "run"
    tiny_run("fedavg", out=str(folder))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": None}, "images"), ({"network": {"name": "mlp", "hidden": 10**12}}, "GB"),
        ({"method": {}}, "method"),
        ({"network": {"name": "mlp", "hidden": 10**30}}, "its size overflows|hidden|model"),
        ({"client": 10**30}, "client"), ({"network": {"name": "nothing"}}, "unknown"),
        ({"images": {"classes": ["a"], "shape": [1, 10**6, 10**6], "mean": [0.5], "std": [0.5]}}, "GB"),
    ],
)  # fmt: skip
def test_a_model_file_that_cannot_be_is_refused_before_memory_is_taken(run, tmp_path, change, words):
    data = TrainedRun(run).global_model().to_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["fedloom"] = json.dumps(json.loads(header["__metadata__"]["fedloom"]) | change)
    text = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(UserError, match=words):
        load_model(tmp_path / "m.safetensors")


def test_a_model_of_another_shape_is_named(run):
    path = run / "models" / "server.safetensors"
    whole = path.read_bytes()
    path.write_bytes(save({name: torch.ones(7, 7) for name in TrainedRun(run)._server}))
    try:
        with pytest.raises(UserError, match=r"models': .* has shape \[7, 7\], but .* is expected; repeat the run"):
            TrainedRun(run).personal(0)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", [Job, Result])
@pytest.mark.parametrize("header", [{}, {"kind": "delete"}, {"has": 3}, {"scores": [{}], "has": []}])
def test_a_job_or_result_without_its_header_is_refused(kind, header):
    with pytest.raises(MessageError, match="the message cannot be used"):
        kind.from_bytes(pack({}, header))


@pytest.mark.parametrize("name", ["round", "client", "clients", "kind", "attempt", "message", "new", "keep_model"])
def test_every_field_of_a_jobs_header_is_checked(name):
    data = Job("update", 1, Message({}), 2).to_bytes()
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    own = json.loads(outer["__metadata__"]["fedloom"])
    del own["names"]
    with pytest.raises(MessageError, match=name):
        Job.from_bytes(pack({}, own | {name: {"x": 1}}))
