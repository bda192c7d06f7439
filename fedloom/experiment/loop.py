"""The round loop, independent of devices and methods: sample → engine → combine → evaluate → record → checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import NoReturn, cast

import torch

from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.failures import RoundError
from fedloom.core.job import Runner
from fedloom.core.message import Message, signature
from fedloom.core.reading import without_nan
from fedloom.core.scores import Scores
from fedloom.core.server import Server
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.core.state import FlatState, State, nbytes, under
from fedloom.core.task import EVERYONE, Task, refuse_model_without_room
from fedloom.core.workspace import Setup, Workspace
from fedloom.engines import Engine, EngineSettings, make_engine
from fedloom.experiment.build import make_task, task_facts
from fedloom.experiment.checkpoint import FOLDER as CHECKPOINTS
from fedloom.experiment.checkpoint import Checkpoints, CheckpointSchedule
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.evaluation import Answer, Evaluator, refuse_unknown_part
from fedloom.experiment.logging import HINTS, Writers, logging_to, refuse_missing
from fedloom.experiment.middleware import EncodeMessages, RecordMessages, ValidateResults
from fedloom.experiment.records import Measures, RoundRecord, Summary
from fedloom.experiment.resume import (
    checked_notes,
    fingerprint,
    finished_summary,
    refuse_other_data,
    reopen,
    warn_of_other_versions,
    with_choice,
)
from fedloom.experiment.round import Round
from fedloom.experiment.run_folder import CLIENTS, ENGINE, SUMMARY, TASK, RunFolder, holds_run
from fedloom.experiment.sampling import Sampling
from fedloom.experiment.selection import BestState, EarlyStopping, best_round, refuse_without_validation
from fedloom.experiment.summary import summary_of
from fedloom.experiment.trust import Trust
from fedloom.trust.faults import FaultInjector
from fedloom.trust.ledger import Ledger
from fedloom.trust.ledger_file import FILE as LEDGER

ATTEMPTS = 5
"""Maximum number of attempts at a round, each with other clients; then the run stops because too few answered."""


class Experiment:
    """One run of a recipe.

    Args:
        recipe: The recipe.
        task: Data, network and objective made in Python; default: built from the recipe. The objective is always the
            recipe's.
        on_round: Called with the record of every round.
        engine: Creates the engine; default: the recipe's.

    Attributes:
        history: Records of the rounds so far.
        server: The server with the shared state, once `run` has started.
        scores: The clients' scores of the last evaluation.
        ledger: Contents of all messages so far.

    Raises:
        UserError: The recipe cannot be run: for example, too few clients for a robust rule, or a missing package.

    Example:
        >>> experiment = fedloom.Experiment(fedloom.Recipe().with_("training.rounds=5"))   # doctest: +SKIP
        >>> summary = experiment.run()   # doctest: +SKIP
        >>> experiment.history[-1]["personal_accuracy"], experiment.server.state.keys()   # doctest: +SKIP
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        task: Task | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
        engine: Callable[[Setup, EngineSettings], Engine] = make_engine,
    ):
        self.recipe = recipe
        self._make_engine = engine
        self.task = replace(task, objective=recipe.make_objective()) if task else make_task(recipe)
        self.method = recipe.make_method()
        self.on_round = on_round
        intercept = FaultInjector(recipe.faults, recipe.seed) if recipe.faults.any else None
        metrics = tuple(name for name in recipe.evaluation.wanted if name != "loss")  # every evaluation has the loss
        self.setup = Setup(self.task, self.method, recipe.training, recipe.seed, recipe.wire, intercept, metrics)
        self.history: list[RoundRecord] = []
        self._extensible: RoundRecord
        """The record of the last round as it would be if more rounds followed."""
        self._shown: set[str] = set()
        self._notes: list[str] = []
        refuse_missing(recipe.log)
        refuse_unknown_part(recipe.evaluation.distance, self.method)
        refuse_without_validation(recipe.training.patience, recipe.evaluation.summary, self.task)
        patience, measure = recipe.training.patience, recipe.evaluation.measure
        self.stopping = None if patience is None else EarlyStopping(patience, measure)
        self.sampling = Sampling(recipe, self.task, pooled=self.method.pooled)
        refuse_model_without_room(self.task)
        self.trust = Trust(recipe, self.method, self.sampling, deployed=self.task.elsewhere)
        self.ledger = Ledger()

    @property
    def scores(self) -> list[Scores]:
        """Clients' scores of the last evaluation."""
        return self.evaluator.scores

    def run(self, *, resume: bool = False, extend: bool = False) -> Summary:
        """Run all rounds and write the run folder.

        Args:
            resume: Continue from the last checkpoint of the run in `recipe.out`, if there is one. A finished run is not
                repeated.
            extend: With `resume`, accept a run that was started with another number of rounds, and continue a finished
                run if the recipe has more rounds.

        Returns:
            The summary, which is also stored in the run folder.

        Raises:
            UserError: The run folder cannot be used, or holds a run that cannot be resumed with this recipe.
            RoundError: Too few clients answered in a round, in all attempts; a checkpoint was written.
            Interrupted: Ctrl-C or SIGTERM stopped the run after a checkpoint; a KeyboardInterrupt.
        """
        out = self.recipe.out or RunFolder.fresh(Path("runs"), self.recipe.label)
        resume = resume and holds_run(out)
        if resume and (summary := finished_summary(self.recipe, extend=extend)):
            return summary
        self.history = []
        budget = self.recipe.storage.memory_mb * 2**20 // (2 if self.stopping is None else 4)  # per store
        settings = with_choice(self.recipe.engine, out) if resume else self.recipe.engine
        with (
            self._make_engine(self.setup, settings) as engine,
            closing(RunFolder(out, resume=resume)) as self.folder,
            logging_to(self.folder.path / "log.txt"),
            closing(ClientStore(budget, inside=self.folder.path)) as self.memory,
            closing(ClientStore(budget, inside=self.folder.path)) as self.remembered,
            closing(
                BestState({} if self.stopping is None else self._live_stores, budget, self.folder.path)
            ) as self.best,
            closing(Writers(self.recipe, self.folder.path)) as writers,
            Interrupts() as interrupts,
        ):
            self.server = Server(
                engine.server_workspace,
                federation=len(self.sampling.trainers),
                clients=self.remembered,
                combination=self.trust.combination,
            )
            self.evaluator = Evaluator(
                self.recipe, self.setup, self.method, engine.server_workspace, self.memory, self.folder
            )
            self.ledger = Ledger()
            models, privacy = self.recipe.storage.personal_models, self.recipe.privacy
            self.ledger.describe(
                engine.server_workspace, models=models, privacy=privacy, simulated=not self.task.elsewhere
            )
            self.checkpoints = Checkpoints(self.folder.path / CHECKPOINTS)
            self._checkpoint_due = CheckpointSchedule(
                self.recipe.storage.checkpoint_every, self.recipe.storage.checkpoint_seconds
            )
            self._start = perf_counter()
            if resume:
                self._restore(engine.server_workspace.device)
            else:
                self._save()
                self.folder.write_json(TASK, task_facts(self.task, self._fingerprint))
                # `out` is not part of the experiment. The recipe is written last: with it, the folder holds a run
                self.folder.describe(self.recipe.with_(out=None).to_yaml())
            if choice := engine.choice():
                self.folder.write_json(ENGINE, {"name": engine.name, **choice})
            self._notes = [
                *self.task.network.notes(self.task.shape, self.task.classes),
                *_frozen(engine.server_workspace),
            ]
            for hint in (*self._notes, *engine.hints()):
                HINTS.info(hint)
            for round in range(len(self.history) + 1, self.recipe.training.rounds + 1):
                if self._stops_early:
                    break
                if interrupts.asked is not None:
                    self._stop(interrupts.asked)
                try:
                    record = self.round(engine, round)
                except RoundError as error:  # the round has not changed any state
                    self._save()
                    error.add_note(f"the rounds before it are saved; resume with: {self._how_to_resume}")
                    raise
                self.history.append(without_nan(record))
                self.folder.record(record)
                writers(record)
                if self.on_round is not None:
                    self.on_round(record)
                if self.stopping is not None and self.stopping.improved(self.history):
                    self.best.keep(self.server.saved())
                ends = round == self.recipe.training.rounds or self._stops_early
                if not ends and self._checkpoint_due(round):
                    self._save()
            restored = None if self.stopping is None else self._restore_best(engine)
            return self._finish(engine.server_workspace.unshared(), restored)

    @property
    def _stops_early(self) -> bool:
        return self.stopping is not None and self.stopping.due(self.history)

    def _restore_best(self, engine: Engine) -> Measures:
        """Restore the state of the best round, evaluate all clients with it and store the models."""
        assert self.stopping is not None
        best = best_round(self.history, self.stopping.name)
        number = len(self.history) if best is None else best["round"]
        if saved := self.best.restore():
            self.server.begin(number)
            self.server.restore(saved)
        return self._evaluate(engine, number, final=True)

    def _save(self, history: list[RoundRecord] | None = None) -> None:
        """Write a checkpoint and the ledger. `history` replaces the records of the rounds in the checkpoint."""
        notes = {
            "task": self._fingerprint, "seconds": self._seconds, "history": history or self.history,
            "ledger": self.ledger.to_json(),
        }  # fmt: skip
        with self._checkpoint_due.writing():
            server = self.server.saved() | self.best.saved()
            self.checkpoints.save(len(self.history), server, self._stores, notes)
        self.folder.write_json(LEDGER, self.ledger.to_json())

    def _restore(self, device: torch.device) -> None:
        """Restore the state of the last checkpoint; metrics of later rounds are dropped."""
        rounds, parts = self.recipe.training.rounds, signature(self.server.parts.named_tensors())
        checkpoint, server = self.checkpoints.load(self._stores, device, parts, before=rounds)
        warn_of_other_versions(self.folder.path)
        notes = checked_notes(checkpoint, self.folder.path)
        refuse_other_data(self.task, self._fingerprint, notes["task"])
        self.server.restore(server)
        self.best.load(server)
        self.ledger = Ledger.from_json(notes["ledger"])
        self.history = notes["history"]
        self._start -= notes["seconds"]
        reopen(self.folder.path, rounds)
        self.folder.cut_back(self.history)

    def _stop(self, signal: int) -> NoReturn:
        """Write a checkpoint and raise `Interrupted`, between two rounds."""
        self._save()
        done = f"stopped after round {len(self.history)} of {self.recipe.training.rounds}"
        raise Interrupted(done, self._how_to_resume, signal)

    @property
    def _how_to_resume(self) -> str:
        return trusted_code.resume_command(self.folder.path, self.recipe.model_dump())

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.task)

    @property
    def _live_stores(self) -> dict[str, ClientStore]:
        return {"memory": self.memory, "remembered": self.remembered}

    @property
    def _stores(self) -> dict[str, ClientStore]:
        """All stores of a checkpoint."""
        return self._live_stores | self.best.stores

    @property
    def _seconds(self) -> float:
        """Duration of the run so far, including the time before a resume."""
        return perf_counter() - self._start

    def round(self, engine: Engine, number: int) -> RoundRecord:
        """Run one communication round, with an evaluation if one is due.

        Args:
            engine: Runs the clients.
            number: Number of the round, from 1.

        Returns:
            The record of the round, a line of metrics.jsonl.
        """
        start = perf_counter()
        training = self.recipe.training
        traffic = RecordMessages(self.trust.around(engine), self.ledger)
        round = self._begin(self._layered(engine, traffic), number)
        self.method.combine(self.server, self.trust.sealed(round.answers))
        round.commit()
        record: RoundRecord = {
            "round": number,
            "lr": training.lr(number),
            "clients": round.answered,
            "loss": round.loss,
            "up_bytes": 0 if self.method.pooled else round.bytes_up // max(1, round.answered),
            "down_bytes": traffic.bytes_down // max(1, traffic.sent),
            "failed": dict(sorted(round.failed.items())),
        }
        self.trust.note(record, round.clients)
        if round.attempt:
            record["attempts"] = round.attempt + 1
        record["train_seconds"] = perf_counter() - start
        last, due = number == training.rounds, number % self.recipe.evaluation.every == 0
        trained = record.copy()
        if last or due:
            # with early stopping, the final evaluation is that of the restored state
            record |= cast(RoundRecord, self._evaluate(engine, number, final=last and self.stopping is None))
        record["seconds"] = perf_counter() - start
        if last:
            trained |= cast(RoundRecord, self.evaluator.interim() if due else {})
            trained["seconds"] = record["seconds"]
            self._extensible = without_nan(trained)
        return record

    def _evaluate(self, engine: Engine, number: int, *, final: bool) -> Measures:
        # in a simulation, an evaluation sends no messages
        traced = RecordMessages(engine, self.ledger, "evaluation") if self.task.elsewhere else engine
        return self.evaluator.evaluate(
            self._encoding(engine, traced), number, self.server.state, self._answer(), final=final
        )

    def _layered(self, engine: Engine, traffic: Runner) -> Runner:
        """Wrap the engine for a round; from the outside in: validation, encoding, the ledger, the engine."""
        inner = self._encoding(engine, engine if self.method.pooled else traffic)  # pooled: no messages to record
        return ValidateResults(inner, signature(engine.server_workspace.sent))

    def _encoding(self, engine: Engine, inner: Runner) -> Runner:
        codec = self.setup.codec
        encodes = codec.up is not None or codec.down is not None
        return EncodeMessages(inner, codec, engine.server_workspace) if encodes else inner

    def _begin(self, engine: Runner, number: int) -> Round:
        """Start a round and wait for `min_clients` answers; if fewer arrive, retry with other clients."""
        training = self.recipe.training
        needed = 0 if self.sampling.poisson else training.min_clients  # a Poisson sample may be empty
        asked: set[int] = set()
        for attempt in range(ATTEMPTS):
            chosen = self.sampling.draw(number, attempt, asked)
            asked |= set(chosen)
            self.server.begin(number)
            answer = self._answer()
            # created before the first client answers: answers change the server's state
            messages = {client: answer(client) for client in chosen}
            skip = training.on_error == "skip"
            name_of = self.task.federation.name
            round = Round(number, chosen, messages, engine, self.memory, attempt, skip, self._shown, name_of)
            if round.has(needed):
                return round
            round.refuse_too_few(needed, last=attempt == ATTEMPTS - 1)
        raise AssertionError("the last attempt raises")

    def _answer(self) -> Answer:
        """Return a function from client to server message: one shared message, unless `message_for` is overridden."""
        if self.method.overrides("message_for"):
            return lambda client: Message(self.method.message_for(self.server, client), client=client)
        shared = Message(FlatState.of(self.method.message_for(self.server, EVERYONE)))
        return lambda client: shared

    def _finish(self, unshared: State, restored: Measures | None = None) -> Summary:
        """Write the final files of the run folder and return the summary.

        Args:
            unshared: Initial values of unshared parts.
            restored: The evaluation of the restored state of the best round, with early stopping.
        """
        notes = [*self.task.federation.notes, *self._notes, *self.trust.notes]
        evaluation = self.recipe.evaluation
        if self.stopping is not None:
            notes.append(self.stopping.note(self.history, self.recipe.training.rounds))
            restored = without_nan(restored)
        figures = summary_of(self.history, evaluation.summary, notes, name=evaluation.measure, restored=restored)
        if self.stopping is not None:
            figures["restored"] = figures["best"].get("round", len(self.history))
        figures["seconds"] = self._seconds
        run: Summary = {
            "method": self.method.name,
            "rounds": len(self.history),
            "seed": self.recipe.seed,
            "clients": self.task.clients,
            "run_dir": str(self.folder.path),
        }
        summary = run | cast(Summary, figures)
        self.folder.write_model("server", self.server.state)
        self.folder.write_model("initial", unshared)
        self.folder.write_lines(CLIENTS, self.evaluator.rows())
        self.folder.write_json(LEDGER, self.ledger.to_json())
        self.folder.write_json(SUMMARY, summary)
        # Clients of a deployment have agreed to the number of rounds; early stopping has restored an earlier state.
        if self.recipe.storage.final_checkpoint and not self.task.elsewhere and self.stopping is None:
            self._save([*self.history[:-1], self._extensible])
            self.checkpoints.keep_last()
        else:
            self.checkpoints.remove()
        return summary


def _frozen(workspace: Workspace) -> Iterator[str]:
    """Yield a remark about parts that the recipe freezes."""
    fixed = {name: tensor for name, tensor in workspace.tensors.items() if under(name, workspace.fixed)}
    if fixed:
        yield (
            f"model.freeze: {', '.join(workspace.fixed)}: {len(fixed)} tensors ({nbytes(fixed):,} bytes) stay fixed; "
            "they are not trained, sent or stored for clients"
        )
        if workspace.setup.method.up and not workspace.sent:
            yield f"model.freeze: {workspace.setup.method.name} has nothing left to send, so clients learn alone"
