"""`fedloom board`: boards as recipes, standings, the comparison with published figures, and the page."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import fedloom
from fedloom.cli import commands
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.methods import METHODS
from fedloom.studies.board import MEASURES, order_in_words, standings, waiting
from fedloom.studies.board_page import markdown
from fedloom.studies.code import fingerprint, outdated
from fedloom.studies.comparison import Line
from fedloom.studies.outcome import best_of
from fedloom.studies.plan import StudyPlan, recipe_of, result_path, runs_of
from fedloom.studies.queue import Entry, Queue, QueuedRun, load_queue
from fedloom.studies.queue_running import status, time_left
from fedloom.studies.results import ELSEWHERE, CellResult, default_folder, processors, store
from fedloom.studies.running import run_cells
from fedloom.studies.table import cells_of, load_table

pytestmark = pytest.mark.usefixtures("no_results")
MINE = """\
title: "Somebody: digits"
setting: Four clients.
source: a page
recipe: {data.clients: 4, training.rounds: 2}
axes:
  dataset: "data.name={}"
  division: {dir: {data.partition: "dirichlet:0.5"}, iid: {data.partition: iid}}
columns: {dataset: [digits], division: [dir, iid]}
seeds: [0, 1]
rows:
  fedavg: {name: FedAvg, method: fedavg, figures: [50, null]}
  fedrep: {name: FedRep, method: {name: fedrep, personal_epochs: 1}, figures: [60, null]}
"""


def board(*arguments: str) -> Result:
    result = CliRunner().invoke(commands.app, ["board", *arguments], env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return result


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE)
    load_table.cache_clear()
    return "mine.yaml"


def result(of: str, figure: float, seed: int = 0, rounds: int = 2, **more: object) -> CellResult:
    figures = {"personal_weighted@best": figure, "personal_weighted": figure - 0.1}
    return CellResult(of, seed, rounds, figures, seconds=10.0, **more)  # type: ignore[arg-type]


def test_a_board_is_every_combination_of_datasets_divisions_and_methods(mine: str) -> None:
    cells = cells_of(mine, load_table(mine))
    assert [(cell.place, cell.row, cell.printed) for cell in cells] == [
        ("digits-dir", "fedavg", 50), ("digits-dir", "fedrep", 60),
        ("digits-iid", "fedavg", None), ("digits-iid", "fedrep", None),
    ]  # fmt: skip
    assert {cell.measure for cell in cells} == {"personal_weighted@best"}
    recipe = cells[1].recipe()
    assert (recipe.data.partition, recipe.method.options) == ("dirichlet:0.5", {"personal_epochs": 1})


def test_methods_are_rows_without_published_figures(mine: str) -> None:
    text = MINE[: MINE.index("rows:")] + "methods: [fedavg, {name: ditto, lam: 1}]\n"
    Path("other.yaml").write_text(text)
    assert [cell.row for cell in cells_of("other.yaml", load_table("other.yaml"))] == ["fedavg", "ditto"] * 2
    Path("twice.yaml").write_text(text.replace("{name: ditto, lam: 1}", "fedavg"))
    with pytest.raises(UserError, match=r"board 'twice.yaml': methods: fedavg is given twice"):
        load_table("twice.yaml")


def test_the_smallest_board_is_run_shown_and_written(mine: str) -> None:
    cells = cells_of(mine, load_table(mine))
    plan = StudyPlan(results=Path("reproduction"), trial={"engine.name": "inline"})
    for run in runs_of(cells[:2]):
        run_cells(run, plan)
    (file,) = Path("reproduction/mine").glob("*fedavg*.json")
    stored = json.loads(file.read_text())
    assert stored["costs"]["up_bytes"] == 4 * (64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10)
    assert stored["best"]["personal_weighted@best"] in (1, 2)
    assert stored["figures"]["personal_weighted@best"] >= stored["figures"]["personal_weighted"]

    shown = board(mine).stdout
    assert "digits, dir: 2 rounds" in shown
    assert "not run yet on digits, iid: all 2 methods" in shown
    (standing,) = json.loads(board(mine, "--json").stdout.splitlines()[-1])["standings"]
    by_row = {method["row"]: method for method in standing["methods"]}
    assert by_row["fedavg"]["best, all samples"] == pytest.approx(100 * stored["figures"]["personal_weighted@best"])

    board(mine, "--page", "--to", "page/mine.md", "--html", "mine.html")
    page = Path("page/mine.md").read_text()
    assert re.search(r"\| FedAvg \| 50\.00 \| \d+\.\d\d \|", page)
    assert "Order, over pairs of methods with different published figures (1): " in page
    assert "Published figures: a page." in page
    assert '"name":"standing-0"' in Path("mine.html").read_text()


@pytest.mark.slow
def test_a_board_runs_in_processes_and_is_not_run_again(mine: str) -> None:
    said = board(mine, "--run", "--parallel", "2", "--engine", "inline")
    assert "8 done" in said.stdout
    assert len(list(Path("reproduction/mine").glob("*.json"))) == 8
    assert "8 done" in board(mine, "--status").stdout
    assert "[1/" not in board(mine, "--run").stderr


@pytest.mark.parametrize(("given", "words"), [
    (["--dry-run"], "--dry-run: only affects runs; add --run"),
    (["--parallel", "2", "--status"], "--parallel: only affects runs; add --run"),
    (["--set", "training.rounds=3"], "--set: only affects runs"),
    (["--to", "x.md"], "--to x.md: is the file of --page; add --page"),
    (["--run", "--set", "training.rounds=3"], "changes the figures.*write it in the recipe of your own board"),
])  # fmt: skip
def test_options_without_an_effect_are_refused(mine: str, given: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        board(mine, *given)


def test_the_page_of_a_board_of_ones_own_is_named_after_it_and_says_what_remains(mine: str) -> None:
    board(mine, "--page")
    page = Path("mine.md").read_text()
    assert "**This page has no figures of fedloom yet**" in page
    assert "`fedloom board mine.yaml --status`: 8 runs of the queue remain; time left: unknown" in page
    assert not Path("docs").exists()


def test_missing_data_are_named_once_and_the_other_runs_are_done(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MINE.replace("dataset: [digits], division: [dir, iid]", "dataset: [digits, mnist], division: [iid]")
    Path(mine).write_text(text.replace("seeds: [0, 1]\n", ""))
    load_table.cache_clear()
    monkeypatch.setattr("fedloom.studies.queue_running.run_queue", lambda runs, *_: asked.extend(runs) or [])
    asked: list[QueuedRun] = []
    said = CliRunner().invoke(commands.app, ["board", mine, "--run", "--data-dir", "nowhere"], env={"COLUMNS": "160"})
    assert said.exit_code == 2
    assert said.stderr.count("dataset 'mnist' is not in the data folder") == 1
    assert "not run (2 runs)" in said.stderr
    assert [run.cells[0].place for run in asked] == ["digits-iid"] * 2


def test_a_changed_recipe_is_not_answered_by_the_earlier_results(mine: str) -> None:
    plan = StudyPlan(results=Path("reproduction"), trial={"engine.name": "inline"})
    for run in runs_of(cells_of(mine, load_table(mine))[:2]):
        run_cells(run, plan)
    assert "not run yet on digits, dir" not in board(mine).stdout
    Path(mine).write_text(MINE.replace("personal_epochs: 1", "personal_epochs: 2"))
    load_table.cache_clear()
    shown = board(mine).stdout
    assert "not run yet on digits, dir: FedRep" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(" Fed")] == ["FedAvg"]


def test_results_of_a_board_of_ones_own_never_go_into_the_package() -> None:
    assert default_folder(["boards/mine.yaml"]) == ELSEWHERE
    assert default_folder(["pfllib/board"]) == default_folder()


def test_the_time_left_is_estimated_from_the_boards_own_runs(mine: str) -> None:
    cells = cells_of(mine, load_table(mine))
    plan = StudyPlan(results=Path("reproduction"))
    values = cells[0].changed({})
    store(result(cells[0].key, 0.5, machine=processors(), recipe=values), result_path(cells[0], plan))
    entries = Queue(mine, (Entry(name="all", table=(mine,)),)).runs(plan)
    ((entry,), machine) = status(entries, plan.results)
    assert (entry.count("done"), entry.unknown) == (1, 0)
    assert 30 <= entry.seconds < 60  # three runs of at least the stored one's 10 s
    assert time_left([entry], machine).endswith(f" s on {processors()}, kept busy with several runs")


def test_standings_are_ranked_and_separated_by_rounds(mine: str) -> None:
    cells = cells_of(mine, load_table(mine))
    fedavg, fedrep = cells[0].key, cells[1].key
    longer = [replace(result(fedavg, 0.9, rounds=9), changes={"training.rounds": 9})]
    results = [result(fedavg, 0.5), result(fedavg, 0.7, seed=1), result(fedrep, 0.65), *longer]
    found = standings(cells, results)
    assert [(s.title, [line.cell.row for line in s.lines]) for s in found] == [
        ("digits, dir: 9 rounds", ["fedavg"]), ("digits, dir: 2 rounds", ["fedrep", "fedavg"]),
    ]  # fmt: skip
    assert found[0].changes == "9 of 2 rounds"
    for number, one in enumerate(results):
        store(one, Path(f"reproduction/mine/{number}.json"))
    assert "9 of 2 rounds; published figures are those of the full setting" in board(mine).stdout
    assert found[1].lines[1].here == pytest.approx(60)
    last = next(measure for measure in MEASURES if measure.title == "last, all samples")
    assert last.of(found[1].lines[1]) == pytest.approx(50)
    assert found[1].seconds == 30
    assert waiting(cells, [result(fedavg, 0.5)]) == {"digits, dir": "FedRep", "digits, iid": "all 2 methods"}


def test_the_measure_that_is_compared_has_a_column_and_costs_that_were_not_measured_have_none(mine: str) -> None:
    cells = cells_of(mine, load_table(mine))
    (usual,) = standings(cells, [result(cells[0].key, 0.5)])
    assert [measure.title for measure in usual.measures] == ["best, all samples", "last, all samples", "s in all"]
    Path(mine).write_text(f"measure: global_accuracy\n{MINE}")
    load_table.cache_clear()
    cells = cells_of(mine, load_table(mine))
    seeds = [replace(result(cells[0].key, 0, seed), figures={"global_accuracy": 0.6 + seed / 10}) for seed in (0, 1)]
    (other,) = standings(cells, seeds)
    assert [measure.title for measure in other.measures] == ["global_accuracy", "s in all"]
    written = markdown(mine, load_table(mine), cells, seeds)
    assert "| FedAvg | 50.00 | 65.00 ± 7.07 | 10.0 | 2 |" in written and "best round |" not in written


def test_contradictions_of_the_published_order_are_named(mine: str) -> None:
    cells = cells_of(mine, load_table(mine))
    fedavg, fedrep = cells[0].key, cells[1].key
    (one_seed,) = standings(cells, [result(fedavg, 0.7), result(fedrep, 0.6)])
    assert order_in_words(one_seed) == [
        "Order, over pairs of methods with different published figures (1): 0 the same here, 1 reversed. By 95% "
        "intervals over seeds: 0 confirmed, 0 contradicted, 1 open (1 with fewer than two common seeds).",
        "FedRep is published 10.00 above FedAvg; here it is 10.00 below (reversed, but open over seeds)",
    ]
    seeds = [result(key, mean + seed / 1000, seed) for key, mean in ((fedavg, 0.7), (fedrep, 0.6)) for seed in range(3)]
    (three,) = standings(cells, seeds)
    assert order_in_words(three)[1].endswith("here it is 10.00 below (contradicted)")


def test_the_best_round_is_the_first_of_the_highest() -> None:
    curves = {"personal_weighted": [(1, 0.2), (2, 0.4), (3, 0.4)], "personal_std": [(1, 0.5)]}
    assert best_of(curves) == {"personal_weighted": (2, 0.4)}


def test_pfllibs_board_has_its_setting_and_figures() -> None:
    table = load_table("pfllib/board")
    cells = cells_of("pfllib/board", table)
    printed = {(cell.row, cell.place): cell.printed for cell in cells}
    assert printed["feddbe", "cifar100-dir0.1"] == 64.39
    assert printed["gpfl", "cifar100-10-classes"] == 71.78
    assert printed["fedavg", "fashion-mnist-2-classes"] == 80.41
    assert printed["fedrep", "fashion-mnist-dir0.1"] == 97.56
    recipe = next(cell for cell in cells if cell.row == "fedrep").recipe()
    assert (recipe.data.clients, recipe.data.split, recipe.training.batch_size) == (20, "pooled:0.75", 10)
    assert (recipe.training.rounds, recipe.training.optimizer.lr, recipe.training.fraction) == (2000, 0.005, 1)
    assert recipe.model.options == {"features": 512, "dropout": 0}
    assert (recipe.data.minimum, recipe.training.epochs, recipe.evaluation.every) == (40, 1, 1)


def test_the_leaders_are_run_as_in_the_code_that_their_published_figures_come_from() -> None:
    methods = {cell.row: cell.recipe().method.options for cell in cells_of("pfllib/board", load_table("pfllib/board"))}
    assert methods["fedcp"] == {"lam": 5, "uploads": "mean", "noise": True}
    assert methods["gpfl"] == {"lam": 0.01, "mu": 0.1, "magnitude": "batch"}
    assert methods["feddbe"] == {"kappa": 50, "momentum": 1}


def test_only_methods_that_train_for_an_evaluation_are_evaluated_rarely() -> None:
    """With evaluation in every round, FedBABU's ten epochs of fine-tuning would take ten times its training."""
    every = {cell.row: cell.recipe().evaluation.every for cell in cells_of("pfllib/board", load_table("pfllib/board"))}
    assert {row for row, rounds in every.items() if rounds != 1} == {"fedbabu", "fedavg+ft", "repper"}


def test_the_boards_queue_has_300_rounds_for_all_methods_and_2000_for_five() -> None:
    entries = load_queue("board").runs(StudyPlan())
    rounds = [sorted({run.recipe.training.rounds for run in runs}) for _, runs in entries]
    assert rounds == [[300], [300], [2000], [300], [300]]
    leaders = {(run.cells[0].row, run.plan.seed) for run in entries[2][1]}
    assert leaders == {(row, s) for row in ("fedavg", "fedrep", "fedala", "gpfl", "feddbe") for s in range(3)}


def test_an_unknown_board_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"pfllib/board"):
        board("pfllib/bord")
    with pytest.raises(UserError, match=r"board 'nowhere.yaml'"):
        board("nowhere.yaml")


def test_the_digits_board_has_all_methods_but_fedbn_and_fedstyle() -> None:
    methods = {
        cell.recipe().method.name.removesuffix("+ft") for cell in cells_of("digits/board", load_table("digits/board"))
    }
    assert methods == {name for name in METHODS.names() if METHODS.is_shipped(name)} - {"fedbn", "fedstyle"}


def test_a_result_of_an_edited_method_file_is_named_with_the_command_that_computes_it_again(mine: str) -> None:
    Path("helper.py").write_text("RATE = 1\n")
    Path("near.py").write_text(
        "import fedloom\nimport helper\n\n\nclass Near(fedloom.Method):\n    shares = ('model',)\n"
    )
    Path(mine).write_text(MINE[: MINE.index("rows:")] + "methods: [fedavg, near.py:Near]\n")
    load_table.cache_clear()
    cells = cells_of(mine, load_table(mine))
    trusted_code.allow("near.py:Near")
    plan = StudyPlan(results=Path("reproduction"), trial={"engine.name": "inline"})
    for run in runs_of(cells[:2]):
        run_cells(run, plan)
    (file,) = Path("reproduction/mine").glob("*near*.json")
    stored = json.loads(file.read_text())
    assert set(stored["code"]) == {"fedloom", "helper.py", "near.py"}
    assert "other code" not in board(mine).stdout

    Path("helper.py").write_text("RATE = 2\n")
    again = "fedloom reproduce mine.yaml --at dataset=digits,division=dir --methods near.py:Near --seed 0 --again"
    again += " --trust-code"
    words = "computed by other code than the present: near.py:Near (helper.py changed); to compute again:"
    assert f"{words}\n{again}\n" in board(mine).stdout
    shown = json.loads(board(mine, "--json").stdout)["standings"][0]["methods"]
    assert {one["row"]: one["outdated"] for one in shown} == {"fedavg": [], "near.py:Near": ["helper.py changed"]}
    board(mine, "--page")
    assert again in Path("mine.md").read_text()
    printed = CliRunner().invoke(commands.app, again.split()[1:-2], env={"COLUMNS": "160"})
    assert again in printed.stdout  # `reproduce` without --again shows the stored result, with the same note

    run_cells([cells[1]], replace(plan, again=True))
    assert "other code" not in board(mine).stdout
    del stored["code"]  # a result of fedloom 0.1
    file.write_text(json.dumps(stored))
    assert "other code" not in board(mine).stdout
    METHODS.pop("near")


def test_a_result_of_another_version_is_named(mine: str) -> None:
    cell = cells_of(mine, load_table(mine))[0]
    old = result(cell.key, 0.5, code=fingerprint(cell.values) | {"fedloom": "0.0.9"})
    assert outdated(Line(cell, (old,))) == ["by fedloom 0.0.9"]
    assert outdated(Line(cell, (result(cell.key, 0.5, code={"gone.py": "1"}),))) == []


def test_a_run_that_other_code_began_has_the_code_that_began_it(mine: str) -> None:
    cell = cells_of(mine, load_table(mine))[0]
    plan = StudyPlan(results=Path("reproduction"), trial={"engine.name": "inline"}, deadline=0.0)
    assert run_cells([cell], plan).round == 1
    folder = recipe_of(cell, plan)[0].out
    (folder / "code.json").write_text('{"methods/fedavg.py": "another"}')
    found = run_cells([cell], replace(plan, deadline=None)).result
    assert found.code == {"methods/fedavg.py": "another"}
    assert outdated(Line(cell, (found,))) == ["methods/fedavg.py changed"]


def test_a_method_has_the_files_of_its_bases_losses_and_add_ons() -> None:
    files = fingerprint({"method": {"name": "fedintr+ft"}})
    named = {"fedintr.py", "moon.py", "fedavg.py", "addons/finetune.py"}
    assert {f"methods/{name}" for name in named} | {"losses/layerwise_contrastive.py"} <= set(files)
    assert not {"losses/supcon.py", "losses/__init__.py", "methods/fedper.py"} & set(files)
    assert "methods/fedopt.py" in fingerprint({"method": {"name": "fedadam"}})
    for name in filter(METHODS.is_shipped, METHODS.names()):
        file = Path(inspect.getfile(METHODS.find(name))).relative_to(Path(fedloom.__file__).parent).as_posix()
        assert file in fingerprint({"method": {"name": name}}), name
