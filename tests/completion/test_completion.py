"""Tab: what a shell is offered, and that it need not wait for torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from fedloom import cli, methods
from fedloom.completion import outline
from fedloom.completion.offers import matching
from fedloom.engines import ENGINES
from fedloom.models import models


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def kept():
    outline.keep(get_command(cli.app))


def offered(capsys, monkeypatch, line):
    """What bash gets for the last word of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_FEDLOOM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert outline.asked() and outline.answered()
    return capsys.readouterr().out.split()


@pytest.mark.usefixtures("kept")
def test_names_are_completed_as_they_are_registered(capsys, monkeypatch):
    def tab(line):
        return offered(capsys, monkeypatch, line)

    assert {"run", "sweep", "compare", "new", "data"} <= set(tab("fedloom "))
    assert tab("fedloom run --method fedp") == sorted(name for name in methods.REGISTRY if name.startswith("fedp"))
    assert tab("fedloom methods scaf") == ["scaffold"]
    assert tab("fedloom compare --methods local,fedavg,fedpro") == ["local,fedavg,fedproto", "local,fedavg,fedprox"]
    assert set(tab("fedloom run --model ")) == set(models())
    assert set(tab("fedloom run --engine ")) == {"auto", *ENGINES}
    assert tab("fedloom run --data mnist-") == ["mnist-m"]
    assert tab("fedloom sweep sweeps/fedi") == ["sweeps/fedintr-mu"]
    assert tab("fedloom run de") == ["demo"]
    assert tab("fedloom run --partition dir") == ["dirichlet"]
    assert tab("fedloom new m") == ["method", "model"]
    assert tab("fedloom run --roun") == ["--rounds"]
    assert tab("fedloom data pl") == ["plot"]


@pytest.mark.usefixtures("kept")
def test_where_no_name_fits_files_are_offered(capsys, monkeypatch):
    Path("mine.py").touch()
    Path("minutes").mkdir()
    assert offered(capsys, monkeypatch, "fedloom run --method min") == ["mine.py", "minutes/"]
    assert matching(["fedavg"], "local,min") == ["local,mine.py", "local,minutes/"]


def test_the_first_tab_makes_the_outline_and_later_ones_do_not_load_torch(tmp_path):
    code = (
        "import sys; from fedloom.__main__ import main; sys.argv = ['fedloom']\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    asking = {"_FEDLOOM_COMPLETE": "complete_bash", "COMP_WORDS": "fedloom run --method fedpro", "COMP_CWORD": "3"}

    def tab():
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=os.environ | asking, capture_output=True, text=True, timeout=120).stdout

    assert tab().split() == ["fedproto", "fedprox", "True"]
    assert len(list((tmp_path / "cache/fedloom").iterdir())) == 1
    assert tab().split() == ["fedproto", "fedprox", "False"]


def test_an_outline_of_other_commands_is_not_used(monkeypatch):
    outline.keep(get_command(cli.app))
    monkeypatch.setattr(outline, "version", lambda package: "another")
    assert not outline.answered()


def test_everything_public_is_there_and_imported_when_asked_for():
    import fedloom

    assert {"run", "compare", "sweep", "load", "Method", "Recipe"} <= set(fedloom.__all__) <= set(dir(fedloom))
    assert all(getattr(fedloom, name) is not None for name in fedloom.__all__)
    with pytest.raises(AttributeError, match="nowhere"):
        fedloom.nowhere  # noqa: B018
