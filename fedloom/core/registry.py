"""Registries of everything that a recipe can name: shipped classes, entry points of packages, `path/file.py:Name`.

Files are imported only with the user's consent (`core/trusted_code.py`).
"""

import inspect
import logging
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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

OBJECT = "object-"
"""Beginning of the names of objects that were passed from Python in place of a name."""
_PREFIX = "fedloom_file_"
_REFERENCE = re.compile(r"(?P<file>.+\.py)(:(?P<name>[^:/\\+]*))?", re.DOTALL)
_imported_packages: set[str] = set()
_object_sources: dict[str, str] = {}
"""Hashes of the source of classes that were passed as Python objects, by what they are."""
_noticed: set[str] = set()
"""Hashes of changed files for which a warning was logged."""
log = logging.getLogger("fedloom")
T = TypeVar("T")


class Registry(dict[str, T], Generic[T]):
    """Objects of one kind by name.

    As a mapping it holds the objects registered in this process. `find` also searches entry points and files.

    Args:
        field: The recipe field that names the objects, such as `method.name`.
        what: Description of a valid object, such as `a subclass of fedloom.Method`.
        fits: Returns whether an object is valid.
        package: The package whose modules register the shipped objects.
        group: The entry-point group of other packages.
    """

    def __init__(self, field: str, what: str, fits: Callable[[Any], bool], *, package: str, group: str):
        super().__init__()
        self.field, self.what, self.fits, self.package, self.group = field, what, fits, package, group

    def add(self, name: str, thing: T) -> T:
        """Register an object.

        Args:
            name: The name in recipes.
            thing: The object.

        Returns:
            The object.

        Raises:
            UserError: The name belongs to a shipped object of another module.
        """
        if not str(_home(thing)).startswith("fedloom."):
            self._load()  # otherwise a shipped object imported later would replace this one
        known = self.get(name)
        if known is not None and str(_home(known)).startswith("fedloom.") and _home(known) != _home(thing):
            whose = getattr(thing, "__name__", type(thing).__name__)
            raise UserError(f"{whose}: {self.field} = '{name}' is already part of fedloom; choose another name")
        self[name] = thing
        return thing

    def find(self, name: str, also: Sequence[str] = ()) -> T:
        """Return the object with this name.

        Args:
            name: A registered name, the name of an entry point, or `path/to/file.py:Name`.
            also: Further names to offer in the error message.

        Raises:
            UserError: There is no such object; the message offers the closest name.

        Example:
            >>> METHODS.find("fedavg").name
            'fedavg'
        """
        if (found := self.look_up(name)) is not None:
            return found
        refuse_object(self.field, name)
        choice = nearest(name, [*also, *self.names()])
        raise UserError(f"{self.field} = '{name}' is unknown: {choice}, or a file of yours: path/to/file.py:Name")

    def look_up(self, name: str) -> T | None:
        """Return the object with this name, or None if there is none."""
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
        """Return whether this is the name of an object that belongs to fedloom."""
        self._load()
        return name in self and str(_home(self[name])).startswith("fedloom.")

    def names(self) -> list[str]:
        """Return the names that a user can write: of registered objects and entry points, sorted."""
        self._load()
        written = (name for name in self if not name.startswith(OBJECT))  # the others were passed as Python objects
        return sorted({*written, *(entry.name for entry in self._entries())})

    def _load(self) -> None:
        """Import the modules that register the shipped objects."""
        import_all(self.package)

    def _entries(self) -> Sequence[EntryPoint]:
        return sorted(entry_points(group=self.group), key=lambda entry: entry.name)

    def _in_file(self, reference: str, file: str, name: str | None) -> Any:
        path = Path(file).expanduser().resolve()
        named_by = f"{self.field} = '{reference}':"
        if not path.is_file():
            raise UserError(f"{named_by} there is no file '{path}'")
        if not name and not trusted_code.is_allowed(path):
            raise UserError(f"{named_by} name an object in it: {file}:NAME")
        module = _imported(path, named_by)
        fitting = [n for n, thing in vars(module).items() if self.fits(thing) and _home(thing) == module.__name__]
        if not name:
            raise UserError(f"{named_by} name an object in it: {file}:NAME; {self._choice('', fitting)}")
        if not hasattr(module, name):
            raise UserError(f"{named_by} '{name}' is not in {path.name}; {self._choice(name, fitting)}")
        return self._fitting(getattr(module, name), named_by, fitting)

    def _loaded(self, entry: EntryPoint) -> Any:
        named_by = f"{self.field} = '{entry.name}': the entry point {entry.value}"
        try:
            thing = entry.load()
        except Exception as error:
            package = f" of {entry.dist.name}" if entry.dist else ""
            raise UserError(f"{named_by}{package} cannot be imported: {type(error).__name__}: {error}") from error
        return self._fitting(thing, f"{named_by}:")

    def _fitting(self, thing: Any, named_by: str, others: Sequence[str] = ()) -> Any:
        if not self.fits(thing):
            found = f"the class {thing.__name__}" if isinstance(thing, type) else f"of type {type(thing).__name__}"
            offer = f"; {self._choice('', others)}" if others else ""
            raise UserError(f"{named_by} it is {found}, but must be {self.what}{offer}")
        return thing

    def _choice(self, name: str, fitting: Iterable[str]) -> str:
        fitting = list(fitting)
        return nearest(name, fitting) if fitting else f"the file defines none: write {self.what}"


def refuse_object(field: str, name: str) -> None:
    """Raise a UserError if a name is that of an object, which this process does not have."""
    if name.startswith(OBJECT):
        argument = {"training.optimizer.name": "optimizer"}.get(field) or field.removesuffix(".name").split(".")[-1]
        raise UserError(
            f"{field} = '{name}': it was passed as a Python object, which is not stored; pass the same object again, "
            f"for example fedloom.resume(RUN, {argument}=…)"
        )


def subclass_of(base: type) -> Callable[[Any], bool]:
    """Return a predicate for classes derived from `base`, for use as `fits`."""
    return lambda thing: isinstance(thing, type) and issubclass(thing, base) and thing is not base


def import_all(package: str) -> None:
    """Import a package and all its modules, which register what they define."""
    if package not in _imported_packages:
        _imported_packages.add(package)  # before the import: the package may call this function while it is imported
        try:
            for inner in pkgutil.iter_modules(import_module(package).__path__):
                import_module(f"{package}.{inner.name}")
        except BaseException:
            _imported_packages.discard(package)
            raise


def file_of(name: str) -> Path | None:
    """Return the file that a name refers to, whether it exists or not; None if it is not `file.py:Name`."""
    match = _REFERENCE.fullmatch(name)
    return Path(match["file"]).expanduser() if match else None


def split(name: str) -> tuple[str, list[str]]:
    """Split a name and its add-ons: `Here/mine.py:Mine+ft` → `Here/mine.py:Mine`, [`ft`]."""
    file, colon, rest = name.rpartition(".py:")
    base, *added = [rest] if rest.endswith(".py") else rest.split("+")
    return file + colon + base, added


def short(name: str) -> str:
    """Return a name for titles and folders: `here/mine.py:Mine+ft` → `mine+ft`; other names are returned unchanged."""
    base, added = split(name)
    return "+".join([base.rpartition(":")[2].lower(), *added]) if file_of(base) else name


def absolute(name: str) -> str:
    """Return a name with an absolute path, valid in any folder; suffixes (`+ft`, a partition's values) are kept."""
    file, colon, rest = name.rpartition(".py:")
    return f"{Path(file + '.py').expanduser().resolve()}:{rest}" if colon else name


def sources() -> dict[str, str]:
    """Return the SHA-256 of the users' code of this process: imported files, and classes passed as objects."""
    found = (_parsed(name) for name in list(sys.modules) if name.startswith(_PREFIX))
    return {name: f"sha256 {sha256}" for name, sha256 in (*found, *_object_sources.items())}


def source_name(method: str) -> str:
    """Return the name in `sources` of a method that was passed as an object."""
    return f"method {method}"


def is_object_source(name: str) -> bool:
    """Return whether a name in `sources` is that of a class passed as an object, and not that of a file."""
    return name in _object_sources


def note_source(what: str, kind: type) -> None:
    """Add the source of a user's class that was passed as an object to `sources`."""
    shipped_or_file = str(_home(kind)).startswith(("fedloom.", _PREFIX))
    with suppress(OSError, TypeError):  # no source: defined at an interactive prompt
        if not shipped_or_file:
            _object_sources[what] = trusted_code.sha256_of(inspect.getsource(kind).encode())


def place_of(error: BaseException, file: Path) -> str:
    """Return `line 3: NameError: …` for the deepest line of `file` in an exception's traceback."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {message}"


def _home(thing: Any) -> str | None:
    """Return the module in which a class, a function or an instance's class is defined."""
    return getattr(thing, "__module__", None)


def _imported(path: Path, named_by: str) -> ModuleType:
    """Return the module of a file, with the content that the user has consented to.

    An imported module is kept even if its file changes, so that a comparison that takes hours uses one version of the
    code. New consent (naming the file again) imports it again.
    """
    sha256 = trusted_code.consented(path, named_by.removesuffix(":"))
    name = f"{_PREFIX}{str(path).encode().hex()}_{sha256}"
    if name in sys.modules:
        _notice_change(path, sha256)
    else:
        for older in [other for other in sys.modules if other.startswith(_PREFIX) and _parsed(other)[0] == str(path)]:
            del sys.modules[older]
    try:
        return import_module(name)
    except UserError as error:
        raise UserError(f"{named_by} {path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{named_by} {path} cannot be imported: {place_of(error, path)}") from error


def _notice_change(path: Path, sha256: str) -> None:
    now = trusted_code.sha256_of(path.read_bytes())
    if now != sha256 and now not in _noticed:
        _noticed.add(now)
        log.warning(
            "%s has changed since it was imported; this process continues with SHA-256 %s. Name the file again, or "
            "start again, to use the new content", path, sha256,
        )  # fmt: skip


def _parsed(module: str) -> tuple[str, str]:
    """Return the path and the SHA-256 in a module's name."""
    path, _, sha256 = module.removeprefix(_PREFIX).partition("_")
    return bytes.fromhex(path).decode(), sha256


class _Loader(SourceFileLoader):
    """Loader that executes source, never cached bytecode, and only if its hash equals the one in the module's name."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module. The file's folder is appended to `sys.path`, so that it can import its neighbours."""
        content = self.get_data(self.path)
        expected, found = _parsed(module.__name__)[1], trusted_code.sha256_of(content)
        if found != expected:
            raise UserError(
                f"the file has changed since you allowed it: its SHA-256 was {expected} and is now {found}; read the "
                "file, then start again"
            )
        folder = str(Path(self.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)
        exec(self.source_to_code(content, self.path), module.__dict__)


class _Files(MetaPathFinder):
    """Finds modules whose name encodes a file's path and hash, so that worker processes can unpickle their classes."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module whose name was created by `_imported`."""
        if not name.startswith(_PREFIX):
            return None
        file = _parsed(name)[0]
        return spec_from_file_location(name, file, loader=_Loader(name, file))


sys.meta_path.append(_Files())
