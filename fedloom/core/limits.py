"""Memory limits: objects that do not fit into memory are rejected before they are allocated."""

import os
from pathlib import Path

from fedloom.core.errors import UserError


def refuse_without_room(size: int, what: str, remedy: str = "use fewer pixels", thing: str = "the images") -> None:
    """Check that `size` bytes of memory are free; call it before they are read or allocated.

    Args:
        size: Bytes needed.
        what: The field or file; start of the error message.
        remedy: What the user can do; end of the error message.
        thing: What needs the memory.

    Raises:
        UserError: There is too little memory.
    """
    room = free_memory()
    if room is not None and size > room:
        raise UserError(f"{what}: {thing} would take {gigabytes(size)}, but only {gigabytes(room)} are free; {remedy}")


def free_memory() -> int | None:
    """Return the bytes that this process can still allocate, limited by the machine, its cgroup and resource limits."""
    known = [size for size in (_of_machine(), _of_cgroup(), _of_process()) if size is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _of_cgroup() -> int | None:
    """Return the free memory of a container (cgroup v2). Page cache that the kernel can drop counts as free."""
    folder = Path("/sys/fs/cgroup")
    try:
        most = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, StopIteration, ValueError):  # no cgroup v2, or no limit ("max")
        return None
    return max(0, most - used + cached)


def _of_process() -> int | None:
    """Return the memory that `ulimit -v` and `ulimit -d` leave."""
    try:
        import resource

        pages = [int(field) for field in Path("/proc/self/statm").read_text().split()]
    except (ImportError, OSError, ValueError):
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    used = {resource.RLIMIT_AS: pages[0] * page, resource.RLIMIT_DATA: pages[5] * page}
    limits = {kind: resource.getrlimit(kind)[0] for kind in used}
    left = [max(0, limit - used[kind]) for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return min(left, default=None)


def gigabytes(size: int) -> str:
    """Format a number of bytes for messages."""
    return f"{size / 1e9:,.1f} GB"
