"""The page's numbers, out of folders whose numbers are known."""

import json

import pytest
from PIL import Image
from written import a_client, a_round, evaluated, figures, write_run

from fedloom.report.page.classes import kinds_of
from fedloom.report.page.figure import Cell, listed, slug
from fedloom.report.page.insight import Holdings, Insight
from fedloom.report.page.page import as_json, html, page_of
from fedloom.report.page.png import write_pngs
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
    text = "{0.text} {0.spread}".format
    return [{c.name: text(cell).strip() for c, cell in zip(table.columns, row, strict=True)} for row in table.rows]


def test_the_table_has_means_and_deviations_over_seeds(runs):
    fedavg, local = rows(page_of(runs, {}))
    assert fedavg["clients %"] == "70.0 ± 14.1"
    assert fedavg["worst tenth %"] == "20.0"  # the same in both: no deviation to tell of
    assert (fedavg["seeds"], fedavg["MB up"], fedavg["MB down"]) == ("2", "0.000", "1.000")
    assert (local["clients %"], local["global %"]) == ("50.0", "–")


def test_curves_are_means_over_seeds_with_bands_over_seeds_and_over_clients(runs):
    page = page_of(runs, {})
    drawn = figures(page)
    line = drawn["curve-clients"].marks[0]
    assert (line.x, line.y) == ([1, 2], pytest.approx([30, 70]))
    assert line.bands["clients"] == (pytest.approx([20, 60]), pytest.approx([40, 80]))
    deviation = 20 / 2**0.5  # accuracies 0.2 and 0.4, and 0.6 and 0.8, with n − 1
    assert line.bands["seeds"] == (
        pytest.approx([30 - deviation, 70 - deviation]), pytest.approx([30 + deviation, 70 + deviation])
    )  # fmt: skip
    assert page.sections[1].bands[0] == ("seeds", "over seeds")
    assert "seeds" not in drawn["curve-clients"].marks[1].bands  # local has one seed
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
    assert (page.state, page.running) == ("2 of 3 runs finished, 1 stopped", False)


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    page = page_of(entries_of(read_runs([write_run(tmp_path / "a", rounds=7)])), {})
    assert (page.title, page.state, figures(page)) == ("fedavg", "round 0 of 7, stopped", {})


def test_the_data_cannot_leave_their_element_and_zero_is_a_value(runs):
    runs[0].label = "</script><script>alert(1)</script>"
    whole = html(page_of(runs, {}))
    assert "<script>alert(1)" not in whole
    cells = json.loads(as_json(page_of(runs, {})))["sections"][0]["tables"][0]["rows"][0]
    assert {"text": "0.000", "value": 0} in cells
    assert Cell("–").value is None


def test_a_name_that_looks_like_a_placeholder_is_text(runs):
    runs[0].label = "{{plotly}}"
    whole = html(page_of(runs, {}))
    assert '"{{plotly}}"' in whole and whole.count("plotly.js v") == 1


def test_a_run_that_did_not_finish_is_marked_with_its_error_and_the_command_to_resume(runs, tmp_path):
    page = page_of(runs, {})
    assert [row[0].badge for row in page.sections[0].tables[0].rows] == ["", "stopped at round 2 of 2"]
    (tmp_path / "local" / "failed.txt").write_text("UserError: no room\n")
    page = page_of(entries_of(read_runs([tmp_path])), {})
    assert [switch.badge for switch in page.legend] == ["", "failed"]
    (failed,) = rows(page, "unfinished")
    assert (failed["state"], failed["rounds"], failed["error"]) == ("failed", "2 of 2", "UserError: no room")
    assert failed["command to resume"] == f"fedloom resume {tmp_path / 'local'}"


@pytest.fixture
def many(tmp_path):
    """Fourteen methods, of which each next one is better; eight clients with names."""
    for number in range(14):
        right = [number + client for client in range(8)]
        clients = [a_client(c, [right[c]], [30], 10 + c) | {"name": f"clinic {c}"} for c in range(8)]
        summary = {"personal_accuracy": sum(right) / 240, "personal_std": 0.1, "personal_worst": right[0] / 30}
        write_run(
            tmp_path / f"m{number}", {"name": "fedprox", "mu": float(number)}, history=[evaluated(1, sum(right) / 240)],
            clients=clients, summary=summary,
        )  # fmt: skip
    return entries_of(read_runs([tmp_path]))


def test_of_many_methods_the_best_ten_are_selected_and_come_first(many):
    page = page_of(many, {})
    assert [switch.name for switch in page.legend] == [f"fedprox mu={mu}.0" for mu in range(13, -1, -1)]
    assert page.top == [switch.group for switch in page.legend[:10]]
    looks = {(switch.colour, switch.dash, switch.symbol) for switch in page.legend}
    assert len(looks) == 14 and len({switch.colour for switch in page.legend[:10]}) == 10


def test_many_methods_are_a_heat_map_with_the_names_of_clients_and_small_figures(many):
    drawn = figures(page_of(many, {}))
    heat = drawn["clients-heat"]
    assert heat.x.labels == [f"clinic {c}" for c in range(8)]  # the worst first
    assert heat.marks[0].y == pytest.approx([100 * (13 + c) / 30 for c in range(8)])
    assert heat.y.labels[-1] == "fedprox mu=13.0"  # at the top
    panels = [figure for name, figure in drawn.items() if name.startswith("clients-size-")]
    assert len(panels) == 14 and len({(p.x.range, p.y.range) for p in panels}) == 1


def test_clients_of_the_same_size_have_no_figure_by_size(runs):
    assert "clients-size" in figures(page_of(runs, {}))
    assert "clients-size" not in figures(page_of(runs[1:], {}))  # local: 10 samples each


def test_a_line_that_never_changes_does_not_squash_the_others(tmp_path):
    for method, values in {"untrained": (0.1, 0.1, 0.1), "fedavg": (0.7, 0.8, 0.9), "fixed": (0.6, 0.6, 0.6)}.items():
        history = [evaluated(i + 1, 0.5 + i / 10, global_accuracy=value) for i, value in enumerate(values)]
        write_run(tmp_path / method, method, history=history)
    drawn = figures(page_of(entries_of(read_runs([tmp_path])), {}))
    assert [marks.name for marks in drawn["curve-global"].marks] == ["fedavg", "fixed"]  # 60% is near 70 to 90%
    assert drawn["curve-global"].note.endswith("Not drawn: untrained, always at 10.0%.")


def test_pictures_of_many_methods_show_those_that_are_selected_first(many, tmp_path):
    page = page_of(many, {})
    names = ("clients-spread", "clients-heat")
    for section in page.sections:
        section.figures = [figure for figure in section.figures if figure.name in names]
    whole, page.top = page.top, []
    everything = [Image.open(path).size for path in write_pngs(page, tmp_path / "all")]
    page.top = whole
    pictures = write_pngs(page, tmp_path / "top")
    assert [path.name for path in pictures] == [f"{name}.png" for name in names]
    assert [Image.open(path).size for path in pictures] == everything
    assert [path.read_bytes() for path in pictures] != [(tmp_path / "all" / p.name).read_bytes() for p in pictures]


def test_what_differs_significantly_from_the_best_is_marked(many):
    table = page_of(many, {}).sections[0].tables[0]
    cells = [row[2] for row in table.rows]
    assert [cell.strong for cell in cells] == [True] + [False] * 13
    # eight clients that are all worse: p = 2 / 2⁸, times 13 comparisons by Holm's correction: 0.1
    assert {cell.mark for cell in cells} == {""} and "With 8 pairs, no p below 0.1 is possible." in table.note
    few = page_of(many[8:], {}).sections[0].tables[0]
    assert [row[2].mark for row in few.rows] == ["*"] * 5 + [""]  # 5 comparisons: 5 · 2 / 2⁸ = 0.039
    assert few.rows[0][2].title == "p = 0.039 against the best, over 8 clients"
    assert "* differs from the best: p < 0.05, two-sided Wilcoxon signed-rank test over 8 clients, Holm" in few.note
    assert "correction for 5 comparisons." in few.note


def test_seeds_are_tested_from_six_on(tmp_path):
    for seed in range(6):
        for method, accuracy in (("fedavg", 0.8), ("local", 0.7)):
            summary = {"personal_accuracy": accuracy + seed / 100}
            write_run(tmp_path / f"{method}{seed}", method, seed=seed, history=[evaluated(1, 0.5)], summary=summary)
    entries = entries_of(read_runs([tmp_path]))
    assert [row[2].mark for row in page_of(entries, {}).sections[0].tables[0].rows] == ["", "†"]  # 2 / 2⁶ = 0.031
    for entry in entries:
        entry.runs.pop()
    table = page_of(entries, {}).sections[0].tables[0]
    assert [row[2].mark for row in table.rows] == ["", ""] and "at least 6 seeds" in table.note


def test_captions_name_a_few_methods():
    assert listed(["a", "b"], last=" and ") == "a and b"
    assert listed(["a", "b", "c", "d"]) == "a, b, c, d"
    assert listed([str(n) for n in range(26)]) == "0, 1, 2 and 23 more"


def test_names_of_files_are_plain():
    assert slug("clients", "3", "fedprox mu=0.1") == "clients-3-fedprox-mu-0-1"
