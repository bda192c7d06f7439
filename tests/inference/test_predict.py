"""`fedloom predict`: what pictures show, as a table, CSV or JSON."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from using import invoke, last_line, write_pictures

import fedloom
from fedloom import UserError
from fedloom.cli import base


def test_predictions_as_table_csv_and_json(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.out, "_width", 200)
    folder = write_pictures(tmp_path / "some", {6: 3, 9: 2}, start=100)
    (folder / "notes.txt").write_text("no picture")
    files = sorted(str(path) for path in folder.rglob("*.png"))
    model = fedloom.load(runs["fedper"]).personal(2)
    expected = model.probabilities(np.stack([np.asarray(Image.open(file)) for file in files]))
    said = last_line(invoke("predict", runs["fedper"], folder, "--client", 2, "--json"))
    assert [row["file"] for row in said["predictions"]] == files
    for row, likely in zip(said["predictions"], expected, strict=True):
        assert row["class"] == str(likely.argmax())
        assert row["probability"] == pytest.approx(likely.max())
        assert list(row["probabilities"].values()) == pytest.approx(likely.tolist())
    table = invoke("predict", runs["fedper"], *files[:2], "--client", 2).stdout
    assert table.count("│") == 2 * 4
    rows = list(csv.DictReader(io.StringIO(invoke("predict", runs["fedper"], folder, "--client", 2, "--csv").stdout)))
    assert [(row["file"], row["class"]) for row in rows] == [(r["file"], r["class"]) for r in said["predictions"]]
    assert [float(row["probability"]) for row in rows] == pytest.approx(expected.max(1).tolist(), abs=1e-6)


def test_pictures_that_cannot_be_read_are_named_and_told_by_the_exit_code(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = write_pictures(tmp_path / "some", {6: 2})
    (folder / "torn.png").write_bytes(next(folder.rglob("*.png")).read_bytes()[:60])
    result = invoke("predict", runs["fedavg"], folder, "--json", code=3)
    said = last_line(result)
    assert len(said["predictions"]) == 2
    assert [row["file"] for row in said["skipped"]] == [str(folder / "torn.png")]
    assert "torn.png" in result.stderr
    result = invoke("predict", runs["fedavg"], folder / "torn.png", "--csv", code=3)
    assert result.stdout == "file,class,probability\n"


def test_what_cannot_be_predicted_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        invoke("predict", runs["fedavg"], tmp_path / "nothing.png")
    with pytest.raises(UserError, match="no global classifier"):
        invoke("predict", runs["repper"], tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"not a model")
    with pytest.raises(UserError, match="cannot be read as a model"):
        invoke("predict", tmp_path / "x.safetensors", tmp_path)
    with pytest.raises(UserError, match="is not a fedloom model"):
        invoke("predict", runs["fedavg"] / "models" / "server.safetensors", tmp_path)
