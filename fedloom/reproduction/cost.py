"""What a run costs: image-steps, and seconds where this machine's speed with the network is known from stored runs."""

from collections.abc import Iterable
from statistics import median
from typing import Any

from fedloom.data.federation import parse_split
from fedloom.recipe import Recipe
from fedloom.reproduction.results import Result, machine

SIZES = {
    "mnist": (60_000, 10_000), "fashion-mnist": (60_000, 10_000), "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000), "cinic10": (180_000, 90_000), "emnist": (112_800, 18_800), "svhn": (73_257, 26_032),
    "usps": (7_291, 2_007), "office-home": (15_588, 0), "adaptiope": (36_900, 0), "digits": (1_797, 0),
}  # fmt: skip
"""Training and test images of the complete datasets."""
FORWARD = 1 / 3
"""A pass without its backward half, in passes with it."""


def passes(method: Any, epochs: int) -> float:
    """Passes over a client's images in a round, forward and backward."""
    match method.name.split("+")[0]:
        case "moon" | "fedcka" | "fedintr":  # two more models read every batch
            return epochs * (1 + 2 * FORWARD)
        case "fedrep":
            return epochs + FORWARD * (epochs if method.personal_epochs is None else method.personal_epochs)
        case "fedcrc":
            return epochs + FORWARD * (epochs + method.predictor_epochs)
        case "fedpac":
            return epochs + FORWARD * (method.personal_epochs + 2)
        case "fedcrl" | "fedproto" | "fedgh":
            return epochs + FORWARD
        case "ditto" | "apfl" | "perfedavg" | "repper":
            return 2 * epochs
        case "pfedme":
            return float(epochs * method.inner)
        case "fedstyle" | "fedala":
            return epochs * (1 + FORWARD)
    return epochs


def image_steps(recipe: Recipe) -> float:
    """Images that go forward and backward through the network in a run; evaluation is not counted."""
    data, training = recipe.data, recipe.training
    kind, kept = parse_split(data.split)
    sizes = []
    for name in data.name.split("+"):
        train, test = (min(n, data.limit or n) for n in SIZES[name])
        sizes.append(kept * (train + test) if kind == "pooled" else train)
    held_out = data.newcomers if data.newcomers < 1 else data.newcomers / data.clients
    views = 1 if recipe.make_objective().supervised else 2
    a_round = sum(sizes) * (1 - held_out) * training.fraction * views * passes(recipe.make_method(), training.epochs)
    return a_round * training.rounds


def speeds(results: Iterable[Result]) -> dict[tuple[str, str], float]:
    """Image-steps a second by (machine, network): the median of stored runs."""
    found: dict[tuple[str, str], list[float]] = {}
    for result in results:
        recipe = Recipe.parse(result.recipe)
        if result.seconds:
            found.setdefault((result.machine, recipe.model.name), []).append(image_steps(recipe) / result.seconds)
    return {key: median(values) for key, values in found.items()}


def seconds(recipe: Recipe, known: dict[tuple[str, str], float]) -> float | None:
    """What a run would take on this machine alone; nothing where no run with its network is stored."""
    speed = known.get((machine(recipe), recipe.model.name))
    return image_steps(recipe) / speed if speed else None
