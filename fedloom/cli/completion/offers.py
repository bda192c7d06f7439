"""What Tab offers after a flag: names that are known, else files."""

from collections.abc import Callable, Iterable
from glob import escape, iglob
from os.path import isdir, join


class MoreIsWanted(Exception):  # noqa: N818
    """A command of the outline was to run: `--out --help` is a folder's name."""


def matching(names: Iterable[str], incomplete: str) -> list[str]:
    """Names that begin as what was typed, else files that do; of a list with commas, its last entry."""
    before, comma, last = incomplete.rpartition(",")
    found = [name for name in names if name.startswith(last)]
    if not found:
        found = [join(path, "") if isdir(path) else path for path in sorted(iglob(escape(last) + "*"))]
    return [before + comma + name for name in found]


def _offer(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return matching(names(), incomplete)

    return complete


def _methods() -> list[str]:
    from fedloom.methods import METHODS

    return METHODS.names()


def _models() -> list[str]:
    from fedloom.models import MODELS

    return MODELS.names()


def _datasets() -> list[str]:
    from fedloom.data.sources import SOURCES

    return SOURCES.names()


def _engines() -> list[str]:
    from fedloom.engines import AUTO, ENGINES

    return [AUTO, *ENGINES.names()]


def _recipes() -> list[str]:
    from fedloom.config.loading import shipped

    return list(shipped())


def _partitions() -> list[str]:
    from fedloom.data import PARTITIONS

    return PARTITIONS.names()


methods, models, datasets, engines = _offer(_methods), _offer(_models), _offer(_datasets), _offer(_engines)
recipes, partitions, logs = _offer(_recipes), _offer(_partitions), _offer(lambda: ["tensorboard", "wandb"])
