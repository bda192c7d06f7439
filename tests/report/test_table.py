"""The table of a comparison: methods in rows, percent, means over seeds."""

from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from fedloom.report.progress import RunProgress, accuracies
from fedloom.report.table import comparison_table, percent


def summary(method: str, accuracy: float, **others: Any) -> dict[str, Any]:
    return {
        "method": method, "personal_accuracy": accuracy, "personal_std": 0.1, "personal_worst": 0.5,
        "global_accuracy": None, "up_bytes": 1_500_000, "seconds": 2.0, **others,
    }  # fmt: skip


def cells(table: Table) -> list[list[Any]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "–"),
        ([None, None], "–"),
        ([0.8734], "87.3"),
        ([0.8, 0.9], "85.0 ± 7.1"),
        ([0.8, None, 0.9], "85.0 ± 7.1"),
        ([0.1, 0.2, 0.3], "20.0 ± 10.0"),
        ([1.0, 1.0], "100.0 ± 0.0"),
        ([0.0], "0.0"),
    ],
)
def test_percent(values: list[float | None], text: str) -> None:
    assert percent(values) == text


def test_percent_without_spread() -> None:
    assert percent([0.8, 0.9], spread=False) == "85.0"


def test_a_row_per_method_in_the_order_of_appearance_with_means_over_seeds() -> None:
    table = comparison_table(
        [
            summary("local", 0.8, personal_std=0.1),
            summary("local", 0.9, personal_std=0.3, personal_worst=0.7, seconds=3.0),
            summary("fedavg", 0.5, global_accuracy=0.75, up_bytes=68_904),
        ]
    )
    assert cells(table) == [
        ["local", "85.0 ± 7.1", "20.0", "60.0", "–", "1.500", "2.5"],
        ["fedavg", "50.0", "10.0", "50.0", "75.0", "0.069", "2.0"],
    ]


def test_the_same_method_with_other_hyperparameters_is_another_row() -> None:
    runs = [summary("fedprox", 0.5, label="fedprox mu=0.1"), summary("fedprox", 0.6, label="fedprox mu=1")]
    assert [row[:2] for row in cells(comparison_table(runs))] == [["fedprox mu=0.1", "50.0"], ["fedprox mu=1", "60.0"]]


def test_accuracies_tell_what_is_known() -> None:
    assert accuracies({}) == ""
    assert accuracies({"loss": 1.23456, "global_accuracy": None}) == "loss 1.235"
    known = {"loss": 0.5, "global_accuracy": 0.512, "personal_accuracy": 0.987}
    assert accuracies(known) == "loss 0.500  global 51.2%  clients 98.7%"


def test_without_a_terminal_progress_is_ten_plain_lines_and_the_first() -> None:
    console = Console(force_terminal=False, width=200)
    progress = RunProgress("fedavg", 100, console)
    with console.capture() as captured:
        for round in range(1, 101):
            progress({"round": round, "loss": 1.0})
        progress.stop()
    lines = captured.get().splitlines()
    assert [line.split()[2] for line in lines] == [f"{n}/100" for n in (1, *range(10, 101, 10))]
    assert all(line.startswith("fedavg  round ") and line.endswith(" s left") for line in lines)
