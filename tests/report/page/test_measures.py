"""Measures besides accuracy on the page: a table of their statistics, and figures of one measure at a time."""

from io import StringIO

import pytest
from rich.console import Console
from test_page import rows
from written import a_client, evaluated, figures, write_run

from fedloom.report.page.figure import Page
from fedloom.report.page.page import page_of
from fedloom.report.page.runs import entries_of, read_runs
from fedloom.report.table import field_of, figures_table


def statistics(name: str, mean: float, models: str = "personal") -> dict[str, float]:
    values = {"mean": mean, "weighted": mean + 0.01, "std": 0.1, "worst": mean - 0.2, "clients": 2}
    return {field_of(name, which, models): value for which, value in values.items()}


@pytest.fixture
def page(tmp_path) -> Page:
    last = statistics("auc", 0.7) | statistics("loss", 1.5) | statistics("auc", 0.6, "global_mean")
    first = {name: value if name.endswith("_clients") else value + 0.1 for name, value in last.items()}
    history = [evaluated(1, 0.4, **first), evaluated(2, 0.5, **last, validation_personal_auc=0.66)]
    clients = [a_client(0, [3], [4]) | {"metrics": {"auc": 0.9}}, a_client(1, [1], [4]) | {"metrics": {"auc": None}}]
    summary = {"personal_accuracy": 0.5, "personal_weighted": 0.55} | last
    path = write_run(tmp_path / "fedavg", history=history, clients=clients, summary=summary)
    recipe = path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("summary: last", "summary: last\n  measure: auc"))
    return page_of(entries_of(read_runs([tmp_path])), {})


def test_statistics_of_all_measures_stand_beside_each_other(page):
    table = [list(row.values()) for row in rows(page, "measures")]
    assert table == [
        ["fedavg", "clients", "AUC", "0.7000", "0.7100", "0.1000", "0.5000", "2"],
        ["fedavg", "global", "AUC", "0.6000", "0.6100", "0.1000", "0.4000", "2"],
        ["fedavg", "clients", "accuracy %", "50.0", "55.0", "–", "–", "–"],
        ["fedavg", "clients", "loss", "1.5000", "1.5100", "0.1000", "1.3000", "2"],
    ]
    assert page.sections[0].tables[0].rows[0][2].title == "weighted by test samples: 55.0"


def test_the_measure_by_which_a_run_is_judged_is_shown_first(page):
    chosen = {section.name: section.choices for section in page.sections if section.choices}
    names = [("auc", "AUC"), ("accuracy", "accuracy"), ("loss", "loss")]
    assert chosen == {"curves": names, "clients": names}
    drawn = figures(page)
    assert {figure.choice for figure in page.sections[1].figures} == {"auc", "accuracy", "loss", ""}
    assert drawn["curve-clients-auc"].marks[0].y == pytest.approx([0.8, 0.7])
    assert drawn["curve-global-auc"].marks[0].y == pytest.approx([0.7, 0.6])
    assert drawn["curve-validation-auc"].marks[0].y == [0.66]
    assert drawn["curve-clients-loss"].marks[0].bands["clients"][1] == pytest.approx(
        [1.8, 1.6]
    )  # a loss is not cut off at 1
    assert drawn["curve-clients"].marks[0].y == pytest.approx([40, 50])


def test_a_client_without_a_figure_is_left_out_and_high_losses_come_first(page):
    drawn = figures(page)
    assert drawn["clients-0-fedavg-auc"].marks[0].y == [0.9]
    assert drawn["clients-0-fedavg-loss"].marks[0].y == pytest.approx([0.25, 0.25])
    assert "highest loss first" in drawn["clients-0-fedavg-loss"].note


def test_without_further_measures_there_is_nothing_to_choose(tmp_path):
    write_run(tmp_path / "a", history=[evaluated(1, 0.4)], clients=[a_client(0, [3], [4])])
    found = page_of(entries_of(read_runs([tmp_path])), {})
    assert not any(section.choices for section in found.sections)
    assert [table.name for table in found.sections[0].tables] == ["results"]


def test_the_terminals_table_has_accuracy_and_the_figures_in_percent():
    summary = {"method": "fedavg", "personal_accuracy": 0.5, "personal_weighted": 0.6} | statistics("auc", 0.7)
    table = figures_table([summary | {"personal_loss_weighted": 2.25, "personal_loss_clients": 2}])
    assert list(table.columns[0].cells) == ["clients: accuracy", "clients: AUC", "clients: loss"]
    assert list(table.columns[2].cells) == ["60.0", "71.0", "2.25"]
    assert figures_table([{"method": "fedavg", "personal_accuracy": 0.5}]) is None


def test_the_terminals_table_shows_methods_in_80_columns():
    summaries = [{"method": name} | statistics("balanced_accuracy", 0.7) for name in ("fedavg", "repper+logreg")]
    console = Console(width=80, file=StringIO())
    console.print(figures_table(summaries))
    text = console.file.getvalue()
    assert "fedavg" in text and "repper+logreg" in text and "…" not in text
