"""Comparisons whose methods have different settings, and what newcomers get from each representation."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import fedloom
from fedloom import UserError
from fedloom.cli.commands import app
from fedloom.config.loading import read_yaml
from fedloom.inference.newcomers import evaluate_newcomers, held_out
from fedloom.runs.comparison import labels_of

SMALL = {
    "data": "digits", "clients": 5, "rounds": 2, "data.limit": 250, "data.newcomers": 2, "partition": "iid",
    "engine": "inline", "lr": 0.3,
}  # fmt: skip


def test_a_method_may_have_training_settings_of_its_own():
    small = {"name": "fedavg", "with": {"training.batch_size": 8, "training": {"optimizer.lr": 0.02}}}
    runs = fedloom.compare(methods=["fedavg", small], out="runs/own", **SMALL)
    recipes = [yaml.safe_load(Path(run["run_dir"], "recipe.yaml").read_text()) for run in runs]
    found = [(recipe["training"]["batch_size"], recipe["training"]["optimizer"]["lr"]) for recipe in recipes]
    assert found == [(32, 0.3), (8, 0.02)]
    assert [run["label"] for run in runs] == ["fedavg", "fedavg batch_size=8 lr=0.02"]
    alone = fedloom.run(method="fedavg", out="alone", **SMALL | {"batch_size": 8, "lr": 0.02})
    assert runs[1]["personal_accuracy"] == alone["personal_accuracy"]
    again = fedloom.resume_comparison("runs/own")  # its description has the settings
    assert [run["label"] for run in again] == [run["label"] for run in runs]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data.clients": 3}, r"with.data.clients = 3 of 'fedavg': all runs of a comparison share this field"),
        ({"clients": 3}, r"with.data.clients = 3 of 'fedavg'"),
        (3, r"with = 3 of 'fedavg' must be a section"),
        ({"training.round": 3}, r"training.round = 3: there is no such field; did you mean 'rounds'"),
    ],
)
def test_a_setting_that_runs_must_share_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        fedloom.compare(methods=["local", {"name": "fedavg", "with": given}], out="runs/own", **SMALL)
    assert not Path("runs").exists()


def test_methods_that_differ_only_in_their_own_settings_are_different():
    assert labels_of([{"name": "local", "with": {"lr": 0.1}}, {"name": "local", "with": {"lr": 0.2}}, "fedavg"]) == [
        "local lr=0.1", "local lr=0.2", "fedavg",
    ]  # fmt: skip
    twice = [{"name": "local", "with": {"lr": 0.1}}, {"name": "local", "with": {"training.optimizer.lr": 0.1}}]
    with pytest.raises(UserError, match="'local' is given twice"):
        fedloom.compare(methods=twice, out="runs/own", **SMALL)


def test_methods_whose_settings_end_in_the_same_word_have_different_labels():
    binary, labels = (
        {"name": "fedprox", "mu": 0.1, "with": {"objective.name": name, "training.optimizer.name": "sgd"}}
        for name in ("binary", "labels")
    )
    assert labels_of([binary, labels]) == [
        "fedprox mu=0.1 objective=binary optimizer=sgd", "fedprox mu=0.1 objective=labels optimizer=sgd",
    ]  # fmt: skip
    one = {"name": "moon", "temperature": 0.5, "with": {"objective.temperature": 0.1}}
    other = {"name": "moon", "temperature": 0.1, "with": {"objective.temperature": 0.5}}
    assert labels_of([one, other]) == [
        "moon temperature=0.5 objective.temperature=0.1", "moon temperature=0.1 objective.temperature=0.5",
    ]  # fmt: skip
    with pytest.raises(UserError, match="'fedprox mu=0.1' describes two methods"):
        labels_of([{"name": "fedprox", "mu": 0.1}, {"name": "fedprox", "mu": "0.1"}])


def test_seeds_may_be_an_array_of_numbers():
    runs = fedloom.compare(methods=("fedavg",), seeds=np.arange(2), out="runs/own", **SMALL)
    assert [run["seed"] for run in runs] == [0, 1]
    swept = fedloom.sweep(over={"lr": [0.1]}, seeds=np.arange(2), out="runs/swept", **SMALL)
    assert [run["seed"] for run in swept] == [0, 1]


@pytest.mark.parametrize("seeds", [3, "0,1"])
def test_seeds_must_be_a_list(seeds):
    with pytest.raises(UserError, match=f"seeds = {seeds!r}: must be a list, such as"):
        fedloom.compare(methods=["fedavg"], seeds=seeds, out="runs/own", **SMALL)


def test_newcomers_get_a_model_from_each_shared_representation():
    runs = fedloom.compare(
        methods=["local", "untrained+logreg", "fedavg"], out="compared", **SMALL,
        **{"compare.newcomers": {"labelled": [5, 20], "alone_epochs": 3}},
    )  # fmt: skip
    found = runs.newcomers
    assert (found["newcomers"], found["head"]) == (2, "logreg")
    rows = {(row["label"], row["labelled"]): row for row in found["rows"]}
    # local shares no representation; the untrained network and FedAvg have a global model, too
    assert list(rows) == [
        ("alone", 5), ("alone", 20), ("untrained+logreg", 0), ("untrained+logreg", 5), ("untrained+logreg", 20),
        ("fedavg", 0), ("fedavg", 5), ("fedavg", 20),
    ]  # fmt: skip
    run = runs.run(2)
    one = evaluate_newcomers(run, held_out(run).with_labelled(5, 0), ["logreg"], alone_epochs=0)
    assert [row["train"] for row in one["clients"]] == [5, 5]
    assert rows["fedavg", 5]["mean"] == one["ways"]["logreg"]["mean"]
    assert rows["fedavg", 0]["mean"] == one["ways"]["global"]["mean"] == run["newcomer_global_accuracy"]
    assert rows["untrained+logreg", 20]["mean"] > rows["untrained+logreg", 5]["mean"]


def test_fewer_labelled_samples_are_among_the_more():
    run = fedloom.run(method="fedavg", out="run", **SMALL)
    data = held_out(run)
    few, more = (data.with_labelled(count, 7).task.federation for count in (4, 9))
    trainer = next(client for client in range(5) if client not in data.clients)
    for client in data.clients:
        assert (len(few.train[client]), len(more.train[client])) == (4, 9)
        assert set(few.train[client]) < set(more.train[client]) < set(data.task.federation.train[client])
    assert few.train[trainer] is data.task.federation.train[trainer]


def test_newcomers_need_clients_that_are_held_out():
    with pytest.raises(UserError, match=r"compare.newcomers: the federation holds no clients out .* data.newcomers: 5"):
        fedloom.compare(methods=["fedavg"], **SMALL | {"data.newcomers": 0, "compare.newcomers": {}})


def test_the_command_prints_text_newcomers_and_the_path_of_the_report():
    Path("mine.yaml").write_text(
        "data: {name: digits, clients: 4, newcomers: 2, limit: 150, partition: iid}\n"
        "training: {rounds: 1}\nengine: inline\n"
        "compare: {methods: [fedavg], newcomers: {labelled: [5]}, about: Two shops join later.}\n"
    )
    result = CliRunner(env={"COLUMNS": "100"}).invoke(
        app, ["compare", "mine.yaml", "--out", "mine", "--report"], catch_exceptions=False
    )
    said = " ".join(result.stdout.split())
    assert said.index("Two shops join later.") < said.index("2 newcomers: logreg on a frozen representation")
    assert "none: trained alone" in said
    assert "report: mine/report.html" in said
    assert "<html" in Path("mine/report.html").read_text(encoding="utf-8")[:500]
    result = CliRunner().invoke(app, ["resume", "mine", "--json"], catch_exceptions=False)
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["report"] == "mine/report.html"
    assert {row["labelled"] for row in value["newcomers"]["rows"]} == {0, 5}


def test_the_demos_settings_were_chosen_on_other_seeds_of_the_same_federation():
    demo, candidates = read_yaml("demo"), read_yaml("sweeps/demo-settings")
    for section in ("data", "model", "training"):
        assert demo[section] == candidates[section]
    assert not set(demo["compare"]["seeds"]) & set(candidates["compare"]["seeds"])
    plain = {"local", "fedavg", "untrained+logreg"}
    tried = [json.dumps(method, sort_keys=True) for method in candidates["compare"]["methods"]]
    for method in demo["compare"]["methods"]:
        name = method["name"] if isinstance(method, dict) else method
        assert name in plain or json.dumps(method, sort_keys=True) in tried, method
