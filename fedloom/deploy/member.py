"""An organisation's side of the protocol: turns requests into answers, independent of Flower and sockets."""

import hashlib
import json
import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result
from fedloom.core.message import MessageError, is_count, refuse_unless
from fedloom.core.metrics import refuse_undefined
from fedloom.core.state import serialisable
from fedloom.core.task import Task
from fedloom.deploy.agreed import AgreedRecipe, make_ready, received_job
from fedloom.deploy.audit import asked, reason_of, what_left
from fedloom.deploy.certificates import read_key, read_public_key
from fedloom.deploy.consent import Consent, RefusalError, RequestLog, UpdateCounter
from fedloom.deploy.evaluation import EvaluationLog, EvaluationRequest, EvaluationTerms, evaluations_of
from fedloom.deploy.events import AUDIT, EventLog
from fedloom.deploy.limits import JobLimits, LimitError, TimeLimitError
from fedloom.deploy.member_ledger import MemberLedger, note_error
from fedloom.deploy.memory import RoundMemory
from fedloom.deploy.secure import SecureMember
from fedloom.deploy.tasks import own_images, own_task
from fedloom.deploy.terms import (
    FederationTerms,
    VersionError,
    fingerprint,
    is_run,
    protocol_versions,
    refuse_other_versions,
)
from fedloom.engines import EngineSettings
from fedloom.experiment.files import write_whole

ORGANISATIONS = "organisations"
log = logging.getLogger("fedloom")


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
        self.audit = EventLog(folder / AUDIT)
        self._left: dict[str, Any] = {}
        self._kind: str | None = None
        """What the request that is being answered asks for: the kind of a job, or the stage of secure aggregation."""
        self._answered, self._evaluations = UpdateCounter(folder), EvaluationLog(folder)
        self._secure = SecureMember(self.number, folder, self.key)
        self._agreed: dict[str, AgreedRecipe] = {}

    def task(self, recipe: Recipe, federation: FederationTerms | None = None) -> Task:
        """Return this organisation's part of a recipe's task, in its federation or a later state of it."""
        return own_task(recipe, federation or self.federation, self.number, self._images, self.consent.recipe)

    def answer(self, about: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a request.

        A refusal includes its reason. Of an error, only the exception's type is sent; the details are logged.

        Args:
            about: The header of the request.
            body: The content of the request.

        Returns:
            The header and the body of the answer.
        """
        self._left, self._kind = {}, about.get("stage")
        try:
            self._refuse_others(about)
            if about.get("what") == "join":
                header, content = self._join(about, body)
            elif about.get("what") == "secure":
                header, content = {"what": "secure"}, self._aggregate(about, body)
            else:
                header, content = {"what": "result"}, self._work(about, body).to_bytes()
            decision, why = "answered", None
        except (RefusalError, MessageError, LimitError, VersionError) as refusal:
            late, reason = isinstance(refusal, TimeLimitError), reason_of(refusal)
            failure = Failure("timed_out" if late else "dropped", f"{self.name} refuses: {refusal}")
            header, decision, why = {"what": "result", "reason": reason}, f"refused ({reason})", str(refusal)
        except Exception as error:
            failure = self._reported(Failure.of(error))
            header, decision, why = {"what": "result", "reason": "error"}, "failed", failure.why
        if why is not None:
            if about.get("what") in ("job", "secure"):
                note_error(self.folder, about, self.number, failure.why)
            content = Result(self.number, error=failure).to_bytes()
        self.audit.add(
            "request", "server", **asked(about, self._kind), decision=decision, why=why, left=self._left or None,
            bytes_received=len(body), bytes_sent=len(content),
        )  # fmt: skip
        return header, content

    def _refuse_others(self, about: dict[str, Any]) -> None:
        refuse_other_versions(about.get("versions"))
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
            stated = about.get("organisations", list(self.federation.organisations))
            federation = self.federation.with_organisations(stated)
            self.consent.check_names(values, str(about.get("recipe")), federation)
            values.pop("engine", None)  # each party chooses its own engine
            recipe = Recipe.parse(values)
        except RefusalError:
            raise
        except UserError as error:  # the recipe that the server sent is invalid
            raise RefusalError(str(error)) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise MessageError(f"the message is refused: it contains no valid recipe ({error!s:.80})") from None
        self.consent.check(recipe, federation, self._answered.count)
        self.consent.limits.check(recipe, self.task(recipe))
        self._refuse_undefined(recipe)
        agreed = fingerprint(recipe, federation)
        if about.get("recipe") != agreed:
            raise RefusalError(
                f"the recipe's hash is {about.get('recipe')!r:.20} at the server and '{agreed[:16]}…' here"
            )
        path = self._agreed_path(agreed)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(values | {ORGANISATIONS: stated}).encode(), private=True)
        held = self._ready(agreed).engine.setup.task.federation
        test = len(held.test[self.number])
        if why := self.consent.evaluation.withheld(test):
            log.warning(f"evaluation results are not shared: {why}")
        numbers = {"train": len(held.train[self.number]), "test": 0 if why else test}
        self._left = {f"number of {name} samples": number for name, number in numbers.items()}
        return {"what": "joined", "versions": protocol_versions()} | numbers, b""

    def _refuse_undefined(self, recipe: Recipe) -> None:
        names = [name for name in recipe.evaluation.wanted if name != "loss"]
        try:
            refuse_undefined(names, classes=len(self.federation.classes), multilabel=False)
        except UserError as error:
            raise RefusalError(str(error)) from None

    def _agreed_path(self, agreed: str) -> Path:
        """Return the file of an agreed recipe, which a restarted client continues to use."""
        return self.folder / "agreed" / f"{agreed}.json"

    def _ready(self, agreed: str) -> AgreedRecipe:
        if agreed not in self._agreed:
            if not re.fullmatch("[0-9a-f]{64}", agreed) or not self._agreed_path(agreed).exists():
                raise RefusalError("this recipe was not agreed on")
            values = json.loads(self._agreed_path(agreed).read_bytes())
            federation = self.federation.with_organisations(values.pop(ORGANISATIONS))
            recipe = Recipe.parse(values)
            self.close()  # one recipe at a time, so that a server cannot fill the memory with agreed recipes
            metrics = self.consent.evaluation.computed(recipe.evaluation.wanted)
            task, limits = self.task(recipe, federation), self.consent.limits
            self._agreed[agreed] = make_ready(recipe, task, federation, metrics, limits, self._engine)
        return self._agreed[agreed]

    def _work(self, about: dict[str, Any], body: bytes) -> Result:
        agreed = self._ready(str(about.get("recipe")))
        job, accepted, run = received_job(about, body, agreed, self.number)
        self._kind = job.kind
        memory = RoundMemory(self.folder / "runs" / run / "memory")
        job = replace(job, memory=memory.at(accepted))
        if job.kind != "update":
            request = EvaluationRequest(run, job.kind, job.round, hashlib.sha256(body).hexdigest())
            result = self._evaluate(agreed, job, request)
        else:
            self.consent.check(agreed.recipe, self.federation, self._answered.count)
            if agreed.contribution is not None:
                self._secure.receive(about, job, agreed.recipe.seed)
            self._answered.add()
            result = self._run(agreed, job)
            if agreed.contribution is not None:
                received = agreed.engine.setup.codec.decode_down(job.message, agreed.engine.server_workspace.initial)
                result = self._secure.masked(result, agreed.contribution, received)
            if result.error is None:
                assert result.memory is not None
                assert result.message is not None
                memory.keep(job.round, result.memory, accepted)
        shares = len(str(about["secure"])) if agreed.contribution is not None and job.kind == "update" else None
        self._ledger_of(run, agreed).note(job, result, shares)
        self._left = what_left(result)
        return replace(result, memory=None, personal=None)

    def _aggregate(self, about: dict[str, Any], body: bytes) -> bytes:
        """Answer a request of secure aggregation, outside of a job."""
        agreed, run, round = self._ready(str(about.get("recipe"))), about.get("run"), about.get("round")
        refuse_unless(is_run(run) and is_count(round), "it has no valid run name or round")
        if about.get("stage") == "keys":
            self.consent.check(agreed.recipe, self.federation, self._answered.count)
        answer = self._secure.answer(about, body, agreed.recipe, agreed.organisations)
        self._ledger_of(str(run), agreed).note_aggregation(int(str(round)), body, answer)
        self._left = {"secure aggregation": len(answer)}
        return answer

    def _run(self, agreed: AgreedRecipe, job: Job) -> Result:
        """Run a job within the limits of the consent."""
        engine = agreed.engine
        with self.consent.limits.enforced(interruptible=engine.name == "inline"):
            result = next(iter(engine.run([job])))
        return result if result.error is None else replace(result, error=self._reported(result.error))

    def _evaluate(self, agreed: AgreedRecipe, job: Job, request: EvaluationRequest) -> Result:
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
        answer = terms.shared(result.scores[0], agreed.recipe.evaluation.wanted)
        self._evaluations.add(request, answer)
        return replace(result, scores=[answer])

    def _place(self, run: str) -> Path:
        place = self.folder / "runs" / run
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _ledger_of(self, run: str, agreed: AgreedRecipe) -> MemberLedger:
        """Return this organisation's ledger of a run."""
        empty = partial(self.consent.ledger, agreed.recipe, agreed.engine.server_workspace)
        return MemberLedger(self._place(run), self.number, empty)

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
    secure_only: bool = False,
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
        secure_only: Whether only recipes with secure aggregation may run.

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
    consent = Consent(recipe, methods, max_rounds, terms, limits or JobLimits(), secure_only)
    return Member(folder, data, consent, settings)
