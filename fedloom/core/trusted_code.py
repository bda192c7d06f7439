"""Consent to run Python files: a recipe, a run folder or a model file may name them, and importing one runs it.

A file is imported only after one of these:

- the user named it: on the command line, or in an argument of a public Python function (`allow`);
- the user trusts what was read: `trust_code=True` in Python (`trust`), `--trust-code` or a question at a terminal on
  the command line (`deciding`).

Consent covers a file's content, by its SHA-256, as it was when consent was given. It is not a sandbox: the file may do
anything, and may import whatever is in its folder.
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
from typing import Any

from fedloom.core.errors import UserError

VARIABLE = "FEDLOOM_ALLOWED_CODE"
"""Passes consent to child processes: JSON, hashes by path."""
PATHS = ("out", "dir", "data_dir", "data.dir")
"""Fields that are paths: other code may fill them in, out of what was read."""
LONGEST = 4096
"""Characters of a text that may name files."""
_NAME_END = re.compile(r"\.py(?=:[^\W\d]|$)")
_BREAK = re.compile(r"[\s=,;+:\"'(){}\[\]]")
log = logging.getLogger("fedloom")


@dataclass(frozen=True)
class CodeFile:
    """A Python file that something wants to import, and the hash of its content."""

    path: Path
    sha256: str
    said: str = ""
    """What names it: `method.name = 'mine.py:Mine'`."""


Decide = Callable[[CodeFile], bool]
"""Asks the user, or reports the file; returns whether it may be imported."""


def _inherited() -> dict[str, str]:
    try:
        found = json.loads(os.environ.get(VARIABLE, "{}"))
    except ValueError:
        return {}
    return {str(path): str(sha256) for path, sha256 in found.items()} if isinstance(found, dict) else {}


_allowed: dict[str, str] = _inherited()
"""SHA-256 of the content that may be run, by resolved path."""
_decide: Decide | None = None


def allow(*values: Any) -> None:
    """Allows the files that the user's own arguments name: `path/file.py:Name` in texts, mappings and lists.

    >>> allow("here/mine.py:Mine+ft", {"model": {"name": "net.py:Net"}})
    """
    for path in _files(values):
        _allowed[str(path)] = sha256_of(path.read_bytes())


def allow_fields(fields: Mapping[str, Any]) -> None:
    """Allows the files that the user's own settings name, by field; a path to write to or to read from names none."""
    allow({name: value for name, value in fields.items() if name not in PATHS})


def trust(*values: Any) -> None:
    """Allows the files that were named by something that was read, and logs each with its SHA-256."""
    for path in _files(values):
        _allowed[str(path)] = sha256_of(path.read_bytes())
        log.warning("trust_code: importing %s (SHA-256 %s)", path, _allowed[str(path)])


def allow_hashes(hashes: Mapping[str, str]) -> None:
    """Takes over consent that another process of this user has, by path."""
    _allowed.update(hashes)


def hashes(*values: Any) -> dict[str, str]:
    """Consent to the files that are named in these values, for `allow_hashes`."""
    return {str(path): _allowed[str(path)] for path in _files(values) if str(path) in _allowed}


def environment() -> dict[str, str]:
    """The environment variable that passes consent to a child process; empty without any."""
    return {VARIABLE: json.dumps(_allowed)} if _allowed else {}


def is_allowed(path: Path) -> bool:
    """Whether the user has consented to this file (a resolved path)."""
    return str(path) in _allowed


def not_allowed(*values: Any) -> list[Path]:
    """The files that are named in these values without the user's consent; nothing is asked or imported."""
    return [path for path in _files(values) if not is_allowed(path)]


def consented(path: Path, said: str) -> str:
    """The SHA-256 of what may be run of this file (a resolved path); asks where a callback was installed.

    Raises:
        UserError: There is no consent.
    """
    if (known := _allowed.get(str(path))) is not None:
        return known
    file = CodeFile(path, sha256_of(path.read_bytes()), said)
    if _decide is None or not _decide(file):
        raise UserError(
            f"{said}: {path} (SHA-256 {file.sha256}) is not imported without your consent, because importing it runs "
            "it and what it imports from its folder; read it, then pass --trust-code, or name the file on the command "
            "line (in Python: trust_code=True)"
        )
    _allowed[str(path)] = file.sha256
    return file.sha256


def require(said: str, *values: Any) -> None:
    """Asks about every file in these values that has no consent yet, or raises; `said` is what names them."""
    for path in not_allowed(*values):
        consented(path, said)


@contextmanager
def deciding(decide: Decide | None) -> Iterator[None]:
    """Asks this callback about files without consent, for a while; None refuses them."""
    global _decide
    before, _decide = _decide, decide
    try:
        yield
    finally:
        _decide = before


def settle() -> None:
    """Refuses all files without consent from here on: nobody is asked when a server's message names one."""
    global _decide
    _decide = None


@contextmanager
def scope() -> Iterator[None]:
    """Forgets, at its end, the consent that was given inside it."""
    before = dict(_allowed)
    with deciding(_decide):
        try:
            yield
        finally:
            _allowed.clear()
            _allowed.update(before)


def resume_command(folder: Path, *values: Any) -> str:
    """The command that resumes what is in a folder, with the flag that it needs if it names files already allowed."""
    return f"fedloom resume {folder}{' --trust-code' if hashes(*values) else ''}"


def sha256_of(source: bytes) -> str:
    """The hash by which consent is remembered."""
    return hashlib.sha256(source).hexdigest()


def _files(value: Any) -> Iterator[Path]:
    """Existing files that are named in nested values, resolved.

    In `method.name=a+b/mine.py:Mine+ft` a path may begin after any mark: each beginning that gives a file counts.
    """
    if isinstance(value, Mapping):
        yield from _files(list(value.values()))
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _files(one)
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
