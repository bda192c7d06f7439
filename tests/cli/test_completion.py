"""Completion, help and listings: their contents, and that none of them imports torch."""

import json
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fedloom.cli import catalogue, commands, offers
from fedloom.engines import ENGINES
from fedloom.inference.adapt import HEADS, STEPS
from fedloom.inference.export import SUFFIXES
from fedloom.methods import METHODS
from fedloom.report.page.insight import POINTS

HEAVY = {"torch", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "pydantic", "yaml"}
COMMANDS = {
    (*group, name): command
    for group, known in [((), get_command(commands.app))]
    + [((name,), one) for name, one in get_command(commands.app).commands.items() if hasattr(one, "commands")]
    for name, command in known.commands.items()
}
"""Commands and groups by their words: `("data", "plot")`."""


def asking(line):
    """The environment in which bash asks for the last word of a line."""
    words = len(line.split(" "))
    return {"_FEDLOOM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(words - 1)}


@pytest.fixture
def tab(capsys, monkeypatch):
    def offered(line):
        for name, value in asking(line).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match="0"):
            commands.app([], prog_name="fedloom")
        return capsys.readouterr().out.split()

    return offered


def test_names_are_completed_as_they_are_registered(tab):
    assert {"run", "sweep", "compare", "new", "data"} <= set(tab("fedloom "))
    assert tab("fedloom run --method fedp") == sorted(name for name in METHODS if name.startswith("fedp"))
    assert tab("fedloom methods scaf") == ["scaffold"]
    assert tab("fedloom compare --methods local,fedavg,fedpro") == ["local,fedavg,fedproto", "local,fedavg,fedprox"]
    assert tab("fedloom run --model resnet3") == ["resnet34"]
    assert set(tab("fedloom run --engine ")) >= {
        "auto",
        *(name for name, kind in ENGINES.items() if kind.__module__.startswith("fedloom.engines.")),
    }
    assert tab("fedloom run --data mnist-") == ["mnist-m"]
    assert tab("fedloom sweep sweeps/fedi") == ["sweeps/fedintr-mu"]
    assert tab("fedloom run de") == ["demo"]
    assert tab("fedloom run --partition dir") == ["dirichlet"]
    assert tab("fedloom adapt --head lo") == ["logreg"]
    assert tab("fedloom new m") == ["method", "model"]
    assert tab("fedloom run --roun") == ["--rounds"]
    assert tab("fedloom data pl") == ["plot"]


def test_every_registered_name_is_offered():
    code = """
from fedloom.cli import offers
from fedloom.data import PARTITIONS
from fedloom.data.sources import SOURCES
from fedloom.engines import AUTO, ENGINES
from fedloom.methods import METHODS
from fedloom.models import MODELS
assert offers.methods("") == METHODS.names()
assert offers.models("") == MODELS.names()
assert offers.engines("") == [AUTO, *ENGINES.names()]
assert offers.datasets("") == SOURCES.names()
assert offers.partitions("") == PARTITIONS.names()
"""  # in a separate process: other tests register things
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_names_of_installed_packages_are_offered(monkeypatch, tmp_path):
    package = tmp_path / "site" / "theirs-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[fedloom.partitions]\ntheir_own = theirs:divide\n")
    monkeypatch.syspath_prepend(package.parent)
    assert offers.partitions("the") == ["their_own"]


def test_where_no_name_fits_files_are_offered(tab):
    Path("mine.py").touch()
    Path("minutes").mkdir()
    assert tab("fedloom run --method min") == ["mine.py", "minutes/"]
    assert offers.matching(["fedavg"], "local,min") == ["local,mine.py", "local,minutes/"]
    assert tab("fedloom resume min") == []  # the shell's own completion offers files


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ([], asking("fedloom run --method fedpro"), "fedproto"),
        ([], asking("fedloom run --data "), "cifar10"),
        ([], asking("fedloom run --engine "), "lanes"),
        ([], asking("fedloom compare "), "demo"),
        (["run", "--help"], {}, "--partition"),
        (["deploy", "init", "--help"], {}, "--organisations"),
        ([], {}, "compare"),
        (["--version"], {}, "fedloom 0."),
        (["methods"], {}, "fedcrl"),
        (["methods", "fedcrl"], {}, "leaves a client"),
        (["methods", "--json"], {}, '"reveals"'),
        (["datasets"], {}, "cifar100"),
    ],
)
def test_commands_that_only_list_do_not_import_torch(words, variables, said):
    code = (
        f"import sys; from fedloom.__main__ import main; sys.argv = {['fedloom', *words]}\n"
        "try: main()\nfinally: print('imported:', *sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    printed, _, imported = done.stdout.rpartition("imported:")
    assert said in printed
    assert (HEAVY - {"yaml", "pydantic"}).isdisjoint(imported.split())  # recipes are YAML; JSON is checked by pydantic


def test_a_ledger_is_shown_without_torch(runs):
    code = (
        f"import sys; from fedloom.__main__ import main; sys.argv = ['fedloom', 'ledger', {str(runs['fedper'])!r}]\n"
        "try: main()\nfinally: print('imported:', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    printed, _, imported = done.stdout.rpartition("imported:")
    assert "never left a client:" in printed
    assert "torch" not in imported.split()


def test_running_commands_print_a_line_before_they_import_torch():
    code = (
        "import sys; from fedloom.cli import base\n"
        "base.say = lambda text, where=None: print(text, 'torch' in sys.modules)\n"
        "from fedloom.__main__ import main; sys.argv = ['fedloom', 'run', '--method', 'nowhere']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout.splitlines()[0].endswith(": loading False")


def test_the_stored_catalogue_is_current():
    code = (
        "import json; from fedloom.cli import catalogue as c\n"
        "assert json.loads(json.dumps(c.build())) == json.loads(c.FILE.read_text(encoding='utf-8')), 'make catalogue'"
    )  # in a subprocess, because other tests register methods
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_catalogue_of_other_sources_is_not_used(monkeypatch, tmp_path):
    stale = tmp_path / "catalogue.json"
    stale.write_text(json.dumps({"digest": "of other files", "methods": []}))
    monkeypatch.setattr(catalogue, "FILE", stale)
    for cached in (catalogue.catalogue, catalogue._stored):
        cached.cache_clear()
    try:
        assert "fedcrl" in {row["name"] for row in catalogue.catalogue()["methods"]}
    finally:
        for cached in (catalogue.catalogue, catalogue._stored):
            cached.cache_clear()


def test_importing_the_commands_imports_nothing_heavy():
    code = "import sys, fedloom.cli.commands; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert HEAVY.isdisjoint(done.stdout.split())


def test_literals_of_the_command_line_are_the_constants_of_the_package():
    def default(module, command, name):
        return signature(getattr(getattr(commands, module), command)).parameters[name].default

    assert default("use", "newcomers", "heads") == ",".join(HEADS) == ",".join(offers.heads(""))
    assert default("use", "newcomers", "steps") == STEPS
    assert default("report", "report", "points") == default("report", "watch", "points") == POINTS
    assert offers.formats("") == list(SUFFIXES)


def help_of(words):
    return CliRunner().invoke(commands.app, [*words, "--help"], prog_name="fedloom", env={"COLUMNS": "100"}).stdout


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_shows_the_text_of_every_parameter_and_fits_100_columns(words):
    text = help_of(words)
    assert "Usage: fedloom" in text
    assert max(map(len, text.splitlines())) <= 100
    if hasattr(COMMANDS[words], "commands"):
        return
    assert "Example" in text
    for parameter in COMMANDS[words].params:
        words = (getattr(parameter, "help", None) or "").replace("\\[", "[").split()
        assert [word for word in words if word not in text] == [], parameter.name


def test_help_of_deploy_does_not_need_flower(monkeypatch):
    monkeypatch.setattr(commands.deploy, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fedloom", "deploy", "init", "--help"])
    assert "--organisations" in help_of(["deploy", "init"])


def test_everything_public_is_there_and_imported_when_asked_for():
    import fedloom

    assert {"run", "compare", "sweep", "load", "Method", "Recipe"} <= set(fedloom.__all__) <= set(dir(fedloom))
    assert all(getattr(fedloom, name) is not None for name in fedloom.__all__)
    with pytest.raises(AttributeError, match="nowhere"):
        fedloom.nowhere  # noqa: B018
