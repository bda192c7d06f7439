"""The tutorial's blocks, in order, in an empty folder: what it shows works."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli import commands

DOCS = Path(__file__).parent.parent / "docs"


def blocks() -> list[tuple[str, str, str]]:
    """Language, file name (or nothing) and text of each fenced block."""
    text = (DOCS / "tutorials" / "first-federation.md").read_text(encoding="utf-8")
    return re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.slow
def test_every_block_works_in_order(monkeypatch):
    names: dict[str, object] = {}
    said = []
    for language, file, text in blocks():
        if file:
            Path(file).write_text(_shorter(text))
        elif language == "python":
            exec(compile(text, "tutorial.md", "exec"), names)
        elif language != "text":
            assert language == "sh"
            for line in text.splitlines():
                program, *arguments = shlex.split(_shorter(line))
                if program == "fedloom":
                    result = CliRunner().invoke(commands.app, arguments, catch_exceptions=False)
                    assert result.exit_code == 0, result.output
                    said.append(result.stdout)
                else:
                    assert program == "pip"
    table = next(text for text in said if "repper+logreg" in text)
    assert [m for m in ("local", "fedavg+ft", "fedcrl") if f"│ {m} " not in table] == []
    assert any("steady" in text and "fedper" in text for text in said)
    assert any("unseen/4/" in text for text in said)  # predictions
    assert Path("shop-3.pt").exists()
    assert any("-fold" in text for text in said)
    for picture in ("shops.png", "runs/pull/sweep.png"):
        assert Path(picture).stat().st_size > 5000


SHORTER = {"rounds: 10": "rounds: 1", "--rounds 10": "--rounds 1", "pull=0,0.1,1,10 --seeds 0,1": "pull=0,1"}


def _shorter(text: str) -> str:
    """Fewer rounds and settings: what is tested is that it works, not how well it learns."""
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text
