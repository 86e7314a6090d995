"""Index expressions: the integers that host programs compute with.

They consist of loop indices, the rank, its coordinate along a mesh axis, extents of buffers, and
arithmetic on these. Once a program is projected onto one rank, only loop indices are left.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mdfuse.errors import ProgramError

#: The largest number; numbers of programs have 64 bits, as torch's have.
LARGEST = 2**63 - 1
#: How deep expressions, and blocks of instructions, may be nested.
DEEPEST = 64

#: op -> how it is computed. Comparisons give 0 or 1.
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "mod": operator.mod,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
}


@dataclass(frozen=True, slots=True)
class Term:
    """A number that is known later: when a program is projected, in an iteration, or in a run.

    Attributes:
        kind: "index" (of a loop), "rank", "coord" (along an axis), "extent" (of a buffer) or
            "symbol" (an extent of an input that is not known yet).
        name: the loop index, the axis, the buffer, or the symbol.
        dim: extent: the dim of the buffer.
    """

    kind: str
    name: str = ""
    dim: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "index":
                return f"%{self.name}"
            case "coord":
                return f"coord({self.name})"
            case "extent":
                return f"extent(%{self.name},{self.dim})"
            case "symbol":
                return self.name
        return self.kind


@dataclass(frozen=True, slots=True)
class Calc:
    """An operation of `ARITHMETIC` on two index expressions."""

    op: str
    left: Index
    right: Index
    #: how deep it is nested
    depth: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        depth = 1 + max(_depth(self.left), _depth(self.right))
        if depth > DEEPEST:
            raise ProgramError(
                f"an index expression of {depth} operations, one inside the other",
                because=f"at most {DEEPEST} are nested",
                hint="write the number that it is, or a shorter expression",
            )
        object.__setattr__(self, "depth", depth)

    def __str__(self) -> str:
        return f"{_nested(self.left)} {self.op} {_nested(self.right)}"


Index = int | Term | Calc


def _depth(index: Index) -> int:
    return index.depth if isinstance(index, Calc) else 0


def _nested(index: Index) -> str:
    return f"({index})" if isinstance(index, Calc) else str(index)


def loop(name: str) -> Term:
    """Return the term of a loop index.

    >>> str(calc("mod", calc("+", loop("i"), Term("coord", "tp")), 4))
    '(%i + coord(tp)) mod 4'
    """
    return Term("index", name)


def calc(op: str, left: Index, right: Index) -> Index:
    """Apply an operation: return its value where both sides are numbers, else an expression.

    Raises:
        ProgramError: a division by zero; a number beyond 64 bits.
    """
    if not (isinstance(left, int) and isinstance(right, int)):
        return Calc(op, left, right)
    if right == 0 and op in ("//", "mod"):
        raise ProgramError(
            f"the index {left} {op} {right}",
            because="nothing is divided by zero",
            hint="let the divisor be at least 1 on every rank and in every iteration",
        )
    value = ARITHMETIC[op](left, right)
    if not -LARGEST - 1 <= value <= LARGEST:
        raise ProgramError(
            f"the index {left} {op} {right}",
            because="numbers have 64 bits",
            hint="write an expression whose value is smaller",
        )
    return value


def resolve(index: Index, known: Callable[[Term], int | None]) -> Index:
    """Return the index with known terms replaced by their numbers, and computed where possible.

    >>> resolve(Calc("+", loop("i"), 2), {loop("i"): 3}.get)
    5
    """
    if isinstance(index, Term):
        value = known(index)
        return index if value is None else value
    if isinstance(index, Calc):
        return calc(index.op, resolve(index.left, known), resolve(index.right, known))
    return index


def terms(index: Index) -> Iterator[Term]:
    """Yield the terms of an index."""
    if isinstance(index, Term):
        yield index
    elif isinstance(index, Calc):
        yield from terms(index.left)
        yield from terms(index.right)
