"""What the README shows works as it stands there."""

import re
from pathlib import Path

import fedloom
from fedloom.methods import REGISTRY

README = Path(__file__).parent.parent / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_call_from_python(capsys):
    code = next(block for block in blocks() if "fedloom.run(" in block)
    exec(code.replace("rounds=5", "rounds=1"), {})
    assert "runs/" in capsys.readouterr().out


def test_the_method_in_fifteen_lines(capsys):
    code = next(block for block in blocks() if "class Near" in block)
    try:
        exec(code.replace("rounds=10", "rounds=1"), {"__name__": "readme"})
        assert "near" in capsys.readouterr().out
        method = fedloom.method("near", pull=0.5)
        assert method.keeps == ("personal",)
    finally:
        REGISTRY.pop("near", None)


def test_pictures_and_pages_that_it_links_are_there():
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / link).exists(), link
