"""Data that come divided into clients: what is said when their samples are divided anew."""

import logging
from typing import Any

import pytest
import torch

from fedloom import Recipe
from fedloom.data import Dataset, combine, federate, from_arrays
from fedloom.experiment.build import divide

NOTE = "the data's 3 clients were pooled, and their samples divided anew among 20 clients"


@pytest.fixture
def wards() -> Dataset:
    x = torch.rand(300, 4, generator=torch.Generator().manual_seed(0))
    owners = torch.arange(300).remainder(3)
    return from_arrays(x, torch.arange(300).remainder(2), name="wards", groups=owners)


def divided(dataset: Dataset, caplog: pytest.LogCaptureFixture, **fields: Any) -> tuple[str, list[str]]:
    """Return the notes of a division, and the warnings."""
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        notes = divide(Recipe().with_(**fields), dataset)[1].notes
    return "; ".join(notes), [record.getMessage() for record in caplog.records]


def test_pooling_by_default_gives_a_warning_and_a_note(wards: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    notes, warnings = divided(wards, caplog)
    assert NOTE in notes and "--partition natural keeps" in notes
    assert len(warnings) == 1
    assert "data.partition is not set: the 3 clients" in warnings[0] and "--partition natural keeps" in warnings[0]


def test_the_runs_of_a_comparison_warn_once(wards: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    divided(wards, caplog, seed=0)
    assert len(divided(wards, caplog, seed=1)[1]) == 1


def test_a_partition_that_the_user_chose_gives_only_a_note(wards: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    notes, warnings = divided(wards, caplog, **{"data.partition": "dirichlet:0.1"})
    assert NOTE in notes and not warnings


def test_natural_clients_give_neither(wards: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    assert divided(wards, caplog, **{"data.partition": "natural"}) == ("", [])
    notes, _ = divided(wards, caplog, **{"data.partition": "natural", "data.clients": 7})
    assert notes == "partition 'natural' makes 3 clients (not 7)"


def test_styles_of_combined_datasets_give_neither(caplog: pytest.LogCaptureFixture) -> None:
    images = torch.randint(0, 255, (400, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    one = from_arrays(images, torch.arange(400).remainder(2), name="one")
    notes, warnings = divided(combine([one, one]), caplog)
    assert "pooled" not in notes and not warnings
    assert "2 styles" in repr(combine([one, one]))


def test_a_number_of_clients_is_needed_only_where_the_data_have_none(wards: Dataset) -> None:
    assert len(federate(wards, partition="natural", seed=0)) == 3
    assert len(federate(wards, partition="iid", seed=0)) == 20


def test_a_dataset_is_shown_in_one_line(wards: Dataset) -> None:
    assert repr(wards) == "Dataset('wards', 300 samples of 4, 2 classes, 3 clients)"
