"""What Tab offers after a flag: known names, else files. Names are read from source files, to not import torch."""

import re
from collections.abc import Callable, Iterable
from glob import escape, iglob
from importlib.metadata import entry_points
from os.path import isdir, join
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def matching(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that start with the typed text, else such files; of a comma list, complete the last entry."""
    before, comma, last = incomplete.rpartition(",")
    found = [name for name in names if name.startswith(last)]
    if not found:
        found = [join(path, "") if isdir(path) else path for path in sorted(iglob(escape(last) + "*"))]
    return [before + comma + name for name in found]


def _offer(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return matching(names(), incomplete)

    return complete


def _registered(group: str, files: str, pattern: str | None = None) -> Callable[[str], list[str]]:
    """Offer a registry's names: those that match the pattern in these files, or the files' own; and entry points."""

    def names() -> list[str]:
        found = {entry.name for entry in entry_points(group=f"fedloom.{group}")}
        for path in PACKAGE.glob(files):
            shipped = re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE) if pattern else [path.stem]
            found.update(name.replace("_", "-") for name in shipped)
        return sorted(found)

    return _offer(names)


def _recipes() -> list[str]:
    from fedloom.config.loading import shipped

    return list(shipped())


methods = _registered("methods", "methods/[!_]*.py")
models = _registered("models", "models/*.py", r'^@register\("(.+)"\)')
engines = _registered("engines", "engines/**/*.py", r'^(?:AUTO|    name: ClassVar\[str\]) = "(.+)"')
datasets = _registered("datasets", "data/sources/*.py", r'^    name = "(.+)"')
partitions = _registered("partitions", "data/partition.py", r"^@_partition\ndef (\w+)")
recipes = _offer(_recipes)
logs = _offer(lambda: ["tensorboard", "wandb"])
heads = _offer(lambda: ["linear", "mlp", "svm", "logreg"])
formats = _offer(lambda: ["onnx", "torchscript", "safetensors"])
