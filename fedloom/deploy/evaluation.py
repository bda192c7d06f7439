"""Evaluation results that an organisation shares when a server evaluates a model on its test images.

The server chooses the weights, so each evaluation is a query about the test images: weights can be crafted so that one
more correct prediction reveals whether a pixel of a single image is bright. Answers are therefore few
(`EvaluationTerms.answers`, one per kind and round), coarse (correct predictions over all classes) and noisy. Of other
figures, the calibration error gets noise, too; those that one image can change by an unknown amount, such as the loss,
are sent only if the organisation names them (`--share-metrics`). Noise can be averaged out: with the default noise, a
difference of one correct prediction is two standard errors after 31 answers, so the limit on the number of answers is
the actual protection. A repeated request gets the stored answer.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import SystemRandom
from typing import Literal, get_args

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.metrics import CLASS_METRICS, Metric
from fedloom.core.scores import Scores

MANY = 100
"""Number of answers above which an attack can learn about single images despite the default noise."""
Shares = Literal["none", "accuracy", "classes"]
SENSITIVITY: dict[str, int] = {"ece": 2}
"""Figures with noise: how much replacing one of n test images changes n times the figure, at most.

The calibration error is a sum over bins of |Σ (right - confidence)| / n: an image leaves one bin and enters another,
and changes either by at most 1.
"""
NAMED: tuple[str, ...] = (*(name for name in CLASS_METRICS if name not in SENSITIVITY), "loss")
"""Figures without noise, because what one image changes depends on the others: they must be named in the consent."""
DIGITS = 3
"""Decimal digits of a figure without noise: an exact number could encode a pixel."""
_random = SystemRandom()


@dataclass(frozen=True)
class EvaluationTerms:
    """Which evaluation results an organisation agrees to share.

    Raises:
        UserError: If a value is out of range.
    """

    shares: Shares = "accuracy"
    """`accuracy`: correct predictions over all classes; `classes`: per class; `none`: nothing."""
    answers: int = 0
    """Maximum number of answers, over all runs."""
    min_test: int = 50
    """Smallest number of test images for which answers are given."""
    epsilon: float = 0.5
    """Privacy loss ε of each answer for one test image: the noise on a count has scale 1 / ε; inf means no noise.

    An answer with several noisy figures divides ε among them."""
    metrics: tuple[str, ...] = ()
    """Figures in `NAMED` that are shared without noise if the recipe asks for them."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.metrics if name not in NAMED]:
            noisy = f" ({', '.join(SENSITIVITY)} needs no consent: it is sent with noise)"
            raise UserError(f"--share-metrics {unknown[0]}: must be among {', '.join(NAMED)}{noisy}")
        if self.shares not in get_args(Shares):
            raise UserError(f"--evaluation {self.shares}: must be one of {', '.join(get_args(Shares))}")
        if self.answers < 0:
            raise UserError(f"--max-evaluations {self.answers}: must be 0 or more")
        if not self.epsilon > 0:
            raise UserError(f"--evaluation-epsilon {self.epsilon:g}: must be above 0; inf means no noise")

    def withheld(self, test: int) -> str | None:
        """Return the reason why no answers are given for this number of test images; None if answers are given."""
        if self.shares == "none" or self.answers == 0:
            return "evaluation is declined"
        if test < self.min_test:
            return f"there are {test} test images, and answers are given for {self.min_test} or more (--min-test)"
        return None

    def covers(self, name: str) -> bool:
        """Whether a figure is shared: with noise, computed from noisy counts per class, or because it is named."""
        return name in (*SENSITIVITY, *self.metrics) or (name == "balanced_accuracy" and self.shares == "classes")

    def computed(self, wanted: Iterable[str]) -> tuple[Metric, ...]:
        """Return the figures to compute, besides accuracy and loss, of those that a recipe asks for."""
        return tuple(name for name in CLASS_METRICS if name in wanted and self.covers(name))

    def shared(self, scores: Scores, wanted: Sequence[str] = ()) -> Scores:
        """Return the part of a result that is sent to the server: noisy counts, and figures that the terms cover.

        Args:
            scores: The result.
            wanted: Figures that the recipe asks for.
        """
        right, total = scores.right, scores.total
        if self.shares == "accuracy":
            right, total = [sum(right)], [sum(total)]
        noisy_figures = [name for name in SENSITIVITY if name in wanted]
        epsilon = self.epsilon / (1 + len(noisy_figures))
        noisy = [_with_noise(count, epsilon, most) for count, most in zip(right, total, strict=True)]
        figures: dict[str, float | None] = {}
        for name in wanted:
            value, samples = scores.metrics.get(name), sum(total)
            if name in noisy_figures and value is not None:  # whole numbers, so that the noise hides every digit
                count = math.floor(value * samples + 0.5)
                figures[name] = _with_noise(count, epsilon / SENSITIVITY[name], samples) / samples
            elif name == "balanced_accuracy" and self.shares == "classes":
                each = [r / t for r, t in zip(noisy, total, strict=True) if t]
                figures[name] = sum(each) / len(each) if each else None
            elif name in self.metrics and name != "loss":
                figures[name] = None if value is None else round(value, DIGITS)
        loss = None
        if "loss" in wanted and "loss" in self.metrics and scores.loss is not None and math.isfinite(scores.loss):
            loss = round(scores.loss / sum(total), DIGITS) * sum(total)
        return replace(scores, right=noisy, total=total, loss=loss, metrics=figures)

    def figure_lines(self, wanted: Sequence[str]) -> list[str]:
        """Return lines about figures besides the accuracy, of those that recipes may ask for."""
        noisy = [name for name in SENSITIVITY if name in wanted]
        derived = ["balanced_accuracy"] if "balanced_accuracy" in wanted and self.shares == "classes" else []
        exact = [name for name in NAMED if name in wanted and name in self.metrics and name not in derived]
        withheld = [name for name in wanted if not self.covers(name)]
        lines = []
        if noisy and not math.isinf(self.epsilon):
            lines.append(f"  and with noise: {', '.join(noisy)}; the ε of an answer is divided among its figures")
        elif noisy:
            lines.append(f"  and: {', '.join(noisy)}, rounded to multiples of one image")
        if derived:
            lines.append(f"  and computed from these numbers, so nothing more is revealed: {', '.join(derived)}")
        if exact:
            lines.append(
                f"  and WITHOUT noise (--share-metrics): {', '.join(exact)}, rounded to {DIGITS} digits; a crafted "
                "model can make such a figure reveal a single image"
            )
        if withheld:
            lines.append(f"  never: {', '.join(withheld)} (--share-metrics would allow it)")
        return lines

    def lines(self, test: int, wanted: Sequence[str] = ()) -> list[str]:
        """Return lines that describe these terms to the organisation before it consents.

        Args:
            test: Number of test images.
            wanted: Figures besides the accuracy that recipes may ask for.
        """
        if why := self.withheld(test):
            return [f"evaluation: no results are sent ({why})"]
        each = "per class" if self.shares == "classes" else "all classes together"
        decay = math.exp(-self.epsilon)
        noise = "exact" if math.isinf(self.epsilon) else (
            f"with noise (ε = {self.epsilon:g} each, ε = {self.answers * self.epsilon:g} for all of them; standard "
            f"deviation {math.sqrt(2 * decay) / (1 - decay):.1f} images)"
        )  # fmt: skip
        many = f"; more than {MANY} answers can reveal single images" if self.answers > MANY else ""
        return [
            f"evaluation: at most {self.answers} answers in all runs together, one per round for the shared model and "
            "one for the personal model (--max-evaluations)",
            f"  an answer is the number of correct predictions on {test} test images, {each}, {noise}; "
            f"{'' if 'loss' in self.metrics else 'never the loss'}{many}".rstrip("; "),
            *self.figure_lines(wanted),
        ]


def _with_noise(count: int, epsilon: float, most: int) -> int:
    """Add discrete Laplace noise of scale 1 / ε, the difference of two geometric numbers; keep 0 to `most`."""
    if math.isinf(epsilon):
        return min(max(count, 0), most)
    first, second = (math.floor(math.log(1 - _random.random()) / -epsilon) for _ in range(2))
    return min(max(count + first - second, 0), most)


def evaluations_of(recipe: Recipe) -> int:
    """Return the number of evaluations in one run of a recipe, at most MANY, since the server's side writes recipes."""
    rounds, every, method = recipe.training.rounds, recipe.evaluation.every, recipe.make_method()
    kinds = method.has_global + (not method.personal_is_global)  # the shared model and the personal model
    return min(MANY, kinds * (rounds // every + (rounds % every > 0)))


@dataclass(frozen=True)
class EvaluationRequest:
    """One evaluation: run, kind, round, and a hash of the request, which includes the weights."""

    run: str
    kind: str
    round: int
    asked: str

    @property
    def slot(self) -> tuple[str, str, int]:
        """Run, kind and round; each slot gets at most one answer."""
        return self.run, self.kind, self.round


class EvaluationLog:
    """Log of started evaluations and their answers, one line each, written to disk before an answer is sent.

    Evaluations without an answer are logged too, but not counted: the final evaluation still creates the personal
    model, once.
    """

    def __init__(self, folder: Path):
        self._path = folder / "evaluations.jsonl"
        self._requests: dict[tuple[str, str, int], EvaluationRequest] = {}
        self._answers: dict[EvaluationRequest, Scores] = {}
        self._counted: set[EvaluationRequest] = set()
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
            for line in filter(None, lines):
                values = json.loads(line)
                request = EvaluationRequest(**values["request"])
                self._requests[request.slot] = request
                if values["counted"]:
                    self._counted.add(request)
                if values["scores"] is not None:
                    self._answers[request] = Scores(**values["scores"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"'{self._path}' cannot be read ({error}): it counts the answered evaluations; restore it from a backup"
            ) from None

    @property
    def count(self) -> int:
        """Number of evaluations that were started in order to be answered; each may have revealed something."""
        return len(self._counted)

    def other(self, request: EvaluationRequest) -> bool:
        """Whether the same evaluation was requested before with other weights."""
        return self._requests.get(request.slot, request) != request

    def begun(self, request: EvaluationRequest) -> bool:
        """Whether the request was counted before."""
        return request in self._counted

    def known(self, request: EvaluationRequest) -> bool:
        """Whether a request for the same evaluation was received before, counted or not."""
        return request.slot in self._requests

    def answer_to(self, request: EvaluationRequest) -> Scores | None:
        """Return the stored answer to the same request; None without one."""
        return self._answers.get(request)

    def begin(self, request: EvaluationRequest, *, counted: bool = True) -> None:
        """Record an evaluation, before anything is computed."""
        self._append(request, None, counted)
        self._requests[request.slot] = request
        if counted:
            self._counted.add(request)

    def add(self, request: EvaluationRequest, scores: Scores) -> None:
        """Store an answer, before it is sent."""
        self._append(request, scores, True)
        self._answers[request] = scores

    def _append(self, request: EvaluationRequest, scores: Scores | None, counted: bool) -> None:
        values = {"request": vars(request), "counted": counted, "scores": None if scores is None else vars(scores)}
        line = json.dumps(values)
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            file.write(f"\n{line}\n")  # line break first: a line truncated by a crash does not corrupt the next one
            file.flush()
            os.fsync(file.fileno())
