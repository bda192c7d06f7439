"""`fedloom migrate` translates PFLlib's command lines."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli import commands
from fedloom.cli.pfllib import FIELDS, METHODS, OPTIONS, PFLLIB_FLAGS, translated
from fedloom.config.loading import raw_recipe, read_assignment
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError

ROOT = Path(__file__).parents[2]


def recipe_of(command: list[str]) -> Recipe:
    """Read the printed command as `fedloom run` does."""
    assert command[:3] == ["fedloom", "run", "pfllib/setting"]
    pairs = list(zip(command[3::2], command[4::2], strict=True))
    fields: dict[str, object] = {name[2:].replace("-", "_"): value for name, value in pairs if name != "--set"}
    fields |= dict(read_assignment(value) for name, value in pairs if name == "--set")
    return Recipe.parse(raw_recipe("pfllib/setting", fields))


def test_the_flags_of_a_usual_command() -> None:
    text = "-data Cifar10 -algo FedProx -m CNN -nc 10 -jr 0.5 -gr 200 -ls 2 -lbs 16 -lr 0.01 -mu 0.1 -eg 5 -ncl 10"
    command, remarks = translated(text.split())
    recipe = recipe_of(command)
    assert (recipe.data.name, recipe.data.clients, recipe.data.partition) == ("cifar10", 10, "capped-dirichlet:0.1")
    training = recipe.training
    assert (training.rounds, training.epochs, training.batch_size, training.fraction) == (200, 2, 16, 0.5)
    assert (training.optimizer.name, training.optimizer.lr, recipe.evaluation.every) == ("sgd", 0.01, 5)
    assert (recipe.method.name, recipe.method.options) == ("fedprox", {"mu": 0.1})
    assert remarks[0] == "-ncl 10: not needed, follows from the data"
    assert len(remarks) == 2  # and what the division is


def test_flags_that_are_not_given_have_pfllibs_defaults() -> None:
    recipe = recipe_of(translated(["python", "-u", "system/main.py"])[0])
    assert (recipe.data.name, recipe.data.clients, recipe.method.name) == ("mnist", 20, "fedavg")
    assert (recipe.training.rounds, recipe.training.batch_size, recipe.training.optimizer.lr) == (2000, 10, 0.005)


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_method_that_both_have_with_all_its_hyperparameters(algorithm: str) -> None:
    ours = OPTIONS.get(algorithm, {})
    command, remarks = translated(["-algo", algorithm, *(part for name in ours for part in (f"--{name}", "1"))])
    recipe = recipe_of(command)
    assert recipe.method.name == METHODS[algorithm]
    assert {recipe.method.options[name] for name in ours.values()} <= {1}
    assert len(remarks) == 1


@pytest.mark.parametrize("flag", [names.split()[0] for names in PFLLIB_FLAGS])
def test_every_flag_is_translated_or_named(flag: str) -> None:
    value = {"data": "Cifar100", "algo": "FedRep", "m": "ResNet18", "dev": "cpu"}.get(flag, "2")
    plain, _ = translated([])
    command, remarks = translated([f"-{flag}", value])
    assert command != plain or remarks[0].startswith(f"-{flag} {value}: ") or flag == "ldg"


def test_what_belongs_together() -> None:
    text = "-ld True -ldg 0.9 -nc 15 -nnc 5 -algo FedALA -s 50 -cdr 0.2 -p 2"
    recipe = recipe_of(translated(text.split())[0])
    assert recipe.training.schedule == "exponential:0.9"
    assert (recipe.data.clients, recipe.data.newcomers, recipe.faults.lost) == (20, 5, 0.2)
    assert recipe.method.options == {"fraction": 0.5}
    assert recipe_of(translated(["-algo", "PerAvg", "-lr", "0.02"])[0]).method.options == {"alpha": 0.02}
    assert "-ld False: counts as true in PFLlib" in translated(["-ld", "False"])[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-algo FedFomo", r"-algo FedFomo: has no equivalent: .*FedProx"),
        ("-data Shakespeare", r"-data Shakespeare: has no equivalent: .*Cifar10"),
        ("-m fastText", r"-m fastText: has no equivalent: .*ResNet18"),
        ("-foo 3", r"-foo: PFLlib's main.py has no such flag"),
        ("-nc twenty", r"-nc twenty: must be a whole number"),
        ("-data", r"argument -data/--dataset: expected one argument"),
    ],
)
def test_what_cannot_be_translated_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        translated(arguments.split())


def test_the_command_prints_it_and_run_points_to_it() -> None:
    arguments = ["-data", "Cifar10", "-algo", "FedAvg", "-gr", "2000", "-nc", "20", "-jr", "1", "-t", "3"]
    shown = CliRunner().invoke(commands.app, ["migrate", *arguments])
    assert (
        shown.stdout
        == "fedloom run pfllib/setting --data cifar10 --method fedavg --clients 20 --rounds 2000 --fraction 1\n"
    )
    assert "-t 3: no equivalent; use fedloom compare … --seeds 0,1,2" in shown.stderr
    refused = CliRunner().invoke(commands.app, ["run", *arguments], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert f"For PFLlib's flags: fedloom migrate {shlex.join(arguments)}" in refused.stderr


def test_the_guide_has_the_command_that_is_printed_and_every_flag() -> None:
    guide = (ROOT / "docs/how-to/migrate.md").read_text(encoding="utf-8")
    given = next(line for line in guide.splitlines() if line.startswith("fedloom migrate -"))
    printed = guide.partition("It prints\n\n```\n")[2].partition("\n```")[0].replace("\\\n  ", "")
    assert translated(shlex.split(given)[2:])[0] == shlex.split(printed)
    names = [names.split()[0] for names in PFLLIB_FLAGS]
    assert [name for name in names if f"`-{name}`" not in guide] == []
    assert all(flag in guide for flag in FIELDS.values())
