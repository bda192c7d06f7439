"""Datasets in shared memory."""

import os
from dataclasses import fields

import pytest
import torch

import fedloom
from fedloom import Recipe
from fedloom.core.errors import UserError
from fedloom.data import load, shared
from fedloom.data.shared import SharedDatasets, shared_dataset
from fedloom.runs.series import Tasks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files in memory are Linux's")


def settings(**values):
    return Recipe.parse({"data": {"name": "digits", **values}}).data


def test_a_child_maps_the_dataset_of_its_parent_and_cannot_change_it(monkeypatch):
    dataset = load("digits")
    with SharedDatasets() as datasets:
        here = datasets.add(settings(), dataset)
        for name, value in datasets.environment.items():
            monkeypatch.setenv(name, value)
        there = shared_dataset(settings(clients=3))
        assert len(datasets.inherited) == 1
    for mapped in (here, there):
        for field in fields(dataset):
            value, expected = getattr(mapped, field.name), getattr(dataset, field.name)
            assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected
    there.inputs[0] = 7
    assert torch.equal(here.inputs, dataset.inputs)


def test_data_that_are_read_in_another_way_are_not_shared(monkeypatch):
    with SharedDatasets() as datasets:
        datasets.add(settings(), load("digits"))
        monkeypatch.setenv(shared.NAME, datasets.environment[shared.NAME])
        assert shared_dataset(settings()) is not None
        assert shared_dataset(settings(channels=3)) is shared_dataset(settings(size=16)) is None
    monkeypatch.delenv(shared.NAME)
    assert shared_dataset(settings()) is None


def test_a_copy_that_does_not_fit_into_memory_is_refused(monkeypatch):
    monkeypatch.setattr("fedloom.core.limits.free_memory", lambda: 1000)
    with SharedDatasets() as datasets, pytest.raises(UserError, match="a shared copy of dataset 'digits' would take"):
        datasets.add(settings(), load("digits"))


def test_runs_of_a_series_that_read_data_in_other_ways_do_not_share_them():
    tasks = Tasks()
    shapes = [tasks[Recipe.parse({"data": {"name": "digits", "channels": c, "size": s}})].shape
              for c, s in ((None, None), (3, None), (3, 16))]  # fmt: skip
    assert shapes == [(1, 8, 8), (3, 8, 8), (3, 16, 16)]


@pytest.mark.slow
def test_parallel_runs_read_the_data_once(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from fedloom.data import load\n"
        "def data():\n    open('calls', 'a').write('called ')\n    return load('digits')\n"
    )
    fields = {"data": "mine.py:data", "clients": 4, "rounds": 1, "epochs": 1, "trust_code": True}
    runs = fedloom.compare(methods=["fedavg", "local"], parallel=2, out="compared", **fields)
    assert len(runs) == 2
    assert (tmp_path / "calls").read_text() == "called "
    alone = fedloom.run(method="fedavg", out="alone", **fields)
    assert alone["personal_accuracy"] == runs[0]["personal_accuracy"]
