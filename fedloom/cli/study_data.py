"""Datasets that cells of the papers' tables need and that are not on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fedloom.cli.base import err, say

if TYPE_CHECKING:
    from fedloom.core.errors import MissingDataError
    from fedloom.studies.plan import StudyPlan
    from fedloom.studies.table import Cell

    Run = tuple[StudyPlan, list[Cell]]
    Missing = dict[str, int]
    """Number of runs that need a dataset, by the text that says which files to put where."""


def split(runs: list[Run]) -> tuple[list[Run], Missing]:
    """Return the runs that are stored or whose data are available, and what the others lack.

    A process that was started for one run gets it back unchanged: its failure is reported by the process that started
    it.
    """
    from fedloom.data.sources import missing
    from fedloom.studies.plan import result_path, values_of
    from fedloom.studies.results import BESIDE, find

    if BESIDE in os.environ:
        return runs, {}
    ready: list[Run] = []
    lacking: Missing = {}
    for plan, run in runs:
        data = values_of(run[0], plan)["data"]
        error = missing(data["name"], data.get("dir"), data.get("size"))
        if error is None or (not plan.again and find(result_path(run[0], plan)) is not None):
            ready.append((plan, run))
        else:
            note(lacking, error)
    return ready, lacking


def note(missing: Missing, error: MissingDataError) -> None:
    """Count a run that lacks its data; in a process that was started for this run, raise the error."""
    from fedloom.studies.results import BESIDE

    if BESIDE in os.environ:
        raise error
    missing[str(error)] = missing.get(str(error), 0) + 1


def show(missing: Missing) -> None:
    """Print which datasets are missing, for how many runs, and how to get them."""
    for text, count in missing.items():
        say(f"not run ({count} {'run' if count == 1 else 'runs'}): {text}", err)
