"""A client's memory between rounds, on its own disk."""

import logging
from pathlib import Path

from safetensors.torch import load, save

from fedloom.core.state import State, serialisable
from fedloom.deploy.consent import RefusalError
from fedloom.experiment.files import write_whole

log = logging.getLogger("fedloom")


class RoundMemory:
    """A client's memory on its own disk: the states of one run, a file per round.

    A state is written before its upload is answered for. The server's next message says which round it took in last;
    what ran ahead of an upload that was lost is forgotten.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def at(self, accepted: int | None) -> State | None:
        """The state after the round that the server took in last (None: nothing yet)."""
        if accepted is None:
            return None
        path = self._path(accepted)
        if not path.exists():
            log.error(f"'{self.folder}' has no memory of round {accepted}: restore it from a backup")
            raise RefusalError(
                f"the server took in round {accepted} of this client, and there is no memory of it (there is: "
                f"{', '.join(map(str, self.rounds())) or 'nothing'}); restore it from a backup, or begin a new run"
            )
        return load(path.read_bytes())

    def keep(self, round: int, state: State, accepted: int | None) -> None:
        """The state after a round whose upload is not yet answered for, beside the last accepted one; no other."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(round), save(serialisable(state)), private=True)
        for other in self.rounds():
            if other not in (round, accepted):
                self._path(other).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """Of which there is a state."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors"))

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"
