"""What fedloom.run, load, compare and sweep return."""

import json
import os
import shutil
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

import fedloom
from fedloom.core.errors import UserError

TINY = {"data": "digits", "model": "mlp", "clients": 3, "rounds": 2, "method": "fedper", "data.limit": 150}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedloom.run(**TINY, out=tmp_path_factory.mktemp("run") / "mine", **{"evaluation.metrics": ["auc"]})


def test_a_run_has_its_summary_as_a_mapping(run):
    assert run["personal_accuracy"] == run.summary["personal_accuracy"]
    assert dict(run) == run.summary == json.loads((run.folder / "summary.json").read_text())
    assert run == fedloom.load(run.folder) and type(fedloom.load(run.folder)) is fedloom.Run
    assert run.get("nothing") is None
    with pytest.raises(KeyError):
        run["nothing"]


def test_rounds_and_clients_are_frames(run):
    assert run.history.index.tolist() == [1, 2] and run.history.index.name == "round"
    assert run.history["loss"].tolist() == [record["loss"] for record in run.round_records]
    assert run.clients.index.tolist() == [0, 1, 2]
    rows = run.client_rows
    assert run.clients["test"].tolist() == [sum(row["total"]) for row in rows]
    assert run.clients["accuracy"].tolist() == [sum(row["right"]) / sum(row["total"]) for row in rows]
    assert run.clients["loss"].mean() < rows[0]["loss"]
    assert run.clients.loc[1, "auc"] == rows[1]["metrics"]["auc"]
    assert run.clients.loc[1, "name"] == "client 1"


def test_models_and_report_of_a_run(run):
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    assert run.personal(2)(images).shape == (5, 10)
    path = run.report(points=0)
    assert path == run.folder / "report.html" and "<html" in path.read_text()
    assert str(path.name) in path._repr_html_()
    assert run.report("elsewhere.html", points=0)._repr_html_().count("iframe") == 2
    with pytest.raises(UserError, match="missing"):
        run.report("missing/report.html")


def test_a_run_describes_itself(run):
    accuracy = f"{100 * run['personal_accuracy']:.1f}%"
    assert repr(run) == (
        f"<Run '{run.folder}': method fedper, data digits, seed 0, rounds 2, personal accuracy {accuracy}>"
    )
    assert f"<td>{accuracy}</td>" in run._repr_html_()


def test_an_unfinished_run():
    class StopError(Exception):
        pass

    def stop(record):
        raise StopError

    with pytest.raises(StopError):
        fedloom.run(**TINY, out="stopped", on_round=stop)
    run = fedloom.load("stopped")
    assert run and run.summary is None and dict(run) == {}
    assert "1 of 2, not finished" in repr(run)
    assert len(run.clients) == 0 and run.history.index.tolist() == [1]
    with pytest.raises(UserError, match="not finished; resume it with: fedloom resume stopped"):
        run["personal_accuracy"]


def test_without_a_folder_a_new_one_is_made():
    first, second = (fedloom.run(**TINY | {"rounds": 1}) for _ in range(2))
    assert first.folder != second.folder and {first.folder.parent, second.folder.parent} == {Path("runs")}
    assert first["run_dir"] == str(first.folder)


def test_a_comparison_and_a_sweep_have_a_frame_and_a_report():
    fields = {name: value for name, value in TINY.items() if name != "method"} | {"rounds": 1}
    runs = fedloom.compare(methods=["local", "fedavg"], out="compared", **fields)
    assert runs.frame["label"].tolist() == ["local", "fedavg"]
    assert runs.frame["personal_accuracy"].tolist() == [one["personal_accuracy"] for one in runs]
    assert runs.run(1).method.name == "fedavg"
    assert runs.report(points=0) == Path("compared/report.html")
    swept = fedloom.sweep(method="fedavg", over={"lr": [0.1, 0.2]}, out="swept", **fields)
    assert swept.frame["setting.lr"].tolist() == [0.1, 0.2]
    assert "lr=0.1" in swept.report(points=0).read_text()


def test_progress_on_request(capsys):
    fedloom.run(**TINY | {"rounds": 1})
    assert capsys.readouterr().err == ""
    fedloom.run(**TINY | {"rounds": 1}, progress=True)
    assert "fedper (seed 0)  round 1/1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_notebook_shows_one_bar_that_is_updated():
    code = f"import fedloom\nrun = fedloom.run(**{TINY | {'rounds': 300}!r})\nrun"
    series = f"fedloom.compare(methods=['local', 'fedavg'], **{ {n: v for n, v in TINY.items() if n != 'method'}!r})"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (code, series + ";")])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(Path.cwd())}}).execute()
    bar, shown = notebook.cells[0].outputs
    assert "fedper (seed 0)" in bar.data["text/plain"] and "round 300/300" in bar.data["text/plain"]
    assert 'value="300" max="300"' in bar.data["text/html"]
    assert "personal accuracy" in shown.data["text/html"]
    (bar,) = notebook.cells[1].outputs
    assert "run 2: fedavg (seed 0)" in bar.data["text/plain"] and "round 2/2" in bar.data["text/plain"]
    assert np.all(["stderr" not in str(output) for cell in notebook.cells for output in cell.outputs])


def test_unfinished_runs_are_equal_only_if_they_are_the_same_and_have_no_values(tmp_path):
    def die(record):
        raise ZeroDivisionError

    for name in ("one", "other"):
        with pytest.raises(ZeroDivisionError):
            fedloom.run(**TINY, out=tmp_path / name, on_round=die)
    one, same, other = (fedloom.load(tmp_path / name) for name in ("one", "one", "other"))
    assert one == same and hash(one) == hash(same)
    relative = fedloom.load(Path(os.path.relpath(tmp_path / "one")))
    assert one == relative and hash(one) == hash(relative)
    assert one != other
    assert one.get("personal_accuracy", 0) == 0
    assert one.get("personal_accuracy") is None
    with pytest.raises(UserError, match="is not finished") as error:
        one["personal_accuracy"]
    assert isinstance(error.value, KeyError)
    assert "\\" not in str(error.value) and not str(error.value).startswith('"')


def test_a_damaged_summary_is_an_error_and_not_the_default(run, tmp_path):
    copy = shutil.copytree(run.folder, tmp_path / "copy")
    (copy / "summary.json").write_text("{")
    with pytest.raises(UserError, match="summary.json"):
        fedloom.load(copy).get("personal_accuracy", 0)
