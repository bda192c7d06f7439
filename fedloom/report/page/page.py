"""Puts the page together out of run folders, and writes it as one file."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.core.reading import without_nan
from fedloom.report.page.classes import classes
from fedloom.report.page.clients import clients
from fedloom.report.page.costs import costs
from fedloom.report.page.curves import curves
from fedloom.report.page.ending import failures, recipes
from fedloom.report.page.figure import Page, Switch, colour
from fedloom.report.page.holdings import holdings
from fedloom.report.page.insight import Insight
from fedloom.report.page.representations import representations, styles
from fedloom.report.page.results import results
from fedloom.report.page.runs import Entry


def page_of(entries: Sequence[Entry], insights: Mapping[Path, Insight]) -> Page:
    """All sections, for one method or several."""
    runs = [run for entry in entries for run in entry.runs]
    several = len(entries) > 1
    running = [run for run in runs if run.done is None]
    if not running:
        state = f"{len(runs)} runs, finished" if len(runs) > 1 else "finished"
    elif len(runs) == 1:
        state = f"round {len(runs[0].history)} of {runs[0].rounds}"
    else:
        state = f"{len(runs) - len(running)} of {len(runs)} runs finished"
    sections = [
        results(entries), curves(entries), clients(entries), classes(entries, insights), holdings(entries, insights),
        representations(entries, insights), styles(entries, insights), costs(entries), failures(entries),
        recipes(entries),
    ]  # fmt: skip
    return Page(
        title=f"{len(entries)} methods compared" if several else entries[0].label,
        facts=_facts(entries),
        state=state,
        running=bool(running),
        legend=[Switch(entry.group, entry.label, colour(i)) for i, entry in enumerate(entries)] if several else [],
        sections=[section for section in sections if section is not None],
    )  # fmt: skip


def _facts(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """What the runs have in common; where they differ, all values."""
    recipes = [run.recipe for entry in entries for run in entry.runs]
    paths = {
        "data": ("data", "name"), "clients": ("data", "clients"), "partition": ("data", "partition"),
        "model": ("model", "name"), "rounds": ("training", "rounds"), "local epochs": ("training", "epochs"),
        "batch size": ("training", "batch_size"),
    }  # fmt: skip
    facts = []
    for name, (section, field) in paths.items():
        values = dict.fromkeys(str(recipe[section][field]) for recipe in recipes if field in recipe.get(section, {}))
        if values:
            facts.append((name, ", ".join(values)))
    return [*facts, ("seeds", ", ".join(dict.fromkeys(str(recipe["seed"]) for recipe in recipes)))]


def html(page: Page | None, *, title: str = "fedloom") -> str:
    """The page as one file that asks nobody for anything; without data, one that asks its own server for them."""
    here = files("fedloom.report.page")
    parts = {
        "connect": "'self'" if page is None else "'none'",
        "title": escape(page.title if page else title, quote=False),
        "style": (here / "page.css").read_text(encoding="utf-8"),
        "script": (here / "page.js").read_text(encoding="utf-8"),
        "data": _inside_script(as_json(page)) if page else "null",
        "plotly": (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
    }
    whole = (here / "template.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        whole = whole.replace("{{" + name + "}}", text)
    return whole


def as_json(page: Page) -> str:
    """The page's data."""
    return json.dumps(without_nan(page.to_json()), ensure_ascii=False, separators=(",", ":"))


def _inside_script(text: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def refuse_unwritable(path: Path) -> None:
    """Before anything takes long."""
    why = "it is a folder" if path.is_dir() else "" if path.parent.is_dir() else f"there is no folder '{path.parent}'"
    if why:
        raise UserError(f"--out {path}: cannot be written: {why}; for example --out report.html")


def write(page: Page, path: Path) -> None:
    """Writes the file."""
    try:
        path.write_text(html(page), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror}; for example --out report.html") from error
