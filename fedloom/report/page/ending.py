"""Report sections with failures, logs and recipes."""

from collections.abc import Sequence

import yaml

from fedloom.core.trusted_code import resume_command
from fedloom.report.page.figure import Cell, Column, PageSection, Table
from fedloom.report.page.runs import Entry


def failures(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Failures and notes": clients left out of rounds, notes and logs."""
    runs = [(entry, run) for entry in entries for run in entry.runs]
    rows, notes = [], []
    for entry, run in runs:
        summary = run.summary
        for kind, count in (summary.get("failed") or {}).items():
            where = [Cell(entry.label, entry.label), Cell(str(run.seed), run.seed)]
            rows.append([*where, Cell(kind.replace("_", " "), kind), Cell(f"{count:,}", count)])
        notes += [note for note in summary.get("notes", []) if note not in notes]
    head = [Column("method"), Column("seed"), Column("failure"), Column("count")]
    caption = "Clients that were left out of a round." if rows else "No client was left out of a round."
    return PageSection(
        "failures", "Failures and notes", " ".join([caption, *(f"Note: {note}." for note in notes)]),
        tables=[*_unfinished(entries), *([Table("failures", head, rows)] if rows else [])],
        texts=[(f"log: {entry.label}, seed {run.seed}", "\n".join(run.log)) for entry, run in runs if run.log],
    )  # fmt: skip


def _unfinished(entries: Sequence[Entry]) -> list[Table]:
    """Return the table of runs that were stopped, killed or failed, with the command that resumes them."""
    rows, groups = [], []
    for entry in entries:
        for run in entry.runs:
            if run.done is None and run.state != "running":
                cells = [entry.label, str(run.seed), run.state, f"{len(run.history)} of {run.rounds}"]
                command = resume_command(run.path)
                rows.append([*(Cell(text, text) for text in cells), Cell(run.error or "–"), Cell(command)])
                groups.append(entry.group)
    if not rows:
        return []
    head = [*map(Column, ("method", "seed", "state", "rounds", "error", "command to resume"))]
    return [Table("unfinished", head, rows, groups, "Runs that did not finish. Their results so far are included.")]


def recipes(entries: Sequence[Entry]) -> PageSection:
    """Return the section "Recipe": the recipes with all fields, and the versions of the software."""
    texts = []
    for entry in entries:
        text = yaml.safe_dump(entry.first.recipe, sort_keys=False, allow_unicode=True, width=100)
        seeds = ", ".join(str(run.seed) for run in entry.runs)
        texts.append((f"{entry.label} (seeds {seeds})" if len(entry.runs) > 1 else entry.label, text))
    found = {name: version for entry in entries for run in entry.runs for name, version in run.versions.items()}
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    return PageSection(
        "recipes",
        "Recipe",
        f"To repeat a run, save its recipe as a file and call `fedloom run FILE`. Versions: {versions}.",
        texts=texts,
    )
