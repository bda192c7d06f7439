"""Flower's ServerApp: runs an ordinary experiment whose engine is the organisations."""

import json
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.deploy.certificates import read_key, read_public_key
from fedloom.deploy.engine import Flower
from fedloom.deploy.fleet import Fleet
from fedloom.deploy.launch import FOLDER
from fedloom.deploy.serving import CODE
from fedloom.deploy.tasks import task_elsewhere
from fedloom.deploy.terms import FederationTerms, deployable
from fedloom.experiment.logging import LOGGER
from fedloom.experiment.loop import Experiment

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one experiment; its name and timeouts are in Flower's run configuration."""
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
    federation = FederationTerms.load(folder)
    trusted_code.allow_hashes(json.loads((folder / "recipes" / f"{name}{CODE}").read_text(encoding="utf-8")))
    recipe = deployable(Recipe.load(folder / "recipes" / f"{name}.yaml"))
    names = federation.organisations
    nodes = {int(node): names.index(one) for node, one in json.loads((folder / "nodes.json").read_text()).items()}
    keys = {c: read_public_key(folder / "organisations" / f"{one}.pub") for c, one in enumerate(names)}
    fleet = Fleet(grid, federation, nodes, keys, read_key(folder / "coordinator.key"), recipe, name)
    fleet.wait_for(len(nodes), recipe.training.min_clients, wait)
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
        on_round=lambda record: LOGGER.info(f"round {record['round']} of {recipe.training.rounds}: {record}"),
    )
    experiment.run(resume=True)
