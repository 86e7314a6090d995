"""The name of the variable that the user's line assigns to, so that programs read like it."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from types import CodeType

from mdfuse.errors import is_own

_STORES = ("STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF")


def assigned_name() -> str | None:
    """`h` while the user's frame executes the call in `h = f(...)`; None for other calls."""
    frame = sys._getframe(1)
    while is_own(frame.f_code):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return _name_after(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _name_after(code: CodeType, offset: int) -> str | None:
    following = next((i for i in dis.get_instructions(code) if i.offset > offset), None)
    if following is not None and following.opname in _STORES:
        return str(following.argval)
    return None
