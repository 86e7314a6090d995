"""Read a pickle as data: lists, dicts, texts, numbers, and stand-ins for names.

Python's own unpickler calls any function that a file names. Here only functions passed by the
reader are called, only instructions that data need are followed, and time and memory are linear in
the file's length.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Any


class Record:
    """An object of a class that a file names: its fields, in the order in which they stand.

    Attributes:
        kind: the name of the class.
        fields: from the file, as a dict or a tuple.
    """

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: Any = {}

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


#: A function of the arguments with which a file calls a name.
Made = Callable[[tuple[Any, ...]], Any]


class PickledName:
    """A name in a file that is called there.

    Attributes:
        call: the function that stands for the name.
    """

    __slots__ = ("call",)

    def __init__(self, call: Made) -> None:
        self.call = call


#: Keys of dicts, besides tuples of these: their hashes take no time.
_KEYS = (str, bytes, int, float, type(None), Record, PickledName)


def read(data: bytes, name: Callable[[str, str], Any]) -> Any:
    """Return the data of a pickle.

    Args:
        data: of protocol 2 or a later one.
        name: maps a module and a name in it to a stand-in: a value, or a `PickledName`.

    Raises:
        ValueError, IndexError, KeyError, EOFError, UnpicklingError: it is truncated, or is not
            plain data.
    """
    return _Unpickler(data, name).load()


#: Python's unpickler in Python, whose actions can be replaced one by one; typeshed knows its class
#: in C alone.
_Python: Any = pickle._Unpickler


class _Unpickler(_Python):  # type: ignore[misc]
    """Python's own reader of pickles, with actions of its own for calls, fields and keys."""

    def __init__(self, data: bytes, name: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._name, self._length, self._copied = name, len(data), 0

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        return self._name(module, name)

    def called(self) -> None:
        """Call the stand-in for a name."""
        args, of = self.stack.pop(), self.stack.pop()
        if not isinstance(of, PickledName) or type(args) is not tuple:
            raise ValueError(f"it calls a {type(of).__name__}")
        self._copied += sum(len(x) for x in args if isinstance(x, list | dict))
        if self._copied > self._length:
            raise ValueError("it copies more than it has")
        self.append(of.call(args))

    def built(self) -> None:
        """Give the last record its fields."""
        fields = self.stack.pop()
        self._last(Record).fields = fields

    def appended(self, items: list[Any]) -> None:
        """Append items to the last list."""
        self._last(list).extend(items)

    def entered(self, items: list[Any]) -> None:
        """Enter keys and values into the last dict."""
        into = self._last(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            into[_key(key)] = value

    def pair(self) -> None:
        """Enter one key and its value."""
        value, key = self.stack.pop(), self.stack.pop()
        self.entered([key, value])

    def _last(self, kind: type) -> Any:
        """Return the last value, which is of a kind."""
        x = self.stack[-1]
        if type(x) is not kind:
            raise ValueError(f"it takes a {type(x).__name__} for a {kind.__name__}")
        return x


def _key(x: Any) -> Hashable:
    """Return the key of a dict: a tuple in a tuple could take forever to be hashed."""
    for part in x if type(x) is tuple else (x,):
        if not isinstance(part, _KEYS) and type(part).__module__ != "torch":
            raise ValueError(f"a {type(part).__name__} is the key of a dict")
    key: Hashable = x
    return key


#: Instructions whose actions are Python's own: of numbers, texts, bytes, lists, tuples and notes.
_PLAIN = (
    "PROTO", "FRAME", "MARK", "STOP", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT",
    "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "EMPTY_LIST", "EMPTY_TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "EMPTY_DICT", "BINGET", "LONG_BINGET", "BINPUT",
    "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL",
)  # fmt: skip


class _Actions(dict[int, Callable[[_Unpickler], object]]):
    """Instruction -> its action; those for arbitrary objects, and of old protocols, are missing."""

    def __missing__(self, op: int) -> Any:
        raise ValueError(f"it has the instruction {op:#04x}, which no data need")


_CHOSEN: Mapping[bytes, Callable[[_Unpickler], object]] = {
    pickle.REDUCE: _Unpickler.called,
    pickle.NEWOBJ: _Unpickler.called,  # a class without arguments
    pickle.BUILD: _Unpickler.built,
    pickle.APPEND: lambda r: r.appended([r.stack.pop()]),
    pickle.APPENDS: lambda r: r.appended(r.pop_mark()),
    pickle.SETITEM: _Unpickler.pair,
    pickle.SETITEMS: lambda r: r.entered(r.pop_mark()),
    pickle.EMPTY_SET: lambda r: r.append([]),  # its items, which nobody looks up
    pickle.ADDITEMS: lambda r: r.appended(r.pop_mark()),
    pickle.FROZENSET: lambda r: r.append(r.pop_mark()),
}
_OWN = {op[0]: action for op, action in _CHOSEN.items()}
_PYTHONS = {op: _Python.dispatch[op] for op in (getattr(pickle, name)[0] for name in _PLAIN)}
_Unpickler.dispatch = _Actions({**_PYTHONS, **_OWN})
