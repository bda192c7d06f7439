"""Clients that never took part: a run's own, and those of another dataset."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from using import invoke, last_line

import fedloom
from fedloom import UserError
from fedloom.inference.adapt import HEADS
from fedloom.inference.newcomers import in_channels


def test_newcomers_of_the_run_are_tested_in_every_way(runs: dict[str, Path]) -> None:
    report = last_line(invoke("newcomers", runs["fedavg"], "--alone-epochs", 1, "--json"))
    run = fedloom.load(runs["fedavg"])
    rows = {row["client"]: row for row in run.client_rows}
    assert [row["client"] for row in report["clients"]] == list(run.task.federation.newcomers)
    for row in report["clients"]:  # the global model as it is: what the run itself said
        assert row["global"] == pytest.approx(rows[row["client"]]["accuracy"])
    for way in (*HEADS, "alone", "global"):
        assert report["ways"][way]["mean"] == pytest.approx(np.mean([row[way] for row in report["clients"]]))
    assert report["ways"]["logreg"]["mean"] > max(report["ways"]["alone"]["mean"], report["ways"]["global"]["mean"])


def test_newcomers_may_come_from_another_dataset_with_other_classes(runs: dict[str, Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    colours = np.array([[250, 10, 10], [10, 10, 250], [240, 240, 240]])
    y = rng.integers(0, 3, 120)
    x = np.clip(colours[y][:, None, None] + rng.normal(0, 20, (120, 12, 12, 3)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "colours.npz", x=x, y=y)
    flags = ("--data", tmp_path / "colours.npz", "--clients", 3, "--partition", "iid", "--heads", "linear,svm")
    report = last_line(invoke("newcomers", runs["repper"], *flags, "--alone-epochs", 0, "--json"))
    assert report["ways"].keys() == {"linear", "svm"}  # no global classifier knows these classes
    assert report["representation"] == "shared"
    assert report["newcomers"] == 3
    assert report["ways"]["svm"]["mean"] > 0.9
    report = invoke("newcomers", runs["lgfedavg"], *flags, "--alone-epochs", 1)
    assert "average of the clients' extractors" in report.stderr
    assert "linear head" in report.stdout


def test_newcomers_that_are_not_there_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    fedloom.run(method="fedavg", data="digits", clients=2, rounds=1, out=tmp_path / "all", **{"data.limit": 100})
    with pytest.raises(UserError, match="data.newcomers = 0.*--data"):
        invoke("newcomers", tmp_path / "all")
    with pytest.raises(UserError, match="--heads svn: did you mean 'svm'"):
        invoke("newcomers", runs["fedavg"], "--heads", "svn")


def test_colours_become_grey_as_pillow_does_it() -> None:
    colour = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    grey = in_channels(torch.from_numpy(colour).permute(2, 0, 1)[None], 1)
    np.testing.assert_array_equal(grey[0, 0].numpy(), np.asarray(Image.fromarray(colour).convert("L")))
