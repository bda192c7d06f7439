"""Tables as data: types of columns, labels, clients, and what is refused with its remedy."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from fedloom.core.errors import UserError
from fedloom.data import federate, load
from fedloom.data.check_files import check_path

PATIENTS = """age,smoker,ward,site,outcome
40,True,north,x,1000
51,False,south,y,0
62,True,east,x,2000
38,False,north,y,0
47,False,south,x,1000
59,True,east,y,2000
"""


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_numbers_stay_and_texts_become_inputs_of_0_or_1(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "patients.csv", PATIENTS), label="outcome", client="site")
    assert dataset.inputs.dtype == torch.float32
    assert dataset.inputs.tolist()[:3] == [[40, 1, 0, 1, 0], [51, 0, 0, 0, 1], [62, 1, 1, 0, 0]]
    assert (dataset.name, dataset.classes) == ("patients", ("0", "1000", "2000"))
    assert dataset.labels.tolist() == [1, 0, 2, 0, 1, 2]
    assert dataset.group_names == ("x", "y")
    assert dataset.notes == ("columns of texts became inputs of 0 or 1: ward (east, north, south)",)
    federation = federate(dataset, clients=9, partition="natural", split="pooled:0.6", minimum=1, seed=0)
    assert federation.names == ("x", "y")


def test_row_numbers_that_were_saved_with_a_table_are_no_input(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    pandas.DataFrame({"a": [1.5, 2.5, 3.5], "label": [0, 1, 0]}).to_csv(path)
    assert load(str(path)).inputs.tolist() == [[1.5], [2.5], [3.5]]


def test_parquet_and_csv_give_the_same_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", PATIENTS.replace("outcome", "target"))
    frame = pandas.read_csv(tmp_path / "a.csv")
    frame["ward"] = frame["ward"].astype("category")
    frame.to_parquet(tmp_path / "b.parquet")
    one, other = load(str(tmp_path / "a.csv")), load(str(tmp_path / "b.parquet"))
    assert torch.equal(one.inputs, other.inputs) and torch.equal(one.labels, other.labels)
    assert one.inputs.shape == (6, 7)


def test_each_file_of_a_folder_is_a_client(tmp_path: Path) -> None:
    write(tmp_path / "wards/oslo.csv", "a,b,label\n1,u,no\n2,v,yes\n")
    write(tmp_path / "wards/bern.csv", "b,label,a\nw,yes,3\n")
    write(tmp_path / "wards/readme.txt", "x")
    dataset = load("wards", folder=tmp_path)
    assert dataset.group_names == ("bern", "oslo")
    assert dataset.groups is not None and dataset.groups.tolist() == [0, 1, 1]
    assert sorted(map(tuple, dataset.inputs.tolist())) == [(0, 0, 1, 3), (0, 1, 0, 2), (1, 0, 0, 1)]
    with pytest.raises(UserError, match=r"data\.client = 'b': each file in .* is a client"):
        load("wards", folder=tmp_path, client="b")


def test_train_and_test_are_the_official_split(tmp_path: Path) -> None:
    write(tmp_path / "x/train.csv", "a,y\n1,0\n2,1\n")
    write(tmp_path / "x/test.csv", "a,y\n3,1\n")
    dataset = load("x", folder=tmp_path)
    assert dataset.inputs[dataset.test].tolist() == [[3]]
    assert dataset.groups is None


ROWS = "a,b,label\n1,2,0\n3,4,1\n"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a,b\n1,2\n", {}, r"no column is called label, labels, target, class, y; .* data\.label=b \(columns: a, b\)"),
        ("y,label\n1,2\n", {}, "2 columns are called"),
        (ROWS, {"label": "c"}, r"data\.label = 'c': is not a column"),
        (ROWS, {"client": "label"}, r"data\.client = 'label': is not another column"),
        (ROWS, {"size": 8}, r"data\.size = 8: is for images, but .* has tables"),
        (ROWS, {"seconds": 2.0}, r"data\.seconds = 2\.0: is for recordings"),
        ("a,b,label\n1,,0\n?,4,\n,5,1\n", {}, r"missing in a \(2\), b \(1\), label \(1\); fill them"),
        ("a,day,label\n1,2020-01-31,0\n2,2021-02-01,1\n", {}, "columns day have dates; replace them by numbers"),
        ("a,day,label\n1,31.1.2020 10:00,0\n2,1.2.2021 9:30,1\n", {}, "columns day have dates"),
        ("a,label\n1,0\n2,0\n", {}, "all labels in column 'label' are '0'; at least two classes"),
        ("a,label\n1,0.5\n2,1\n", {}, r"labels \(column 'label'\) must be whole numbers or texts"),
        ("a,label\n1,0\n1e99,1\n", {}, "1 of 2 samples contain NaN or infinity"),
        ("label\n0\n1\n", {}, "has no columns besides the label"),
        ("a,label\n", {}, "has no rows"),
        ("", {}, "cannot be read as a CSV table"),
        ("id,label\n" + "".join(f"p{i},{i % 2}\n" for i in range(101)), {}, r"columns id \(101\) have more than 100"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load(write(tmp_path / "t.csv", text), **options)
    assert "\n" not in str(caught.value)


def test_files_with_other_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x/a.csv", ROWS)
    write(tmp_path / "x/b.csv", ROWS.replace("b", "c"))
    with pytest.raises(UserError, match=r"b\.csv: differs from .*a\.csv in column 'b'"):
        load("x", folder=tmp_path)


def test_dates_in_parquet_are_refused_and_damaged_files_named(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"day": pandas.to_datetime(["2020-01-01", "2021-01-01"]), "y": [0, 1]})
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match="columns day have dates"):
        load(str(tmp_path / "t.parquet"))
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"t\.parquet: cannot be read as a Parquet table"):
        load(str(tmp_path / "t.parquet"))


def test_without_pyarrow_csv_is_read_and_parquet_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert len(load(write(tmp_path / "t.csv", ROWS)).labels)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"pip install 'fedloom\[tables\]'"):
        load(str(tmp_path / "t.parquet"))


def test_options_of_tables_are_refused_elsewhere() -> None:
    with pytest.raises(UserError, match=r"data\.label = a: is for tables, but 'digits' has images"):
        load("digits", label="a")


def test_a_table_is_checked_at_once(tmp_path: Path) -> None:
    rows = "".join(f"{i},2020-01-0{1 + i % 9},{'' if i == 3 else i % 2},{'n' if i < 30 else 's'}\n" for i in range(40))
    path = tmp_path / "t.csv"
    write(path, "a,day,outcome,site\n" + rows + "7,2020-01-08,1,s\n")
    found = check_path(path, label="outcome", client="site")
    errors = [finding.text for finding in found.findings if finding.severity == "error"]
    assert [text.split(";")[0] for text in errors] == ["values are missing in outcome (1)", "columns day have dates"]
    copies = next(finding for finding in found.findings if finding.check == "copies across clients")
    assert copies.examples == ("row 8 = row 41",)
    assert (found.classes, found.clients) == ({"0": 20, "1": 20}, {"n": 29, "s": 11})
    assert next(f for f in check_path(path).findings if f.severity == "error").check == "label"


def test_arrays_are_checked(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.savez(tmp_path / "a.npz", x=x, y=[0, 1] * 3, clients=["n", "s"] * 3)
    found = check_path(tmp_path / "a.npz")
    assert (found.number("error"), found.files, found.clients) == (0, 6, {"n": 3, "s": 3})
    np.savez(tmp_path / "a.npz", x=np.full((2, 2), np.nan), y=[0, 1])
    assert "NaN or infinity" in check_path(tmp_path / "a.npz").findings[0].text
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="there is nothing to check in it"):
        check_path(tmp_path / "a.txt")


def test_a_check_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas.DataFrame({"age": [40, 50], "label": [0, 1]}).to_parquet(tmp_path / "patients.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"reading \.parquet needs pyarrow; pip install 'fedloom\[tables\]'"):
        check_path(tmp_path / "patients.parquet")


def test_natural_clients_of_a_table_without_their_column_are_refused_with_its_field(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "patients.csv", PATIENTS), label="outcome")
    with pytest.raises(UserError, match=r"partition = 'natural': the data have no clients or styles; .*data.client="):
        federate(dataset, partition="natural", seed=0)
