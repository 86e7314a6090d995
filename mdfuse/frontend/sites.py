"""Call sites of user code: the line, and the variable that the call is assigned to."""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType

from mdfuse.errors import OWN, PACKAGE, Source
from mdfuse.names import is_name

_STORES = ("STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF")

#: File -> whether it belongs to mdfuse or torch.
_KNOWN: dict[str, bool] = {}


@dataclass(frozen=True, slots=True)
class Site:
    """A place where the user's code calls mdfuse.

    Attributes:
        code: the code object that calls.
        offset: of the instruction that calls.
        file: where the code stands; equal code may stand in several files.
        depth: the number of mdfuse frames between the call and the lookup.
        said: the name that the call passes for its result.
    """

    code: CodeType
    offset: int
    file: str
    depth: int = field(compare=False)
    said: str | None = None

    def naming(self, name: str | None) -> Site:
        """The site of a call that gives its result this name."""
        return self if name == self.said else replace(self, said=name)

    @property
    def source(self) -> Source | None:
        """The line."""
        return _source(self.file, self.code, self.offset)

    @property
    def where(self) -> list[str]:
        """The line, for error messages."""
        return [self.source.quote()] if self.source else []

    @property
    def name(self) -> str | None:
        """`h` for the call in `h = f(...)`; None for other calls."""
        variables = _names_after(self.code, self.offset)
        return self.said or (variables[0] if len(variables) == 1 else None)

    def names(self, n: int) -> tuple[str | None, ...]:
        """`(v, i)` for the call in `v, i = f(...)`, which gives n results; else n times None."""
        variables = _names_after(self.code, self.offset)
        return variables if len(variables) == n else (None,) * n


@dataclass(frozen=True, slots=True)
class Derived:
    """The origin of values that mdfuse records by itself: a user's line, and maybe a name."""

    source: Source | None
    name: str | None = None

    def names(self, n: int) -> tuple[str | None, ...]:
        """None for each of n results."""
        return (None,) * n

    @property
    def where(self) -> list[str]:
        """The line, for error messages."""
        return [self.source.quote()] if self.source else []


def find_site() -> Site:
    """Return the innermost place on the stack outside of mdfuse, seen from the caller.

    If the whole stack is mdfuse's, as in its command line, return the outermost one.
    """
    frame, depth = sys._getframe(2), 1
    while True:
        code = frame.f_code
        is_own = _KNOWN.get(code.co_filename)
        if is_own is None:
            is_own = _KNOWN[code.co_filename] = code.co_filename.startswith(OWN)
        outer = frame.f_back if is_own else None
        if outer is None:
            return Site(code, frame.f_lasti, code.co_filename, depth)
        frame, depth = outer, depth + 1


def is_at(site: Site) -> bool:
    """Return whether the caller was called from a site, as the last time: one look at one frame."""
    try:
        frame = sys._getframe(site.depth + 1)
    except ValueError:  # the stack is not as deep
        return False
    return frame.f_code is site.code and frame.f_lasti == site.offset


@lru_cache(maxsize=4096)
def _source(file: str, code: CodeType, offset: int) -> Source | None:
    """Return the line of an instruction; the file is passed since several may have equal code."""
    if file.startswith(PACKAGE):
        return None
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return Source(file, next(lines, None) or code.co_firstlineno)


@lru_cache(maxsize=4096)
def _names_after(code: CodeType, offset: int) -> tuple[str | None, ...]:
    """Return the variables that a call's result is assigned to; None for other targets."""
    every = [*dis.get_instructions(code)]
    following = [i for i in every if i.offset > offset]
    if every[-len(following) - 1].opname == "PRECALL":  # where Python 3.11 calls, once it is warm
        following = following[1:]
    n = 1
    if following and following[0].opname == "UNPACK_SEQUENCE":
        n, following = following[0].arg or 1, following[1:]
    names: list[str | None] = [None] * n
    for at, i in enumerate(following[:n]):
        if i.opname not in _STORES:  # one is no variable, so the offsets of the others differ
            return (None,) * n
        names[at] = str(i.argval) if is_name(i.argval) else None
    return tuple(names)
