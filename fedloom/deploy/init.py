"""`fedloom deploy init`: creates the folder of a federation, with subfolders for the server and each organisation."""

import re
import secrets
import shutil
from pathlib import Path

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.data import load
from fedloom.deploy.certificates import (
    make_authority,
    make_server_certificate,
    new_key,
    write_certificate,
    write_key_pair,
    write_secret,
    write_tls_key,
)
from fedloom.deploy.deployable import deployable
from fedloom.deploy.secure import MEMBERS
from fedloom.deploy.terms import FederationTerms, is_organisation

APP = '''"""Flower app: runs fedloom.deploy.server at the server. Organisations run their installed fedloom instead."""

from flwr.clientapp import ClientApp

from fedloom.deploy.server import server_app

server = server_app
client = ClientApp()  # unused: see fedloom.deploy.worker
'''
PROJECT = """[project]
name = "fedloom-app"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedloom"
fab-format-version = 0

[tool.flwr.app.components]
serverapp = "fedloom_app:server"
clientapp = "fedloom_app:client"

[tool.flwr.app.config]
run = ""
wait = 60.0
timeout = 600.0
"""
SERVER_SCRIPT = """#!/bin/sh
# Starts the server: organisations connect to port {port}; it can be controlled only from this machine.
exec fedloom deploy server --folder "$(dirname "$0")" "$@"
"""
CLIENT_SCRIPT = """#!/bin/sh
# Joins the federation with the images in a folder: ./start.sh --data FOLDER
# If the connection ends, it reconnects within seconds after the server can be reached.
exec fedloom deploy client --folder "$(dirname "$0")" "$@"
"""


def parse_shape(text: str) -> tuple[int, int, int]:
    """Parse an image shape such as `1x8x8`.

    Args:
        text: Channels, height and width, separated by `x`.

    Raises:
        UserError: If the text does not have this form.
    """
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise UserError(f"--shape {text}: must be channels x height x width, such as 3x32x32")
    channels, height, width = map(int, text.split("x"))
    return channels, height, width


def like(source: str) -> tuple[tuple[str, ...], tuple[int, int, int]]:
    """Return the classes and the image shape of an example dataset.

    Args:
        source: A dataset whose classes and image shape all organisations have.
    """
    found = load(source)
    channels, height, width = found.inputs.shape[1:]
    return found.classes, (channels, height, width)


def write_federation(folder: Path, federation: FederationTerms, recipe: Recipe) -> None:
    """Create the folder of a federation: certificates, keys, terms, recipe and start scripts for each party.

    Private keys are readable only by their owner. Nothing is overwritten.

    Args:
        folder: The folder to create.
        federation: The terms of the federation.
        recipe: The recipe that each party gets.

    Raises:
        UserError: If the folder exists, a name is invalid, or no federation can run the recipe.
    """
    deployable(recipe)
    if not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", federation.host):
        raise UserError(f"--host {federation.host}: must be a host name such as fl.example.org, or an IP address")
    for name in federation.organisations:
        check_organisation(name)
    if len(set(federation.organisations)) < len(federation.organisations):
        raise UserError("--organisations: a name occurs twice; use different names")
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise UserError(f"'{folder}' already exists: choose another folder (keys are never overwritten)") from None
    authority = make_authority(federation.name)
    server = folder / "server"
    server.mkdir(mode=0o700)
    write_tls_key(folder / "ca.key", authority[0])
    key, certificate = make_server_certificate(authority, federation.host)
    write_tls_key(server / "server.key", key)
    write_certificate(server / "server.pem", certificate)
    write_key_pair(server, "coordinator", new_key())
    write_secret(server / "control.token", secrets.token_hex(32).encode())
    (server / "app").mkdir()
    (server / "app" / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (server / "app" / "fedloom_app.py").write_text(APP, encoding="utf-8")
    (server / "organisations").mkdir()
    _script(server, SERVER_SCRIPT.format(port=federation.port))
    write_certificate(server / "ca.pem", authority[1])
    federation.save(server)
    (server / "recipe.yaml").write_text(recipe.with_(out=None).to_yaml(), encoding="utf-8")
    for name in federation.organisations:
        place = folder / "organisations" / name
        write_organisation(place, name, federation, server)
        write_key_pair(place, "node", new_key())
        (server / "organisations" / f"{name}.pub").write_bytes((place / "node.pub").read_bytes())
    for name in federation.organisations:  # for secure aggregation: keys that come from the server would prove nothing
        shutil.copytree(server / "organisations", folder / "organisations" / name / MEMBERS)


def check_organisation(name: str) -> None:
    """Raise UserError unless a name can be that of an organisation, which is also the name of files."""
    if not is_organisation(name):
        raise UserError(f"organisation '{name}': the name must be letters, digits, dots, dashes and underscores")


def write_organisation(place: Path, name: str, federation: FederationTerms, server: Path) -> None:
    """Create the folder of an organisation, without its key.

    Args:
        place: The folder to create.
        name: Name of the organisation.
        federation: The terms of the federation.
        server: The server's folder, from which recipe, CA certificate and the coordinator's key are copied.
    """
    place.mkdir(mode=0o700, parents=True)
    (place / "organisation").write_text(name + "\n", encoding="utf-8")
    for file in ("ca.pem", "coordinator.pub", "recipe.yaml"):
        (place / file).write_bytes((server / file).read_bytes())
    federation.save(place)
    _script(place, CLIENT_SCRIPT)


def _script(folder: Path, text: str) -> None:
    path = folder / "start.sh"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
