"""Registries: what a recipe can name. Shipped things, entry points of installed packages, `path/file.py:Name`."""

import hashlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from fedloom.core.errors import UserError, nearest

_PREFIX = "fedloom_file_"
_REFERENCE = re.compile(r"(?P<file>.+\.py)(:(?P<name>[^:/\\+]*))?", re.DOTALL)
_imported_packages: set[str] = set()
_hashes: dict[str, str] = {}
"""SHA-256 of the source of users' files, by the name of the module."""
T = TypeVar("T")


class Registry(dict[str, T], Generic[T]):
    """Things of one kind by name.

    As a mapping it holds what has been registered in this process; `find` also looks at entry points (`group`) and
    files. The modules of `package` register the shipped ones, `fits` says whether an object is such a thing. Messages
    name the recipe's `field` (`method.name`) and `what` it must be (`a subclass of fedloom.Method`).
    """

    def __init__(self, field: str, what: str, fits: Callable[[Any], bool], *, package: str, group: str):
        super().__init__()
        self.field, self.what, self.fits, self.package, self.group = field, what, fits, package, group

    def add(self, name: str, thing: T) -> T:
        """Registers a thing. The name of a shipped one cannot be taken by another module."""
        if not str(_home(thing)).startswith("fedloom."):
            self._load()  # a shipped thing that is imported later would take the name from this one
        known = self.get(name)
        if known is not None and str(_home(known)).startswith("fedloom.") and _home(known) != _home(thing):
            whose = getattr(thing, "__name__", type(thing).__name__)
            raise UserError(f"{whose}: the {self.field} '{name}' is a part of fedloom already; choose another name")
        self[name] = thing
        return thing

    def find(self, name: str, also: Sequence[str] = ()) -> T:
        """What a name stands for, or a UserError that offers the nearest name, of these `also`."""
        if (found := self.look_up(name)) is not None:
            return found
        choice = nearest(name, [*also, *self.names()])
        raise UserError(f"{self.field} = '{name}' is unknown: {choice}, or one of yours: path/to/file.py:Name")

    def look_up(self, name: str) -> T | None:
        """The same, or None if there is no such thing."""
        self._load()
        if name in self:
            return self[name]
        if match := _REFERENCE.fullmatch(name):
            return cast(T, self._in_file(name, match["file"], match["name"]))
        for entry in self._entries():
            if entry.name == name:
                return cast(T, self._loaded(entry))
        return None

    def names(self) -> list[str]:
        """Registered names and entry points, sorted."""
        self._load()
        return sorted({*self, *(entry.name for entry in self._entries())})

    def _load(self) -> None:
        """Imports the modules that register the shipped things."""
        import_all(self.package)

    def _entries(self) -> Sequence[EntryPoint]:
        return sorted(entry_points(group=self.group), key=lambda entry: entry.name)

    def _in_file(self, reference: str, file: str, name: str | None) -> Any:
        path = Path(file).expanduser().resolve()
        said = f"{self.field} = '{reference}':"
        if not path.is_file():
            raise UserError(f"{said} there is no file '{path}'")
        module = _imported(path, said)
        fitting = [n for n, thing in vars(module).items() if self.fits(thing) and _home(thing) == module.__name__]
        if not name:
            raise UserError(f"{said} say which of it, {file}:NAME; {self._choice('', fitting)}")
        if not hasattr(module, name):
            raise UserError(f"{said} '{name}' is not in {path.name}; {self._choice(name, fitting)}")
        return self._fitting(getattr(module, name), said, fitting)

    def _loaded(self, entry: EntryPoint) -> Any:
        said = f"{self.field} = '{entry.name}': the entry point {entry.value}"
        try:
            thing = entry.load()
        except Exception as error:
            package = f" of {entry.dist.name}" if entry.dist else ""
            raise UserError(f"{said}{package} cannot be imported: {type(error).__name__}: {error}") from error
        return self._fitting(thing, f"{said}:")

    def _fitting(self, thing: Any, said: str, others: Sequence[str] = ()) -> Any:
        if not self.fits(thing):
            found = f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
            offer = f"; {self._choice('', others)}" if others else ""
            raise UserError(f"{said} it is {found}, and must be {self.what}{offer}")
        return thing

    def _choice(self, name: str, fitting: Iterable[str]) -> str:
        fitting = list(fitting)
        return nearest(name, fitting) if fitting else f"there is none in it: write {self.what}"


def subclass_of(base: type) -> Callable[[Any], bool]:
    """Whether an object is a class derived from this one: what most registries hold."""
    return lambda thing: isinstance(thing, type) and issubclass(thing, base) and thing is not base


def import_all(package: str) -> None:
    """Imports a package and its modules, which register what they define."""
    if package not in _imported_packages:
        _imported_packages.add(package)  # first: the package may call this while it is imported
        try:
            for inner in pkgutil.iter_modules(import_module(package).__path__):
                import_module(f"{package}.{inner.name}")
        except BaseException:
            _imported_packages.discard(package)
            raise


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
    """A name that means the same in any folder; what follows it (`+ft`, a partition's values) stays."""
    file, colon, rest = name.rpartition(".py:")
    return f"{Path(file + '.py').expanduser().resolve()}:{rest}" if colon else name


def files() -> dict[str, str]:
    """The users' files that this process has read, with the SHA-256 of what was in them."""
    mine = ((name, module) for name, module in sys.modules.items() if name.startswith(_PREFIX))
    return {str(module.__file__): f"sha256 {_hashes[name]}" for name, module in mine if name in _hashes}


def place_of(error: BaseException, file: Path) -> str:
    """`line 3: NameError: …`: the deepest line of this file that an exception came through."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {message}"


def _home(thing: Any) -> str | None:
    """The module that a class, a function or an instance's class is defined in."""
    return getattr(thing, "__module__", None)


def _imported(path: Path, said: str) -> ModuleType:
    """The module of a file as it is now: one that was changed is read again."""
    name = _PREFIX + str(path).encode().hex()
    known = sys.modules.get(name)
    if known is not None and _hashes[name] != _sha256(path.read_bytes()):
        del sys.modules[name]
    try:
        return import_module(name)
    except UserError as error:
        raise UserError(f"{said} {path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{said} {path} cannot be imported: {place_of(error, path)}") from error


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
        _hashes[module.__name__] = _sha256(source)
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
