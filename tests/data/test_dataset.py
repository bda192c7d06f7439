from typing import Any

import pytest
import torch

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.data import Dataset, combine, limit, resize
from fedloom.experiment.build import load_dataset


def make(
    name: str = "toy", count: int = 12, classes: int = 3, channels: int = 1, size: int = 4, **fields: Any
) -> Dataset:
    given: dict[str, Any] = {
        "inputs": torch.full((count, channels, size, size), 7, dtype=torch.uint8),
        "labels": torch.arange(count) % classes,
        "test": torch.arange(count) >= count * 3 // 4,
        "classes": tuple(map(str, range(classes))),
    }
    return Dataset(name, **(given | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": torch.zeros(12, 1, 4, 4).double()}, "inputs must be uint8 images .* or float32"),
        ({"inputs": torch.zeros(12, 4, 4, dtype=torch.uint8)}, r"shape \(12, 4, 4\)"),
        ({"inputs": torch.zeros(0, 1, 4, 4, dtype=torch.uint8)}, "no samples"),
        ({"labels": torch.zeros(12, dtype=torch.int32)}, "labels must be torch.int64"),
        ({"labels": torch.zeros(11, dtype=torch.int64)}, "11 labels for 12 samples"),
        ({"labels": torch.tensor([0] * 11 + [3])}, r"label 3 of sample 11 is out of range \(0 to 2"),
        ({"labels": torch.tensor([0, -1] + [0] * 10)}, "label -1 of sample 1 is out of range"),
        ({"test": torch.zeros(12)}, "test must be torch.bool"),
        ({"groups": torch.ones(12, dtype=torch.int64), "group_names": ("a",)}, "group 1 of sample 0 is out of range"),
    ],
)
def test_a_dataset_refuses_what_does_not_fit_and_names_it(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"dataset 'toy': .*{words}"):
        make(**fields)


def test_resize_averages_when_it_shrinks_and_keeps_a_flat_image_flat() -> None:
    board = ((torch.arange(8)[:, None] + torch.arange(8)) % 2 * 200).to(torch.uint8).expand(3, 1, 8, 8)
    small = resize(board, 2)
    assert small.shape == (3, 1, 2, 2)
    assert small.dtype == torch.uint8
    assert (small.float() - 100).abs().max() <= 8
    flat = torch.full((2500, 3, 5, 7), 93, dtype=torch.uint8)
    assert bool((resize(flat, (9, 6)) == 93).all())
    assert resize(flat, (9, 6)).shape == (2500, 3, 9, 6)
    assert resize(flat, (5, 7)) is flat


def test_resize_of_a_chunked_batch_is_that_of_its_images() -> None:
    images = torch.randint(0, 256, (1030, 1, 6, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(resize(images, 4)[1029:], resize(images[1029:], 4))


def test_combined_datasets_become_styles_of_one_size_and_three_channels() -> None:
    grey = make("grey", count=4, size=4)
    colour = make("colour", count=8, channels=3, size=6)
    both = combine([grey, colour])
    assert both.name == "grey+colour"
    assert both.inputs.shape == (12, 3, 6, 6)
    assert bool((both.inputs == 7).all())
    assert both.groups is not None
    assert both.groups.tolist() == [0] * 4 + [1] * 8
    assert both.group_names == ("grey", "colour")
    assert both.labels.tolist() == grey.labels.tolist() + colour.labels.tolist()
    assert int(both.test.sum()) == 1 + 2
    assert combine([grey, colour], size=5).inputs.shape == (12, 3, 5, 5)
    assert combine([grey, grey]).inputs.shape == (8, 1, 4, 4)


def test_datasets_with_different_numbers_of_classes_cannot_be_combined() -> None:
    with pytest.raises(UserError, match="'a' and 'b' cannot be combined: they have 3 and 4 classes"):
        combine([make("a"), make("b", classes=4)])


def test_limit_keeps_n_training_and_n_test_images_of_each_group() -> None:
    groups = torch.arange(400) % 2
    dataset = make(count=400, inputs=_numbered(400), groups=groups, group_names=("even", "odd"))
    small = limit(dataset, 30, seed=1)
    assert small.groups is not None
    for group in (0, 1):
        for is_test in (False, True):
            assert int(((small.groups == group) & (small.test == is_test)).sum()) == 30
    # a sample keeps its own label and group
    index = small.inputs[:, 0, 0, 0].long() * 256 + small.inputs[:, 0, 0, 1].long()
    assert torch.equal(small.labels, dataset.labels[index])
    assert torch.equal(small.groups, groups[index])
    assert torch.equal(limit(dataset, 30, seed=1).inputs, small.inputs)
    assert not torch.equal(limit(dataset, 30, seed=2).inputs, small.inputs)
    assert len(limit(dataset, 1000, seed=1)) == 400
    assert len(limit(make(count=400), 30, seed=1)) == 60


def _numbered(count: int) -> torch.Tensor:
    images = torch.zeros(count, 1, 1, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = (torch.arange(count) // 256).to(torch.uint8)
    images[:, 0, 0, 1] = (torch.arange(count) % 256).to(torch.uint8)
    return images


def test_grey_images_are_repeated_to_three_channels_where_asked_for() -> None:
    grey, colour = (load_dataset(Recipe.parse({"data": {"channels": channels}})) for channels in (None, 3))
    assert (grey.inputs.shape[1], colour.inputs.shape[1]) == (1, 3)
    assert all(torch.equal(colour.inputs[:, [channel]], grey.inputs) for channel in range(3))
