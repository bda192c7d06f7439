"""A lock that allows one process per run folder, on local and shared file systems.

The lock is a POSIX record lock on the file `.lock`. The kernel, or the file server, releases it when its owner dies, on
any machine; forked workers do not inherit it. The file names the owner. On file systems without such locks, this entry
decides: an owner on this machine is looked up by pid and start time, and an owner on another machine counts as alive.
"""

import errno
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from fedloom.core.errors import UserError, printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
TAKEN = (errno.EACCES, errno.EAGAIN)
log = logging.getLogger("fedloom")
_guard = Lock()
"""Held while a lock file is open: closing a file releases all record locks of this process on it."""
_ours: set[str] = set()
"""Folders that this process has locked: a record lock does not exclude the process that holds it."""


class RunLock:
    """A lock on a run folder, held from construction until `release`.

    Raises:
        UserError: Another process holds the lock (the message names it), or the folder cannot be written.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._key = os.path.realpath(folder)
        if self._key in _ours:
            raise _refusal(folder, _me())
        try:
            with _guard:
                self._file = self._open()
                _ours.add(self._key)
        except OSError as error:
            raise UserError(
                f"out = '{folder}' cannot be written: {error.strerror}; fix this, or choose another folder"
            ) from error

    def _open(self) -> int:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                owner = _read(file)
                if not _lock(file, owner):
                    raise _refusal(self.path.parent, owner)
                if not _still_at(self.path, file):  # the owner released the lock, which removes the file, in between
                    os.close(file)
                    continue
                if owner:
                    log.warning(
                        "%s belongs to a process that has ended (%s): its lock is taken over", self.path, _words(owner)
                    )
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(_me()).encode(), 0)
            except BaseException:
                with suppress(OSError):
                    os.close(file)
                raise
            return file

    def release(self) -> None:
        """Remove the file and release the lock."""
        if self._key in _ours:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            _ours.discard(self._key)


def _lock(file: int, owner: dict[str, Any]) -> bool:
    """Try to take the lock and return whether it was free; without lock support, the owner's entry decides."""
    if fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in TAKEN:
                return False
    return not owner or not alive(owner)


def alive(owner: dict[str, Any]) -> bool:
    """Return whether an owner may still be running; one on another machine, or of unknown state, may be."""
    if owner.get("host") != socket.gethostname() or os.name != "posix":
        return True
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, KeyError, ValueError, TypeError, OverflowError):
        return True
    state = _stat(int(owner["pid"]))
    if state and state[0] in "ZX":  # it has ended, but its parent has not asked for its exit code
        return False
    return owner.get("began") in (None, _began(int(owner["pid"])))  # otherwise the pid belongs to a newer process


def holder(folder: Path) -> Literal["alive", "dead"] | None:
    """Return whether the process that locked a folder still runs; None if the folder is not locked.

    A process on another machine counts as alive.
    """
    with _guard:
        if os.path.realpath(folder) in _ours:
            return "alive"
        try:
            owner = json.loads((folder / NAME).read_bytes()[:4096] or b"{}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return "alive"
    return "alive" if not isinstance(owner, dict) or not owner or alive(owner) else "dead"


def _me() -> dict[str, Any]:
    since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "began": _began(os.getpid())}


def _began(pid: int) -> str | None:
    """Return when a process was started, in kernel ticks (Linux only)."""
    state = _stat(pid)
    return state[19] if len(state) > 19 else None


def _stat(pid: int) -> list[str]:
    """Return a process's status from its state letter on (Linux only; empty elsewhere)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _read(file: int) -> dict[str, Any]:
    """Read the owner's entry; empty if the file is new or incomplete."""
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
    return printable(f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}")


def _refusal(folder: Path, owner: dict[str, Any]) -> UserError:
    return UserError(
        f"out = '{folder}': another process is using this folder ({_words(owner)}); wait for it, stop it, or choose "
        f"another folder. If you are sure that it has ended, remove {folder / NAME}"
    )
