"""Facts about symbolic extents, and how they simplify polynomials.

With x.0 a multiple of 4, `(x.0+3)//4` is `x.0//4`; with x.0 at least 4, `min(x.0, 4)` is 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache

from mdfuse.extents.expressions import (
    Atom,
    Calc,
    Monomial,
    Number,
    Poly,
    Term,
    constant,
    one,
    plus,
    poly_of,
    scaled,
    times,
)

#: Least and greatest; None for no limit.
Range = tuple[Number | None, Number | None]

#: How many answers of one kind are kept.
_KEPT = 1 << 14


@dataclass(frozen=True, eq=False)
class Facts:
    """Known facts about each symbol: its range, a divisor, an expression that it equals.

    A symbol without facts is at least 0. Answers are cached by the facts object that they follow
    from, so facts are equal only to themselves.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict)
    divisors: Mapping[str, int] = field(default_factory=dict)
    same: Mapping[str, Poly] = field(default_factory=dict)

    def range(self, name: str) -> Range:
        """Return the least and the greatest number that a symbol may be."""
        return self.ranges.get(name, (0, None))

    def with_range(self, name: str, limits: Range) -> Facts:
        """Return these facts with another range of a symbol."""
        return replace(self, ranges={**self.ranges, name: limits})

    def with_divisor(self, name: str, divisor: int) -> Facts:
        """Return these facts with one more divisor of a symbol."""
        divisor = math.lcm(divisor, self.divisors.get(name, 1))
        return replace(self, divisors={**self.divisors, name: divisor})


def folded(op: str, a: Poly, b: Poly, facts: Facts) -> Poly:
    """Return `//`, `mod`, `min` or `max` of a and b, simplified as far as the facts allow."""
    if op in ("min", "max"):
        return _extreme(op, a, b, facts)
    d = b.constant
    if not isinstance(d, int) or d < 1:
        return _by_symbols(op, a, b, facts)
    if op == "//":
        return _quotient(a, d, facts)
    _, remainder = _split(a, d, facts)
    low, high = bounds(remainder, facts)
    if low is not None and high is not None and low // d == high // d:
        return plus(remainder, constant(-d * (low // d)))
    common = math.gcd(d, *(Fraction(c).numerator for _, c in remainder.terms))
    if common > 1 and all(c == int(c) for _, c in remainder.terms):
        remainder = poly_of({m: c // common for m, c in remainder.terms})
        return scaled(folded(op, remainder, constant(d // common), facts), common)
    return _atom("mod", remainder, b)


@lru_cache(_KEPT)
def _atom(op: str, a: Poly, b: Poly) -> Poly:
    return one(Calc(op, a, b))


def _by_symbols(op: str, a: Poly, b: Poly, facts: Facts) -> Poly:
    """Return `//` or `mod` by anything but a positive number; shared factors cancel."""
    if b.constant == 0:
        raise ZeroDivisionError("division by zero")
    if len(b.terms) == 1:
        ((factors, n),) = b.terms
        if factors and all(_has(m, factors) for m, _ in a.terms):
            numerator = poly_of({_without(m, factors): c for m, c in a.terms})
            result = folded(op, numerator, constant(n), facts)
            return result if op == "//" else times(result, poly_of({factors: 1}))
    return _atom(op, a, b)


def _has(monomial: Monomial, factors: Monomial) -> bool:
    return all(monomial.count(f) >= factors.count(f) for f in factors)


def _without(monomial: Monomial, factors: Monomial) -> Monomial:
    left = list(monomial)
    for f in factors:
        left.remove(f)
    return tuple(left)


def _quotient(a: Poly, d: int, facts: Facts) -> Poly:
    """Return a // d, with the divisible terms taken out of the fraction."""
    exact, remainder = _split(a, d, facts)
    low, high = bounds(remainder, facts)
    if low is not None and high is not None and low // d == high // d:
        return plus(exact, constant(low // d))
    if next(c for m, c in remainder.terms if m) < 0:  # floor(-p/d) is -ceil(p/d)
        return plus(exact, _quotient(plus(constant(d - 1), remainder, -1), d, facts), -1)
    common = math.gcd(d, *(int(c) for m, c in remainder.terms if m))
    if common > 1 and all(c == int(c) for _, c in remainder.terms):
        terms = ((m, Fraction(c)) for m, c in remainder.terms)
        shorter = {m: c // common if m == () else c / common for m, c in terms}
        remainder = poly_of(shorter)
        d //= common
    return plus(exact, _atom("//", remainder, constant(d)))


def _split(a: Poly, d: int, facts: Facts) -> tuple[Poly, Poly]:
    """Return (the terms of a that d divides, divided by d; the other terms)."""
    exact: dict[Monomial, Number] = {}
    remainder: dict[Monomial, Number] = {}
    for m, c in a.terms:
        if m == ():
            exact[m], remainder[m] = c // d, c % d
        elif Fraction(c * _divisor(m, facts), d).denominator == 1:
            exact[m] = Fraction(c) / d
        else:
            remainder[m] = c
    return poly_of(exact), poly_of(remainder)


def _divisor(monomial: Monomial, facts: Facts) -> int:
    """Return a number that surely divides a monomial's value."""
    names = (a.name for a in monomial if isinstance(a, Term))
    return math.prod(facts.divisors.get(n, 1) for n in names)


@lru_cache(_KEPT)
def _extreme(op: str, a: Poly, b: Poly, facts: Facts) -> Poly:
    """Return the minimum or maximum: a or b if it surely is that, a shorter form, or an atom."""
    decided = a if _is_beyond(op, a, b, facts) else b if _is_beyond(op, b, a, facts) else None
    short_a = _without_lesser(op, a, b, facts)
    short_b = _without_lesser(op, b, short_a, facts)
    if short_a is not a or short_b is not b:
        short = _extreme(op, short_a, short_b, facts)
        return short if decided is None or short.size < decided.size else decided
    return decided or _atom(op, *sorted((a, b), key=str))


def _is_beyond(op: str, a: Poly, b: Poly, facts: Facts) -> bool:
    """Return whether a is surely the minimum, or the maximum, of a and b."""
    return at_least(plus(b, a, -1) if op == "min" else plus(a, b, -1), 0, facts)


def _without_lesser(op: str, a: Poly, b: Poly, facts: Facts) -> Poly:
    """Drop operands of maxima inside of a that cannot decide max(a, b); likewise for minima.

    max(max(0, x - 1) - 1, 0) is max(x - 2, 0), since -1 is never the maximum. Minima that are
    subtracted count as maxima: x - min(1, x) is the maximum of x - 1 and 0.
    """
    for monomial, c in a.terms:
        fold = monomial[0] if len(monomial) == 1 and abs(c) == 1 else None
        if not isinstance(fold, Calc) or fold.op != (op if c > 0 else _OPPOSITE[op]):
            continue
        others = poly_of({m: k for m, k in a.terms if m != monomial})
        for x, y in ((fold.left, fold.right), (fold.right, fold.left)):
            if _is_beyond(op, b, plus(others, x, c), facts):
                return _without_lesser(op, plus(others, y, c), b, facts)
    return a


_OPPOSITE = {"min": "max", "max": "min"}


@lru_cache(_KEPT)
def simplified(a: Poly, facts: Facts) -> Poly:
    """Return the polynomial simplified by the facts."""
    total = Poly()
    for monomial, c in a.terms:
        product = constant(c)
        for atom in monomial:
            product = times(product, _simple_atom(atom, facts))
        total = plus(total, product)
    return total


def _simple_atom(atom: Atom, facts: Facts) -> Poly:
    if isinstance(atom, Term):
        return simplified(facts.same[atom.name], facts) if atom.name in facts.same else one(atom)
    return folded(atom.op, simplified(atom.left, facts), simplified(atom.right, facts), facts)


# -- bounds --------------------------------------------------------------------------------------


def at_least(a: Poly, n: Number, facts: Facts) -> bool:
    """Return whether the polynomial is surely at least n."""
    low = _lower(plus(a, constant(-n)), facts, 6)
    return low is not None and low > -1  # a and n are integers


def bounds(a: Poly, facts: Facts) -> Range:
    """Return bounds between which the polynomial surely lies; None where none is found."""
    if a.constant is not None:
        return a.constant, a.constant
    low, minus_high = _lower(a, facts, 6), _lower(scaled(a, -1), facts, 6)
    return low, None if minus_high is None else -minus_high


@lru_cache(_KEPT)
def _lower(a: Poly, facts: Facts, depth: int) -> Number | None:
    """Return a lower bound, or None; atoms are replaced by bounds, nested ones `depth` deep."""
    folds = [(m[0], c) for m, c in a.terms if len(m) == 1 and isinstance(m[0], Calc)]
    if folds and depth:  # first those of which both operands count, and outer ones
        atom, c = max(folds, key=lambda f: (_is_least(*f), f[0].size))
        others = poly_of({m: k for m, k in a.terms if m != (atom,)})
        return _lower_with(others, atom, c, facts, depth - 1)
    total: Number = 0
    for monomial, c in a.terms:
        low, high = _monomial_range(monomial, facts, depth)
        end = low if c > 0 else high
        if end is None:
            return None
        total += c * end
    return total


def _is_least(atom: Calc[Poly], c: Number) -> bool:
    """Return whether c * atom is the least of c times its operands."""
    return atom.op == ("min" if c > 0 else "max")


def _lower_with(base: Poly, atom: Calc[Poly], c: Number, facts: Facts, depth: int) -> Number | None:
    """Return a lower bound of base + c * atom, or None."""
    if atom.op in ("min", "max"):
        lows = [_lower(plus(base, x, c), facts, depth) for x in (atom.left, atom.right)]
        some = [x for x in lows if x is not None]
        if _is_least(atom, c):
            return min(some) if len(some) == 2 else None
        return max(some, default=None)
    d = atom.right.constant
    if d is None or d < 1:
        low = 0 if c > 0 else None
        return None if low is None else _lower(base, facts, depth)
    if atom.op == "mod":
        return _lower(plus(base, constant(0 if c > 0 else c * (d - 1))), facts, depth)
    slack = constant(0 if c < 0 else 1 - d)
    return _lower(plus(base, plus(atom.left, slack), Fraction(c) / d), facts, depth)


def _monomial_range(monomial: Monomial, facts: Facts, depth: int) -> Range:
    low: Number = 1
    high: Number | None = 1
    for atom in monomial:
        a, b = facts.range(atom.name) if isinstance(atom, Term) else _calc_range(atom, facts, depth)
        if a is None or a < 0:
            return None, None
        low, high = low * a, None if high is None or b is None else high * b
    return low, high


def _calc_range(atom: Calc[Poly], facts: Facts, depth: int) -> Range:
    if not depth:
        return None, None
    low = _lower(one(atom), facts, depth - 1)
    high = _lower(scaled(one(atom), -1), facts, depth - 1)
    return None if low is None else math.ceil(low), None if high is None else math.floor(-high)
