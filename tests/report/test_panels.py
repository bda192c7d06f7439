"""Pictures with several panels: layout, legend and files."""

from pathlib import Path

import pytest

from fedloom.core.errors import UserError
from fedloom.report.paper.panels import Panel, Series, draw

LONG = [float(i) for i in range(40)]


def panel(title: str, *series: Series, **options: bool) -> Panel:
    return Panel(title, "round", "accuracy (%)", series, **options)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_each_label_is_in_the_legend_once(tmp_path: Path, count: int) -> None:
    one = Series("FedAvg", LONG, LONG, [1.0] * 40)
    two = Series("a method with quite a long name", [1, 2], [3, 4], [1, 1], [(2, 5)])
    draw([panel(f"panel {i}", one, two, log=i == 1) for i in range(count)], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for label in ("FedAvg", "a method with quite a long name", "hollow: the paper", "panel 0"):
        assert text.count(f"<!-- {label} -->") == 1


def test_lines_differ_without_colours(tmp_path: Path) -> None:
    lines = [Series(f"m{i}", LONG, [v + i for v in LONG]) for i in range(4)]
    draw([panel("", *lines)], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text.count("stroke-dasharray") >= 3
    draw([panel("", *lines)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        draw([panel("", Series("a", [1, 2], [1, 2]))], tmp_path / "none" / "a.svg")
