"""`fedloom diff`, and the newest run folder as the default of `report`."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner
from written import evaluated, write_run

from fedloom.cli import commands
from fedloom.core.errors import UserError
from fedloom.report.diff import brief_value, differences


def invoke(*arguments: str):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(commands.app, arguments)
    if result.exception is not None:
        raise result.exception
    return result


def test_recipe_and_figures_that_differ_are_shown(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", "fedavg", rounds=3, history=[evaluated(1, 0.5)])
    other = write_run(tmp_path / "b", "local", rounds=3, history=[evaluated(1, 0.25)])
    found = differences(one, other)
    assert found["recipe"]["method.name"] == ("fedavg", "local")
    assert found["figures"]["personal_accuracy"] == (0.5, 0.25)
    assert "training.rounds" not in found["recipe"] and found["versions"] == {}
    as_json = json.loads(invoke("diff", str(one), str(other), "--json").stdout)
    assert as_json["recipe"]["method.name"] == ["fedavg", "local"]
    said = invoke("diff", str(one), str(other)).stdout
    assert "method.name" in said and "'local'" in said
    assert "the runs are equal" in invoke("diff", str(one), str(one)).stdout


def test_versions_that_differ_are_shown(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / name) for name in "ab")
    (other / "versions.json").write_text(json.dumps({"format": 2, "torch": "9.9"}))
    assert differences(one, other)["versions"]["torch"][1] == "9.9"


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="RUN = '.*': holds no run"):
        differences(write_run(tmp_path / "a"), tmp_path)


def test_the_report_without_arguments_is_that_of_the_newest_folder() -> None:
    with pytest.raises(UserError, match="RUN: there is no run in 'runs'"):
        invoke("report")
    old = write_run(Path("runs/b"), history=[evaluated(1, 0.5)])
    write_run(Path("runs/a/00-fedavg-s0"), history=[evaluated(1, 0.5)])
    Path("runs/a/comparison.yaml").write_text("{}")
    os.utime(old / "metrics.jsonl", (1, 1))
    assert "newest: runs/a\n" in invoke("report", "--points", "0").stderr
    os.utime("runs/a/00-fedavg-s0/metrics.jsonl", (0, 0))
    assert "newest: runs/b\n" in invoke("report", "--points", "0").stderr


@pytest.mark.parametrize(("words", "name"), [(["rnu"], "run"), (["data", "chekc"], "check")])
def test_an_unknown_command_has_one_suggestion(words: list[str], name: str) -> None:
    said = CliRunner(env={"COLUMNS": "200"}).invoke(commands.app, words)
    assert said.exit_code == 2
    assert said.stderr.count("Did you mean") == 1 and f"Did you mean '{name}'?" in said.stderr


@pytest.mark.slow
def test_a_comparison_in_parallel_gives_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = ["--methods", "local,fedavg", "--data", "digits", "--rounds", "1", "--clients", "3", "--json"]
    alone = json.loads(invoke("compare", *options).stdout)["runs"]
    beside = json.loads(invoke("compare", *options, "--parallel", "2").stdout)["runs"]
    assert [run["personal_accuracy"] for run in beside] == pytest.approx([run["personal_accuracy"] for run in alone])
    assert [run["label"] for run in beside] == ["local", "fedavg"]


def test_hashes_and_fractions_are_shortened_in_the_table() -> None:
    assert brief_value(0.12345678901234567) == "0.123457"
    assert brief_value("sha256 " + "ab" * 32) == "'sha256 abababababab…'"
    assert (brief_value(None), brief_value(3), brief_value("x")) == ("–", "3", "'x'")
