"""Errors with the fact, its place, the reason and a remedy."""

from __future__ import annotations

import contextlib
import difflib
import functools
import linecache
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

#: The folder of mdfuse's own code; lines elsewhere are the user's.
PACKAGE = str(Path(__file__).resolve().parent) + "/"


def _directory_of(package: str) -> str:
    """Find the folder of a package without importing it."""
    spec = find_spec(package)
    return f"{Path(spec.origin).parent}/" if spec and spec.origin else PACKAGE


#: The folders of mdfuse and of torch, whose functions call mdfuse on its values.
OWN = (PACKAGE, _directory_of("torch"))


def printable(text: str) -> str:
    """Return a text with everything unprintable escaped: one line that can be written anywhere.

    >>> printable("caf\u00e9.py"), printable("a\\rb"), printable("\\udcff")
    ('café.py', 'a\\\\rb', '\\\\udcff')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def counted(count: object, noun: str) -> str:
    """Return a count with its noun in the right number.

    >>> counted(1, "input"), counted(0, "dim"), counted(2, "axis"), counted(3, "host of a mesh")
    ('1 input', '0 dims', '2 axes', '3 hosts of a mesh')
    """
    if count == 1:
        return f"1 {noun}"
    first, *others = noun.split(" ", 1)
    return " ".join([f"{count} {_PLURALS.get(first, first + 's')}", *others])


#: Plurals of nouns that take more than an s.
_PLURALS = {"axis": "axes", "class": "classes", "process": "processes"}


#: The most names that an error lists.
_LISTED = 12


def listed(names: Iterable[str]) -> str:
    """Return the first names of a list, as errors show it.

    >>> listed("xyz"), listed(f"w{n}" for n in range(100))
    ('x, y, z', 'w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11 and 88 others')
    """
    every = [*names]
    hidden = len(every) - _LISTED
    shown = ", ".join(every[:_LISTED])
    return f"{shown} and {counted(hidden, 'other')}" if hidden > 0 else shown


#: The most characters of a value that an error shows.
_SHOWN = 300


def shown(value: object, most: int = _SHOWN) -> str:
    """Return a value as errors show it, whatever it is.

    >>> shown("a"), shown(10**5000), shown([0] * 1000)[-9:]
    ("'a'", 'a number of thousands of digits', ' 0, 0,...')
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


def near(name: str, names: Iterable[str]) -> str:
    """Return the five names that are most like one.

    >>> near("max_poool", ["min", "max", "mean", "max_pool", "mean_pool", "pool", "p", "q"])
    'max_pool, mean_pool, pool, max, mean'
    """
    return ", ".join(difflib.get_close_matches(name, [*names], 5, 0.0))


#: The note of values that a gradient recomputes instead of keeping them.
RECOMPUTED = "recomputed"
#: The note of values that a gradient computes.
BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program.

    Attributes:
        file: its path.
        line: its number.
        note: a remark on the code there, as "backward".
    """

    file: str
    line: int
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{printable(os.path.basename(self.file))}:{self.line}{note}"

    def quote(self) -> str:
        """Return the place and the text of the line, for error messages."""
        return f"{self}   {printable(_line_of(self.file, self.line))}".rstrip()


def _line_of(file: str, line: int) -> str:
    """Return the text of a line; empty where no such file exists or can exist."""
    try:
        return linecache.getline(file, line).strip()
    except ValueError:
        return ""


#: Files of Python between mdfuse and its caller.
_BETWEEN = (functools.__file__, contextlib.__file__, threading.__file__)

#: The line of the user's that a thread of mdfuse works for.
working_for: ContextVar[Source | None] = ContextVar("working_for", default=None)


def is_own(code: CodeType) -> bool:
    """Return whether code is mdfuse's own, or stands between mdfuse and its caller.

    Code in between is of dataclasses, cached properties, contexts that are functions, threads, or
    torch.
    """
    is_dataclass = code.co_filename == "<string>" and code.co_name == "__init__"
    is_between = code.co_filename in _BETWEEN
    return is_dataclass or is_between or code.co_filename.startswith(OWN)


def user_source() -> Source | None:
    """Return the innermost line on the stack that is not mdfuse's own.

    In a thread of mdfuse it is `working_for`.
    """
    frame = sys._getframe(1)
    while frame is not None and is_own(frame.f_code):
        if frame.f_back is None:
            return working_for.get()
        frame = frame.f_back
    return Source(frame.f_code.co_filename, frame.f_lineno)


class MdfuseError(Exception):
    """Base of every error that mdfuse raises on purpose.

    Args:
        what: the fact, with the values in it.
        where: lines that locate it: the user's file and line (by default the line that called), a
            rank, an instruction.
        because: the rule that was broken.
        hint: what to do instead.
        follows: this error follows from one that another rank raised; launchers show that one.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | Sequence[str] = (),
        because: str | None = None,
        hint: str | None = None,
        follows: bool = False,
    ) -> None:
        self.what = what
        self.follows = follows
        where = (where,) if isinstance(where, str) else tuple(where)
        self.where = where or _calling_line()
        self.because = because
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.what, *(f"  {line}" for line in self.where if line)]
        if self.because:
            lines.append(f"  because     {self.because}")
        if self.hint:
            lines.append(f"  try         {self.hint}")
        return "\n".join(printable(line) for text in lines for line in text.split("\n"))


def _calling_line() -> tuple[str, ...]:
    """Return the user's line; none if a tool calls, as the command line does."""
    source = user_source()
    return () if source is None or "site-packages" in source.file else (source.quote(),)


class MeshError(MdfuseError):
    """A mesh that is impossible, or a rank or an axis that a mesh does not have."""


class LayoutError(MdfuseError):
    """A layout that is impossible, or that contradicts another one."""


class DefinitionError(MdfuseError):
    """A mistake in a fusion definition: an operation, an argument, or the use of a value."""


class LoweringError(MdfuseError):
    """A fusion that cannot be turned into a host program."""


class CommunicationError(MdfuseError):
    """A communication whose kind, team, root or buffers do not fit together."""


class ProgramError(MdfuseError):
    """A wrong host program, or wrong arguments of a run."""


class IndexRangeError(ProgramError, IndexError):
    """An index into a tensor that is out of range in a run; see `Options.check_indices`."""


class CountsError(ProgramError):
    """More rows than there may be, counted in a run; all ranks of the program raise it."""


class BackendError(MdfuseError):
    """A backend or launcher that is missing, unusable or failing."""


def message_of(error: BaseException) -> str:
    """Return the text of an error for other ranks; one of mdfuse needs no class name."""
    name = type(error).__name__
    return str(error) if isinstance(error, MdfuseError) else f"{name}: {error}".rstrip(": ")


def reason(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
