"""A lock that allows one process per run folder, on local and shared file systems.

The lock is a POSIX record lock on the file `.lock`. The kernel, or the file server, releases it when its owner dies, on
any machine; forked workers do not inherit it. The file names the owner. On file systems without such locks, and where a
state is only shown, this entry decides: an owner on this machine is looked up by pid and start time. An owner on
another machine is alive while it renews the time of the file (every `BEAT` seconds); it counts as dead after `STALE`
seconds.
"""

import errno
import json
import logging
import os
import socket
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Event, Lock, Thread
from time import time
from typing import Any, Literal

from fedloom.core.errors import UserError, printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
TAKEN = (errno.EACCES, errno.EAGAIN)
BEAT = 30.0
"""Seconds between renewals of the file's time."""
STALE = 600.0
"""Age of the file from which on an owner on another machine counts as dead: file servers stall for minutes."""
log = logging.getLogger("fedloom")
_guard = Lock()
"""Held while a lock file is open: closing a file releases all record locks of this process on it."""
_ours: set[str] = set()
"""Folders that this process has locked: a record lock does not exclude the process that holds it."""


_ahead: dict[int, float] = {}
"""Seconds by which a file system's clock is ahead of this machine's, by device; measured when it matters."""


class RunLock:
    """A lock on a run folder, held from construction until `release`.

    Attributes:
        lost: What took the lock over, in words, because this process seemed to have ended; empty while it is held.

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
        self.lost = ""
        self._released = Event()
        self._thread = Thread(target=self._keep, name="fedloom lock", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._released.wait(BEAT) and not self.lost:
            self.beat()

    def beat(self) -> None:
        """Renew the time of the file, unless another process has taken it over."""
        with suppress(OSError):  # for example, the file server cannot be reached: tried again
            if (owner := _read(self._file)) and owner != self._entry:
                self.lost = _words(owner)
            else:
                os.utime(self.path)  # now, by the file system's clock

    def _open(self) -> int:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                owner = _read(file)
                if not _lock(file, owner, self.path):
                    raise _refusal(self.path.parent, owner)
                if not _still_at(self.path, file):  # the owner released the lock, which removes the file, in between
                    os.close(file)
                    continue
                if owner:
                    log.warning(
                        "%s belongs to a process that has ended (%s): its lock is taken over", self.path, _words(owner)
                    )
                self._entry = _me()
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(self._entry).encode(), 0)
            except BaseException:
                with suppress(OSError):
                    os.close(file)
                raise
            return file

    def release(self) -> None:
        """Remove the file and release the lock."""
        if self._key in _ours:
            self._released.set()
            self._thread.join(timeout=1)  # longer only if the file server cannot be reached
            with suppress(OSError):
                if not self.lost:
                    self.path.unlink(missing_ok=True)
            os.close(self._file)
            _ours.discard(self._key)


def _lock(file: int, owner: dict[str, Any], path: Path) -> bool:
    """Try to take the lock and return whether it was free; without lock support, the owner's entry decides."""
    if fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in TAKEN:
                return False
    return not owner or not alive(owner, path)


def alive(owner: dict[str, Any], path: Path) -> bool:
    """Return whether the owner of a lock file may still be running; one of unknown state may be."""
    if owner.get("host") != socket.gethostname() or os.name != "posix":
        # fedloom 0.1 did not renew the time
        return not owner.get("renewed") or (age := _age(path)) is None or age <= STALE
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


def _age(path: Path) -> float | None:
    """Return how many seconds ago a file's time was set, by the file system's clock; None if that is unknown."""
    try:
        found = path.stat()
    except OSError:
        return None
    age = time() - found.st_mtime
    if found.st_dev not in _ahead and not 0 <= age <= STALE:  # old, or one of the clocks is wrong
        # if the folder can only be read, this machine's clock has to do
        with suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as file:
            os.utime(file.name)
            _ahead[found.st_dev] = os.stat(file.name).st_mtime - time()
    return age + _ahead.get(found.st_dev, 0)


def holder(folder: Path) -> Literal["alive", "dead"] | None:
    """Return whether the process that locked a folder still runs; None if the folder is not locked."""
    with _guard:
        if os.path.realpath(folder) in _ours:
            return "alive"
        try:
            owner = json.loads((folder / NAME).read_bytes()[:4096] or b"{}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return "alive"
    return "alive" if not isinstance(owner, dict) or not owner or alive(owner, folder / NAME) else "dead"


def _me() -> dict[str, Any]:
    since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    return {
        "pid": os.getpid(), "host": socket.gethostname(), "since": since, "began": _began(os.getpid()), "renewed": True,
    }  # fmt: skip


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
    age = _age(folder / NAME) if owner.get("renewed") else None
    silent = "" if age is None or age < 3 * BEAT else f", last sign of life {age / 60:.0f} minutes ago"
    return UserError(
        f"out = '{folder}': another process is using this folder ({_words(owner)}{silent}); wait for it, stop it, or "
        f"choose another folder. If you are sure that it has ended, remove {folder / NAME}"
    )
