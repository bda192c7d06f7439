"""What tests of the command line have in common: calling it, being refused by it, digits as picture files."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner, Result

from fedloom import cli
from fedloom.cli import commands

DIGITS = load_digits()
PIXELS = np.rint(DIGITS.images * (255 / 16)).astype(np.uint8)


def invoke(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(commands.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code
    return result


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Goes through `main`, as the command does; returns the one message of a command that must end in 2."""
    monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    message = re.sub(r"\Afedloom \S+: loading\n", "", said.err)
    assert message.startswith("error: ")
    assert message.count("error: ") == 1
    return message


def last_line(result: Result) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


def write_pictures(folder: Path, counts: dict[int, int], start: int = 0, size: int = 8) -> Path:
    """Digits as picture files, in a folder for each class."""
    for digit, count in counts.items():
        (folder / f"digit {digit}").mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(DIGITS.target == digit)[start : start + count]:
            picture = Image.fromarray(PIXELS[number]).resize((size, size), Image.Resampling.NEAREST)
            picture.save(folder / f"digit {digit}" / f"{number}.png")
    return folder
