"""Event logs: what happened in a federation, one JSON line with a time for each event.

The server writes `events.jsonl`, each organisation `audit.jsonl`. Both are only appended to. This module does not
import torch, because Flower's processes write events too.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

SERVER, AUDIT, CONTACTS = "events.jsonl", "audit.jsonl", "contacts.json"
TAIL_BYTES = 4 * 2**20
"""Largest part of a log that is read, from its end."""
REPEAT_SECONDS = 60.0
"""Seconds for which an event that repeats itself is not written again."""
REMEMBERED = 1000
log = logging.getLogger("fedloom")
Event = dict[str, Any]


def timestamp(when: datetime | None = None) -> str:
    """Return a time, by default the current one, as ISO 8601 in UTC with milliseconds."""
    return (when or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventLog:
    """An append-only log of events.

    Several processes may write to one file: a line is written by one call.

    Args:
        path: The file; None discards events.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self._written: dict[tuple[str, ...], float] = {}

    def add(self, event: str, who: str, **details: Any) -> None:
        """Write an event, and log it as a sentence.

        Args:
            event: Kind of the event, such as `joined` or `refused`.
            who: The party that it is about: an organisation, `server`, or an unknown key.
            details: Further fields; those that are None are left out.
        """
        entry: Event = {"at": timestamp(), "event": event, "who": who}
        entry |= {name: value for name, value in details.items() if value is not None}
        level = logging.WARNING if event in ("refused", "failed", "lost", "warning") else logging.INFO
        log.log(level, sentence(entry))
        if self.path is not None:
            line = json.dumps(entry, ensure_ascii=False) + "\n"
            with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
                file.write(line.encode())

    def add_once(self, event: str, who: str, *, reason: str, **details: Any) -> None:
        """Write an event unless the same event, party and reason were written in the last minute.

        So a client that tries again every second, or a stranger, cannot fill the disk.
        """
        now, key = monotonic(), (event, who, reason)
        if now - self._written.get(key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        if len(self._written) >= REMEMBERED:
            recent = {one: when for one, when in self._written.items() if now - when < REPEAT_SECONDS}
            if len(recent) >= REMEMBERED:
                return
            self._written = recent
        self._written[key] = now
        self.add(event, who, reason=reason, **details)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log, oldest first; of a long log only the last 4 MiB. Incomplete lines are skipped."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by the beginning of the part that is read, or by a crash
            continue
        if isinstance(entry, dict) and {"at", "event", "who"} <= entry.keys():
            yield entry


def sentence(entry: Mapping[str, Any]) -> str:
    """Return an event as a line of text without its time: `west refused (clock): its clock is 61 s ahead`."""
    reason = f" ({entry['reason']})" if "reason" in entry else ""
    shown = [f"{name} {_short(value)}" for name, value in entry.items() if name not in _SHOWN]
    text = f"{entry['who']} {entry['event']}{reason}"
    text += f": {entry['why']}" if entry.get("why") else ""
    return f"{text} [{', '.join(shown)}]" if shown else text


_SHOWN = ("at", "event", "who", "reason", "why")


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {one}" for name, one in value.items()) + "}"
    return str(value)
