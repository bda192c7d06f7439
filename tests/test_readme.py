"""What the README shows works as it stands there."""

import json
import re
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli import commands

README = Path(__file__).parent.parent / "README.md"
DOCS = README.parent / "docs"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_call_from_python(capsys):
    code = next(block for block in blocks() if "fedloom.run(" in block)
    exec(code.replace("rounds=100", "rounds=1"), {})
    assert "runs/" in capsys.readouterr().out


def test_the_method_in_fifteen_lines_as_a_script(capsys):
    code = next(block for block in blocks() if "class Near" in block)
    Path("near.py").write_text(code.replace("rounds=100", "rounds=1"))
    runpy.run_path("near.py", run_name="__main__")
    assert "near" in capsys.readouterr().out


@pytest.mark.slow
def test_snippets_print_the_figures_beside_them(capsys):
    """Within one point, because other versions of torch may round differently."""
    text = README.read_text(encoding="utf-8")
    exec(next(block for block in blocks() if "fedloom.run(" in block), {})
    shown = float(re.search(r"run.folder\)  # (0\.\d+)", text)[1])
    assert float(capsys.readouterr().out.split()[0]) == pytest.approx(shown, abs=0.01)
    Path("near.py").write_text(next(block for block in blocks() if "class Near" in block))
    runpy.run_path("near.py", run_name="__main__")
    printed = dict(re.findall(r"^│ (\S+) +│ +([\d.]+) │", capsys.readouterr().out, flags=re.MULTILINE))
    table = text.partition("It prints (here without seconds)")[2].partition("```text\n")[2].partition("```")[0]
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [row[0] for row in rows] == list(printed)
    for name, clients, *_ in rows:
        assert float(printed[name]) == pytest.approx(float(clients), abs=1), name


def test_pictures_and_pages_that_it_links_are_there():
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / link).exists(), link


def test_the_papers_figures_and_ours_are_those_that_are_stored():
    """The command shows what is stored; nothing is run, since there is no CIFAR-10."""
    section = README.read_text(encoding="utf-8").partition("## The papers, run")[2].partition("\n## ")[0]
    rows = re.findall(r"\| ([\d., ]+) \| ([\d., ]+) \| `(.+)` \|", section)
    assert len(rows) >= 5
    for paper, here, command in rows:
        said = CliRunner(env={"FEDLOOM_DATA": "nowhere"}).invoke(
            commands.app, ["reproduce", *command.split(), "--json"]
        )
        assert said.exception is None, said.output
        cells = [cell for cell in json.loads(said.stdout.splitlines()[-1])["cells"] if "what" not in cell["column"]]
        shown = [", ".join(f"{cell[key]:.2f}" for cell in cells) for key in ("paper", "here")]
        assert shown == [paper, here], command


def test_what_agrees_with_the_papers_is_what_the_report_counts():
    section = README.read_text(encoding="utf-8").partition("## The papers, run")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \w+ \| \d+ \| .+\|$", section, flags=re.MULTILINE)
    assert len(rows) == 6
    report = (DOCS / "reproduction.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row not in report] == [], "copy the summary's table from docs/reproduction.md"


@pytest.mark.parametrize(("page", "least"), [("reference/promises.md", 40), ("explanation/trust.md", 15)])
def test_tests_that_a_page_names_are_there(page, least):
    text = (DOCS / page).read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in README.parent.glob("tests/**/test_*.py"))
    names = re.findall(r"`(\w+)…`", text)
    files = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", text)
    assert len(names) > least
    assert [name for name in names if f"def test_{name}" not in code] == []
    assert [path for path in files if not (README.parent / path).exists()] == []
