"""A new client's model in seconds: a run's representation, frozen, and a classifier of the client's own on it.

RepPer's second stage for somebody who never took part; images and classes may be others than the run's.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedloom import methods, objectives
from fedloom.core.client import Client
from fedloom.core.errors import UserError, nearest
from fedloom.core.optimizers import OptimizerSettings, Training
from fedloom.core.rng import numpy_generator
from fedloom.core.state import under
from fedloom.inference.image_model import chunks
from fedloom.inference.trained_model import TrainedModel, blank_workspace
from fedloom.methods.addons.heads import Head, Headed, classify

HEADS: tuple[Head, ...] = get_args(Head)
FOLDS = 5
FEW = 10
"""Images of a class below which a user is warned."""
TRAINING = Training(epochs=1, batch_size=32, optimizer=OptimizerSettings(name="adam", lr=0.01, weight_decay=1e-4))
"""How linear and mlp heads are fitted, on features of unit root mean square."""
STEPS = 100
"""Steps of such a head: RepPer's hundred iterations for new clients."""


class HeadFitter:
    """Fits classifiers on features that were computed once; one place for all heads of one representation."""

    def __init__(
        self, base: TrainedModel, classes: Sequence[str], head: Head, *, steps: int = STEPS, seed: int = 0
    ):  # fmt: skip
        if head not in HEADS:
            raise UserError(f"--head {head}: {nearest(head, HEADS)}")
        method = methods.get(f"fedavg+{head}", head_epochs=1, head_steps=steps)
        assert isinstance(method, Headed)
        self.head, self.method = head, method
        self.form = replace(base.form, classes=tuple(classes))
        task = base.workspace.setup.task
        self.workspace = blank_workspace(
            method, objectives.get("labels"), self.form, task.network, training=TRAINING, seed=seed
        )
        extractor = {n: t for n, t in base.workspace.tensors.items() if under(n, ("model.extractor",))}
        self.start = self.workspace.initial | {
            name: value for name, value in extractor.items() if name in self.workspace.initial
        }

        self._refuse_another_representation(base)

    @torch.no_grad()
    def _refuse_another_representation(self, base: TrainedModel) -> None:
        """A method of one's own may represent images by something else than `model.extractor`."""
        self.workspace.load(self.start, None)
        self.workspace.parts.eval()
        model: Any = self.workspace.parts.model
        x = torch.rand(2, *self.form.shape, generator=torch.Generator().manual_seed(0))
        if not torch.allclose(model.extractor(x), base.represent(x), atol=1e-5):
            raise UserError(
                f"{base.method.name} represents images by more than model.extractor: heads for newcomers cannot be put "
                "on that yet"
            )

    def fit(self, z: Tensor, y: Tensor, who: int = 0) -> None:
        """A new classifier, the same whatever was fitted before."""
        self.workspace.load(self.start, None)
        client = Client(
            self.workspace, id=who, round=1, job="adapt", samples=np.arange(len(z), dtype=np.int64), first=False
        )
        self.method.fit_head(client, self.head, (z, y))
        self.workspace.parts.eval()

    @torch.no_grad()
    def logits(self, z: Tensor) -> Tensor:
        """Of the classifier fitted last."""
        return classify(self.workspace.parts, self.head, z)

    @torch.no_grad()
    def soften(self, temperature: float) -> None:
        """Divides the logits."""
        classifier: Any = self.workspace.parts.classifier
        last = classifier["mlp"][-1] if self.head == "mlp" else classifier["linear"]
        last.weight.div_(temperature)
        last.bias.div_(temperature)


@dataclass
class Adaptation:
    """What came of it, honestly."""

    head: Head
    classes: dict[str, int]
    """Images of each class that the model was fitted on."""
    accuracy: float | None
    """On images that the tested classifier had not seen; none where nothing could be tested."""
    low: float | None
    """Wilson's 95% interval."""
    high: float | None
    tested: int
    how: str
    """`5-fold` (stratified; every image is tested once) or `held out` (those that --shots left)."""
    majority: float
    """What always answering the most frequent class would reach on the tested images."""
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """For files and --json."""
        return asdict(self)


def adapt(
    base: TrainedModel, images: Tensor, labels: np.ndarray, classes: Sequence[str], *, head: Head = "logreg",
    shots: int | None = None, steps: int = STEPS, seed: int = 0,
) -> tuple[TrainedModel, Adaptation]:  # fmt: skip
    """Fits a head of this kind on the base's frozen representation of images [N, C, H, W] uint8.

    With `shots`, on so many images of each class, tested on all others. Otherwise on all of them, tested by stratified
    cross-validation before.
    """
    fitter = HeadFitter(base, classes, head, steps=steps, seed=seed)
    with torch.no_grad():
        z = torch.cat([base.features(chunk) for chunk in chunks(images)])
    y = torch.from_numpy(labels)
    rng = numpy_generator(seed, "adapt")
    train, rest = (np.arange(len(y)), np.empty(0, np.int64)) if shots is None else pick_shots(labels, shots, rng)
    if len(rest):
        folds, how = [(train, rest)], "held out"
    else:
        folds = stratified_folds(labels[train], FOLDS, rng)
        folds = [(train[inner], train[outer]) for inner, outer in folds]
        how = f"{len(folds)}-fold"
    answers: list[Tensor] = []
    for fold, (inner, outer) in enumerate(folds):
        fitter.fit(z[inner], y[inner], who=fold + 1)
        answers.append(fitter.logits(z[outer]))
    tested = np.concatenate([outer for _, outer in folds]) if folds else np.empty(0, np.int64)
    logits = torch.cat(answers) if answers else z.new_empty(0, len(classes))
    fitter.fit(z[train], y[train])
    if head == "svm":
        fitter.soften(temperature(logits, y[tested]))
    adaptation = _judge(head, classes, labels[train], labels[tested], logits.argmax(1).numpy(), how)
    model = TrainedModel(fitter.workspace, fitter.form, 0, about={"adapted": adaptation.to_json()} | base.about)
    return model, adaptation


def pick_shots(labels: np.ndarray, shots: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions of so many of each class (all, where there are fewer), and of the others."""
    if shots < 1:
        raise UserError(f"--shots {shots}: at least 1 image of each class is needed")
    order = rng.permutation(len(labels))
    chosen = np.sort(np.concatenate([order[labels[order] == label][:shots] for label in np.unique(labels)]))
    return chosen, np.setdiff1d(np.arange(len(labels)), chosen)


def stratified_folds(labels: np.ndarray, folds: int, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions to fit on and to test on; each is tested once, and each class is spread evenly over the folds."""
    from sklearn.model_selection import KFold, StratifiedKFold  # here: it takes a second to import

    if len(labels) < 2:
        return []
    most = int(np.bincount(labels).max())
    splitter = KFold if most < 2 else StratifiedKFold
    count, seed = min(folds, len(labels) if most < 2 else most), int(rng.integers(2**32))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class")  # `_judge` says so in our words
        return list(splitter(count, shuffle=True, random_state=seed).split(labels[:, None], labels))


def temperature(logits: Tensor, y: Tensor) -> float:
    """What margins must be divided by to be log-odds, on answers to unseen images: the likeliest on a grid."""
    known = logits.gather(1, y[:, None])[:, 0] > -1e6  # a class that the fold had not seen says nothing of scale
    if not known.any():
        return 1.0
    grid = torch.logspace(-1.5, 1.5, 61)
    losses = [float(torch.nn.functional.cross_entropy(logits[known] / t, y[known])) for t in grid]
    return float(grid[int(np.argmin(losses))])


def interval(right: int, total: int) -> tuple[float, float]:
    """The 95% interval of a share by Wilson's method, sound for small numbers too."""
    from scipy.stats import binomtest

    found = binomtest(right, total).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def _judge(
    head: Head, classes: Sequence[str], fitted: np.ndarray, truth: np.ndarray, said: np.ndarray, how: str
) -> Adaptation:
    counts = np.bincount(fitted, minlength=len(classes))
    by_class = {name: int(count) for name, count in zip(classes, counts, strict=True)}
    notes = []
    if len(classes) == 1:
        notes.append(
            f"there is one class, '{classes[0]}': the model can only answer that, and its accuracy says nothing; add "
            "images of what it should be told from"
        )
    elif few := [f"'{name}' ({count})" for name, count in by_class.items() if count < FEW]:
        notes.append(f"fewer than {FEW} images of {_some(few)}: expect mistakes there, and an uncertain accuracy")
    if alone := [name for name, count in by_class.items() if count == 1 and how != "held out" and len(classes) > 1]:
        names = _some([f"'{name}'" for name in alone])
        notes.append(f"one image of {names}: it cannot be fitted on and tested on, and counts as a mistake")
    right, total = int((truth == said).sum()), len(truth)
    accuracy = low = high = None
    majority = float(np.bincount(truth).max() / total) if total else 1.0
    if total:
        accuracy = right / total
        low, high = interval(right, total)
        if len(classes) > 1 and accuracy <= majority:
            often = classes[int(np.bincount(truth).argmax())]
            notes.append(f"it does no better than always answering '{often}' ({majority:.0%}): do not rely on it")
    else:
        notes.append("there are too few images to test anything: the accuracy is not known")
    return Adaptation(head, by_class, accuracy, low, high, total, how, majority, notes)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
