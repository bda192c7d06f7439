"""Consent to run Python files: a recipe, a run folder or a model file may name them, and importing a file executes it.

A file is imported only after one of these:

- The user named the file on the command line or in an argument of a public Python function (`allow`).
- The user trusts the recipe, folder or model that names it: `trust_code=True` in Python (`trust`), `--trust-code` or a
  question at a terminal on the command line (`deciding`).

Consent covers the content that a file had when consent was given, identified by its SHA-256. It is not a sandbox: the
file may do anything, and may import anything from its folder.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from fedloom.core.errors import UserError

VARIABLE = "FEDLOOM_ALLOWED_CODE"
"""Environment variable that passes consent to child processes: JSON, hashes by path."""
PATHS = ("out", "dir", "data_dir", "data.dir", "model.weights")
"""Fields that are paths. They never give consent, because other code may fill them in from untrusted input."""
LONGEST = 4096
"""Maximum length of a text that is searched for file names."""
_NAME_END = re.compile(r"\.py(?=:[^\W\d]|$)")
_BREAK = re.compile(r"[\s=,;+:\"'(){}\[\]]")
log = logging.getLogger("fedloom")


@dataclass(frozen=True)
class CodeFile:
    """A Python file to be imported, and the hash of its content."""

    path: Path
    sha256: str
    named_by: str = ""
    """The setting that names it: `method.name = 'mine.py:Mine'`."""


Decide = Callable[[CodeFile], bool]
"""Asks the user about a file, or reports it; returns whether the file may be imported."""


def _inherited() -> dict[str, str]:
    try:
        found = json.loads(os.environ.get(VARIABLE, "{}"))
    except ValueError:
        return {}
    return {str(path): str(sha256) for path, sha256 in found.items()} if isinstance(found, dict) else {}


_allowed: dict[str, str] = _inherited()
"""SHA-256 of the content that may be executed, by resolved path."""
_decide: Decide | None = None


def allow(*values: Any) -> None:
    """Allow the files that the user's arguments name: `path/file.py:Name` in strings, mappings and lists.

    >>> allow("here/mine.py:Mine+ft", {"model": {"name": "net.py:Net"}})
    """
    for path in named_files(values):
        _allowed[str(path)] = sha256_of(path.read_bytes())


def allow_fields(fields: Mapping[str, Any]) -> None:
    """Allow the files that the user's settings name, except in fields that are paths to read from or write to."""
    allow({name: value for name, value in fields.items() if name not in PATHS})


def trust(*values: Any) -> None:
    """Allow the files that untrusted input names, and log each with its SHA-256."""
    for path in named_files(values):
        _allowed[str(path)] = sha256_of(path.read_bytes())
        log.warning("trust_code: importing %s (SHA-256 %s)", path, _allowed[str(path)])


def allow_hashes(hashes: Mapping[str, str]) -> None:
    """Adopt consent that the user gave in another process: hashes by path."""
    _allowed.update(hashes)


def hashes(*values: Any) -> dict[str, str]:
    """Return the consent to the files named in these values, for `allow_hashes`."""
    return {str(path): _allowed[str(path)] for path in named_files(values) if str(path) in _allowed}


def environment() -> dict[str, str]:
    """Return the environment variable that passes consent to a child process; empty if there is no consent."""
    return {VARIABLE: json.dumps(_allowed)} if _allowed else {}


def is_allowed(path: Path) -> bool:
    """Return whether the user has consented to this file (a resolved path)."""
    return str(path) in _allowed


def not_allowed(*values: Any) -> list[Path]:
    """Return the files named in these values without the user's consent. Does not ask or import."""
    return [path for path in named_files(values) if not is_allowed(path)]


def consented(path: Path, named_by: str) -> str:
    """Return the SHA-256 of the content that may be executed; asks the user if a callback is installed.

    Args:
        path: The resolved path of the file.
        named_by: The setting that names the file, for messages.

    Raises:
        UserError: There is no consent.
    """
    if (known := _allowed.get(str(path))) is not None:
        return known
    file = CodeFile(path, sha256_of(path.read_bytes()), named_by)
    if _decide is None or not _decide(file):
        raise UserError(
            f"{named_by}: {path} (SHA-256 {file.sha256}) is not imported without your consent, because importing it "
            "runs it and what it imports from its folder; read it, then pass --trust-code, or name the file on the "
            "command line (in Python: trust_code=True)"
        )
    _allowed[str(path)] = file.sha256
    return file.sha256


def require(named_by: str, *values: Any) -> None:
    """Ask for consent to every file in these values that has none yet; `named_by` describes where they are named.

    Raises:
        UserError: The user does not consent.
    """
    for path in not_allowed(*values):
        consented(path, named_by)


@contextmanager
def deciding(decide: Decide | None) -> Iterator[None]:
    """Use this callback for files without consent within the context; None rejects them."""
    global _decide
    before, _decide = _decide, decide
    try:
        yield
    finally:
        _decide = before


def settle() -> None:
    """Reject all files without consent from now on, for instance files named in a server's message."""
    global _decide
    _decide = None


@contextmanager
def scope() -> Iterator[None]:
    """Revoke consent given inside the context when it ends."""
    before = dict(_allowed)
    with deciding(_decide):
        try:
            yield
        finally:
            _allowed.clear()
            _allowed.update(before)


def resume_command(folder: Path, *values: Any) -> str:
    """Return the command that resumes a run, with `--trust-code` if its recipe names files that are allowed now.

    A deployment's run, in SERVER/runs/NAME, is resumed by its server.
    """
    trust = " --trust-code" if hashes(*values) else ""
    server = deployment_of(folder)
    if server is None:
        return f"fedloom resume {quote(str(folder))}{trust}"
    name = Path(os.path.abspath(folder)).name
    recipe = quote(str(server / "recipes" / f"{name}.yaml"))
    return f"fedloom deploy start {recipe} --folder {quote(str(server))} --name {quote(name)}{trust}"


def deployment_of(folder: Path) -> Path | None:
    """Return the server's folder of a deployment's run, which is in SERVER/runs/NAME; None for other runs."""
    run = Path(os.path.abspath(folder))
    server = run.parent.parent
    is_its = run.parent.name == "runs" and os.path.exists(server / "recipes" / f"{run.name}.federation")
    return server if is_its else None


def sha256_of(source: bytes) -> str:
    """Return the hash that identifies a file's content."""
    return hashlib.sha256(source).hexdigest()


def named_files(value: Any) -> Iterator[Path]:
    """Yield the existing files that are named in nested values, as resolved paths.

    In `method.name=a+b/mine.py:Mine+ft` a path may start after any separator: every start that gives an existing file
    counts.
    """
    if isinstance(value, Mapping):
        yield from named_files(list(value.values()))
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from named_files(one)
    elif isinstance(value, (str, Path)) and len(str(value)) <= LONGEST:
        yield from _files_in(str(value))


def _files_in(text: str) -> Iterator[Path]:
    for found in _NAME_END.finditer(text):
        starts = [0, *(mark.end() for mark in _BREAK.finditer(text, 0, found.start()))]
        for start in starts:
            try:
                path = Path(text[start : found.end()]).expanduser().resolve()
                if path.is_file():
                    yield path
            except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
                continue
