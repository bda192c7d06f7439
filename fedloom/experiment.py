"""The round loop: sample → engine → combine → evaluate → record → checkpoint. It knows no device, no method by name."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import torch

from fedloom.engines import Engine, EngineSettings, make_engine
from fedloom.envelope import MessageError, signature
from fedloom.errors import UserError
from fedloom.evaluation.evaluator import Answer, Evaluator
from fedloom.evaluation.scores import Scores
from fedloom.evaluation.summary import summary_of
from fedloom.failing.attendance import Attendance
from fedloom.failing.failures import Failure, RoundError
from fedloom.job import Job, Result
from fedloom.lane import Lane, Setup
from fedloom.message import Message
from fedloom.parts import State
from fedloom.randomness import numpy_generator
from fedloom.recipe import Recipe
from fedloom.report.log import logging_to
from fedloom.report.writers import Writers, refuse_missing
from fedloom.room import refuse_model_without_room
from fedloom.runs.interrupts import Interrupted, Interrupts
from fedloom.runs.preparing import make_task
from fedloom.runs.resuming import ended, fingerprint, refuse_other_data, tell_other_versions
from fedloom.server import Server
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.folder import SUMMARY, RunFolder, holds_run, without_nan
from fedloom.storage.memory import ClientStore
from fedloom.task import EVERYONE, Task, longest_first
from fedloom.trust.ledger import FILE as LEDGER
from fedloom.trust.ledger import Ledger
from fedloom.trust.sections import Trust
from fedloom.use.trained import TASK, task_facts

Record = dict[str, Any]
ATTEMPTS = 5
"""How often a round is begun, with other clients each time, before the run stops for want of answers."""


class Experiment:
    """One run of a recipe. `run()` goes through all rounds; `on_round` is told of each as it ends."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        task: Task | None = None,
        on_round: Callable[[Record], None] | None = None,
        engine: Callable[[Setup, EngineSettings], Engine] = make_engine,
    ):
        self.recipe = recipe
        self._make_engine = engine
        self.task = replace(task, objective=recipe.make_objective()) if task else make_task(recipe)
        self.method = recipe.make_method()
        self.on_round = on_round
        self.setup = Setup(self.task, self.method, recipe.training, recipe.seed, recipe.wire)
        self.history: list[Record] = []
        newcomers = set(self.task.federation.newcomers)
        self.participants = [c for c in range(self.task.clients) if c not in newcomers]
        self.trainers = [EVERYONE] if self.method.pooled else self.participants
        self._told: set[str] = set()
        refuse_missing(recipe.log)
        self._refuse_too_few()
        refuse_model_without_room(self.task)
        self.trust = Trust(recipe, self.method, self.trainers, self._per_round)
        self.ledger = Ledger()

    @property
    def scores(self) -> list[Scores]:
        """Every client's, at the last evaluation."""
        return self.evaluator.scores

    def _refuse_too_few(self) -> None:
        needed, asked = self.recipe.training.min_clients, self._per_round
        if asked == 0:
            raise UserError(
                f"training.fraction = {self.recipe.training.fraction:g}: selects none of {len(self.trainers)} clients; "
                f"{1 / len(self.trainers):.2g} selects one"
            )
        if needed > asked:
            raise UserError(
                f"training.min_clients = {needed}: {asked} of {len(self.trainers)} clients take part in a round; lower "
                "it, or raise training.fraction"
            )

    def run(self, *, resume: bool = False) -> Record:
        """All rounds; returns the summary, which is also in the run folder with everything else.

        `resume` goes on from the last checkpoint of the run in `recipe.out`, if there is one.
        """
        out = self.recipe.out or RunFolder.fresh(Path("runs"), self.recipe.label)
        resume = resume and holds_run(out)
        if resume and (summary := ended(self.recipe)):
            return summary
        self.history = []
        budget = self.recipe.storage.memory_mb * 2**20
        with (
            self._make_engine(self.setup, self.recipe.engine) as engine,
            closing(RunFolder(out, resume=resume)) as self.folder,
            logging_to(self.folder.path / "log.txt"),
            closing(ClientStore(budget // 2, inside=self.folder.path)) as self.memory,
            closing(ClientStore(budget // 2, inside=self.folder.path)) as self.remembered,
            closing(Writers(self.recipe, self.folder.path)) as writers,
            Interrupts() as interrupts,
        ):
            self.server = Server(
                engine.home,
                federation=len(self.trainers),
                clients=self.remembered,
                combination=self.trust.combination,
            )
            self.evaluator = Evaluator(self.recipe, self.task, self.method, self.memory, self.folder)
            self.ledger = Ledger()
            self.ledger.describe(engine.home, self.recipe)
            self.checkpoints = Checkpoints(self.folder.path / "checkpoints")
            self._begun = perf_counter()
            if resume:
                self._restore(engine.home.device)
            else:
                self._save()
                self.folder.write_json(TASK, task_facts(self.task, self._fingerprint))
                # where it lay is not part of an experiment; with the recipe, last, the folder holds a run
                self.folder.describe(self.recipe.with_(out=None).to_yaml())
            for round in range(len(self.history) + 1, self.recipe.training.rounds + 1):
                if interrupts.asked is not None:
                    self._stop(interrupts.asked)
                try:
                    record = self.round(engine, round)
                except RoundError as error:  # nothing of the round was taken in
                    self._save()
                    error.add_note(f"the rounds before it are kept; go on with: fedloom resume {self.folder.path}")
                    raise
                self.history.append(without_nan(record))
                self.folder.record(record)
                writers(record)
                if self.on_round is not None:
                    self.on_round(record)
                every = self.recipe.storage.checkpoint_every
                if every and round % every == 0 and round < self.recipe.training.rounds:
                    self._save()
            return self._finish(engine.home.unshared())

    def _save(self) -> None:
        """A checkpoint of all that the next round depends on."""
        notes = {
            "task": self._fingerprint, "seconds": self._seconds, "history": self.history,
            "ledger": self.ledger.to_json(),
        }  # fmt: skip
        self.checkpoints.save(len(self.history), self.server.saved(), self._stores, notes)
        self.folder.write_json(LEDGER, self.ledger.to_json())

    def _restore(self, device: torch.device) -> None:
        """The state of the last checkpoint; metrics written after it are taken back."""
        checkpoint, server = self.checkpoints.load(self._stores, device)
        tell_other_versions(self.folder.path)
        refuse_other_data(self.task, self._fingerprint, checkpoint.notes["task"])
        self.server.restore(server)
        self.history = checkpoint.notes["history"]
        self.ledger = Ledger.from_json(checkpoint.notes["ledger"])
        self._begun -= checkpoint.notes["seconds"]
        self.folder.cut_back(self.history)

    def _stop(self, signal: int) -> NoReturn:
        """Leaves between two rounds."""
        self._save()
        done = f"stopped after round {len(self.history)} of {self.recipe.training.rounds}"
        raise Interrupted(done, f"fedloom resume {self.folder.path}", signal)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.task)

    @property
    def _stores(self) -> dict[str, ClientStore]:
        return {"memory": self.memory, "remembered": self.remembered}

    @property
    def _seconds(self) -> float:
        """How long the run has taken, time before a resume included."""
        return perf_counter() - self._begun

    def round(self, engine: Engine, round: int) -> Record:
        """One communication round, and its evaluation when it is due."""
        start = perf_counter()
        training = self.recipe.training
        attendance, chosen, tally, messages = self._ask(engine, round)
        self.method.combine(self.server, self.trust.sealed(messages))
        for _ in messages:  # a method that combines nothing still has its clients work
            pass
        record: Record = {
            "round": round,
            "lr": training.lr(round),
            "clients": attendance.answered,
            **tally.per_client(),
            **attendance.record(),
            **self.trust.record(round, chosen),
        }
        record["train_seconds"] = perf_counter() - start
        final = round == training.rounds
        if final or round % self.recipe.evaluation.every == 0:
            record |= self.evaluator.evaluate(engine, round, self.server.state, self._answer(), final=final)
        record["seconds"] = perf_counter() - start
        return record

    def _ask(self, engine: Engine, round: int) -> tuple[Attendance, list[int], "_Tally", Iterator[Message]]:
        """Has clients work, and others if too few answer: `min_clients` answers are there before any is combined."""
        training = self.recipe.training
        asked: set[int] = set()
        expected = signature(engine.home.sent)
        skip = training.on_error == "skip"
        for attempt in range(ATTEMPTS):
            chosen = self._sample(round, attempt, asked)
            asked |= set(chosen)
            self.server.begin(round)
            tally = _Tally()
            attendance = Attendance(expected, round=round, attempt=attempt, skip=skip, told=self._told)
            given: dict[int, Message] = {}
            jobs = self._update_jobs(round, chosen, tally, attempt, given)
            noted = self._noted(self.trust.run(engine, jobs), round)
            results = attendance.present(self._unpacked(noted, given, engine.home))
            needed = 0 if self.trust.poisson else training.min_clients  # a Poisson sample may have nobody
            first = list(islice(results, needed))
            if len(first) == needed:
                return attendance, chosen, tally, self._accepted(chain(first, results), tally)
            attendance.too_few(needed, ATTEMPTS - attempt - 1)
        raise AssertionError("the last attempt raises")

    @property
    def _per_round(self) -> int:
        share = int(self.recipe.training.fraction * len(self.trainers) + 0.5)
        return max(1, share) if self.method.pooled else share

    def _sample(self, round: int, attempt: int = 0, asked: Iterable[int] = ()) -> list[int]:
        """Who takes part, the longest first: that order is also the order of summation, on every engine.

        When a round is retried, those who were not asked before come first.
        """
        if attempt == 0:
            generator = numpy_generator(self.recipe.seed, round, "sample")
            if self.trust.poisson:  # perhaps nobody
                draw = np.flatnonzero(generator.random(len(self.trainers)) < self.recipe.training.fraction)
            else:
                draw = generator.choice(len(self.trainers), self._per_round, replace=False)
            return longest_first(self.task, (self.trainers[i] for i in draw))
        order = numpy_generator(self.recipe.seed, round, "sample", attempt).permutation(self.trainers)
        others_first = sorted((int(c) for c in order), key=set(asked).__contains__)
        return longest_first(self.task, others_first[: self._per_round])

    def _update_jobs(
        self, round: int, clients: list[int], tally: "_Tally", attempt: int, given: dict[int, Message]
    ) -> Iterator[Job]:
        """Made as an engine asks for them, so that few clients' memories are in RAM at once. Notes what is `given`."""
        message_for = self._messages(clients)
        for client in clients:
            message = given[client] = message_for(client)
            tally.add_sent(0 if self.method.pooled else message.nbytes)
            if not self.method.pooled:
                self.ledger.add("down", round, client, message)
            fault, delay = self.recipe.faults.draw(self.recipe.seed, round, client, attempt)
            memory = self.memory.get(client)
            yield Job("update", round, message, client=client, memory=memory, fault=fault, delay=delay)

    def _messages(self, clients: Iterable[int]) -> Answer:
        """What each client gets, made before the first of them answers: answers change what the server knows."""
        answer = self._answer()
        each = {client: answer(client) for client in clients}
        return each.pop

    def _answer(self) -> Answer:
        """What the server has for a client: one object for all, unless the method makes an answer for each."""
        packed = self.setup.wire.to_client
        if self.method.overrides("message_for"):
            return lambda client: packed(Message(self.method.message_for(self.server, client), client=client))
        shared = packed(Message(self.method.message_for(self.server, EVERYONE)))
        return lambda client: shared

    def _noted(self, results: Iterator[Result], round: int) -> Iterator[Result]:
        """What leaves a client is in the ledger, whatever becomes of it."""
        for result in results:
            if result.message is not None and not self.method.pooled:
                self.ledger.add("up", round, result.client, result.message)
            yield result

    def _unpacked(self, results: Iterator[Result], given: dict[int, Message], home: Lane) -> Iterator[Result]:
        """Messages as the server reads them; one that cannot be read is a failure like others."""
        wire = self.setup.wire
        for result in results:
            received = given.pop(result.client, None)
            if result.message is not None and received is not None and wire.up is not None:
                try:
                    basis = wire.at_client(received, home.initial)
                    result.message = wire.at_server(result.message, basis, home.sent)
                except MessageError as error:
                    result = Result(result.client, error=Failure("invalid", str(error)))
            yield result

    def _accepted(self, results: Iterator[Result], tally: "_Tally") -> Iterator[Message]:
        """Messages one by one; a client's memory is committed together with its message."""
        for result in results:
            assert result.message is not None
            assert result.memory is not None
            tally.up += 0 if self.method.pooled else result.message.nbytes
            tally.add_loss(None if result.loss is None else float(result.loss), result.message.samples)
            self.memory[result.client] = result.memory
            yield result.message

    def _finish(self, unshared: State) -> Record:
        """Writes the last files of the run folder."""
        first = {
            "method": self.method.name,
            "rounds": len(self.history),
            "seed": self.recipe.seed,
            "clients": self.task.clients,
        }
        last = {"seconds": self._seconds, "run_dir": str(self.folder.path)}
        summary = first | summary_of(self.history, self.recipe.evaluation.summary, self.task.federation.notes) | last
        self.folder.write_model("server", self.server.state)
        self.folder.write_model("initial", unshared)
        self.folder.write_lines("clients.jsonl", self.evaluator.rows())
        self.folder.write_json(LEDGER, self.ledger.to_json())
        self.folder.write_json(SUMMARY, summary)
        self.checkpoints.remove()
        return summary


class _Tally:
    """Bytes and losses of a round's clients."""

    def __init__(self) -> None:
        self.up = self.down = self.sent = self.jobs = self.samples = 0
        self.loss = 0.0

    def add_sent(self, nbytes: int) -> None:
        self.sent += 1
        self.down += nbytes

    def add_loss(self, loss: float | None, samples: int) -> None:
        self.jobs += 1
        if loss is not None:
            self.loss += loss * samples
            self.samples += samples

    def per_client(self) -> Record:
        loss = self.loss / self.samples if self.samples else None
        up, down = self.up // max(1, self.jobs), self.down // max(1, self.sent)
        return {"loss": loss, "up_bytes": up, "down_bytes": down}
