"""An organisation's ledger of a run, so that it need not rely on the server's."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.core.job import Job, Result
from fedloom.core.message import is_count
from fedloom.deploy.terms import is_run
from fedloom.experiment.files import write_whole
from fedloom.trust.ledger import Ledger
from fedloom.trust.ledger_file import FILE, Purpose


class MemberLedger:
    """The ledger file of one run. It is read and written for every entry, so that a killed client loses none.

    Args:
        folder: Folder of the run, at the organisation.
        client: Number of the organisation.
        empty: Returns the ledger of a run that has none.
    """

    def __init__(self, folder: Path, client: int, empty: Callable[[], Ledger]):
        self._path, self._client, self._empty = folder / FILE, client, empty

    def note(self, job: Job, result: Result, shares: int | None = None) -> None:
        """Record a job and its result.

        Args:
            job: The job.
            result: What was sent.
            shares: Bytes of shares of secure aggregation that came with the job.
        """
        purpose: Purpose = "training" if job.kind == "update" else "evaluation"
        with self._open() as ledger:
            ledger.add("down", job.round, self._client, job.message, purpose)
            if shares is not None:
                ledger.add_bytes("down", "secure", job.round, self._client, shares)
            if result.message is not None:
                ledger.add("up", job.round, self._client, result.message)
            for scores in result.scores:
                ledger.add_scores(job.round, scores)
            if result.error is not None:
                ledger.add_error(job.round, self._client, result.error.why)

    def note_aggregation(self, round: int, request: bytes, answer: bytes) -> None:
        """Record a request of secure aggregation and its answer."""
        with self._open() as ledger:
            ledger.add_bytes("down", "secure", round, self._client, len(request))
            ledger.add_bytes("up", "secure", round, self._client, len(answer))

    @contextmanager
    def _open(self) -> Iterator[Ledger]:
        ledger = _read(self._path) if self._path.exists() else self._empty()
        yield ledger
        _write(self._path, ledger)


def note_error(folder: Path, about: Mapping[str, Any], client: int, why: str) -> None:
    """Record a refused or failed request in the ledger of its run, if that exists.

    Args:
        folder: The organisation's folder.
        about: The header of the request.
        client: Number of the organisation.
        why: The text that was sent.
    """
    run, round = about.get("run"), about.get("round")
    path = folder / "runs" / str(run) / FILE
    if is_run(run) and is_count(round) and path.exists():
        ledger = _read(path)
        ledger.add_error(int(round), client, why)  # type: ignore[arg-type]
        _write(path, ledger)


def _read(path: Path) -> Ledger:
    return Ledger.from_json(json.loads(path.read_text(encoding="utf-8")))


def _write(path: Path, ledger: Ledger) -> None:
    write_whole(path, (json.dumps(ledger.to_json(), indent=1) + "\n").encode(), private=True)
