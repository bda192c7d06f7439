"""Assembly of the report page from runs, as one HTML file."""

import json
import re
from collections import Counter
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
from fedloom.report.page.figure import Page, Switch, listed
from fedloom.report.page.holdings import holdings
from fedloom.report.page.insight import Insight
from fedloom.report.page.measures import best_first
from fedloom.report.page.newcomers import newcomers
from fedloom.report.page.representations import layers, representations, styles
from fedloom.report.page.results import results
from fedloom.report.page.runs import Entry, Run

MANY, TOP = 12, 10
"""With more than `MANY` methods, only the best `TOP` are selected initially; ten methods have ten colours."""
SCRIPTS = ("dom", "state", "figures", "tables", "sidebar", "page")
"""Scripts of the page, in this order."""


def page_of(entries: Sequence[Entry], insights: Mapping[Path, Insight]) -> Page:
    """Build the report page of one or more methods.

    Args:
        entries: Runs grouped by settings, as `entries_of` returns them; at least one.
        insights: What `Insights` read from the runs' data and models, by run folder. For runs without an entry, the
            sections that need data or models say why they are empty.

    Returns:
        The page as data; `write` makes an HTML file of it, `write_pngs` image files.

    Example:
        >>> from pathlib import Path
        >>> from fedloom.report.page.runs import entries_of, read_runs
        >>> entries = entries_of(read_runs([Path("runs/demo")]))
        >>> write(page_of(entries, {}), Path("report.html"))
    """
    runs = [run for entry in entries for run in entry.runs]
    running = any(run.done is None and run.state == "running" for run in runs)
    several, many = len(entries) > 1, len(entries) > MANY
    top = [entry.group for entry in best_first(entries)[:TOP]] if many else []
    if many and not running:  # otherwise methods would change their colours while a page is watched
        entries = best_first(entries)
    sections = [
        results(entries), curves(entries), clients(entries), newcomers(entries), classes(entries, insights),
        holdings(entries, insights), representations(entries, insights), layers(entries, insights),
        styles(entries, insights), costs(entries),
        failures(entries), recipes(entries),
    ]  # fmt: skip
    return Page(
        title=f"{len(entries)} methods compared" if several else entries[0].label,
        facts=_facts(entries),
        state=_state(runs),
        running=running,
        unfinished=any(run.done is None for run in runs),
        legend=[Switch.of(e.group, e.label, i, e.state) for i, e in enumerate(entries)] if several else [],
        sections=[section for section in sections if section is not None],
        top=top,
    )


def _state(runs: Sequence[Run]) -> str:
    """Return the state of the runs in words."""
    left = Counter(run.state for run in runs if run.done is None)
    if not left:
        return f"{len(runs)} runs, finished" if len(runs) > 1 else "finished"
    if len(runs) == 1:
        (state,) = left
        return f"round {len(runs[0].history)} of {runs[0].rounds}" + ("" if state == "running" else f", {state}")
    others = [f"{count} {state}" for state, count in left.items() if state != "running"]
    return ", ".join([f"{len(runs) - left.total()} of {len(runs)} runs finished", *others])


def _facts(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Return the main settings; where the runs differ, all their values."""
    recipes = [run.recipe for entry in entries for run in entry.runs]
    paths = {
        "data": ("data", "name"), "clients": ("data", "clients"), "partition": ("data", "partition"),
        "model": ("model", "name"), "rounds": ("training", "rounds"), "local epochs": ("training", "epochs"),
        "batch size": ("training", "batch_size"),
    }  # fmt: skip
    facts = []
    for name, (section, field) in paths.items():
        values = dict.fromkeys(str(recipe[section][field]) for recipe in recipes if field in recipe.get(section, {}))
        if name == "clients":
            values = dict.fromkeys(_clients(run) for entry in entries for run in entry.runs)
        if values:
            facts.append((name, listed(list(values))))
    return [*facts, ("seeds", listed([str(seed) for seed in sorted({recipe["seed"] for recipe in recipes})], 8))]


def _clients(run: Run) -> str:
    """Return the number of clients, and that of newcomers besides them."""
    if run.members is None:  # before the data are divided
        return str(run.recipe["data"].get("clients", "?"))
    new = f" + {run.newcomers} newcomer{'' if run.newcomers == 1 else 's'}" if run.newcomers else ""
    return f"{run.members}{new}"


def html(page: Page | None, *, title: str = "fedloom") -> str:
    """Return the page as a single HTML document.

    Args:
        page: The page. Its data, scripts and styles are embedded, so that the document makes no requests. None gives
            the live page, which fetches its data from the server that it came from.
        title: Title of the document if `page` is None.

    Returns:
        The text of the HTML document.
    """
    here = files("fedloom.report.page")
    scripts = "".join((here / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "connect": "'self'" if page is None else "'none'",
        "title": escape(page.title if page else title, quote=False),
        "style": (here / "page.css").read_text(encoding="utf-8"),
        "script": scripts,
        "data": _inside_script(as_json(page)) if page else "null",
        "plotly": (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
    }
    whole = (here / "template.html").read_text(encoding="utf-8")
    # in one pass: a name in the data may look like a placeholder
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], whole)


def as_json(page: Page) -> str:
    """Return the page's data as JSON."""
    return json.dumps(without_nan(page.to_json()), ensure_ascii=False, separators=(",", ":"))


def _inside_script(text: str) -> str:
    """Escape JSON so that it cannot end the script element that contains it."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def refuse_unwritable(path: Path, flag: str = "--out", example: str = "report.html") -> None:
    """Raise UserError if a file cannot be written; call it before anything slow.

    Args:
        path: The file to be written.
        flag: The option that names it, for the error.
        example: A value of the option that works.

    Raises:
        UserError: If the path is a folder, or its parent folder does not exist.
    """
    missing = f"the folder '{path.parent}' does not exist"
    why = "it is a folder" if path.is_dir() else "" if path.parent.is_dir() else missing
    if why:
        raise UserError(f"{flag} {path}: cannot be written: {why}; for example {flag} {example}")


def write(page: Page, path: Path) -> None:
    """Write the page as one HTML file.

    Args:
        page: The page.
        path: The file to write; an existing file is overwritten.

    Raises:
        UserError: If the file cannot be written.
    """
    try:
        path.write_text(html(page), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror}; for example --out report.html") from error
