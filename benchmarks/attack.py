"""Attacks of a hostile server on one organisation within the protocol: through evaluation and through updates.

    python -m benchmarks.attack evaluation                # exact answers, without a limit
    python -m benchmarks.attack evaluation --consent      # the default consent of `fedloom deploy client`
    python -m benchmarks.attack update [--batch 16]       # one update of one round; by default with all data in a batch

The organisation has a third of scikit-learn's digits and runs the code of a real member, without a network.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.config.recipe import Recipe
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.deploy.evaluation import EvaluationTerms
from fedloom.deploy.init import write_federation
from fedloom.deploy.member import Member, load_member
from fedloom.deploy.terms import FederationTerms, fingerprint, protocol_versions
from fedloom.experiment.build import make_task

SHARPNESS = 1e4
"""Slope of the step functions that the crafted weights implement."""
EXACT = EvaluationTerms("accuracy", min_test=0, epsilon=math.inf)


@dataclass
class Victim:
    """The attacked organisation, and the images that the attack is compared with."""

    member: Member
    recipe: Recipe
    test: np.ndarray
    train: np.ndarray
    public: np.ndarray
    """Images of other organisations: the attacker's prior knowledge."""


def make_victim(
    folder: Path,
    *,
    rounds: int = 50,
    seed: int = 0,
    batch: int = 16,
    privacy: dict[str, float] | None = None,
    **consent: Any,
) -> Victim:
    """Create an organisation that has joined a federation of three."""
    recipe = Recipe.parse(
        {
            "method": "fedavg",
            "privacy": privacy,
            "model": "mlp",
            "data": {"name": "digits", "clients": 3, "partition": "iid"},
            "training": {"rounds": rounds, "batch_size": batch, "optimizer": {"lr": 1e-3}},
            "engine": {"name": "inline", "device": "cpu"},
            "seed": seed,
        }
    )
    task = make_task(recipe)
    images, labels = task.dataset.inputs.numpy(), task.dataset.labels.numpy()
    names = ("north", "south", "west")
    terms = FederationTerms(
        name="digits", host="127.0.0.1", organisations=names, classes=task.dataset.classes, shape=task.shape
    )
    write_federation(folder / "fed", terms, recipe)
    train, test = task.federation.train[0], task.federation.test[0]
    np.savez(
        folder / "north.npz", x_train=images[train], y_train=labels[train], x_test=images[test], y_test=labels[test],
        classes=np.array(task.dataset.classes),
    )  # fmt: skip
    member = load_member(folder / "fed" / "organisations" / "north", folder / "north.npz", device="cpu", **consent)
    others = np.concatenate([task.federation.train[1], task.federation.train[2]])
    return Victim(member, recipe, images[test, 0], images[train, 0], images[others, 0])


@dataclass
class HostileServer:
    """A server that sends crafted weights, within what the organisation has agreed to."""

    victim: Victim
    asked: int = 0
    answered: int = 0
    _slots: Iterator[tuple[str, str, int]] = field(init=False)

    def __post_init__(self) -> None:
        member, recipe = self.victim.member, self.victim.recipe
        self._header = {
            "to": 0, "accepted": None, "recipe": fingerprint(recipe, member.federation), "versions": protocol_versions()
        }  # fmt: skip
        body = json.dumps(recipe.resolved()).encode()
        about, _ = member.answer(self._header | {"what": "join", "run": "attack"}, body)
        assert about["what"] == "joined", about
        rounds = range(1, recipe.training.rounds + 1)
        self._slots = (
            (f"attack{run}", kind, round) for run in count() for round in rounds for kind in ("global", "evaluate")
        )
        self._blank = {
            name: torch.zeros_like(tensor)
            for name, tensor in member._ready(str(self._header["recipe"])).engine.server_workspace.downward().items()
        }

    def weights(self, **parts: Tensor) -> dict[str, Tensor]:
        """Return weights that are zero except for the given tensors (`__` stands for a dot)."""
        return self._blank | {f"model.{name.replace('__', '.')}": tensor for name, tensor in parts.items()}

    def right(self, state: dict[str, Tensor]) -> int | None:
        """Return the number of correct predictions of a model, or None if the organisation does not answer."""
        run, kind, round = next(self._slots)
        job = Job(kind, round, Message(state), client=0, clients=(0,) if kind == "global" else ())  # type: ignore[arg-type]
        about = self._header | {"what": "job", "run": run, "round": round}
        result = Result.from_bytes(self.victim.member.answer(about, job.to_bytes())[1])
        self.asked += 1
        if not result.scores:
            return None
        self.answered += 1
        return sum(result.scores[0].right)

    def update(self, state: dict[str, Tensor]) -> Message:
        """Return the update of a model after one round of training."""
        job = Job("update", 1, Message(state), client=0)
        about = self._header | {"what": "job", "run": "attack", "round": 1}
        message = Result.from_bytes(self.victim.member.answer(about, job.to_bytes())[1]).message
        assert message is not None
        return message


class EvaluationAttack:
    """Reconstruction of a test image from numbers of correct predictions.

    The weights assign the class LABEL to every image, except to images beyond a threshold of a random projection (and,
    in a query about a pixel, only if it is brighter than a level). The threshold is moved until exactly one image of
    that class is beyond it. Then one more or fewer correct prediction reveals whether a pixel is brighter than the
    level. Each query is repeated `repeats` times.
    """

    LABEL, OTHERS = 8, (3, 1)
    """The class of the image, and the classes assigned to images beyond the threshold."""

    def __init__(self, server: HostileServer, *, seed: int = 0, repeats: int = 1):
        self.server, self.repeats = server, repeats
        self._generator = torch.Generator().manual_seed(seed)
        self.projection = torch.zeros(64)
        self.threshold = 0.0
        self.spent = False

    def _ask(self, threshold: float, pixel: int | None = None, level: float = 0.0, other: int = OTHERS[0]) -> float:
        """Return the number of correct predictions, averaged over repeated queries."""
        found = []
        for _ in range(self.repeats):
            answer = self.server.right(self._weights(threshold, pixel, level, other))
            if answer is None:
                self.spent = True
                return math.nan
            found.append(answer)
        return float(np.mean(found))

    def _weights(self, threshold: float, pixel: int | None, level: float, other: int) -> dict[str, Tensor]:
        fc1, b1 = torch.zeros(128, 64), torch.zeros(128)
        fc2, b2 = torch.zeros(64, 128), torch.zeros(64)
        head, bias = torch.zeros(10, 64), torch.full((10,), -10.0)
        rows = [(self.projection, threshold)]
        if pixel is not None:
            rows.append((torch.eye(64)[pixel], (level / 255 - 0.5) / 0.5))
        for i, (direction, at) in enumerate(rows):  # step(a) = relu(s·a) − relu(s·a − 1)
            fc1[2 * i : 2 * i + 2] = SHARPNESS * direction
            b1[2 * i], b1[2 * i + 1] = -SHARPNESS * at, -SHARPNESS * at - 1
            fc2[0, 2 * i], fc2[0, 2 * i + 1] = 1, -1
        b2[0] = 1 - len(rows)  # active only if all conditions hold
        head[other, 0], bias[other], bias[self.LABEL] = 2, 0, 1
        return self.server.weights(
            extractor__fc1__weight=fc1, extractor__fc1__bias=b1, extractor__fc2__weight=fc2, extractor__fc2__bias=b2,
            head__weight=head, head__bias=bias,
        )  # fmt: skip

    def single_out(self) -> None:
        """Find a direction and a threshold with one image of the class beyond it, and none of the two other classes.

        The search starts at the furthest public image, since only few images are beyond such thresholds.
        """
        self.base = self._ask(1e3)
        public = (self.server.victim.public.reshape(-1, 64) / 255 - 0.5) / 0.5
        while not self.spent:
            self.projection = torch.randn(64, generator=self._generator) / 8
            along = np.sort(public @ self.projection.numpy())[::-1]
            for self.threshold in along[:40:4].tolist():
                lost = [self._lost(self.threshold, other) for other in self.OTHERS]
                if lost == [1, 1]:
                    return
                if lost != [0, 0]:
                    break

    def _lost(self, threshold: float, other: int) -> int:
        answer = self._ask(threshold, other=other)
        return 0 if self.spent else round(self.base - answer)

    def brighter(self, pixel: int, level: float) -> bool:
        """Whether a pixel of the image is brighter than a level."""
        return self.base - self._ask(self.threshold, pixel, level) >= 0.5

    def image(self, pixels: Sequence[int] = range(64)) -> np.ndarray:
        """Reconstruct pixels of the image by bisection in eight steps; pixels that are not requested are 0."""
        self.single_out()
        found = np.zeros(64, np.uint8)
        for pixel in pixels:
            low, high = 0, 255
            while low < high and not self.spent:
                middle = (low + high) // 2
                if self.brighter(pixel, middle + 0.5):
                    low = middle + 1
                else:
                    high = middle
            found[pixel] = low
        return found.reshape(8, 8)

    def sketch(self, public: np.ndarray) -> np.ndarray:
        """Guess the image with few queries: the public mean image, refined by whether each pixel is above its mean."""
        self.single_out()
        flat = public.reshape(len(public), 64).astype(float)
        guess = flat.mean(0)
        for pixel in np.argsort(-flat.std(0))[: int((flat.std(0) > 0).sum())]:
            mean = flat[:, pixel].mean()
            brighter = self.brighter(int(pixel), mean)
            if self.spent:
                break
            side = flat[:, pixel] > mean
            guess[pixel] = flat[side if brighter else ~side, pixel].mean()
        return guess.reshape(8, 8)


def target_of(attack: EvaluationAttack, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the image that an attack without noise singles out: the furthest of its class along the projection."""
    pixels = (images.reshape(len(images), 64) / 255 - 0.5) / 0.5
    along = pixels @ attack.projection.numpy()
    along[labels != attack.LABEL] = -np.inf
    return images[int(along.argmax())].astype(float)


def read_update(server: HostileServer, size: int = 64, hidden: int = 128) -> list[np.ndarray]:
    """Reconstruct training images from one update (an imprint attack, after Fowl et al., 2022).

    Unit i of the first layer is active if an image is brighter than level i. All units have the same outgoing weights,
    so the updates of two neighbouring units differ by the images between their levels. If that is a single image,
    dividing by the difference of the biases yields it.
    """
    brightness = server.victim.public.reshape(-1, size).mean(1)
    levels = np.quantile((brightness / 255 - 0.5) / 0.5, np.linspace(0, 1, hidden))
    fc1, b1 = torch.full((hidden, size), 1 / size), -torch.from_numpy(levels).float()
    fc2, head = torch.full((64, hidden), 1e-3), 100 * torch.linspace(-1, 1, 640).reshape(10, 64)
    state = server.weights(
        extractor__fc1__weight=fc1, extractor__fc1__bias=b1, extractor__fc2__weight=fc2,
        extractor__fc2__bias=torch.ones(64), head__weight=head,
    )  # fmt: skip
    message = server.update(state)
    weight = (message["model.extractor.fc1.weight"] - fc1).double()
    bias = (message["model.extractor.fc1.bias"] - b1).double()
    found = []
    for i in range(hidden - 1):
        weights, share = weight[i] - weight[i + 1], bias[i] - bias[i + 1]
        if share.abs() > 1e-9:
            image = ((weights / share) * 0.5 + 0.5) * 255
            if bool((image > -20).all()) and bool((image < 275).all()):
                found.append(image.clamp(0, 255).numpy())
    return found


def closest(found: list[np.ndarray], images: np.ndarray) -> np.ndarray:
    """Return, for each reconstruction, the largest pixel error with respect to the nearest image."""
    flat = images.reshape(len(images), -1).astype(float)
    return np.array([np.abs(flat - image).max(1).min() for image in found])


def main() -> None:
    """Run one attack and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=["evaluation", "update"])
    parser.add_argument("--consent", action="store_true", help="use the default consent instead of exact answers")
    parser.add_argument("--rounds", type=int, default=50, help="rounds of the recipe, which set the default budget")
    parser.add_argument("--privacy", action="store_true", help="use a recipe with differential privacy (update)")
    parser.add_argument("--batch", type=int, default=512, help="batch size of the recipe (update)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        exact = {} if options.consent else {"evaluation": EXACT, "max_evaluations": 10**6}
        privacy = {"clip": 1.0, "noise": 1.0} if options.privacy else None
        victim = make_victim(
            Path(folder), rounds=options.rounds, seed=options.seed, batch=options.batch, privacy=privacy, **exact
        )
        server = HostileServer(victim)
        if options.attack == "update":
            errors = closest(read_update(server), victim.train)
            within = int((errors < 1).sum())
            print(f"training images: {len(victim.train)}; reconstructed within one grey level: {within}")
            return
        labels = victim.member._images.labels[victim.member._images.test].numpy()
        attack = EvaluationAttack(server, seed=options.seed)
        found = attack.sketch(victim.public) if options.consent else attack.image()
        target = target_of(attack, victim.test, labels)
        mean = victim.public.mean(0)
        print(f"queries: {server.asked}, answered: {server.answered}")
        print(f"exact pixels: {int((found == target).sum())} of 64")
        print(f"error of the reconstruction: {rms(found, target):.1f}; of the mean image: {rms(mean, target):.1f}")


def rms(guess: np.ndarray, target: np.ndarray) -> float:
    """Return the root mean square error over pixels, in grey levels."""
    return float(np.sqrt(np.square(guess - target).mean()))


if __name__ == "__main__":
    main()
