"""Files that are there wholly or not at all, also after a crash or on a full disk."""

import os
from contextlib import suppress
from pathlib import Path

from fedloom.core.errors import UserError

TEMPORARY = ".tmp"


def write_whole(path: Path, data: bytes, *, private: bool = False) -> None:
    """Puts bytes at this path: temporary name, fsync, rename, fsync of the folder. The old ones stay till then.

    A `private` file is readable by its owner alone.
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
    """Makes names in a folder as durable as the files: renames, new files, new folders."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> UserError:
    """What a user is told when a file cannot be written."""
    return UserError(
        f"'{path}' cannot be written: {error.strerror or error}; what was there before is intact. "
        "Make room or give permission, then go on from the last checkpoint with `fedloom resume RUN`"
    )
