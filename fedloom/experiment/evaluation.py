"""Evaluation after a round: the shared model on all test samples, each client's personal model, each style.

If the split has validation samples, the models are also scored on those, under the names of the test figures after
`validation_`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.job import Job, JobKind, Result, Runner
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.rng import numpy_generator
from fedloom.core.scores import BACKDOOR, Scores
from fedloom.core.setup import Setup
from fedloom.core.state import State, under
from fedloom.core.task import Task, group_of_clients, longest_first
from fedloom.core.workspace import Workspace
from fedloom.experiment.logging import LOGGER
from fedloom.experiment.records import ClientRow, Measures
from fedloom.experiment.run_folder import RunFolder
from fedloom.experiment.summary import figures_of, pooled, spread

Answer = Callable[[int], Message]
"""Returns the server's message for a client."""
RECEIVED = "received/"
"""In a client's model file, prefix of the tensors that the server sent only to this client."""
GLOBAL_CHUNK = 2048
"""Test samples per job that scores the shared model: large enough to outweigh overhead, small enough to parallelise."""
AWAY = ("dropped", "timed_out")
"""Kinds of failure of a client that is unreachable."""


class Evaluator:
    """Evaluates a run's models.

    Attributes:
        scores: The clients' scores on test samples in the last evaluation.
        validation: Their scores on validation samples, without newcomers.
    """

    def __init__(
        self,
        recipe: Recipe,
        setup: Setup,
        method: Method,
        server: Workspace,
        memory: Mapping[int, State],
        folder: RunFolder,
    ):
        self.recipe, self.setup, self.server, self.memory, self.folder = recipe, setup, server, memory, folder
        self.task, self.method = setup.task, method
        self.clients = _evaluated(recipe, setup.task)
        self._wanted = (*recipe.evaluation.wanted, *(() if setup.trigger is None else (BACKDOOR,)))
        """Figures besides accuracy to report."""
        self.scores: list[Scores] = []
        self._of_shared: Measures = {}
        """Measures of the shared model in the last evaluation."""
        self.validation: list[Scores] = []
        federation, newcomers = setup.task.federation, set(setup.task.federation.newcomers)
        self._validated = [c for c in self.clients if len(federation.validation[c]) and c not in newcomers]
        """Clients whose validation samples are scored."""

    def evaluate(self, engine: Runner, round: int, state: State, answer: Answer, *, final: bool = False) -> Measures:
        """Measure global and personal accuracy.

        Args:
            engine: Runs the evaluation jobs.
            round: Number of the round.
            state: The server's state.
            answer: Returns the server's message for a client.
            final: Whether this is the last evaluation. It includes clients that never took part, and stores the
                models.
        """
        record = self._of_shared = Measures(global_accuracy=None)
        newcomers = set(self.task.federation.newcomers)
        wanted = self._wanted
        shared: list[Scores] = []
        validated: list[Scores] = []
        if self.method.has_global and self.method.overrides("generalise"):
            record |= self._generalise(engine, round, state, final)
        elif self.method.has_global:
            shared = self._score_shared(engine, round, state)
            ours = [s for s in shared if s.client not in newcomers]
            record["global_accuracy"] = pooled(ours)
            record["global_mean_accuracy"] = spread(ours, prefix="global_mean").get("global_mean_accuracy")
            record |= spread([s for s in shared if s.client in newcomers], prefix="newcomer_global")
            record |= figures_of(ours, "global_mean", wanted)
            if newcomers:
                record |= figures_of([s for s in shared if s.client in newcomers], "newcomer_global", wanted)
            if self._validated:
                validated = self._validate_shared(engine, round, state)
                record["validation_global_accuracy"] = pooled(validated)
                record["validation_global_mean_accuracy"] = spread(validated, prefix="validation_global_mean").get(
                    "validation_global_mean_accuracy"
                )
                record |= figures_of(validated, "validation_global_mean", wanted)
        if self.method.personal_is_global:
            self.scores, self.validation = shared, validated
        else:
            self.scores, self.validation = self._score_personal(engine, round, state, answer, final)
        return self.measures()

    def measures(self) -> Measures:
        """Return the measures of the last evaluation."""
        return self._measures(self.scores, self.validation)

    def interim(self) -> Measures:
        """Return what the last, final evaluation would have measured if more rounds followed."""
        if self.method.personal_is_global or not self.method.is_personal:
            return self.measures()
        took_part = [[s for s in scores if s.client in self.memory] for scores in (self.scores, self.validation)]
        return self._measures(*took_part)

    def _measures(self, scores: list[Scores], validation: list[Scores]) -> Measures:
        """Return the measures of the shared model and of these clients' personal models."""
        record, wanted = self._of_shared.copy(), self._wanted
        newcomers = set(self.task.federation.newcomers)
        ours, theirs = ([s for s in scores if (s.client in newcomers) is new] for new in (False, True))
        record["evaluated"] = len(scores)
        record |= spread(ours)
        record |= spread(theirs, prefix="newcomer")
        record |= spread(validation, prefix="validation_personal")
        record |= figures_of(ours, "personal", wanted)
        if newcomers:
            record |= figures_of(theirs, "newcomer", wanted)
        if self._validated:
            record |= figures_of(validation, "validation_personal", wanted)
        if self.method.overrides("generalise"):
            record["personal_styles"] = self._by_style(ours)
        if (path := self.recipe.evaluation.distance) is not None:
            record["distance"] = self._distance(path)
        return record

    def _distance(self, path: str) -> float | None:
        """Return the mean L2 distance between pairs of clients' copies of a part; None with fewer than two copies."""
        names = [name for name in self.server.tensors if under(name, (path,))]  # the same order for all clients
        held = (self.memory.get(client) or {} for client in self.clients)
        copies = [
            torch.cat([state[name].double().flatten().cpu() for name in names if name in state])
            for state in held
            if any(name in state for name in names)
        ]
        return float(torch.pdist(torch.stack(copies)).mean()) if len(copies) > 1 else None

    def _score_shared(self, engine: Runner, round: int, state: State) -> list[Scores]:
        """Score the shared model on every distinct test set once (clients may share one), grouped into jobs."""
        tests = self.task.federation.test
        first = {id(tests[c]): c for c in reversed(self.clients)}
        jobs = self._shared_jobs("global", round, state, sorted(first.values()), tests)
        scored = {s.client: s for result in self._done(engine.run(jobs), round) for s in result.scores}
        return [replace(scored[owner], client=c) for c in self.clients if (owner := first[id(tests[c])]) in scored]

    def _validate_shared(self, engine: Runner, round: int, state: State) -> list[Scores]:
        """Score the shared model on clients' validation samples, grouped into jobs."""
        jobs = self._shared_jobs("validate", round, state, self._validated, self.task.federation.validation)
        return [scores for result in self._done(engine.run(jobs), round) for scores in result.validation]

    @staticmethod
    def _shared_jobs(
        kind: JobKind, round: int, state: State, clients: list[int], held: Sequence[np.ndarray]
    ) -> list[Job]:
        """Return jobs that score the shared model on the samples that clients hold, several clients in each."""
        message = Message(state)
        jobs: list[Job] = []
        group: list[int] = []
        for client in clients:
            group.append(client)
            if sum(len(held[c]) for c in group) >= GLOBAL_CHUNK:
                jobs.append(Job(kind, round, message, clients=tuple(group)))
                group = []
        if group:
            jobs.append(Job(kind, round, message, clients=tuple(group)))
        return jobs

    def _generalise(self, engine: Runner, round: int, state: State, final: bool) -> Measures:
        """Score the global representation in every style; return the accuracy of each style and their mean.

        As in every global figure, newcomers are kept apart: a style's classifier is fitted and tested on the samples of
        the clients that train, and then scored on the style's newcomers. A style that only newcomers have has none.

        On validation samples, only the mean is returned.
        """
        message = Message(state)
        names = self.task.dataset.group_names or (self.task.dataset.name,)
        newcomers, evaluated = set(self.task.federation.newcomers), set(self.clients)
        groups = group_of_clients(self.task)
        members: dict[int, list[int]] = {g: [] for c, g in enumerate(groups) if g >= 0 and c not in newcomers}
        for client, group in enumerate(groups):
            if group in members and (client not in newcomers or client in evaluated):
                members[group].append(client)
        jobs = [
            Job("generalise", round, message, client=g, clients=tuple(members[g]), keep_model=final)
            for g in sorted(members)
        ]
        styles: dict[str, float] = {}
        validated: list[float] = []
        theirs: list[Scores] = []
        for result in self._done(engine.run(jobs), round):
            ours, *others = result.scores
            styles[names[result.client]] = ours.accuracy
            theirs += others
            validated += [scores.accuracy for scores in result.validation]
            if result.personal is not None:
                self.folder.write_model(f"style-{result.client:05d}", result.personal)
        found: Measures = {"global_accuracy": float(np.mean(list(styles.values()))), "styles": styles}
        if validated:
            found["validation_global_accuracy"] = float(np.mean(validated))
        if newcomers:
            found |= spread(theirs, prefix="newcomer_global") | figures_of(theirs, "newcomer_global", self._wanted)
        return found

    def _by_style(self, personal: list[Scores]) -> dict[str, float]:
        """Return the mean personal accuracy of the clients of each style."""
        names = self.task.dataset.group_names or (self.task.dataset.name,)
        each: dict[str, list[float]] = {}
        groups = group_of_clients(self.task)
        for scores in personal:
            if (group := groups[scores.client]) >= 0:
                each.setdefault(names[group], []).append(scores.accuracy)
        return {name: float(np.nanmean(values)) for name, values in sorted(each.items())}

    def _score_personal(
        self, engine: Runner, round: int, state: State, answer: Answer, final: bool
    ) -> tuple[list[Scores], list[Scores]]:
        """Score each client's personal model on test samples, and on validation samples.

        If the method has personal parts, clients that have not taken part yet are left out until the final evaluation.
        With early stopping they are always included, because rounds are compared.
        """
        waits = self.method.is_personal and not final and self.recipe.training.patience is None
        clients = longest_first(self.task, (c for c in self.clients if not waits or c in self.memory))
        keep = final and self.recipe.storage.personal_models
        answers: dict[int, Message] = {}

        def job(client: int) -> Job:
            answers[client] = answer(client)
            return Job(
                "evaluate", round, answers[client], client=client, memory=self.memory.get(client), keep_model=keep
            )

        scores: list[Scores] = []
        validation: list[Scores] = []
        results = engine.run(map(job, clients))
        for result in self._done(results, round, skip=self.recipe.training.on_error == "skip"):
            scores += result.scores
            validation += result.validation
            message = answers.pop(result.client)
            if result.personal is not None:
                # tensors made for this client only, or changed by compression, are stored in no other file
                alone = self._received_alone(message, state)
                self.folder.write_model(f"client-{result.client:05d}", alone | result.personal)
        validated = set(self._validated)
        return (
            sorted(scores, key=lambda s: s.client),
            sorted((s for s in validation if s.client in validated), key=lambda s: s.client),
        )

    def _received_alone(self, message: Message, state: State) -> State:
        """Return the tensors that a client received and that differ from the server's state, by name in its file."""
        codec = self.setup.codec
        if codec.down is None and not self.method.overrides("message_for"):
            return {}
        got = codec.decode_down(codec.encode_down(message), self.server.initial)
        return {f"{RECEIVED}{n}": t for n, t in got.items() if not torch.equal(t, state[n].to(t.device))}

    def _done(self, results: Iterable[Result], round: int, skip: bool = False) -> Iterator[Result]:
        """Yield the results without failures; a failure ends the run, or is logged and left out.

        No other client can replace a failed one in an evaluation. Clients that do not respond (`AWAY`) are always left
        out, other failures only with `skip`. If all clients fail, the first failure is raised.
        """
        first, done = None, False
        for result in results:
            if result.error is None:
                done = True
                yield result
                continue
            if result.error.mistake or not (skip or result.error.kind in AWAY):
                raise result.error.error(result.client, round)
            first = first or (result.client, result.error)
            name = self.task.federation.name(result.client)
            LOGGER.warning(f"round {round}: {name} is not evaluated: {result.error.why}")
        if first is not None and not done:
            raise first[1].error(first[0], round)

    def rows(self) -> Iterator[ClientRow]:
        """Yield the lines of clients.jsonl, one per client of the last evaluation."""
        newcomers = set(self.task.federation.newcomers)
        validation = {scores.client: scores for scores in self.validation}
        for scores in self.scores:
            row: ClientRow = {
                "client": scores.client,
                "name": self.task.federation.name(scores.client),
                "newcomer": scores.client in newcomers,
                "train": len(self.task.samples(scores.client)),
                "accuracy": scores.accuracy,
                "right": scores.right,
                "total": scores.total,
                "loss": scores.loss,
            }
            if scores.client in validation:
                row["validation_accuracy"] = validation[scores.client].accuracy
            if self.setup.metrics or self.setup.trigger is not None:
                row["metrics"] = scores.metrics
                if scores.client in validation:
                    row["validation_metrics"] = validation[scores.client].metrics
            yield row


def refuse_unknown_part(path: str | None, method: Method) -> None:
    """Raise a UserError if `evaluation.distance` names a part that clients do not keep."""
    if path is not None and not any(under(path, (kept,)) or under(kept, (path,)) for kept in method.keeps):
        kept = ", ".join(method.keeps) or "nothing"
        raise UserError(
            f"evaluation.distance = '{path}': clients of {method.name} do not keep this part (they keep: {kept}); name "
            "a part that they keep, or remove it"
        )


def _evaluated(recipe: Recipe, task: Task) -> list[int]:
    everyone = list(range(task.clients))
    wanted = recipe.evaluation.clients
    if wanted is None or wanted >= len(everyone):
        return everyone
    chosen = numpy_generator(recipe.seed, "evaluated").choice(len(everyone), wanted, replace=False)
    return sorted(int(c) for c in chosen)
