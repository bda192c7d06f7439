"""The notebooks in examples/ run from top to bottom in an empty folder, and reach the results that they describe."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from torch import nn

import fedloom

METHODS = ("local", "fedavg", "fedavg+ft")
"""Methods of the notebook on spoken digits."""
EXAMPLES = Path(__file__).parent.parent / "examples"


def execute(name: str) -> str:
    """Run a notebook in the current folder; return what its cells printed."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(Path.cwd())}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
def test_compare_methods():
    printed = execute("compare_methods")
    runs = json.loads(Path("runs/compare-methods/comparison.json").read_text())["runs"]
    accuracy = {run["label"]: run["personal_accuracy"] for run in runs}
    assert list(accuracy) == ["local", "fedavg", "fedavg+ft", "fedper", "ditto"]
    assert all(name in printed for name in accuracy)
    assert accuracy["fedavg+ft"] > accuracy["fedavg"] > 0.7
    assert Path("compare-methods.png").stat().st_size > 20_000


@pytest.mark.slow
def test_own_method():
    printed = execute("own_method")
    runs = json.loads(Path("runs/own-method/comparison.json").read_text())["runs"]
    fedavg, ditto, blend, slower = (run["personal_accuracy"] for run in runs)
    assert blend > fedavg and slower > fedavg and ditto > fedavg
    assert "blend=0.1" in printed


@pytest.mark.slow
def test_own_images():
    printed = execute("own_images")
    assert fedloom.load("runs/own-images").summary["personal_accuracy"] > 0.8
    assert printed.count("classified correctly") == 4
    assert Path("shops.png").stat().st_size > 5000
    assert len(fedloom.load_model("shop-2.safetensors").classes) == 10


@pytest.mark.slow
def test_from_arrays():
    printed = execute("from_arrays")
    (folder,) = Path("runs").iterdir()
    run = fedloom.load(folder, model=nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2)))
    assert run["personal_accuracy"] > 0.9 and len(run.clients) == 8
    assert "tensor(" in printed
    assert "<html" in Path("report.html").read_text()


@pytest.mark.slow
def test_pretrained_lora():
    printed = execute("pretrained_lora")
    runs = {name: fedloom.load(f"runs/pretrained-{name}").summary for name in ("trained", "frozen", "lora")}
    sent = {name: run["up_bytes"] for name, run in runs.items()}
    assert sent["trained"] > 5 * sent["lora"] and sent["lora"] > 10 * sent["frozen"]
    assert runs["lora"]["global_accuracy"] > runs["frozen"]["global_accuracy"] > 0.3
    assert "are computed once for 1,797 samples" in printed
    assert "loaded 29 of 31 tensors" in printed


@pytest.mark.slow
def test_spoken_digits(monkeypatch):
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    printed = execute("spoken_digits")
    assert "ARTIFICIAL recordings, not speech" in printed
    (checked,) = re.findall(r"640 recordings: (.*)", printed)
    assert "of errors" not in checked
    sweeps = {method: json.loads(Path(f"runs/spoken-digits/{method}/sweep.json").read_text()) for method in METHODS}
    assert all(found["best"]["by"] == "validation_personal_accuracy" for found in sweeps.values())
    assert all(f"{method}: lr {found['best']['setting']['lr']} is best" in printed for method, found in sweeps.items())
    for method in METHODS:
        run = fedloom.load(f"runs/spoken-digits/{method}/lr=0.001-s0")
        assert run.summary["personal_accuracy"] > 0.3 and run.summary["personal_auc"] > 0.7
    assert "ada: " in printed and "dan: " in printed
    assert Path("spoken-digits.png").stat().st_size > 5000


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
