"""Results and costs that come with the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedloom.cli import board, commands
from fedloom.data import hub
from fedloom.studies import results, workload
from fedloom.studies.cost import image_steps
from fedloom.studies.report import report
from fedloom.studies.workload import build, cost_of, every_cell

ROOT = Path(__file__).parents[2]
CRC = ["fedcrc/table1", "--at", "dataset=cifar10,beta=0.1", "--methods", "fedavg,fedprox"]


def reproduce(*arguments: str) -> Result:
    result = CliRunner(env={"FEDLOOM_DATA": "nowhere", "COLUMNS": "200"}).invoke(
        commands.app, ["reproduce", *arguments]
    )
    if result.exception is not None:
        raise result.exception
    return result


def test_the_report_in_the_repository_is_what_the_stored_results_give() -> None:
    pages = report(results.SHIPPED, ROOT / "docs" / "reproduction.md")
    assert len(pages) == 6
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run: fedloom reproduce --report"


@pytest.mark.parametrize(("name", "page"), board.PAGES.items())
def test_a_boards_page_in_the_repository_has_the_figures_that_are_stored(name: str, page: Path, tmp_path: Path) -> None:
    CliRunner().invoke(commands.app, ["board", name, "--page", "--to", str(tmp_path / "page.md")])
    made, kept = (path.read_text(encoding="utf-8").splitlines() for path in (tmp_path / "page.md", ROOT / page))
    tables = [[line for line in lines if line.startswith(("|", "#"))] for lines in (made, kept)]
    assert tables[0] == tables[1], f"run: fedloom board {name} --page"


def test_new_results_go_to_the_package_in_a_checkout_and_to_a_local_folder_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results.default_folder() == ROOT / "fedloom" / "studies" / "stored"
    installed = tmp_path / "site-packages" / "fedloom" / "studies" / "stored"
    installed.mkdir(parents=True)
    monkeypatch.setattr(results, "SHIPPED", installed)
    assert results.default_folder() == Path("reproduction")


def test_results_of_a_folder_replace_and_extend_those_of_the_package(tmp_path: Path) -> None:
    shipped = results.stored(tmp_path, "fedcrc")
    one = next((results.SHIPPED / "fedcrc").glob("*.json"))
    (tmp_path / "fedcrc").mkdir()
    values = json.loads(one.read_text(encoding="utf-8"))
    (tmp_path / "fedcrc" / one.name).write_text(json.dumps(values | {"machine": "mine"}))
    (tmp_path / "fedcrc" / one.name.replace("-s0", "-s77")).write_text(json.dumps(values | {"seed": 77}))
    merged = results.stored(tmp_path, "fedcrc")
    assert len(merged) == len(shipped) + 1
    assert [result.machine for result in merged].count("mine") == 1
    assert results.find(tmp_path / "fedcrc" / one.name) == tmp_path / "fedcrc" / one.name
    assert results.find(tmp_path / "else" / one.name) is None
    shutil.rmtree(tmp_path / "fedcrc")
    assert results.find(tmp_path / "fedcrc" / one.name) == one


def test_a_table_without_its_data_shows_what_is_stored_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "installed", lambda: False)
    shown = reproduce(*CRC, "--seed", "0")
    assert "59.36" in shown.stdout and "not run (" not in shown.stderr
    lacking = reproduce(*CRC, "--seed", "99")
    assert "59.36" in lacking.stdout
    assert "not run (2 runs): dataset 'cifar10' is not in the data folder nowhere" in lacking.stderr
    assert "get it with: " in lacking.stderr
    assert not Path("runs").exists()


def test_reproduce_alone_is_the_list() -> None:
    assert reproduce().stdout == reproduce("--list").stdout
    assert "fedstyle/ablation" in reproduce().stdout


def test_the_stored_costs_are_those_that_are_counted() -> None:
    cells = every_cell()
    known = workload._stored()
    assert {workload._key(cell.values) for cell in cells} <= set(known), "run: make costs"
    one_per_method = list({cell.values["method"]["name"]: cell for cell in cells}.values())
    counted = build(one_per_method)
    assert counted == {key: known.get(key) for key in counted}, "run: make costs"


@pytest.mark.slow
def test_all_stored_costs_are_current() -> None:
    assert build(every_cell()) == workload._stored(), "run: make costs"


def test_a_recipe_that_is_not_stored_is_counted() -> None:
    cell = every_cell()[0]
    changes = {"training.rounds": 7, "training.epochs": 3}
    values = cell.changed(changes)
    assert workload._key(values) not in workload._stored()
    assert cost_of(values).steps == pytest.approx(
        image_steps(cell.recipe({"training.rounds": 7, "training.epochs": 3}))
    )
    assert cost_of(cell.changed({"training.rounds": 7})).steps == pytest.approx(
        image_steps(cell.recipe({"training.rounds": 7}))
    )


def test_the_list_needs_no_torch_and_less_than_three_seconds_of_cpu_time(tmp_path: Path) -> None:
    code = (
        "import sys; from fedloom.studies import workload; from fedloom.cli.commands import app\n"
        "workload.GPUS = ()\n"
        "app(['reproduce'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    before = os.times()
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert os.times().children_user - before.children_user < 3
