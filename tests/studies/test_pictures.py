"""Pictures of the papers' figures: what they show of the stored results, and what they say is missing."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli import commands
from fedloom.config.recipe import Recipe
from fedloom.core.checking import checked
from fedloom.core.errors import UserError
from fedloom.studies import pictures, report, results
from fedloom.studies.comparison import Line
from fedloom.studies.cost import message_bytes
from fedloom.studies.outcome import result_of
from fedloom.studies.pictures import caption, lacks, panels_of, pictures_of, write_pictures
from fedloom.studies.results import CellResult, store
from fedloom.studies.schema import Picture, Table
from fedloom.studies.table import Cell, cells_of, load_table, table_names

ROOT = Path(__file__).parents[2]


def result(cell: Cell, seed: int = 0, scale: float = 1.0, **values: object) -> CellResult:
    curve = {cell.measure: [(10, 0.5 * scale), (20, 0.7 * scale)], "loss": [(1, 2.0), (2, 1.5)]}
    made = CellResult(of=cell.key, seed=seed, rounds=cell.rounds, figures={cell.measure: 0.7 * scale}, curve=curve)
    return replace(made, **values)


def lines_of(table: str, *seeds: int, **at: object) -> list[Line]:
    """Lines of a table with results in the columns at these values, one per seed; later seeds are 10% higher."""
    return [
        Line(
            cell,
            tuple(
                result(cell, seed, 1 + seed / 10)
                for seed in seeds
                if all(cell.column.at.get(axis) == value for axis, value in at.items())
            ),
        )
        for cell in cells_of(table, load_table(table))
    ]


def picture(table: str) -> Picture:
    (found,) = pictures_of(table, load_table(table))
    return found


def test_curves_have_a_panel_per_column_and_metric_and_a_line_per_method() -> None:
    panels = panels_of(picture("fedcrl/fig3"), lines_of("fedcrl/fig3", 0))
    assert [(panel.title, panel.y) for panel in panels] == [
        ("practical", "accuracy of personal models (%)"), ("practical", "training loss"),
        ("pathological", "accuracy of personal models (%)"), ("pathological", "training loss"),
    ]  # fmt: skip
    assert [series.label for series in panels[0].series] == ["FedAvg", "FedRep", "FedPer", "FedProto", "FedCRL"]
    assert panels[0].series[0].x == [10, 20]
    assert panels[0].series[0].y == [50, 70]
    assert panels[1].series[0].y == [2.0, 1.5]


def test_lines_are_means_over_seeds_with_sample_deviations_and_the_papers_figure_is_at_the_end() -> None:
    (panel,) = panels_of(picture("fedintr/table3"), lines_of("fedintr/table3", 0, 1, dataset="cifar10", beta=0.5))
    first = panel.series[0]
    assert first.y == pytest.approx([52.5, 73.5])
    assert first.spread == pytest.approx([5 / 2**0.5, 7 / 2**0.5])
    assert first.published == [(20, 65.82)]


def test_final_figures_along_an_axis_need_two_of_its_values() -> None:
    one = lines_of("fedintr/fig5", 0, E=10)
    assert panels_of(picture("fedintr/fig5"), one) == []
    assert lacks(picture("fedintr/fig5"), one) == "only E = 10 was run"
    two = [Line(line.cell, line.results or (result(line.cell),) * (line.cell.column.at["E"] == 1)) for line in one]
    (panel,) = panels_of(picture("fedintr/fig5"), two)
    assert panel.x == "local epochs E"
    assert panel.series[0].x == [1, 10]
    assert panel.series[0].published == [(10, 65.82)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"at": {"dataste": "cifar10"}}, "pictures.p: the axis 'dataste' is not defined in axes"),
        ({"kind": "axis"}, "pictures.p.axis: must be given for kind axis, and only for it"),
    ],
)
def test_mistakes_in_a_picture_are_named(wrong: dict, words: str) -> None:
    values = load_table("fedcrc/fig3").model_dump()
    with pytest.raises(UserError, match=words):
        checked(Table, values | {"pictures": [{"name": "p", "title": "P"} | wrong]})


@pytest.mark.parametrize("table", [name for name in table_names() if load_table(name).pictures])
def test_rows_of_a_table_with_pictures_have_different_names_and_pictures_select_columns(table: str) -> None:
    names = [row.name for row in load_table(table).rows.values()]
    assert len(set(names)) == len(names)
    for one in load_table(table).pictures:
        assert any(all(c.at.get(axis) == v for axis, v in one.at.items()) for c in load_table(table).columns)


def test_a_board_that_ranks_by_the_best_round_has_curves_without_published_figures() -> None:
    cells = [cell for cell in cells_of("pfllib/board", load_table("pfllib/board")) if cell.row == "fedavg"]
    curve = {"personal_weighted": [(10, 0.5), (2000, 0.7)]}
    lines = [Line(cell, (result(cell, curve=curve),)) for cell in cells]
    panels = panels_of(picture("pfllib/board"), lines)
    assert [panel.y for panel in panels] == ["accuracy over all test samples (%)"] * 4
    assert [(series.y, series.published) for series in panels[0].series] == [([50, 70], [])]
    assert pictures_of("boards/mine.yaml", load_table("pfllib/board"))[0].name == "boards-mine"
    without = [Line(line.cell, (replace(line.results[0], curve={}),)) for line in lines]
    assert lacks(picture("pfllib/board"), without) == "the stored results have no such curves"


def test_columns_can_be_the_lines() -> None:
    panels = panels_of(picture("fedcrc/fig1"), lines_of("fedcrc/fig1", 0))
    assert [panel.title for panel in panels] == ["Output layer only", "Whole network"]
    assert [series.label for series in panels[0].series] == ["iid", "non-iid"]
    assert panels[0].series[0].y == [0.5, 0.7], "a distance is not a percentage"


def test_bytes_are_those_of_all_rounds_so_far_and_methods_without_messages_are_left_out() -> None:
    costs = {"local": 0, "fedproto": 1e5}
    found = [
        Line(
            line.cell,
            tuple(
                replace(r, curve={"personal_accuracy": [(10, 0.5), (20, 0.6)]},
                        costs={"up_bytes": costs[line.cell.row], "down_bytes": costs[line.cell.row]})
                for r in line.results if line.cell.row in costs
            ),
        )
        for line in lines_of("fedcrl/table2", 0)
    ]  # fmt: skip
    (panel,) = panels_of(picture("fedcrl/table2"), found)
    (series,) = panel.series
    assert panel.log
    assert (series.label, series.x, series.y) == ("FedProto", [2, 4], [50, 60])


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedcrl", "local"])
def test_counted_bytes_are_those_of_a_run(tmp_path: Path, method: str) -> None:
    recipe = Recipe.parse({"method": method, "data": {"name": "digits", "clients": 3}, "training": {"rounds": 1}})
    run = fedloom.run(recipe, out=tmp_path / "run")
    assert message_bytes(recipe) == (run["up_bytes"], run["down_bytes"])


def test_a_caption_says_how_many_seeds_and_what_was_shortened() -> None:
    lines = lines_of("fedcrc/fig1", 0, 1)
    short = [Line(line.cell, tuple(replace(r, changes={"data.limit": 6000}) for r in line.results)) for line in lines]
    assert caption(picture("fedcrc/fig1"), short) == (
        "**FedCRC, Fig. 1: distance between two clients' predictors.** 2 seeds. Bands and bars: ± one sample standard "
        "deviation over seeds. Shortened: Output layer only, Whole network (data.limit 6000)."
    )


def test_pictures_are_small_files_without_dates_and_the_rest_is_named(tmp_path: Path) -> None:
    tables = {name: load_table(name) for name in ("fedintr/fig5", "fedcrc/fig3")}
    lines = lines_of("fedintr/fig5", 0, 1)
    written, lacking = write_pictures(tables, lines, tmp_path / "one")
    write_pictures(tables, lines, tmp_path / "two")
    assert [path.name for path in written] == ["fedintr-fig5.svg"]
    assert lacking == ["FedCRC, Fig. 3: convergence: not run yet (fedloom reproduce fedcrc/fig3)"]
    assert written[0].read_bytes() == (tmp_path / "two" / "fedintr-fig5.svg").read_bytes()
    assert written[0].stat().st_size < 100_000
    text = written[0].read_text()
    ElementTree.fromstring(text)
    for words in ("local epochs E", "accuracy of the global model (%)", "FedIntR", "hollow: the paper"):
        assert f"<!-- {words} -->" in text


@pytest.mark.usefixtures("no_results")
def test_the_command_draws_stored_results_of_a_folder(tmp_path: Path) -> None:
    for cell in cells_of("fedcrc/fig3", load_table("fedcrc/fig3")):
        store(result(cell), tmp_path / "mine" / "fedcrc" / f"{cell.key}.json")
    ask = ["reproduce", "fedcrc", "--figures", "--results", str(tmp_path / "mine"), "--to", str(tmp_path / "rep.md")]
    said = CliRunner().invoke(commands.app, ask, env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert (tmp_path / "rep/figures/fedcrc-fig3.svg").exists()
    assert "not drawn: FedCRC, Fig. 1" in said.output


def test_a_finished_run_stores_the_curves_of_accuracy_and_loss_and_its_bytes(tmp_path: Path) -> None:
    fields = {"data": "digits", "clients": 2, "rounds": 3, "model": "mlp"}
    fedloom.run(method="fedavg", out=tmp_path / "run", **fields)
    recipe = Recipe.parse({"method": "fedavg", "data": {"name": "digits"}, "training": {"rounds": 3}})
    cell = next(c for c in cells_of("fedcrl/fig3", load_table("fedcrl/fig3")))
    found = result_of(tmp_path / "run", [cell], recipe, {})
    assert {"personal_accuracy", "global_accuracy", "loss"} <= set(found.curve)
    assert len(found.curve["loss"]) == 3
    assert found.costs["up_bytes"] > 0
    store(replace(found, versions={}), tmp_path / "one.json")  # versions list the files that other tests imported
    assert (tmp_path / "one.json").stat().st_size < 5_000


def test_every_picture_in_the_pages_is_a_file_and_every_file_is_in_a_page() -> None:
    pages = report.report(results.SHIPPED, ROOT / "docs" / "reproduction.md")
    folder = ROOT / "docs" / "reproduction" / pictures.FOLDER
    shown = [name for text in pages.values() for name in re.findall(r"!\[[^]]*\]\(figures/([^)]*)\)", text)]
    assert sorted(shown) == sorted(path.name for path in folder.iterdir())
    assert len(shown) >= 6
