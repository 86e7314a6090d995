"""Read a pickle as data: lists, dicts, texts, numbers, and stand-ins for names.

Python's own unpickler calls any function that a file names, and trusts its numbers: eight bytes
make it allocate a table of gigabytes. Here only functions passed by the reader are called, and time
and memory are linear in the file's length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
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


#: The mark on the stack where a list of items begins.
_MARK = object()
#: Keys of dicts, besides tuples of these: their hashes take no time.
_KEYS = (str, bytes, int, float, type(None), Record, PickledName)


def read(data: bytes, name: Callable[[str, str], Any]) -> Any:
    """Return the data of a pickle.

    Args:
        data: of protocol 2 or a later one.
        name: maps a module and a name in it to a stand-in: a value, or a `PickledName`.

    Raises:
        ValueError, IndexError, KeyError, struct.error: it is truncated, or is not plain data.
    """
    return _PickleReader(data, name).result()


class _PickleReader:
    """A stack of values, and noted values by number.

    Attributes:
        data, at: the bytes, and the position.
        stack: values, and marks.
        noted: values by number.
    """

    def __init__(self, data: bytes, name: Callable[[str, str], Any]) -> None:
        self.data, self.at, self._name = data, 0, name
        self.stack: list[Any] = []
        self.noted: dict[int, Any] = {}
        self._copied = 0

    def result(self) -> Any:
        """Read to the end."""
        data, ops = self.data, _OPS
        while True:
            op = data[self.at]
            self.at += 1
            act = ops.get(op)
            if act is None:
                break
            act(self)
        if op != _STOP:
            raise ValueError(f"it has the instruction {op:#04x}, which no data need")
        (content,) = self.stack
        return content

    # -- bytes -----------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        first, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise ValueError(f"it ends within {count} bytes that it announces")
        return self.data[first : self.at]

    def number(self, form: struct.Struct) -> Any:
        """A number of a form."""
        (number,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return number

    def line(self) -> str:
        """Text to the end of the line."""
        end = self.data.index(b"\n", self.at)
        return self._take(end + 1 - self.at)[:-1].decode()

    def text(self, form: struct.Struct) -> str:
        """Text of a length that stands before it."""
        return self.bytes(form).decode("utf-8", "surrogatepass")

    def bytes(self, form: struct.Struct) -> bytes:
        """Bytes of a length that stands before them."""
        return self._take(self.number(form))

    # -- the stack -------------------------------------------------------------------------------

    def push(self, x: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(x)

    def pop(self) -> Any:
        """Take the last value; a mark is none."""
        x = self.stack.pop()
        if x is _MARK:
            raise ValueError("it takes a mark for a value")
        return x

    def last(self, kind: type) -> Any:
        """The last value, which is of a kind."""
        x = self.stack[-1]
        if type(x) is not kind:
            raise ValueError(f"it takes a {type(x).__name__} for a {kind.__name__}")
        return x

    def several(self) -> list[Any]:
        """Take the values behind the last mark."""
        items: list[Any] = []
        while (x := self.stack.pop()) is not _MARK:
            items.append(x)
        return items[::-1]

    def fixed(self, count: int) -> None:
        """Make a tuple of the last values."""
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    # -- lists and dicts -------------------------------------------------------------------------

    def append(self, items: list[Any]) -> None:
        """Append items to the last list."""
        self.last(list).extend(items)

    def enter(self, items: list[Any]) -> None:
        """Enter keys and values into the last dict."""
        into = self.last(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            into[_key(key)] = value

    def pair(self) -> None:
        """Enter one key and its value."""
        value, key = self.pop(), self.pop()
        self.enter([key, value])

    # -- names and notes -------------------------------------------------------------------------

    def note(self, number: int) -> None:
        """Note the last value."""
        self.noted[number] = self.stack[-1]

    def again(self, number: int) -> None:
        """Put a value on the stack that was noted."""
        self.push(self.noted[number])

    def named(self) -> None:
        """Put the stand-in for a name on the stack."""
        name, module = self.pop(), self.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("it has a name that is no text")
        self.push(self._name(module, name))

    def in_lines(self) -> None:
        """A name in two lines."""
        self.push(self._name(self.line(), self.line()))

    def call(self) -> None:
        """Call the stand-in for a name."""
        args, of = self.pop(), self.pop()
        if not isinstance(of, PickledName) or type(args) is not tuple:
            raise ValueError(f"it calls a {type(of).__name__}")
        self._copied += sum(len(x) for x in args if isinstance(x, list | dict))
        if self._copied > len(self.data):
            raise ValueError("it copies more than it has")
        self.push(of.call(args))

    def build(self) -> None:
        """Give the last record its fields."""
        fields = self.pop()
        self.last(Record).fields = fields


def _key(x: Any) -> Hashable:
    """Return the key of a dict: a tuple in a tuple could take forever to be hashed."""
    for part in x if type(x) is tuple else (x,):
        if not isinstance(part, _KEYS) and type(part).__module__ != "torch":
            raise ValueError(f"a {type(part).__name__} is the key of a dict")
    key: Hashable = x
    return key


_STOP = ord(".")
_B, _H, _I, _Q = (struct.Struct(f"<{form}") for form in "BHIQ")
_SIGNED, _FLOAT = struct.Struct("<i"), struct.Struct(">d")


def _again(r: _PickleReader) -> None:
    """A value that was noted, of which files are full."""
    r.stack.append(r.noted[r.data[r.at]])
    r.at += 1


def _small(r: _PickleReader) -> None:
    """A number of a byte."""
    r.stack.append(r.data[r.at])
    r.at += 1


#: Instruction -> its action. Instructions of old protocols, and for arbitrary objects, are missing.
_OPS: dict[int, Callable[[_PickleReader], object]] = {
    0x80: lambda r: r.number(_B),  # the protocol
    0x95: lambda r: r.number(_Q),  # the size of a frame, which is not needed
    ord("("): lambda r: r.push(_MARK),
    ord("0"): lambda r: r.pop(),
    ord("1"): lambda r: r.several(),
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("J"): lambda r: r.push(r.number(_SIGNED)),
    ord("K"): _small,
    ord("M"): lambda r: r.push(r.number(_H)),
    0x8A: lambda r: r.push(int.from_bytes(r.bytes(_B), "little", signed=True)),
    0x8B: lambda r: r.push(int.from_bytes(r.bytes(_I), "little", signed=True)),
    ord("G"): lambda r: r.push(r.number(_FLOAT)),
    0x8C: lambda r: r.push(r.text(_B)),
    ord("X"): lambda r: r.push(r.text(_I)),
    0x8D: lambda r: r.push(r.text(_Q)),
    ord("C"): lambda r: r.push(r.bytes(_B)),
    ord("B"): lambda r: r.push(r.bytes(_I)),
    0x8E: lambda r: r.push(r.bytes(_Q)),
    ord("]"): lambda r: r.push([]),
    ord("a"): lambda r: r.append([r.pop()]),
    ord("e"): lambda r: r.append(r.several()),
    ord(")"): lambda r: r.push(()),
    0x85: lambda r: r.fixed(1),
    0x86: lambda r: r.fixed(2),
    0x87: lambda r: r.fixed(3),
    ord("t"): lambda r: r.push(tuple(r.several())),
    ord("}"): lambda r: r.push({}),
    ord("s"): lambda r: r.pair(),
    ord("u"): lambda r: r.enter(r.several()),
    0x8F: lambda r: r.push([]),  # a set: its items, which nobody looks up
    0x90: lambda r: r.append(r.several()),
    0x91: lambda r: r.push(r.several()),
    ord("h"): _again,
    ord("j"): lambda r: r.again(r.number(_I)),
    ord("q"): lambda r: r.note(r.number(_B)),
    ord("r"): lambda r: r.note(r.number(_I)),
    0x94: lambda r: r.noted.__setitem__(len(r.noted), r.stack[-1]),
    ord("c"): lambda r: r.in_lines(),
    0x93: lambda r: r.named(),
    ord("R"): lambda r: r.call(),
    0x81: lambda r: r.call(),  # a class without arguments
    ord("b"): lambda r: r.build(),
}
