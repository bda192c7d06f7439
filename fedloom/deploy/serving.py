"""Runs of a deployment: start, wait for the end, and resume after the server was restarted."""

import json
from pathlib import Path
from time import monotonic, sleep

from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import RunError, UserError
from fedloom.deploy.active import ActiveRun
from fedloom.deploy.control import controlling
from fedloom.deploy.deployable import deployable
from fedloom.deploy.terms import FederationTerms, is_run
from fedloom.experiment.files import write_whole
from fedloom.experiment.run_folder import finished

CODE = ".code.json"
"""Ending of the file with the hashes of the Python files that a run's recipe names and the user allowed."""
ABSENT_SECONDS = 120.0
"""Seconds that a server may be absent, because it is restarted, while somebody waits for a run."""


def begin(folder: Path, recipe: Recipe, name: str, *, wait: float = 60.0, client_timeout: float = 600.0) -> int:
    """Start or resume a run on the server of a folder.

    Args:
        folder: The server's folder.
        recipe: The recipe.
        name: Name of the run; an existing run of this name is resumed.
        wait: Seconds to wait for organisations.
        client_timeout: Seconds that an organisation has for an answer.

    Returns:
        Flower's id of the run.

    Raises:
        UserError: If the recipe or name cannot be used, or another run is in progress.
        RunError: If no server answers.

    Example:
        >>> from pathlib import Path
        >>> from fedloom import Recipe
        >>> server = Path("fed/server")
        >>> await_run(server, begin(server, Recipe.load(server / "recipe.yaml"), "first"))
    """
    deployable(recipe)
    if not is_run(name):
        raise UserError(
            f"--name {name}: must be letters, digits, dots, dashes, underscores and plus signs, and must not begin "
            "with a dot"
        )
    (folder / "recipes").mkdir(exist_ok=True)
    with controlling(folder) as flower:
        if busy := [run for run in flower.runs() if not run.over]:
            raise UserError(f"run {busy[0].number} is in progress: wait for it, or stop it (fedloom deploy stop)")
        trusted = trusted_code.hashes(recipe.resolved())
        write_whole(folder / "recipes" / f"{name}{CODE}", json.dumps(trusted).encode())
        write_whole(folder / "recipes" / f"{name}.yaml", recipe.with_(out=None).to_yaml().encode())
        if not (folder / "runs" / name).exists():  # organisations that are added later take part in the next run
            terms = folder / "recipes" / f"{name}.federation"
            terms.mkdir(exist_ok=True)
            FederationTerms.load(folder).save(terms)
        number = flower.start(name, wait=wait, timeout=client_timeout)
    ActiveRun(name, wait, client_timeout, number).save(folder)
    return number


def await_run(folder: Path, number: int, seconds: float | None = None) -> None:
    """Wait until a run has ended; the server may be restarted meanwhile, and resumes the run.

    Args:
        folder: The server's folder.
        number: Flower's id of the run.
        seconds: Longest time to wait; None for no limit.

    Raises:
        RunError: If the run failed, was stopped, or has not ended in time.
    """
    end = None if seconds is None else monotonic() + seconds
    seen, name = monotonic(), None
    while end is None or monotonic() < end:
        active = ActiveRun.load(folder)
        if active is not None and number in (active.number, *active.earlier):
            number, name = active.number, active.run
        try:
            with controlling(folder) as flower:
                state = next((run for run in flower.runs() if run.number == number), None)
            seen = monotonic()
            if state is None and active is None and name and finished(folder / "runs" / name):
                return  # it ended while the server was restarted
        except RunError:
            if monotonic() - seen > ABSENT_SECONDS:
                raise
            state = None
        if state is not None and state.over:
            if state.outcome == "stopped":
                raise RunError("the run was stopped: start it again, with the same --name, to continue it")
            if state.outcome != "completed":
                why = f": {state.details}" if state.details else ""
                raise RunError(f"the run has ended ({state.outcome}){why}; see {folder}/serverapp.log")
            return
        sleep(1)
    raise RunError(f"the run has not ended within {seconds:g} s; it is still running (fedloom deploy status)")
