"""What an organisation answers when a server evaluates a model on its test images.

A server chooses the weights, so every answer is a question about single images that somebody else has worded: weights
can be made such that one right answer more or less tells whether a pixel of one image is bright. Therefore answers are
few (`EvaluationTerms.answers`, one per kind and round), coarse (right answers of all classes together, never the loss)
and noisy. Noise can be averaged out: with the default noise, one right answer more is two standard errors after 31
answers, so the number of answers is what protects. A repeated request gets the stored answer.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from random import SystemRandom
from typing import Literal, get_args

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.scores import Scores

MANY = 100
"""Answers above which an attack can learn something about single images, with the default noise; none by default."""
Shares = Literal["none", "accuracy", "classes"]
_random = SystemRandom()


@dataclass(frozen=True)
class EvaluationTerms:
    """What an organisation agrees to answer."""

    shares: Shares = "accuracy"
    """`accuracy`: right answers, all classes together; `classes`: per class; `none`: nothing."""
    answers: int = 0
    """In all runs together."""
    min_test: int = 50
    """With fewer test images there is no answer."""
    epsilon: float = 0.5
    """Of each answer, with respect to one test image: the noise on a count has a scale of 1 / ε; inf: no noise."""

    def __post_init__(self) -> None:
        if self.shares not in get_args(Shares):
            raise UserError(f"--evaluation {self.shares}: must be one of {', '.join(get_args(Shares))}")
        if self.answers < 0:
            raise UserError(f"--max-evaluations {self.answers}: must be 0 or more")
        if not self.epsilon > 0:
            raise UserError(f"--evaluation-epsilon {self.epsilon:g}: must be above 0; inf means no noise")

    def withheld(self, test: int) -> str | None:
        """Why test images of this number never get an answer."""
        if self.shares == "none" or self.answers == 0:
            return "evaluation is declined"
        if test < self.min_test:
            return f"{test} test images, and answers are given for {self.min_test} or more (--min-test)"
        return None

    def shared(self, scores: Scores) -> Scores:
        """What leaves of a result: counts with noise, and no loss."""
        right, total = scores.right, scores.total
        if self.shares == "accuracy":
            right, total = [sum(right)], [sum(total)]
        noisy = [min(max(count + self._noise(), 0), most) for count, most in zip(right, total, strict=True)]
        return replace(scores, right=noisy, total=total, loss=None)

    def _noise(self) -> int:
        """The difference of two geometric numbers: a discrete Laplace distribution of scale 1 / ε."""
        if math.isinf(self.epsilon):
            return 0
        first, second = (math.floor(math.log(1 - _random.random()) / -self.epsilon) for _ in range(2))
        return first - second

    def lines(self, test: int) -> list[str]:
        """In words, for the organisation that is asked for its consent."""
        if why := self.withheld(test):
            return [f"evaluation: no answer leaves ({why})"]
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
            f"  an answer says how many of {test} test images are right, {each}, {noise}; never the loss{many}",
        ]


def evaluations_of(recipe: Recipe) -> int:
    """Answers that one run of a recipe can ask for, MANY at most: the server's side writes recipes."""
    rounds, every, method = recipe.training.rounds, recipe.evaluation.every, recipe.make_method()
    kinds = method.has_global + (not method.personal_is_global)  # the shared model, the personal one
    return min(MANY, kinds * (rounds // every + (rounds % every > 0)))


@dataclass(frozen=True)
class EvaluationRequest:
    """One evaluation: of what, and which weights (a hash of the request)."""

    run: str
    kind: str
    round: int
    asked: str

    @property
    def slot(self) -> tuple[str, str, int]:
        """There is one answer for each."""
        return self.run, self.kind, self.round


class EvaluationLog:
    """Evaluations that were begun and what was answered, on disk before an answer leaves: a line each.

    Those that get no answer are kept too (a last model is still made of them, once), and are not counted.
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
                f"'{self._path}' cannot be read ({error}): it counts evaluations that were answered; restore it from "
                "a backup"
            ) from None

    @property
    def count(self) -> int:
        """Evaluations that were begun with an answer in view: each may have revealed something."""
        return len(self._counted)

    def other(self, request: EvaluationRequest) -> bool:
        """Whether this round's evaluation was asked for with other weights before."""
        return self._requests.get(request.slot, request) != request

    def begun(self, request: EvaluationRequest) -> bool:
        """Whether it was counted before."""
        return request in self._counted

    def known(self, request: EvaluationRequest) -> bool:
        """Whether it came before, counted or not."""
        return request.slot in self._requests

    def answer_to(self, request: EvaluationRequest) -> Scores | None:
        """What was answered to the same request before."""
        return self._answers.get(request)

    def begin(self, request: EvaluationRequest, *, counted: bool = True) -> None:
        """Notes an evaluation, before anything is computed."""
        self._append(request, None, counted)
        self._requests[request.slot] = request
        if counted:
            self._counted.add(request)

    def add(self, request: EvaluationRequest, scores: Scores) -> None:
        """Stores an answer, before it leaves."""
        self._append(request, scores, True)
        self._answers[request] = scores

    def _append(self, request: EvaluationRequest, scores: Scores | None, counted: bool) -> None:
        values = {"request": vars(request), "counted": counted, "scores": None if scores is None else vars(scores)}
        line = json.dumps(values)
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            file.write(f"\n{line}\n")  # a line that a crash cut short spoils no other
            file.flush()
            os.fsync(file.fileno())
