"""Atomic file writes: a file exists completely or not at all, even after a crash or on a full disk."""

import os
from contextlib import suppress
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.core.trusted_code import resume_command

TEMPORARY = ".tmp"


def write_whole(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file atomically: temporary name, fsync, rename, fsync of the folder; an old file stays until the rename.

    Args:
        path: Path of the file.
        data: Its contents.
        private: Make the file readable by its owner only.

    Raises:
        UserError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that renamed and new entries are as durable as the files' contents."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> UserError:
    """Return the error for a file that cannot be written."""
    # os.path.exists: Path.exists raises an error for a folder without permission
    run = next((folder for folder in path.parents if os.path.exists(folder / "metrics.jsonl")), None)
    how = "start again" if run is None else f"resume from the last checkpoint with: {resume_command(run)}"
    return UserError(
        f"'{path}' cannot be written: {error.strerror or error}; existing files are intact. Free disk space or grant "
        f"permission, then {how}"
    )
