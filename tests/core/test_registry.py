"""Methods, models, objectives and datasets of the user's own: named by file, or brought along by a package."""

import json
import sys
from pathlib import Path

import pytest
from tiny import same_state, tiny_experiment, tiny_run, tiny_task, without_times
from typer.testing import CliRunner

import fedloom
from fedloom import methods, objectives
from fedloom.cli import commands
from fedloom.config.recipe import Recipe
from fedloom.core import registry as plugins
from fedloom.core.errors import UserError
from fedloom.data import federate, load, parse_partition
from fedloom.engines import ENGINES
from fedloom.models import build
from fedloom.runs.run import recipe_of

pytestmark = pytest.mark.full

METHOD = """
from fedloom.methods.fedavg import FedAvg
from fedloom.core.state import squared_distance

HELP = 3

class Mine(FedAvg):
    "FedAvg, held near what was received."
    pull: float = 0.1

    def loss(self, client, batch):
        return super().loss(client, batch) + self.pull / 2 * squared_distance(client.model, client.received.model)
"""
MODEL = """
from math import prod
from torch import nn
from fedloom.models import SplitModel

class Net(SplitModel):
    "One hidden layer."
    def __init__(self, shape, classes, *, width: int = 8):
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), width), nn.ReLU())
        self.head, self.features = nn.Linear(width, classes), width
"""
OBJECTIVE = """
from fedloom.objectives.labels import Labels

class Twice(Labels):
    "The usual loss, times a factor."
    factor: float = 2.0

    def __call__(self, model, batch):
        return self.factor * super().__call__(model, batch)
"""
DATASET = """
import torch
from fedloom.data import Dataset

def halves():
    y = torch.arange(80) % 2
    x = (y * 200).to(torch.uint8)[:, None, None, None].expand(80, 1, 8, 8).contiguous()
    return Dataset("halves", x, y, torch.zeros(80, dtype=torch.bool), ("dark", "light"))

def nothing():
    return 3

def broken():
    return 1 / 0
"""


@pytest.fixture(autouse=True)
def _forget_afterwards(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = dict(methods.METHODS), dict(objectives.OBJECTIVES)
    yield
    for registry, before in zip((methods.METHODS, objectives.OBJECTIVES), known, strict=True):
        registry.clear()
        registry.update(before)


@pytest.fixture
def own() -> str:
    Path("my+Code").mkdir()
    Path("my+Code/own.py").write_text(METHOD + MODEL + OBJECTIVE + DATASET)
    return "my+Code/own.py"


@pytest.mark.parametrize("engine", ["inline", "processes", "replay", "spawned"])
def test_a_method_in_a_file_runs_on_every_engine_as_the_shipped_one_does(own, engine, monkeypatch):
    if engine == "spawned":
        monkeypatch.setattr("fedloom.engines.processes.fork_works", lambda: False)
        engine = "processes"
    objective = {"name": f"{own}:Twice", "factor": 3.0}
    settings = {"name": f"{own}:Mine+ft", "pull": 0.3}
    mine = tiny_run(settings, engine=engine, workers=1, objective=objective, training__rounds=1)
    shipped = tiny_run({"name": "fedprox+ft", "mu": 0.3}, objective=objective, training__rounds=1)
    assert same_state(mine.server.state, shipped.server.state)
    assert mine.scores == shipped.scores
    assert (mine.method.name, type(mine.method).plain.__name__) == ("mine+ft", "Mine")


def test_all_kinds_by_file_through_the_command(own):
    Path("recipe.yaml").write_text(
        f"method: {{name: '{own}:Mine', pull: 0.2}}\nmodel: {{name: '{own}:Net', width: 5}}\n"
    )
    command = ["run", "recipe.yaml", "--data", f"{own}:halves", "--set", f"objective.name={own}:Twice", "--rounds", "1",
               "--clients", "2", "--partition", "iid", "--json"]  # fmt: skip
    result = CliRunner().invoke(commands.app, command, catch_exceptions=False)
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["method"] == "mine"
    assert said["up_bytes"] == 4 * (65 * 5 + 6 * 2)
    assert Path(said["run_dir"]).name.endswith("-mine-halves-s0")
    kept = Recipe.load(Path(said["run_dir"]) / "recipe.yaml", trust_code=True)
    assert kept.method.name == f"{Path(own).resolve()}:Mine"  # found from any folder
    assert kept.data.name == f"{Path(own).resolve()}:halves"
    assert json.loads((Path(said["run_dir"]) / "versions.json").read_text())[str(Path(own).resolve())].startswith(
        "sha256 "
    )


def test_a_comparison_tells_two_files_apart_and_styles_join(own):
    Path("other.py").write_text(METHOD)
    named = [f"{own}:Mine", "other.py:Mine", {"name": "fedprox", "mu": 0.1}]
    Path("data.py").write_text(DATASET)
    with pytest.raises(UserError, match="10 and 2 classes"):
        fedloom.run(method="fedavg", data="digits+data.py:halves", rounds=1)
    runs = fedloom.compare(methods=named, data=f"{own}:halves", rounds=1, clients=2, partition="iid")
    assert [run["label"] for run in runs] == [f"{own}:Mine", "other.py:Mine", "fedprox"]
    assert len({run["personal_accuracy"] for run in runs}) == 1
    assert [Path(run["run_dir"]).name for run in runs] == ["00-mine-s0", "01-mine-s0", "02-fedprox-s0"]


def test_it_is_explained_as_shipped_ones_are(own):
    said = CliRunner().invoke(commands.app, ["methods", f"{own}:Mine"], catch_exceptions=False).stdout
    assert "FedAvg, held near what was received." in said
    assert "pull = 0.1" in said


def test_a_file_may_import_its_neighbours():
    Path("neighbour_of_mine.py").write_text("STRENGTH = 0.7")
    Path("mine.py").write_text("from neighbour_of_mine import STRENGTH\n" + METHOD.replace("0.1", "STRENGTH"))
    assert fedloom.method("mine.py:Mine").pull == 0.7


def test_a_changed_file_is_read_again_at_once():
    Path("mine.py").write_text(METHOD)
    assert fedloom.method("mine.py:Mine").pull == 0.1
    Path("mine.py").write_text(METHOD.replace("0.1", "0.2"))
    assert fedloom.method("mine.py:Mine").pull == 0.2


def stopped_run(tmp_path: Path) -> Path:
    def stop(record):
        if record["round"] == 2:
            raise RuntimeError("power cut")

    path = tmp_path / "run"
    experiment = tiny_experiment("mine.py:Mine", on_round=stop, out=str(path), storage__checkpoint_every=1)
    with pytest.raises(RuntimeError, match="power cut"):
        experiment.run()
    return path


def test_a_run_goes_on_with_its_file_from_another_folder(tmp_path, monkeypatch):
    Path("mine.py").write_text(METHOD)
    whole = tiny_run("mine.py:Mine")
    path = stopped_run(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = fedloom.Experiment(recipe_of(path, {}), task=tiny_task())
    resumed.run(resume=True)
    assert without_times(resumed.history) == without_times(whole.history)


def test_a_run_whose_file_changed_says_so_and_one_whose_file_is_gone_stops(tmp_path, caplog):
    Path("mine.py").write_text(METHOD)
    path = stopped_run(tmp_path)
    Path("mine.py").write_text(METHOD + "# changed\n")
    fedloom.Experiment(recipe_of(path, {}, trust_code=True), task=tiny_task()).run(resume=True)
    assert f"{tmp_path / 'mine.py'} is sha256 " in caplog.text
    assert "results may differ" in caplog.text
    Path("mine.py").unlink()
    with pytest.raises(UserError, match=f"method.name = .*there is no file '{tmp_path / 'mine.py'}'"):
        fedloom.resume(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "gone.py:Mine"}, ["method.name = 'gone.py:Mine': there is no file '", "/gone.py'"]),
        ({"method": "my+Code/own.py"}, ["name an object in it: my+Code/own.py:NAME; choose one of Mine"]),
        ({"method": "my+Code/own.py:Mina"}, ["'Mina' is not in own.py; did you mean 'Mine'?"]),
        ({"method": "my+Code/own.py:HELP"}, ["it is of type int, but must be a subclass", "choose one of Mine"]),
        ({"method": "my+Code/own.py:Net"}, ["it is the class Net, but must be a subclass of fedloom.Method"]),
        ({"method": "my+Code/own.py:Mine+fft"}, ["'+fft' is unknown"]),
        ({"method": {"name": "my+Code/own.py:Mine", "pul": 1}}, ["did you mean 'pull'?"]),
        ({"method": "bad.py:Mine"}, ["bad.py cannot be imported: line 2: NameError: name 'Nowhere' is not defined"]),
        ({"method": "worse.py:Mine"}, ["worse.py cannot be imported: line 1: SyntaxError"]),
        ({"method": "taken.py:FedAvg"}, ["taken.py: FedAvg: method.name = 'fedavg' is already part of fedloom"]),
        ({"method": "leaves.py:Mine"}, ["leaves.py cannot be imported: line 1: SystemExit: 3"]),
        ({"method": "empty.py:Mine"}, ["'Mine' is not in empty.py; the file defines none: write a subclass of"]),
        ({"model": "gone.py:Net"}, ["model.name = 'gone.py:Net': there is no file"]),
        ({"model": "my+Code/own.py:Nett"}, ["model.name = 'my+Code/own.py:Nett': 'Nett' is not in", "'Net'?"]),
        ({"model": {"name": "my+Code/own.py:Net", "widht": 3}}, ["did you mean 'width'?"]),
        ({"objective": "my+Code/own.py:Mine"}, ["objective.name = ", "of fedloom.objectives.Objective"]),
        ({"data": "my+Code/own.py:Net"}, ["data.name = 'my+Code/own.py:Net': it is the class Net", "function"]),
        ({"data": "my+Code/own.py:nothing"}, ["nothing() returned a int instead of a Dataset"]),
        ({"data": "my+Code/own.py:broken"}, ["broken() failed, line ", "ZeroDivisionError"]),
    ],
)  # fmt: skip
def test_what_cannot_be_found_or_used_is_named(own, fields, words):
    Path("bad.py").write_text("import os\nclass Mine(Nowhere): ...")
    Path("worse.py").write_text("class Mine(")
    Path("taken.py").write_text("import fedloom\nclass FedAvg(fedloom.Method): ...")
    Path("leaves.py").write_text("raise SystemExit(3)")
    Path("empty.py").write_text("")
    with pytest.raises(UserError) as error:
        fedloom.Experiment(Recipe.parse(fields, trust_code=True))
    for part in words:
        assert part in str(error.value)


@pytest.fixture
def package(own, tmp_path, monkeypatch):
    """An installed package with entry points of every kind, one of them broken."""
    site = tmp_path / "site"
    info = site / "threads-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "threads.py").write_text(Path(own).read_text().replace("Mine", "Thread"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: threads\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedloom.methods]\nspun = threads:Thread\ntorn = threads:Missing\n[fedloom.models]\nspun-net = threads:Net\n"
        "[fedloom.objectives]\nspun-loss = threads:Twice\n[fedloom.datasets]\nspun-data = threads:halves\n"
    )
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("threads", None)


@pytest.mark.usefixtures("package")
def test_entry_points_are_known_by_their_names():
    assert fedloom.method("spun+ft", pull=0.4).pull == 0.4
    assert build("spun-net", shape=(1, 8, 8), classes=2, width=3).features == 3
    assert objectives.get("spun-loss", factor=5.0).factor == 5
    assert load("spun-data").classes == ("dark", "light")
    assert "spun" in CliRunner().invoke(commands.app, ["methods"], catch_exceptions=False).stdout
    with pytest.raises(UserError, match="method.name = 'spunn' is unknown: did you mean 'spun'"):
        fedloom.method("spunn")
    with pytest.raises(UserError, match="'torn': the entry point threads:Missing of threads cannot be imported: Attr"):
        fedloom.method("torn")


def test_names_for_titles_and_for_any_folder():
    assert plugins.split("a+b/Mine.py:Mine+ft+svm") == ("a+b/Mine.py:Mine", ["ft", "svm"])
    assert plugins.short("a/mine.py:Mine+ft") == "mine+ft"
    assert plugins.short("fedavg+ft") == plugins.absolute("fedavg+ft") == "fedavg+ft"
    assert plugins.absolute("mine.py:Mine+ft") == f"{Path.cwd()}/mine.py:Mine+ft"


def test_a_partition_of_ones_own_by_file_with_its_values(tmp_path: Path) -> None:
    """Its keywords are the values after the name, validated like a network's options."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "from fedloom.core.options import Positive\n"
        "def by_share(pool, *, share: Positive):\n"
        "    return np.where(np.arange(len(pool.labels)) < share * len(pool.labels), 0, 1)\n"
    )
    dataset = tiny_task().dataset
    federation = federate(dataset, clients=2, partition=f"{file}:by_share:0.25", split="pooled:0.5", seed=0)
    assert [len(train) + len(test) for train, test in zip(federation.train, federation.test, strict=True)] == [60, 180]
    with pytest.raises(UserError, match="share = '-1': must be above 0"):
        parse_partition(f"{file}:by_share:-1")
    with pytest.raises(UserError, match=r"has 0 value\(s\); write it as .*by_share:share"):
        parse_partition(f"{file}:by_share")


def test_an_engine_of_ones_own_by_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from fedloom.engines import Inline\n"
        "class Counting(Inline):\n"
        "    name = 'counting'\n"
        "    jobs = 0\n"
        "    def run(self, jobs):\n"
        "        for result in super().run(jobs):\n"
        "            Counting.jobs += 1\n"
        "            yield result\n"
    )
    mine = tiny_run("fedavg", engine=f"{file}:Counting")
    assert same_state(mine.server.state, tiny_run("fedavg").server.state)
    assert ENGINES["counting"].jobs > 0


@pytest.mark.parametrize(
    ("body", "gave"),
    [
        ("return [0] * 3", "int64 \\[3\\]"),
        ("return pool.labels + 5", "int64 \\[240\\]"),
        ("return pool.labels / 1", "float64"),
    ],
)
def test_what_a_partition_of_ones_own_gives_is_checked(tmp_path: Path, body: str, gave: str) -> None:
    (tmp_path / "mine.py").write_text(f"def deal(pool):\n    {body}\n")
    with pytest.raises(UserError, match=f"mine.py:deal': the function returned {gave}.*one integer for each of 240"):
        federate(tiny_task().dataset, clients=4, partition=f"{tmp_path}/mine.py:deal", seed=0)


def test_a_run_with_files_of_ones_own_can_be_read_from_another_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mine.py").write_text(
        "import numpy as np\n"
        "from fedloom.engines import Inline\n"
        "def deal(pool, *, each: int):\n    return np.arange(len(pool.labels)) % pool.clients\n"
        "class Plain(Inline):\n    name = 'plain'\n"
    )
    fedloom.run(data="digits", rounds=1, clients=3, partition="mine.py:deal:2", engine="mine.py:Plain",
                out="run", **{"data.limit": 60})  # fmt: skip
    monkeypatch.chdir(tmp_path / "there")
    recipe = recipe_of(tmp_path / "here" / "run", {})
    assert recipe.data.partition == f"{tmp_path}/here/mine.py:deal:2"
    assert fedloom.load(tmp_path / "here" / "run").task.clients == 3
    assert "plain" in ENGINES


def test_additions_work_with_annotations_that_are_strings(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from typing import Literal\n"
        "from fedloom.methods.fedavg import FedAvg\n"
        "class Late(FedAvg):\n    mode: Literal['a', 'b'] = 'a'\n"
    )
    made = fedloom.method(f"{tmp_path}/mine.py:Late+ft", mode="b", ft_epochs=2)
    assert (made.mode, made.ft_epochs) == ("b", 2)
