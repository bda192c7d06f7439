"""How much memory is free; images that would not fit into it are refused before they are made."""

import os
from pathlib import Path

from fedloom.errors import UserError


def refuse_without_room(size: int, what: str) -> None:
    """Before images are made at another size."""
    room = free_memory()
    if room is not None and size > room:
        raise UserError(
            f"{what}: the images would take {gigabytes(size)}, and {gigabytes(room)} are free; use fewer pixels"
        )


def free_memory() -> int | None:
    """Bytes that could be had, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def gigabytes(size: int) -> str:
    """For messages."""
    return f"{size / 1e9:,.1f} GB"
