"""The round loop: sample → engine → combine → evaluate → record. It knows no device and no method by name."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fedloom.data import Dataset, combine, federate, limit, load
from fedloom.data.augment import parse_augment
from fedloom.engines import Engine, make_engine
from fedloom.evaluation.scores import Scores
from fedloom.evaluation.spread import pooled, spread, summarise
from fedloom.job import Job, Result
from fedloom.lane import Setup
from fedloom.ledger import Ledger
from fedloom.message import Message
from fedloom.randomness import numpy_generator
from fedloom.recipe import DataSettings, Recipe
from fedloom.server import Server
from fedloom.storage.folder import RunFolder
from fedloom.storage.memory import ClientStore
from fedloom.task import EVERYONE, Task, group_of_clients
from fedloom.trust import Trust

Record = dict[str, Any]
ACCURACIES = (
    "global_accuracy", "personal_accuracy", "personal_weighted", "personal_std", "personal_worst",
    "newcomer_accuracy", "newcomer_std", "newcomer_global_accuracy",
)  # fmt: skip
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
        self.trust = Trust(recipe, self.method, self.trainers, self.sampled)
        self.ledger = Ledger()

    def _evaluated(self) -> list[int]:
        everyone = list(range(self.task.clients))
        wanted = self.recipe.evaluation.clients
        if wanted is None or wanted >= len(everyone):
            return everyone
        chosen = numpy_generator(self.recipe.seed, "evaluated").choice(len(everyone), wanted, replace=False)
        return sorted(int(c) for c in chosen)

    def run(self) -> Record:
        """All rounds; returns the summary, which is also in the run folder with everything else."""
        start = perf_counter()
        budget = self.recipe.storage.memory_mb * 2**20
        with (
            make_engine(self.setup, self.recipe.engine) as engine,
            closing(RunFolder(self.recipe.out or RunFolder.fresh(Path("runs"), self.label))) as self.folder,
            closing(ClientStore(budget // 2, inside=self.folder.path)) as self.memory,
            closing(ClientStore(budget // 2, inside=self.folder.path)) as remembered,
        ):
            self.folder.describe(self.recipe.with_(out=None).to_yaml())  # where it lay is not part of an experiment
            self.server = Server(
                engine.home,
                federation=len(self.trainers),
                clients=remembered,
                combination=self.trust.combination,
            )
            self.ledger.describe(engine.home, self.recipe)
            for round in range(1, self.recipe.training.rounds + 1):
                record = self.round(engine, round)
                self.history.append(record)
                self.folder.record(record)
                self.folder.write_json("ledger.json", self.ledger.to_json())
                if self.on_round is not None:
                    self.on_round(record)
            return self._finish(perf_counter() - start)

    @property
    def label(self) -> str:
        """Names the run folder."""
        return f"{self.method.name}-{Path(self.recipe.data.name).stem}-s{self.recipe.seed}"

    def round(self, engine: Engine, round: int) -> Record:
        """One communication round, and its evaluation when it is due."""
        start = perf_counter()
        training = self.recipe.training
        chosen = self._sample(round)
        tally = _Tally()
        self.server.begin(round)
        messages = self._accepted(self.trust.run(engine, self._update_jobs(round, chosen, tally)), round, tally)
        self.method.combine(self.server, self.trust.sealed(messages))
        for _ in messages:  # a method that combines nothing still has its clients work
            pass
        record: Record = {
            "round": round,
            "lr": training.lr(round),
            "clients": len(chosen),
            **tally.per_client(),
            **self.trust.record(round, chosen),
        }
        record["train_seconds"] = perf_counter() - start
        final = round == training.rounds
        if final or round % self.recipe.evaluation.every == 0:
            record |= self.evaluate(engine, round, final=final)
        record["seconds"] = perf_counter() - start
        return record

    def _sample(self, round: int) -> list[int]:
        """Who takes part, the longest first: that order is also the order of summation, on every engine."""
        generator = numpy_generator(self.recipe.seed, round, "sample")
        if self.trust.poisson:  # perhaps nobody
            draw = np.flatnonzero(generator.random(len(self.trainers)) < self.recipe.training.fraction)
        else:
            draw = generator.choice(len(self.trainers), self.sampled, replace=False)
        return self._longest_first(self.trainers[i] for i in draw)

    @property
    def sampled(self) -> int:
        """How many clients a round has."""
        return max(1, int(self.recipe.training.fraction * len(self.trainers) + 0.5))

    def _longest_first(self, clients: Iterable[int]) -> list[int]:
        return sorted(clients, key=lambda c: (-len(self.task.samples(c)), c))

    def _update_jobs(self, round: int, clients: list[int], tally: "_Tally") -> Iterator[Job]:
        """Made as an engine asks for them, so that few clients' memories are in RAM at once."""
        message_for = self._messages(clients)
        for client in clients:
            message = message_for(client)
            if not self.method.pooled:
                tally.down += message.nbytes
                self.ledger.add("down", round, client, message)
            yield Job("update", round, message, client=client, memory=self.memory.get(client))

    def _messages(self, clients: Iterable[int]) -> Callable[[int], Message]:
        """What each client gets: one object for all of them, unless the method makes an answer for each."""
        if self.method.overrides("message_for"):
            each = {c: Message(self.method.message_for(self.server, c), client=c) for c in clients}
            return each.__getitem__
        shared = Message(self.method.message_for(self.server, EVERYONE))
        return lambda client: shared

    def _accepted(self, results: Iterator[Result], round: int, tally: "_Tally") -> Iterator[Message]:
        """Messages one by one; a client's memory is committed together with its message."""
        for result in results:
            assert result.message is not None
            assert result.memory is not None
            if not self.method.pooled:
                tally.up += result.message.nbytes
                self.ledger.add("up", round, result.client, result.message)
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
        scored = {s.client: s for result in engine.run(jobs) for s in result.scores}
        return [replace(scored[first[id(tests[c])]], client=c) for c in self.evaluated]

    def _generalise(self, engine: Engine, round: int) -> Record:
        """The global representation, judged in every style: the mean over styles, and each of them."""
        message = Message(self.server.state)
        names = self.task.dataset.group_names or (self.task.dataset.name,)
        members: dict[int, list[int]] = {}
        for client, group in enumerate(group_of_clients(self.task)):
            members.setdefault(group, []).append(client)
        jobs = [Job("generalise", round, message, client=g, clients=tuple(members[g])) for g in sorted(members)]
        styles = {names[result.client]: result.scores[0].accuracy for result in engine.run(jobs)}
        return {"global_accuracy": float(np.mean(list(styles.values()))), "styles": styles}

    def _score_personal(self, engine: Engine, round: int, final: bool) -> list[Scores]:
        """Each client's own model. Who keeps something but has not taken part yet waits for the final evaluation."""
        waits = bool(self.method.personal_parts) and not final
        clients = self._longest_first(c for c in self.evaluated if not waits or c in self.memory)
        message_for = self._messages(clients)
        keep = final and self.recipe.storage.personal_models
        jobs = (
            Job("evaluate", round, message_for(c), client=c, memory=self.memory.get(c), keep_model=keep)
            for c in clients
        )
        scores: list[Scores] = []
        for result in engine.run(jobs):
            scores += result.scores
            if result.personal:
                self.folder.write_model(f"client-{result.client:05d}", result.personal)
        return sorted(scores, key=lambda s: s.client)

    def _finish(self, seconds: float) -> Record:
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
        summary |= {name: self.history[-1][name] for name in ("epsilon",) if name in self.history[-1]}
        summary |= {
            "seconds": seconds,
            "notes": list(self.task.federation.notes),
            "run_dir": str(self.folder.path),
        }
        self.folder.write_model("server", self.server.state)
        self.folder.write_lines("clients.jsonl", (self._client_row(s) for s in self.scores))
        self.folder.write_json("summary.json", summary)
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


class _Tally:
    """Bytes and losses of a round's clients."""

    def __init__(self) -> None:
        self.up = self.down = self.jobs = self.samples = 0
        self.loss = 0.0

    def add_loss(self, loss: float | None, samples: int) -> None:
        self.jobs += 1
        if loss is not None:
            self.loss += loss * samples
            self.samples += samples

    def per_client(self) -> Record:
        loss, jobs = self.loss / self.samples if self.samples else None, max(1, self.jobs)
        return {"loss": loss, "up_bytes": self.up // jobs, "down_bytes": self.down // jobs}
