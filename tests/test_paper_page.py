"""The page "Put results into a paper": its commands, in order, in an empty folder."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli import commands

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "paper.md"
SHORTER = {"--rounds 100": "--rounds 2", "--clients 20": "--clients 6", "--out runs": "--model mlp --out runs"}


@pytest.mark.full
@pytest.mark.slow
def test_every_block_works_in_order(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = PAGE.read_text(encoding="utf-8")
    said = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(compile(block, "paper.md", "exec"), said)
        for line in block.splitlines() if language == "sh" else ():
            for long, short in SHORTER.items():
                line = line.replace(long, short)
            result = CliRunner().invoke(commands.app, shlex.split(line)[1:], catch_exceptions=False)
            assert result.exit_code == 0, result.output
            said[line] = " ".join(result.stdout.split())
    assert r"fedavg+ft & $" in Path("results.tex").read_text() and r"\toprule" in Path("results.tex").read_text()
    assert Path("curves.pdf").read_bytes().startswith(b"%PDF") and Path("curves.csv").exists()
    assert Path("results.csv").read_text().startswith("row,column,measure,mean,deviation")
    assert "Best round on test data" in said["fedloom table runs/compared --round best"]
    assert list(said["frame"]["measure"][:2]) == ["personal_accuracy", "personal_worst"]
