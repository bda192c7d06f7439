"""Reader of pickles of plain values that never runs code from the pickle.

CIFAR is published as pickles. A pickle is a program for a small stack machine, and Python's unpickler calls any
function that the program names. This reader calls none. It supports lists, tuples, dicts, strings, numbers and bytes,
and translates the few calls with which NumPy pickles an array into an array of validated type, shape and size.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")
"""Allowed types of an array's values."""


class PickleError(ValueError):
    """A pickle that is damaged or contains something other than plain values."""


@dataclass(frozen=True)
class _Name:
    """A function or class named in the pickle."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:80]


@dataclass
class _Array:
    """An array under construction."""

    value: np.ndarray | None = None


@dataclass
class _Type:
    """The type of an array's values, such as u1."""

    name: str
    order: str = "|"


_MARK = object()


def load(data: bytes) -> Any:
    """Return the value of a pickle.

    Args:
        data: The pickle.

    Returns:
        The value.

    Raises:
        ValueError: The pickle is damaged, or contains something other than plain values.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "STOP":
            return _settled(stack.pop())
        if name in _VALUES:
            stack.append(argument)
        elif name in _MEMOIZE:
            memo[len(memo) if name == "MEMOIZE" else int(argument)] = stack[-1]
        elif name in _RECALL:
            stack.append(memo[int(argument)])
        elif name == "GLOBAL":
            stack.append(_allowed(*argument.split(" ", 1)))
        elif name in _ACTIONS:
            _ACTIONS[name](stack)
        elif name not in ("PROTO", "FRAME"):
            raise PickleError(f"the pickle instruction {name} is not allowed")
    raise PickleError("the pickle ends early")


_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "BYTEARRAY8",
}  # fmt: skip
_MEMOIZE = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_RECALL = {"GET", "BINGET", "LONG_BINGET"}


def _to_mark(stack: list[Any]) -> list[Any]:
    """Pop all items above the last mark, and the mark."""
    for index in range(len(stack) - 1, -1, -1):
        if stack[index] is _MARK:
            items = stack[index + 1 :]
            del stack[index:]
            return items
    raise PickleError("the pickle is damaged: a mark is missing")


def _put(make: Callable[[], Any]) -> Callable[[list[Any]], None]:
    return lambda stack: stack.append(make())


def _tuple(count: int) -> Callable[[list[Any]], None]:
    def act(stack: list[Any]) -> None:
        items = tuple(stack[-count:])
        del stack[-count:]
        stack.append(items)

    return act


def _append(stack: list[Any], items: list[Any]) -> None:
    _expect(stack[-1], list).extend(items)


def _set(stack: list[Any], items: list[Any]) -> None:
    target = _expect(stack[-1], dict)
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[_text(key)] = value


def _pop(stack: list[Any], count: int) -> list[Any]:
    items = stack[-count:]
    del stack[-count:]
    return items


def _dict(stack: list[Any]) -> None:
    items = _to_mark(stack)
    stack.append({})
    _set(stack, items)


def _stack_global(stack: list[Any]) -> None:
    module, name = _pop(stack, 2)
    stack.append(_allowed(_expect(module, str), _expect(name, str)))


ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")} | {
    (f"numpy.{core}.{module}", name)
    for core in ("core", "_core")  # _core since NumPy 2.0
    for module, name in (("multiarray", "_reconstruct"), ("numeric", "_frombuffer"))
}
"""Functions and classes named in NumPy's pickles. None of them is ever called; see `_reduce`."""


def _allowed(module: str, name: str) -> _Name:
    if (module, name) not in ALLOWED:
        raise PickleError(f"the pickle calls {_Name(module, name)}, which is not allowed")
    return _Name(module, name)


def _reduce(stack: list[Any]) -> None:
    """Push the result that a function of NumPy's pickles would return for its arguments."""
    called, arguments = _pop(stack, 2)
    name, arguments = _expect(called, _Name).name, _expect(arguments, tuple)
    if name == "_reconstruct":
        stack.append(_Array())
    elif name == "dtype":
        kind = _text(arguments[0])
        if kind.lstrip("|<>=") not in TYPES:
            raise PickleError(f"an array of type {kind[:20]!r} is not allowed")
        stack.append(_Type(kind.lstrip("|<>="), kind[0] if kind[0] in "<>" else "|"))
    elif name == "encode":
        # Python 3 writes bytes in this way with old protocols.
        text, codec = arguments
        if codec != "latin1":
            raise PickleError(f"codec {codec!r:.20} is not allowed")
        stack.append(_expect(text, str).encode("latin1"))
    elif name == "_frombuffer":
        raw, kind, shape, order = arguments
        stack.append(_Array(_array(raw, kind, shape, order == "F")))
    else:
        raise PickleError(f"a call of {called} is not allowed")


def _build(stack: list[Any]) -> None:
    """Complete an array or a type with its state."""
    state = _expect(stack.pop(), tuple)
    target = stack[-1]
    if isinstance(target, _Type):
        order = _text(state[1])
        target.order = order if order in ("<", ">") else "|"
    elif isinstance(target, _Array):
        _version, shape, kind, fortran, raw = state
        target.value = _array(raw, kind, shape, bool(fortran))
    else:
        raise PickleError(f"a state for a {type(target).__name__} is not allowed")


def _array(raw: Any, kind: Any, shape: Any, fortran: bool) -> np.ndarray:
    if isinstance(raw, str):  # written by Python 2
        raw = raw.encode("latin1")
    raw, kind, shape = _expect(raw, bytes, bytearray), _expect(kind, _Type), _expect(shape, tuple)
    dtype = np.dtype(kind.order.replace("|", "") + kind.name)
    if len(shape) > 4 or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise PickleError(f"an array has the invalid shape {shape!s:.80}")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise PickleError(f"an array of shape {list(shape)} and type {dtype} has {len(raw)} bytes")
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")


_ACTIONS: dict[str, Callable[[list[Any]], None]] = {
    "MARK": _put(lambda: _MARK),
    "NONE": _put(lambda: None),
    "NEWTRUE": _put(lambda: True),
    "NEWFALSE": _put(lambda: False),
    "EMPTY_LIST": _put(list),
    "EMPTY_DICT": _put(dict),
    "EMPTY_TUPLE": _put(tuple),
    "TUPLE": lambda stack: stack.append(tuple(_to_mark(stack))),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "LIST": lambda stack: stack.append(_to_mark(stack)),
    "DICT": _dict,
    "APPEND": lambda stack: _append(stack, _pop(stack, 1)),
    "APPENDS": lambda stack: _append(stack, _to_mark(stack)),
    "SETITEM": lambda stack: _set(stack, _pop(stack, 2)),
    "SETITEMS": lambda stack: _set(stack, _to_mark(stack)),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "POP": lambda stack: stack.__delitem__(-1),
}


def _expect(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise PickleError(f"the pickle has a {type(value).__name__.lstrip('_')} instead of a {kinds[0].__name__}")
    return value


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(_expect(value, str))


def _settled(value: Any) -> Any:
    """Return the result with arrays in place of `_Array` objects, also as values of a dict."""
    if isinstance(value, dict):
        return {key: item.value if isinstance(item, _Array) else item for key, item in value.items()}
    return value.value if isinstance(value, _Array) else value
