"""The round loop: sample → engine → combine → evaluate → record → checkpoint. It knows no device, no method by name."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import torch

from fedloom.attendance import Attendance
from fedloom.data import Dataset, combine, federate, limit, load
from fedloom.data.augment import parse_augment
from fedloom.engines import Engine, make_engine
from fedloom.envelope import signature
from fedloom.errors import UserError
from fedloom.evaluation.scores import Scores
from fedloom.evaluation.spread import pooled, spread, summarise
from fedloom.failures import RoundError
from fedloom.interrupts import Interrupted, Interrupts
from fedloom.job import Job, Result
from fedloom.lane import Setup
from fedloom.ledger import Ledger
from fedloom.message import Message
from fedloom.randomness import numpy_generator
from fedloom.recipe import DataSettings, Recipe
from fedloom.report.log import LOGGER, logging_to
from fedloom.resuming import ended, fingerprint, refuse_other_data, tell_other_versions
from fedloom.room import refuse_model_without_room
from fedloom.server import Server
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.folder import SUMMARY, RunFolder, holds_run, without_nan
from fedloom.storage.memory import ClientStore
from fedloom.task import EVERYONE, Task, group_of_clients
from fedloom.trust import Trust

Record = dict[str, Any]
ACCURACIES = (
    "global_accuracy", "personal_accuracy", "personal_weighted", "personal_std", "personal_worst",
    "newcomer_accuracy", "newcomer_std", "newcomer_global_accuracy",
)  # fmt: skip
ATTEMPTS = 5
"""How often a round is begun, with other clients each time, before the run stops for want of answers."""
GLOBAL_CHUNK = 2048
"""Test samples of one job that scores the shared model: enough to be worth sending, small enough to share out."""


def load_dataset(recipe: Recipe) -> Dataset:
    """The images that a recipe names, several datasets as styles of one."""
    data = recipe.data
    parts = [load(name, folder=data.dir, size=data.size) for name in _names(data)]
    return parts[0] if len(parts) == 1 else combine(parts, size=data.size)


def make_task(recipe: Recipe, dataset: Dataset | None = None) -> Task:
    """Loads the data, unless they are given, and deals them out."""
    data = recipe.data
    seed = recipe.seed if data.seed is None else data.seed
    dataset = dataset or load_dataset(recipe)
    if data.limit is not None:
        dataset = limit(dataset, data.limit, seed)
    federation = federate(
        dataset,
        clients=data.clients,
        partition=data.partition,
        split=data.split,
        minimum=data.minimum,
        newcomers=data.newcomers,
        resample=data.resample,
        seed=seed,
    )
    return Task(
        dataset,
        federation,
        model_name=recipe.model.name,
        model_options=recipe.model.options,
        augment=parse_augment(data.augment),
        views=parse_augment(data.views),
        normalise=data.normalise,
        objective=recipe.make_objective(),
    )


def _names(data: DataSettings) -> list[str]:
    return [data.name] if Path(data.name).exists() else data.name.split("+")


class Experiment:
    """One run of a recipe. `run()` goes through all rounds; `on_round` is told of each as it ends."""

    def __init__(self, recipe: Recipe, *, task: Task | None = None, on_round: Callable[[Record], None] | None = None):
        self.recipe = recipe
        self.task = replace(task, objective=recipe.make_objective()) if task else make_task(recipe)
        self.method = recipe.make_method()
        self.on_round = on_round
        self.setup = Setup(self.task, self.method, recipe.training, recipe.seed)
        self.history: list[Record] = []
        newcomers = set(self.task.federation.newcomers)
        self.participants = [c for c in range(self.task.clients) if c not in newcomers]
        self.trainers = [EVERYONE] if self.method.pooled else self.participants
        self.evaluated = self._evaluated()
        self._told: set[str] = set()
        self._refuse_too_few()
        refuse_model_without_room(self.task)
        self.trust = Trust(recipe, self.method, self.trainers, self._per_round)
        self.ledger = Ledger()

    def _evaluated(self) -> list[int]:
        everyone = list(range(self.task.clients))
        wanted = self.recipe.evaluation.clients
        if wanted is None or wanted >= len(everyone):
            return everyone
        chosen = numpy_generator(self.recipe.seed, "evaluated").choice(len(everyone), wanted, replace=False)
        return sorted(int(c) for c in chosen)

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
        out = self.recipe.out or RunFolder.fresh(Path("runs"), self.label)
        resume = resume and holds_run(out)
        if resume and (summary := ended(self.recipe)):
            return summary
        self.history = []
        budget = self.recipe.storage.memory_mb * 2**20
        with (
            make_engine(self.setup, self.recipe.engine) as engine,
            closing(RunFolder(out, resume=resume)) as self.folder,
            logging_to(self.folder.path / "log.txt"),
            closing(ClientStore(budget // 2, inside=self.folder.path)) as self.memory,
            closing(ClientStore(budget // 2, inside=self.folder.path)) as self.remembered,
            Interrupts() as interrupts,
        ):
            self.server = Server(
                engine.home,
                federation=len(self.trainers),
                clients=self.remembered,
                combination=self.trust.combination,
            )
            self.ledger = Ledger()
            self.ledger.describe(engine.home, self.recipe)
            self.checkpoints = Checkpoints(self.folder.path / "checkpoints")
            self._begun = perf_counter()
            if resume:
                self._restore(engine.home.device)
            else:
                self._save()
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
                self.folder.write_json("ledger.json", self.ledger.to_json())
                if self.on_round is not None:
                    self.on_round(record)
                every = self.recipe.storage.checkpoint_every
                if every and round % every == 0 and round < self.recipe.training.rounds:
                    self._save()
            return self._finish()

    def _save(self) -> None:
        """A checkpoint of all that the next round depends on."""
        notes = {
            "task": self._fingerprint, "seconds": self._seconds, "history": self.history,
            "ledger": self.ledger.to_json(),
        }  # fmt: skip
        self.checkpoints.save(len(self.history), self.server.saved(), self._stores, notes)

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
        raise Interrupted(f"{done}; go on with: fedloom resume {self.folder.path}", signal)

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

    @property
    def label(self) -> str:
        """Names the run folder."""
        return f"{self.method.name}-{Path(self.recipe.data.name).stem}-s{self.recipe.seed}"

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
            record |= self.evaluate(engine, round, final=final)
        record["seconds"] = perf_counter() - start
        return record

    def _ask(self, engine: Engine, round: int) -> tuple[Attendance, list[int], "_Tally", Iterator[Message]]:
        """Has clients work, and others if too few answer: `min_clients` answers are there before any is combined."""
        training = self.recipe.training
        asked: set[int] = set()
        expected = signature(engine.home.outgoing())
        skip = training.on_error == "skip"
        for attempt in range(ATTEMPTS):
            chosen = self._sample(round, attempt, asked)
            asked |= set(chosen)
            self.server.begin(round)
            tally = _Tally()
            attendance = Attendance(expected, round=round, attempt=attempt, skip=skip, told=self._told)
            jobs = self._update_jobs(round, chosen, tally, attempt)
            results = attendance.present(self._noted(self.trust.run(engine, jobs), round))
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
            return self._longest_first(self.trainers[i] for i in draw)
        order = numpy_generator(self.recipe.seed, round, "sample", attempt).permutation(self.trainers)
        others_first = sorted((int(c) for c in order), key=set(asked).__contains__)
        return self._longest_first(others_first[: self._per_round])

    def _longest_first(self, clients: Iterable[int]) -> list[int]:
        return sorted(clients, key=lambda c: (-len(self.task.samples(c)), c))

    def _update_jobs(self, round: int, clients: list[int], tally: "_Tally", attempt: int) -> Iterator[Job]:
        """Made as an engine asks for them, so that few clients' memories are in RAM at once."""
        message_for = self._messages(clients)
        for client in clients:
            message = message_for(client)
            tally.add_sent(0 if self.method.pooled else message.nbytes)
            if not self.method.pooled:
                self.ledger.add("down", round, client, message)
            fault, delay = self.recipe.faults.draw(self.recipe.seed, round, client, attempt)
            memory = self.memory.get(client)
            yield Job("update", round, message, client=client, memory=memory, fault=fault, delay=delay)

    def _messages(self, clients: Iterable[int]) -> Callable[[int], Message]:
        """What each client gets, made before the first of them answers: answers change what the server knows."""
        answer = self._answer()
        each = {client: answer(client) for client in clients}
        return each.pop

    def _answer(self) -> Callable[[int], Message]:
        """What the server has for a client: one object for all, unless the method makes an answer for each."""
        if self.method.overrides("message_for"):
            return lambda client: Message(self.method.message_for(self.server, client), client=client)
        shared = Message(self.method.message_for(self.server, EVERYONE))
        return lambda client: shared

    def _noted(self, results: Iterator[Result], round: int) -> Iterator[Result]:
        """What leaves a client is in the ledger, whatever becomes of it."""
        for result in results:
            if result.message is not None and not self.method.pooled:
                self.ledger.add("up", round, result.client, result.message)
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

    def evaluate(self, engine: Engine, round: int, *, final: bool = False) -> Record:
        """Global and personal accuracy. `final` also covers clients that never took part, and keeps the models."""
        record: Record = {"global_accuracy": None}
        newcomers = set(self.task.federation.newcomers)
        shared: list[Scores] = []
        if self.method.has_global and self.method.overrides("generalise"):
            record |= self._generalise(engine, round)
        elif self.method.has_global:
            shared = self._score_shared(engine, round)
            record["global_accuracy"] = pooled([s for s in shared if s.client not in newcomers])
            record |= spread([s for s in shared if s.client in newcomers], prefix="newcomer_global")
        self.scores = shared if self.method.personal_is_global else self._score_personal(engine, round, final)
        record["evaluated"] = len(self.scores)
        record |= spread([s for s in self.scores if s.client not in newcomers])
        record |= spread([s for s in self.scores if s.client in newcomers], prefix="newcomer")
        return record

    def _score_shared(self, engine: Engine, round: int) -> list[Scores]:
        """One model for all: every distinct test set once (a common one is the same for all), in jobs of some size."""
        tests = self.task.federation.test
        first = {id(tests[c]): c for c in reversed(self.evaluated)}
        message = Message(self.server.state)
        jobs: list[Job] = []
        group: list[int] = []
        for client in sorted(first.values()):
            group.append(client)
            if sum(len(tests[c]) for c in group) >= GLOBAL_CHUNK:
                jobs.append(Job("global", round, message, clients=tuple(group)))
                group = []
        if group:
            jobs.append(Job("global", round, message, clients=tuple(group)))
        scored = {s.client: s for result in self._done(engine.run(jobs), round) for s in result.scores}
        return [replace(scored[first[id(tests[c])]], client=c) for c in self.evaluated]

    def _generalise(self, engine: Engine, round: int) -> Record:
        """The global representation, judged in every style: the mean over styles, and each of them."""
        message = Message(self.server.state)
        names = self.task.dataset.group_names or (self.task.dataset.name,)
        members: dict[int, list[int]] = {}
        for client, group in enumerate(group_of_clients(self.task)):
            members.setdefault(group, []).append(client)
        jobs = [Job("generalise", round, message, client=g, clients=tuple(members[g])) for g in sorted(members)]
        styles = {names[result.client]: result.scores[0].accuracy for result in self._done(engine.run(jobs), round)}
        return {"global_accuracy": float(np.mean(list(styles.values()))), "styles": styles}

    def _score_personal(self, engine: Engine, round: int, final: bool) -> list[Scores]:
        """Each client's own model. Who keeps something but has not taken part yet waits for the final evaluation."""
        waits = bool(self.method.personal_parts) and not final
        clients = self._longest_first(c for c in self.evaluated if not waits or c in self.memory)
        message_for = self._answer()
        keep = final and self.recipe.storage.personal_models
        jobs = (
            Job("evaluate", round, message_for(c), client=c, memory=self.memory.get(c), keep_model=keep)
            for c in clients
        )
        scores: list[Scores] = []
        for result in self._done(engine.run(jobs), round, skip=self.recipe.training.on_error == "skip"):
            scores += result.scores
            if result.personal:
                self.folder.write_model(f"client-{result.client:05d}", result.personal)
        return sorted(scores, key=lambda s: s.client)

    @staticmethod
    def _done(results: Iterable[Result], round: int, skip: bool = False) -> Iterator[Result]:
        """Results of evaluations: nobody can stand in for a client, so that a failure ends the run or is left out."""
        first, done = None, False
        for result in results:
            if result.error is None:
                done = True
                yield result
                continue
            first = first or (result.client, result.error)
            if not skip or result.error.mistake:
                break
            LOGGER.warning(f"round {round}: client {result.client} is not evaluated: {result.error.why}")
        if first is not None and not (skip and done):
            raise first[1].error(first[0], round)

    def _finish(self) -> Record:
        """Writes the last files of the run folder."""
        tested = [record for record in self.history if "evaluated" in record]
        rule = self.recipe.evaluation.summary
        summary: Record = {
            "method": self.method.name,
            "rounds": len(self.history),
            "seed": self.recipe.seed,
            "clients": self.task.clients,
            "summary": rule,
        }
        for name in ACCURACIES:
            known = [record[name] for record in tested if record.get(name) is not None]
            summary[name] = summarise(known, rule) if known else None
        summary["best"] = {
            name: max((r[name] for r in tested if r.get(name) is not None), default=None)
            for name in ("global_accuracy", "personal_accuracy")
        }
        for name in ("up_bytes", "down_bytes"):
            summary[name] = round(np.mean([record[name] for record in self.history]))
        failed: Counter[str] = Counter()
        for record in self.history:
            failed.update(record.get("failed") or {})
        summary |= {name: self.history[-1][name] for name in ("epsilon",) if name in self.history[-1]}
        summary |= {
            "failed": dict(sorted(failed.items())),
            "seconds": self._seconds,
            "notes": [*self.task.federation.notes, *_left_out(failed)],
            "run_dir": str(self.folder.path),
        }
        self.folder.write_model("server", self.server.state)
        self.folder.write_lines("clients.jsonl", (self._client_row(s) for s in self.scores))
        self.folder.write_json(SUMMARY, summary)
        self.checkpoints.remove()
        return summary

    def _client_row(self, scores: Scores) -> Record:
        newcomer = scores.client in self.task.federation.newcomers
        row: Record = {
            "client": scores.client,
            "newcomer": newcomer,
            "train": len(self.task.samples(scores.client)),
        }
        return row | {
            "accuracy": scores.accuracy,
            "right": scores.right,
            "total": scores.total,
            "loss": scores.loss,
        }


def _left_out(failed: Mapping[str, int]) -> list[str]:
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(failed.items()))
    return [f"clients that were left out of a round: {counts} (log.txt says who, when and why)"] if failed else []


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
