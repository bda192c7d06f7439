"""The round loop, independent of devices and methods: sample → engine → combine → evaluate → record → checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast

from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.failures import DivergedError, RoundError
from fedloom.core.metrics import refuse_undefined
from fedloom.core.reading import without_nan
from fedloom.core.scores import Scores
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.core.state import State
from fedloom.core.task import Task, refuse_model_without_room
from fedloom.engines import Engine, EngineSettings, make_engine
from fedloom.experiment.build import make_task, task_facts
from fedloom.experiment.callbacks import Callbacks, listed
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.evaluation import Evaluator, refuse_unknown_part
from fedloom.experiment.logging import HINTS, logging_to
from fedloom.experiment.networks import refuse_different_networks, remarks
from fedloom.experiment.records import Measures, RoundRecord, Summary
from fedloom.experiment.resume import finished_summary, with_choice
from fedloom.experiment.rounds import Rounds
from fedloom.experiment.run_checkpoints import RunCheckpoints
from fedloom.experiment.run_folder import CLIENTS, ENGINE, SUMMARY, TASK, RunFolder, holds_run, initial_file
from fedloom.experiment.sampling import Sampling
from fedloom.experiment.selection import BestState, EarlyStopping, best_round, refuse_without_validation
from fedloom.experiment.summary import summary_of
from fedloom.experiment.trackers import TRACKERS, refuse_missing
from fedloom.experiment.trust import Trust
from fedloom.trust.faults import FaultInjector
from fedloom.trust.ledger import Ledger
from fedloom.trust.ledger_file import FILE as LEDGER


class Experiment:
    """One run of a recipe.

    Args:
        recipe: The recipe.
        task: Data, network and objective made in Python; default: built from the recipe. The objective is always the
            recipe's.
        on_round: Called with the record of every round.
        callbacks: Objects such as instances of `Callback`, called at the start, after rounds and at the end.
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
        callbacks: Sequence[object] = (),
        engine: Callable[[Setup, EngineSettings], Engine] = make_engine,
    ):
        self.recipe = recipe
        self._make_engine = engine
        self.task = replace(task, objective=recipe.make_objective()) if task else make_task(recipe)
        self.method = recipe.make_method()
        self.on_round = on_round
        intercept = FaultInjector(recipe.faults, recipe.seed) if recipe.faults.any else None
        metrics = tuple(name for name in recipe.evaluation.wanted if name != "loss")  # every evaluation has the loss
        refuse_undefined(metrics, classes=self.task.classes, multilabel=self.task.objective.multilabel)
        self.history: list[RoundRecord] = []
        self._notes: list[str] = []
        refuse_missing(recipe.log)
        self.callbacks = Callbacks([*(TRACKERS[name]() for name in recipe.log), *listed(callbacks)])
        refuse_unknown_part(recipe.evaluation.distance, self.method)
        refuse_without_validation(recipe.training.patience, recipe.evaluation.summary, self.task)
        patience, measure = recipe.training.patience, recipe.evaluation.measure
        self.stopping = None if patience is None else EarlyStopping(patience, measure)
        self.sampling = Sampling(recipe, self.task, pooled=self.method.pooled)
        self.trust = Trust(recipe, self.method, self.sampling, deployed=self.task.elsewhere)
        self.setup = Setup(
            self.trust.poisoned(self.task), self.method, recipe.training, recipe.seed, recipe.wire, intercept, metrics,
            trigger=self.trust.trigger(self.task), cache_features=not self.task.elsewhere,
        )  # fmt: skip
        for variant in self.setup.variants:
            refuse_model_without_room(variant.task)
        refuse_different_networks(self.setup, self.method, recipe.evaluation.distance)
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
            self.folder.noting_failure(),
            logging_to(self.folder.path / "log.txt"),
            closing(ClientStore(budget, inside=self.folder.path)) as self.memory,
            closing(ClientStore(budget, inside=self.folder.path)) as self.remembered,
            closing(BestState({} if self.stopping is None else self._stores, budget, self.folder.path)) as self.best,
            self.callbacks,
            Interrupts() as interrupts,
        ):
            self._prepare(engine, resume)
            for round in range(len(self.history) + 1, self.recipe.training.rounds + 1):
                if self._stops_early or self.callbacks.stopped is not None:
                    break
                if interrupts.asked is not None:
                    self._stop(interrupts.asked)
                with self._saving_after(RoundError):  # such a round has not changed any state
                    record = self._rounds.run(round)
                self.history.append(without_nan(record))
                self.folder.record(record)
                ends = round == self.recipe.training.rounds or self._stops_early
                if self.stopping is not None:
                    if ends and self._extends:
                        self._save_extensible(self.stopping)  # before the best state replaces the last one
                    self._keep_if_best(self.stopping, self.history)
                with self._saving_after(Exception):
                    self.callbacks.on_round(record, self.evaluator.rows)
                    if self.on_round is not None:
                        self.on_round(record)
                if not ends and self.checkpoints.due(round):
                    self._save()
            restored = self._final_evaluation()
            unshared = [workspace.unshared() for workspace in engine.server_workspace.variants]
            summary = self._finish(unshared, restored)
            self.callbacks.on_end(summary)
            return summary

    def _prepare(self, engine: Engine, resume: bool) -> None:
        """Create or restore the state of the run, and write the files that describe it."""
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
            engine.server_workspace, models=models, privacy=privacy, secure=self.recipe.secure,
            simulated=not self.task.elsewhere,
        )  # fmt: skip
        self.checkpoints = RunCheckpoints(self.recipe, self.task, self.folder, self.server, self._stores, self.best)
        if resume:
            self.history, self.ledger = self.checkpoints.restore(self.setup, engine.server_workspace.device)
        else:
            self._save()
            self.folder.write_json(TASK, task_facts(self.setup.task, self.checkpoints.fingerprint))
            # `out` is not part of the experiment. The recipe is written last: with it, the folder holds a run
            self.folder.describe(self.recipe.with_(out=None).to_yaml(), self.method.name)
        self.folder.begin()
        self.callbacks.on_start(self.recipe, self.folder.path)
        if choice := engine.choice():
            self.folder.write_json(ENGINE, {"name": engine.name, **choice})
        self._notes = remarks(engine.server_workspace)
        for hint in (*self._notes, *engine.hints()):
            HINTS.info(hint)
        self._rounds = Rounds(
            self.recipe, self.task, self.setup, self.method, self.sampling, self.trust, engine, self.server,
            self.memory, self.evaluator, self.ledger,
        )  # fmt: skip

    @contextmanager
    def _saving_after(self, *errors: type[Exception]) -> Iterator[None]:
        """Write a checkpoint if one of these errors ends the run, except after the last round: none resumes there."""
        try:
            yield
        except errors as error:
            resumable = len(self.history) < self.recipe.training.rounds
            try:
                if resumable:
                    self._save()
            except UserError as unwritable:  # the error that ended the run is raised, not this one
                resumable = False
                error.add_note(f"no checkpoint: {unwritable}")
            kept = "the rounds so far are saved" if resumable else "rounds after the last checkpoint are repeated"
            resume = f"{kept}; resume with: {self._how_to_resume}"
            other = "--name" if self.task.elsewhere else "--out"
            again = f"a resumed run would diverge again: start a new run with other settings and another {other}"
            error.add_note(again if isinstance(error, DivergedError) else resume)
            raise

    @property
    def _stops_early(self) -> bool:
        return self.stopping is not None and self.stopping.due(self.history)

    @property
    def _stopped(self) -> str | None:
        """The reason why a callback ended the run before its last round."""
        return self.callbacks.stopped if len(self.history) < self.recipe.training.rounds else None

    @property
    def _extends(self) -> bool:
        """Whether more rounds can follow later.

        They cannot in a deployment, whose clients agreed to a number of rounds, nor after an early stop.
        """
        if not self.recipe.storage.final_checkpoint or self.task.elsewhere or self._stopped is not None:
            return False
        if self.stopping is None:
            return True
        ended = len(self.history) == self.recipe.training.rounds
        return ended and not self.stopping.due([*self.history[:-1], self._rounds.extensible])

    def _save_extensible(self, stopping: EarlyStopping | None = None) -> None:
        """Write a checkpoint of the last round as it would be if more rounds followed."""
        history = [*self.history[:-1], self._rounds.extensible]
        if stopping is not None:
            self._keep_if_best(stopping, history)
        self._save(history)

    def _keep_if_best(self, stopping: EarlyStopping, history: list[RoundRecord]) -> None:
        """Copy the current state if the last round of the history is its best."""
        if stopping.improved(history):
            self.best.keep(self.server.saved())

    def _final_evaluation(self) -> Measures | None:
        """Evaluate all clients at the end of a run that stopped early, and store their models.

        Returns:
            With `training.patience`, the evaluation of the restored state of the best round.
        """
        if self.stopping is not None:
            return self._restore_best()
        if self._stopped is not None:
            last = self._rounds.evaluate(len(self.history), final=True)
            record = self.history[-1] | cast(RoundRecord, without_nan(last))
            with self._saving_after(Exception):  # without this evaluation: a resumed run is not stopped
                self.callbacks.on_evaluation(record, self.evaluator.rows)
            self.history[-1] = record
            self.folder.cut_back(self.history)
        return None

    def _restore_best(self) -> Measures:
        """Restore the state of the best round, evaluate all clients with it and store the models."""
        assert self.stopping is not None
        best = best_round(self.history, self.stopping.name)
        number = len(self.history) if best is None else best["round"]
        if saved := self.best.restore():
            self.server.begin(number)
            self.server.restore(saved)
        return self._rounds.evaluate(number, final=True)

    def _save(self, history: list[RoundRecord] | None = None) -> None:
        """Write a checkpoint. `history` replaces the records of the rounds in it."""
        self.checkpoints.save(history or self.history, self.ledger)

    def _stop(self, signal: int) -> NoReturn:
        """Write a checkpoint and raise `Interrupted`, between two rounds."""
        self._save()
        done = f"stopped after round {len(self.history)} of {self.recipe.training.rounds}"
        raise Interrupted(done, self._how_to_resume, signal)

    @property
    def _how_to_resume(self) -> str:
        return trusted_code.resume_command(self.folder.path, self.recipe.model_dump())

    @property
    def _stores(self) -> dict[str, ClientStore]:
        return {"memory": self.memory, "remembered": self.remembered}

    def _finish(self, unshared: list[State], restored: Measures | None = None) -> Summary:
        """Write the final files of the run folder and return the summary.

        Args:
            unshared: Initial values of unshared parts, for each network.
            restored: The evaluation of the restored state of the best round, with `training.patience`.
        """
        notes = [*self.task.federation.notes, *self._notes, *self.trust.notes]
        evaluation = self.recipe.evaluation
        if self._stopped is not None:
            notes.append(f"stopped after round {len(self.history)} of {self.recipe.training.rounds}: {self._stopped}")
        if self.stopping is not None:
            notes.append(self.stopping.note(self.history, self.recipe.training.rounds))
        restored = without_nan(restored)
        figures = summary_of(self.history, evaluation.summary, notes, name=evaluation.measure, restored=restored)
        if self.stopping is not None:
            figures["restored"] = figures["best"].get("round", len(self.history))
        if self._stopped is not None:
            figures["stopped"] = self._stopped
        figures["seconds"] = self.checkpoints.seconds
        run: Summary = {
            "method": self.method.name,
            "rounds": len(self.history),
            "seed": self.recipe.seed,
            "clients": self.task.clients,
            "run_dir": str(self.folder.path),
        }
        summary = run | cast(Summary, figures)
        self.folder.write_model("server", self.server.state)
        for number, values in enumerate(unshared):
            self.folder.write_model(initial_file(number), values)
        self.folder.write_lines(CLIENTS, self.evaluator.rows())
        self.folder.write_json(LEDGER, self.ledger.to_json())
        self.folder.write_json(SUMMARY, summary)
        extends = self._extends
        if extends and self.stopping is None:
            self._save_extensible()
        self.checkpoints.finish(keep_last=extends)
        return summary
