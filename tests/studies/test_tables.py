"""The papers' tables: every cell is a valid recipe, and settings and figures are the papers'."""

import pytest

from fedloom.config.recipe import Recipe
from fedloom.core.checking import checked
from fedloom.core.errors import UserError
from fedloom.core.training import schedule_factor
from fedloom.methods import get
from fedloom.models import Factory
from fedloom.models.projected import Tapped
from fedloom.studies.comparison import Line, setting_in_words
from fedloom.studies.cost import image_steps, passes
from fedloom.studies.plan import runs_of
from fedloom.studies.results import CellResult
from fedloom.studies.schema import Table
from fedloom.studies.table import PAPERS, Cell, cells_of, load_table, table_names


def cell(table: str, row: str, **at: str | float) -> Cell:
    (found,) = (c for c in cells_of(table, load_table(table)) if c.row == row and c.column.at == at)
    return found


def cells(*tables: str) -> list[Cell]:
    return [cell for table in tables for cell in cells_of(table, load_table(table))]


def each_value_once(runs: list[list[Cell]]) -> list[list[Cell]]:
    """Runs with a row or a value of an axis that none before them has."""
    seen: set[object] = set()
    found = []
    for run in runs:
        new = {run[0].row, *run[0].column.at.items()} - seen
        if new:
            seen |= new
            found.append(run)
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", table_names())
def test_every_cell_is_a_recipe_whose_cost_is_known(name: str, every: bool) -> None:
    table = load_table(name)
    runs = runs_of(cells_of(name, table))
    for run in runs if every else each_value_once(runs):
        assert image_steps(run[0].recipe()) > 0
        assert run[0].recipe(table.reduced).training.rounds <= run[0].rounds


@pytest.mark.parametrize("name", table_names())
def test_figures_are_accuracies_or_spreads(name: str) -> None:
    for cell in cells(name):
        assert cell.printed is None or 0 < cell.printed < 100


@pytest.mark.parametrize(
    ("table", "row", "at", "printed"),
    [
        ("fedintr/table1", "fedcka", {"dataset": "cifar100", "beta": 0.5}, 41.91),
        ("fedintr/table3", "fedintr", {"dataset": "cifar10", "beta": 0.1}, 58.32),
        ("fedintr/table4", "moon-mu10", {"dataset": "cifar10", "N": 100, "T": 500}, 61.68),
        ("fedcrc/table1", "fedper", {"dataset": "cifar10", "beta": 0.1}, 12.57),
        ("fedcrc/table1", "fedcrc-per", {"dataset": "mnist", "beta": "iid"}, 99.06),
        ("fedcrc/table2", "fedcrc", {"dataset": "cifar10", "beta": 0.1}, 60.43),
        ("fedcrl/table2", "fedcrl", {"dataset": "cifar10", "kind": "practical"}, 91.28),
        (
            "fedcrl/table2",
            "fedala",
            {"dataset": "cifar100", "kind": "pathological", "classes": 20, "what": "std"},
            5.20,
        ),
        ("fedcrl/table3", "fedrep", {"dataset": "cifar10", "kind": "practical", "N": 20, "beta": 0.01}, 99.18),
        ("repper/table1", "repper", {"dataset": "cifar10", "C": 0.8, "alpha": 1, "E": 20}, 87.73),
        ("repper/table2", "lgfedavg", {"dataset": "cifar10", "C": 0.2, "alpha": 0.5, "E": 10}, 73.62),
        ("repper/table3", "fedrep", {"dataset": "cifar10", "head": "svm"}, 70.71),
        ("repper/table4", "fedavg", {"dataset": "cifar100", "model": "mobilenet"}, 33.36),
    ],
)
def test_figures_read_in_the_papers_a_second_time(table: str, row: str, at: dict, printed: float) -> None:
    assert cell(table, row, **at).printed == printed


def test_figures_printed_as_shares_are_percents_here() -> None:
    at = {"data": "digits", "objective": "simsiam", "judged": "personalisation", "style": "svhn"}
    found = cell("fedstyle/table1-simsiam", "fedstyle", **at)
    assert (found.printed, found.measure) == (91.3, "personal_styles.svhn")
    at = {"data": "adaptiope", "objective": "simclr", "judged": "generalisation", "style": "product_images"}
    assert cell("fedstyle/table2-simclr", "fedstyle", **at, classes="heterogeneous-0.8").printed == 71.4


def test_settings_are_the_papers() -> None:
    fedintr = cell("fedintr/table3", "moon", dataset="cifar10", beta=0.5).recipe()
    assert (fedintr.training.batch_size, fedintr.training.epochs, fedintr.evaluation.summary) == (512, 10, "median:10")
    assert (fedintr.data.partition, fedintr.method.options["mu"]) == ("dirichlet:0.5", 5)
    fedcrc = cell("fedcrc/table2", "fedcrc", dataset="cifar10", beta=0.1).recipe()
    assert [fedcrc.training.lr(round) for round in (1, 49, 50, 75)] == pytest.approx([0.05, 0.05, 0.01, 0.001])
    assert (fedcrc.data.newcomers, fedcrc.training.fraction, fedcrc.data.split) == (40, 0.1, "pooled:0.8")
    fedcrl = cell("fedcrl/table2", "fedcrl", dataset="cifar100", kind="pathological", classes=20).recipe()
    assert (fedcrl.data.partition, fedcrl.training.optimizer.lr) == ("uneven-pathological:20", 0.003)
    repper = cell("repper/table2", "repper", dataset="cifar10", C=0.2, alpha=0.5, E=10).recipe()
    assert (repper.model.name, repper.training.batch_size, repper.training.fraction) == ("resnet34", 256, 0.2)


def test_fedintrs_heads_on_resnet20_are_those_of_the_authors_code() -> None:
    """There, each hidden layer has 256 units; one as wide as the first layer would have 268 million weights."""
    options = cell("fedintr/table3", "fedintr-code", dataset="cifar100", beta=0.5).recipe().method.options
    method = get("fedintr", **options)
    model = Tapped(Factory("resnet20")((3, 32, 32), 100), (), (3, 32, 32), method.width, hidden=method.hidden)
    assert [[head[0].out_features, head[2].out_features] for head in model.projections] == [[256, 256]] * 4
    assert (method.references, method.similarity) == ("train", "batch")


def test_fedcrls_readings_of_eq_7_and_8_have_a_row_each() -> None:
    at = {"dataset": "cifar10", "kind": "practical", "rounds": 200}
    rows = ("fedcrl-mean", "fedcrl-sum", "fedcrl-mixed", "fedcrl-sum-mixed")
    methods = [get("fedcrl", **cell("fedcrl/table2-inferred", row, **at).recipe().method.options) for row in rows]
    pairs = [(method.reg_over, method.judged) for method in methods]
    assert pairs == [("mean", "trained"), ("sum", "trained"), ("mean", "mixed"), ("sum", "mixed")]
    dropped = cell("fedcrl/table2-inferred", "fedcrl-dropped", **at).recipe()
    assert (dropped.faults.lost, dropped.faults.drop) == (0.3, 0)  # PFLlib's client_drop_rate: they train


def test_rows_and_tables_share_runs() -> None:
    assert {len(run) for run in runs_of(cells("fedcrc/table1"))} == {1, 2}  # FedCRC's two models are of one run
    assert len(runs_of(cells("fedintr/table4"))) == 16  # 72 figures at several rounds
    assert {c.key for c in cells("fedintr/table5") if c.row == "fedintr"} <= {c.key for c in cells("fedintr/table1")}
    one, two = {c.key for c in cells("repper/table1")}, {c.key for c in cells("repper/table2")}
    assert len(one & two) == 8  # CIFAR-10 with C = 0.2 and E = 10, two degrees, four methods


def test_the_first_to_run_are_those_that_the_issue_names() -> None:
    first = [c for name in table_names() for c in cells(name) if c.first]
    runs = {paper: len(runs_of(c for c in first if c.paper == paper)) for paper in PAPERS}
    assert runs == {"fedintr": 10, "fedcrc": 18, "fedcrl": 6, "repper": 2, "fedstyle": 2}


def test_fewer_rounds_bring_the_steps_of_the_schedule_forward() -> None:
    recipe = cell("fedcrc/table1", "fedavg", dataset="cifar10", beta=0.5).recipe({"training.rounds": 10})
    assert [schedule_factor(recipe.training.schedule, round, 10) for round in (4, 5, 8)] == [1.0, 0.2, 0.02]


def test_a_table_with_a_figure_too_few_is_refused() -> None:
    rows = {"fedavg": {"name": "FedAvg", "method": "fedavg", "figures": [1.0]}}
    columns = [{"at": {"beta": 1}}, {"at": {"beta": 2}}]
    table = {"title": "t", "setting": "s", "axes": {"beta": "data.partition=dirichlet:{}"}, "columns": columns}
    with pytest.raises(UserError, match=r"rows\.fedavg\.figures: 1 values for 2 columns"):
        checked(Table, table | {"rows": rows})
    with pytest.raises(UserError, match="the axis 'alpha' is not defined in axes"):
        checked(Table, table | {"rows": rows, "columns": [{"at": {"alpha": 1}}]})


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(UserError, match="table 'repper/tabel2' is unknown: did you mean 'repper/table2'"):
        load_table("repper/tabel2")


@pytest.mark.parametrize(
    ("method", "epochs", "passed"),
    [
        ("fedavg", 1, (1, 1)), ("fedavg", 5, (5, 5)), ("fedcrl", 1, (2, 1)), ("fedcrc", 1, (3, 1)),
        ("repper", 2, (4, 4)), ("ditto", 1, (2, 2)), ("moon", 3, (9, 3)), ("pfedme", 1, (5, 5)),
    ],
)  # fmt: skip
def test_passes_over_a_clients_images_are_those_that_the_method_makes(method, epochs, passed):
    assert passes(Recipe.parse({"method": method, "training": {"epochs": epochs}})) == passed


def test_rows_of_another_table_come_with_its_figures_at_the_same_places() -> None:
    again = {(c.row, c.place): c for c in cells("fedcrl/table2-sgd")}
    there = {(c.row, c.place): c for c in cells("fedcrl/table2") if (c.row, c.place) in again}
    assert len(again) == len(there) == 32
    assert {key: c.printed for key, c in again.items()} == {key: c.printed for key, c in there.items()}
    assert all(c.recipe().training.optimizer.name == "sgd" for c in again.values())


@pytest.mark.parametrize(
    ("table", "row", "words"),
    [
        ("fedcrl/table2", "fedavg", "the paper's"),
        ("fedcrl/table2-sgd", "fedavg", "ours"),  # the table's setting is another
        ("repper/table2", "repper", "the paper's"),
        ("repper/table2", "repper-large-stem", "ours"),  # the row is not in the paper
    ],
)
def test_what_is_not_the_papers_setting_does_not_pass_for_it(table: str, row: str, words: str) -> None:
    one = next(c for c in cells(table) if c.row == row)
    whole = CellResult(one.key, seed=0, rounds=one.rounds, figures={})
    half = CellResult(one.key, seed=0, rounds=one.rounds // 2, figures={}, changes={"training.rounds": one.rounds // 2})
    assert setting_in_words(Line(one, (whole,))) == words
    assert setting_in_words(Line(one)) == ("ours, not run yet" if words == "ours" else "not run yet")
    short = f"{one.rounds // 2} of {one.rounds} rounds"
    assert setting_in_words(Line(one, (half,))) == (f"ours, {short}" if words == "ours" else short)


def test_a_table_again_is_in_a_setting_of_ours() -> None:
    tables = {name: load_table(name) for name in table_names()}
    ours = {name for name, table in tables.items() if table.ours}
    assert ours == {name for name, table in tables.items() if ", variant: " in table.title}
