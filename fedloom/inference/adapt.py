"""Adaptation to new clients: a run's frozen representation with a classifier fitted on the client's images.

This is RepPer's second stage for a client that did not take part; its images and classes may differ from the run's.
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
from fedloom.core.optimizers import OptimizerSettings
from fedloom.core.rng import numpy_generator
from fedloom.core.state import under
from fedloom.core.training import Training
from fedloom.inference.image_model import chunks
from fedloom.inference.trained_model import TrainedModel, blank_workspace
from fedloom.methods.addons.heads import Head, Headed, classify

HEADS: tuple[Head, ...] = get_args(Head)
"""Kinds of classifiers that can be fitted."""
FOLDS = 5
"""Folds of the cross-validation."""
FEW = 10
"""A class with fewer images gives a warning."""
TRAINING = Training(epochs=1, batch_size=32, optimizer=OptimizerSettings(name="adam", lr=0.01, weight_decay=1e-4))
"""Training settings of linear and mlp heads, on features scaled to unit root mean square."""
STEPS = 100
"""Training steps of linear and mlp heads: RepPer's hundred iterations for new clients."""


class HeadFitter:
    """Fits classifiers of one kind on precomputed features of one representation."""

    def __init__(
        self, base: TrainedModel, classes: Sequence[str], head: Head, *, steps: int = STEPS, seed: int = 0
    ):  # fmt: skip
        if head not in HEADS:
            raise UserError(f"--head {head}: {nearest(head, HEADS)}")
        if base.multilabel:
            raise UserError(
                f"--head {head}: heads for newcomers need one class per sample, and this run has several labels per "
                "sample; use its global model"
            )
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
        self.workspace.start_from(self.start)
        self._refuse_another_representation(base)

    @torch.no_grad()
    def _refuse_another_representation(self, base: TrainedModel) -> None:
        """Raise a UserError if the base's representation is not its `model.extractor` (custom methods may differ)."""
        self.workspace.load(self.start, None)
        self.workspace.parts.eval()
        model: Any = self.workspace.parts.model
        x = torch.rand(2, *self.form.shape, generator=torch.Generator().manual_seed(0))
        if not torch.allclose(model.extractor(x), base.represent(x), atol=1e-5):
            raise UserError(
                f"{base.method.name} represents images by more than model.extractor: heads for newcomers are not yet "
                "supported for such methods"
            )

    def fit(self, z: Tensor, y: Tensor, client_id: int = 0) -> None:
        """Fit a new classifier on features and labels, independent of earlier fits; `client_id` keys its randomness."""
        self.workspace.load(self.start, None)
        client = Client(
            self.workspace, id=client_id, round=1, job="adapt", samples=np.arange(len(z), dtype=np.int64), first=False
        )
        self.method.fit_head(client, self.head, (z, y))
        self.workspace.parts.eval()

    @torch.no_grad()
    def logits(self, z: Tensor) -> Tensor:
        """Compute logits of features with the classifier that was fitted last."""
        return classify(self.workspace.parts, self.head, z)

    @torch.no_grad()
    def soften(self, temperature: float) -> None:
        """Divide the logits of the fitted classifier by a temperature."""
        classifier: Any = self.workspace.parts.classifier
        last = classifier["mlp"][-1] if self.head == "mlp" else classifier["linear"]
        last.weight.div_(temperature)
        last.bias.div_(temperature)


@dataclass
class Adaptation:
    """The estimated quality of an adapted model."""

    head: Head
    """Kind of the classifier."""
    classes: dict[str, int]
    """Number of images of each class that the model was fitted on."""
    accuracy: float | None
    """Accuracy on images that the tested classifier was not fitted on; None if nothing could be tested."""
    low: float | None
    """Lower end of Wilson's 95% interval of the accuracy."""
    high: float | None
    """Upper end of the interval."""
    tested: int
    """Number of tested images."""
    how: str
    """`5-fold` (stratified cross-validation; every image is tested once) or `held out` (images beyond `shots`)."""
    majority: float
    """Accuracy of always predicting the most frequent class, on the tested images."""
    warnings: list[str]
    """Reasons to distrust the model or its accuracy."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary, for files and --json."""
        return asdict(self)


def adapt(
    base: TrainedModel, images: Tensor, labels: np.ndarray, classes: Sequence[str], *, head: Head = "logreg",
    shots: int | None = None, steps: int = STEPS, seed: int = 0,
) -> tuple[TrainedModel, Adaptation]:  # fmt: skip
    """Fit a classifier for a new client on a model's frozen representation.

    Args:
        base: The model whose representation is used, such as `Run.representation()`.
        images: The client's images, uint8 [N, C, H, W].
        labels: Index of each image's class.
        classes: Class names.
        head: Kind of the classifier: logreg, svm, linear or mlp.
        shots: Number of images of each class to fit on; all others are used for testing. Default: fit on all images,
            and test by stratified cross-validation.
        steps: Training steps of linear and mlp heads.
        seed: Seed of the folds, the shots and the training.

    Returns:
        The adapted model, and its estimated quality.

    Raises:
        UserError: The head is unknown, `shots` is below 1, or the method represents images by more than
            `model.extractor`.

    Example:
        >>> base = fedloom.load("runs/mine").representation()   # doctest: +SKIP
        >>> model, quality = adapt(base, images, labels, ["cat", "dog"])   # doctest: +SKIP
        >>> quality.accuracy, quality.low, quality.high   # doctest: +SKIP
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
        fitter.fit(z[inner], y[inner], client_id=fold + 1)
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
    """Return the positions of `shots` images of each class (all if it has fewer), and of the other images."""
    if shots < 1:
        raise UserError(f"--shots {shots}: must be at least 1")
    order = rng.permutation(len(labels))
    chosen = np.sort(np.concatenate([order[labels[order] == label][:shots] for label in np.unique(labels)]))
    return chosen, np.setdiff1d(np.arange(len(labels)), chosen)


def stratified_folds(labels: np.ndarray, folds: int, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return folds as (positions to fit on, positions to test on).

    Each image is tested once, and each class is spread evenly over the folds.
    """
    from sklearn.model_selection import KFold, StratifiedKFold  # imported here because it takes a second

    if len(labels) < 2:
        return []
    most = int(np.bincount(labels).max())
    splitter = KFold if most < 2 else StratifiedKFold
    count, seed = min(folds, len(labels) if most < 2 else most), int(rng.integers(2**32))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class")  # `_judge` has its own warning
        return list(splitter(count, shuffle=True, random_state=seed).split(labels[:, None], labels))


def temperature(logits: Tensor, y: Tensor) -> float:
    """Return the temperature that turns SVM margins on unseen images into log-odds: the most likely one of a grid."""
    known = logits.gather(1, y[:, None])[:, 0] > -1e6  # excludes classes that were missing in the fold
    if not known.any():
        return 1.0
    grid = torch.logspace(-1.5, 1.5, 61)
    losses = [float(torch.nn.functional.cross_entropy(logits[known] / t, y[known])) for t in grid]
    return float(grid[int(np.argmin(losses))])


def interval(right: int, total: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a proportion by Wilson's method, which also suits small numbers."""
    from scipy.stats import binomtest

    found = binomtest(right, total).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def _judge(
    head: Head, classes: Sequence[str], fitted: np.ndarray, truth: np.ndarray, predicted: np.ndarray, how: str
) -> Adaptation:
    counts = np.bincount(fitted, minlength=len(classes))
    by_class = {name: int(count) for name, count in zip(classes, counts, strict=True)}
    notes = []
    if len(classes) == 1:
        notes.append(
            f"there is only one class, '{classes[0]}': the model always predicts it, and its accuracy is meaningless; "
            "add images of other classes"
        )
    elif few := [f"'{name}' ({count})" for name, count in by_class.items() if count < FEW]:
        notes.append(f"fewer than {FEW} images of {_some(few)}: expect mistakes there and an uncertain accuracy")
    if alone := [name for name, count in by_class.items() if count == 1 and how != "held out" and len(classes) > 1]:
        names = _some([f"'{name}'" for name in alone])
        notes.append(f"only one image of {names}: it cannot be used for both fitting and testing, and counts as wrong")
    right, total = int((truth == predicted).sum()), len(truth)
    accuracy = low = high = None
    majority = float(np.bincount(truth).max() / total) if total else 1.0
    if total:
        accuracy = right / total
        low, high = interval(right, total)
        if len(classes) > 1 and accuracy <= majority:
            often = classes[int(np.bincount(truth).argmax())]
            notes.append(
                f"the model does no better than always predicting '{often}' ({majority:.0%}): do not rely on it"
            )
    else:
        notes.append("there are too few images for a test: the accuracy is not known")
    return Adaptation(head, by_class, accuracy, low, high, total, how, majority, notes)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
