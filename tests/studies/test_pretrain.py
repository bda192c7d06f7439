"""Tables whose runs start from the final model of another run."""

from pathlib import Path
from threading import Timer
from time import monotonic

import pytest

from fedloom.experiment.lock import RunLock
from fedloom.experiment.run_folder import read_rounds
from fedloom.studies.plan import StudyPlan
from fedloom.studies.running import run_cells
from fedloom.studies.table import Cell, cells_of, load_table

BOARD = """\
title: Started
setting: clients do not train, so their models are those that they start from
recipe: {data.clients: 2, data.limit: 300, training.rounds: 1, training.epochs: 0, model: mlp}
pretrain: {method: centralized, training.epochs: 10, training.optimizer.lr: 0.1, training.rounds: 2}
axes: {dataset: "data.name={}"}
columns: {dataset: [digits]}
methods: [local, fedavg]
measure: personal_accuracy
"""


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.chdir(tmp_path)
    Path("started.yaml").write_text(BOARD)
    load_table.cache_clear()
    return cells_of("started.yaml", load_table("started.yaml"))


def started_from(cell: Cell) -> Path:
    return Path(cell.values["model"]["weights"]).parents[1]


def test_the_model_is_trained_once_and_all_cells_start_from_it(cells: list[Cell]) -> None:
    plan = StudyPlan(results=Path("kept"))
    found = [run_cells([cell], plan).result for cell in cells]
    folder = started_from(cells[0])
    assert folder == started_from(cells[1])
    records = read_rounds(folder)
    assert [record["round"] for record in records] == [1, 2]
    assert all(result is not None and result.figures["personal_accuracy"] > 0.7 for result in found)


def test_another_pretraining_gives_the_cells_other_keys(cells: list[Cell]) -> None:
    Path("started.yaml").write_text(BOARD.replace("training.epochs: 10", "training.epochs: 11"))
    load_table.cache_clear()
    others = cells_of("started.yaml", load_table("started.yaml"))
    assert {cell.key for cell in cells}.isdisjoint(cell.key for cell in others)


def test_a_run_waits_while_another_process_trains_the_model(cells: list[Cell]) -> None:
    folder = started_from(cells[0])
    folder.mkdir(parents=True)
    lock = RunLock(folder)
    Timer(0.3, lock.release).start()
    assert run_cells(cells[:1], StudyPlan(results=Path("kept"))).result is not None


def test_the_time_limit_holds_while_the_model_is_trained(cells: list[Cell]) -> None:
    stopped = run_cells(cells[:1], StudyPlan(results=Path("kept"), deadline=monotonic()))
    assert (stopped.result, stopped.round) == (None, 0)
    assert [record["round"] for record in read_rounds(started_from(cells[0]))] == [1]
    assert run_cells(cells[:1], StudyPlan(results=Path("kept"))).result is not None
    assert [record["round"] for record in read_rounds(started_from(cells[0]))] == [1, 2]


def test_figure_1_of_fedcrc_has_one_pretrained_model_for_all_cells() -> None:
    cells = cells_of("fedcrc/fig1", load_table("fedcrc/fig1"))
    assert len({started_from(cell) for cell in cells}) == 1
    assert [cell.values["model"].get("freeze") for cell in cells] == [["extractor"], None] * 2
    assert all(cell.start["method"]["name"] == "centralized" for cell in cells if cell.start is not None)
