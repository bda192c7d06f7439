"""Tab and --help: what a shell is offered, what help says, and that neither waits for torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom import methods
from fedloom.cli import commands
from fedloom.cli.completion import outline
from fedloom.cli.completion.commands import outline_of
from fedloom.cli.completion.offers import matching
from fedloom.engines import ENGINES
from fedloom.models import MODELS


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def kept():
    outline.keep(commands.app)


def offered(capsys, monkeypatch, line):
    """What bash gets for the last word of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_FEDLOOM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    app = outline.kept()
    assert outline.enough() and app is not None
    with pytest.raises(SystemExit, match="0"):
        app([], prog_name="fedloom")
    return capsys.readouterr().out.split()


@pytest.mark.usefixtures("kept")
def test_names_are_completed_as_they_are_registered(capsys, monkeypatch):
    def tab(line):
        return offered(capsys, monkeypatch, line)

    assert {"run", "sweep", "compare", "new", "data"} <= set(tab("fedloom "))
    assert tab("fedloom run --method fedp") == sorted(name for name in methods.METHODS if name.startswith("fedp"))
    assert tab("fedloom methods scaf") == ["scaffold"]
    assert tab("fedloom compare --methods local,fedavg,fedpro") == ["local,fedavg,fedproto", "local,fedavg,fedprox"]
    assert set(tab("fedloom run --model ")) == set(MODELS)
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


def told_without_the_commands(variables, *words):
    """What `fedloom` prints, and whether torch was loaded for it."""
    code = (
        f"import sys; from fedloom.__main__ import main; sys.argv = {['fedloom', *words]}\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    *said, loaded = done.stdout.split()
    return said, loaded == "True"


def test_the_first_tab_makes_the_outline_and_later_ones_do_not_load_torch(tmp_path):
    asking = {"_FEDLOOM_COMPLETE": "complete_bash", "COMP_WORDS": "fedloom run --method fedpro", "COMP_CWORD": "3"}
    assert told_without_the_commands(asking) == (["fedproto", "fedprox"], True)
    assert len(list((tmp_path / "cache/fedloom").iterdir())) == 1
    assert told_without_the_commands(asking) == (["fedproto", "fedprox"], False)
    said, loaded = told_without_the_commands({}, "run", "--help")
    assert "--partition" in said and not loaded
    said, loaded = told_without_the_commands({}, "recipe", "--method", "--help")  # no help is asked for: that is a name
    assert loaded and said == []


def name_of(command):
    return command.name or command.callback.__name__


def words_of_all_commands():
    inner = [
        [group.name, name_of(one)]
        for group in commands.app.registered_groups
        for one in group.typer_instance.registered_commands
    ]
    return [[], *[[group] for group, _ in inner], *inner, *[[name] for name in NAMES]]


NAMES = [name_of(one) for one in commands.app.registered_commands]


@pytest.mark.usefixtures("kept")
def test_help_out_of_the_outline_is_that_of_the_commands():
    app = outline.kept()
    for words in words_of_all_commands():
        texts = {
            CliRunner().invoke(each, [*words, "--help"], prog_name="fedloom", env={"COLUMNS": "100"}).stdout
            for each in (commands.app, app)
        }
        assert len(texts) == 1 and "Usage: fedloom" in texts.pop(), words


def test_help_has_an_example_shows_the_text_of_every_parameter_and_fits_100_columns():
    for command in outline_of(commands.app)["commands"]:
        asked = [command["name"], "--help"]
        text = CliRunner().invoke(commands.app, asked, prog_name="fedloom", env={"COLUMNS": "100"}).stdout
        assert "Example" in text, command["name"]
        assert max(map(len, text.splitlines())) <= 100
        for parameter in command["parameters"]:
            words = parameter["told"]["help"].replace("\\[", "[").split()
            assert [word for word in words if word not in text] == [], (command["name"], parameter["name"])


def test_an_outline_of_other_commands_is_not_used(monkeypatch):
    outline.keep(commands.app)
    monkeypatch.setattr(outline, "version", lambda package: "another")
    assert outline.kept() is None


def test_a_changed_command_makes_the_outline_anew(monkeypatch, tmp_path):
    assert [folder for folder in outline.FOLDERS if not (outline.PACKAGE / folder).is_dir()] == []
    monkeypatch.setattr(outline, "PACKAGE", tmp_path)
    command = tmp_path / "cli" / "run.py"
    command.parent.mkdir()
    command.touch()
    outline.keep(commands.app)
    assert outline.kept() is not None
    os.utime(command, (0, 0))
    assert outline.kept() is None


def test_everything_public_is_there_and_imported_when_asked_for():
    import fedloom

    assert {"run", "compare", "sweep", "load", "Method", "Recipe"} <= set(fedloom.__all__) <= set(dir(fedloom))
    assert all(getattr(fedloom, name) is not None for name in fedloom.__all__)
    with pytest.raises(AttributeError, match="nowhere"):
        fedloom.nowhere  # noqa: B018
