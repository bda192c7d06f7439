"""The docker compose files and the Dockerfile: their syntax, and the commands in them, without a docker engine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from test_pages import flags

from fedloom.deploy import launch

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"
FILES = sorted(FOLDER.glob("compose.*.yaml"))
KEYS = {"image", "command", "init", "restart", "stop_grace_period", "ports", "volumes", "healthcheck"}


def substituted(text: str, **given: str) -> str:
    """Replace variables as docker compose does: `${NAME:-default}` and `${NAME:?message}`."""

    def value(match: re.Match) -> str:
        name, kind, rest = match[1], match[2], match[3]
        assert name in given or kind == ":-", f"{name} must be given: {rest}"
        return given.get(name, rest)

    return re.sub(r"\$\{(\w+)(:-|:\?)([^}]*)\}", value, text)


def service(path: Path) -> dict:
    content = yaml.safe_load(substituted(path.read_text(encoding="utf-8"), FOLDER="/srv/fed", DATA="/srv/images"))
    assert content.keys() == {"services"}
    ((name, found),) = content["services"].items()
    assert path.name == f"compose.{name}.yaml"
    return found


def check(words: list[str]) -> None:
    """Check that `fedloom deploy WORDS` exists, with its options."""
    known = flags()[f"deploy {words[0]}"]
    assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_compose_file_starts_a_command_that_exists_and_starts_it_again(path):
    found = service(path)
    assert found.keys() <= KEYS
    check(found["command"])
    assert found["init"] is True and found["restart"] in ("always", "unless-stopped")
    mounted = {volume.split(":")[1] for volume in found["volumes"]}
    assert {word for word in found["command"] if word.startswith("/")} <= mounted


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_commands_in_its_comments_exist(path):
    lines = re.findall(r"^#\s+docker compose -f (\S+) (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert lines
    for file, command in lines:
        assert file == path.name
        words = shlex.split(command)
        if "fedloom" in words:
            check(words[words.index("fedloom") + 2 :])
        elif words[0] == "run":
            check(words[3:])


def test_the_server_publishes_one_port_and_checks_its_health():
    found = service(FOLDER / "compose.server.yaml")
    assert found["ports"] == ["9092:9092"]
    assert found["healthcheck"]["test"][0] == "CMD"
    check(found["healthcheck"]["test"][3:])


def test_a_folder_must_be_given():
    with pytest.raises(AssertionError, match="FOLDER must be given"):
        substituted((FOLDER / "compose.client.yaml").read_text(encoding="utf-8"))


def test_the_unit_of_systemd_starts_a_command_that_exists_and_starts_it_again():
    page = (FOLDER.parents[1] / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```ini\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    unit = ConfigParser(interpolation=None)
    unit.read_string(text)
    command = shlex.split(unit["Service"]["ExecStart"])
    assert Path(command[0]).is_absolute() and command[0].endswith("/fedloom") and command[1] == "deploy"
    check(command[2:])
    assert unit["Service"]["Restart"] == "always"
    assert int(unit["Service"]["TimeoutStopSec"]) > launch.GRACE_SECONDS


def instructions(name: str) -> list[str]:
    """The arguments of each instruction NAME of the Dockerfile."""
    lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def test_the_image_runs_the_deploy_commands_as_user_1000():
    assert instructions("ENTRYPOINT") == ['["fedloom", "deploy"]']
    assert instructions("USER") == ["1000"] and "--uid 1000" in instructions("RUN")[-1]
    for path in FILES:
        assert "must belong to user 1000" in path.read_text(encoding="utf-8")


def test_the_image_gets_the_files_that_are_installed_and_nothing_else():
    """A federation's folder may lie in the repository; a layer of an image would keep its keys."""
    copied = [word for line in instructions("COPY") for word in line.split()[:-1]]
    assert copied == ["pyproject.toml", "README.md", "LICENSE", "constraints.txt", "fedloom"]
    root = FOLDER.parents[1]
    assert all((root / one).exists() for one in copied)
    ignored = (root / ".dockerignore").read_text(encoding="utf-8").split()
    assert not set(copied) & set(ignored)


def test_the_image_installs_the_versions_that_the_page_installs():
    page = (FOLDER.parents[1] / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8")
    assert "pip install -c constraints.txt -e '.[flower]'" in page
    assert "pip install --no-cache-dir -c /src/constraints.txt '/src[flower]'" in instructions("RUN")[0]
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = instructions("FROM")[0].removeprefix("python:").removesuffix("-slim")
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]  # the version that is tested


@pytest.mark.slow
def test_the_wheel_that_the_image_installs_has_the_code_of_the_checkout(tmp_path):
    """The parties compare hashes of their code; one may run the image, another one a checkout."""
    root, src = FOLDER.parents[1], tmp_path / "src"
    src.mkdir()
    for line in instructions("COPY"):
        for name in line.split()[:-1]:
            copy = shutil.copytree if (root / name).is_dir() else shutil.copy
            copy(root / name, src / name)
    python = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*python, "--target", str(tmp_path / "installed"), str(src)], check=True)
    show = "import fedloom; from fedloom.deploy import terms; print(fedloom.__file__, terms.protocol_versions())"
    found = [
        subprocess.run(
            [sys.executable, "-c", show], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(place)}, check=True,
            capture_output=True, text=True,
        ).stdout.split(" ", 1)
        for place in (tmp_path / "installed", root)
    ]  # fmt: skip
    assert found[0][0].startswith(str(tmp_path)) and found[0][1] == found[1][1]
