"""Clients that are folders keep their names: in the run folder, in reports, and to choose a model."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from using import PIXELS, invoke, last_line, write_pictures
from written import figures

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.data import federate, load
from fedloom.experiment.run_folder import read_clients
from fedloom.inference.newcomers import evaluate_newcomers, held_out
from fedloom.report.federation_plot import plot_federation
from fedloom.report.page.insight import Insights
from fedloom.report.page.page import page_of
from fedloom.report.page.runs import entries_of, read_runs

NAMES = ("10", "north $2$", "south", "west")


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shops")
    for number, name in enumerate(NAMES):
        write_pictures(root / name, {0: 12, 1: 12, number + 2: 12}, start=12 * number)
    return root


@pytest.fixture(scope="module")
def run(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "named"
    fields: dict[str, Any] = {"data.name": str(shops), "partition": "natural", "data.newcomers": 1, "model": "mlp"}
    fedloom.run(**fields, method="fedper", rounds=1, epochs=1, out=folder)
    return folder


def test_a_natural_federation_has_the_names_of_its_folders(shops: Path) -> None:
    dataset = load(str(shops))
    federation = federate(dataset, clients=4, partition="natural", seed=0)
    assert federation.names == NAMES
    assert [federation.name(client) for client in range(4)] == list(NAMES)
    assert pickle.loads(pickle.dumps(federation)).names == NAMES
    other = federate(dataset, clients=4, partition="iid", seed=0)
    assert (other.names, other.name(3)) == ((), "client 3")


def test_each_client_needs_a_name_if_one_has() -> None:
    part = [np.arange(2), np.arange(2)]
    with pytest.raises(UserError, match="1 different names for 2 clients"):
        Federation(part, part, names=("a", "a"))


def test_the_run_folder_has_the_names(run: Path) -> None:
    facts = json.loads((run / "task.json").read_text())
    assert facts["names"] == list(NAMES)
    rows = read_clients(run)
    assert [row["name"] for row in rows] == list(NAMES)
    (newcomer,) = facts["newcomers"]
    assert [row["name"] for row in rows if row["newcomer"]] == [NAMES[newcomer]]


def test_models_are_found_by_name_and_number(run: Path) -> None:
    trained = fedloom.load(run)
    images = PIXELS[:20]
    expected = trained.personal(2)(images)
    assert torch.equal(trained.personal("south")(images), expected)
    assert torch.equal(trained.personal("2")(images), expected)
    assert not torch.equal(trained.personal("west")(images), expected)
    assert trained.client_number("10") == 0  # a name, although it could be a number
    with pytest.raises(UserError, match=r"client = 'sout': there is no such client; did you mean 'south'\?"):
        trained.personal("sout")
    with pytest.raises(UserError, match="client = 4: there is no such client; the run has clients 0 to 3, named "):
        trained.personal("4")


def test_commands_take_names(run: Path, shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = last_line(invoke("predict", run, shops / "south", "--client", "south", "--json"))
    assert by_name == last_line(invoke("predict", run, shops / "south", "--client", 2, "--json"))
    invoke("export", run, "--to", "safetensors", "--client", "north $2$")
    model = fedloom.load_model(tmp_path / "client-north-2-.safetensors")
    assert torch.equal(model(PIXELS[:5]), fedloom.load(run).personal(1)(PIXELS[:5]))


def test_newcomers_keep_their_names(run: Path) -> None:
    trained = fedloom.load(run)
    (row,) = evaluate_newcomers(trained, held_out(trained), ["logreg"], alone_epochs=0)["clients"]
    assert row["name"] == NAMES[row["client"]]


def test_plots_and_reports_show_names(run: Path, shops: Path, tmp_path: Path) -> None:
    runs = read_runs([run])
    entries = entries_of(runs)
    page = page_of(entries, Insights(0).of(entries))
    found = figures(page)
    bars = found["clients-0-fedper"]
    words = next(section.words for section in page.sections if bars in section.figures)
    clients = sorted(name for name, row in zip(NAMES, read_clients(run), strict=True) if not row["newcomer"])
    assert sorted(bars.x.labels) == clients
    assert sorted(words[i].split(" (seed")[0] for i in bars.marks[0].words) == clients
    assert found["holdings-0"].x.labels == list(NAMES)
    titles = [figure.title.partition(" (")[0] for name, figure in found.items() if name.startswith("class-client-")]
    assert titles
    assert set(titles) <= set(NAMES)
    dataset = load(str(shops))
    plot_federation(dataset, federate(dataset, clients=4, partition="natural", seed=0), tmp_path / "who.png")
    assert (tmp_path / "who.png").stat().st_size > 1000
