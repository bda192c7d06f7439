"""The docker compose files: their syntax, and the commands in them. There is no docker engine here."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from test_pages import flags

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


def test_the_image_runs_the_deploy_commands():
    lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == 'ENTRYPOINT ["fedloom", "deploy"]' and "USER fedloom" in lines
