"""Registries: what a recipe can name. Shipped things, entry points of installed packages, `path/file.py:Name`.

A file is imported only with the user's consent (`core/trusted_code.py`).
"""

import logging
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

from fedloom.core import trusted_code
from fedloom.core.errors import UserError, nearest

_PREFIX = "fedloom_file_"
_REFERENCE = re.compile(r"(?P<file>.+\.py)(:(?P<name>[^:/\\+]*))?", re.DOTALL)
_imported_packages: set[str] = set()
_noticed: set[str] = set()
"""Hashes of changed files that were reported."""
log = logging.getLogger("fedloom")
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

    def is_shipped(self, name: str) -> bool:
        """Whether fedloom itself brings a thing of this name."""
        self._load()
        return name in self and str(_home(self[name])).startswith("fedloom.")

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
        if not name and not trusted_code.is_allowed(path):
            raise UserError(f"{said} say which of it, {file}:NAME")
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
    """The users' files that this process has imported, with the SHA-256 of what was run."""
    found = (_parsed(name) for name in list(sys.modules) if name.startswith(_PREFIX))
    return {path: f"sha256 {sha256}" for path, sha256 in found}


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
    """The module of a file, with the content that the user has consented to.

    Once imported it stays, even if the file changes: a comparison of hours finishes with the code that it began with.
    New consent (naming the file again) imports it again.
    """
    sha256 = trusted_code.consented(path, said.removesuffix(":"))
    name = f"{_PREFIX}{str(path).encode().hex()}_{sha256}"
    if name in sys.modules:
        _notice_change(path, sha256)
    else:
        for older in [other for other in sys.modules if other.startswith(_PREFIX) and _parsed(other)[0] == str(path)]:
            del sys.modules[older]
    try:
        return import_module(name)
    except UserError as error:
        raise UserError(f"{said} {path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{said} {path} cannot be imported: {place_of(error, path)}") from error


def _notice_change(path: Path, sha256: str) -> None:
    now = trusted_code.sha256_of(path.read_bytes())
    if now != sha256 and now not in _noticed:
        _noticed.add(now)
        log.warning(
            "%s has changed since it was imported; this process continues with SHA-256 %s. Name the file again, or "
            "start again, to use the new content", path, sha256,
        )  # fmt: skip


def _parsed(module: str) -> tuple[str, str]:
    """The path and the SHA-256 in a module's name."""
    path, _, sha256 = module.removeprefix(_PREFIX).partition("_")
    return bytes.fromhex(path).decode(), sha256


class _Loader(SourceFileLoader):
    """Runs the source, never a cached form of it, if it is the content that the module's name says."""

    def exec_module(self, module: ModuleType) -> None:
        """The file's folder is searched after all others, so that it may import what lies beside it."""
        source = self.get_data(self.path)
        expected, found = _parsed(module.__name__)[1], trusted_code.sha256_of(source)
        if found != expected:
            raise UserError(
                f"the file has changed since it was allowed: its SHA-256 was {expected} and is {found}; read it, then "
                "start again"
            )
        folder = str(Path(self.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)
        exec(self.source_to_code(source, self.path), module.__dict__)


class _Files(MetaPathFinder):
    """Modules whose name is the path of a file and its hash: a worker process that gets an object finds its class."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Of names that `_imported` gave."""
        if not name.startswith(_PREFIX):
            return None
        file = _parsed(name)[0]
        return spec_from_file_location(name, file, loader=_Loader(name, file))


sys.meta_path.append(_Files())
