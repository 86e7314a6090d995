"""Facts about a program that are computed once, by modules which the program knows nothing of."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from mdfuse.hir.program import HostProgram

T = TypeVar("T")


def once(function: Callable[[HostProgram], T]) -> Callable[[HostProgram], T]:
    """Keep the value of a function of a program as long as the program lives.

    The value lies beside the program's own cached properties, so it goes with the program. An error
    is not kept.
    """
    key = _key(function)

    @wraps(function)
    def remembered(program: HostProgram) -> T:
        facts = vars(program)
        if key not in facts:
            facts[key] = function(program)
        value: T = facts[key]
        return value

    return remembered


def note(function: Callable[[HostProgram], T], program: HostProgram, value: T) -> None:
    """Note the value of a function that is computed once, where it is known from elsewhere."""
    vars(program)[_key(function)] = value


def _key(function: Callable[[HostProgram], T]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
