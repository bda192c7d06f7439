from typing import Annotated

import pytest
import torch
from pydantic import Field

from fedloom.core.errors import UserError
from fedloom.models import MODELS, SplitModel, build, check, register


def test_the_listing_has_every_network_with_a_line_about_it():
    assert {"mlp", "cnn2", "cnn3", "cnn4", "resnet18", "resnet34", "resnet20", "mobilenet"} <= set(MODELS.names())
    shipped = [MODELS.find(name) for name in MODELS.names() if MODELS.is_shipped(name)]
    assert all(network.__doc__.split("\n")[0].endswith(".") for network in shipped)


def test_an_unknown_model_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="model.name = 'cnn22' is unknown: did you mean 'cnn2'"):
        build("cnn22", shape=(1, 28, 28), classes=10)


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="model.droput = 0.5: cnn2 has no such option: did you mean 'dropout'"):
        build("cnn2", shape=(1, 28, 28), classes=10, droput=0.5)
    with pytest.raises(
        UserError, match="model.dropout = 0.5: cnn3 has no such option: .*freeze, lora, project, weights"
    ):
        build("cnn3", shape=(1, 28, 28), classes=10, dropout=0.5)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"norm": 2}, "model.norm = 2: must be true or false"),
        ({"hidden": 0}, "model.hidden = 0: must be at least 1"),
        ({"hidden": 12.5}, "model.hidden = 12.5: must be a whole number"),
        ({"features": True}, "model.features = True: must be a number, not true or false"),
    ],
)
def test_a_bad_value_is_refused_with_what_it_should_be(options, remedy):
    with pytest.raises(UserError, match=remedy):
        build("mlp", shape=(1, 8, 8), classes=10, **options)


@pytest.mark.parametrize(
    ("dropout", "remedy"), [(1, "must be below 1"), (-0.1, "must be at least 0"), ("much", "must be a number")]
)
def test_dropout_is_a_probability_below_one(dropout, remedy):
    with pytest.raises(UserError, match=f"model.dropout = {dropout!r}: {remedy}"):
        build("cnn2", shape=(1, 28, 28), classes=10, dropout=dropout)


def test_a_network_gets_a_value_in_its_own_type():
    assert check("cnn2", {"dropout": "0.3"}) == {"dropout": 0.3}
    assert check("mlp", {"norm": 1})["norm"] is True
    network = build("cnn2", shape=(1, 28, 28), classes=10, dropout="0.3")
    assert [module.p for module in network.modules() if hasattr(module, "p")] == [0.3]


@pytest.mark.parametrize(("name", "least"), [("cnn2", 16), ("cnn3", 22), ("cnn4", 8)])
def test_an_input_is_refused_exactly_where_it_is_too_small(name, least):
    with pytest.raises(UserError, match=rf"model '{name}': needs .* {least}×{least} .*\(1, {least - 1}, 40\)"):
        build(name, shape=(1, least - 1, 40), classes=10)
    model = build(name, shape=(1, least, 40), classes=10).eval()
    assert model(torch.rand(1, 1, least, 40)).shape == (1, 10)


@pytest.mark.parametrize("shape", [(28, 28), (0, 28, 28), (1, 1, 28, 28)])
def test_the_shape_of_an_image_has_three_positive_numbers(shape):
    with pytest.raises(UserError, match=r"\(channels, height, width\)"):
        build("cnn2", shape=shape, classes=10)


@pytest.mark.parametrize("shape", [(13,), (3, 50), (1, 8, 8), (2, 3, 4, 5)])
def test_an_mlp_takes_samples_of_any_shape(shape):
    assert build("mlp", shape=shape, classes=4)(torch.rand(2, *shape)).shape == (2, 4)
    with pytest.raises(UserError, match="needs inputs"):
        build("mlp", shape=(0, *shape), classes=4)


def test_a_name_is_given_once():
    ours = MODELS["mlp"]
    with pytest.raises(UserError, match="Net: model.name = 'mlp' is already part of fedloom; choose another name"):

        @register("mlp")
        class Net(SplitModel): ...

    assert MODELS["mlp"] is ours


def test_the_same_seed_gives_the_same_weights():
    torch.manual_seed(3)
    first = build("mlp", shape=(1, 8, 8), classes=10)
    torch.manual_seed(3)
    second = build("mlp", shape=(1, 8, 8), classes=10)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_choice_names_what_there_is_to_choose():
    with pytest.raises(UserError, match=r"model.stem = 'tiny': is unknown; choose one of auto, large, small"):
        build("resnet18", shape=(3, 32, 32), classes=10, stem="tiny")


@pytest.fixture
def numbers():
    """A user's network, whose options are numbers with and without bounds."""

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
        ({"scale": float("inf")}, "model.scale = inf: must be a finite number"),
        ({"shift": float("nan")}, "model.shift = nan: must be a finite number"),
        ({"scale": True}, "model.scale = True: must be a number, not true or false"),
        ({"offset": 1.5}, "model.offset = 1.5: must be a whole number"),
        ({"slope": 0}, "model.slope = 0: must be above 0"),
        ({"momentum": 0}, "model.momentum = 0: must be above 0"),
        ({"momentum": 1.5}, "model.momentum = 1.5: must be at most 1"),
    ],
)
def test_a_number_outside_its_annotation_is_refused(numbers, options, wanted):
    with pytest.raises(UserError, match=wanted):
        check("numbers", options)
