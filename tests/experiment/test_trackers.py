"""Trackers get the recipe, the rounds' numbers and the summary, and a resumed run continues the same log."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tiny import tiny_experiment, tiny_task

import fedloom
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.runs.run import recipe_of

NUMBERS = ("loss", "personal_accuracy", "up_bytes")


def stopped_and_resumed(log):
    """Return the metrics of a run that fails in its third round, after a checkpoint of the second, and is resumed."""

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


class Stop(fedloom.Callback):
    """Stops a run after round 2."""

    def on_round(self, record):
        if record["round"] == 2:
            raise fedloom.StopRun("enough")


def stopped(log, every):
    """Return the metrics of a run that is stopped after round 2 of 5, with an evaluation after each `every` rounds."""
    fields = {"training__rounds": 5, "evaluation__every": every}
    tiny_experiment("fedper", log=log, out="run", callbacks=[Stop()], **fields).run()
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("every", [1, 4])
def test_tensorboard_has_the_final_evaluation_of_a_stopped_run(every):
    last = stopped("tensorboard", every)[-1]
    events = EventAccumulator("run/tensorboard").Reload()
    for name in ("personal_accuracy", "evaluated"):
        assert (event := events.Scalars(name)[-1]).step == 2
        assert event.value == pytest.approx(last[name], rel=1e-6)
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


def test_tensorboard_has_the_hyperparameters_beside_the_measures():
    tiny_experiment("fedprox", log="tensorboard", out="run", method__mu=0.25).run()
    contents = EventAccumulator("run/tensorboard").Reload().PluginTagToContent("hparams")
    columns, start, end = (
        HParamsPluginData.FromString(contents[f"_hparams_/{name}"])
        for name in ("experiment", "session_start_info", "session_end_info")
    )
    assert {"personal_accuracy", "loss"} <= {info.name.tag for info in columns.experiment.metric_infos}
    values = start.session_start_info.hparams
    assert values["method.mu"].number_value == 0.25
    assert values["method.name"].string_value == "fedprox"
    assert not any(name.startswith(("engine", "storage")) for name in values)
    assert end.session_end_info.status == STATUS_SUCCESS


@pytest.fixture
def wandb_offline(monkeypatch, tmp_path):
    """W&B writes files only. The fixture's value ends its service process, which then has written all of them."""
    for name, value in {"MODE": "offline", "SILENT": "true", "CONFIG_DIR": tmp_path, "CACHE_DIR": tmp_path}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    import wandb

    yield wandb.teardown
    wandb.teardown()


def test_wandb_gets_the_rounds_offline_and_a_resumed_run_has_the_same_id(wandb_offline):
    history = stopped_and_resumed("wandb")
    wandb_offline()
    identity = Path("run/wandb.txt").read_text()
    logs = sorted(Path("run/wandb").glob(f"offline-run-*-{identity}/*.wandb"), key=os.path.getmtime)
    assert len(logs) == 2
    first, second = (rows_of(log) for log in logs)
    assert [row["round"] for row in first] == [1, 2, 3]
    assert [row["round"] for row in second] == [3]
    for name in NUMBERS:
        assert [row[name] for row in first[:2] + second] == pytest.approx([record[name] for record in history])


def test_wandb_gets_the_final_evaluation_of_a_stopped_run(wandb_offline):
    last = stopped("wandb", 4)[-1]
    wandb_offline()
    (log,) = Path("run/wandb").glob("offline-run-*/*.wandb")
    rows = rows_of(log)
    assert [row["round"] for row in rows] == [1, 2, 2]
    assert rows[-1]["personal_accuracy"] == pytest.approx(last["personal_accuracy"])
    assert "loss" not in rows[-1]


def test_wandb_gets_the_recipe_as_config_and_the_summary(wandb_offline):
    tiny_experiment("fedprox", log="wandb", out="run", method__mu=0.25, evaluation__summary="mean:3").run()
    wandb_offline()
    (log,) = Path("run/wandb").glob("offline-run-*/*.wandb")
    records = list(records_of(log))
    config = {item.key: json.loads(item.value_json) for record in records for item in record.run.config.update}
    assert (config["method"]["name"], config["method"]["mu"]) == ("fedprox", 0.25)
    assert config["training"]["rounds"] == 3
    summary = {item.key: json.loads(item.value_json) for record in records for item in record.summary.update}
    expected = json.loads(Path("run/summary.json").read_text())
    history = rows_of(log)
    assert expected["personal_accuracy"] == pytest.approx(np.mean([row["personal_accuracy"] for row in history]))
    assert summary["personal_accuracy"] == pytest.approx(expected["personal_accuracy"])  # by the rule, not the last


def rows_of(log):
    """The history in a .wandb file, a dictionary per round."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records_of(log)
        if record.history.item
    ]


def records_of(log):
    """The records of a .wandb file: a 7-byte header, then chunks (crc, length, type) in blocks of 32 KiB."""
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
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@pytest.fixture
def mlflow_client(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to create
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    return mlflow.MlflowClient()


def test_mlflow_gets_recipe_rounds_and_summary_and_a_resumed_run_continues_it(mlflow_client):
    history = stopped_and_resumed("mlflow")
    identity = Path("run/mlflow.txt").read_text()
    run = mlflow_client.get_run(identity)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert mlflow_client.get_experiment(run.info.experiment_id).name == "tests"
    assert len(mlflow_client.search_runs([run.info.experiment_id])) == 1
    assert run.data.params["method.name"] == "fedavg"
    assert run.data.params["training.rounds"] == "3"
    for name in NUMBERS:
        found = [(metric.step, metric.value) for metric in mlflow_client.get_metric_history(identity, name)]
        assert found == [(record["round"], pytest.approx(record[name])) for record in history]
    expected = json.loads(Path("run/summary.json").read_text())
    assert run.data.metrics["summary/personal_accuracy"] == pytest.approx(expected["personal_accuracy"])
    assert {file.path for file in mlflow_client.list_artifacts(identity)} == {"recipe.yaml", "summary.json"}


def test_mlflow_gets_the_final_evaluation_of_a_stopped_run(mlflow_client):
    last = stopped("mlflow", 4)[-1]
    metrics = mlflow_client.get_metric_history(Path("run/mlflow.txt").read_text(), "personal_accuracy")
    assert [(metric.step, metric.value) for metric in metrics] == [(2, pytest.approx(last["personal_accuracy"]))]


def test_mlflow_marks_a_failed_run_as_killed(mlflow_client):
    def die(record):
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        tiny_experiment("fedavg", log="mlflow", out="run", on_round=die).run()
    assert mlflow_client.get_run(Path("run/mlflow.txt").read_text()).info.status == "KILLED"


def test_mlflow_says_which_setting_is_wrong(mlflow_client, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://store")
    with pytest.raises(UserError, match=r"log = 'mlflow': .*; set MLFLOW_TRACKING_URI to a server or a file such as"):
        tiny_experiment("fedavg", log="mlflow", out="run").run()


def test_a_log_that_is_not_installed_or_not_known_is_named_before_a_run_begins(monkeypatch):
    monkeypatch.setattr("fedloom.experiment.trackers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"log = 'wandb': is not installed; .* pip install 'fedloom\[wandb\]'"):
        tiny_experiment("fedavg", log="wandb", out="run")
    assert not Path("run").exists()
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        Recipe.parse({"log": "tensorbord"})


def test_mlflow_that_cannot_be_reached_says_how_to_set_it(mlflow_client, monkeypatch):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def unreachable(*values, **fields):
        raise MlflowException("no connection")

    for name in ("get_experiment_by_name", "update_run", "set_terminated"):
        monkeypatch.setattr(MlflowClient, name, unreachable)
    message = "log = 'mlflow': no connection; set MLFLOW_TRACKING_URI to a server"
    experiment = tiny_experiment("fedavg", log="mlflow", out="run")
    with pytest.raises(UserError, match=message):
        experiment.run()
    Path("run/mlflow.txt").write_text("0" * 32)  # a run that is resumed
    with pytest.raises(UserError, match=message):
        experiment.run(resume=True)
    assert not Path("run/log.txt").exists()  # nothing is left to close


def test_wandb_learns_whether_a_run_has_ended_or_failed(wandb_offline):
    assert exit_codes(stopped_and_resumed, "wandb") == [1, 0]


def exit_codes(run, *values):
    """Call a function and return the exit codes of the W&B runs that it finished."""
    import wandb

    codes = []
    finish = wandb.Run.finish

    def finishing(self, exit_code=None, **fields):
        codes.append(exit_code)
        finish(self, exit_code, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wandb.Run, "finish", finishing)
        run(*values)
    return codes
