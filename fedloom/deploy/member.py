"""An organisation's side of the protocol: turns requests into answers, independent of Flower and sockets."""

import hashlib
import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.failures import Failure
from fedloom.core.job import ENCODED, Job, Result
from fedloom.core.message import Message, MessageError, Signature, is_count, refuse_unless
from fedloom.core.state import serialisable
from fedloom.core.task import Task
from fedloom.core.workspace import Setup
from fedloom.deploy.certificates import read_key, read_public_key
from fedloom.deploy.consent import Consent, RefusalError, RequestLog, UpdateCounter
from fedloom.deploy.evaluation import EvaluationLog, EvaluationRequest, EvaluationTerms, evaluations_of
from fedloom.deploy.limits import JobLimits, LimitError, TimeLimitError
from fedloom.deploy.memory import RoundMemory
from fedloom.deploy.tasks import own_images, own_task
from fedloom.deploy.terms import FederationTerms, fingerprint, is_run, protocol_versions, refuse_other_versions
from fedloom.engines import Engine, EngineSettings, make_engine
from fedloom.experiment.files import write_whole
from fedloom.trust.ledger import Ledger
from fedloom.trust.ledger_file import FILE as LEDGER

KINDS = ("update", "evaluate", "global")
"""Kinds of jobs that a client does. `generalise`, which needs the data of several clients, is not among them."""
log = logging.getLogger("fedloom")


@dataclass
class _Agreed:
    """A recipe that this organisation has agreed to, with its engine."""

    recipe: Recipe
    engine: Engine
    plain: Signature
    """Names, shapes and dtypes of the server's state."""
    packed: Signature
    """Names, shapes and dtypes of the server's state as encoded for training jobs."""


class Member:
    """One organisation: its folder, its data and its consent.

    Args:
        folder: The organisation's folder from `fedloom deploy init`.
        data: Its images.
        consent: What it allows.
        engine: Engine settings; by default `EngineSettings()`.

    Raises:
        UserError: If the folder, a key or the images cannot be used.
    """

    def __init__(self, folder: Path, data: Path, consent: Consent, engine: EngineSettings | None = None):
        self.folder, self.consent = folder, consent
        self.federation = FederationTerms.load(folder)
        try:
            self.name = (folder / "organisation").read_text(encoding="utf-8").strip()
        except OSError:
            raise UserError(
                f"'{folder}' is not an organisation's folder: give a folder that `fedloom deploy init` created in "
                "organisations/"
            ) from None
        self.number = self.federation.number(self.name)
        self.key, self.coordinator = read_key(folder / "node.key"), read_public_key(folder / "coordinator.pub")
        self._engine = engine or EngineSettings()
        self._images, self.what_images = own_images(data, self.federation)
        self.seen = RequestLog(folder)
        self._answered, self._evaluations = UpdateCounter(folder), EvaluationLog(folder)
        self._agreed: dict[str, _Agreed] = {}

    def task(self, recipe: Recipe) -> Task:
        """Return this organisation's part of a recipe's task."""
        return own_task(recipe, self.federation, self.number, self._images, self.consent.recipe)

    def answer(self, about: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a request.

        A refusal includes its reason. Of an error, only the exception's type is sent; the details are logged.

        Args:
            about: The header of the request.
            body: The content of the request.

        Returns:
            The header and the body of the answer.
        """
        try:
            self._refuse_others(about)
            if about.get("what") == "join":
                return self._join(about, body)
            return {"what": "result"}, self._work(about, body).to_bytes()
        except (RefusalError, MessageError, LimitError) as refusal:
            late = isinstance(refusal, TimeLimitError)
            failure = Failure("timed_out" if late else "dropped", f"{self.name} refuses: {refusal}")
            log.warning(failure.why)
        except Exception as error:
            failure = self._reported(Failure.of(error))
        self._note_error(about, failure)
        return {"what": "result"}, Result(self.number, error=failure).to_bytes()

    def _refuse_others(self, about: dict[str, Any]) -> None:
        try:
            refuse_other_versions(about.get("versions"))
        except UserError as error:
            raise RefusalError(str(error)) from None
        refuse_unless(about.get("to") == self.number, f"it is for client {about.get('to')!r:.20}, not for this client")

    def _reported(self, failure: Failure) -> Failure:
        """Return the part of a failure that is sent; exception messages contain paths and values and stay here."""
        if isinstance(failure.cause, TimeLimitError):
            return Failure("timed_out", f"{self.name} refuses: {failure.cause}")
        log.error(f"a request failed: {failure.why}\n{failure.trace}")
        kind = failure.why.partition(":")[0]
        return replace(failure, why=f"{kind} at {self.name}; its log has the details", trace="", cause=None)

    def _join(self, about: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Agree to a recipe, and return the numbers of samples."""
        try:
            values = json.loads(body)
            self.consent.check_names(values, str(about.get("recipe")), self.federation)
            values.pop("engine", None)  # each party chooses its own engine
            recipe = Recipe.parse(values)
        except RefusalError:
            raise
        except UserError as error:  # the recipe that the server sent is invalid
            raise RefusalError(str(error)) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise MessageError(f"the message is refused: it contains no valid recipe ({error!s:.80})") from None
        self.consent.check(recipe, self.federation, self._answered.count)
        self.consent.limits.check(recipe, self.task(recipe))
        agreed = fingerprint(recipe, self.federation)
        if about.get("recipe") != agreed:
            raise RefusalError(
                f"the recipe's hash is {about.get('recipe')!r:.20} at the server and '{agreed[:16]}…' here"
            )
        path = self._agreed_path(agreed)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(values).encode(), private=True)
        held = self._ready(agreed).engine.setup.task.federation
        test = len(held.test[self.number])
        if why := self.consent.evaluation.withheld(test):
            log.warning(f"evaluation results are not shared: {why}")
        numbers = {"train": len(held.train[self.number]), "test": 0 if why else test}
        return {"what": "joined", "versions": protocol_versions()} | numbers, b""

    def _agreed_path(self, agreed: str) -> Path:
        """Return the file of an agreed recipe, which a restarted client continues to use."""
        return self.folder / "agreed" / f"{agreed}.json"

    def _ready(self, agreed: str) -> _Agreed:
        if agreed not in self._agreed:
            if not re.fullmatch("[0-9a-f]{64}", agreed) or not self._agreed_path(agreed).exists():
                raise RefusalError("this recipe was not agreed on")
            recipe = Recipe.parse(json.loads(self._agreed_path(agreed).read_bytes()))
            self.close()  # one recipe at a time, so that a server cannot fill the memory with agreed recipes
            setup = Setup(self.task(recipe), recipe.make_method(), recipe.training, recipe.seed, recipe.wire)
            with self.consent.limits.enforced(interruptible=True):
                engine = make_engine(setup, self._engine)
                state = Message(engine.server_workspace.downward())
                packed = setup.codec.encode_down(state).signature
            self._agreed[agreed] = _Agreed(recipe, engine, state.signature, packed)
        return self._agreed[agreed]

    def _work(self, about: dict[str, Any], body: bytes) -> Result:
        agreed = self._ready(str(about.get("recipe")))
        job, accepted, run = self._job(about, body, agreed)
        memory = RoundMemory(self.folder / "runs" / run / "memory")
        job = replace(job, memory=memory.at(accepted))
        if job.kind != "update":
            request = EvaluationRequest(run, job.kind, job.round, hashlib.sha256(body).hexdigest())
            result = self._evaluate(agreed, job, request)
        else:
            self.consent.check(agreed.recipe, self.federation, self._answered.count)
            self._answered.add()
            result = self._run(agreed, job)
            if result.error is None:
                assert result.memory is not None
                assert result.message is not None
                memory.keep(job.round, result.memory, accepted)
        self._note(run, agreed, job, result)
        return replace(result, memory=None, personal=None)

    def _run(self, agreed: _Agreed, job: Job) -> Result:
        """Run a job within the limits of the consent."""
        engine = agreed.engine
        with self.consent.limits.enforced(interruptible=engine.name == "inline"):
            result = next(iter(engine.run([job])))
        return result if result.error is None else replace(result, error=self._reported(result.error))

    def _evaluate(self, agreed: _Agreed, job: Job, request: EvaluationRequest) -> Result:
        """Evaluate a model, and return scores only if the consent allows an answer."""
        none = Result(-1 if job.kind == "global" else job.client)
        if self._evaluations.other(request):
            log.warning(
                f"run {request.run}, round {job.round}: already evaluated with other weights; no results are shared"
            )
            return none
        if (known := self._evaluations.answer_to(request)) is not None:
            return replace(none, scores=[known])
        terms, held = self.consent.evaluation, agreed.engine.setup.task.federation.test[self.number]
        why = terms.withheld(len(held))
        if why is None and not self._evaluations.begun(request) and self._evaluations.count >= terms.answers:
            why = f"{terms.answers} evaluations have already been answered (--max-evaluations)"
        final = job.kind == "evaluate" and job.round == agreed.recipe.training.rounds
        if why is not None:
            log.warning(f"run {request.run}, round {job.round}: evaluation results are not shared: {why}")
            took_part = job.memory is not None
            if not (final and took_part) or self._evaluations.known(request):
                return none  # the final personal model is created once, in runs that this client took part in
        if not self._evaluations.begun(request):
            self._evaluations.begin(request, counted=why is None)
        result = replace(self._run(agreed, replace(job, keep_model=final)), seconds=0.0)
        if result.personal is not None:
            place = self._place(request.run) / "personal.safetensors"
            write_whole(place, save(serialisable(result.personal)), private=True)
        if why is not None or result.error is not None:
            return replace(result, scores=[])
        answer = terms.shared(result.scores[0])
        self._evaluations.add(request, answer)
        return replace(result, scores=[answer])

    def _job(self, about: dict[str, Any], body: bytes, agreed: _Agreed) -> tuple[Job, int | None, str]:
        """Return the job, the last accepted round and the run of a request, after checking all its fields."""
        try:
            job = Job.from_bytes(body)
        except (TypeError, KeyError, AssertionError, ValueError) as error:
            raise MessageError(f"the message is refused: it contains no valid job ({error!s:.120})") from None
        run, accepted = about.get("run"), about.get("accepted")
        refuse_unless(is_run(run), "it has no valid run name")
        refuse_unless(accepted is None or is_count(accepted), "it has no valid last accepted round")
        refuse_unless(job.kind in KINDS, f"a client does jobs of kind {', '.join(KINDS)}, not {job.kind!r:.20}")
        own = job.clients == (self.number,) if job.kind == "global" else job.client == self.number
        refuse_unless(own, "it is about another client's data")
        refuse_unless(is_count(job.attempt), "it has no valid number of attempts")
        rounds = agreed.recipe.training.rounds
        in_range = is_count(job.round, least=1) and job.round <= rounds
        refuse_unless(in_range, f"it is for round {job.round!r:.20} of {rounds}")
        known = agreed.packed if job.kind in ENCODED else agreed.plain
        for name, found in job.message.signature.items():
            refuse_unless(known.get(name) == found, f"'{name:.80}' does not match what this method sends to clients")
        if bad := job.message.not_finite():
            raise MessageError(f"the message is refused: '{bad}' has values that are not finite")
        return job, accepted, str(run)

    def _place(self, run: str) -> Path:
        place = self.folder / "runs" / run
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _note(self, run: str, agreed: _Agreed, job: Job, result: Result) -> None:
        """Record a job in the organisation's ledger, so that it need not rely on the server's."""
        path = self._place(run) / LEDGER
        if path.exists():
            ledger = Ledger.from_json(json.loads(path.read_text(encoding="utf-8")))
        else:
            ledger = self.consent.ledger(agreed.recipe, agreed.engine.server_workspace)
        ledger.add("down", job.round, self.number, job.message, "training" if job.kind == "update" else "evaluation")
        if result.message is not None:
            ledger.add("up", job.round, self.number, result.message)
        for scores in result.scores:
            ledger.add_scores(job.round, scores)
        if result.error is not None:
            ledger.add_error(job.round, self.number, result.error.why)
        self._write_ledger(path, ledger)

    def _note_error(self, about: dict[str, Any], failure: Failure) -> None:
        """Record a refused or failed request in the ledger of its run, if that exists."""
        run, round = about.get("run"), about.get("round")
        path = self.folder / "runs" / str(run) / LEDGER
        if about.get("what") == "job" and is_run(run) and is_count(round) and path.exists():
            ledger = Ledger.from_json(json.loads(path.read_text(encoding="utf-8")))
            ledger.add_error(int(round), self.number, failure.why)  # type: ignore[arg-type]
            self._write_ledger(path, ledger)

    @staticmethod
    def _write_ledger(path: Path, ledger: Ledger) -> None:
        write_whole(path, (json.dumps(ledger.to_json(), indent=1) + "\n").encode(), private=True)

    def close(self) -> None:
        """Release the resources of the engines."""
        for agreed in self._agreed.values():
            agreed.engine.close()
        self._agreed.clear()


def load_member(
    folder: Path,
    data: Path,
    *,
    methods: tuple[str, ...] = (),
    max_rounds: int | None = None,
    max_evaluations: int | None = None,
    evaluation: EvaluationTerms | None = None,
    limits: JobLimits | None = None,
    device: str = "auto",
) -> Member:
    """Load an organisation from its folder, with the consent given by the arguments.

    Args:
        folder: The organisation's folder from `fedloom deploy init`.
        data: Its images.
        methods: Methods that may run; by default only the recipe in the folder.
        max_rounds: Maximum number of updates that are sent, over all runs; None for no limit.
        max_evaluations: Number of evaluations that are answered. Default: the number in one run of the recipe,
            at most 100.
        evaluation: What is shared of an evaluation.
        limits: Limits of a job.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        The organisation, ready to answer requests.

    Raises:
        UserError: If an argument, the folder or the images cannot be used.

    Example:
        >>> from pathlib import Path
        >>> from fedloom.deploy.worker import work
        >>> work(load_member(Path("fed/organisations/north"), Path("images"), max_rounds=100))
    """
    try:
        settings = EngineSettings.model_validate({"device": device})
    except ValueError:
        raise UserError(f"--device {device}: must be auto, cpu or cuda") from None
    recipe = Recipe.load(folder / "recipe.yaml")
    answers = evaluations_of(recipe) if max_evaluations is None else max_evaluations
    terms = replace(evaluation or EvaluationTerms(), answers=answers)
    consent = Consent(recipe, methods, max_rounds, terms, limits or JobLimits())
    return Member(folder, data, consent, settings)
