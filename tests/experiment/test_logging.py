"""TensorBoard and Weights & Biases get the rounds' numbers, and a resumed run continues in the same log."""

import json
import os
import struct
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import tiny_experiment, tiny_task

import fedloom
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.runs.run import recipe_of

NUMBERS = ("loss", "personal_accuracy", "up_bytes")


def stopped_and_resumed(log):
    """Metrics of a run that dies in its third round, after a checkpoint of the second, and is resumed."""

    def die(record):
        if record["round"] == 3:
            raise RuntimeError("power cut")

    experiment = tiny_experiment("fedavg", log=log, out="run", on_round=die, storage__checkpoint_every=2)
    with pytest.raises(RuntimeError, match="power cut"):
        experiment.run()
    fedloom.Experiment(recipe_of("run", {}), task=tiny_task()).run(resume=True)
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


def test_tensorboard_has_every_round_once_also_after_a_crash():
    history = stopped_and_resumed("tensorboard")
    events = EventAccumulator("run/tensorboard").Reload()
    for name in NUMBERS:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(record["round"], pytest.approx(record[name], rel=1e-6)) for record in history]


@pytest.fixture
def wandb_offline(monkeypatch, tmp_path):
    for name, value in {"MODE": "offline", "SILENT": "true", "CONFIG_DIR": tmp_path, "CACHE_DIR": tmp_path}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    yield
    import wandb

    wandb.teardown()


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_gets_the_rounds_offline_and_a_resumed_run_has_the_same_id():
    history = stopped_and_resumed("wandb")
    identity = Path("run/wandb.txt").read_text()
    logs = sorted(Path("run/wandb").glob(f"offline-run-*-{identity}/*.wandb"), key=os.path.getmtime)
    assert len(logs) == 2
    first, second = (list(rows_of(log)) for log in logs)
    assert [row["round"] for row in first] == [1, 2, 3]
    assert [row["round"] for row in second] == [3]
    for name in NUMBERS:
        assert [row[name] for row in first[:2] + second] == pytest.approx([record[name] for record in history])


def rows_of(log):
    """The history in a .wandb file: a 7-byte header, then chunks (crc, length, type) in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = log.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block that has no room for a chunk
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last chunk
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if items := record.history.item:
                yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_a_log_that_is_not_installed_or_not_known_is_named_before_a_run_begins(monkeypatch):
    monkeypatch.setattr("fedloom.experiment.logging.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"log = 'wandb': it is not installed; .* pip install 'fedloom\[wandb\]'"):
        tiny_experiment("fedavg", log="wandb", out="run")
    assert not Path("run").exists()
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        Recipe.parse({"log": "tensorbord"})
