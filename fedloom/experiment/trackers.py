"""Experiment trackers that a recipe names in `log`: TensorBoard, Weights & Biases, MLflow. Each is a callback."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from time import time
from typing import Any, ClassVar

from fedloom.config.loading import flat
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError, brief
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.records import ClientRow, RoundRecord, Summary
from fedloom.experiment.run_folder import RECIPE, SUMMARY

NOT_HYPERPARAMETERS = ("engine", "storage", "evaluation", "log", "out", "data.dir")
"""Fields of a recipe that do not affect what is learnt."""
MEASURES = ("personal_accuracy", "personal_worst", "global_accuracy", "loss")
"""Scalars that TensorBoard's tab HPARAMS shows beside the hyperparameters."""


class Tracker(Callback):
    """Base class of trackers, which override `write`."""

    title: ClassVar[str]
    """Name in the recipe field `log`, of the package, and of the extra of fedloom that installs it."""
    _written: Mapping[str, float] = {}
    """Numbers of the last round as they were written."""

    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write numbers of a round."""
        raise NotImplementedError

    def on_round(self, record: RoundRecord) -> None:
        """Write a round's numbers."""
        self._written = numbers(record)
        self.write(self._written, record["round"])

    def on_evaluation(self, record: RoundRecord, clients: Sequence[ClientRow]) -> None:
        """Write numbers that `on_round` did not have: those of the final evaluation after `StopRun`."""
        new = {name: value for name, value in numbers(record).items() if repr(self._written.get(name)) != repr(value)}
        if new:
            self.write(new, record["round"])


class TensorBoard(Tracker):
    """TensorBoard event files in the run folder; view them with `tensorboard --logdir runs`."""

    title = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, recipe: Recipe, folder: Path) -> None:
        """Remember the run; the event file is created at the first round, whose number is known then."""
        self._recipe, self._folder = recipe, folder / "tensorboard"

    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write scalars; the first write of a resumed run removes rounds that will be repeated."""
        if self._writer is None:
            self._open(round)
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def on_end(self, summary: Summary) -> None:
        """Mark the run as finished in the tab HPARAMS."""
        from torch.utils.tensorboard.summary import hparams

        if self._writer is not None:
            _, _, end = hparams({}, {})
            self._writer.file_writer.add_summary(end)

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, round: int) -> None:
        """Create the event file and write the hyperparameters, of which the tab HPARAMS makes columns."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(self._folder), purge_step=round)
        # not add_hparams, which would make a second run in another folder
        columns, values, _ = hparams(hyperparameters(self._recipe), dict.fromkeys(MEASURES, 0.0))
        for part in (columns, values):
            self._writer.file_writer.add_summary(part)


class Wandb(Tracker):
    """A Weights & Biases run, configured by WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE."""

    title = "wandb"

    def __init__(self) -> None:
        self._run: Any = None
        self._ended = False

    def on_start(self, recipe: Recipe, folder: Path) -> None:
        """Start a W&B run with the recipe as its config, or continue that of an interrupted run."""
        import wandb

        self._ended = False
        try:
            self._run = wandb.init(
                id=stored_id(folder / "wandb.txt", lambda: token_hex(4)), resume="allow", dir=str(folder),
                name=folder.name, config=recipe.resolved(),
            )  # fmt: skip
        except wandb.Error as error:
            raise UserError(
                f"log = 'wandb': {error}; set WANDB_MODE=offline to write to the run folder only"
            ) from error
        self._run.define_metric("*", step_metric="round")  # rounds that a resumed run repeats keep their x position

    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write numbers as one line of the history."""
        self._run.log({"round": round, **values})

    def on_end(self, summary: Summary) -> None:
        """Write the numbers of summary.json, by the recipe's `evaluation.summary`, to the W&B summary."""
        self._run.summary.update(numbers(summary))
        self._ended = True

    def close(self) -> None:
        """Finish the W&B run, which uploads remaining data; it is marked as failed if the run is not finished."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self._ended else 1)
            self._run = None


class MLflow(Tracker):
    """An MLflow run, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME (default: fedloom)."""

    title = "mlflow"

    def __init__(self) -> None:
        self._id = ""
        """Identity of the run; empty until the server knows it."""
        self._ended = False

    def on_start(self, recipe: Recipe, folder: Path) -> None:
        """Start an MLflow run with the recipe as its parameters, or continue that of an interrupted run."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._folder, self._ended, self._known, self._id = folder, False, 0, ""
        try:
            self._client = MlflowClient()
            run = stored_id(folder / "mlflow.txt", lambda: self._create(recipe))
            if run != self._id:  # of an interrupted run
                self._client.update_run(run, status="RUNNING")
                self._id = run
                known = self._client.get_metric_history(self._id, "lr")
                self._known = max((metric.step for metric in known), default=0)
        except MlflowException as error:
            raise UserError(
                f"log = 'mlflow': {brief(error)}; set MLFLOW_TRACKING_URI to a server or a file such as "
                "sqlite:///mlflow.db"
            ) from error

    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write numbers; a resumed run leaves out rounds that are known, since they are the same."""
        if round > self._known:
            self._write(values, round)

    def on_end(self, summary: Summary) -> None:
        """Write the numbers of summary.json as `summary/…`, and store it and the recipe as artifacts."""
        self._write({f"summary/{name}": value for name, value in numbers(summary).items()}, summary["rounds"])
        for name in (RECIPE, SUMMARY):
            self._client.log_artifact(self._id, str(self._folder / name))
        self._ended = True

    def close(self) -> None:
        """End the MLflow run; it is marked as killed if the run is not finished."""
        if self._id:
            self._client.set_terminated(self._id, "FINISHED" if self._ended else "KILLED")
            self._id = ""

    def _create(self, recipe: Recipe) -> str:
        """Create an MLflow run with the recipe as its parameters, and return its identity."""
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedloom"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._id = str(self._client.create_run(experiment, run_name=self._folder.name).info.run_id)
        values = [Param(name, str(value)) for name, value in flat(recipe.resolved())]
        for start in range(0, len(values), 100):  # the most parameters that MLflow accepts at once
            self._client.log_batch(self._id, params=values[start : start + 100])
        return self._id

    def _write(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time())
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])


TRACKERS: dict[str, type[TensorBoard | Wandb | MLflow]] = {
    kind.title: kind for kind in (TensorBoard, Wandb, MLflow)
}  # fmt: skip
"""Trackers by their name in the recipe field `log`."""


def numbers(record: RoundRecord | Summary) -> dict[str, float]:
    """Return the numbers of a record, without the number of the round."""
    plain = {n: float(v) for n, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    plain.pop("round", None)
    return plain


def hyperparameters(recipe: Recipe) -> dict[str, str | float | bool]:
    """Return the fields of a recipe that affect what is learnt, by path, without those that are not set."""
    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat(recipe.resolved())
        if value is not None
    }
    return {
        name: value
        for name, value in values.items()
        if not any(name == field or name.startswith(f"{field}.") for field in NOT_HYPERPARAMETERS)
    }


def stored_id(file: Path, create: Callable[[], str]) -> str:
    """Return the tracker's identity of a run, which is created once and stored, so that a resumed run continues it."""
    if not file.exists():
        file.write_text(create(), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def refuse_missing(names: Iterable[str]) -> None:
    """Raise a UserError if the package of a tracker is not installed, before the run starts."""
    for name in names:
        if find_spec(TRACKERS[name].title) is None:
            raise UserError(f"log = '{name}': is not installed; install it with: pip install 'fedloom[{name}]'")
