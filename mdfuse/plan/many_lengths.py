"""One compiled function of a host unit for many lengths.

Where lengths change from run to run, the calls of a unit come again with other numbers. Calls for
two lengths that differ in numbers alone are joined into calls whose numbers are products and sums
of sizes, and these are compiled with the sizes symbolic. The function serves the calls for another
length if they equal, number by number, the joined calls at its sizes, and if the compiler's
assumptions on sizes hold there.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from mdfuse.plan.lines import Line, SlotRef
from mdfuse.plan.tensor_meta import Form
from mdfuse.plan.unit_keys import unit_key, value_key

#: How many sizes a number may be the product of: n * n of a mask.
_DEEPEST = 3

Pair = tuple[int, int]


class ApartError(Exception):
    """Two sets of calls differ in more than numbers, or in numbers that no sizes give."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number made of sizes.

    Attributes:
        factors: the sizes it is the product of, by index from 0.
        times: the factor of that product.
        plus: the summand.

    >>> Size((0, 1), 2, 1).at([10, 5])
    101
    """

    factors: tuple[int, ...]
    times: int = 1
    plus: int = 0

    def at(self, sizes: Sequence[Any]) -> Any:
        """Return the number at some sizes, which may be symbolic."""
        product = self.times
        for n in self.factors:
            product = sizes[n] * product
        return product + self.plus if self.plus else product


@dataclass(frozen=True, slots=True)
class _Function:
    """A function, or a partial one, that holds on to numbers made of sizes."""

    of: Callable[..., Any]
    held: tuple[Any, ...]

    def at(self, sizes: Sequence[Any]) -> Callable[..., Any]:
        held = at(self.held, sizes)
        if isinstance(self.of, partial):
            return partial(held[0], *held[1], **held[2])
        of, (cells, defaults, by_name) = self.of, held
        assert isinstance(of, types.FunctionType)
        closure = tuple(map(types.CellType, cells))
        function = types.FunctionType(of.__code__, of.__globals__, of.__name__, defaults, closure)
        function.__kwdefaults__ = by_name
        return function


def fit(pair: Pair, sizes: Sequence[Pair]) -> Size | None:
    """Return the form in sizes of a number with two values, from two values of each size.

    It is a product of sizes, or one size plus a constant; None: neither fits. Other forms may fit
    as well, so the number is compared once more at each use.

    >>> fit((12, 20), [(3, 5)]), fit((4, 6), [(3, 5)]), fit((9, 25), [(3, 5)])
    (Size(factors=(0,), times=4, plus=0), Size(factors=(0,), times=1, plus=1), \
Size(factors=(0, 0), times=1, plus=0))
    """
    size = _product(pair, sizes, _DEEPEST)
    if size is not None:
        return size
    for n, (a, b) in enumerate(sizes):
        if pair[0] - a == pair[1] - b:
            return Size((n,), plus=pair[0] - a)
    return None


def _product(pair: Pair, sizes: Sequence[Pair], deepest: int) -> Size | None:
    if pair[0] == pair[1]:
        return Size((), pair[0]) if pair[0] else None
    for n, (a, b) in enumerate(sizes if deepest else ()):
        p, q = pair[0] // a, pair[1] // b
        inner = _product((p, q), sizes, deepest - 1) if (p * a, q * b) == pair else None
        if inner is not None:
            return Size((n, *inner.factors), inner.times)
    return None


@dataclass
class _Joining:
    """Joins calls for two lengths.

    Attributes:
        sizes: the values that each size has.
        slots: a slot of the second calls -> that of the first.
    """

    sizes: list[Pair]
    slots: dict[int, int] = field(default_factory=dict)

    def number(self, a: int, b: int) -> int | Size:
        if a == b:
            return a
        size = fit((a, b), self.sizes)
        if size is None:
            raise ApartError
        return size

    def slot(self, a: int, b: int) -> int:
        if self.slots.setdefault(b, a) != a:
            raise ApartError
        return a

    def value(self, a: Any, b: Any) -> Any:
        """Join two arguments, or two functions."""
        if type(a) is not type(b):
            raise ApartError
        match a:
            case SlotRef():
                self.slot(a.slot, b.slot)
                if a.form != b.form:
                    raise ApartError
                return a
            case bool():
                pass
            case int():
                return self.number(a, b)
            case list() | tuple():
                items = self.all(a, b)
                if all(map(operator.is_, items, a)):
                    return a
                return [*items] if isinstance(a, list) else items
            case dict():
                if [*a] != [*b]:
                    raise ApartError
                items = self.all(a.values(), b.values())
                if all(map(operator.is_, items, a.values())):
                    return a
                return dict(zip(a, items, strict=True))
            case partial():
                return self.function(a, _held(a), _held(b))
            case types.FunctionType():
                if a.__code__ is not b.__code__ and a.__code__ != b.__code__:
                    raise ApartError
                return self.function(a, _held(a), _held(b))
        if value_key(a) != value_key(b):
            raise ApartError
        return a

    def all(self, a: Any, b: Any) -> tuple[Any, ...]:
        if len(a) != len(b):
            raise ApartError
        return tuple(self.value(x, y) for x, y in zip(a, b, strict=True))

    def function(self, of: Any, a: tuple[Any, ...], b: tuple[Any, ...]) -> Any:
        held = self.value(a, b)
        return of if held is a else _Function(of, held)

    def line(self, a: Line, b: Line) -> Line:
        run, args, kwargs = (
            self.value(x, y)
            for x, y in ((a.run, b.run), (a.args, b.args), (dict(a.kwargs), dict(b.kwargs)))
        )
        if len(a.targets) != len(b.targets) or type(a.into) is not type(b.into):
            raise ApartError
        for x, y in zip(a.targets, b.targets, strict=True):
            self.slot(x, y)
        return replace(a, run=run, args=args, kwargs=tuple(kwargs.items()))


def _held(x: Any) -> tuple[Any, ...]:
    """Return the values bound in a function, as `unit_key` sees them."""
    if isinstance(x, partial):
        return x.func, x.args, x.keywords
    cells = tuple(cell.cell_contents for cell in x.__closure__ or ())
    return cells, x.__defaults__, x.__kwdefaults__


def at(x: Any, sizes: Sequence[Any]) -> Any:
    """Return joined arguments at some sizes."""
    match x:
        case Size() | _Function():
            return x.at(sizes)
        case list():
            return [at(y, sizes) for y in x]
        case tuple() if type(x) is tuple:
            return tuple([at(y, sizes) for y in x])
        case dict():
            return {k: at(y, sizes) for k, y in x.items()}
    return x


@dataclass(frozen=True)
class Calls:
    """The calls of a unit for one length, and the forms of their arguments."""

    lines: tuple[Line, ...]
    takes: tuple[int, ...]
    makes: tuple[int, ...]
    forms: tuple[Form, ...]

    def key(self) -> Hashable:
        """Return a key that is equal for calls that compute the same; see `unit_key`."""
        return unit_key(self.lines, self.takes, self.makes), self.forms

    def run(self, *values: Any) -> list[Any]:
        """Make the calls on their arguments."""
        slots: dict[int, Any] = dict(zip(self.takes, values, strict=True))
        for line in self.lines:
            line(slots)
        return [slots[slot] for slot in self.makes]


@dataclass(frozen=True)
class SymbolicCalls:
    """Calls for any length.

    Attributes:
        calls: with numbers made of sizes.
        places: for each size the argument and the dim whose extent it is.
        hints: the sizes for which they were made.
    """

    calls: Calls
    places: tuple[Pair, ...]
    hints: tuple[int, ...]

    def sizes(self, forms: Sequence[Form]) -> tuple[int, ...] | None:
        """Return the sizes of arguments; None where there are not as many, or other dims."""
        if len(forms) != len(self.calls.forms):
            return None
        if any(dim >= len(forms[n][0]) for n, dim in self.places):
            return None
        return tuple(forms[n][0][dim] for n, dim in self.places)

    def at(self, sizes: Sequence[Any]) -> Calls:
        """Return the calls at some sizes."""
        calls = self.calls
        lines = tuple(
            replace(
                line,
                run=at(line.run, sizes),
                args=at(line.args, sizes),
                kwargs=at(line.kwargs, sizes),
            )
            for line in calls.lines
        )
        return replace(calls, lines=lines, forms=self.forms_at(sizes))

    def forms_at(self, sizes: Sequence[Any]) -> tuple[Form, ...]:
        """Return the forms of the arguments at some sizes."""
        return tuple(at(form, sizes) for form in self.calls.forms)

    def run(self, *values: Any) -> list[Any]:
        """Make the calls, with the sizes of their arguments."""
        return self.at([values[n].shape[dim] for n, dim in self.places]).run(*values)

    def are(self, calls: Calls) -> bool:
        """Return whether some calls equal these at their sizes."""
        sizes = self.sizes(calls.forms)
        return sizes is not None and self.at(sizes).key() == calls.key()


def joined(a: Calls, b: Calls) -> SymbolicCalls | None:
    """Join calls for two lengths; None where they differ in more than lengths.

    Lengths of 0 and 1 are not joined: torch treats them differently.
    """
    if len(a.lines) != len(b.lines) or len(a.forms) != len(b.forms):
        return None
    places, sizes = _sizes(a.forms, b.forms)
    if not sizes or min(chain(*sizes)) < 2:
        return None
    joining = _Joining(sizes)
    try:
        for x, y in zip((*a.takes, *a.makes), (*b.takes, *b.makes), strict=True):
            joining.slot(x, y)
        lines = tuple(joining.line(x, y) for x, y in zip(a.lines, b.lines, strict=True))
        forms = joining.value(a.forms, b.forms)
    except (ApartError, ValueError):
        return None
    calls = SymbolicCalls(Calls(lines, a.takes, a.makes, forms), places, tuple(y for _, y in sizes))
    return calls if calls.are(a) and calls.are(b) else None


def _sizes(a: Sequence[Form], b: Sequence[Form]) -> tuple[tuple[Pair, ...], list[Pair]]:
    """Return the extents that differ and are no products of others: where, and their values.

    An extent that is another one plus a constant stays a size of its own; the compiler's
    assumptions express their relation.
    """
    extents = {
        (n, dim): (x, y)
        for n, (p, q) in enumerate(zip(a, b, strict=True))
        for dim, (x, y) in enumerate(zip(p[0], q[0], strict=False))
        if x != y
    }
    places: list[Pair] = []
    sizes: list[Pair] = []
    for place, pair in sorted(extents.items(), key=lambda item: (max(item[1]), item[0])):
        if _product(pair, [size for size in sizes if 0 not in size], _DEEPEST) is None:
            places.append(place)
            sizes.append(pair)
    return tuple(places), sizes
