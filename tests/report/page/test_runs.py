"""Run folders are read as far as they are written, and named by what differs."""

import json
from pathlib import Path

import pytest
from written import a_round, evaluated, write_run

from fedloom.core.errors import UserError
from fedloom.report.page.runs import entries_of, read_run, read_runs


def test_runs_that_differ_in_the_seed_alone_are_one_entry(tmp_path):
    for seed in (1, 0):
        write_run(tmp_path / f"a{seed}", seed=seed)
    write_run(tmp_path / "b", "local")
    entries = entries_of(read_runs([tmp_path]))
    assert [(e.label, [run.seed for run in e.runs]) for e in entries] == [("fedavg", [0, 1]), ("local", [0])]


def test_a_method_that_comes_twice_is_named_by_what_differs(tmp_path):
    write_run(tmp_path / "a", {"name": "fedprox", "mu": 0.1})
    write_run(tmp_path / "b", {"name": "fedprox", "mu": 1.0})
    write_run(tmp_path / "c", "fedavg", partition="dirichlet:0.1")
    assert [e.label for e in entries_of(read_runs([tmp_path]))] == ["fedprox mu=0.1", "fedprox mu=1.0", "fedavg"]


def test_a_folder_given_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "a")
    assert len(read_runs([run, tmp_path, Path(f"{run}/../a")])) == 1


def test_a_line_that_is_being_written_does_not_count_yet(tmp_path):
    run = write_run(tmp_path / "a", history=[a_round(1)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "lo')
    assert [record["round"] for record in read_run(run).history] == [1]


def test_an_unfinished_run_has_the_figures_of_its_last_evaluation(tmp_path):
    run = read_run(write_run(tmp_path / "a", history=[evaluated(1, 0.5), evaluated(2, 0.75), a_round(3)], rounds=9))
    assert run.done is None
    assert run.summary["personal_accuracy"] == 0.75
    assert run.summary["seconds"] == 1.5
    assert read_run(write_run(tmp_path / "b")).summary == {}


def test_a_folder_without_runs_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match="holds no run.*fedloom compare"):
        read_runs([tmp_path])
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    with pytest.raises(
        UserError, match="has format 1, but this fedloom reads format 2: repeat the run with `fedloom run .*"
    ):
        read_runs([tmp_path])
    (tmp_path / "versions.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(UserError, match=r"recipe\.yaml' cannot be used: method is missing"):
        read_runs([tmp_path])
