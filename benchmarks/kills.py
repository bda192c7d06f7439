"""Kill campaign: parts of a federation are killed during runs, and certificates expire; all clients must come back.

    python -m benchmarks.kills [--kills 30] [--expired 5] [--rounds 4] [--secure] [--folder FOLDER]

A server and three organisations run as processes on loopback, with TLS and keys. In each incident a run is started,
and after its first round one process is killed with SIGKILL, at a random moment: the server, Flower's SuperLink, a
client, or a client's SuperNode, in turn. Servers and clients that were killed are started again after a second, as
systemd or docker would do it. In the incidents after those, the server's certificate is replaced by an expired one for
25 seconds, and all connections end. The run must end by itself, with the weights of a simulation.

The table has a row per kind of incident: seconds from the kill (or the renewal of the certificate) until all clients
are connected, clients that were not connected after 60 s, and rounds that are missing or were repeated. With --folder,
incidents are stored in FOLDER/kills.jsonl, and a campaign that was interrupted continues. The exit code is 1 if a
client or a round was lost, or weights differ.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fedloom.config.recipe import Recipe
from fedloom.core.errors import RunError
from fedloom.deploy.certificates import (
    make_server_certificate,
    read_certificate,
    read_tls_key,
    tls_key_bytes,
    write_certificate,
)
from fedloom.deploy.control import controlling
from fedloom.deploy.events import SERVER, read_events
from fedloom.deploy.init import write_federation
from fedloom.deploy.launch import end, free_port
from fedloom.deploy.lifecycle import renew_certificates
from fedloom.deploy.serving import await_run, begin
from fedloom.deploy.terms import FederationTerms
from fedloom.experiment.build import make_task
from fedloom.experiment.files import write_whole
from fedloom.experiment.loop import Experiment

NAMES = ("north", "south", "west")
KINDS = ("server", "superlink", "client", "supernode")
EXPIRED = "expired certificate"
LIMIT_SECONDS = 60.0
"""Seconds after which a client that is not connected is lost."""
PATIENCE = 300.0
EXPIRED_SECONDS = 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--expired", type=int, default=5, help="incidents with an expired certificate")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each run")
    parser.add_argument("--secure", action="store_true", help="with secure aggregation")
    parser.add_argument("--folder", type=Path, help="keep the federation and the incidents here, and continue")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args()
    incidents = [KINDS[i % len(KINDS)] for i in range(options.kills)] + [EXPIRED] * options.expired
    with tempfile.TemporaryDirectory(prefix="fedloom-kills-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = campaign(folder, incidents, options.rounds, options.seed, options.secure)
    print_table(rows)
    sys.exit(1 if any(row["lost"] or row["rounds_lost"] or not row["equal"] for row in rows) else 0)


def campaign(folder: Path, incidents: list[str], rounds: int, seed: int, secure: bool = False) -> list[dict[str, Any]]:
    """Run the incidents that are not in FOLDER/kills.jsonl yet, and return the rows of all."""
    log = folder / "kills.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    recipe = Recipe.parse({
        "method": "repper", "data": {"name": "digits", "clients": 3, "partition": "dirichlet:0.5", "limit": 200},
        "training": {"rounds": rounds, "batch_size": 16, "min_clients": 3, "optimizer": {"lr": 0.05}},
        "evaluation": {"every": rounds}, "engine": {"name": "inline", "device": "cpu"}, "seed": 5,
        "secure": {} if secure else None,
    })  # fmt: skip
    if len(rows) < len(incidents):
        if not (folder / "fed").exists():
            make_federation(folder / "fed", recipe)
        simulated = Experiment(recipe.with_(out=None))
        simulated.run()
        with running(folder) as site:
            for number in range(len(rows), len(incidents)):
                moment = random.Random(f"{seed} {number}").uniform(0, 6)
                row = incident(site, number, incidents[number], recipe, moment, simulated.server.state)
                rows.append(row)
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    return rows


def make_federation(folder: Path, recipe: Recipe) -> None:
    """Create a federation on free ports, with the images that a simulation would give to each organisation."""
    task = make_task(recipe)
    images, labels = task.dataset.inputs.numpy(), task.dataset.labels.numpy()
    federation = FederationTerms(
        name="kills", host="127.0.0.1", port=free_port(), control_port=free_port(), organisations=NAMES,
        classes=task.dataset.classes, shape=task.shape,
    )  # fmt: skip
    write_federation(folder, federation, recipe)
    for name, train, test in zip(NAMES, task.federation.train, task.federation.test, strict=True):
        np.savez(
            folder / f"{name}.npz", x_train=images[train], y_train=labels[train], x_test=images[test],
            y_test=labels[test], classes=np.array(task.dataset.classes),
        )  # fmt: skip


class Site:
    """The processes of a federation."""

    def __init__(self, folder: Path):
        self.folder, self.federation = folder, folder / "fed"
        self.server = self.federation / "server"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("server", *NAMES):
            self.start(name)

    def start(self, name: str) -> None:
        """Start the server or a client."""
        if name == "server":
            arguments = ["server", "--folder", str(self.server)]
        else:
            place, data = self.federation / "organisations" / name, self.federation / f"{name}.npz"
            arguments = ["client", "--folder", str(place), "--data", str(data), "--yes", "--device", "cpu"]
        command = [sys.executable, "-m", "fedloom", "deploy", *arguments]
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def kill(self, name: str, script: str | None = None) -> None:
        """Kill a process, or its child that runs a script of fedloom.deploy; a server or client is started again."""
        process = self.processes[name]
        if script is not None:
            os.kill(child_of(process.pid, script), signal.SIGKILL)
            return
        process.kill()
        process.wait()  # a zombie would still count as alive
        sleep(1)
        self.start(name)

    def missing(self, since: datetime, names: tuple[str, ...]) -> set[str]:
        """Return the clients that are not connected; those in `names` must have connected since a time."""
        last: dict[str, dict[str, Any]] = {}
        for event in read_events(self.server / SERVER):
            if event["who"] in NAMES and event["event"] in ("connected", "disconnected", "lost"):
                last[event["who"]] = event
        try:
            with controlling(self.server) as flower:
                states = flower.nodes()
        except RunError:
            return set(NAMES)
        return {
            name for name in NAMES
            if states.get(name) != "online" or name not in last or last[name]["event"] != "connected"
            or (name in names and datetime.fromisoformat(last[name]["at"]) < since)
        }  # fmt: skip

    def until_back(self, since: datetime, names: tuple[str, ...]) -> tuple[float, set[str]]:
        """Wait until all clients are connected for 3 s.

        Returns:
            The seconds that it took, and the clients that were not connected after 60 s.
        """
        lost: set[str] = set()
        back: float | None = None
        while back is None or (datetime.now(UTC) - since).total_seconds() < back + 3:
            seconds = (datetime.now(UTC) - since).total_seconds()
            missing = self.missing(since, names)
            back = None if missing else seconds if back is None else back
            if seconds > LIMIT_SECONDS:
                lost |= missing
            if seconds > PATIENCE:
                return seconds, lost
            sleep(0.3)
        return back, lost


@contextmanager
def running(folder: Path) -> Iterator[Site]:
    """Run a federation, and end its processes."""
    site = Site(folder)
    try:
        site.until_back(datetime.now(UTC), NAMES)
        yield site
    finally:
        for child in site.processes.values():
            child.terminate()
        for child in site.processes.values():
            end(child, grace=30)


def incident(
    site: Site, number: int, kind: str, recipe: Recipe, moment: float, expected: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Start a run, let something fail after its first round, and return what happened."""
    run, who = f"run-{number:03d}", NAMES[number % len(NAMES)]
    place = site.server / "runs" / run
    flower = begin(site.server, recipe, run, wait=PATIENCE, client_timeout=PATIENCE)
    until(lambda: bool(records(place)), f"{run}: no round within {PATIENCE:g} s")
    sleep(moment)
    before, since = records(place), datetime.now(UTC)
    if kind == EXPIRED:
        since = expire(site)
    else:
        site.kill(
            *{"server": ("server",), "superlink": ("server", "superlink"), "client": (who,)}.get(kind, (who, kind))
        )
    all_of_them = kind in ("server", "superlink", EXPIRED)
    seconds, lost = site.until_back(since, NAMES if all_of_them else (who,))
    try:
        await_run(site.server, flower, PATIENCE)
        why = ""
    except RunError as error:
        why = str(error)
    after = records(place)
    repeated = sum(one not in after for one in before)
    missing = recipe.training.rounds - len({one["round"] for one in after})
    model = place / "models" / "server.safetensors"
    state = load_file(model) if model.exists() else {}
    equal = state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    return {
        "incident": number + 1, "kind": kind, "who": "all" if all_of_them else who, "rounds_before": len(before),
        "seconds": round(seconds, 1), "lost": sorted(lost), "rounds_lost": missing + repeated, "equal": equal,
        "at": f"{since:%H:%M:%S}", **({"why": why} if why else {}),
    }  # fmt: skip


def expire(site: Site) -> datetime:
    """Serve an expired certificate for 25 s to clients that have to connect anew; return when it was renewed."""
    authority = read_tls_key(site.federation / "ca.key"), read_certificate(site.server / "ca.pem")
    key, certificate = make_server_certificate(authority, "127.0.0.1", days=-1 / 24)
    write_whole(site.server / "server.key", tls_key_bytes(key), private=True)
    write_certificate(site.server / "server.pem", certificate)
    site.kill("server", "superlink")
    sleep(EXPIRED_SECONDS)
    renew_certificates(site.server, site.federation / "ca.key")
    return datetime.now(UTC)


def records(place: Path) -> list[dict[str, Any]]:
    """Return the rounds of a run that are stored; the last line may be incomplete."""
    found = []
    path = place / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def child_of(parent: int, script: str) -> int:
    """Return the process that a process started for a script of fedloom.deploy."""
    end = monotonic() + PATIENCE
    while monotonic() < end:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_text().split("\0")
            except OSError:  # it has just ended
                continue
            at = next((i for i, word in enumerate(words) if word.endswith(f"/{script}.py")), None)
            if at is not None and words[at + 1 : at + 2] == [str(parent)]:
                return int(path.parent.name)
        sleep(0.2)
    raise TimeoutError(f"process {parent} has no {script}")


def until(happened: Callable[[], bool], otherwise: str) -> None:
    """Wait until something has happened."""
    end = monotonic() + PATIENCE
    while not happened():
        if monotonic() > end:
            raise TimeoutError(otherwise)
        sleep(0.2)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a line per kind of incident, and one for all."""
    heads = ("killed", "times", "seconds: median", "longest", "lost > 60 s", "rounds lost", "equal")
    print("{:<20}{:>6}{:>16}{:>9}{:>13}{:>13}{:>7}".format(*heads))
    kinds = [kind for kind in (*KINDS, EXPIRED) if any(row["kind"] == kind for row in rows)]
    for kind in [*kinds, "all"]:
        found = [row for row in rows if kind in (row["kind"], "all")]
        times = [row["seconds"] for row in found]
        print(
            f"{kind:<20}{len(found):>6}{statistics.median(times):>16.1f}{max(times):>9.1f}"
            f"{sum(len(row['lost']) for row in found):>13}{sum(row['rounds_lost'] for row in found):>13}"
            f"{sum(row['equal'] for row in found):>7}"
        )


if __name__ == "__main__":
    main()
