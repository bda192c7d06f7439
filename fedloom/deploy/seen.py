"""Requests that an organisation has been asked, on its disk: a signed one is obeyed once, whoever sends it again."""

import os
from pathlib import Path

from fedloom.core.message import refuse_unless


class Seen:
    """Names of requests, a line of a file each."""

    def __init__(self, folder: Path):
        self._path = folder / "seen.txt"
        self._names = set(self._path.read_text(encoding="ascii").split()) if self._path.exists() else set()

    def add(self, name: str) -> None:
        """Notes a request before it is obeyed; the second time it is a MessageError."""
        refuse_unless(name not in self._names, "it has come before; somebody sends it again")
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"\n{name}")  # the line break first: a name that a crash cut short spoils no other
            file.flush()
            os.fsync(file.fileno())
        self._names.add(name)
