"""Where the user's code calls: its line, and the variable that the call is assigned to."""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from mdfuse.errors import OWN, PACKAGE, Source

_STORES = ("STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF")

#: Whether a file is one of mdfuse's, or of torch's.
_KNOWN: dict[str, bool] = {}


def find_site() -> tuple[CodeType, int]:
    """The innermost place on the stack outside of mdfuse: its code, and how far that is.

    Where all of the stack is mdfuse's, as in its command line, the outermost one.
    """
    frame = sys._getframe(2)
    while True:
        code = frame.f_code
        is_own = _KNOWN.get(code.co_filename)
        if is_own is None:
            is_own = _KNOWN[code.co_filename] = code.co_filename.startswith(OWN)
        outer = frame.f_back if is_own else None
        if outer is None:
            return code, frame.f_lasti
        frame = outer


@dataclass(frozen=True, slots=True)
class Site:
    """One call of the user's.

    Attributes:
        written: code, offset of the instruction that calls, and the name that the call gives its
            result.
    """

    written: tuple[CodeType, int, str | None]

    @property
    def source(self) -> Source | None:
        """The line."""
        code, offset, _ = self.written
        return _source(code.co_filename, code, offset)

    @property
    def where(self) -> list[str]:
        """The line, for error messages."""
        return [self.source.quote()] if self.source else []

    @property
    def name(self) -> str | None:
        """`h` for the call in `h = f(...)`; None for other calls."""
        code, offset, said = self.written
        return said or _name_after(code, offset)


@lru_cache(maxsize=4096)
def _source(file: str, code: CodeType, offset: int) -> Source | None:
    """The file is named since equal code may stand in several."""
    if file.startswith(PACKAGE):
        return None
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return Source(file, next(lines, None) or code.co_firstlineno)


@lru_cache(maxsize=4096)
def _name_after(code: CodeType, offset: int) -> str | None:
    following = next((i for i in dis.get_instructions(code) if i.offset > offset), None)
    if following is not None and following.opname in _STORES:
        return str(following.argval)
    return None
