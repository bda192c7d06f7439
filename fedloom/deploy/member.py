"""An organisation at work: a signed request in, a signed answer out. It knows nothing of Flower or of sockets."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.failures import Failure
from fedloom.core.job import ENCODED, Job, Result
from fedloom.core.message import Message, MessageError, Signature, is_count, refuse_unless
from fedloom.core.state import State, serialisable
from fedloom.core.task import Task
from fedloom.core.workspace import Setup
from fedloom.deploy.certificates import read_key, read_public_key
from fedloom.deploy.consent import Answered, Consent, RefusalError, RequestLog
from fedloom.deploy.tasks import own_images, own_task
from fedloom.deploy.terms import FederationTerms, fingerprint, is_run, language, refuse_other_language
from fedloom.engines import Engine, EngineSettings, make_engine
from fedloom.experiment.files import write_whole
from fedloom.trust.ledger import FILE as LEDGER
from fedloom.trust.ledger import Ledger

KINDS = ("update", "evaluate", "global")
"""What a client does for a server. Completing a representation with several clients' data is not among it."""


@dataclass
class _Agreed:
    """A recipe that this organisation has agreed to, ready to be worked on."""

    recipe: Recipe
    engine: Engine
    plain: Signature
    """What the server's own state looks like, and what it sends of it to a client that is to learn from it."""
    packed: Signature


class Member:
    """One organisation: its folder, its data, what it consents to."""

    def __init__(self, folder: Path, data: Path, consent: Consent, engine: EngineSettings | None = None):
        self.folder, self.consent = folder, consent
        self.federation = FederationTerms.load(folder)
        try:
            self.name = (folder / "organisation").read_text(encoding="utf-8").strip()
        except OSError:
            raise UserError(
                f"'{folder}' is no organisation's folder: give one of those that `fedloom deploy init` wrote under "
                "organisations/"
            ) from None
        self.number = self.federation.number(self.name)
        self.key, self.coordinator = read_key(folder / "node.key"), read_public_key(folder / "coordinator.pub")
        self._engine = engine or EngineSettings()
        self._images = own_images(data, self.federation)
        self.seen = RequestLog(folder)
        self._answered = Answered(folder)
        self._agreed: dict[str, _Agreed] = {}

    def task(self, recipe: Recipe) -> Task:
        """This organisation's part of a recipe's task."""
        return own_task(recipe, self.federation, self.number, self._images)

    def answer(self, about: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """The answer's header and bytes. What is not to be done, or fails, is told in the answer, without a trace."""
        try:
            refuse_other_language(about.get("versions"))
            refuse_unless(about.get("to") == self.number, f"it is for client {about.get('to')!r:.20}, not for this one")
            if about.get("what") == "join":
                return self._join(about, body)
            return {"what": "result"}, self._work(about, body).to_bytes()
        except (RefusalError, MessageError) as refusal:
            return self._failed(Failure("dropped", f"{self.name} refuses: {refusal}"))
        except Exception as error:
            return self._failed(replace(Failure.of(error), trace="", cause=None))

    def _failed(self, failure: Failure) -> tuple[dict[str, Any], bytes]:
        return {"what": "result"}, Result(self.number, error=failure).to_bytes()

    def _join(self, about: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Agrees on a recipe, and tells how many samples there are."""
        try:
            values = json.loads(body)
            self.consent.check_names(values)
            recipe = Recipe.parse(values)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise MessageError(f"the message is refused: it has no recipe ({error!s:.80})") from None
        self.consent.check(recipe, self.federation, self._answered.count)
        agreed = fingerprint(recipe, self.federation)
        if about.get("recipe") != agreed:
            raise RefusalError(f"the recipe's hash is {about.get('recipe')!r:.20} there and '{agreed[:16]}…' here")
        path = self._paper(agreed)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, body)
        held = self._ready(agreed).engine.setup.task.federation
        numbers = {"train": len(held.train[self.number]), "test": len(held.test[self.number])}
        return {"what": "joined", "versions": language()} | numbers, b""

    def _paper(self, agreed: str) -> Path:
        """Where a recipe that was agreed on lies: a client that is restarted goes on with it."""
        return self.folder / "agreed" / f"{agreed}.json"

    def _ready(self, agreed: str) -> _Agreed:
        if agreed not in self._agreed:
            if not re.fullmatch("[0-9a-f]{64}", agreed) or not self._paper(agreed).exists():
                raise RefusalError("this recipe was not agreed on")
            recipe = Recipe.parse(json.loads(self._paper(agreed).read_bytes()))
            setup = Setup(self.task(recipe), recipe.make_method(), recipe.training, recipe.seed, recipe.wire)
            engine = make_engine(setup, self._engine)
            state = Message(engine.server_workspace.downward())
            self._agreed[agreed] = _Agreed(recipe, engine, state.signature, setup.codec.encode_down(state).signature)
        return self._agreed[agreed]

    def _work(self, about: dict[str, Any], body: bytes) -> Result:
        agreed = self._ready(str(about.get("recipe")))
        job, accepted, run = self._job(about, body, agreed)
        memory = RoundMemory(self.folder / "runs" / run / "memory")
        job = replace(job, memory=memory.at(accepted))
        self.consent.check(agreed.recipe, self.federation, self._answered.count if job.kind == "update" else 0)
        final = job.kind == "evaluate" and job.round == agreed.recipe.training.rounds
        result = next(iter(agreed.engine.run([replace(job, keep_model=final)])))
        if result.error is not None:
            return replace(result, error=replace(result.error, trace="", cause=None))
        if result.personal is not None:
            write_whole(self._place(run) / "personal.safetensors", save(serialisable(result.personal)))
        if job.kind == "update":
            assert result.memory is not None
            assert result.message is not None
            memory.keep(job.round, result.memory, accepted)
            self._answered.add()
        self._note(run, agreed, job, result)
        return replace(result, memory=None, personal=None)

    def _job(self, about: dict[str, Any], body: bytes, agreed: _Agreed) -> tuple[Job, int | None, str]:
        """The job of a request, once everything about it is known to be right."""
        try:
            job = Job.from_bytes(body)
        except (TypeError, KeyError, AssertionError, ValueError) as error:
            raise MessageError(f"the message is refused: it has no job ({error!s:.120})") from None
        run, accepted = about.get("run"), about.get("accepted")
        refuse_unless(is_run(run), "it names no run")
        refuse_unless(accepted is None or is_count(accepted), "it says no round that was accepted last")
        refuse_unless(job.kind in KINDS, f"a client does {', '.join(KINDS)}, not {job.kind!r:.20}")
        own = job.clients == (self.number,) if job.kind == "global" else job.client == self.number
        refuse_unless(own, "it is about another client's data")
        refuse_unless(is_count(job.attempt), "it says no number of attempts")
        rounds = agreed.recipe.training.rounds
        refuse_unless(is_count(job.round, least=1) and job.round <= rounds, f"round {job.round!r:.20} of {rounds}")
        known = agreed.packed if job.kind in ENCODED else agreed.plain
        for name, found in job.message.signature.items():
            refuse_unless(known.get(name) == found, f"'{name:.80}' is not what this method sends to clients")
        if bad := job.message.not_finite():
            raise MessageError(f"the message is refused: '{bad}' has values that are not finite")
        return job, accepted, str(run)

    def _place(self, run: str) -> Path:
        place = self.folder / "runs" / run
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _note(self, run: str, agreed: _Agreed, job: Job, result: Result) -> None:
        """The organisation's own ledger of what came and what leaves: it need not take the server's word."""
        path = self._place(run) / LEDGER
        if path.exists():
            ledger = Ledger.from_json(json.loads(path.read_text(encoding="utf-8")))
        else:
            ledger = Ledger()
            ledger.describe(agreed.engine.server_workspace, models=False, privacy=agreed.recipe.privacy)
        ledger.add("down", job.round, self.number, job.message)
        if result.message is not None:
            ledger.add("up", job.round, self.number, result.message)
        write_whole(path, (json.dumps(ledger.to_json(), indent=1) + "\n").encode())

    def close(self) -> None:
        """Gives back what engines hold."""
        for agreed in self._agreed.values():
            agreed.engine.close()


class RoundMemory:
    """A client's memory on its own disk: the states of one run, a file per round.

    A state is written before its upload is answered for. The server's next message says which round it took in last;
    what ran ahead of an upload that was lost is forgotten.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def at(self, accepted: int | None) -> State | None:
        """The state after the round that the server took in last (None: nothing yet)."""
        if accepted is None:
            return None
        path = self._path(accepted)
        if not path.exists():
            raise RefusalError(
                f"the server took in round {accepted} of this client, and there is no memory of it under "
                f"'{self.folder}' (there is: {', '.join(map(str, self.rounds())) or 'nothing'}); restore the folder "
                "from a backup, or begin a new run"
            )
        return load(path.read_bytes())

    def keep(self, round: int, state: State, accepted: int | None) -> None:
        """The state after a round whose upload is not yet answered for, beside the last accepted one; no other."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(round), save(serialisable(state)))
        for other in self.rounds():
            if other not in (round, accepted):
                self._path(other).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """Of which there is a state."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors"))

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"


def load_member(
    folder: Path, data: Path, *, methods: tuple[str, ...] = (), max_rounds: int | None = None, device: str = "auto"
) -> Member:
    """An organisation out of its folder, with the limits that it was started with."""
    try:
        settings = EngineSettings.model_validate({"device": device})
    except ValueError:
        raise UserError(f"--device {device}: must be auto, cpu or cuda") from None
    return Member(folder, data, Consent(Recipe.load(folder / "recipe.yaml"), methods, max_rounds), settings)
