"""Secure aggregation between processes: four organisations over TLS, of which one is killed during a round."""

import os
import signal

import numpy as np
import pytest
import torch
from federated import small_recipe
from safetensors.torch import load_file
from test_flower import PATIENCE, running

from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.workspace import Workspace
from fedloom.deploy.serving import await_run, begin
from fedloom.experiment.build import make_task

pytestmark = pytest.mark.xdist_group("flower")
NAMES = ("north", "south", "west", "east")


def plain_mean(recipe, clients) -> dict[str, torch.Tensor]:
    """The first round's mean of these clients' updates, computed here without masks."""
    method = recipe.make_method()
    workspace = Workspace(Setup(make_task(recipe), method, recipe.training, recipe.seed, recipe.wire))
    server = Server(workspace, federation=len(NAMES))
    start = Message({name: value.clone() for name, value in server.state.items()})
    sent = [perform(workspace, Job("update", 1, start, client=client)).message.copy() for client in clients]
    server.begin(1)
    method.combine(server, iter(sent))
    return server.state


@pytest.mark.slow
def test_a_client_that_is_killed_in_a_round_is_left_out_of_the_masked_mean(tmp_path):
    # some seconds of training, so that a client can be killed meanwhile
    recipe = small_recipe(
        "fedcrl", data__clients=4, training__rounds=1, training__epochs=60, training__batch_size=2,
        training__optimizer__lr=0.001, training__min_clients=3, secure={},
    )  # fmt: skip
    with running(tmp_path / "fed", recipe, NAMES) as site:
        number = begin(site.server, recipe, "masked", wait=PATIENCE, client_timeout=PATIENCE)
        seen = site.folder / "organisations" / "west" / "seen.txt"
        # requests to join, for keys, for shares, and the training job
        site.until(lambda: seen.exists() and len(seen.read_text().split()) == 4)
        os.kill(site.processes["west"].pid, signal.SIGKILL)
        site.processes["west"].wait()
        await_run(site.server, number, PATIENCE)
        (record,) = site.rounds("masked")
        found = load_file(site.server / "runs" / "masked" / "models" / "server.safetensors")
    assert record["clients"] == 3 and sum(record["failed"].values()) == 1  # `died` or `dropped`
    expected, every = plain_mean(recipe, (0, 1, 3)), plain_mean(recipe, range(4))
    floats = [name for name, value in expected.items() if value.is_floating_point()]
    distance = max((found[name] - expected[name]).abs().max().item() for name in floats)
    print(
        f"\nsurvivors: 3 of 4; largest difference from their plain mean: {distance:.3g}; recorded bound: "
        f"{record['quantisation']:.3g}; seconds: {record['train_seconds']:.1f}; bytes up: {record['up_bytes']}"
    )
    scale = max(expected[name].abs().max().item() for name in floats)
    assert distance <= record["quantisation"] + np.finfo(np.float32).eps * scale
    assert max((found[name] - every[name]).abs().max().item() for name in floats) > 1e-4
