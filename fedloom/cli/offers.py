"""Completions that Tab offers after a flag: known names, else files. Nothing here imports torch."""

from collections.abc import Callable, Iterable
from glob import escape, iglob
from importlib.metadata import entry_points
from os.path import isdir, join

from fedloom.cli.catalogue import Kind, names


def matching(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that start with the typed text, or matching files if there are none.

    Of a comma-separated list, the last entry is completed.
    """
    before, comma, last = incomplete.rpartition(",")
    found = [name for name in names if name.startswith(last)]
    if not found:
        found = [join(path, "") if isdir(path) else path for path in sorted(iglob(escape(last) + "*"))]
    return [before + comma + name for name in found]


def _offer(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return matching(names(), incomplete)

    return complete


def _registered(kind: Kind) -> Callable[[str], list[str]]:
    """Offer the shipped names of one kind and the entry points of installed packages."""
    return _offer(lambda: sorted({*names(kind), *(entry.name for entry in entry_points(group=f"fedloom.{kind}"))}))


def _recipes() -> list[str]:
    from fedloom.config.loading import shipped

    return list(shipped())


methods = _registered("methods")
models = _registered("models")
engines = _registered("engines")
datasets = _registered("datasets")
partitions = _registered("partitions")
recipes = _offer(_recipes)
logs = _offer(lambda: ["tensorboard", "wandb", "mlflow"])
heads = _offer(lambda: ["linear", "mlp", "svm", "logreg"])
formats = _offer(lambda: ["onnx", "torchscript", "safetensors"])
