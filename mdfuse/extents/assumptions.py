"""Guards: the assumptions of a lowering about symbolic extents, made by its decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeVar

from mdfuse.extents.expressions import (
    ARITHMETIC,
    Atom,
    Monomial,
    Poly,
    Term,
    constant,
    plus,
    poly_of,
    scaled,
    symbol,
)
from mdfuse.extents.facts import Facts, at_least, folded, simplified


def _is(n: int, op: str) -> bool:
    """Return whether a number has the relation to 0."""
    return bool(ARITHMETIC[op](n, 0))


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on extents: a polynomial's relation to 0.

    Attributes:
        poly: the left side.
        op: "==", "!=" or ">=".
        text: how it is printed.
    """

    poly: Poly
    op: str
    text: str

    def holds(self, extents: Mapping[str, int]) -> bool:
        """Return whether these extents satisfy the guard."""
        try:
            return _is(self.poly.value(extents), self.op)
        except ZeroDivisionError:
            return False

    def __str__(self) -> str:
        return self.text


class Assumptions:
    """The assumptions of a lowering about its symbolic extents."""

    def __init__(self) -> None:
        self.facts = Facts()
        #: the examples of all symbols that were seen
        self.examples: dict[str, int] = {}
        self._others: dict[Guard, None] = {}

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards, without those that follow from others."""
        facts = self.facts
        equal = [
            Guard(plus(symbol(s), p, -1), "==", f"{s} == {p}")
            for s, p in ((s, simplified(p, facts)) for s, p in facts.same.items())
        ]
        for s, d in facts.divisors.items():
            if s not in facts.same:
                poly = folded("mod", symbol(s), constant(d), Facts())
                equal.append(Guard(poly, "==", f"{s} mod {d} == 0"))
        for s in facts.ranges:
            equal += () if s in facts.same else _range_guards(s, facts)
        return (*equal, *(g for g in self._others if not self._follows(g.poly, g.op)))

    def copy(self) -> Assumptions:
        """Return a copy, to which other assumptions can be added."""
        twin = Assumptions()
        twin.facts, twin.examples = self.facts, {**self.examples}
        twin._others = {**self._others}
        return twin

    def seen(self, examples: Mapping[str, int]) -> Mapping[str, int]:
        """Add examples of symbols, and return those of all symbols seen so far."""
        self.examples.update(examples)
        return self.examples

    def hold(self, extents: Mapping[str, int]) -> bool:
        """Return whether extents satisfy all guards."""
        return all(g.holds(extents) for g in self.guards)

    def assume(self, poly: Poly, op: str, examples: Mapping[str, int]) -> None:
        """Record a guard that holds for the examples, unless it follows from known facts."""
        poly = _reduced(simplified(poly, self.facts), op)
        poly = self._without_factors(poly, op, examples)
        if poly.constant is not None or self._follows(poly, op):
            return
        if op == "==" and self._assume_equal(poly, examples):
            return
        if self._assume_range(poly, op, examples) or self._assume_divisor(poly, op, examples):
            return
        self._others[Guard(poly, op, _text(poly, op))] = None

    def _follows(self, poly: Poly, op: str, facts: Facts | None = None) -> bool:
        facts = facts or self.facts
        poly = simplified(poly, facts)
        n = poly.constant
        if n is not None:
            return _is(int(n), op)
        if op == "!=":
            return at_least(poly, 1, facts) or at_least(scaled(poly, -1), 1, facts)
        return op == ">=" and at_least(poly, 0, facts)

    def _without_factors(self, poly: Poly, op: str, examples: Mapping[str, int]) -> Poly:
        """Divide by symbols that all terms share, after assuming that these are positive.

        A strict inequality has the constant -1, which stays: x*y - 1 >= 0 becomes y - 1 >= 0.
        """
        while True:
            is_strict = op == ">=" and poly.coefficients().get((), 0) == -1
            terms = [m for m, _ in poly.terms if m or not is_strict]
            shared = [a for a in _shared(terms) if isinstance(a, Term) and examples[a.name] > 0]
            if not shared or (len(terms) == 1 and len(terms[0]) == 1):
                return poly
            self.assume(plus(symbol(shared[0].name), constant(-1)), ">=", examples)
            divided = {_drop(m, shared[0]) if m else m: c for m, c in poly.terms}
            if is_strict and () in (_drop(m, shared[0]) for m in terms):
                divided[()] = poly.coefficients()[(shared[0],)] - 1
            poly = _reduced(poly_of(divided), op)

    def _assume_equal(self, poly: Poly, examples: Mapping[str, int]) -> bool:
        """Solve an equation for a symbol, and replace the symbol; False if none stands alone."""
        names = [m[0].name for m, c in poly.terms if len(m) == 1 and isinstance(m[0], Term)
                 and abs(c) == 1]  # fmt: skip
        for name in sorted(names, reverse=True):
            term = (Term("symbol", name),)
            c = poly.coefficients()[term]
            solution = scaled(poly_of({m: k for m, k in poly.terms if m != term}), -c)
            if name in solution.symbols():
                continue
            low, high = self.facts.range(name)
            divisor = self.facts.divisors.get(name, 1)
            self.facts = replace(self.facts, same={**self.facts.same, name: solution})
            if low is not None:
                self.assume(plus(solution, constant(-low)), ">=", examples)
            if high is not None:
                self.assume(plus(constant(high), solution, -1), ">=", examples)
            if divisor > 1:
                self.assume(folded("mod", solution, constant(divisor), self.facts), "==", examples)
            return True
        return False

    def _assume_range(self, poly: Poly, op: str, examples: Mapping[str, int]) -> bool:
        """Keep a guard on one symbol as a range, if it holds from, or up to, some number."""
        names = poly.symbols()
        if len(names) != 1 or op == "==" or (op == "!=" and " mod " in str(poly)):
            return False
        (name,) = names
        now = examples[name]
        low, high = self.facts.range(name)

        def surely(a: int, b: int | None) -> bool:
            return self._follows(poly, op, self.facts.with_range(name, (a, b)))

        if not surely(now, now):
            return False
        first = _search(lambda n: surely(n, now), now, int(low or 0))
        limit = None if high is None else int(high)
        last = limit if surely(first, limit) else _upwards(lambda n: surely(first, n), now)
        holds = lambda n: _is(poly.value({name: n}), op)  # noqa: E731
        while first > int(low or 0) and now - first < 4096 and holds(first - 1):
            first -= 1
        while last is not None and last != limit and last - now < 4096 and holds(last + 1):
            last += 1
        if first != low and last != limit:  # it holds for some numbers only, as a divisibility does
            return False
        self.facts = self.facts.with_range(name, (first, last))
        return True

    def _assume_divisor(self, poly: Poly, op: str, examples: Mapping[str, int]) -> bool:
        """Keep a guard as divisors of symbols, if it follows from those that the examples have."""
        divisors = {s: math.lcm(*_divisors(poly, s)) for s in sorted(poly.symbols())}
        facts = self.facts
        for s, d in divisors.items():
            if d > 1 and examples[s] % d == 0:
                facts = facts.with_divisor(s, d)
        if facts is self.facts:
            return False
        if self._follows(poly, op, facts):
            self.facts = facts
            return True
        return False


def _shared(monomials: Sequence[Monomial]) -> Iterator[Atom]:
    """Yield the atoms that are in every one of some monomials."""
    first, *others = monomials or [()]
    return (a for a in first if all(a in m for m in others))


def _drop(monomial: Monomial, atom: Atom) -> Monomial:
    at = monomial.index(atom)
    return (*monomial[:at], *monomial[at + 1 :])


def _reduced(poly: Poly, op: str) -> Poly:
    """Divide a polynomial by the common divisor of its coefficients, fractions cleared first."""
    numbers = [c for m, c in poly.terms if m]
    if not numbers:
        return poly
    poly = scaled(poly, math.lcm(*(getattr(c, "denominator", 1) for _, c in poly.terms)))
    n = poly.coefficients().get((), 0)
    common = math.gcd(*(int(c) for m, c in poly.terms if m))
    if op != ">=" and int(n) % common:
        return poly
    return poly_of({m: c // common for m, c in poly.terms})


def _search(test: Callable[[int], bool], good: int, low: int) -> int:
    """Return the least number (from `low` on) down to which a test holds, found by halving."""
    if test(low):
        return low
    while good - low > 1:
        middle = (good + low) // 2
        if test(middle):
            good = middle
        else:
            low = middle
    return good


def _upwards(test: Callable[[int], bool], good: int) -> int:
    """Return the greatest number up to which a test holds."""
    step = 1
    while step < 1 << 40 and test(good + step):
        good, step = good + step, step * 2
    while step:
        if test(good + step):
            good += step
        step //= 2
    return good


def _divisors(poly: Poly, name: str) -> Iterator[int]:
    """Yield numbers by which parts of a polynomial that have a symbol in them are divided."""
    yield 1
    for monomial, _ in poly.terms:
        for atom in monomial:
            if isinstance(atom, Term) or name not in atom.left.symbols() | atom.right.symbols():
                continue
            n = atom.right.constant
            if atom.op in ("//", "mod") and isinstance(n, int):
                below = math.lcm(*(Fraction(c).denominator for _, c in atom.left.terms))
                yield from (n * below * d for d in _divisors(atom.left, name))
            else:
                yield from (*_divisors(atom.left, name), *_divisors(atom.right, name))


def _range_guards(name: str, facts: Facts) -> Iterator[Guard]:
    low, high = facts.range(name)
    x = symbol(name)
    if low == high and low is not None:
        yield Guard(plus(x, constant(-low)), "==", f"{name} == {low}")
        return
    if low:
        yield Guard(plus(x, constant(-low)), ">=", f"{name} > {low - 1}")
    if high is not None:
        yield Guard(plus(constant(high), x, -1), ">=", f"{name} < {high + 1}")


def _text(poly: Poly, op: str) -> str:
    """Return a guard as text, with the negative terms on the right side."""
    left = poly_of({m: c for m, c in poly.terms if c > 0})
    right = poly_of({m: -c for m, c in poly.terms if c < 0})
    n = poly.coefficients().get((), 0)
    if op == ">=" and n == -1:
        return f"{left} > {plus(right, constant(-1))}"
    return f"{left} {op} {right}"


# -- decisions -----------------------------------------------------------------------------------

A = TypeVar("A", bound=Assumptions | None)

_active: ContextVar[Assumptions | None] = ContextVar("mdfuse.extents.assumptions", default=None)


class assuming(Generic[A]):
    """Record decisions about extents in some assumptions while the block runs; in None, nowhere."""

    __slots__ = ("_assumptions", "_token")

    def __init__(self, assumptions: A) -> None:
        self._assumptions = assumptions

    def __enter__(self) -> A:
        self._token = _active.set(self._assumptions)
        return self._assumptions

    def __exit__(self, *exception: object) -> None:
        _active.reset(self._token)


def active_assumptions() -> Assumptions | None:
    """Return the assumptions that record decisions now; None for none."""
    return _active.get()


def known_facts() -> Facts:
    """Return the facts about symbols that are known now."""
    active = _active.get()
    return active.facts if active is not None else NOTHING


NOTHING = Facts()


def decide(poly: Poly, op: str, examples: Mapping[str, int]) -> bool:
    """Decide by examples whether a polynomial is ==, != or >= 0, and leave a guard."""
    result = _is(poly.value(examples), op)
    active = _active.get()
    if active is not None:
        examples = active.seen(examples)
        if result:
            active.assume(poly, op, examples)
        elif op == ">=":
            active.assume(plus(constant(-1), poly, -1), ">=", examples)
        else:
            active.assume(poly, "!=" if op == "==" else "==", examples)
    return result
