"""Where files are not there: what is said, and what the hub is asked for."""

import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.cli.catalogue import datasets
from fedloom.core.errors import UserError
from fedloom.data import data_folder, load
from fedloom.data.sources import SOURCES, Source
from fedloom.data.sources.idx import FashionMnist


class FakeSplit:
    """As much of a hub table as is used: rows by number, columns by name, features."""

    def __init__(self, columns: dict[str, list[Any]], classes: tuple[str, ...]):
        self.columns = columns
        self.features = {name: SimpleNamespace(names=classes) for name in columns}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def cast_column(self, name: str, kind: Any) -> "FakeSplit":
        assert kind == "files"
        return FakeSplit(self.columns | {name: [_as_file(one) for one in self.columns[name]]}, ())

    def __getitem__(self, key: str | int) -> Any:
        return self.columns[key] if isinstance(key, str) else {k: v[key] for k, v in self.columns.items()}


def _as_file(picture: Image.Image) -> dict[str, Any]:
    file = BytesIO()
    picture.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], list[tuple[str, str | None]]]:
    def install(tables: dict[str, Any]) -> list[tuple[str, str | None]]:
        asked: list[tuple[str, str | None]] = []

        def load_dataset(repo: str, config: str | None = None) -> Any:
            asked.append((repo, config))
            if repo not in tables:
                raise ConnectionError("no route to the hub")
            return tables[repo]

        module = ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        module.Image = lambda decode: "pictures" if decode else "files"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    return install


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)


@pytest.mark.usefixtures("no_hub")
def test_missing_files_are_named_with_their_folder_and_the_command_that_gets_them(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load("cifar10", folder=tmp_path / "my data")
    words = str(caught.value)
    assert f"data folder {tmp_path}/my data: expected files cifar-10-batches-py/data_batch_1," in words
    assert "cifar-10-batches-py/batches.meta" in words
    assert "fedloom[hub]" in words
    command = words.split("get it with: ")[1]
    assert command == (
        f"mkdir -p '{tmp_path}/my data' && curl -L https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz "
        f"| tar xz -C '{tmp_path}/my data'"
    )


@pytest.mark.usefixtures("no_hub")
def test_every_source_says_how_to_get_it(tmp_path: Path) -> None:
    shipped = {name: source for name, source in SOURCES.items() if isinstance(source, Source) and name != "digits"}
    assert len(shipped) > 10
    for name, source in shipped.items():  # other entries are datasets that other tests passed as objects
        with pytest.raises(UserError) as caught:
            load(name, folder=tmp_path)
        words = str(caught.value)
        assert str(tmp_path) in words
        assert source.layouts[0][0] in words
        assert len(words.split("get it with: ")[1]) > 20
        assert "{" not in words or "curl" in words


@pytest.mark.usefixtures("no_hub")
def test_fashion_mnist_offers_debians_package_and_is_found_where_it_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_idx: Callable[..., None]
) -> None:
    with pytest.raises(UserError, match="apt-get install dataset-fashion-mnist"):
        load("fashion-mnist", folder=tmp_path / "empty")
    monkeypatch.setattr(FashionMnist, "also", (tmp_path / "share",))
    for part, count in (("train", 3), ("t10k", 2)):
        write_idx(tmp_path / f"share/fashion-mnist/{part}-images-idx3-ubyte.gz", np.zeros((count, 28, 28)))
        write_idx(tmp_path / f"share/fashion-mnist/{part}-labels-idx1-ubyte.gz", np.zeros(count))
    assert len(load("fashion-mnist", folder=tmp_path / "empty")) == 5


def test_the_data_folder_is_the_argument_then_the_variable_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data_folder() == tmp_path / "cache/fedloom/data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_folder() == tmp_path / "home/.cache/fedloom/data"
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "chosen"))
    assert data_folder() == tmp_path / "chosen"
    assert data_folder("~/mine") == tmp_path / "home/mine"


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UserError, match="unknown dataset 'cifar-10': did you mean 'cifar10'"):
        load("cifar-10")
    with pytest.raises(UserError, match="unknown dataset 'minst': did you mean 'mnist'"):
        load("minst+usps")
    with pytest.raises(UserError, match=r"data\.size: 0"):
        load("digits", size=0)


def test_datasets_are_described_with_whether_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "usps").mkdir()
    (tmp_path / "usps/usps.h5").touch()
    infos = {info["name"]: info for info in datasets(tmp_path)}
    assert [name for name, info in infos.items() if info["found"]] == ["digits", "usps"]
    assert {name: infos[name]["classes"] for name in ("cifar100", "emnist", "office-home", "adaptiope")} == {
        "cifar100": 100,
        "emnist": 47,
        "office-home": 65,
        "adaptiope": 123,
    }
    assert infos["usps"]["files"] == [["usps/usps.bz2", "usps/usps.t.bz2"], ["usps/usps.h5"]]
    assert infos["cinic10"]["hub"] == "flwrlabs/cinic10"
    assert list(infos) == sorted(infos)


def picture(value: Any, mode: str = "RGB", size: tuple[int, int] = (32, 32)) -> Image.Image:
    return Image.new(mode, size, value)


def test_the_hub_is_asked_where_files_are_missing_and_its_answer_is_kept(tmp_path: Path, fake_hub: Any) -> None:
    names = tuple(f"c{i}" for i in range(10))
    asked = fake_hub(
        {
            "uoft-cs/cifar10": {
                "train": FakeSplit({"img": [picture((i, 0, 9)) for i in range(3)], "label": [3, 1, 4]}, names),
                "test": FakeSplit({"img": [picture((7, 7, 7))], "label": [9]}, names),
            }
        }
    )
    for _ in range(2):
        dataset = load("cifar10", folder=tmp_path)
        assert dataset.inputs.shape == (4, 3, 32, 32)
        assert dataset.inputs[:, :, 5, 5].tolist() == [[0, 0, 9], [1, 0, 9], [2, 0, 9], [7, 7, 7]]
        assert dataset.labels.tolist() == [3, 1, 4, 9]
        assert dataset.test.tolist() == [False] * 3 + [True]
        assert (dataset.name, dataset.classes) == ("cifar10", names)
    assert asked == [("uoft-cs/cifar10", None)]
    assert {info["name"] for info in datasets(tmp_path) if info["found"]} == {"digits", "cifar10"}


def test_columns_splits_and_configurations_of_the_hub_are_respected(tmp_path: Path, fake_hub: Any) -> None:
    def split(label: str, values: list[int]) -> FakeSplit:
        return FakeSplit({"image": [picture(0)] * len(values), "img": [picture(0)] * len(values), label: values}, ())

    asked = fake_hub(
        {
            "ufldl-stanford/svhn": {"train": split("label", [0]), "test": split("label", [1]), "extra": None},
            "flwrlabs/cinic10": {
                "train": FakeSplit({"image": [picture(0)], "label": [0]}, tuple("abcdefghij")),
                "validation": split("label", [2]),
                "test": split("label", [3]),
            },
            "uoft-cs/cifar100": {
                "train": FakeSplit({"img": [picture(0)], "fine_label": [88]}, tuple(map(str, range(100)))),
                "test": split("fine_label", [99]),
            },
        }
    )
    assert load("svhn", folder=tmp_path).labels.tolist() == [0, 1]
    assert asked == [("ufldl-stanford/svhn", "cropped_digits")]
    cinic = load("cinic10", folder=tmp_path)
    assert (cinic.labels.tolist(), cinic.test.tolist()) == ([0, 2, 3], [False, False, True])
    assert load("cifar100", folder=tmp_path).labels.tolist() == [88, 99]


def test_office_home_from_the_hub_has_its_styles_and_is_kept_per_size(tmp_path: Path, fake_hub: Any) -> None:
    columns = {
        "image": [picture((1, 1, 1), size=(20, 30)), picture(5, "L", (9, 9)), picture((1, 1, 1))],
        "domain": ["Product", "Art", "Product"],
        "label": [64, 0, 1],
    }
    asked = fake_hub({"flwrlabs/office-home": {"train": FakeSplit(columns, tuple(map(str, range(65))))}})
    with pytest.raises(UserError, match=r"^the images differ in size: .*set data\.size"):
        load("office-home", folder=tmp_path)
    for size in (8, 4, 8):
        dataset = load("office-home", folder=tmp_path, size=size)
        assert dataset.inputs.shape == (3, 3, size, size)
        assert dataset.group_names == ("Art", "Product")
        assert dataset.groups is not None
        assert dataset.groups.tolist() == [1, 0, 1]
        assert not bool(dataset.test.any())
    assert len(asked) == 3


def test_letters_from_the_hub_are_turned_upright(tmp_path: Path, fake_hub: Any) -> None:
    lying = np.arange(28 * 28).reshape(28, 28).astype(np.uint8)
    table = FakeSplit({"image": [Image.fromarray(lying)], "label": [25]}, ())
    fake_hub({"tanganke/emnist_letters": {"train": table, "test": table}})
    dataset = load("emnist-letters", folder=tmp_path)
    assert np.array_equal(dataset.inputs[0, 0].numpy(), lying.T)


def test_emnists_original_files_are_copied_from_the_hub(
    tmp_path: Path, fake_hub: Any, write_idx: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, name: str, *, repo_type: str, local_dir: Path) -> None:
        assert (repo, repo_type) == ("Royc30ne/emnist-balanced", "dataset")
        write_idx(local_dir / name, np.zeros((2, 28, 28) if "images" in name else 2))

    fake_hub({})
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    assert load("emnist", folder=tmp_path).inputs.shape == (4, 1, 28, 28)
    assert (tmp_path / "emnist/emnist-balanced-test-labels-idx1-ubyte.gz").exists()


def test_a_hub_out_of_reach_is_said_with_the_files_and_the_command(tmp_path: Path, fake_hub: Any) -> None:
    fake_hub({"uoft-cs/cifar10": {"train": None}})
    with pytest.raises(UserError) as caught:
        load("mnist", folder=tmp_path)
    words = str(caught.value)
    assert "fetching ylecun/mnist from the Hugging Face hub failed (ConnectionError: no route to the hub)" in words
    assert f"{tmp_path}: expected files mnist/train-images-idx3-ubyte" in words
    assert "get it with: curl" in words
    with pytest.raises(UserError, match="no longer has the split 'test'"):
        load("cifar10", folder=tmp_path)
