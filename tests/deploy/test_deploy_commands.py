"""`fedloom deploy` at the command line, as far as it needs no server."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography import x509
from federated import make_federation, small_recipe
from typer.testing import CliRunner

from fedloom.cli.commands import app
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import RunError, UserError
from fedloom.deploy import serving
from fedloom.deploy.certificates import read_key
from fedloom.deploy.launch import environment
from fedloom.deploy.terms import FederationTerms

INIT = ("deploy", "init", "fed", "--host", "fl.example.org", "--organisations", "north,south", "--recipe", "my.yaml")
LIKE = ("--classes", "cat,dog", "--shape", "3x32x32")


def call(*arguments: str, answer: str = "") -> str:
    result = CliRunner().invoke(app, arguments, input=answer)
    if isinstance(result.exception, (UserError, RunError)):
        raise result.exception
    assert result.exit_code in (0, 1), result.output
    return result.output


@pytest.fixture(autouse=True)
def _recipe(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    Path("my.yaml").write_text(small_recipe("fedrep").to_yaml())


def test_init_writes_a_folder_whose_secrets_are_its_owners_alone():
    call(*INIT, *LIKE)
    secret = {"ca.key", "server/server.key", "server/coordinator.key", "server/control.token",
              "organisations/north/node.key", "organisations/south/node.key"}  # fmt: skip
    files = [path for path in Path("fed").rglob("*") if path.is_file()]
    assert {str(path.relative_to("fed")) for path in files if stat.S_IMODE(path.stat().st_mode) == 0o600} == secret
    assert stat.S_IMODE(Path("fed").stat().st_mode) == 0o700
    north, south = (Path("fed/organisations") / name for name in ("north", "south"))
    assert (north / "node.key").read_bytes() != (south / "node.key").read_bytes()
    assert (north / "node.pub").read_bytes() == Path("fed/server/organisations/north.pub").read_bytes()
    assert not list(north.glob("server.*")) and not list(north.glob("coordinator.key"))
    federation = FederationTerms.load(north)
    assert (federation.classes, federation.shape) == (("cat", "dog"), (3, 32, 32))


def test_the_servers_certificate_is_for_its_name_and_signed_by_the_ca():
    call(*INIT, *LIKE)
    ca, server = (x509.load_pem_x509_certificate(Path("fed/server", f).read_bytes()) for f in ("ca.pem", "server.pem"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (INIT, "--data-like: pass it, or both --classes and --shape"),
        ((*INIT, "--classes", "a,b", "--shape", "3x32"), "--shape 3x32: must be channels x height x width"),
        ((*INIT[:5], *INIT[5:6], "../x", *INIT[7:], *LIKE), "organisation '../x': the name must be letters"),
        ((*INIT[:6], "a,a", *INIT[7:], *LIKE), "a name occurs twice"),
        ((*INIT, *LIKE, "--set", "method={name: centralized}"), "pools all data in one place"),
        (("deploy", "server"), "has no federation.yaml"),
        (("deploy", "status"), "has no federation.yaml"),
        ((*INIT[:4], "no host", *INIT[5:], *LIKE), "--host no host: must be"),
        ((*INIT[:4], "fl.exämple.org", *INIT[5:], *LIKE), "--host fl.exämple.org: must be"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments, why):
    with pytest.raises(UserError, match=why):
        call(*arguments)


def test_a_client_needs_its_own_folder_not_the_servers():
    call(*INIT, *LIKE)
    with pytest.raises(UserError, match="'fed/server' is not an organisation's folder"):
        call("deploy", "client", "--folder", "fed/server", "--data", "x.npz")
    Path("fed/organisations/north/organisation").write_text("east\n")
    with pytest.raises(UserError, match="'east' is not one of the federation's organisations"):
        call("deploy", "client", "--folder", "fed/organisations/north", "--data", "x.npz")


def test_keys_are_never_overwritten():
    call(*INIT, *LIKE)
    with pytest.raises(UserError, match="'fed' already exists"):
        call(*INIT, *LIKE)


def test_a_public_control_address_is_refused_without_a_proxy():
    call(*INIT, *LIKE)
    for address in ("0.0.0.0", "10.1.2.3", "::", "fl.example.org"):
        with pytest.raises(UserError, match="--i-have-a-proxy"):
            call("deploy", "server", "--folder", "fed/server", "--control", address)


def test_without_a_server_start_says_so():
    call(*INIT, *LIKE)
    with pytest.raises(RunError, match="no server answers on 127.0.0.1:9093"):
        call("deploy", "start", "--folder", "fed/server")


def test_a_client_is_shown_what_leaves_and_may_say_no(tmp_path):
    make_federation(tmp_path / "fed", small_recipe("fedrep"))
    north = str(tmp_path / "fed" / "organisations" / "north")
    shown = call(
        "deploy", "client", "--folder", north, "--data", str(tmp_path / "fed" / "data" / "north.npz"), answer="n\n"
    )
    assert "never left a client:" in shown and "join?" in shown
    assert not (tmp_path / "fed" / "organisations" / "north" / "supernode.log").exists()


def test_images_that_do_not_fit_are_refused(tmp_path):
    make_federation(tmp_path / "digits", small_recipe("fedrep"))
    call(*INIT, *LIKE)
    with pytest.raises(UserError, match="the class '0' is not one of the federation's \\(cat, dog\\)"):
        call("deploy", "client", "--folder", "fed/organisations/north", "--data", "digits/data/north.npz")


def test_a_key_that_others_can_read_is_refused():
    call(*INIT, *LIKE)
    path = Path("fed/organisations/north/node.key")
    path.chmod(0o644)
    with pytest.raises(UserError, match="can be read by other users: run chmod 600"):
        read_key(path)


def test_flowers_processes_are_quiet(tmp_path):
    """What Flower itself makes of the environment that its processes get, and of one that says nothing."""
    code = (
        "import urllib.request, requests; from flwr.supercore import telemetry, update_check\n"
        "def called(*a, **k): print('called', flush=True); raise urllib.error.URLError('')\n"
        "def asked(*a, **k): print('asked', flush=True); raise requests.RequestException\n"
        "urllib.request.urlopen, requests.post = called, asked\n"
        "update_check.warn_if_flwr_update_available('x')\n"
        "telemetry.create_event(telemetry.EventType.PING, None)"
    )

    def said(values: dict[str, str]) -> list[str]:
        done = subprocess.run([sys.executable, "-c", code], env=values, capture_output=True, text=True, check=True)
        return sorted(done.stdout.split())

    talkative = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    assert said(talkative | {"FLWR_HOME": str(tmp_path / "flwr")}) == ["asked", "called"]
    assert said(environment(tmp_path)) == []


def test_a_run_takes_the_consent_of_its_start_to_the_server(tmp_path, monkeypatch):
    """The server runs it in another process: consent goes there by the hashes of files."""
    call(*INIT, *LIKE)
    code = tmp_path / "mine.py"
    code.write_text("from fedloom.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n")

    class Flower:
        def runs(self):
            return []

        def start(self, name, **_):
            return 1

    monkeypatch.setattr(serving, "controlling", lambda folder: nullcontext(Flower()))
    start = ("deploy", "start", "--folder", "fed/server", "--name", "mine", "--detach")
    call(*start, "--set", f"method={{name: '{code}:Mine'}}")
    recipe = Path("fed/server/recipes/mine.yaml")
    held = json.loads(Path(f"fed/server/recipes/mine{serving.CODE}").read_text())
    assert held == {str(code): hashlib.sha256(code.read_bytes()).hexdigest()}
    with trusted_code.scope():
        trusted_code.allow_hashes(held)
        assert Recipe.load(recipe).make_method().name == "mine"
