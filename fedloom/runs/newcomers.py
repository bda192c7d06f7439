"""Newcomers of a comparison: what each method's representation is worth to clients that never took part."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from fedloom.config.recipe import Recipe
from fedloom.core.checking import Section
from fedloom.core.errors import UserError
from fedloom.core.task import Task
from fedloom.experiment.records import NewcomerRow, Newcomers, Summary
from fedloom.inference.adapt import STEPS
from fedloom.inference.newcomers import ALONE, GLOBAL, evaluate_newcomers, held_out, train_alone
from fedloom.inference.trained_run import TrainedRun
from fedloom.methods.addons.heads import Head


class NewcomerSettings(Section):
    """The section `compare.newcomers`: which models the held-out clients get."""

    labelled: tuple[int, ...] = Field(
        (10, 40), min_length=1, description="numbers of labelled training samples that each newcomer has"
    )
    head: Head = Field("logreg", description="classifier on the frozen representation: linear, mlp, svm or logreg")
    alone_epochs: int | None = Field(
        None, ge=0, description="epochs of training alone, for comparison; 0: none; default: as many as a client had"
    )


def compare_newcomers(
    summaries: Sequence[Summary], settings: NewcomerSettings, common: Recipe, tasks: Sequence[Task]
) -> Newcomers:
    """Test newcomers with the representation of each run and, once per seed, with training alone.

    Methods that share no extractor have no representation for newcomers and are left out.

    Args:
        summaries: Summaries of the runs, with their `label` and `run_dir`.
        settings: The section `compare.newcomers`.
        common: The recipe that the runs share; newcomers that train alone do it by its section `training`.
        tasks: The data of each run.
    """
    rows: list[NewcomerRow] = []
    seeds_alone: set[int] = set()
    count = 0
    for summary, task in zip(summaries, tasks, strict=True):
        run = TrainedRun(summary["run_dir"], task=task)
        data, seed, label = held_out(run), summary["seed"], summary.get("label", summary["method"])
        count = len(data.clients)
        if seed not in seeds_alone and settings.alone_epochs != 0:
            seeds_alone.add(seed)
            for labelled in settings.labelled:
                alone = train_alone(run, data.with_labelled(labelled, seed), common.training, settings.alone_epochs)
                rows.append(_row(ALONE, seed, labelled, alone))
        if not run.shares_extractor:
            continue
        for number, labelled in enumerate(settings.labelled):
            try:
                found = evaluate_newcomers(
                    run, data.with_labelled(labelled, seed), [settings.head], steps=STEPS, alone_epochs=0
                )
            except UserError:  # its representation is more than the extractor, so there are no heads on it
                break
            if number == 0 and run.method.has_global and GLOBAL in found["ways"]:
                rows.append(_row(label, seed, 0, found["ways"][GLOBAL], run))
            rows.append(_row(label, seed, labelled, found["ways"][settings.head], run))
    return {"newcomers": count, "head": settings.head, "rows": rows}


def _row(
    label: str, seed: int, labelled: int, spread: dict[str, Any], run: TrainedRun | None = None
) -> NewcomerRow:  # fmt: skip
    row: NewcomerRow = {
        "label": label, "seed": seed, "labelled": labelled, "mean": spread["mean"], "std": spread["std"],
        "worst": spread["worst"],
    }  # fmt: skip
    return row if run is None else {**row, "run": run.folder.name}
