"""The documentation site: it builds without warnings, loads nothing from the network, and has all generated pages."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import fedloom
from fedloom.methods import METHODS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
pytestmark = pytest.mark.xdist_group("docs")  # the pages are generated once


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(hooks):
    return hooks.generated()


def navigation() -> list[str]:
    """Pages that mkdocs.yml lists."""
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def flat(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for inner in (entry.values() if isinstance(entry, dict) else entry) for page in flat(inner)]

    return flat(yaml.safe_load(text)["nav"])


def test_every_page_in_the_navigation_exists(hooks, pages):
    repository = {page for path, page in hooks.REPOSITORY_PAGES.items() if (ROOT / path).is_file()}
    missing = [page for page in navigation() if not (DOCS / page).is_file() and page not in {*pages, *repository}]
    assert missing == []


def test_every_page_is_in_the_navigation(hooks, pages):
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = {*navigation(), *hooks.method_titles()}
    assert {*written, *pages, *hooks.REPOSITORY_PAGES.values()} - listed == set()


@pytest.mark.parametrize("name", [name for name in METHODS.names() if METHODS.is_shipped(name)])
def test_every_method_has_a_page(name, pages):
    page = pages[f"reference/methods/{name}.md"]
    method = METHODS.find(name)
    assert page.startswith(f"# {method.__name__}\n")
    assert f"class {method.__name__}(" in page
    for parameter in fedloom.methods.hyperparameters(method):
        assert f"| `{parameter}` |" in page


def test_commands_and_recipe_fields_are_listed(pages):
    for command in ("fedloom run", "fedloom deploy init", "fedloom data plot"):
        assert f"# {command}\n" in pages["reference/command-line.md"]
    for field in (
        "training.rounds",
        "training.optimizer.lr",
        "engine.cohort",
        "data.partition",
        "privacy.noise",
        "seed",
    ):
        assert f"| `{field}` |" in pages["reference/recipe.md"]


def test_links_out_of_the_docs_lead_to_pages_and_files_of_the_site(hooks):
    def relinked(link, page):
        return hooks.relinked(f"[x]({link})", page)

    assert relinked("../../benchmarks/README.md#scale", "how-to/scale.md") == ("[x](../benchmarks.md#scale)", [])
    assert relinked("docs/explanation/trust.md", "changelog.md") == ("[x](explanation/trust.md)", [])
    assert relinked("../../LICENSE", "reference/results.md") == ("[x](../files/LICENSE)", ["LICENSE"])
    assert relinked("../../examples/own_method.ipynb", "how-to/use.md") == ("[x](../tutorials/own-method.md)", [])
    assert relinked("missing.md", "how-to/use.md") == ("[x](missing.md)", [])


def test_drawings_show_what_the_mermaid_blocks_say(hooks):
    text = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```mermaid\n\s*(\w+)(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    drawn = {kind: (DOCS / image).read_text(encoding="utf-8") for kind, image in hooks.DRAWINGS.items()}
    for kind, block in blocks:
        shown = re.sub(r"<[^>]+>", " ", drawn[kind])
        words = re.findall(r"<b>(\w+)</b>|participant \w as ([^,\n]+)|--?>>\w: ([^(\n]+)", block)
        for word in filter(None, (part.strip() for found in words for part in found)):
            assert word in shown, f"{hooks.DRAWINGS[kind]} does not show '{word}': draw it as architecture.md says"
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    packages = re.findall(r'font-weight="bold">(\w+)<', drawn["flowchart"])
    assert packages == [name.strip() for layer in layers for name in layer.split("|")]


def test_names_that_are_promised_to_stay_exist():
    rows = re.findall(r"^\| `(fedloom[\w.]*)` \| (.+) \|$", (DOCS / "reference/stability.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for module, names in rows:
        for name in re.findall(r"`([\w.]+)`", re.sub(r"\[.*?\]\(.*?\)|`fedloom\.\S+`", "", names)):
            found = import_module(module)
            if name in ("client", "samples"):  # attributes of a Message
                found = found.Message({})
            for part in name.split("."):
                assert hasattr(found, part), f"{module}: {name}"
                found = getattr(found, part)


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path):
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    html = list((tmp_path / "site").rglob("*.html"))
    assert len(html) > 50
    for page in html:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|iframe|source)[^>]+src="?(?:https?:)?//[^>]*', text), page
        assert not re.findall(r'<link[^>]+href="?(?:https?:)?//[^>]*', text), page
        assert "```" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL), f"{page}: a code block is not closed"
