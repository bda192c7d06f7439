"""Names and summaries of everything fedloom ships, available without importing torch.

Importing torch takes seconds, so listing or completing names must not need it. `catalogue.json` is written by
`make catalogue` and contains a digest of the source files that it describes. When the digest does not match the
installed sources (while you edit a method, for example), `catalogue()` imports the package and reads the registries.
"""

import json
import shlex
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from fedloom.core.data_files import cached_download, data_folder, folder_with

PACKAGE = Path(__file__).parents[1]
FILE = Path(__file__).with_name("catalogue.json")
DESCRIBED = ("methods/**/*.py", "data/sources/*.py")
Kind = Literal["methods", "datasets", "models", "engines", "partitions"]


@cache
def catalogue() -> dict[str, Any]:
    """Return the stored catalogue, or build it if it does not match the installed sources."""
    stored = _stored()
    return stored if stored.get("digest") == digest() else build()


def names(kind: Kind) -> list[str]:
    """Return the shipped names of one kind. Names added since the last `make catalogue` are missing."""
    return [entry if isinstance(entry, str) else entry["name"] for entry in _stored().get(kind, [])]


def datasets(folder: Path | None = None) -> list[dict[str, Any]]:
    """Describe the shipped datasets, and whether their files are in the data folder.

    Args:
        folder: The data folder; default: $FEDLOOM_DATA or the user's cache.

    Returns:
        For each dataset: `name`, `description`, `classes`, `found`, the alternative sets of `files`, the `command`
        that downloads them, and the repository on the Hugging Face `hub`, if there is one.
    """
    root = data_folder(folder)
    return [
        {
            "name": entry["name"],
            "description": entry["description"],
            "classes": entry["classes"],
            "found": folder_with(entry["layouts"], [root, *map(Path, entry["also"])]) is not None
            or cached_download(entry["name"], root).exists(),
            "files": entry["layouts"],
            "command": entry["command"].format(folder=shlex.quote(str(root))),
            "hub": entry["hub"],
        }
        for entry in catalogue()["datasets"]
    ]


def digest() -> str:
    """Return a hash of the source files that the catalogue describes."""
    hashed = sha256()
    for path in sorted(path for pattern in DESCRIBED for path in PACKAGE.glob(pattern)):
        hashed.update(f"{path.relative_to(PACKAGE).as_posix()}\n{path.read_text(encoding='utf-8')}".encode())
    return hashed.hexdigest()


def build() -> dict[str, Any]:
    """Import the package and describe what its registries contain, without entry points of other packages."""
    from fedloom.data.partitions import PARTITIONS
    from fedloom.data.sources import SOURCES, Source
    from fedloom.engines import AUTO, ENGINES
    from fedloom.methods import METHODS
    from fedloom.models import MODELS
    from fedloom.report.methods import method_info

    def shipped(registry: Any) -> list[str]:
        return [name for name in registry.names() if registry.is_shipped(name)]

    sources = {name: source for name, source in sorted(SOURCES.items()) if isinstance(source, Source)}
    return {
        "digest": digest(),
        "methods": [method_info(name) for name in shipped(METHODS)],
        "datasets": [
            {
                "name": name,
                "description": source.description,
                "classes": len(source.classes) or source.count,
                "layouts": source.layouts,
                "also": [str(folder) for folder in source.also],
                "command": source.command,
                "hub": source.remote.repo if source.remote else None,
            }
            for name, source in sources.items()
        ],
        "models": shipped(MODELS),
        "engines": [AUTO, *shipped(ENGINES)],
        "partitions": shipped(PARTITIONS),
    }


@cache
def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(build(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {FILE.relative_to(PACKAGE.parent)}")
