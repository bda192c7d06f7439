"""A run's folder: what is in it after a run, and what it refuses."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_experiment

import fedloom
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.reading import without_nan
from fedloom.experiment.files import unwritable
from fedloom.experiment.run_folder import RunFolder

TINY: dict[str, Any] = {
    "data": {"name": "digits", "limit": 200, "clients": 4, "partition": "dirichlet:0.5", "newcomers": 1},
    "training": {"rounds": 3},
    "evaluation": {"every": 2},
}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Recipe, dict[str, Any], Path]]:
    done = {}
    for method in ("fedavg", "local", "fedavg+ft"):
        folder = tmp_path_factory.mktemp("runs") / "deep" / method
        recipe = Recipe.parse(TINY | {"method": method, "out": str(folder)})
        done[method] = (recipe, fedloom.run(recipe), folder)
    return done


def test_the_recipe_in_the_folder_is_the_one_that_ran(runs) -> None:
    for recipe, _, folder in runs.values():
        assert Recipe.load(folder / "recipe.yaml").resolved() == recipe.with_(out=None).resolved()


def test_versions_are_there(runs) -> None:
    versions = json.loads((runs["fedavg"][2] / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert {"python", "machine", "system", "fedloom", "torch", "numpy"} <= versions.keys()


def test_metrics_have_a_line_per_round_with_what_was_promised(runs) -> None:
    for method, (_, _, folder) in runs.items():
        lines = rows(folder / "metrics.jsonl")
        assert [line["round"] for line in lines] == [1, 2, 3]
        for line in lines:
            assert {"round", "loss", "lr", "clients", "up_bytes", "down_bytes", "seconds"} <= line.keys()
            assert line["clients"] == 3  # one of four is a newcomer
            assert 0 < line["train_seconds"] <= line["seconds"]
        tested = [line["round"] for line in lines if "personal_accuracy" in line]
        assert tested == [2, 3]  # every second, and the last
        for line in lines[1:]:
            assert {"global_accuracy", "personal_accuracy", "personal_std", "personal_worst"} <= line.keys()
            assert (line["global_accuracy"] is None) == (method == "local")


def test_the_summary_is_the_last_round_and_what_run_returned(runs) -> None:
    for method, (recipe, returned, folder) in runs.items():
        summary = json.loads((folder / "summary.json").read_text())
        assert summary == returned
        last = rows(folder / "metrics.jsonl")[-1]
        for name in ("global_accuracy", "personal_accuracy", "personal_std"):
            assert summary[name] == last[name]
        assert (summary["method"], summary["rounds"], summary["seed"]) == (method, 3, recipe.seed)
        assert (summary["clients"], summary["run_dir"]) == (4, str(folder))


def test_bytes_are_those_of_the_model_and_none_for_local(runs) -> None:
    floats = (64 * 128 + 128) + (128 * 64 + 64) + (64 * 10 + 10)  # the MLP on 8×8 digits
    for method, expected in (("fedavg", 4 * floats), ("fedavg+ft", 4 * floats), ("local", 0)):
        summary = runs[method][1]
        assert (summary["up_bytes"], summary["down_bytes"]) == (expected, expected)


def test_clients_have_a_line_each_that_adds_up(runs) -> None:
    for _, summary, folder in runs.values():
        clients = rows(folder / "clients.jsonl")
        assert [row["client"] for row in clients] == [0, 1, 2, 3]
        assert sum(row["newcomer"] for row in clients) == 1
        for row in clients:
            assert len(row["right"]) == len(row["total"]) == 10
            assert row["accuracy"] == pytest.approx(sum(row["right"]) / sum(row["total"]))
        own = [row["accuracy"] for row in clients if not row["newcomer"]]
        assert summary["personal_accuracy"] == pytest.approx(sum(own) / 3)


def test_models_load_and_hold_what_is_shared_and_what_is_personal(runs) -> None:
    shared = load_file(runs["fedavg"][2] / "models" / "server.safetensors")
    assert shared["model.head.weight"].shape == (10, 64)
    names = [path.name for path in sorted((runs["fedavg"][2] / "models").iterdir())]
    assert names == ["initial.safetensors", "server.safetensors"]
    assert load_file(runs["fedavg"][2] / "models" / "initial.safetensors") == {}  # the server holds everything
    assert load_file(runs["local"][2] / "models" / "initial.safetensors").keys() == shared.keys()
    assert load_file(runs["local"][2] / "models" / "server.safetensors") == {}
    for client in range(4):
        whole = load_file(runs["local"][2] / "models" / f"client-{client:05d}.safetensors")
        assert whole.keys() == shared.keys()
        head = load_file(runs["fedavg+ft"][2] / "models" / f"client-{client:05d}.safetensors")
        assert head.keys() == {"model.head.weight", "model.head.bias"}


def test_a_folder_that_holds_a_run_is_refused_and_untouched(runs) -> None:
    recipe, _, folder = runs["fedavg"]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="already holds a run: choose another folder") as error:
        fedloom.run(recipe)
    assert str(folder) in str(error.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out = .*cannot be created"):
        RunFolder(tmp_path / "file" / "run")


def test_fresh_folders_never_collide(tmp_path: Path) -> None:
    paths = []
    for _ in range(5):
        paths.append(RunFolder.fresh(tmp_path, "x"))
        paths[-1].mkdir()
    assert len(set(paths)) == 5


def test_nan_becomes_null_everywhere(tmp_path: Path) -> None:
    assert without_nan({"a": [float("nan"), 1.0, (float("inf"), "NaN")], "b": None, "c": 3}) == {
        "a": [None, 1.0, [None, "NaN"]],
        "b": None,
        "c": 3,
    }
    folder = RunFolder(tmp_path / "run")
    folder.record({"round": 1, "loss": float("nan")})
    folder.write_json("x.json", {"y": [float("-inf")]})
    folder.write_lines("z.jsonl", [{"accuracy": float("nan")}, {"accuracy": 0.5}])
    folder.close()
    assert rows(folder.path / "metrics.jsonl") == [{"round": 1, "loss": None}]
    assert json.loads((folder.path / "x.json").read_text()) == {"y": [None]}
    assert rows(folder.path / "z.jsonl") == [{"accuracy": None}, {"accuracy": 0.5}]


def test_a_model_whose_tensors_share_memory_is_written(tmp_path: Path) -> None:
    rows_of_one = torch.arange(6.0).reshape(3, 2)
    folder = RunFolder(tmp_path / "run")
    folder.write_model("m", {"a": rows_of_one[0], "b": rows_of_one[0], "c": rows_of_one.T})
    folder.close()
    back = load_file(folder.path / "models" / "m.safetensors")
    assert torch.equal(back["b"], torch.tensor([0.0, 1.0]))
    assert torch.equal(back["c"], rows_of_one.T)


def test_a_folder_whose_run_is_in_progress_is_refused_without_a_command_that_resumes_it(tmp_path):
    held = RunFolder(tmp_path / "run")
    (tmp_path / "run/recipe.yaml").touch()
    with pytest.raises(UserError, match="another process is using this folder"):
        RunFolder(tmp_path / "run")
    held.close()
    with pytest.raises(UserError, match="already holds a run: .* fedloom resume"):
        RunFolder(tmp_path / "run")


def test_a_run_whose_folder_is_moved_ends_instead_of_making_it_anew(tmp_path):
    def move(record):
        if record["round"] == 1:
            (tmp_path / "run").rename(tmp_path / "moved")

    experiment = tiny_experiment("fedper", out=tmp_path / "run", on_round=move, storage__checkpoint_every=1)
    with pytest.raises(UserError, match=r"run/checkpoints' cannot be written: No such file or directory"):
        experiment.run()
    assert not (tmp_path / "run").exists()
    tiny_experiment("fedper", out=tmp_path / "moved").run(resume=True)


def test_an_error_is_not_hidden_by_a_disk_that_is_full(tmp_path, monkeypatch):
    def die(record):
        def full(*_):
            raise UserError("the disk is full")

        monkeypatch.setattr("fedloom.experiment.checkpoint.write_whole", full)
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause") as ended:
        tiny_experiment("fedavg", out=tmp_path / "run", on_round=die).run()
    assert ended.value.__notes__[0] == "no checkpoint: the disk is full"
    assert ended.value.__notes__[1].startswith("rounds after the last checkpoint are repeated; resume with")


@pytest.mark.parametrize("when", ["in the middle", "at the end"])
def test_a_run_whose_folder_was_taken_over_writes_neither_checkpoints_nor_results(tmp_path, when):
    def lose(record):
        if record["round"] == (2 if when == "in the middle" else 3):
            before.update({path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()})
            experiment.folder._lock.lost = "process 1 on elsewhere"
            if when == "in the middle":
                raise ValueError("the cause")

    before: dict[Path, bytes] = {}
    fields = {"training__rounds": 3, "storage__checkpoint_every": 1}
    experiment = tiny_experiment("fedavg", out=tmp_path / "run", on_round=lose, **fields)
    with pytest.raises((ValueError, UserError)) as ended:
        experiment.run()
    words = [str(ended.value), *getattr(ended.value, "__notes__", [])]
    assert any("another process has taken this folder over" in text for text in words)
    assert before and all(path.read_bytes() == content for path, content in before.items() if path.name != "log.txt")
    assert {path for path in (tmp_path / "run").rglob("*") if path.is_file()} == before.keys()


def test_a_folder_without_permission_is_named_as_what_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("os.stat", refuse)
        error = unwritable(tmp_path / "run/metrics.jsonl", PermissionError(errno.EACCES, "Permission denied"))
    assert "run/metrics.jsonl' cannot be written: Permission denied" in str(error)


def test_the_time_before_a_run_was_resumed_counts(tmp_path, monkeypatch):
    clock = [0.0]

    def take(record):
        clock[0] += 100
        if clock[0] == 200:
            raise ValueError("the cause")

    monkeypatch.setattr("fedloom.experiment.run_checkpoints.perf_counter", lambda: clock[0])
    with pytest.raises(ValueError, match="the cause"):
        tiny_experiment("fedavg", out=tmp_path / "run", on_round=take, training__rounds=3).run()
    resumed = tiny_experiment("fedavg", out=tmp_path / "run", on_round=take, training__rounds=3)
    assert resumed.run(resume=True)["seconds"] == 300
