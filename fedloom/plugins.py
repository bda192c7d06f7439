"""What is not shipped, found by name: `path/to/file.py:Name`, or an entry point of an installed package."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from fedloom.errors import UserError, nearest

_PREFIX = "fedloom_file_"
_REFERENCE = re.compile(r"(?P<file>.+\.py)(:(?P<name>[^:/\\+]*))?", re.DOTALL)


@dataclass(frozen=True)
class Kind:
    """A kind of thing that users bring along."""

    group: str
    """of entry points: fedloom.methods"""
    label: str
    """what a message about a name begins with: method.name ="""
    what: str
    """what it must be: a subclass of fedloom.Method"""
    fits: Callable[[Any], bool]


def find(kind: Kind, name: str) -> Any | None:
    """What a name stands for that is not shipped; None if it is neither in a file nor an entry point."""
    if match := _REFERENCE.fullmatch(name):
        return _in_file(kind, name, match["file"], match["name"])
    for entry in _entries(kind):
        if entry.name == name:
            return _loaded(kind, entry)
    return None


def names(kind: Kind) -> list[str]:
    """Entry points of this kind."""
    return [entry.name for entry in _entries(kind)]


def file_of(name: str) -> Path | None:
    """The file that a name points into, whether it is there or not."""
    match = _REFERENCE.fullmatch(name)
    return Path(match["file"]).expanduser() if match else None


def split(name: str) -> tuple[str, list[str]]:
    """A name and what is added to it: `Here/mine.py:Mine+ft` → `Here/mine.py:Mine`, [`ft`]."""
    file, colon, rest = name.rpartition(".py:")
    base, *added = [rest] if rest.endswith(".py") else rest.split("+")
    return file + colon + base, added


def short(name: str) -> str:
    """A name for titles and folders: `here/mine.py:Mine+ft` → `mine+ft`; any other stays as it is."""
    base, added = split(name)
    return "+".join([base.rpartition(":")[2].lower(), *added]) if file_of(base) else name


def absolute(name: str) -> str:
    """A name that means the same in any folder."""
    base, added = split(name)
    file = file_of(base)
    return "+".join([f"{file.resolve()}:{base.rpartition(':')[2]}", *added]) if file else name


def files() -> dict[str, str]:
    """The users' files that this process has read, with the SHA-256 of what was in them."""
    mine = (module for name, module in sys.modules.items() if name.startswith(_PREFIX))
    return {str(module.__file__): f"sha256 {module.__sha256__}" for module in mine if hasattr(module, "__sha256__")}


def place_of(error: BaseException, file: Path) -> str:
    """`line 3: NameError: …`: the deepest line of this file that an exception came through."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {message}"


def _in_file(kind: Kind, reference: str, file: str, name: str | None) -> Any:
    path = Path(file).expanduser().resolve()
    said = f"{kind.label} '{reference}':"
    if not path.is_file():
        raise UserError(f"{said} there is no file '{path}'")
    module = _imported(path, said)
    fitting = [n for n, thing in vars(module).items() if kind.fits(thing) and _home(thing) == module.__name__]
    if not name:
        raise UserError(f"{said} say which of it, {file}:NAME; {_choice('', fitting, kind)}")
    if not hasattr(module, name):
        raise UserError(f"{said} '{name}' is not in {path.name}; {_choice(name, fitting, kind)}")
    return _fitting(kind, getattr(module, name), said, fitting)


def _fitting(kind: Kind, thing: Any, said: str, others: Sequence[str] = ()) -> Any:
    if not kind.fits(thing):
        found = f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
        offer = f"; {_choice('', others, kind)}" if others else ""
        raise UserError(f"{said} it is {found}, and must be {kind.what}{offer}")
    return thing


def _choice(name: str, fitting: Iterable[str], kind: Kind) -> str:
    fitting = list(fitting)
    return nearest(name, fitting) if fitting else f"there is none in it: write {kind.what}"


def _home(thing: Any) -> str | None:
    return getattr(thing, "__module__", None)


def _imported(path: Path, said: str) -> ModuleType:
    """The module of a file as it is now: one that was changed is read again."""
    name = _PREFIX + str(path).encode().hex()
    known = sys.modules.get(name)
    if known is not None and known.__sha256__ != _sha256(path.read_bytes()):
        del sys.modules[name]
    try:
        return import_module(name)
    except UserError as error:
        raise UserError(f"{said} {path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{said} {path} cannot be imported: {place_of(error, path)}") from error


def _entries(kind: Kind) -> Sequence[EntryPoint]:
    return sorted(entry_points(group=kind.group), key=lambda entry: entry.name)


def _loaded(kind: Kind, entry: EntryPoint) -> Any:
    said = f"{kind.label} '{entry.name}': the entry point {entry.value}"
    try:
        thing = entry.load()
    except Exception as error:
        package = f" of {entry.dist.name}" if entry.dist else ""
        raise UserError(f"{said}{package} cannot be imported: {type(error).__name__}: {error}") from error
    return _fitting(kind, thing, f"{said}:")


def _sha256(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


class _Loader(SourceFileLoader):
    """Reads the source, never a cached form of it (whose dates are whole seconds), and notes what it was."""

    def exec_module(self, module: ModuleType) -> None:
        """The file's folder is searched after all others, so that it may import what lies beside it."""
        folder = str(Path(self.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)
        source = self.get_data(self.path)
        module.__sha256__ = _sha256(source)  # type: ignore[attr-defined]
        exec(self.source_to_code(source, self.path), module.__dict__)


class _Files(MetaPathFinder):
    """Modules whose name is the path of a file: a worker process that gets an object of it finds the file again."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Of names that `_imported` gave."""
        if not name.startswith(_PREFIX):
            return None
        file = bytes.fromhex(name.removeprefix(_PREFIX)).decode()
        return spec_from_file_location(name, file, loader=_Loader(name, file))


sys.meta_path.append(_Files())
