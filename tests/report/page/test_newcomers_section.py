"""Newcomers are in the section "Newcomers", and in no figure of the clients."""

import json

import pytest
from written import a_client, evaluated, figures, write_run

from fedloom.report.page.insight import Holdings, Insight
from fedloom.report.page.page import page_of
from fedloom.report.page.runs import entries_of, read_runs


def newcomer_row(label, labelled, mean, seed=0, **run):
    return {"label": label, "seed": seed, "labelled": labelled, "mean": mean, "std": 0.1, "worst": mean / 2} | run


@pytest.fixture
def compared(tmp_path):
    """A comparison of two methods; of its three clients, the last and best one is a newcomer."""
    facts = {
        "classes": ["cat", "dog"], "shape": [1], "mean": [0.0], "std": [1.0], "model": {"name": "mlp"}, "clients": 3,
        "newcomers": [2], "styles": [], "fingerprint": "none",
    }  # fmt: skip
    for number, method in enumerate(("fedavg", "local")):
        clients = [a_client(c, [c + number, c], [10, 10], 50 * (c + 1)) for c in range(3)]
        clients[2] |= {"newcomer": True, "right": [10, 10], "accuracy": 1.0}
        values = {"newcomer_accuracy": 0.9 - number / 2, "newcomer_std": 0.2, "newcomer_global_accuracy": None}
        run = write_run(
            tmp_path / "both" / f"{number:02}", method, history=[evaluated(1, 0.5)], clients=clients,
            summary={"personal_accuracy": 0.5, "personal_std": 0.1, "personal_worst": 0.2} | values,
        )  # fmt: skip
        (run / "task.json").write_text(json.dumps(facts))
    rows = [
        newcomer_row("alone", 10, 0.4), newcomer_row("a name", 0, 0.8, run="00"),
        newcomer_row("a name", 10, 0.6, run="00"),
    ]  # fmt: skip
    (tmp_path / "both" / "newcomers.json").write_text(json.dumps({"newcomers": 1, "head": "logreg", "rows": rows}))
    return tmp_path / "both"


def page_with(folder, held=None):
    entries = entries_of(read_runs([folder]))
    return page_of(entries, {run.path: Insight(held) for e in entries for run in e.runs} if held else {})


def section_of(page, name):
    return next((section for section in page.sections if section.name == name), None)


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_no_figure_of_clients_or_classes_has_a_newcomer(compared):
    held = Holdings("animals", ["cat", "dog"], [[25, 25], [50, 50], [150, 0]], newcomers=[2])
    drawn = figures(page_with(compared, held))
    spread = next(marks for marks in drawn["clients-spread"].marks if marks.name == "fedavg")
    assert spread.x == pytest.approx([0, 10])  # the newcomer has 100%
    assert drawn["class-all"].marks[0].y == pytest.approx([5, 5])
    assert drawn["class-all"].x.labels == ["cat", "dog"]  # 75 samples each, without the newcomer's
    assert {"class-client-0", "class-client-1"} <= drawn.keys() and "class-client-2" not in drawn


def test_the_header_and_the_samples_count_newcomers_separately(compared):
    held = Holdings("animals", ["cat", "dog"], [[25, 25], [50, 50], [150, 0]], newcomers=[2])
    page = page_with(compared, held)
    assert dict(page.facts)["clients"] == "2 + 1 newcomer"
    note = figures(page)["holdings-0"].note
    assert note.startswith("150 training samples of 2 clients (smallest 50, median 75, largest 100)")
    assert "Besides, 150 training samples of 1 newcomer." in note


def test_the_table_of_a_comparison_is_that_of_the_terminal(compared):
    section = section_of(page_with(compared), "newcomers")
    few, with_method = section.tables
    assert [column.name for column in few.columns] == ["representation", "global model as it is", "10 labelled"]
    assert texts(few) == [
        ["none: trained alone", "–", "40.0 (20.0)"],
        ["fedavg", "80.0 (40.0)", "60.0 (30.0)"],  # named as everywhere in the page
    ]
    assert few.groups == ["", "method:fedavg"]  # training alone is shown whichever methods are selected
    assert "classifier (logreg)" in few.note and "1 newcomer" in few.note
    assert texts(with_method) == [["fedavg", "90.0", "20.0"], ["local", "40.0", "20.0"]]
    assert "one update on all its training samples" in with_method.note


def test_a_report_of_one_run_has_only_its_rows_of_the_comparison(compared):
    (with_method,) = section_of(page_with(compared / "01"), "newcomers").tables[1:]
    assert texts(with_method) == [["local", "40.0", "20.0"]]
    (alone, *_) = section_of(page_with(compared / "01"), "newcomers").tables
    assert texts(alone) == [["none: trained alone", "40.0 (20.0)"]]


def test_over_seeds_newcomers_have_a_mean_and_a_deviation(compared):
    again = json.loads((compared / "newcomers.json").read_text())
    again["rows"] += [newcomer_row("a name", 0, 0.9, seed=1, run="02")]
    (compared / "newcomers.json").write_text(json.dumps(again))
    write_run(compared / "02", "fedavg", seed=1, history=[evaluated(1, 0.5)], summary={"personal_accuracy": 0.5})
    few = section_of(page_with(compared), "newcomers").tables[0]
    assert texts(few)[1][1] == "85.0 ± 7.1 (42.5)"  # 80 and 90%: √50
    assert few.note.endswith("±: sample standard deviation over seeds.")


def test_without_newcomers_there_is_no_such_section(tmp_path):
    write_run(tmp_path / "a", history=[evaluated(1, 0.5)], clients=[a_client(0, [1, 1], [2, 2])])
    page = page_with(tmp_path)
    assert section_of(page, "newcomers") is None and "Newcomers" not in section_of(page, "clients").text
