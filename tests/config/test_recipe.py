"""A recipe survives YAML, takes single fields, and refuses mistakes in words that help."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.config.loading import assign, raw_recipe, read_assignment, read_yaml, shipped
from fedloom.config.recipe import Recipe
from fedloom.core.checking import checked
from fedloom.core.errors import UserError
from fedloom.runs.compare import compare
from fedloom.runs.comparison import recipe_of
from fedloom.runs.run import run
from fedloom.runs.sweep import Sweep, settings

NAN, INF = float("nan"), float("inf")

FULL = {
    "method": {"name": "fedprox+ft", "mu": 0.01, "norm": "l2", "ft_epochs": 3, "ft_lr": 1e-05},
    "data": {
        "name": "mnist+usps", "dir": "somewhere", "size": 28, "limit": 500, "clients": 10, "partition": "domain:5:0.5",
        "split": "official", "minimum": 3, "newcomers": 0.2, "resample": True, "augment": ["crop:2", "jitter:0.3"],
        "views": ["resized-crop", "flip"], "normalise": "channels", "seed": 7,
    },
    "model": {"name": "cnn2", "dropout": 0.1},
    "training": {
        "rounds": 3, "fraction": 0.25, "epochs": 2, "batch_size": 8, "schedule": "step:2=0.5,3=0.05",
        "warmup": 2,
        "optimizer": {
            "name": "adam", "lr": 1e-05, "momentum": 0.5, "weight_decay": 0.0001, "betas": [0.8, 0.99], "eps": 1e-10,
            "keep": True, "decay_norms": False, "clip": 1.0, "alpha": 0.9,
        },
    },
    "evaluation": {"every": 2, "clients": 5, "summary": "median:10"},
    "engine": {"name": "processes", "workers": 3, "device": "cpu"},
    "storage": {"memory_mb": 16, "personal_models": False},
    "seed": 11,
    "out": "runs/ünïcode",
}  # fmt: skip


@pytest.mark.parametrize("values", [{}, FULL, {"method": "local", "engine": "replay"}, {"method": "fedavg+ft"}])
def test_yaml_gives_back_the_same_resolved_recipe(values: dict[str, Any], tmp_path: Path) -> None:
    recipe = Recipe.parse(values)
    (tmp_path / "r.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    again = Recipe.load(tmp_path / "r.yaml")
    assert again.resolved() == recipe.resolved()
    assert again.to_yaml() == recipe.to_yaml()


def test_every_written_value_is_in_the_resolved_recipe() -> None:
    resolved = yaml.safe_load(Recipe.parse(FULL).to_yaml())
    for name, written in FULL.items():
        assert resolved[name] == (resolved[name] | written if isinstance(written, dict) else written)


def test_the_resolved_recipe_shows_hyperparameters_that_were_not_written() -> None:
    shown = Recipe.parse({"method": {"name": "fedprox", "norm": "l2"}}).resolved()["method"]
    assert (shown["name"], shown["mu"], shown["norm"]) == ("fedprox", 0.1, "l2")


def test_short_forms_are_the_names_of_sections() -> None:
    short = Recipe.parse({"method": "fedprox", "data": "digits", "model": "cnn2", "engine": "processes"})
    long = {"method": {"name": "fedprox"}, "data": {"name": "digits"}, "model": {"name": "cnn2"}}
    assert short == Recipe.parse(long | {"engine": {"name": "processes"}})


def test_an_empty_section_is_its_defaults() -> None:
    assert Recipe.parse({"training": None, "method": None}) == Recipe.parse({})


def test_betas_default_to_those_of_the_optimizer() -> None:
    lion = Recipe.parse({"training": {"optimizer": {"name": "lion"}}})
    assert lion.training.optimizer.betas == (0.9, 0.99)
    assert Recipe.parse(yaml.safe_load(lion.to_yaml())).resolved() == lion.resolved()
    assert lion.with_("training.optimizer.name=adam").training.optimizer.betas == (0.9, 0.999)
    assert lion.with_("training.optimizer.betas=[0.8, 0.9]").training.optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("training.rounds=5", "training.rounds", 5),
        ("training.optimizer.lr=1e-3", "training.optimizer.lr", 0.001),
        ("training.optimizer.lr=-2.5E+2", "training.optimizer.lr", -250.0),
        ("data.partition=dirichlet:0.1", "data.partition", "dirichlet:0.1"),
        ("training.schedule=step:50=0.2,75=0.02", "training.schedule", "step:50=0.2,75=0.02"),
        ("data.augment=[crop:4, flip]", "data.augment", ["crop:4", "flip"]),
        ("data.resample=true", "data.resample", True),
        ("out=", "out", None),
        (" seed =3", "seed", 3),
        ("method={name: fedprox, mu: 1}", "method", {"name": "fedprox", "mu": 1}),
    ],
)
def test_set_reads_values_as_yaml(text: str, path: str, value: Any) -> None:
    assert read_assignment(text) == (path, value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training.rounds", ["training.rounds", "write field=value"]),
        ("=5", ["=5", "write field=value"]),
        ("training..rounds=5", ["training..rounds=5", "write field=value"]),
        ("data.augment=[flip", ["--set data.augment=[flip", "not YAML"]),
    ],
)
def test_set_refuses_what_is_no_assignment(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        read_assignment(text)
    assert all(word in str(error.value) for word in words)


def test_assign_goes_into_sections_short_forms_and_empty_ones() -> None:
    values: dict[str, Any] = {"method": "fedprox", "training": None, "seed": 0}
    assign(values, "method.mu", 0.5)
    assign(values, "training.optimizer.lr", 0.1)
    assign(values, "seed", 2)
    assert values == {"method": {"name": "fedprox", "mu": 0.5}, "training": {"optimizer": {"lr": 0.1}}, "seed": 2}
    with pytest.raises(UserError, match=r"seed\.x = 1: 'seed' is 2, which has no fields"):
        assign(values, "seed.x", 1)


def test_with_changes_fields_and_leaves_the_recipe_alone() -> None:
    recipe = Recipe.parse({"method": "fedprox", "training": {"rounds": 3}})
    changed = recipe.with_("method.mu=1e-2", "training.epochs=4", seed=5)
    assert (changed.method.options, changed.training.rounds) == ({"mu": 0.01}, 3)
    assert (changed.training.epochs, changed.seed) == (4, 5)
    assert recipe.resolved()["method"]["mu"] == 0.1
    with pytest.raises(UserError, match=r"training\.epoch = 4: there is no such field; did you mean 'epochs'"):
        recipe.with_("training.epoch=4")


def test_fields_override_a_recipe_and_leave_the_mapping_alone() -> None:
    given = {"method": "fedprox", "training": {"rounds": 3}}
    fields = {"rounds": 9, "method.mu": 0.5, "data": "digits", "out": Path("there")}
    values = raw_recipe(given, fields)
    assert values == {
        "method": {"name": "fedprox", "mu": 0.5},
        "training": {"rounds": 9},
        "data": {"name": "digits"},
        "out": "there",
    }
    assert given == {"method": "fedprox", "training": {"rounds": 3}}


def test_a_section_sets_its_fields_and_leaves_the_others() -> None:
    given = {"training": {"rounds": 2, "optimizer": {"lr": 0.01, "momentum": 0.5}}, "data": "digits"}
    section = {"epochs": 3, "optimizer": {"lr": 0.2}}
    both = {"rounds": 2, "epochs": 3, "optimizer": {"lr": 0.2, "momentum": 0.5}}
    assert raw_recipe(given, {"training": section})["training"] == both
    for fields in ({"rounds": 9, "training": section}, {"training": section, "rounds": 9}):
        assert raw_recipe(given, fields)["training"] == both | {"rounds": 9}
    assert raw_recipe(given, {"data": {"clients": 3}})["data"] == {"name": "digits", "clients": 3}
    objective = {"name": "moco", "momentum": 0.9}
    assert raw_recipe({"objective": objective}, {"objective": {"name": "simclr"}})["objective"] == {"name": "simclr"}
    clients = {"model": {"by_client": {"st. mary": "mlp"}}}
    assert raw_recipe(None, clients) == clients
    lora = {"rank": 4}
    for fields in ({"model": "vit", "model.lora": lora}, {"model.lora": lora, "model": "vit"}):
        assert raw_recipe(None, fields)["model"] == {"name": "vit", "lora": lora}


def test_another_method_takes_nothing_of_the_one_it_replaces() -> None:
    given = {"method": {"name": "fedprox", "mu": 1.0}, "model": {"name": "cnn2", "dropout": 0.1}}
    assert raw_recipe(given, {"method": "fedavg", "model": "mlp"}) == {"method": "fedavg", "model": "mlp"}
    assert raw_recipe(given, {"method": "fedprox", "model": "cnn2"}) == given


WRONG: list[tuple[dict[Any, Any], list[str]]] = [
    # unknown keys
    ({"methud": "fedavg"}, ["methud = 'fedavg'", "no such field", "did you mean 'method'"]),
    ({"data": {"clinets": 3}}, ["data.clinets = 3", "no such field", "did you mean 'clients'"]),
    ({"training": {"batchsize": 3}}, ["training.batchsize = 3", "did you mean 'batch_size'"]),
    ({"training": {"optimizer": {"momentm": 0.5}}}, ["training.optimizer.momentm = 0.5", "did you mean 'momentum'"]),
    ({"evaluation": {"evry": 2}}, ["evaluation.evry = 2", "did you mean 'every'"]),
    ({"storage": {"memory": 2}}, ["storage.memory = 2", "did you mean 'memory_mb'"]),
    ({"engine": {"worker": 2}}, ["engine.worker = 2", "did you mean 'workers'"]),
    ({3: 4}, ["3: there is no such field", "choose one of ", "data, "]),
    # names
    ({"method": "fedavgg"}, ["method.name = 'fedavgg'", "did you mean 'fedavg'"]),
    ({"method": "fedavg+fft"}, ["method.name = 'fedavg+fft'", "did you mean 'ft'"]),
    ({"method": {"name": "fedprox", "mew": 1}}, ["method.mew = 1", "fedprox", "choose one of mu, norm"]),
    ({"method": {"mu": 1}}, ["method.mu = 1", "fedavg has none"]),
    ({"method": {"name": "fedprox", "mu": "big"}}, ["method.mu = 'big'", "number"]),
    ({"method": {"name": "fedprox", "norm": "l3"}}, ["method.norm = 'l3'", "'l2'"]),
    ({"model": "cnn22"}, ["model.name = 'cnn22' is unknown", "did you mean 'cnn2'"]),
    ({"model": {"name": "cnn2", "dropot": 0.1}}, ["model.dropot = 0.1", "did you mean 'dropout'"]),
    ({"model": {"name": "cnn2", "dropout": 2}}, ["model.dropout = 2", "must be below 1"]),
    ({"model": {"name": "cnn2", "dropout": -0.1}}, ["model.dropout = -0.1", "must be at least 0"]),
    ({"engine": "inlne"}, ["engine.name = 'inlne'", "did you mean 'inline'"]),
    ({"engine": {"device": "gpu"}}, ["engine.device = 'gpu'", "choices: auto, cpu, cuda"]),
    ({"data": {"normalise": "haf"}}, ["data.normalise = 'haf'", "did you mean 'half'"]),
    ({"training": {"optimizer": {"name": "adamm"}}}, ["training.optimizer.name = 'adamm'", "did you mean 'adam'"]),
    # small languages
    ({"data": {"partition": "dirichlt:0.1"}}, ["data.partition = 'dirichlt:0.1'", "did you mean 'dirichlet'"]),
    ({"data": {"partition": "dirichlt"}}, ["data.partition", "'dirichlt' is unknown", "did you mean 'dirichlet'"]),
    ({"data": {"partition": "gone.py:mine:3"}}, ["data.partition = 'gone.py:mine'", "there is no file", "gone.py'"]),
    ({"data": {"partition": "dirichlet"}}, ["data.partition = 'dirichlet'", "write it as dirichlet:alpha"]),
    ({"data": {"partition": "dirichlet:-1"}}, ["data.partition = 'dirichlet:-1'", "alpha = '-1': must be above 0"]),
    ({"data": {"partition": "domain:0:x"}}, ["data.partition = 'domain:0:x'", "each = '0'", "beta = 'x'"]),
    ({"data": {"split": "poled"}}, ["data.split", "'poled'", "did you mean 'pooled:0.75'"]),
    ({"data": {"split": "pooled:2"}}, ["data.split = 'pooled:2'", "between 0 and 1"]),
    ({"data": {"augment": ["cropp:4"]}}, ["data.augment = ['cropp:4']", "did you mean 'crop'"]),
    ({"data": {"views": ["crop:x"]}}, ["data.views = ['crop:x']", "such as crop:4"]),
    ({"training": {"schedule": "cosin"}}, ["training.schedule", "'cosin'", "cosine"]),
    ({"evaluation": {"summary": "best"}}, ["evaluation.summary", "'best'", "median:10"]),
    # types
    ({"data": {"clients": "many"}}, ["data.clients = 'many'", "a whole number"]),
    ({"data": {"clients": 2.5}}, ["data.clients = 2.5", "a whole number"]),
    ({"data": {"clients": True}}, ["data.clients = True", "must be a number"]),
    ({"data": {"augment": "flip"}}, ["data.augment = 'flip'", "must be a list"]),
    ({"data": {"dir": 3}}, ["data.dir = 3", "must be a path"]),
    ({"data": {"partition": 3}}, ["data.partition = 3", "must be text"]),
    ({"method": 3}, ["method = 3", "a name or a section"]),
    ({"training": [1]}, ["training = [1]", "a section with the fields rounds"]),
    ({"training": {"optimizer": "adam"}}, ["training.optimizer = 'adam'", "a section", "momentum"]),
    ({"training": {"optimizer": {"betas": [0.1]}}}, ["training.optimizer.betas", "[0.1]"]),
    ({"training": {"optimizer": {"lr": INF}}}, ["training.optimizer.lr = inf", "a finite number"]),
    ({"method": {"name": "fedprox", "mu": NAN}}, ["method.mu = nan", "a finite number"]),
    ({"storage": {"personal_models": "maybe"}}, ["storage.personal_models = 'maybe'", "true or false"]),
    ({"seed": None}, ["seed = None", "a whole number"]),
    # ranges
    ({"data": {"clients": 0}}, ["data.clients = 0", "at least 1"]),
    ({"data": {"size": 2}}, ["data.size = 2", "at least 4"]),
    ({"training": {"fraction": 0}}, ["training.fraction = 0", "above 0"]),
    ({"training": {"fraction": 1.5}}, ["training.fraction = 1.5", "at most 1"]),
    ({"training": {"optimizer": {"momentum": 1}}}, ["training.optimizer.momentum = 1", "below 1"]),
    ({"training": {"optimizer": {"lr": 0}}}, ["training.optimizer.lr = 0", "above 0"]),
    ({"storage": {"memory_mb": 0}}, ["storage.memory_mb = 0", "at least 1"]),
    ({"seed": -1}, ["seed = -1", "at least 0"]),
    # impossible together
    ({"method": "local+ft"}, ["method.name = 'local+ft'", "local has no global model"]),
    ({"data": {"newcomers": 20}}, ["data.newcomers = 20", "data.clients = 20", "at most 19"]),
    ({"data": {"newcomers": 0.99, "clients": 3}}, ["data.newcomers = 0.99", "data.clients = 3"]),
    ({"data": {"newcomers": 1.5}}, ["data.newcomers = 1.5", "a whole number, or a share below 1"]),
    ({"engine": {"name": "processes", "device": "cuda"}}, ["engine.device = 'cuda'", "'processes'", "inline"]),
    ({"compare": {"methods": ["fedavg"]}}, ["compare", "a comparison", "fedloom compare"]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), WRONG, ids=[words[0] for _, words in WRONG])
def test_a_mistake_is_refused_with_field_value_and_remedy(values: dict[Any, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        Recipe.parse(values)
    message = str(error.value)
    assert [word for word in words if word not in message] == []
    assert len(message.splitlines()) == 1
    field = words[0].split(" ")[0].rstrip(":")
    assert message.startswith(field)
    assert message.count(f"{field} = ") <= 1


def test_all_mistakes_are_told_at_once_a_line_each() -> None:
    with pytest.raises(UserError) as error:
        Recipe.parse({"training": {"rounds": 0, "epochs": -1}, "data": {"split": "x"}, "model": "x", "seed": -1})
    fields = {line.split()[0].rstrip(":") for line in str(error.value).splitlines()}
    assert fields == {"training.rounds", "training.epochs", "data.split", "model.name", "seed"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"caf\xe9: 1", ["cannot be read", "not UTF-8"]),
        (b"- a\n- b\n", ["must be a mapping", "list"]),
        (b"", ["is empty", "method: fedavg", "fedloom recipe demo"]),
        (b"data: [", ["is not YAML"]),
        (b"!!python/object:os.system {}", ["is not YAML"]),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(content: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        Recipe.load(path)
    assert [word for word in [f"recipe '{path}'", *words] if word not in str(error.value)] == []


def test_a_missing_file_or_a_folder_names_the_shipped_recipes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe 'demoo' cannot be read: No such file.*did you mean 'demo'"):
        Recipe.load("demoo")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        Recipe.load(tmp_path)


@pytest.mark.parametrize("name", list(shipped()))
def test_a_shipped_recipe_is_known_by_its_name_and_valid(name: str) -> None:
    values = read_yaml(name)
    for setting in settings(checked(Sweep, values.pop("sweep"))) if "sweep" in values else []:
        Recipe.parse(raw_recipe(values, setting))
    compared = values.pop("compare", {}).get("methods", [values.get("method", "fedavg")])
    for method in compared:
        recipe_of(values, method, 0, Path("run"))


def test_the_demo_is_shipped() -> None:
    assert "demo" in shipped()


def test_a_number_without_a_point_before_its_exponent_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: {name: cnn2, dropout: 1e-3}\ntraining: {optimizer: {lr: 2E-2}}\n")
    recipe = Recipe.load(tmp_path / "r.yaml")
    assert (recipe.model.options, recipe.training.optimizer.lr) == ({"dropout": 0.001}, 0.02)


def test_run_refuses_a_comparison_in_words() -> None:
    with pytest.raises(UserError, match="describes a comparison of methods; run it with `fedloom compare`"):
        run("demo")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (3, ["compare = 3", "methods, seeds"]),
        ({"method": ["a"]}, ["compare.method", "did you mean 'methods'"]),
        ({"methods": []}, ["compare.methods = []", "1 entr"]),
        ({"seeds": ["a"]}, ["compare.seeds.0 = 'a'", "a whole number"]),
        ({"methods": ["fedavgg"]}, ["method.name = 'fedavgg'", "did you mean 'fedavg'"]),
    ],
)
def test_a_wrong_comparison_is_refused_before_anything_runs(section: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        compare({"compare": section, "out": str(tmp_path / "out")})
    assert [word for word in words if word not in str(error.value)] == []
    assert not (tmp_path / "out").exists()


def test_a_comparison_refuses_hyperparameters_without_a_method() -> None:
    with pytest.raises(UserError, match=r"method\.mu = 0\.5: a comparison has several methods"):
        compare(methods=["fedprox", "fedavg"], **{"method.mu": 0.5})


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"method": "fedprox", "mu": 1}, "method.mu"),
        ({"rounds": 5}, "training.rounds"),
        ({"momentum": 0.9}, "training.optimizer.momentum"),
        ({"training": {"lr": 0.1}}, "training.optimizer.lr"),
        ({"engine": {"clients": 3}}, "data.clients"),
        ({"batchsize": 3}, "training.batch_size"),
        ({"lrr": 3}, "training.optimizer.lr"),
        ({"batch": 3}, "training.batch_size"),
        ({"local_epochs": 3}, "training.epochs"),
        ({"algo": "fedprox"}, "method.name"),
    ],
)
def test_a_field_outside_its_section_is_named_with_the_section(values: dict[str, Any], path: str) -> None:
    with pytest.raises(UserError, match=rf"there is no such field; did you mean '{path}'\?"):
        Recipe.parse(values)


def test_a_text_in_place_of_a_list_is_shown_as_a_list() -> None:
    with pytest.raises(UserError, match=r"data.augment = 'flip': must be a list, such as \[flip\]"):
        Recipe.parse({"data": {"augment": "flip"}})


def test_a_choice_that_is_not_similar_is_not_suggested() -> None:
    with pytest.raises(UserError, match=r"augmentation 'rotate' is unknown: choose one of .*crop, "):
        Recipe.parse({"data": {"augment": ["rotate"]}})
