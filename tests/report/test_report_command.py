"""`fedloom report` as a user would try it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from written import a_client, evaluated, write_run

from fedloom.cli.commands import app
from fedloom.core.errors import UserError


@pytest.fixture
def run(tmp_path) -> Path:
    clients = [a_client(0, [3, 1], [4, 4]), a_client(1, [4, 4], [4, 4])]
    return write_run(tmp_path / "run", history=[evaluated(1, 0.5, global_accuracy=0.4)], clients=clients)


def report(*arguments: object):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)


def test_it_writes_a_page_and_pictures_of_the_same_figures(run):
    answer = json.loads(report(run, "--out", "a.html", "--png", "figures", "--json").stdout.splitlines()[-1])
    whole = Path("a.html").read_text()
    data = whole.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    drawn = [figure["name"] for section in json.loads(data)["sections"] for figure in section.get("figures", [])]
    assert answer == {"report": "a.html", "pictures": [f"figures/{name}.png" for name in drawn]}
    assert len(drawn) > 6
    for picture in answer["pictures"]:
        assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_the_run_is_not_touched(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    report(run)
    assert Path("report.html").exists()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_mistakes_name_the_field_and_the_remedy(run):
    with pytest.raises(UserError, match="holds no run"):
        report("nowhere")
    with pytest.raises(UserError, match="--out .*missing.*cannot be written.*for example --out report.html"):
        report(run, "--out", "missing/a.html")
    Path("file").touch()
    with pytest.raises(UserError, match="--png file.*cannot be written.*for example --png figures"):
        report(run, "--png", "file")
