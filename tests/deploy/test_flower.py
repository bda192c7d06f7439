"""A whole federation on this machine: a server and its organisations as processes, with TLS and keys."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep

import httpx
import pytest
import waiting
from cryptography.x509 import load_pem_x509_certificate
from federated import NAMES, make_federation, small_recipe, without_losses
from safetensors.torch import load_file
from tiny import same_state, without_times

from fedloom.config.recipe import Recipe
from fedloom.core.errors import RunError
from fedloom.deploy.certificates import new_key, write_key_pair
from fedloom.deploy.control import controlling
from fedloom.deploy.events import read_events
from fedloom.deploy.launch import end, free_port, process
from fedloom.deploy.lifecycle import add_organisation, renew_certificates, revoke_organisation
from fedloom.deploy.serving import await_run, begin
from fedloom.experiment.loop import Experiment
from fedloom.experiment.run_folder import finished

pytestmark = pytest.mark.xdist_group("flower")  # one server for all of them
PATIENCE = 300.0
"""Seconds after which something must have happened, on a busy machine."""


class Site:
    """The server and its organisations."""

    def __init__(self, folder: Path, stack: ExitStack, recipe: Recipe, names: tuple[str, ...]):
        self.folder, self.stack, self.names = folder, stack, names
        self.server = folder / "server"
        self.port, self.control_port = free_port(), free_port()
        make_federation(folder, recipe, names, port=self.port, control_port=self.control_port)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.serve()
        for name in names:
            self.join(name)
        self.until(self._all_online)

    def start(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{log}.out").open("ab") as out:
            child = subprocess.Popen([sys.executable, "-m", "fedloom", "deploy", *arguments], stdout=out, stderr=out)
        self.stack.callback(end, child, grace=PATIENCE)  # it gives its own processes GRACE_SECONDS
        return child

    def serve(self) -> None:
        self.processes["server"] = self.start("server", "server", "--folder", str(self.server))

    def join(self, name: str) -> None:
        self.processes[name] = self.start(
            name, "client", "--folder", str(self.folder / "organisations" / name), "--yes", "--device", "cpu",
            "--data", str(self.folder / "data" / f"{name}.npz"), "--allow-methods", "repper,fedcrl",
            "--evaluation", "classes", "--evaluation-epsilon", "inf", "--min-test", "0", "--max-evaluations", "9",
        )  # fmt: skip

    def _all_online(self) -> bool:
        try:
            with controlling(self.server) as flower:
                states = flower.nodes()
        except RunError:  # it is not up yet
            return False
        return len(states) == len(self.names) and set(states.values()) == {"online"}

    def until(self, happened) -> None:
        waiting.until(happened, PATIENCE, (self.folder / "server.out").read_text)

    def rounds(self, name: str) -> list[dict]:
        path = self.server / "runs" / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Three organisations, for all tests here but the first."""
    with running(tmp_path_factory.mktemp("site") / "fed", small_recipe("repper", evaluation__every=2), NAMES) as found:
        yield found


@contextmanager
def running(folder: Path, recipe: Recipe, names: tuple[str, ...]):
    with ExitStack() as stack:
        found = Site(folder, stack, recipe, names)
        yield found
        for child in found.processes.values():  # all at once; each is waited for below
            child.terminate()
    limit = monotonic() + PATIENCE  # the SuperNode of the killed client ends when it sees that its parent is gone
    while left := command_lines(folder):
        assert monotonic() < limit, left
        sleep(0.2)


def command_lines(folder: Path) -> list[list[str]]:
    """The words of the command lines of all processes that name a folder."""
    found = [_text(path).split("\0") for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [words for words in found if any(str(folder) in word for word in words)]


def scripts(folder: Path) -> set[str]:
    """The scripts of fedloom.deploy that run as processes for a folder."""
    return {Path(word).stem for words in command_lines(folder) for word in words if "/fedloom/deploy/" in word}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has just ended
        return ""


def _same_as_simulated(site: Site, name: str, recipe, tmp_path: Path) -> None:
    simulated = Experiment(recipe.with_(out=tmp_path / "simulated"))
    simulated.run()
    assert same_state(load_file(site.server / "runs" / name / "models" / "server.safetensors"), simulated.server.state)
    found = [{k: v for k, v in record.items() if k != "attempts"} for record in site.rounds(name)]
    assert without_times(found) == without_losses(without_times(simulated.history))


@pytest.mark.slow
def test_one_organisation_over_tls_gives_what_a_simulation_gives_bit_for_bit(tmp_path):
    """The short version, for `make test`: a third of the processes."""
    recipe = small_recipe("repper", data__clients=1, training__rounds=1)
    with running(tmp_path / "fed", recipe, NAMES[:1]) as site:
        await_run(site.server, begin(site.server, recipe, "first"), PATIENCE)
        _same_as_simulated(site, "first", recipe, tmp_path)


@pytest.mark.slow
def test_repper_over_tls_gives_what_a_simulation_gives_bit_for_bit(site, tmp_path):
    recipe = small_recipe("repper", evaluation__every=2)
    await_run(site.server, begin(site.server, recipe, "first"), PATIENCE)
    _same_as_simulated(site, "first", recipe, tmp_path)
    summary = finished(site.server / "runs" / "first")
    assert summary is not None and summary["clients"] == 3
    assert not list((site.server / "runs" / "first" / "models").glob("client-*"))
    for name in NAMES:
        assert (site.folder / "organisations" / name / "runs" / "first" / "personal.safetensors").exists()


@pytest.mark.slow
def test_a_server_that_is_ended_during_a_run_ends_flowers_processes_and_continues_when_started_again(tmp_path):
    recipe = small_recipe("repper", data__clients=1, training__rounds=4)
    with running(tmp_path / "fed", recipe, NAMES[:1]) as site:
        number = begin(site.server, recipe, "first", wait=PATIENCE)
        site.until(lambda: site.rounds("first"))
        assert scripts(site.server) == {"superlink", "serverapp"}
        site.processes["server"].send_signal(signal.SIGTERM)
        assert site.processes["server"].wait(30) == 0
        assert scripts(site.server) == set()  # at once, not when they notice that the server has ended
        before = len(site.rounds("first"))
        assert before < 4
        site.serve()
        await_run(site.server, number, PATIENCE)
        _same_as_simulated(site, "first", recipe, tmp_path)


@pytest.mark.slow
def test_no_command_line_has_a_token(site):
    """All users of a machine can read command lines; the token of a run would give them the organisations' answers."""
    begin(site.server, small_recipe("repper"), "visible", wait=PATIENCE)
    site.until(lambda: "serverapp" in scripts(site.server))
    lines = command_lines(site.folder)
    site.until(lambda: site.rounds("visible"))  # it had its token
    secrets = re.compile(r"[0-9a-f]{32}")  # a run's token has 256 digits, control.token 64
    assert len(lines) >= 9 and not [words for words in lines if any(map(secrets.search, words))]
    with controlling(site.server) as flower:
        site.until(lambda: all(run.over for run in flower.runs()))


@pytest.mark.slow
def test_organisations_reach_the_fleet_api_alone_and_control_asks_for_its_token(site):
    def ask(port: int, path: str, **headers: str) -> int:
        ca = str(site.server / "ca.pem")
        return httpx.post(f"https://127.0.0.1:{port}{path}", verify=ca, headers=headers).status_code

    token = (site.server / "control.token").read_text()
    for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/control/../control/list-runs", "/docs"):
        assert ask(site.port, path, authorization=f"Bearer {token}") == 404
    assert ask(site.port, "/v1/fleet/pull-messages") == 404  # for want of a key
    assert ask(site.control_port, "/v1/control/list-runs") == 404
    assert ask(site.control_port, "/v1/control/list-runs", authorization="Bearer " + "0" * 64) == 404
    for path in ("/v1/runtime/acquire-task", "/v1/fleet/pull-messages", "/docs"):
        assert ask(site.control_port, path, authorization=f"Bearer {token}") == 404
    protobuf = {"content-type": "application/protobuf"}
    assert ask(site.control_port, "/v1/runtime/pull-messages", **protobuf) == 401  # Flower's, without a run's token
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"https://127.0.0.1:{site.port}/v1/fleet/")  # without the federation's CA


@pytest.mark.slow
def test_an_unregistered_key_is_refused(site, tmp_path):
    write_key_pair(tmp_path, "stranger", new_key())
    arguments = (
        str(tmp_path / "contact"), "stranger",
        "--superlink", f"127.0.0.1:{site.port}", "--root-certificates", str(site.server / "ca.pem"),
        "--auth-supernode-private-key", str(tmp_path / "stranger.key"), "--isolation", "process",
        "--host", "127.0.0.1", "--port", str(free_port()),
    )  # fmt: skip
    with process("supernode", *arguments, folder=tmp_path) as node:
        assert node.wait(PATIENCE) != 0
    assert "Failed to initialize the connection" in (tmp_path / "supernode.log").read_text()
    assert any(event.get("reason") == "key" for event in read_events(site.server / "events.jsonl"))


@pytest.mark.slow
def test_superlink_log_has_times_and_no_line_per_second(site):
    log = site.server / "superlink.log"
    for _ in range(5):
        with controlling(site.server) as flower:
            flower.runs()
    lines = log.read_text().splitlines()
    assert not any("ListRuns" in line or "ListNodes" in line for line in lines)
    assert any(re.match(r"(INFO )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line) for line in lines)


@pytest.mark.slow
def test_fedcrl_with_a_client_that_is_killed_in_a_round_and_restarted(site, tmp_path):
    fields = {"evaluation__every": 2, "training__min_clients": 3}
    number = begin(site.server, small_recipe("fedcrl", **fields), "killed", wait=PATIENCE)
    site.until(lambda: site.rounds("killed"))
    os.kill(site.processes["west"].pid, signal.SIGKILL)
    site.processes["west"].wait()
    site.join("west")
    await_run(site.server, number, PATIENCE)
    _same_as_simulated(site, "killed", small_recipe("fedcrl", **fields), tmp_path)


@pytest.mark.slow
def test_add_revoke_and_renew_during_a_run(tmp_path):
    recipe = small_recipe("repper", training__rounds=12, training__min_clients=2)
    with running(tmp_path / "fed", recipe, NAMES) as site:
        number = begin(site.server, recipe, "first", wait=PATIENCE)
        site.until(lambda: site.rounds("first"))
        end = renew_certificates(site.server, site.folder / "ca.key")
        site.until(lambda: _served(site.port) == end)
        add_organisation(site.server, "east", site.folder / "organisations" / "east")
        (site.folder / "data" / "east.npz").write_bytes((site.folder / "data" / "west.npz").read_bytes())
        site.join("east")
        revoke_organisation(site.server, "west")
        logged = site.server / "events.jsonl"
        site.until(lambda: any(e["who"] == "east" and e["event"] == "connected" for e in read_events(logged)))
        site.until(lambda: any(e["who"] == "west" and e.get("reason") == "revoked" for e in read_events(logged)))
        await_run(site.server, number, PATIENCE)
        rounds = site.rounds("first")
        assert [record["round"] for record in rounds] == list(range(1, 13))
        assert (rounds[0]["clients"], rounds[-1]["clients"]) == (3, 2)
        assert "revoked" in (site.folder / "west.out").read_text()
        await_run(site.server, begin(site.server, recipe.with_("training.rounds=1"), "second", wait=20), PATIENCE)
        assert site.rounds("second")[0]["clients"] == 3  # with east, without west


def _served(port: int) -> datetime:
    """The end of the certificate that the server shows."""
    return load_pem_x509_certificate(ssl.get_server_certificate(("127.0.0.1", port)).encode()).not_valid_after_utc
