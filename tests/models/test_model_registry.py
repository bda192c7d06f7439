from typing import Annotated

import pytest
import torch
from pydantic import Field

from fedloom.core.errors import UserError
from fedloom.models import MODELS, SplitModel, build, register
from fedloom.models.base import check


def test_the_listing_has_every_network_with_a_line_about_it():
    listed = MODELS
    assert {"mlp", "cnn2", "cnn3", "cnn4", "resnet18", "resnet34", "resnet20", "mobilenet"} <= set(listed)
    assert all(line.endswith(".") and "\n" not in line for line in listed.values())


def test_an_unknown_model_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="model 'cnn22' is unknown: did you mean 'cnn2'"):
        build("cnn22", shape=(1, 28, 28), classes=10)


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="'cnn2' has no option 'droput': did you mean 'dropout'"):
        build("cnn2", shape=(1, 28, 28), classes=10, droput=0.5)
    with pytest.raises(UserError, match="'cnn3' has no option 'dropout': it has none"):
        build("cnn3", shape=(1, 28, 28), classes=10, dropout=0.5)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"norm": 1}, "'norm' of model 'mlp' is true or false, not 1"),
        ({"hidden": 0}, "'hidden' of model 'mlp' is a whole number of at least 1, not 0"),
        ({"hidden": 12.5}, "'hidden' of model 'mlp' is a whole number of at least 1, not 12.5"),
        ({"features": True}, "'features' of model 'mlp' is a whole number of at least 1, not True"),
    ],
)
def test_a_bad_value_is_refused_with_what_it_should_be(options, remedy):
    with pytest.raises(UserError, match=remedy):
        build("mlp", shape=(1, 8, 8), classes=10, **options)


@pytest.mark.parametrize("dropout", [1, -0.1, "0.3"])
def test_dropout_is_a_probability_below_one(dropout):
    with pytest.raises(UserError, match=r"'dropout' of model 'cnn2' is a number in \[0, 1\)"):
        build("cnn2", shape=(1, 28, 28), classes=10, dropout=dropout)


@pytest.mark.parametrize(("name", "least"), [("cnn2", 16), ("cnn3", 22), ("cnn4", 8)])
def test_an_input_is_refused_exactly_where_it_is_too_small(name, least):
    with pytest.raises(UserError, match=rf"model '{name}' needs .* {least}×{least} .*\(1, {least - 1}, 40\)"):
        build(name, shape=(1, least - 1, 40), classes=10)
    model = build(name, shape=(1, least, 40), classes=10).eval()
    assert model(torch.rand(1, 1, least, 40)).shape == (1, 10)


@pytest.mark.parametrize("shape", [(28, 28), (0, 28, 28), (1, 1, 28, 28)])
def test_a_shape_has_three_positive_numbers(shape):
    with pytest.raises(UserError, match="channels, height and width"):
        build("mlp", shape=shape, classes=10)


def test_a_name_is_given_once():
    with pytest.raises(UserError, match="already registered as 'mlp'"):
        register("mlp")(type(build("mlp", shape=(1, 8, 8), classes=2)))


def test_the_same_seed_gives_the_same_weights():
    torch.manual_seed(3)
    first = build("mlp", shape=(1, 8, 8), classes=10)
    torch.manual_seed(3)
    second = build("mlp", shape=(1, 8, 8), classes=10)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_choice_names_what_there_is_to_choose():
    with pytest.raises(UserError, match="'stem' of model 'resnet18' is auto or small or large, not 'tiny'"):
        build("resnet18", shape=(3, 32, 32), classes=10, stem="tiny")


@pytest.fixture
def numbers(monkeypatch):
    """A user's network, whose options are numbers with and without bounds."""
    monkeypatch.setattr("fedloom.models.base._registry", {})

    @register("numbers")
    class Numbers(SplitModel):
        def __init__(
            self, shape, classes, *, scale: float = 1, shift=0.5, offset: int = 3,
            slope: Annotated[float, Field(gt=0)] = 0.2, momentum: Annotated[float, Field(gt=0, le=1)] = 0.1,
        ):  # fmt: skip
            super().__init__()


@pytest.mark.parametrize(
    "options",
    [{"scale": 20.5}, {"scale": -3}, {"shift": 1.5}, {"offset": -4}, {"offset": 0}, {"slope": 7.0}, {"momentum": 1}],
)
def test_a_number_is_bound_by_its_annotation_alone(numbers, options):
    check("numbers", options)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"scale": float("inf")}, "'scale' of model 'numbers' is a number, not inf"),
        ({"shift": float("nan")}, "'shift' of model 'numbers' is a number, not nan"),
        ({"scale": True}, "'scale' of model 'numbers' is a number, not True"),
        ({"offset": 1.5}, "'offset' of model 'numbers' is a whole number, not 1.5"),
        ({"slope": 0}, "'slope' of model 'numbers' is a number above 0, not 0"),
        ({"momentum": 0}, r"'momentum' of model 'numbers' is a number in \(0, 1\], not 0"),
    ],
)
def test_a_number_outside_its_annotation_is_refused(numbers, options, wanted):
    with pytest.raises(UserError, match=wanted):
        check("numbers", options)
