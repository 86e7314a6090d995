"""Symbolic extents: integers that remember which expression of the inputs' extents they are.

A definition with symbolic extents is lowered with an example of each. Arithmetic carries the
expression along; a decision is taken for the example and recorded as a guard. The lowered program
then serves all extents that satisfy the guards, with their numbers in the place of symbols.

    >>> from mdfuse.extents.assumptions import Assumptions, assuming
    >>> with assuming(Assumptions()) as assumed:
    ...     n = symbolic("x.0", 8)
    ...     half, is_long = n // 2, n > 1
    >>> half, is_long, [str(guard) for guard in assumed.guards]
    (x.0//2, True, ['x.0 > 1'])

An operation that needs the number itself (`range`, a slice, a hash, a float) gets the example's,
and a guard pins the extent to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from mdfuse.extents.assumptions import NOTHING, active_assumptions, decide, known_facts
from mdfuse.extents.expressions import ARITHMETIC, Poly, constant, plus, symbol, times
from mdfuse.extents.facts import Facts, folded, simplified

T = TypeVar("T")


#: The type checker takes an extent for an int. At run time it is none: Python reads the number of
#: an int without calling its methods, so that no guard would be left.
if TYPE_CHECKING:
    _Integer = int
else:
    _Integer = object


class Extent(_Integer):
    """An extent that depends on symbolic ones.

    Attributes:
        poly: how it depends on them.
        examples: the number of each symbol that the lowering takes.
        number: its number for the examples.
    """

    __slots__ = ("examples", "number", "poly")

    poly: Poly
    examples: Mapping[str, int]
    number: int

    def __repr__(self) -> str:
        return str(simplified(self.poly, known_facts()))

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce__(self) -> Any:
        return _extent, (self.poly, dict(self.examples))

    # -- decisions -------------------------------------------------------------------------------

    def _compared(self, other: object, op: str) -> Any:
        """Decide by the examples, and leave a guard."""
        if isinstance(other, float):
            return ARITHMETIC[op](pinned(self), other)  # type: ignore[arg-type]
        if not isinstance(other, int | Extent):
            return NotImplemented
        relation, times, off = _RELATIONS[op]
        poly = plus(constant(off), plus(self.poly, poly_from(other), -1), times)
        return decide(poly, relation, _merged(self, other))

    def __bool__(self) -> bool:
        return decide(self.poly, "!=", self.examples)

    def __hash__(self) -> int:
        return hash(pinned(self))

    # -- arithmetic ------------------------------------------------------------------------------

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> Any:
        return _calculated("-", 0, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self


#: a op b -> (relation, sign, offset): whether `sign * (a - b) + offset` has the relation to 0.
_RELATIONS = {
    "==": ("==", 1, 0),
    "!=": ("!=", 1, 0),
    ">=": (">=", 1, 0),
    ">": (">=", 1, -1),
    "<=": (">=", -1, 0),
    "<": (">=", -1, -1),
}


def _comparison(op: str) -> Callable[[Extent, object], Any]:
    return lambda self, other: self._compared(other, op)


def _operation(op: str) -> Callable[[Extent, Any], Any]:
    return lambda self, other: _calculated(op, self, other)


def _reflected(op: str) -> Callable[[Extent, Any], Any]:
    return lambda self, other: _calculated(op, other, self)


def _pinning(name: str) -> Callable[..., Any]:
    """Return a method of int that needs the number itself, which pins the extent."""
    method = getattr(int, name)

    def function(self: Extent, *args: Any) -> Any:
        return method(pinned(self), *(pinned(a) if isinstance(a, Extent) else a for a in args))

    return function


for _op, _name in (
    ("==", "eq"), ("!=", "ne"), (">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")
):  # fmt: skip
    setattr(Extent, f"__{_name}__", _comparison(_op))
for _op, _name in (("+", "add"), ("-", "sub"), ("*", "mul"), ("//", "floordiv"), ("mod", "mod")):
    setattr(Extent, f"__{_name}__", _operation(_op))
    setattr(Extent, f"__r{_name}__", _reflected(_op))
for _name in (
    "truediv", "rtruediv", "pow", "rpow", "lshift", "rlshift", "rshift", "rrshift", "and", "rand",
    "or", "ror", "xor", "rxor", "invert", "round", "trunc", "floor", "ceil", "int", "index",
    "float",
):  # fmt: skip
    setattr(Extent, f"__{_name}__", _pinning(f"__{_name}__"))


def _extent(poly: Poly, examples: Mapping[str, int]) -> int:
    """Return the extent that a polynomial is; a number where it has no symbols."""
    n = poly.constant
    if n is not None:
        return int(n)
    extent = object.__new__(Extent)
    extent.poly, extent.examples, extent.number = poly, examples, poly.value(examples)
    return extent


def symbolic(name: str, example: int) -> int:
    """Return the symbolic extent of a name; programs are lowered with the example."""
    return _extent(symbol(name), {name: example})


def poly_from(n: int) -> Poly:
    """Return the polynomial of an extent, or of a number."""
    return n.poly if isinstance(n, Extent) else constant(int(n))


def _merged(*numbers: Any) -> Mapping[str, int]:
    """Return the examples of the symbols of several extents."""
    examples = [n.examples for n in numbers if type(n) is Extent]
    first = examples[0]
    if all(each is first for each in examples):
        return first
    return {name: n for each in examples for name, n in each.items()}


def _calculated(op: str, a: Any, b: Any) -> Any:
    """Compute with extents and numbers; a result that has symbols is an extent."""
    if isinstance(a, float) or isinstance(b, float):
        a, b = (pinned(x) if type(x) is Extent else x for x in (a, b))
        return ARITHMETIC[op](a, b)
    if not (isinstance(a, int | Extent) and isinstance(b, int | Extent)):
        return NotImplemented
    p, q, examples = poly_from(a), poly_from(b), _merged(a, b)
    match op:
        case "+":
            return _extent(plus(p, q), examples)
        case "-":
            return _extent(plus(p, q, -1), examples)
        case "*":
            return _extent(times(p, q), examples)
    if op in ("//", "mod") and type(b) is Extent and not b:  # a guard: it is not 0
        raise ZeroDivisionError("division by zero")
    active = active_assumptions()
    if active is None:
        return _extent(folded(op, p, q, NOTHING), examples)
    examples, facts = {**active.seen(examples)}, active.facts
    return _extent(folded(op, simplified(p, facts), simplified(q, facts), facts), examples)


def smaller(a: int, b: int) -> int:
    """Return the minimum of two extents, without deciding which of them it is."""
    return min(a, b) if type(a) is type(b) is int else _calculated("min", a, b)


def larger(a: int, b: int) -> int:
    """Return the maximum of two extents, without deciding which of them it is."""
    return max(a, b) if type(a) is type(b) is int else _calculated("max", a, b)


def are_same(a: int, b: int) -> bool:
    """Return whether two extents are equal for all values of the symbols; leave no guard."""
    return a == b if type(a) is type(b) is int else poly_from(a) == poly_from(b)


def repeated(a: int, b: int) -> int:
    """Return the extent to which two aligned dims are repeated; ValueError where they do not fit.

    Nothing is decided for an extent beside a 1, or beside itself; beside a number, the
    number is returned.
    """
    if type(a) is int and a == 1:
        return b
    if (type(b) is int and b == 1) or are_same(a, b):
        return a
    if a == 1:
        return b
    if b != 1 and a != b:
        raise ValueError(f"{a} is not {b}")
    return a if b == 1 or type(a) is int else b


def example(n: int) -> int:
    """Return the number that an extent is for the examples, for uses that decide nothing."""
    return n.number if isinstance(n, Extent) else n


def pinned(n: int) -> int:
    """Return the number that an extent is, and leave a guard that it is this number."""
    if type(n) is Extent:
        decide(plus(n.poly, constant(example(n)), -1), "==", n.examples)
    return example(n)


# -- extents inside programs ---------------------------------------------------------------------


def is_symbolic(x: Any) -> bool:
    """Return whether nested tuples, lists and dicts have a symbolic extent."""
    if isinstance(x, tuple | list):
        return {*map(type, x)} != {int} and any(map(is_symbolic, x))
    return any(map(is_symbolic, x.values())) if isinstance(x, dict) else type(x) is Extent


def mapped(x: T, change: Callable[[Extent], int]) -> T:
    """Return a program, or a part of one, with `change` applied to each symbolic extent in it.

    A value without any is returned as it is.
    """
    return _mapped(x, change)  # type: ignore[no-any-return]


def _mapped(x: Any, change: Callable[[Extent], int]) -> Any:
    kind: Any = type(x)
    if kind is Extent:
        return change(x)
    match _form(kind):
        case "tuple":
            items = [_mapped(i, change) for i in x]
            return x if all(map(operator.is_, items, x)) else tuple(items)
        case "list":
            return [_mapped(i, change) for i in x]
        case "mapping":
            values = {k: _mapped(v, change) for k, v in x.items()}
            return x if all(values[k] is v for k, v in x.items()) else values
        case None:
            return x
        case names:
            members = [(name, getattr(x, name)) for name in names]
            changed = {k: new for k, v in members if (new := _mapped(v, change)) is not v}
            return replace(x, **changed) if changed else x


def comparable(x: Any) -> Any:
    """Return a value that compares and has a hash without a decision on symbolic extents in it."""
    poly: Callable[[Extent], Any] = poly_from
    return _mapped(x, poly)


@cache
def _form(kind: type) -> str | tuple[str, ...] | None:
    """Return how a type holds values: "tuple", "list", "mapping", or the names of its fields."""
    for name, base in (("tuple", tuple), ("list", list), ("mapping", Mapping)):
        if issubclass(kind, base):
            return name
    return tuple(f.name for f in fields(kind) if f.init) if is_dataclass(kind) else None


def with_numbers(x: T, extents: Mapping[str, int]) -> T:
    """Return a program for these extents: each symbolic extent becomes the number that it is.

    >>> with_numbers((symbolic("x.0", 8) // 2, 3), {"x.0": 10})
    (5, 3)
    """
    return mapped(x, lambda n: n.poly.value(extents))


def with_examples(x: T, examples: Mapping[str, int], names: Mapping[str, str]) -> T:
    """Return a program with other examples of its symbolic extents, and other names for some."""

    def changed(n: Extent) -> int:
        return _extent(_renamed(n.poly, names), examples)

    return mapped(x, changed)


def _renamed(poly: Poly, names: Mapping[str, str]) -> Poly:
    if names.keys().isdisjoint(poly.symbols()):
        return poly
    return simplified(poly, Facts(same={old: symbol(new) for old, new in names.items()}))
