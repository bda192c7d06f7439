"""The command line: what goes to stdout and stderr, the promised JSON, and mistakes that end in 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner, Result
from using import last_line, refused

from fedloom import cli, methods
from fedloom.cli import commands
from fedloom.cli.flags import fields_of
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError

TINY = ["--data", "digits", "--clients", "4", "--rounds", "2", "--model", "mlp", "--set", "data.limit=200"]
PROMISED = {
    "method", "rounds", "seed", "global_accuracy", "personal_accuracy", "personal_std", "clients", "up_bytes",
    "down_bytes", "seconds", "run_dir",
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(commands.app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result


def test_run_prints_one_json_object_and_progress_elsewhere() -> None:
    result = invoke("run", *TINY, "--method", "fedprox", "--set", "method.mu=1e-2", "--seed", "3", "--json")
    assert len(result.stdout.splitlines()) == 1
    said = last_line(result)
    assert said.keys() >= PROMISED
    assert (said["method"], said["rounds"], said["seed"], said["clients"]) == ("fedprox", 2, 3, 4)
    assert 0 <= said["global_accuracy"] <= 1
    assert 0 <= said["personal_accuracy"] <= 1
    assert said["up_bytes"] == said["down_bytes"] == 4 * (65 * 128 + 129 * 64 + 65 * 10)
    assert "fedprox (seed 3)  round 1/2" in result.stderr
    assert "round 2/2" in result.stderr
    assert Recipe.load(Path(said["run_dir"]) / "recipe.yaml").method.options["mu"] == 0.01


def test_local_has_no_global_accuracy() -> None:
    said = last_line(invoke("run", *TINY, "--method", "local", "--json"))
    assert said["global_accuracy"] is None
    assert said["up_bytes"] == said["down_bytes"] == 0
    assert said["personal_accuracy"] > 0


def test_run_without_json_prints_the_table_and_the_folder(tmp_path: Path) -> None:
    result = invoke("run", *TINY, "--out", "here/[it]")  # brackets are no markup
    rows = [line for line in result.stdout.splitlines() if line.startswith("│ fedavg")]
    assert len(rows) == 1
    assert result.stdout.splitlines()[-1] == "run folder: here/[it]"
    assert (tmp_path / "here" / "[it]" / "summary.json").exists()


def test_flags_are_fields(tmp_path: Path) -> None:
    invoke(
        "run", *TINY, "--partition", "iid", "--epochs", "2", "--batch-size", "7", "--lr", "0.01", "--fraction", "0.5",
        "--engine", "replay", "--seed", "5", "--out", "x", "--data-dir", "d",
    )  # fmt: skip
    recipe = Recipe.load(tmp_path / "x" / "recipe.yaml")
    training = recipe.training
    assert (training.rounds, training.epochs, training.batch_size, training.fraction) == (2, 2, 7, 0.5)
    assert (training.optimizer.lr, recipe.seed, recipe.engine.name) == (0.01, 5, "replay")
    assert (recipe.data.partition, recipe.data.clients, recipe.data.dir) == ("iid", 4, Path("d"))


def test_trackers_are_listed_with_commas_or_flag_by_flag() -> None:
    assert fields_of(None, log=["tensorboard", "wandb,mlflow"], seed=None) == {"log": "tensorboard,wandb,mlflow"}
    assert fields_of(None, log=[]) == fields_of(None, log=None) == {}


def test_a_run_can_be_repeated_from_its_own_folder_with_the_same_numbers() -> None:
    first = last_line(invoke("run", *TINY, "--method", "fedprox", "--json"))
    again = last_line(invoke("run", f"{first['run_dir']}/recipe.yaml", "--out", "again", "--json"))
    changing = {"seconds", "run_dir"}
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in first.items() if k not in changing
    }


def test_notes_on_frozen_parts_are_printed_once() -> None:
    result = invoke("compare", *TINY, "--methods", "fedavg,fedper", "--set", "model.freeze=[extractor]")
    assert result.stderr.count("stay fixed") == 1
    assert result.stderr.count("fedper has nothing to send") == 1


def test_compare_two_methods_and_two_seeds_as_a_table() -> None:
    result = invoke("compare", *TINY, "--methods", "local, fedavg+ft", "--seeds", "0,1", "--out", "both")
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["local", "fedavg+ft"]
    assert all("±" in row[1] for row in rows)
    assert rows[0][4].strip() == "–"
    assert result.stdout.splitlines()[-1] == "run folder: both"
    assert "local (seed 1)  round 2/2" in result.stderr


def test_compare_two_methods_and_two_seeds_as_json() -> None:
    result = invoke("compare", *TINY, "--methods", "local,fedavg", "--seeds", "0,1", "--out", "both", "--json")
    said = last_line(result)
    assert said["run_dir"] == "both"
    assert [(run["method"], run["seed"]) for run in said["runs"]] == [
        ("local", 0), ("local", 1), ("fedavg", 0), ("fedavg", 1),
    ]  # fmt: skip
    assert all(run.keys() >= PROMISED for run in said["runs"])
    assert sorted(path.name for path in Path("both").iterdir()) == [
        "00-local-s0", "01-local-s1", "02-fedavg-s0", "03-fedavg-s1", "comparison.json", "comparison.yaml",
    ]  # fmt: skip


def test_a_comparison_run_alone_gives_the_same_numbers() -> None:
    compared = last_line(invoke("compare", *TINY, "--methods", "local,fedavg", "--seeds", "1", "--json"))["runs"][1]
    alone = last_line(invoke("run", *TINY, "--method", "fedavg", "--seed", "1", "--json"))
    for name in ("global_accuracy", "personal_accuracy", "personal_std"):
        assert alone[name] == compared[name]


def test_one_method_with_several_hyperparameters_gives_a_row_each(tmp_path: Path) -> None:
    comparison = {
        "data": {"name": "digits", "limit": 100, "clients": 3},
        "training": {"rounds": 1},
        "compare": {"methods": [{"name": "fedprox", "mu": 0.1}, {"name": "fedprox", "mu": 9}, "local"], "seeds": [4]},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(comparison))
    said = last_line(invoke("compare", "c.yaml", "--json"))
    assert [(run["label"], run["seed"]) for run in said["runs"]] == [
        ("fedprox mu=0.1", 4), ("fedprox mu=9", 4), ("local", 4),
    ]  # fmt: skip


def test_a_plain_recipe_is_compared_over_seeds_with_its_own_method(tmp_path: Path) -> None:
    recipe = {"method": {"name": "fedprox", "mu": 0.5}, "data": {"limit": 100, "clients": 3}, "training": {"rounds": 1}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    said = last_line(invoke("compare", "r.yaml", "--seeds", "1,2", "--json"))
    assert [(run["method"], run["seed"]) for run in said["runs"]] == [("fedprox", 1), ("fedprox", 2)]
    assert Recipe.load(Path(said["runs"][0]["run_dir"]) / "recipe.yaml").method.options["mu"] == 0.5


def test_methods_as_json_have_the_promised_shape() -> None:
    said = last_line(invoke("methods", "--json"))
    assert said.keys() == {"methods"}
    by_name = {method["name"]: method for method in said["methods"]}
    assert by_name.keys() == methods.METHODS.keys() >= {"local", "centralized", "fedavg", "fedprox"}
    for method in said["methods"]:
        assert method.keys() >= {"name", "shares", "keeps", "paper", "parameters"}
        assert all(parameter.keys() >= {"name", "default"} for parameter in method["parameters"])
    assert by_name["fedavg"]["shares"] == ["model"]
    assert by_name["local"]["keeps"] == ["model"]
    assert {p["name"] for p in by_name["fedprox"]["parameters"]} >= {"mu", "norm"}
    assert all(p["what"] for p in by_name["fedprox"]["parameters"])


def test_the_paper_of_a_method_that_inherits_it_is_told_as_that_of_another() -> None:
    papers = {
        name: last_line(invoke("methods", name, "--json"))["methods"][0]["paper"]
        for name in ("fedavg", "fedavg+ft", "fedadam")
    }
    assert papers["fedavg"].startswith("McMahan")
    assert papers["fedavg+ft"] == f"built on FedAvg: {papers['fedavg']}"
    assert papers["fedadam"].startswith("Reddi")  # inherited from an abstract class, not from a method


def test_paragraphs_of_help_flow_to_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    printed = invoke("export", "--help").stdout
    assert "uint8 images [batch, H, W, C] and return" in printed
    assert "by more than 1e-4, no file is written" in printed


def test_methods_lists_all_and_explains_one() -> None:
    listed = invoke("methods").stdout
    assert all(name in listed for name in ("local", "centralized", "fedavg", "fedprox"))
    explained = invoke("methods", "fedprox").stdout
    assert explained.startswith("fedprox")
    assert "mu = 0.1" in explained
    assert "paper: Li et al." in explained
    tuned = last_line(invoke("methods", "fedavg+ft", "--json"))["methods"][0]
    assert {p["name"] for p in tuned["parameters"]} >= {"ft_parts", "ft_epochs", "ft_lr"}


def test_datasets_say_what_is_here() -> None:
    said = last_line(invoke("datasets", "--json"))
    by_name = {dataset["name"]: dataset for dataset in said["datasets"]}
    assert by_name["digits"]["found"] is True
    assert by_name["cifar10"]["found"] is False
    assert (by_name["digits"]["classes"], by_name["cifar100"]["classes"]) == (10, 100)
    assert all(
        {"name", "description", "classes", "found", "files", "command"} <= row.keys() for row in by_name.values()
    )
    table = invoke("datasets").stdout
    assert "cifar-10-batches-py" in table
    assert "('" not in table
    assert "yes" in next(line for line in table.splitlines() if line.startswith("│ digits"))


def test_recipe_prints_yaml_that_is_the_resolved_recipe(tmp_path: Path) -> None:
    arguments = ("--method", "fedprox", "--set", "training.rounds=50")
    text = invoke("recipe", *arguments).stdout
    (tmp_path / "my.yaml").write_text(text)
    expected = Recipe.parse({"method": "fedprox", "training": {"rounds": 50}}).resolved()
    assert Recipe.load("my.yaml").resolved() == yaml.safe_load(text) == expected
    assert last_line(invoke("recipe", *arguments, "--json")) == expected
    assert yaml.safe_load(invoke("recipe", "demo").stdout)["data"]["name"] == "digits"


def test_data_plot_writes_a_picture() -> None:
    result = invoke("data", "plot", "--clients", "5", "--partition", "dirichlet:0.5", "--to", "[who].png", "--json")
    assert last_line(result) == {"picture": "[who].png", "clients": 5, "classes": 10}
    assert Path("[who].png").read_bytes().startswith(b"\x89PNG\r\n")


def test_data_plot_takes_images_of_several_sizes() -> None:
    for label in ("cat", "dog"):
        Path("shop", label).mkdir(parents=True)
        for number in range(12):
            Image.new("L", (8 + number, 30 - number)).save(f"shop/{label}/{number}.png")
    arguments = ["--data", "shop", "--clients", "2", "--partition", "iid", "--to", "who.png", "--json"]
    assert last_line(invoke("data", "plot", *arguments)) == {"picture": "who.png", "clients": 2, "classes": 2}
    with pytest.raises(UserError, match=r"the images differ in size: .*set data\.size"):
        invoke("run", "--data", "shop", "--clients", "2", "--partition", "iid")


MISTAKES = [
    (["run", "--method", "fedavgg"], "method.name = 'fedavgg' is unknown: did you mean 'fedavg'?"),
    (["run", "--set", "training.round=5"], "training.round = 5: there is no such field; did you mean 'rounds'?"),
    (["run", "--engine", "gpu"], "engine.name = 'gpu' is unknown: 'lanes' trains on a GPU"),
    (["run", "--set", "training.rounds"], "--set training.rounds: write field=value"),
    (["run", "--set", "data.augment=[flip"], "--set data.augment=[flip: the value is not YAML"),
    (["run", "--rounds", "0"], "training.rounds = 0: must be at least 1"),
    (["run", "--partition", "domain:0"], "data.partition = 'domain:0': each = '0': must be at least 1"),
    (["run", "--data", "digitz"], "digitz"),
    (["run", "nowhere.yaml"], "recipe 'nowhere.yaml' cannot be read"),
    (["run", "demo"], "describes a comparison of methods; run it with `fedloom compare`"),
    (["compare", "--seeds", "0,x"], "--seeds: 'x' is not a seed"),
    (["compare", "--methods", "local,fedavgg"], "did you mean 'fedavg'?"),
    (["compare", "--methods", "fedprox,local", "--set", "method.mu=1"], "method.mu = 1: a comparison has several"),
    (["methods", "fedproxx"], "did you mean 'fedprox'?"),
    (["recipe", "--model", "cnn9"], "model.name = 'cnn9' is unknown: did you mean 'cnn4'?"),
    (["data", "plot", "--to", "nowhere/x.png"], "--to nowhere/x.png: cannot be written"),
    (["data", "plot", "--to", "x.txt"], "--to x.txt: cannot be written"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_message_and_exit_code_2(arguments, words, capsys, monkeypatch) -> None:
    assert words in refused(capsys, monkeypatch, *arguments)
    assert not Path("runs").exists()


def test_a_folder_that_holds_a_run_is_refused(capsys, monkeypatch) -> None:
    invoke("run", *TINY, "--out", "mine")
    capsys.readouterr()
    said = refused(capsys, monkeypatch, "run", *TINY, "--out", "mine")
    assert "out = 'mine' already holds a run" in said


def test_debug_shows_where_a_mistake_was_found(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fedloom", "run", "--method", "fedavgg", "--debug"])
    with pytest.raises(cli.UserError, match="fedavgg"):
        cli.main()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fedloom", *arguments], capture_output=True, text=True, timeout=120)


def test_the_command_itself_keeps_stdout_for_results() -> None:
    done = command("run", *TINY, "--engine", "processes", "--set", "engine.workers=2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() >= PROMISED
    assert "round 2/2" in done.stderr


def test_the_command_itself_ends_a_mistake_with_2_and_debug_with_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = command("run", "--method", "fedavgg")
    assert (quiet.returncode, quiet.stdout) == (2, "")
    assert "Traceback" not in quiet.stderr
    monkeypatch.setattr(sys, "argv", ["fedloom", "--debug", "run", "--method", "fedavgg"])
    with pytest.raises(UserError, match="did you mean 'fedavg'"):  # raised to the top, where Python prints a traceback
        cli.main()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--mu", "write --set method.mu="),
        ("--algo", "Did you mean '--method'?"),
        ("--global-rounds", "Did you mean '--rounds'?"),
        ("--momentum", "Write --set training.optimizer.momentum="),
        ("--xyz", "No such option"),
    ],
)
def test_an_unknown_option_is_answered_with_the_field_that_is_meant(option: str, words: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(commands.app, ["run", option, "1"])
    assert result.exit_code == 2 and words in result.output and "--out" not in result.output


def test_the_help_names_the_defaults_of_recipes() -> None:
    said = " ".join(CliRunner(env={"COLUMNS": "400"}).invoke(commands.app, ["run", "--help"]).output.split())
    recipe = Recipe()
    training, data = recipe.training, recipe.data
    for value in (
        data.name, data.clients, data.partition, recipe.model.name, training.rounds, training.epochs,
        training.batch_size, training.optimizer.lr, f"{training.fraction:g}", recipe.seed,
    ):  # fmt: skip
        assert f"default: the recipe's, or {value}." in said
    assert f"default: {recipe.method.name}." in said
