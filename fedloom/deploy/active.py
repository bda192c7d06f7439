"""The run that a server resumes when it is restarted. Imports no torch: servers start fast."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

from fedloom.deploy.control import controlling
from fedloom.experiment.files import write_whole
from fedloom.experiment.lock import holder

RELEASE_SECONDS = 30.0
"""Seconds to wait for the process of an interrupted run to end before the run is resumed."""


@dataclass(frozen=True)
class ActiveRun:
    """The run that the server resumes if it is restarted, stored as `active.json`."""

    run: str
    wait: float
    timeout: float
    number: int
    """Flower's id of the run."""
    earlier: tuple[int, ...] = ()
    """Flower's ids of the run before the server was restarted."""

    @classmethod
    def load(cls, folder: Path) -> "ActiveRun | None":
        """Load the active run of a server's folder; None if there is none."""
        try:
            values = json.loads((folder / "active.json").read_text(encoding="utf-8"))
            return cls(**values | {"earlier": tuple(values["earlier"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def save(self, folder: Path) -> None:
        """Store the active run of a server's folder."""
        write_whole(folder / "active.json", json.dumps(asdict(self)).encode())

    @staticmethod
    def remove(folder: Path) -> None:
        """Forget the active run of a server's folder."""
        (folder / "active.json").unlink(missing_ok=True)


def resume_active(folder: Path, host: str = "127.0.0.1") -> str | None:
    """Resume the run that was active when the server ended.

    Args:
        folder: The server's folder.
        host: Address of the control port.

    Returns:
        Name of the run; None if no run was interrupted.
    """
    active = ActiveRun.load(folder)
    if active is None:
        return None
    with controlling(folder, host) as flower:
        if any(run.number == active.number for run in flower.runs()):
            return None  # the server was not restarted
        place, end = folder / "runs" / active.run, monotonic() + RELEASE_SECONDS
        while holder(place) == "alive" and monotonic() < end:
            sleep(0.3)
        if (place / "summary.json").exists():  # a run writes its summary last
            ActiveRun.remove(folder)
            return None
        number = flower.start(active.run, wait=active.wait, timeout=active.timeout)
    ActiveRun(active.run, active.wait, active.timeout, number, (*active.earlier, active.number)).save(folder)
    return active.run
