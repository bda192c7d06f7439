"""A federation on a network with faults: server and organisations in network namespaces of this test."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import sleep

import pytest
import waiting
from federated import make_federation, small_recipe
from safetensors.torch import load_file
from tiny import same_state

from fedloom.deploy.launch import end
from fedloom.experiment.loop import Experiment

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]
ORGANISATIONS = ("east", "north", "south", "west")
CUT_SECONDS = 30.0
PATIENCE = 540.0
"""Seconds after which something must have happened, on a busy machine."""
HOST = "10.77.0.1"
"""Address of the server. All addresses exist only inside the namespaces."""


class Network:
    """A bridge, and a namespace with one link to it for each party."""

    def __init__(self, parties: tuple[str, ...], stack: ExitStack):
        self._prefix = f"fedloom{os.getpid()}-"
        self._links: dict[str, str] = {}
        self._add("hub", stack)
        self._ip("-n", self.namespace("hub"), "link", "add", "bridge", "type", "bridge")
        self._up("hub", "bridge")
        for number, party in enumerate(parties, start=1):
            link = self._links[party] = f"link{number}"
            self._add(party, stack)
            inside, hub = self.namespace(party), self.namespace("hub")
            self._ip("-n", inside, "link", "add", "eth0", "type", "veth", "peer", "name", link, "netns", hub)
            self._ip("-n", hub, "link", "set", link, "master", "bridge")
            self._ip("-n", inside, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            self._up(party, "lo")
            self._up(party, "eth0")
            self._up("hub", link)

    def namespace(self, party: str) -> str:
        return self._prefix + party

    def _add(self, party: str, stack: ExitStack) -> None:
        self._ip("netns", "add", self.namespace(party))
        stack.callback(self._remove, self.namespace(party))

    def _remove(self, namespace: str) -> None:
        """End what is left in a namespace, and delete it."""
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        for number in found.stdout.split():
            try:
                os.kill(int(number), signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                continue
        self._ip("netns", "del", namespace)

    def _up(self, party: str, device: str) -> None:
        self._ip("-n", self.namespace(party), "link", "set", device, "up")

    def cut(self, party: str) -> None:
        self._ip("-n", self.namespace("hub"), "link", "set", self._links[party], "down")

    def mend(self, party: str) -> None:
        self._up("hub", self._links[party])

    def slow(self, party: str, rate: str) -> None:
        """Limit the rate in both directions."""
        for where, device in ((party, "eth0"), ("hub", self._links[party])):
            limit = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
            _run("tc", "-n", self.namespace(where), "qdisc", "add", "dev", device, "root", *limit)

    def exec(self, party: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(party), *command]

    @staticmethod
    def _ip(*words: str) -> None:
        _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def network():
    """The network; the test is skipped where it cannot be created."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to create network namespaces")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs the command {tool} (Debian: apt-get install iproute2)")
    with ExitStack() as stack:
        try:
            made = Network(("server", *ORGANISATIONS), stack)
            made.slow("south", "1mbit")
            _run(*made.exec("east", "true"))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be created here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield made


@contextmanager
def running(network: Network, folder: Path):
    """Run the server and the organisations; yields a function that starts `fedloom deploy` at a party."""
    direct = os.environ | {"NO_PROXY": f"{HOST},127.0.0.1", "no_proxy": f"{HOST},127.0.0.1"}
    with ExitStack() as stack:

        def start(party: str, log: str, *arguments: str) -> subprocess.Popen[bytes]:
            command = network.exec(party, sys.executable, "-m", "fedloom", "deploy", *arguments)
            with (folder / f"{log}.out").open("ab") as out:
                child = subprocess.Popen(command, stdout=out, stderr=out, env=direct)
            stack.callback(end, child, grace=60)
            return child

        start("server", "server", "server", "--folder", str(folder / "server"))
        for name in ORGANISATIONS:
            start(
                name, name, "client", "--folder", str(folder / "organisations" / name), "--yes", "--device", "cpu",
                "--data", str(folder / "data" / f"{name}.npz"), "--evaluation", "classes", "--evaluation-epsilon",
                "inf", "--min-test", "0", "--max-evaluations", "99",
            )  # fmt: skip
        until(lambda: "ready" in _text(folder / "server.out"), folder)
        yield start


def until(happened, folder: Path) -> None:
    waiting.until(
        happened, PATIENCE,
        lambda: "\n".join(f"{path.name}:\n{_text(path)[-3000:]}" for path in folder.glob("*.out")),
    )  # fmt: skip


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def test_a_cut_and_a_slow_link_do_not_change_the_weights(network, tmp_path):
    recipe = small_recipe("repper", data__clients=4, training__rounds=5, training__min_clients=4, evaluation__every=5)
    folder = tmp_path / "fed"
    make_federation(folder, recipe, ORGANISATIONS, host=HOST)
    metrics = folder / "server" / "runs" / "first" / "metrics.jsonl"
    with running(network, folder) as start:
        wait = str(int(PATIENCE))
        run = start("server", "start", "start", "--folder", str(folder / "server"), "--name", "first", "--wait", wait)
        until(lambda: _text(metrics).count("\n") >= 1 or run.poll() is not None, folder)
        assert run.poll() is None, _text(folder / "start.out")
        network.cut("west")
        sleep(CUT_SECONDS)
        done = _text(metrics).count("\n")
        network.mend("west")
        assert done < 5, "the run must not end without west"
        until(lambda: run.poll() is not None, folder)
        assert run.returncode == 0, _text(folder / "start.out")
    assert _text(metrics).count("\n") == 5
    simulated = Experiment(recipe.with_(out=tmp_path / "simulated"))
    simulated.run()
    assert same_state(load_file(metrics.parent / "models" / "server.safetensors"), simulated.server.state)
