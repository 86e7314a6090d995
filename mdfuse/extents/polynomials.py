"""Polynomials over symbolic extents, in one form for all that are equal.

A `//`, `mod`, `min` or `max` that cannot be simplified is an atom: `4*x.0 + (y.0+3)//4`. With what
is known of the symbols, more can be simplified (`mdfuse/extents/facts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mdfuse.errors import ProgramError
from mdfuse.extents.index import ARITHMETIC, Term

Number = int | Fraction


#: The most operations, and the most terms, of one expression: printing and proving go through all.
MOST_OPERATIONS = 1000


@dataclass(frozen=True, slots=True)
class Fold:
    """An atom: `//`, `mod`, `min` or `max` of two polynomials.

    Attributes:
        op: which.
        left: the first operand.
        right: the second.
        text: how it is printed, by which sums and products are sorted; made once.
        names: the symbols in it.
        size: how many such atoms it is made of, itself included.
    """

    op: str
    left: Poly
    right: Poly
    text: str = field(init=False, repr=False, compare=False)
    names: frozenset[str] = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = 1 + self.left.size + self.right.size
        _check_size(size, "operations")
        kept = object.__setattr__
        kept(self, "size", size)
        kept(self, "text", self._text())
        kept(self, "names", frozenset(self.left.symbols() | self.right.symbols()))
        kept(self, "_hash", hash((self.op, self.left, self.right)))

    def _text(self) -> str:
        if self.op in ("min", "max"):
            return f"{self.op}({self.left}, {self.right})"
        op = self.op if self.op == "//" else f" {self.op} "
        return f"{self.left.nested()}{op}{self.right.nested()}"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Fold, (self.op, self.left, self.right)

    def __str__(self) -> str:
        return self.text


def _check_size(count: int, what: str) -> None:
    """Raise ProgramError for an expression that is too large to print and to compute with."""
    if count > MOST_OPERATIONS:
        raise ProgramError(
            f"an extent with {count} {what}",
            because=f"an expression of symbolic extents has {MOST_OPERATIONS} {what} at most: "
            "it is printed, compared and computed with",
            hint="fewer slices one after the other, or an extent that is a number",
        )


Atom = Term | Fold
#: A product of atoms, sorted; () is 1.
Monomial = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Poly:
    """A sum of monomials times numbers; these are fractions only where the sum is an integer."""

    terms: tuple[tuple[Monomial, Number], ...] = ()

    @property
    def constant(self) -> Number | None:
        """The number that the polynomial is; None where it depends on symbols."""
        if not self.terms:
            return 0
        return self.terms[0][1] if self.terms[0][0] == () and len(self.terms) == 1 else None

    def coefficients(self) -> dict[Monomial, Number]:
        """Return monomial -> its coefficient."""
        return dict(self.terms)

    @property
    def size(self) -> int:
        """The number of `Fold` atoms in the polynomial, nested ones included."""
        return sum(a.size for m, _ in self.terms for a in m if isinstance(a, Fold))

    def symbols(self) -> set[str]:
        """Return the names of the symbols, those inside atoms included."""
        return {s for monomial, _ in self.terms for atom in monomial for s in _names(atom)}

    def value(self, known: Mapping[str, int]) -> int:
        """Return the number that the polynomial is for these extents.

        Raises:
            ZeroDivisionError: a division by zero.
        """
        total: Number = 0
        for monomial, c in self.terms:
            total += c * math.prod(_atom_value(a, known) for a in monomial)
        return int(total)

    def nested(self) -> str:
        """Return the text as an operand, in parentheses where it needs them."""
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
    """Return the text of a monomial, by which monomials are sorted."""
    return "*".join(map(str, monomial))


def _names(atom: Atom) -> Iterable[str]:
    return (atom.name,) if isinstance(atom, Term) else atom.names


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
    """Return the sum of terms, sorted, with zeros left out."""
    kept = [
        (m, c if type(c) is int or c.denominator > 1 else int(c)) for m, c in terms.items() if c
    ]
    if len(kept) > 1:
        _check_size(len(kept), "terms")
        kept.sort(key=_text_of_term)
    return Poly(tuple(kept))


def _text_of_term(term: tuple[Monomial, Number]) -> str:
    return str_of(term[0])


def constant(n: Number) -> Poly:
    """Return a number as a polynomial."""
    return poly_of({(): n})


def symbol(name: str) -> Poly:
    """Return a symbolic extent as a polynomial."""
    return one(Term("symbol", name))


def one(atom: Atom) -> Poly:
    """Return an atom as a polynomial."""
    return Poly((((atom,), 1),))


def plus(a: Poly, b: Poly, times: Number = 1) -> Poly:
    """Return a + times * b."""
    found = a.coefficients()
    for monomial, c in b.terms:
        found[monomial] = found.get(monomial, 0) + c * times
    return poly_of(found)


def scaled(a: Poly, by: Number) -> Poly:
    """Return a * by."""
    return poly_of({m: c * by for m, c in a.terms})


def times(a: Poly, b: Poly) -> Poly:
    """Return a * b."""
    found: dict[Monomial, Number] = {}
    for m, c in a.terms:
        for n, d in b.terms:
            product = tuple(sorted((*m, *n), key=str))
            found[product] = found.get(product, 0) + c * d
    return poly_of(found)
