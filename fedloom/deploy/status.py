"""State of a federation, from the server's folder and Flower: members, runs, certificates, refusals."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedloom.core.errors import RunError
from fedloom.deploy.active import ActiveRun
from fedloom.deploy.certificates import expiry_warning, read_certificate
from fedloom.deploy.control import RunState, controlling
from fedloom.deploy.events import CONTACTS, SERVER, Event, read_events, sentence
from fedloom.deploy.terms import FederationTerms

SHOWN_EVENTS = 12
REFUSED_SECONDS = 120.0
"""Age up to which a refusal is shown as the state of a member: a client that is refused asks again every 5 s, and each
minute is logged."""


FROM_ANOTHER = ("duplicate", "signature")
"""Reasons to refuse a client that is perhaps not the organisation, which may be connected at the same time."""


@dataclass
class MemberState:
    """State of an organisation."""

    name: str
    state: str
    """online, offline, refused, revoked, or `without key`."""
    contact: str | None = None
    """Time of its last request."""
    address: str | None = None
    clock_ahead: float | None = None
    refusal: str | None = None
    """Its last refusal since it was connected."""
    updates: int = 0
    """Answers in the current run."""
    bytes_sent: int = 0
    """Bytes of these answers, which left the organisation."""

    @property
    def line(self) -> str:
        """One line of text."""
        parts = [self.state]
        if self.contact is not None:
            parts.append(f"last contact {ago(self.contact)}")
        if self.clock_ahead is not None and abs(self.clock_ahead) >= 1:
            parts.append(f"clock {self.clock_ahead:+.1f} s")
        if self.bytes_sent:
            parts.append(f"{self.updates} answers, {size(self.bytes_sent)}")
        return f"{self.name}: {', '.join(parts)}" + (f": {self.refusal}" if self.refusal else "")


@dataclass
class FederationState:
    """State of a federation."""

    name: str
    server: str
    """`running`, or why it does not answer."""
    members: list[MemberState]
    runs: list[RunState]
    run: str | None
    """Name of the current or last run."""
    round: int
    rounds: int
    certificates: dict[str, str]
    """End of each certificate, by file."""
    warnings: list[str]
    events: list[Event] = field(default_factory=list)
    """The last events, oldest first."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as values for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the state as lines of text."""
        yield f"server: {self.server}"
        for member in self.members:
            yield member.line
        if self.run is not None:
            yield f"run '{self.run}': round {self.round} of {self.rounds}"
        for run in self.runs:
            yield f"Flower's run {run.number}: {' '.join(filter(None, (run.status, run.outcome, run.details)))}"
        for name, end in self.certificates.items():
            yield f"{name}: valid until {end}"
        for why in self.warnings:
            yield f"warning: {why}"
        if self.events:
            yield "last events:"
        for event in self.events:
            yield f"  {event['at']} {sentence(event)}"


def federation_state(folder: Path) -> FederationState:
    """Return the state of the federation of a server's folder; the server need not run.

    Args:
        folder: The server's folder.

    Raises:
        UserError: If the folder is not a server's folder.
    """
    federation = FederationTerms.load(folder)
    nodes: dict[str, str] = {}
    runs: list[RunState] = []
    server = "running"
    try:
        with controlling(folder) as flower:
            nodes, runs = flower.nodes(), flower.runs()
    except RunError as error:
        server = str(error)
    events = list(read_events(folder / SERVER))
    rounds = [event for event in events if event["event"] == "round"]
    active = ActiveRun.load(folder)
    run = active.run if active else rounds[-1]["run"] if rounds else None
    of_run = [event for event in rounds if event.get("run") == run]
    ends = {name: read_certificate(folder / name).not_valid_after_utc for name in ("server.pem", "ca.pem")}
    return FederationState(
        name=federation.name,
        server=server,
        members=[_member(name, folder, federation, nodes.get(name), events, run) for name in federation.organisations],
        runs=runs,
        run=run,
        round=of_run[-1]["round"] if of_run else 0,
        rounds=of_run[-1]["rounds"] if of_run else 0,
        certificates={name: f"{end:%Y-%m-%d %H:%M} UTC" for name, end in ends.items()},
        warnings=[why for name, end in ends.items() if (why := expiry_warning(name, end))],
        events=[event for event in events if event["event"] not in ("request", "answer")][-SHOWN_EVENTS:],
    )


def _member(
    name: str, folder: Path, federation: FederationTerms, node: str | None, events: list[Event], run: str | None
) -> MemberState:
    about = [event for event in events if event["who"] == name]
    last = next((one for one in reversed(about) if one["event"] in ("connected", "joined", "refused")), None)
    answers = [one for one in about if one["event"] == "answer" and one.get("run") == run]
    refused = last if last is not None and last["event"] == "refused" else None
    found = _contacts(folder).get(name, {})
    state = node or "offline"
    if name in federation.revoked:
        state = "revoked"
    elif not (folder / "organisations" / f"{name}.pub").exists():
        state = "without key"
    elif refused is not None and state == "online":
        state = "online" if refused.get("reason") in FROM_ANOTHER else "refused"
    elif refused is not None and _age(refused["at"]) < REFUSED_SECONDS:
        state = "refused"
    elif state == "registered":
        state = "offline"
    return MemberState(
        name=name, state=state, contact=found.get("at"), address=found.get("address"),
        clock_ahead=found.get("clock_ahead"),
        refusal=None if refused is None else f"({refused.get('reason')}) {refused.get('why')}",
        updates=len(answers), bytes_sent=sum(int(one.get("bytes", 0)) for one in answers),
    )  # fmt: skip


def _contacts(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / CONTACTS).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {}


def _age(when: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()


def ago(when: str) -> str:
    """Return the age of a time: `3 s ago`, `5 min ago`."""
    seconds = max(0.0, _age(when))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def size(count: int) -> str:
    """Return a number of bytes in a readable unit."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
