"""The page's numbers, out of folders whose numbers are known."""

import json

import pytest
from written import a_client, a_round, evaluated, figures, write_run

from fedloom.report.page.classes import kinds_of
from fedloom.report.page.figure import Cell, slug
from fedloom.report.page.insight import Holdings, Insight
from fedloom.report.page.page import as_json, html, page_of
from fedloom.report.page.runs import entries_of, read_runs


@pytest.fixture
def runs(tmp_path):
    """Two methods; fedavg with two seeds, local with a tenth of its clients far behind."""
    for seed, accuracy in ((0, 0.6), (1, 0.8)):
        write_run(
            tmp_path / f"fedavg-{seed}", seed=seed,
            history=[evaluated(1, accuracy - 0.4, global_accuracy=0.3), evaluated(2, accuracy, global_accuracy=0.5)],
            clients=[a_client(0, [3, 0], [4, 0], 100), a_client(1, [0, 1], [0, 4], 10)],
            summary={
                "personal_accuracy": accuracy, "personal_std": 0.1, "personal_worst": 0.2, "global_accuracy": 0.5,
                "up_bytes": 0, "down_bytes": 10**6, "seconds": 3, "failed": {"timed_out": 4}, "notes": ["be careful"],
            },
        )  # fmt: skip
    write_run(
        tmp_path / "local", "local", history=[evaluated(1, 0.5), a_round(2)],
        clients=[a_client(c, [c, 0], [10, 0]) for c in range(10)],
    )  # fmt: skip
    return entries_of(read_runs([tmp_path]))


def rows(page, name="results"):
    table = next(t for s in page.sections for t in s.tables if t.name == name)
    return [{c.name: cell.text for c, cell in zip(table.columns, row, strict=True)} for row in table.rows]


def test_the_table_has_means_and_deviations_over_seeds(runs):
    fedavg, local = rows(page_of(runs, {}))
    assert fedavg["clients %"] == "70.0 ± 10.0"
    assert fedavg["worst tenth %"] == "20.0"  # the same in both: no deviation to tell of
    assert (fedavg["seeds"], fedavg["MB up"], fedavg["MB down"]) == ("2", "0.000", "1.000")
    assert (local["clients %"], local["global %"]) == ("50.0", "–")


def test_curves_are_means_over_seeds_with_the_band_over_clients(runs):
    drawn = figures(page_of(runs, {}))
    line = drawn["curve-clients"].marks[0]
    assert (line.x, line.y) == ([1, 2], pytest.approx([30, 70]))
    assert (line.low, line.high) == (pytest.approx([20, 60]), pytest.approx([40, 80]))
    assert [m.name for m in drawn["curve-global"].marks] == ["fedavg"]  # local has none


def test_bytes_add_up_until_each_evaluation(runs):
    line = figures(page_of(runs, {}))["cost-bytes"].marks[0]
    assert line.x == pytest.approx([3, 6])


def test_the_worst_tenth_stands_out_and_comes_first(runs):
    bars = figures(page_of(runs, {}))["clients-1-local"].marks[0]
    assert bars.y == pytest.approx([10 * c for c in range(10)])
    assert bars.pale == [False] + [True] * 9


def test_head_classes_hold_half_of_a_clients_samples():
    assert kinds_of([5, 30, 0, 10, 15]) == ["tail", "head", "not held", "tail", "tail"]
    assert kinds_of([5, 29, 0, 10, 15]) == ["tail", "head", "not held", "tail", "head"]
    assert kinds_of([0, 0]) == ["not held", "not held"]


def test_head_and_tail_accuracy_by_hand(runs):
    fedavg = runs[:1]
    held = Holdings("nowhere", ["cat", "dog"], [[60, 40], [1, 9]], [])
    page = page_of(fedavg, {run.path: Insight(held) for run in fedavg[0].runs})
    bars = figures(page)["class-head-tail"].marks[0]
    assert (bars.x, bars.y) == ([0, ], pytest.approx([50]))  # client 0: 3 of 4 cats; client 1: 1 of 4 dogs  # fmt: skip
    every = figures(page)["class-all"]
    assert every.marks[0].y == pytest.approx([75, 25])
    dots = figures(page)["holdings-0"].marks[0]
    assert (dots.x, dots.y) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert dots.sizes[0] ** 2 / dots.sizes[1] ** 2 == pytest.approx(60 / 40)


def test_without_data_the_rest_is_shown_and_the_reason_told(runs):
    page = page_of(runs, {run.path: Insight(problem="data.name = 'nowhere'") for e in runs for run in e.runs})
    missing = {section.name: section.missing for section in page.sections if section.missing}
    assert set(missing) == {"classes", "holdings", "representations"}
    assert all("data.name = 'nowhere'" in text for text in missing.values())
    assert "class-all" in figures(page)


def test_failures_and_notes_are_at_the_end(runs):
    page = page_of(runs, {})
    assert [s.name for s in page.sections][-2:] == ["failures", "recipes"]
    assert [row["failure"] for row in rows(page, "failures")] == ["timed out", "timed out"]
    assert "be careful" in page.sections[-2].text
    assert (page.state, page.running) == ("2 of 3 runs finished", True)


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    page = page_of(entries_of(read_runs([write_run(tmp_path / "a", rounds=7)])), {})
    assert (page.title, page.state, figures(page)) == ("fedavg", "round 0 of 7", {})


def test_the_data_cannot_leave_their_element_and_zero_is_a_value(runs):
    runs[0].label = "</script><script>alert(1)</script>"
    whole = html(page_of(runs, {}))
    assert "<script>alert(1)" not in whole
    cells = json.loads(as_json(page_of(runs, {})))["sections"][0]["tables"][0]["rows"][0]
    assert {"text": "0.000", "value": 0} in cells
    assert Cell("–").value is None


def test_names_of_files_are_plain():
    assert slug("clients", "3", "fedprox mu=0.1") == "clients-3-fedprox-mu-0-1"
