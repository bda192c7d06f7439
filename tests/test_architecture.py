"""The way from `fedloom run` to a weight update, as docs/explanation/architecture.md lists it."""

import ast
import re
import sys
from io import StringIO
from pathlib import Path
from statistics import median
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens
from traceback import extract_stack

import pytest

import fedloom
from fedloom import cli
from fedloom.core.optimizers import Optimizer

PACKAGE = Path(fedloom.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
MOST = 20
LONGEST = 350


def frames_at_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """fedloom's frames on the stack at each optimizer step of `fedloom run`, as `folder/file.py function`."""
    seen = []
    step = Optimizer.step

    def watched(*arguments):
        stack = [(Path(frame.filename), frame.name) for frame in extract_stack()]
        ours = [f"{path.relative_to(PACKAGE)} {name}" for path, name in stack if path.is_relative_to(PACKAGE)]
        seen.append([*ours, "core/optimizers.py step"])
        return step(*arguments)

    monkeypatch.setattr(Optimizer, "step", watched)
    words = "run --method fedavg --data digits --clients 3 --rounds 1 --engine inline --set data.limit=60 --out here"
    monkeypatch.setattr(sys, "argv", ["fedloom", *words.split()])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    return seen


def test_a_weight_update_is_at_most_twenty_frames_from_the_command_and_the_page_names_them(monkeypatch):
    seen = frames_at_the_optimizer(monkeypatch)
    assert max(map(len, seen)) <= MOST, seen
    # while the first client's answer is waited for, and as `combine` takes the others' one by one
    ways = {tuple(frames) for frames in seen}
    listed = re.findall(r"^\d+\. `([\w/]+\.py)` `(?:\w+\.)*(\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert tuple(f"{file} {name}" for file, name in listed) in ways


def test_every_package_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert len(packages) == 16
    assert {name for name in packages if f"`{name}`" not in page} == set()
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed"}


def test_the_table_of_packages_names_the_files_that_exist():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    packages = {package for package, _ in rows}
    assert len(packages) == 16
    for package, content in rows:
        inside = {path.stem for path in (PACKAGE / package).iterdir() if not path.name.startswith("__")}
        named = {name.strip("/").removesuffix(".json") for name in re.findall(r"`([^`]+)`", content)}
        gone = {name for name in named - inside - packages if re.fullmatch(r"[a-z_]+", name)}
        assert (package, gone) == (package, set())
        if "one file per paper" in content or package in {"losses", "models", "objectives"}:
            continue  # a file for each method, loss, network and objective
        assert (package, inside - named) == (package, set())


def lines_of_code(path: Path) -> int:
    """Count the lines with code: no blank lines, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    texts = [node for node in texts if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    docs = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    nothing = {COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER}
    tokens = (token for token in generate_tokens(StringIO(source).readline) if token.type not in nothing)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docs)


def test_no_file_has_more_than_350_lines():
    lengths = {str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8").count("\n") for p in PACKAGE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_method_files_are_short():
    lines = {p.name: lines_of_code(p) for p in (PACKAGE / "methods").glob("*.py") if p.name != "__init__.py"}
    assert {name: count for name, count in lines.items() if count > 110} == {}
    assert median(lines.values()) <= 45
