"""The examples of CONTRIBUTING.md, added to a copy of the repository, work and pass their tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def examples() -> dict[str, str]:
    """Code blocks of CONTRIBUTING.md by their file names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```python (\S+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.slow
def test_examples_work_in_a_copy(tmp_path):
    copy = tmp_path / "copy"
    without = shutil.ignore_patterns("__pycache__")
    for folder in ("fedloom", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for path, text in examples().items():
        assert not (copy / path).exists(), path
        (copy / path).write_text(text, encoding="utf-8")
    written = [path for path in examples() if path.startswith("fedloom/")]
    tests = [path for path in examples() if path.startswith("tests/")]
    assert (len(written), len(tests)) == (5, 5)

    def run(*command: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr

    every_method = ["tests/methods/test_every_method.py", "tests/engines/test_engines_agree.py", "-k", "feddecorr"]
    run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests)
    run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *every_method)
    run(sys.executable, "-m", "fedloom.cli.catalogue")
    run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/data/test_missing_data.py")
    run(sys.executable, "-m", "ruff", "check", *examples())
    run(sys.executable, "-m", "ruff", "format", "--check", *examples())
