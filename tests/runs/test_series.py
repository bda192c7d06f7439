"""A comparison that was stopped or killed is resumed as a whole: finished runs stay, the rest give the same results."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml
from test_resume import CrashError, contents, results
from typer.testing import CliRunner

import fedloom
from fedloom.cli.commands import app
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupted

COMPARED = {
    "methods": ["fedavg", {"name": "ditto", "lam": 0.5}], "seeds": [0, 1], "data": "digits", "clients": 4, "rounds": 3,
    "data.limit": 200, "engine": "inline",
}  # fmt: skip
RUNS = ["00-fedavg-s0", "01-fedavg-s1", "02-ditto-s0", "03-ditto-s1"]


def in_run(number: int, round: int, act):
    """What `on_run` takes: in this round of this run, something happens."""
    begun = []

    def on_run(recipe):
        begun.append(recipe)

        def on_round(record):
            if (len(begun), record["round"]) == (number, round):
                act()

        return on_round

    return on_run


def crash():
    raise CrashError


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "all"
    return folder, fedloom.compare(**COMPARED, out=folder)


def figures(summaries):
    return [{k: v for k, v in summary.items() if k not in ("seconds", "run_dir")} for summary in summaries]


@pytest.mark.parametrize("act", [crash, stop])
@pytest.mark.parametrize(("number", "round"), [(1, 1), (3, 2)])
def test_a_comparison_that_was_ended_goes_on_to_the_same_files(act, number, round, whole, tmp_path) -> None:
    out = tmp_path / "all"
    with pytest.raises((CrashError, Interrupted)) as ended:
        fedloom.compare(**COMPARED, out=out, on_run=in_run(number, round, act))
    if act is stop:
        said = f"run {number} of 4 stopped after round {round} of 3; resume with: fedloom resume {out}"
        assert str(ended.value) == said
    done = {name: contents(out / name) for name in RUNS[: number - 1]}
    began = []
    summaries = fedloom.resume_comparison(out, on_run=lambda recipe: began.append(recipe.out.name) or (lambda _: None))
    assert began == RUNS[number - 1 :]
    assert {name: contents(out / name) for name in done} == done
    assert figures(summaries) == figures(whole[1])
    for name in RUNS:
        assert results(out / name) == results(whole[0] / name)
    stored = json.loads((out / "comparison.json").read_text())["runs"]
    assert figures(stored) == figures(summaries)
    assert sorted(path.name for path in out.iterdir()) == [*RUNS, "comparison.json", "comparison.yaml"]


def test_asked_to_stop_in_the_last_round_of_a_run_it_stops_after_it(tmp_path) -> None:
    out = tmp_path / "all"
    with pytest.raises(Interrupted, match="stopped after run 2 of 4; resume with: fedloom resume"):
        fedloom.compare(**COMPARED, out=out, on_run=in_run(2, 3, stop))
    assert [(out / name / "summary.json").exists() for name in RUNS] == [True, True, False, False]
    assert not (out / RUNS[2]).exists()


def test_a_finished_comparison_says_so_and_is_told_from_another(whole, tmp_path, caplog) -> None:
    out, summaries = whole
    before = contents(out)
    assert figures(fedloom.compare(**COMPARED, out=out, resume=True)) == figures(summaries)
    assert "all 4 runs in" in caplog.text
    for change, named in [({"seeds": [0]}, "compare.seeds = [0]"), ({"rounds": 4}, "training.rounds = 4")]:
        with pytest.raises(UserError, match="was started with .*, which cannot be changed") as refused:
            fedloom.compare(**COMPARED | change, out=out, resume=True)
        assert str(refused.value).startswith(named)
    with pytest.raises(UserError, match="already holds runs .see comparison.yaml.*fedloom resume"):
        fedloom.compare(**COMPARED, out=out)
    with pytest.raises(UserError, match="holds a single run: choose another folder"):
        fedloom.compare(**COMPARED, out=out / RUNS[0], resume=True)
    with pytest.raises(UserError, match="out is missing; set it to the folder to resume"):
        fedloom.compare(**COMPARED, resume=True)
    with pytest.raises(UserError, match="holds a comparison: .*resume_comparison"):
        fedloom.resume(out)
    after = contents(out)
    del before["comparison.json"], after["comparison.json"]  # written again, with the paths of today
    assert after == before


def test_two_processes_on_one_comparison_the_second_is_refused(tmp_path) -> None:
    out, refused = tmp_path / "all", []

    def second():
        with pytest.raises(UserError, match="another process is using this folder"):
            fedloom.resume_comparison(out)
        refused.append(True)

    fedloom.compare(**COMPARED | {"seeds": [0]}, out=out, on_run=in_run(1, 1, second))
    assert refused == [True]


@pytest.mark.slow
def test_the_command_goes_on_with_a_comparison(whole, tmp_path) -> None:
    out = tmp_path / "all"
    with pytest.raises(CrashError):
        fedloom.compare(**COMPARED, out=out, on_run=in_run(2, 2, crash))
    result = CliRunner().invoke(app, ["resume", str(out), "--engine", "processes", "--json"])
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["run_dir"] == str(out)
    assert figures(said["runs"]) == figures(whole[1])
    described = yaml.safe_load((out / "comparison.yaml").read_text())
    methods = ["fedavg", {"name": "ditto", "lam": 0.5}]
    assert described["compare"] == {"methods": methods, "seeds": [0, 1], "report": False}
    again = CliRunner().invoke(app, ["compare", str(out / "comparison.yaml"), "--out", str(Path("again")), "--json"])
    assert figures(json.loads(again.stdout.splitlines()[-1])["runs"]) == figures(whole[1])
