"""An archive of a queue's results and unfinished runs, to carry between machines: `--carry FILE`."""

import os
import tarfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path, PurePosixPath

from fedloom.core.errors import UserError
from fedloom.experiment.checkpoint import Checkpoint, DamagedError
from fedloom.experiment.run_folder import METRICS, RECIPE, SUMMARY, VERSIONS
from fedloom.studies.outcome import CODE, MACHINES
from fedloom.studies.queue import QueuedRun
from fedloom.studies.table import RUNS

RESULTS, UNFINISHED = "results", "runs"
"""Folders in the archive."""
MANIFEST = "checkpoints/round-*.json"
ATTEMPTS = 3
Member = tuple[str, Path]
"""Name in the archive, and the file."""


def pack(file: Path, runs: Sequence[QueuedRun]) -> int:
    """Write the results of a queue, and of each unfinished run what resuming needs: its newest checkpoint.

    Models of finished runs, logs and older checkpoints are left out. An existing archive is replaced when the new one
    is complete.

    Args:
        file: The archive, a tar file.
        runs: The runs of the queue.

    Returns:
        The size of the archive in bytes.

    Raises:
        UserError: The file cannot be written.
    """
    temporary = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(temporary, "w") as archive:
            for run in runs:
                _add(archive, run)
        os.replace(temporary, file)
    except OSError as error:
        raise UserError(f"--carry {file}: cannot be written: {error.strerror}; choose another file") from None
    return file.stat().st_size


def unpack(file: Path, results: Path) -> tuple[int, int]:
    """Restore results and unfinished runs that are not here, or are further than those that are here.

    Args:
        file: An archive of `pack`.
        results: Folder of results.

    Returns:
        The number of restored results and of restored runs.

    Raises:
        UserError: The file is not such an archive.
    """
    try:
        with tarfile.open(file) as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            places = {member.name: _place(file, member.name, results) for member in members}
            reached = _rounds(places.values())
            later = {f for f, round in reached.items() if round > newest(f) and not (f / SUMMARY).exists()}
            restored = set()
            for member in members:
                place = places[member.name]
                folder = _folder(place)
                if place.exists() if folder is None else folder not in later:
                    continue
                data = archive.extractfile(member)
                assert data is not None
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data.read())
                restored.add(folder or place)
    except tarfile.TarError as error:
        raise UserError(
            f"--carry {file}: is not an archive of a queue ({error}); name a file that --carry wrote"
        ) from None
    except OSError as error:
        raise UserError(f"--carry {file}: cannot be unpacked: {error.strerror}") from None
    return len(restored - later), len(restored & later)


def newest(folder: Path) -> int:
    """Return the round of a run folder's newest checkpoint; 0 without."""
    return max(map(_round, folder.glob(MANIFEST)), default=0)


def _add(archive: tarfile.TarFile, run: QueuedRun) -> None:
    """Add a run's files. A run that is training may replace its checkpoint meanwhile: it is read before it is added."""
    for _ in range(ATTEMPTS):
        with suppress(FileNotFoundError):
            for name, data in [(name, path.read_bytes()) for name, path in _members(run)]:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, BytesIO(data))
            return


def _members(run: QueuedRun) -> list[Member]:
    """Return the files that a run needs on another machine: its result, or its newest checkpoint and its records."""
    if run.result.exists():
        return [(f"{RESULTS}/{run.result.parent.name}/{run.result.name}", run.result)]
    folder = run.recipe.out
    assert folder is not None
    if not (round := newest(folder)):
        return []
    manifest = next(path for path in folder.glob(MANIFEST) if _round(path) == round)
    try:
        needed = [manifest.with_name(name) for name in Checkpoint.from_json(manifest.read_bytes()).files]
    except DamagedError:
        return []
    here = [folder / name for name in (RECIPE, VERSIONS, METRICS, MACHINES, CODE)]
    found = [*(path for path in here if path.exists()), *needed, manifest]
    return [(f"{UNFINISHED}/{path.relative_to(RUNS).as_posix()}", path) for path in found]


def _place(file: Path, name: str, results: Path) -> Path:
    """Return where a file of the archive belongs."""
    top, *rest = PurePosixPath(name).parts
    if top not in (RESULTS, UNFINISHED) or ".." in rest or not rest:
        raise UserError(
            f"--carry {file}: is not an archive of a queue (it has '{name}'); name a file that --carry wrote"
        )
    return (results if top == RESULTS else RUNS).joinpath(*rest)


def _folder(place: Path) -> Path | None:
    """Return the run folder of a file; None for a result."""
    return RUNS.joinpath(*place.relative_to(RUNS).parts[:2]) if place.is_relative_to(RUNS) else None


def _rounds(places: Iterable[Path]) -> dict[Path, int]:
    """Return the round of each run in the archive."""
    return {folder: _round(place) for place in places if place.match(MANIFEST) and (folder := _folder(place))}


def _round(manifest: Path) -> int:
    number = manifest.stem.removeprefix("round-")
    return int(number) if number.isdigit() else 0
