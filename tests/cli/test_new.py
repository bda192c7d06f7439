"""`fedloom new`: what it writes works at once."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli import commands
from fedloom.core.errors import UserError


def new(*arguments: str) -> str:
    return CliRunner().invoke(commands.app, ["new", *arguments], catch_exceptions=False).stdout


def test_everything_it_writes_is_short_and_passes_the_linter():
    said = new("method", "mine", "--to", "code")
    assert "written: code/mine.py, code/test_mine.py" in said
    assert "run it:  fedloom run --method code/mine.py:Mine" in said
    for kind in ("model", "objective", "dataset"):
        new(kind, f"my_{kind}", "--to", "code")
    assert len([line for line in Path("code/mine.py").read_text().splitlines() if line]) <= 20
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "code"]
    assert subprocess.run(lint, capture_output=True, text=True).returncode == 0


@pytest.mark.slow
def test_the_tests_that_it_writes_pass():
    for kind in ("method", "model", "objective", "dataset"):
        new(kind, f"my_{kind}", "--to", "code")
    # pytest beside pytest: a separate process, as a user would start it
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "code"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "7 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("method", "Mine!"), "use lower-case letters"),
        (("method", "fedavg"), "fedloom has a method of this name"),
        (("method", "there"), "there.py already exists"),
    ],
)
def test_a_name_that_will_not_do_is_refused_and_nothing_is_written(arguments, words):
    Path("there.py").write_text("mine")
    with pytest.raises(UserError, match=words):
        new(*arguments)
    assert [path.name for path in Path().iterdir()] == ["there.py"]
    assert Path("there.py").read_text() == "mine"
