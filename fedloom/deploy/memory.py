"""Storage of a client's memory between rounds, on the client's disk."""

import logging
from pathlib import Path

from safetensors.torch import load, save

from fedloom.core.state import State, serialisable
from fedloom.deploy.consent import RefusalError
from fedloom.experiment.files import write_whole

log = logging.getLogger("fedloom")


class RoundMemory:
    """Memory of a client in one run, with one file per round.

    A state is written before its update is sent. The server's next message names the round that it accepted last; newer
    states, whose updates were lost, are discarded.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def at(self, accepted: int | None) -> State | None:
        """Return the state after the round that the server accepted last; None if it has accepted none.

        Raises:
            RefusalError: If that state does not exist.
        """
        if accepted is None:
            return None
        path = self._path(accepted)
        if not path.exists():
            log.error(f"'{self.folder}' has no memory of round {accepted}: restore it from a backup")
            raise RefusalError(
                f"the server accepted round {accepted} of this client, but its memory is missing (stored rounds: "
                f"{', '.join(map(str, self.rounds())) or 'none'}); restore it from a backup, or start a new run"
            )
        return load(path.read_bytes())

    def keep(self, round: int, state: State, accepted: int | None) -> None:
        """Store the state after a round whose update is not accepted yet, and delete all but the last accepted one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(round), save(serialisable(state)), private=True)
        for other in self.rounds():
            if other not in (round, accepted):
                self._path(other).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """Return the rounds whose state is stored."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors"))

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"
