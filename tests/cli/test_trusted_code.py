"""A stranger's recipe, run folder or model file runs none of its Python files without the user's consent."""

import hashlib
import json
import os
import signal
from pathlib import Path
from time import monotonic, sleep

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner
from using import invoke, last_line, refused, write_pictures

import fedloom
from fedloom.cli import commands, flags
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupted
from fedloom.methods import METHODS
from fedloom.report.live import Live
from fedloom.runs.parallel import fedloom_process

CODE = """
import torch
from math import prod
from torch import nn
from fedloom.data import Dataset
from fedloom.methods.fedavg import FedAvg
from fedloom.models import SplitModel

class Mine(FedAvg):
    "FedAvg by another name."

class Net(SplitModel):
    "One hidden layer."
    def __init__(self, shape, classes):
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 8), nn.ReLU())
        self.head, self.features = nn.Linear(8, classes), 8

def images():
    y = torch.arange(120) % 2
    x = (y * 200).to(torch.uint8)[:, None, None, None].expand(120, 1, 8, 8).contiguous()
    return Dataset("halves", x, y, torch.zeros(120, dtype=torch.bool), ("dark", "light"))
"""
FIELDS = {"clients": 4, "partition": "iid", "rounds": 1, "data.newcomers": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run and a comparison with a file that was harmless then."""
    folder = tmp_path_factory.mktemp("stranger")
    file = folder / "evil.py"
    file.write_text(CODE)
    fields = FIELDS | {"data": f"{file}:images"}
    with trusted_code.scope():
        fedloom.run(method=f"{file}:Mine", model=f"{file}:Net", out=folder / "run", **fields)
        fedloom.compare(methods=[f"{file}:Mine", "fedper"], data="digits", out=folder / "compared",
                        clients=3, rounds=1, **{"data.limit": 150})  # fmt: skip
        fedloom.sweep(method=f"{file}:Mine", over={"lr": [0.1]}, out=folder / "swept", **fields)
        fedloom.load(folder / "run").global_model().save(folder / "model.safetensors")
    METHODS.pop("mine", None)
    return folder


@pytest.fixture
def stranger(made):
    """The folder; its file now writes a marker when it is imported, with a content that no test has seen before."""
    (made / "marker").unlink(missing_ok=True)
    code = f"from pathlib import Path\nPath({str(made / 'marker')!r}).touch()\n# {monotonic()}\n{CODE}"
    (made / "evil.py").write_text(code)
    return made


def sha256(stranger: Path) -> str:
    return hashlib.sha256((stranger / "evil.py").read_bytes()).hexdigest()


def recipe_file(stranger: Path) -> Path:
    """The run's recipe, as a stranger would pass it on."""
    values = yaml.safe_load((stranger / "run" / "recipe.yaml").read_text())
    Path("given.yaml").write_text(yaml.safe_dump(values))
    return Path("given.yaml")


def model_file(stranger: Path) -> Path:
    """The model file, with the file's names in its metadata."""
    with safe_open(str(stranger / "model.safetensors"), "pt") as file:
        says = json.loads(file.metadata()["fedloom"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    says["method"]["name"] = f"{stranger / 'evil.py'}:Mine"
    save_file(tensors, "given.safetensors", {"fedloom": json.dumps(says)})
    return Path("given.safetensors")


COMMANDS = {
    "predict": lambda s: ["predict", s / "run", write_pictures(Path("pictures"), {1: 2})],
    "predict with a model file": lambda s: ["predict", model_file(s), write_pictures(Path("pictures"), {1: 2})],
    "adapt": lambda s: ["adapt", s / "run", "--images", write_pictures(Path("pictures"), {1: 9, 2: 9})],
    "export": lambda s: ["export", s / "run", "--to", "torchscript"],
    "newcomers": lambda s: ["newcomers", s / "run", "--heads", "svm", "--alone-epochs", 0],
    "resume": lambda s: ["resume", s / "run"],
    "resume of a comparison": lambda s: ["resume", s / "compared"],
    "resume of a sweep": lambda s: ["resume", s / "swept"],
    "recipe": lambda s: ["recipe", recipe_file(s)],
    "run": lambda s: ["run", recipe_file(s), "--out", "out"],
    "compare": lambda s: ["compare", recipe_file(s), "--seeds", "0", "--out", "out"],
    "sweep": lambda s: ["sweep", recipe_file(s), "--over", "lr=0.1", "--out", "out"],
    "data plot": lambda s: ["data", "plot", recipe_file(s)],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_strangers_file_and_runs_it_with_the_flag(stranger, capsys, monkeypatch, command):
    arguments = [str(argument) for argument in COMMANDS[command](stranger)]
    said = refused(capsys, monkeypatch, *arguments)
    assert not (stranger / "marker").exists()
    for part in (str(stranger / "evil.py"), sha256(stranger), "--trust-code", "runs it"):
        assert part in said
    done = invoke(*arguments, "--trust-code")
    assert (stranger / "marker").exists()
    assert f"importing {stranger / 'evil.py'} (SHA-256 {sha256(stranger)})" in done.stderr
    (stranger / "marker").unlink()
    refused(capsys, monkeypatch, *arguments)  # consent ended with the command


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("method", "evil.py:Mine"), ("method", "fedavg+evil.py"), ("method", "fedavg+evil.py+ft"),
        ("model", "evil.py:Net"), ("objective", "evil.py:Loss"), ("engine", "evil.py:Engine"),
        ("data", {"partition": "evil.py:deal:2"}), ("method", "evil.py"),
    ],
)  # fmt: skip
def test_no_field_of_a_recipe_imports_a_file(capsys, monkeypatch, section, value):
    for name in ("evil.py", "fedavg+evil.py"):
        Path(name).write_text("open('marker', 'w')\n")
    Path("given.yaml").write_text(yaml.safe_dump({section: value}))
    assert "evil.py" in refused(capsys, monkeypatch, "recipe", "given.yaml")
    assert not Path("marker").exists()


def test_a_report_runs_no_code_and_says_what_it_leaves_out(stranger):
    done = invoke("report", stranger / "run", "--out", "report.html")
    assert not (stranger / "marker").exists()
    page = Path("report.html").read_text()
    assert "a report does not import such files" in page
    assert done.stderr.count("a report does not import such files") == 1
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    shown = {section["name"]: section for section in data["sections"]}
    for name in ("results", "curves", "clients", "classes", "costs", "recipes"):
        assert shown[name].get("figures") or shown[name].get("tables") or shown[name].get("texts"), name
    for name in ("classes", "holdings", "representations"):
        assert "does not import such files" in shown[name]["missing"]


def test_a_shipped_method_beside_a_strangers_is_reported_wholly(stranger):
    done = invoke("report", stranger / "compared", "--out", "report.html", "--points", 40)
    assert not (stranger / "marker").exists()
    page = Path("report.html").read_text()
    assert "computing the representations of fedper" in done.stderr
    for part in ("holdings-0", "class-head-tail", "representations-1-fedper", "Some runs are not shown"):
        assert part in page


def test_watch_and_ledger_run_no_code(stranger):
    with Live([stranger / "run"]) as live:
        until = monotonic() + 20
        while b"does not import such files" not in live.data and monotonic() < until:
            sleep(0.05)
        assert b"does not import such files" in live.data
    assert "never left" in invoke("ledger", stranger / "run").stdout
    assert not (stranger / "marker").exists()


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("command", ["predict", "resume", "newcomers", "adapt", "export"])
def test_somebody_at_a_terminal_is_asked(stranger, monkeypatch, command, answer):
    monkeypatch.setattr(flags, "at_terminal", lambda: True)
    arguments = [str(argument) for argument in COMMANDS[command](stranger)]
    done = CliRunner().invoke(commands.app, arguments, input=answer + "\n")
    assert str(stranger / "evil.py") in done.stderr
    assert f"SHA-256 {sha256(stranger)}" in done.stderr
    assert done.stderr.count("import it?") == 1
    assert (stranger / "marker").exists() == (answer == "y")
    assert (done.exit_code == 0) == (answer == "y")
    assert isinstance(done.exception, UserError) == (answer == "n")


def test_a_file_that_several_fields_name_is_asked_about_once(stranger, monkeypatch):
    monkeypatch.setattr(flags, "at_terminal", lambda: True)
    values = yaml.safe_load((stranger / "run" / "recipe.yaml").read_text())
    values["data"]["partition"] = f"{stranger / 'evil.py'}:deal"
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text(yaml.safe_dump(values))
    Path("run/versions.json").write_text((stranger / "run" / "versions.json").read_text())
    done = CliRunner().invoke(commands.app, ["resume", "run"], input="n\nn\n")
    assert isinstance(done.exception, UserError)
    assert done.stderr.count("import it?") == 1


@pytest.mark.parametrize("named", [["--method", "{}:Mine"], ["--set", "model={{name: {}:Net}}"]])
def test_a_file_that_is_named_on_the_command_line_is_imported(stranger, named):
    given = [text.format(stranger / "evil.py") for text in named]
    assert last_line(invoke("recipe", recipe_file(stranger), *given, "--json"))["data"]["clients"] == 4
    assert (stranger / "marker").exists()


def test_a_name_out_of_a_shells_pattern_is_not_consent(stranger, capsys, monkeypatch):
    """`fedloom predict run pictures/*`: the folder may hold a file whose name is a reference."""
    monkeypatch.chdir(stranger)
    Path("evil.py:Mine").touch()
    refused(capsys, monkeypatch, "predict", "run", *map(str, Path().glob("evil*")))
    assert not (stranger / "marker").exists()


def test_in_python_arguments_are_consent_and_files_are_not(stranger, caplog):
    given = recipe_file(stranger)
    file = stranger / "evil.py"
    with pytest.raises(UserError, match="trust_code=True"):
        fedloom.load(stranger / "run")
    with pytest.raises(UserError, match="trust_code=True"):
        fedloom.resume(stranger / "run")
    with pytest.raises(UserError, match="trust_code=True"):
        fedloom.resume_comparison(stranger / "compared")
    with pytest.raises(UserError, match="trust_code=True"):
        fedloom.run(given, out="out")
    with pytest.raises(UserError, match="trust_code=True"):
        fedloom.load_model(model_file(stranger))
    with pytest.raises(UserError, match="trust_code=True"):
        fedloom.Recipe.load(given)
    only_data = fedloom.Recipe.parse({"data": f"{file}:images", "training": {"rounds": 1}})
    with pytest.raises(UserError, match=r"data\.name = .*trust_code=True"):
        fedloom.run(only_data, out="out")
    assert not (stranger / "marker").exists()
    with trusted_code.scope():
        assert fedloom.load(stranger / "run", trust_code=True).task.classes == 2
        assert f"importing {file} (SHA-256 {sha256(stranger)})" in caplog.text
    with trusted_code.scope():
        assert fedloom.run(given, out="out", trust_code=True)["method"] == "mine"
    assert fedloom.run({"method": f"{file}:Mine"}, out="named", data=f"{file}:images", **FIELDS)["method"] == "mine"
    assert fedloom.load("named").summary is not None  # the same file, named before


def test_a_file_that_changes_after_consent_is_refused():
    Path("mine.py").write_text(CODE)
    trusted_code.allow("mine.py:Mine")
    Path("mine.py").write_text("open('marker', 'w')\n" + CODE)
    with pytest.raises(UserError, match="has changed since you allowed it"):
        fedloom.Recipe.parse({"method": "mine.py:Mine"})
    assert not Path("marker").exists()


def test_once_settled_nothing_else_is_allowed():
    """An organisation in a deployment settles before the first message of a server comes."""
    Path("mine.py").write_text("open('marker', 'w')\n" + CODE)
    with trusted_code.deciding(lambda file: True):
        trusted_code.settle()
        with pytest.raises(UserError, match="not imported without your consent"):
            fedloom.Recipe.parse({"method": "mine.py:Mine"})
    assert not Path("marker").exists()


def test_a_file_that_changes_after_its_import_stays_as_it_was(caplog):
    Path("mine.py").write_text(CODE)
    recipe = fedloom.Recipe.parse({"method": "mine.py:Mine"}, trust_code=True)
    Path("mine.py").write_text("open('marker', 'w')\n" + CODE)
    assert recipe.make_method().name == "mine"
    assert "mine.py has changed since it was imported" in caplog.text
    assert not Path("marker").exists()


@pytest.mark.slow
def test_runs_in_parallel_have_the_consent_of_their_command(stranger, capsys, monkeypatch):
    arguments = ["sweep", recipe_file(stranger), "--over", "lr=0.1,0.2", "--parallel", 2]
    refused(capsys, monkeypatch, *map(str, arguments), "--out", "refused")
    assert not (stranger / "marker").exists()
    done = last_line(invoke(*arguments, "--trust-code", "--out", "out", "--json"))
    assert [len(setting["runs"]) for setting in done["settings"]] == [1, 1]
    named = ["--method", f"{stranger}/evil.py:Mine", "--data", "digits", "--model", "mlp", "--parallel", 2]
    fields = ["--over", "lr=0.1", "--rounds", 1, "--clients", 2, "--set", "data.limit=100", "--out", "named"]
    assert len(last_line(invoke("sweep", *named, *fields, "--json"))["settings"]) == 1


@pytest.mark.parametrize("engine", ["processes", "replay"])
def test_workers_have_the_consent_of_their_run(stranger, monkeypatch, engine):
    monkeypatch.setattr("fedloom.engines.processes.fork_works", lambda: False)  # spawned: nothing is inherited
    file = stranger / "evil.py"
    fields = FIELDS | {"data": f"{file}:images", "engine": engine, "out": "out"}
    if engine == "processes":
        fields["engine.workers"] = 1
    summary = fedloom.run(method=f"{file}:Mine+ft", model=f"{file}:Net", **fields)
    assert summary["failed"] == {}


@pytest.mark.parametrize("kind", ["run", "compare"])
def test_the_printed_command_resumes_a_run_with_its_file(stranger, kind):
    def stop(record):
        if record["round"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    fields = FIELDS | {"data": f"{stranger / 'evil.py'}:images", "out": "out", "rounds": 2}
    name = f"{stranger / 'evil.py'}:Mine"
    begin = {
        "run": lambda: fedloom.run(method=name, on_round=stop, **fields),
        "compare": lambda: fedloom.compare(methods=[name, "local"], on_run=lambda _: stop, **fields),
    }
    with trusted_code.scope(), pytest.raises(Interrupted) as stopped:
        begin[kind]()
    command = str(stopped.value).partition("resume with: ")[2]
    assert command == "fedloom resume out --trust-code"
    assert invoke(*command.split()[1:], "--json").exit_code == 0
    assert Path("out/summary.json" if kind == "run" else "out/01-local-s0/summary.json").exists()


def test_a_path_that_a_recipe_gives_is_no_consent(tmp_path):
    """`--watch` and `resume` fill in `out`: a stranger's text there may look like the name of a file."""
    evil = tmp_path / "evil.py"
    evil.write_text("def f(): pass\n")
    recipe = Recipe.parse({"method": "fedavg", "out": f"runs/x;{evil}"})
    with trusted_code.scope():
        recipe.with_(out=str(recipe.out))
        recipe.with_(f"data.dir={evil}")
        assert not trusted_code.is_allowed(evil)
        assert trusted_code.not_allowed(f"{evil}:f") == [evil]


def test_a_child_imports_nothing_because_it_lies_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "fedloom").mkdir()
    (tmp_path / "fedloom" / "__init__.py").write_text("open('was run', 'w')\n")
    monkeypatch.chdir(tmp_path)
    child = fedloom_process(["--help"], 1)
    assert child.wait(60) == 0
    assert not (tmp_path / "was run").exists()
