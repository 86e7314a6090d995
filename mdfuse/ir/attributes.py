"""Attributes of instructions: their names, and which values they may have.

A value is checked with the number of dims of the tensor that it is about, where that is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from mdfuse.extents.expressions import LARGEST, UNKNOWN
from mdfuse.names import is_name

#: (value, number of dims of the tensor or None) -> whether the attribute may have the value.
Check = Callable[[Any, int | None], bool]


@dataclass(frozen=True, slots=True)
class Attr:
    """An attribute of an instruction.

    Attributes:
        name: as programs print it.
        kind: what it is, in words, for error messages.
        holds: whether the attribute may have a value.
        required: whether there is no default.
        is_local: whether only projections have it: what one rank's part of the operation needs.
        of: whose dims it is about.
    """

    name: str
    kind: str
    holds: Check
    required: bool = False
    is_local: bool = False
    of: Literal["operand", "result"] = "operand"

    @property
    def is_index(self) -> bool:
        """True if the attribute may be an index expression."""
        return self.holds is _is_index

    @property
    def is_flag(self) -> bool:
        """True if the attribute is True or False."""
        return self.holds is _is_bool

    @property
    def is_shape(self) -> bool:
        """True if the attribute is a list of extents."""
        return self.holds is _is_shape

    @property
    def is_place(self) -> bool:
        """True if the attribute says where something is along dims, which few elements lack."""
        return self.holds in (_are_counts, _are_places, _are_steps)

    def for_few(self, value: Any, keeps_ones: bool = False) -> Any:
        """Return the value that the attribute has where each dim has two elements.

        Args:
            value: of the attribute, where dims have any extents.
            keeps_ones: dims of one element have one there, too.
        """
        if self.is_shape:
            return tuple(min(n, 2) if keeps_ones else 2 for n in value)
        return min(value, 2) if self.holds is _is_extent else value


def _is_int(x: Any, n: int | None = None) -> bool:
    return type(x) is int and -LARGEST - 1 <= x <= LARGEST


def _are_counts(x: Any, n: int | None) -> bool:
    return _are_ints(x) and all(k >= 0 for k in x)


def _are_labels(x: Any, n: int | None) -> bool:
    return _are_ints(x) and len({*x}) == len(x) and all(0 <= k < 52 for k in x)


def _is_extent(x: Any, n: int | None) -> bool:
    return _is_int(x) and x >= 0


def _is_index(x: Any, n: int | None) -> bool:
    return isinstance(x, UNKNOWN) or _is_int(x)


def _is_number(x: Any, n: int | None) -> bool:
    return _is_int(x) or isinstance(x, float | bool)


def _are_numbers(x: Any, n: int | None) -> bool:
    return isinstance(x, tuple) and all(_is_number(e, None) for e in x)


def _is_bool(x: Any, n: int | None) -> bool:
    return isinstance(x, bool)


def _is_drawn(x: Any, n: int | None) -> bool:
    return x in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _are_axes(x: Any, n: int | None) -> bool:
    return isinstance(x, tuple) and all(map(is_name, x)) and len({*x}) == len(x)


def _is_dim(x: Any, n: int | None) -> bool:
    """Return whether x is a dim of n dims; a scalar has the dims 0 and -1, as in torch."""
    return _is_int(x) and (n is None or -max(n, 1) <= x < max(n, 1))


def _are_ints(x: Any) -> bool:
    return isinstance(x, tuple) and all(map(_is_int, x))


def _are_dims(x: Any, n: int | None) -> bool:
    if not _are_ints(x):
        return False
    if n is None:
        return len(set(x)) == len(x)
    return all(-n <= d < n for d in x) and len({d % n for d in x}) == len(x)


def is_permutation(x: Any, n: int | None) -> bool:
    """Return whether x names each of n dims once."""
    return _are_dims(x, n) and (n is None or len(x) == n)


def _is_shape(x: Any, n: int | None) -> bool:
    return _are_ints(x) and all(e >= 0 for e in x) and math.prod(x) <= LARGEST


def _fits(x: Any, n: int | None, least: int) -> bool:
    return _are_ints(x) and all(k >= least for k in x) and (n is None or len(x) == n)


def _are_places(x: Any, n: int | None) -> bool:
    return _fits(x, n, 0)


def _are_steps(x: Any, n: int | None) -> bool:
    return _fits(x, n, 1)


def _is_box(x: Any, n: int | None) -> bool:
    return isinstance(x, tuple) and all(
        _are_ints(ends) and len(ends) % 2 == 0 < len(ends) and ends[0] >= 0 and _is_rising(ends)
        for ends in x
    )


def _is_rising(ends: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in pairwise(ends))


def _is_part(x: Any, n: int | None) -> bool:
    return _are_ints(x) and len(x) == 3 and 0 <= x[0] <= x[1] <= x[2]


#: kind -> (in words, check).
_KINDS: dict[str, tuple[str, Check]] = {
    "int": ("an integer", _is_int),
    "numbers": ("a list of numbers", _are_numbers),
    "count": ("a number from 1 on", lambda x, n: _is_int(x) and x > 0),
    "counts": ("a list of numbers from 0 on", _are_counts),
    "labels": ("a list of different labels from 0 to 51", _are_labels),
    "place": ("a dim counted from 0", lambda x, n: _is_int(x) and 0 <= x < 64),
    "extent": ("a number from 0 on", _is_extent),
    "index": ("an index expression", _is_index),
    "number": ("a number", _is_number),
    "probability": ("a number from 0 to 1", lambda x, n: _is_number(x, n) and 0 <= x <= 1),
    "bool": ("True or False", _is_bool),
    "dtype": ("a dtype", lambda x, n: isinstance(x, torch.dtype)),
    "drawn": ("f64, f32, f16 or bf16", _is_drawn),
    "axis": ("a name", lambda x, n: is_name(x)),
    "axes": ("a list of different names", _are_axes),
    "dim": ("a dim", _is_dim),
    "dims": ("a list of different dims", _are_dims),
    "permutation": ("a permutation, which names each dim once", is_permutation),
    "shape": ("a list of extents", _is_shape),
    "places": ("a list of places, one per dim", _are_places),
    "steps": ("a list of steps of at least 1, one per dim", _are_steps),
    "box": ("a list of ranges, one or several in order per dim", _is_box),
    "part": ("the first row, the row behind the last, and how many rows there are", _is_part),
}


def attr(name: str, kind: str, required: bool = False, **fields: Any) -> Attr:
    """Return an attribute of one of the kinds above."""
    words, holds = _KINDS[kind]
    return Attr(name, words, holds, required, **fields)


def is_word(x: Any, n: int | None) -> bool:
    """Return whether x is a word that programs print as it is."""
    return is_name(x)


def word(name: str, *words: str, required: bool = False) -> Attr:
    """Return an attribute whose value is one of some words."""
    return Attr(
        name, "one of " + ", ".join(words), lambda x, n: isinstance(x, str) and x in words, required
    )
