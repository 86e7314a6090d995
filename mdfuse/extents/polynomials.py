"""Polynomials over symbolic extents, in a form in which equal ones are equal.

What integer division, remainders, minima and maxima do not fold into is an atom of its own:
`4*x.0 + (y.0+3)//4`. What is known of the symbols (`Facts`) folds more: with x.0 a multiple of 4,
`(x.0+3)//4` is `x.0//4`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from mdfuse.extents.index import ARITHMETIC, Term

Number = int | Fraction
#: Least and greatest; None for no limit.
Range = tuple[Number | None, Number | None]


@dataclass(frozen=True, slots=True)
class Fold:
    """An atom: `//`, `mod`, `min` or `max` of two polynomials."""

    op: str
    left: Poly
    right: Poly

    def __str__(self) -> str:
        if self.op in ("min", "max"):
            return f"{self.op}({self.left}, {self.right})"
        op = self.op if self.op == "//" else f" {self.op} "
        return f"{self.left.nested()}{op}{self.right.nested()}"


Atom = Term | Fold
#: A product of atoms, sorted; () is 1.
Monomial = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Poly:
    """A sum of monomials times numbers; fractions only where the value is an integer anyway."""

    terms: tuple[tuple[Monomial, Number], ...] = ()

    @property
    def constant(self) -> Number | None:
        """The number that it is; None where it depends on symbols."""
        if not self.terms:
            return 0
        return self.terms[0][1] if self.terms[0][0] == () and len(self.terms) == 1 else None

    def coefficients(self) -> dict[Monomial, Number]:
        """Monomial -> number."""
        return dict(self.terms)

    def symbols(self) -> set[str]:
        """The names in it, those inside atoms included."""
        return {s for monomial, _ in self.terms for atom in monomial for s in _names(atom)}

    def value(self, known: Mapping[str, int]) -> int:
        """The number that it is for these extents.

        Raises:
            ZeroDivisionError: a division by zero.
        """
        total: Number = 0
        for monomial, c in self.terms:
            total += c * math.prod(_atom_value(a, known) for a in monomial)
        return int(total)

    def nested(self) -> str:
        """The text as an operand."""
        text = str(self)
        is_one = len(self.terms) <= 1 and "//" not in text and " " not in text and "*" not in text
        return text if is_one else f"({text})"

    def __str__(self) -> str:
        ordered = sorted(self.terms, key=lambda t: (t[0] == (), t[1] < 0, str_of(t[0])))
        parts = [_term_text(monomial, c if c > 0 else -c) for monomial, c in ordered]
        signs = ["-" if c < 0 else "+" for _, c in ordered]
        text = "".join(s + p for s, p in zip(signs, parts, strict=True))
        return text.removeprefix("+") or "0"


def _term_text(monomial: Monomial, c: Number) -> str:
    if len(monomial) == 1 and c == 1:
        return str(monomial[0])
    factors = [_factor_text(a) for a in monomial]
    above, below = Fraction(c).numerator, Fraction(c).denominator
    if above != 1 or not factors:
        factors.insert(0, str(above))
    text = "*".join(factors)
    return text if below == 1 else f"{f'({text})' if '*' in text else text}//{below}"


def _factor_text(atom: Atom) -> str:
    text = str(atom)
    return text if isinstance(atom, Term) or text.startswith(("min", "max")) else f"({text})"


def str_of(monomial: Monomial) -> str:
    """A monomial as text, by which they are sorted."""
    return "*".join(map(str, monomial))


def _names(atom: Atom) -> set[str]:
    return {atom.name} if isinstance(atom, Term) else atom.left.symbols() | atom.right.symbols()


_FOLDS: dict[str, Callable[[int, int], int]] = {
    "//": ARITHMETIC["//"],
    "mod": ARITHMETIC["mod"],
    "min": min,
    "max": max,
}


def _atom_value(atom: Atom, known: Mapping[str, int]) -> int:
    if isinstance(atom, Term):
        return known[atom.name]
    return _FOLDS[atom.op](atom.left.value(known), atom.right.value(known))


def poly_of(terms: Mapping[Monomial, Number]) -> Poly:
    """The sum, with zeros left out."""
    kept = [
        (m, c if type(c) is int or c.denominator > 1 else int(c)) for m, c in terms.items() if c
    ]
    return Poly(tuple(sorted(kept, key=lambda t: str_of(t[0])) if len(kept) > 1 else kept))


def constant(n: Number) -> Poly:
    """A number."""
    return poly_of({(): n})


def symbol(name: str) -> Poly:
    """A symbolic extent."""
    return Poly((((Term("symbol", name),), 1),))


def plus(a: Poly, b: Poly, times: Number = 1) -> Poly:
    """a + times * b."""
    found = a.coefficients()
    for monomial, c in b.terms:
        found[monomial] = found.get(monomial, 0) + c * times
    return poly_of(found)


def scaled(a: Poly, by: Number) -> Poly:
    """a * by."""
    return poly_of({m: c * by for m, c in a.terms})


def times(a: Poly, b: Poly) -> Poly:
    """a * b."""
    found: dict[Monomial, Number] = {}
    for m, c in a.terms:
        for n, d in b.terms:
            product = tuple(sorted((*m, *n), key=str))
            found[product] = found.get(product, 0) + c * d
    return poly_of(found)


# -- what is known of symbols --------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What holds for the symbols: ranges, divisors, and what equals another expression.

    An extent of which nothing is known is at least 0.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict)
    divisors: Mapping[str, int] = field(default_factory=dict)
    same: Mapping[str, Poly] = field(default_factory=dict)

    def range(self, name: str) -> Range:
        return self.ranges.get(name, (0, None))

    def with_range(self, name: str, limits: Range) -> Facts:
        return replace(self, ranges={**self.ranges, name: limits})

    def with_divisor(self, name: str, divisor: int) -> Facts:
        divisor = math.lcm(divisor, self.divisors.get(name, 1))
        return replace(self, divisors={**self.divisors, name: divisor})


def folded(op: str, a: Poly, b: Poly, facts: Facts) -> Poly:
    """`//`, `mod`, `min` or `max`, as simple as the facts allow."""
    if op in ("min", "max"):
        return _extreme(op, a, b, facts)
    d = b.constant
    if not isinstance(d, int) or d < 1:
        return _by_symbols(op, a, b, facts)
    if op == "//":
        return _quotient(a, d, facts)
    _, rest = _split(a, d, facts)
    low, high = bounds(rest, facts)
    if low is not None and high is not None and low // d == high // d:
        return plus(rest, constant(-d * (low // d)))
    common = math.gcd(d, *(Fraction(c).numerator for _, c in rest.terms))
    if common > 1 and all(c == int(c) for _, c in rest.terms):
        rest = poly_of({m: c // common for m, c in rest.terms})
        return scaled(folded(op, rest, constant(d // common), facts), common)
    return _atom("mod", rest, b)


def _atom(op: str, a: Poly, b: Poly) -> Poly:
    return Poly((((Fold(op, a, b),), 1),))


def _by_symbols(op: str, a: Poly, b: Poly, facts: Facts) -> Poly:
    """A division by what is no positive number; factors that all terms share go out."""
    if b.constant == 0:
        raise ZeroDivisionError("division by zero")
    if len(b.terms) == 1:
        ((factors, n),) = b.terms
        if factors and all(_has(m, factors) for m, _ in a.terms):
            rest = poly_of({_without(m, factors): c for m, c in a.terms})
            result = folded(op, rest, constant(n), facts)
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
    """a // d: what is divisible comes out of the fraction."""
    exact, rest = _split(a, d, facts)
    low, high = bounds(rest, facts)
    if low is not None and high is not None and low // d == high // d:
        return plus(exact, constant(low // d))
    if next(c for m, c in rest.terms if m) < 0:  # floor(-p/d) is -ceil(p/d)
        return plus(exact, _quotient(plus(constant(d - 1), rest, -1), d, facts), -1)
    common = math.gcd(d, *(int(c) for m, c in rest.terms if m))
    if common > 1 and all(c == int(c) for _, c in rest.terms):
        rest = poly_of({m: c // common if m == () else c / common for m, c in _fractions(rest)})
        d //= common
    return plus(exact, _atom("//", rest, constant(d)))


def _fractions(a: Poly) -> Iterator[tuple[Monomial, Fraction]]:
    return ((m, Fraction(c)) for m, c in a.terms)


def _split(a: Poly, d: int, facts: Facts) -> tuple[Poly, Poly]:
    """(a's part that is divisible by d, divided; the rest)."""
    exact: dict[Monomial, Number] = {}
    rest: dict[Monomial, Number] = {}
    for m, c in a.terms:
        if m == ():
            exact[m], rest[m] = c // d, c % d
        elif Fraction(c * _divisor(m, facts), d).denominator == 1:
            exact[m] = Fraction(c) / d
        else:
            rest[m] = c
    return poly_of(exact), poly_of(rest)


def _divisor(monomial: Monomial, facts: Facts) -> int:
    """A number that divides a monomial's value."""
    names = (a.name for a in monomial if isinstance(a, Term))
    return math.prod(facts.divisors.get(n, 1) for n in names)


def _extreme(op: str, a: Poly, b: Poly, facts: Facts) -> Poly:
    if at_least(plus(b, a, -1), 0, facts):
        return a if op == "min" else b
    if at_least(plus(a, b, -1), 0, facts):
        return b if op == "min" else a
    first, second = sorted((a, b), key=str)
    return _atom(op, first, second)


def simplified(a: Poly, facts: Facts) -> Poly:
    """The polynomial with the facts put in."""
    total = Poly()
    for monomial, c in a.terms:
        product = constant(c)
        for atom in monomial:
            product = times(product, _simple_atom(atom, facts))
        total = plus(total, product)
    return total


def _simple_atom(atom: Atom, facts: Facts) -> Poly:
    if isinstance(atom, Term):
        return simplified(facts.same[atom.name], facts) if atom.name in facts.same else _one(atom)
    return folded(atom.op, simplified(atom.left, facts), simplified(atom.right, facts), facts)


def _one(atom: Atom) -> Poly:
    return Poly((((atom,), 1),))


# -- bounds --------------------------------------------------------------------------------------


def at_least(a: Poly, n: Number, facts: Facts) -> bool:
    """Whether it is surely at least a number."""
    low = _lower(plus(a, constant(-n)), facts, 6)
    return low is not None and low > -1  # integers


def bounds(a: Poly, facts: Facts) -> Range:
    """The least and the greatest that it may be."""
    if a.constant is not None:
        return a.constant, a.constant
    low, minus_high = _lower(a, facts, 6), _lower(scaled(a, -1), facts, 6)
    return low, None if minus_high is None else -minus_high


def _lower(a: Poly, facts: Facts, depth: int) -> Number | None:
    """A lower bound; quotients are at most what they are without rounding, and so on."""
    for monomial, c in a.terms:
        if len(monomial) == 1 and isinstance(monomial[0], Fold) and depth:
            rest = poly_of({m: k for m, k in a.terms if m != monomial})
            return _lower_of_fold(rest, monomial[0], c, facts, depth - 1)
    total: Number = 0
    for monomial, c in a.terms:
        low, high = _monomial_range(monomial, facts, depth)
        end = low if c > 0 else high
        if end is None:
            return None
        total += c * end
    return total


def _lower_of_fold(rest: Poly, atom: Fold, c: Number, facts: Facts, depth: int) -> Number | None:
    """A lower bound of rest + c * atom."""
    if atom.op in ("min", "max"):
        found = [_lower(plus(rest, x, c), facts, depth) for x in (atom.left, atom.right)]
        some = [x for x in found if x is not None]
        if (c < 0) == (atom.op == "min"):  # the atom is at most, or at least, each of the two
            return max(some, default=None)
        return min(some) if len(some) == 2 else None
    d = atom.right.constant
    if d is None or d < 1:
        low = 0 if c > 0 else None
        return None if low is None else _lower(rest, facts, depth)
    if atom.op == "mod":
        return _lower(plus(rest, constant(0 if c > 0 else c * (d - 1))), facts, depth)
    slack = constant(0 if c < 0 else 1 - d)
    return _lower(plus(rest, plus(atom.left, slack), Fraction(c) / d), facts, depth)


def _monomial_range(monomial: Monomial, facts: Facts, depth: int) -> Range:
    low: Number = 1
    high: Number | None = 1
    for atom in monomial:
        a, b = facts.range(atom.name) if isinstance(atom, Term) else _fold_range(atom, facts, depth)
        if a is None or a < 0:
            return None, None
        low, high = low * a, None if high is None or b is None else high * b
    return low, high


def _fold_range(atom: Fold, facts: Facts, depth: int) -> Range:
    if not depth:
        return None, None
    low = _lower(_one(atom), facts, depth - 1)
    high = _lower(scaled(_one(atom), -1), facts, depth - 1)
    return None if low is None else math.ceil(low), None if high is None else math.floor(-high)
