"""Flower's ServerApp: runs an ordinary experiment whose engine is the organisations."""

import json
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.deploy.certificates import read_key, read_public_key
from fedloom.deploy.deployable import deployable
from fedloom.deploy.engine import Flower
from fedloom.deploy.events import SERVER, EventLog
from fedloom.deploy.fleet import Fleet
from fedloom.deploy.launch import FOLDER, end_with_parent
from fedloom.deploy.logs import log_with_times
from fedloom.deploy.serving import CODE
from fedloom.deploy.tasks import task_elsewhere
from fedloom.deploy.terms import FederationTerms
from fedloom.experiment.loop import Experiment

ORPHAN_SECONDS = 3.0
"""Seconds that a run has to end if the server has ended; it can be resumed from its last round."""
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one experiment; its name and timeouts are in Flower's run configuration."""
    log_with_times()
    end_with_parent(ORPHAN_SECONDS)
    wait, timeout = (float(context.run_config[name]) for name in ("wait", "timeout"))
    run(grid, Path(os.environ[FOLDER]), str(context.run_config["run"]), wait=wait, timeout=timeout)


def run(grid: Grid, folder: Path, name: str, *, wait: float, timeout: float) -> None:
    """Start or resume a run in the server's folder.

    Args:
        grid: Flower's grid.
        folder: The server's folder.
        name: Name of the run.
        wait: Seconds to wait for organisations.
        timeout: Seconds that an organisation has for an answer.
    """
    federation = FederationTerms.load(folder / "recipes" / f"{name}.federation")
    trusted_code.allow_hashes(json.loads((folder / "recipes" / f"{name}{CODE}").read_text(encoding="utf-8")))
    recipe = deployable(Recipe.load(folder / "recipes" / f"{name}.yaml"))
    names = federation.organisations
    registered = json.loads((folder / "nodes.json").read_text(encoding="utf-8")).items()
    nodes = {int(node): names.index(one) for node, one in registered if one in names}
    keys = {c: read_public_key(folder / "organisations" / f"{names[c]}.pub") for c in nodes.values()}
    events = EventLog(folder / SERVER)
    fleet = Fleet(grid, federation, nodes, keys, read_key(folder / "coordinator.key"), recipe, name, events)
    fleet.wait_for(len(nodes), fleet.least, wait)
    experiment = Experiment(
        # Personal models stay with the clients. One checkpoint per round, so that clients need not keep older memory.
        recipe.with_(
            "storage.personal_models=false",
            "storage.checkpoint_every=1",
            engine={"name": "inline", "device": "cpu"},
            out=folder / "runs" / name,
        ),
        task=task_elsewhere(recipe, federation, fleet.train, fleet.test),
        engine=lambda setup, settings: Flower(
            setup, settings, fleet, needed=recipe.training.min_clients, wait=wait, timeout=timeout
        ),
        on_round=lambda record: events.add(
            "round", "server", run=name, round=record["round"], rounds=recipe.training.rounds
        ),
    )
    experiment.run(resume=True)
