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
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def remembered(program: HostProgram) -> T:
        facts = vars(program)
        if key not in facts:
            facts[key] = function(program)
        value: T = facts[key]
        return value

    return remembered
