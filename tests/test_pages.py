"""The README and the docs: commands exist with the flags that are shown, and links lead to files."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from fedloom.cli import commands

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(page: Path) -> list[list[str]]:
    """The words of every `fedloom …` in a fenced block or between backticks, from the command on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("fedloom ")]
    lines += re.findall(r"`(fedloom [a-z-][^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return [shlex.split(line, comments=True)[1:] for line in lines]


def flags() -> dict[str, set[str]]:
    """Of every command, `data plot` by both words."""
    found = {}
    for name, command in get_command(commands.app).commands.items():
        for inner, one in getattr(command, "commands", {"": command}).items():
            found[f"{name} {inner}".strip()] = {flag for known in one.params for flag in known.opts} | {"--help"}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_exist(page):
    known = flags()
    groups = {group.name for group in commands.app.registered_groups}
    for words in shown(page):
        if words[0] in ("--install-completion", "--show-completion", "--help"):
            continue
        if words == ["deploy"]:  # all of them
            continue
        name = " ".join(words[:2]) if words[0] in groups else words[0]
        assert name in known, words
        given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert given - known[name] <= {"--debug"}, words


def test_there_are_commands_to_look_at():
    assert sum(len(shown(page)) for page in PAGES) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        if not link.startswith("http"):
            assert target.exists(), link
            assert not anchor or anchor in headings(target), f"{link}#{anchor}"


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
