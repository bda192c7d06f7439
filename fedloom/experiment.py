"""The round loop: sample → engine → combine → evaluate → record → checkpoint. It knows no device, no method by name."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch

from fedloom.engines import Engine, EngineSettings, make_engine
from fedloom.envelope import signature
from fedloom.evaluation.evaluator import Answer, Evaluator, refuse_unknown_part
from fedloom.evaluation.scores import Scores
from fedloom.evaluation.summary import summary_of
from fedloom.exchange import Exchange
from fedloom.failing.attendance import Attendance
from fedloom.failing.failures import RoundError
from fedloom.lane import Setup
from fedloom.message import Message
from fedloom.parts import State
from fedloom.recipe import Recipe
from fedloom.report.log import logging_to
from fedloom.report.writers import Writers, refuse_missing
from fedloom.room import refuse_model_without_room
from fedloom.runs.interrupts import Interrupted, Interrupts
from fedloom.runs.preparing import make_task
from fedloom.runs.resuming import ended, fingerprint, refuse_other_data, tell_other_versions
from fedloom.sampling import Sampling
from fedloom.server import Server
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.due import Due
from fedloom.storage.folder import SUMMARY, RunFolder, holds_run, without_nan
from fedloom.storage.memory import ClientStore
from fedloom.task import EVERYONE, Task
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
        self._told: set[str] = set()
        refuse_missing(recipe.log)
        refuse_unknown_part(recipe.evaluation.distance, self.method)
        self.sampling = Sampling(recipe, self.task, pooled=self.method.pooled)
        refuse_model_without_room(self.task)
        self.trust = Trust(recipe, self.method, self.sampling)
        self.ledger = Ledger()

    @property
    def scores(self) -> list[Scores]:
        """Every client's, at the last evaluation."""
        return self.evaluator.scores

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
                federation=len(self.sampling.trainers),
                clients=self.remembered,
                combination=self.trust.combination,
            )
            self.evaluator = Evaluator(self.recipe, self.task, self.method, self.memory, self.folder)
            self.ledger = Ledger()
            self.ledger.describe(engine.home, self.recipe)
            self.checkpoints = Checkpoints(self.folder.path / "checkpoints")
            self._due = Due(self.recipe.storage.checkpoint_every, self.recipe.storage.checkpoint_seconds)
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
                if round < self.recipe.training.rounds and self._due(round):
                    self._save()
            return self._finish(engine.home.unshared())

    def _save(self) -> None:
        """A checkpoint of all that the next round depends on."""
        notes = {
            "task": self._fingerprint, "seconds": self._seconds, "history": self.history,
            "ledger": self.ledger.to_json(),
        }  # fmt: skip
        with self._due.writing():
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
        attendance, chosen, exchange, messages = self._ask(engine, round)
        self.method.combine(self.server, self.trust.sealed(messages))
        for _ in messages:  # a method that combines nothing still has its clients work
            pass
        record: Record = {
            "round": round,
            "lr": training.lr(round),
            "clients": attendance.answered,
            **exchange.record(),
            **attendance.record(),
            **self.trust.record(round, chosen),
        }
        record["train_seconds"] = perf_counter() - start
        final = round == training.rounds
        if final or round % self.recipe.evaluation.every == 0:
            record |= self.evaluator.evaluate(engine, round, self.server.state, self._answer(), final=final)
        record["seconds"] = perf_counter() - start
        return record

    def _ask(self, engine: Engine, round: int) -> tuple[Attendance, list[int], Exchange, Iterator[Message]]:
        """Has clients work, and others if too few answer: `min_clients` answers are there before any is combined."""
        training = self.recipe.training
        asked: set[int] = set()
        expected = signature(engine.home.sent)
        skip = training.on_error == "skip"
        for attempt in range(ATTEMPTS):
            chosen = self.sampling.draw(round, attempt, asked)
            asked |= set(chosen)
            self.server.begin(round)
            exchange = Exchange(self.recipe, self.setup, self.memory, self.ledger, round=round, attempt=attempt)
            attendance = Attendance(expected, round=round, attempt=attempt, skip=skip, told=self._told)
            jobs = exchange.jobs(chosen, self._messages(chosen))
            results = attendance.present(exchange.read(self.trust.run(engine, jobs), engine.home))
            needed = 0 if self.sampling.poisson else training.min_clients  # a Poisson sample may have nobody
            first = list(islice(results, needed))
            if len(first) == needed:
                return attendance, chosen, exchange, exchange.accepted(chain(first, results))
            attendance.too_few(needed, ATTEMPTS - attempt - 1)
        raise AssertionError("the last attempt raises")

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
