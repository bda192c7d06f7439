"""Findings about data: problems and facts, for `fedloom data check`."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
EXAMPLES = 3
"""Number of examples of a finding."""
UNEVEN = 20
"""The largest class may have this many times the pictures of the smallest without a warning."""


@dataclass(frozen=True)
class Finding:
    """A property of the data: a problem, or a fact worth knowing."""

    check: str
    """What was checked: `unreadable`, `near-duplicates across clients`, …"""
    severity: Severity
    """`error`: a run stops. `warning`: results may suffer. `info`: nothing to do."""
    count: int
    """Number of files (of folders or columns for findings about those); 0 for facts about all files."""
    text: str
    """What was found, and what to do about it."""
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fix:
    """What to do about one file or folder."""

    path: str
    """Relative to the checked folder; a column of a table."""
    check: str
    action: str


@dataclass
class DataCheck:
    """The findings of a check, errors first, and what to do about each file."""

    folder: Path
    files: int
    what: str = "pictures"
    """What was counted as `files`, in the plural."""
    classes: dict[str, int] = field(default_factory=dict)
    """Numbers of readable samples by class."""
    clients: dict[str, int] = field(default_factory=dict)
    """Numbers of readable samples by client; empty if there are none."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of pictures: smallest, median and largest width and height, and the number of distinct sizes."""
    findings: list[Finding] = field(default_factory=list)
    fixes: list[Fix] = field(default_factory=list)

    def number(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def add(
        self,
        check: str,
        severity: Severity,
        paths: Sequence[str],
        text: str,
        action: str = "",
        examples: Sequence[str] | None = None,
    ) -> None:
        """Add a finding about files, folders or columns, and, unless it is only information, what to do about each."""
        if not paths:
            return
        shown = tuple((paths if examples is None else examples)[:EXAMPLES])
        self.findings.append(Finding(check, severity, len(paths), text, shown))
        if action and severity != "info":
            self.fixes += [Fix(path, check, action) for path in paths]

    def fact(self, check: str, text: str, severity: Severity = "info", examples: Sequence[str] = ()) -> None:
        """Add a finding about all data."""
        self.findings.append(Finding(check, severity, 0, text, tuple(examples)[:EXAMPLES]))

    def add_balance(self, labels: Sequence[str], clients: Sequence[str]) -> None:
        """Count classes and clients of the samples (`clients` is empty if there are none), and judge the counts."""
        by_class = Counter(labels)
        self.classes = dict(sorted(by_class.items()))
        if by_class:
            (largest, most), (smallest, least) = by_class.most_common()[0], by_class.most_common()[-1]
            middle = np.median(list(by_class.values()))
            text = f"{len(by_class):,} classes of {least:,} ('{smallest}') to {most:,} ('{largest}') {self.what}, "
            uneven = most > UNEVEN * least
            self.fact("class balance", f"{text}median {middle:,.0f}", "warning" if uneven else "info")
        if len(by_class) == 1:
            self.fact("one class", f"all {self.what} are of the class '{next(iter(by_class))}': add others", "error")
        if not clients:
            return
        classes = defaultdict(set)
        for client, label in zip(clients, labels, strict=True):
            classes[client].add(label)
        by_client = Counter(clients)
        self.clients = dict(sorted(by_client.items()))
        sizes = by_client.values()
        self.fact("clients", f"{len(by_client):,} clients of {min(sizes):,} to {max(sizes):,} {self.what}")
        single = sorted(client for client in classes if len(classes[client]) == 1)
        text = f"clients with {self.what} of one class learn to answer only that class: add other classes"
        self.add("clients with a single class", "warning", single, text)

    def sort(self) -> "DataCheck":
        """Put errors first; return the check."""
        self.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        return self
