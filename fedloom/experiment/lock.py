"""One process per run folder. A lock that its owner's death releases, on local and shared file systems.

The lock is a POSIX record lock on `.lock`: the kernel, or the file server, drops it when the owner dies, on whichever
machine; forked workers do not inherit it. The file says who holds it. Where a file system knows no such locks, that is
all there is to go by: an owner on this machine is looked up by pid and start time, one elsewhere counts as alive.
"""

import errno
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
TAKEN = (errno.EACCES, errno.EAGAIN)
log = logging.getLogger("fedloom")
_ours: set[str] = set()
"""Folders that this process holds: a record lock is no bar to the process that has it."""


class RunLock:
    """Held from construction until `release`; who comes second gets a UserError that names the first."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._key = os.path.realpath(folder)
        if self._key in _ours:
            raise _refusal(folder, _me())
        try:
            self._file = self._open()
        except OSError as error:
            raise UserError(
                f"out = '{folder}' cannot be written: {error.strerror}; mend that, or choose another folder"
            ) from error
        _ours.add(self._key)

    def _open(self) -> int:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                owner = _read(file)
                if not _lock(file, owner):
                    raise _refusal(self.path.parent, owner)
                if not _still_at(self.path, file):  # its owner released it, and so removed it, in between
                    os.close(file)
                    continue
                if owner:
                    log.warning("%s was left by a process that has ended (%s): taken over", self.path, _words(owner))
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(_me()).encode(), 0)
            except BaseException:
                with suppress(OSError):
                    os.close(file)
                raise
            return file

    def release(self) -> None:
        """Removes the file and lets go."""
        if self._key in _ours:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            _ours.discard(self._key)


def _lock(file: int, owner: dict[str, Any]) -> bool:
    """Whether the lock was free; by what the file says of its owner where locks do not exist."""
    if fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in TAKEN:
                return False
    return not owner or not alive(owner)


def alive(owner: dict[str, Any]) -> bool:
    """Whether the process that wrote this may still run. One on another machine, or unknown here, may."""
    if owner.get("host") != socket.gethostname() or os.name != "posix":
        return True
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, KeyError, ValueError, TypeError, OverflowError):
        return True
    return owner.get("began") in (None, _began(int(owner["pid"])))  # else the number has gone to another process


def _me() -> dict[str, Any]:
    since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "began": _began(os.getpid())}


def _began(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _read(file: int) -> dict[str, Any]:
    """What the file says of its owner; nothing if it is new, or was written half."""
    try:
        owner = json.loads(os.pread(file, 4096, 0) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _still_at(path: Path, file: int) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(file))


def _words(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"


def _refusal(folder: Path, owner: dict[str, Any]) -> UserError:
    return UserError(
        f"out = '{folder}': another process works on this run ({_words(owner)}); wait for it, stop it, or choose "
        f"another folder. If it surely has ended, remove {folder / NAME}"
    )
