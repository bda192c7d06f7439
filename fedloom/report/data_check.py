"""The findings of `fedloom data check` as a table, as JSON and as a list of fixes."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.core.errors import printable
from fedloom.data.findings import SEVERITIES, DataCheck

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


def check_table(found: DataCheck) -> Table:
    """Return a table with a row per finding, errors first."""
    table = Table()
    table.add_column("severity")
    table.add_column("check")
    table.add_column("files", justify="right")
    table.add_column("what, and examples", overflow="fold")
    for finding in found.findings:
        lines = "\n".join([finding.text, *(f"  {example}" for example in finding.examples)])
        count = f"{finding.count:,}" if finding.count else "all"
        cells = (finding.check, count, printable(lines))
        table.add_row(Text(finding.severity, STYLES[finding.severity]), *(Text(cell) for cell in cells))
    return table


def check_json(found: DataCheck) -> dict[str, Any]:
    """Return the findings as a JSON-compatible dictionary."""
    return {
        "folder": str(found.folder),
        "files": found.files,
        "what": found.what,
        **{f"{severity}s" if severity != "info" else severity: found.number(severity) for severity in SEVERITIES},
        "classes": found.classes,
        "clients": found.clients,
        "sizes": found.sizes,
        "findings": [asdict(finding) for finding in found.findings],
    }


def fix_lines(found: DataCheck) -> Iterator[str]:
    """Yield a line per file and problem: path, check and action, separated by tabs."""
    for fix in found.fixes:
        yield "\t".join(_one_field(text) for text in (fix.path, fix.check, fix.action)) + "\n"


def _one_field(text: str) -> str:
    return text.replace("\\", r"\\").replace("\t", r"\t").replace("\n", r"\n").replace("\r", r"\r")
