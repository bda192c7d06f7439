"""Figures for a paper: the drawn numbers, sizes, and files that do not change."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner
from written import a_client, evaluated, write_run

from fedloom.cli.commands import app
from fedloom.core.errors import UserError
from fedloom.report.paper.drawing import spread_out, style
from fedloom.report.paper.figures import inches

CURVES = {"local": ((0.1, 0.3), (0.2, 0.5)), "fedavg": ((0.4, 0.6), (0.4, 0.9))}


@pytest.fixture(autouse=True)
def _runs():
    for method, seeds in CURVES.items():
        for seed, values in enumerate(seeds):
            write_run(
                Path("runs") / f"{method}-{seed}", method, seed=seed, summary={"seed": seed},
                history=[evaluated(i + 1, value, std=0.1 * (seed + 1)) for i, value in enumerate(values)],
                clients=[a_client(c, [c + seed], [20]) for c in range(10)],
            )  # fmt: skip


def figure(*arguments):
    result = CliRunner().invoke(app, ["figure", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def drawn(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_bands_over_seeds_are_sample_deviations():
    said = figure("curves", "runs", "--to", "a.svg")
    assert "Lines: means over 2 seeds. Bands: ± one sample standard deviation (n − 1) over seeds." in said
    row = next(row for row in drawn("a.csv") if (row["method"], row["round"]) == ("fedavg", "2"))
    std = np.std([0.6, 0.9], ddof=1)
    assert [float(row[n]) for n in ("mean", "low", "high")] == pytest.approx([0.75, 0.75 - std, 0.75 + std])


def test_bands_over_clients_are_means_of_their_deviations():
    assert "Bands: ± one standard deviation over clients." in figure(
        "curves", "runs", "--to", "a.pdf", "--band", "clients"
    )
    row = next(row for row in drawn("a.csv") if (row["method"], row["round"]) == ("fedavg", "2"))
    assert [float(row[n]) for n in ("low", "high")] == pytest.approx([0.75 - 0.15, 0.75 + 0.15])


def test_bands_are_drawn_within_the_values_that_are_possible(monkeypatch):
    from matplotlib.axes import Axes

    edges = []
    monkeypatch.setattr(Axes, "fill_between", lambda self, x, low, high, **_: edges.extend([*low, *high]))
    for seed in range(2):
        write_run(Path(f"wide/{seed}"), seed=seed, summary={"seed": seed}, history=[evaluated(1, 0.1, std=0.3)])
    said = figure("curves", "wide", "--to", "a.pdf", "--band", "clients")
    assert "Bands: ± one standard deviation over clients, cut at 0 %." in said
    assert edges == pytest.approx([0, 40])
    assert float(drawn("a.csv")[0]["low"]) == pytest.approx(-0.2)  # the deviation itself


def test_captions_name_the_measure():
    assert "Accuracy, mean over clients, by round." in figure("curves", "runs", "--to", "a.pdf")
    assert "Worst tenth (accuracy), by round." in figure(
        "curves", "runs", "--to", "a.pdf", "--measure", "personal_worst"
    )
    assert "Training loss, by round." in figure("curves", "runs", "--to", "a.pdf", "--measure", "loss")
    assert "Accuracy of each client. Dots:" in figure("clients", "runs", "--to", "a.pdf")


def test_one_seed_has_no_band():
    assert "Lines: one seed. No bands" in figure("curves", "runs", "--to", "a.pdf", "--seeds", "1")
    assert {row["low"] for row in drawn("a.csv")} == {""}


def test_clients_are_drawn_one_by_one():
    assert "Dots: clients at the last evaluation, of 2 seeds." in figure("clients", "runs", "--to", "a.png")
    rows = drawn("a.csv")
    assert len(rows) == 40
    assert [float(r["value"]) for r in rows if (r["method"], r["seed"]) == ("local", "1")] == [
        (c + 1) / 20 for c in range(10)
    ]


@pytest.mark.parametrize("suffix", ["pdf", "svg", "png"])
def test_the_same_runs_give_the_same_file_without_dates(suffix):
    for name in "ab":
        figure("curves", "runs", "--to", f"{name}.{suffix}")
    data = Path(f"a.{suffix}").read_bytes()
    assert data == Path(f"b.{suffix}").read_bytes()
    assert b"Date" not in data and b"dc:date" not in data


def test_figures_have_the_size_on_paper():
    figure("curves", "runs", "--to", "a.png", "--width", "84mm", "--height", "2in")
    assert Image.open("a.png").size == (int(84 / 25.4 * 300), 600)
    assert inches("--width", "72.27pt") == pytest.approx(1)


def test_more_than_ten_methods_are_distinguishable():
    looks = [(style(i)["color"], style(i)["marker"]) for i in range(110)]
    assert len(set(looks)) == 110
    assert all(style(i)["linestyle"] != style(i + 10)["linestyle"] for i in range(30))  # those of equal colour


def test_labels_are_moved_apart_around_their_lines():
    assert spread_out([5, 5, 9], 2, 0, 10) == pytest.approx([4, 6, 9])
    assert spread_out([9.5, 9.9], 1, 0, 10) == pytest.approx([9, 10])
    assert spread_out([0, 0.1], 1, 0, 10) == pytest.approx([0, 1])
    assert spread_out([1, 3], 1, 0, 10) == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["curves", "runs", "--to", "a.doc"], "--to a.doc: must end in .pdf, .svg, .png, for example --to a.pdf"),
        (["curves", "runs", "--to", "no/a.pdf"], "--to no/a.pdf: cannot be written"),
        (["curves", "runs", "--width", "3.3"], "--width 3.3: must be a length between 1in and 40in with a unit"),
        (["curves", "runs", "--band", "methods"], "--band methods: must be one of seeds, clients, none"),
        (["curves", "runs", "--band", "clients", "--measure", "personal_worst"], "personal_worst is not a mean over"),
        (["curves", "runs", "--measure", "foo"], "measure = 'foo': no run has recorded it"),
        (["clients", "runs", "--measure", "auc"], "measure = 'auc': clients.jsonl has no values of it"),
        (["clients", "runs", "--measure", "foo"], "measure = 'foo': must be a figure of single clients"),
        (["clients", "nowhere"], "'nowhere' holds no run"),
    ],
)
def test_mistakes_name_the_flag_and_the_remedy(arguments, error):
    with pytest.raises(UserError, match=re.escape(error)):
        figure(*arguments)


def test_data_of_another_figure_are_not_replaced():
    figure("curves", "runs", "--to", "a.pdf")
    before = Path("a.csv").read_bytes()
    assert {row["measure"] for row in drawn("a.csv")} == {"personal_accuracy"}
    with pytest.raises(
        UserError, match=r"--to a.svg: 'a.csv' has the data of 'a.pdf'.*--to a-2.svg, or remove 'a.csv'"
    ):
        figure("clients", "runs", "--to", "a.svg")
    assert Path("a.csv").read_bytes() == before and not Path("a.svg").exists()
    figure("curves", "runs", "--to", "a.svg")  # the same data in another format
    figure("clients", "runs", "--to", "b.svg")
    assert {row["measure"] for row in drawn("b.csv")} == {"accuracy"}
