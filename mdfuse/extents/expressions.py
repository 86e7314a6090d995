"""Expressions: the integers that programs compute with before their numbers are known.

An expression is a number, a `Term`, a `Calc` of two expressions, or a `Poly`, a sum of products of
such. Index expressions of host programs are kept as they are written: what prints reads back. They
consist of loop indices, the rank, its coordinate along a mesh axis and extents of buffers; once a
program is projected onto one rank, only loop indices are left. Extents that a run chooses are in
a canonical form, in which equal ones are the same: a `Poly` whose atoms are symbols and operations
that cannot be simplified, `4*x.0 + (y.0+3)//4`. Known facts about the symbols simplify more
(`mdfuse/extents/facts.py`).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Generic, TypeVar

from mdfuse.errors import ProgramError

#: The largest number; numbers of programs have 64 bits, as torch's have.
LARGEST = 2**63 - 1
#: How deep index expressions, and blocks of instructions, may be nested.
DEEPEST = 64
#: The most operations, and the most terms, of one expression: printing and proving go through all.
MOST_OPERATIONS = 1000

#: op -> how it is computed. Comparisons give a bool.
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "mod": operator.mod,
    "min": min,
    "max": max,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
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


#: An operand: an `Index`, or a `Poly`.
Side = TypeVar("Side")


@dataclass(frozen=True, slots=True)
class Calc(Generic[Side]):
    """An operation of `ARITHMETIC` on two expressions, kept as it is written.

    Attributes:
        op: which.
        left: the first operand.
        right: the second.
        text: how it is printed, by which sums and products are sorted; made once.
        depth: how deep operations are one inside the other, without sums between them.
        size: how many operations it is made of, itself included.
        terms: those of both operands, in order.
    """

    op: str
    left: Side
    right: Side
    text: str = field(init=False, repr=False, compare=False)
    depth: int = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)
    terms: tuple[Term, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assign, left, right = object.__setattr__, self.left, self.right
        assign(self, "depth", 1 + max(getattr(left, "depth", 0), getattr(right, "depth", 0)))
        assign(self, "size", 1 + getattr(left, "size", 0) + getattr(right, "size", 0))
        if self.depth > DEEPEST:
            raise ProgramError(
                f"an index expression of {self.depth} operations, one inside the other",
                because=f"at most {DEEPEST} are nested",
                hint="write the number that it is, or a shorter expression",
            )
        _check_size(self.size, "operations")
        assign(self, "text", self._text())
        assign(self, "terms", (*terms(left), *terms(right)))
        assign(self, "_hash", hash((self.op, left, right)))

    def _text(self) -> str:
        if self.op in ("min", "max"):
            return f"{self.op}({self.left}, {self.right})"
        is_close = self.op == "//" and isinstance(self.left, Poly)
        op = self.op if is_close else f" {self.op} "
        return f"{_nested(self.left)}{op}{_nested(self.right)}"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Calc, (self.op, self.left, self.right)

    def __str__(self) -> str:
        return self.text


#: A character that only texts of several terms, factors or operands have behind their sign.
_COMPOUND = re.compile(r"[ */+-]")


def _nested(side: object) -> str:
    """Return the text of an operand, in parentheses where it needs them."""
    text = str(side)
    return f"({text})" if _COMPOUND.search(text, 1) else text


def _check_size(count: int, what: str) -> None:
    """Raise ProgramError for an expression that is too large to print and to compute with."""
    if count > MOST_OPERATIONS:
        raise ProgramError(
            f"an expression with {count} {what}",
            because=f"an expression has {MOST_OPERATIONS} {what} at most: "
            "it is printed, compared and computed with",
            hint="fewer slices one after the other, or an extent that is a number",
        )


# -- index expressions ---------------------------------------------------------------------------

Index = int | Term | Calc["Index"]
X = TypeVar("X")

#: Types of an index that is no number yet, for `isinstance`.
UNKNOWN = (Term, Calc)


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
    value = int(ARITHMETIC[op](left, right))
    if not -LARGEST - 1 <= value <= LARGEST:
        raise ProgramError(
            f"the index {left} {op} {right}",
            because="numbers have 64 bits",
            hint="write an expression whose value is smaller",
        )
    return value


def resolve(x: X, known: Callable[[Term], int | None]) -> X | Index:
    """Return an index with known terms replaced by their numbers, and computed where possible.

    Anything but an index is returned as it is.

    >>> resolve(Calc("+", loop("i"), 2), {loop("i"): 3}.get)
    5
    """
    if isinstance(x, Term):
        value = known(x)
        return x if value is None else value
    if isinstance(x, Calc):
        return calc(x.op, resolve(x.left, known), resolve(x.right, known))
    return x


def terms(x: object) -> tuple[Term, ...]:
    """Return the terms of an expression, in order; none of anything else."""
    if isinstance(x, Term):
        return (x,)
    if isinstance(x, Calc):
        return x.terms
    if isinstance(x, Poly):
        return tuple([t for monomial, _ in x.terms for atom in monomial for t in terms(atom)])
    return ()


# -- sums of products ----------------------------------------------------------------------------

Number = int | Fraction
#: A factor: a symbol, or `//`, `mod`, `min` or `max` of two sums.
Atom = Term | Calc["Poly"]
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
        """The number of operations that are atoms of the polynomial, nested ones included."""
        return sum(a.size for m, _ in self.terms for a in m if isinstance(a, Calc))

    def symbols(self) -> set[str]:
        """Return the names of the symbols, those inside atoms included."""
        return {term.name for term in terms(self)}

    def value(self, known: Mapping[str, int]) -> int:
        """Return the number that the polynomial is for these extents.

        Raises:
            ZeroDivisionError: a division by zero.
        """
        total: Number = 0
        for monomial, c in self.terms:
            total += c * math.prod(_atom_value(a, known) for a in monomial)
        return int(total)

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
    return text if isinstance(atom, Term) or atom.op in ("min", "max") else f"({text})"


def str_of(monomial: Monomial) -> str:
    """Return the text of a monomial, by which monomials are sorted."""
    return "*".join(map(str, monomial))


def _atom_value(atom: Atom, known: Mapping[str, int]) -> int:
    if isinstance(atom, Term):
        return known[atom.name]
    return ARITHMETIC[atom.op](atom.left.value(known), atom.right.value(known))


def poly_of(terms: Mapping[Monomial, Number]) -> Poly:
    """Return the sum of terms, sorted, with zeros left out."""
    nonzero = [
        (m, c if type(c) is int or c.denominator > 1 else int(c)) for m, c in terms.items() if c
    ]
    if len(nonzero) > 1:
        _check_size(len(nonzero), "terms")
        nonzero.sort(key=lambda term: str_of(term[0]))
    return Poly(tuple(nonzero))


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
    sums = a.coefficients()
    for monomial, c in b.terms:
        sums[monomial] = sums.get(monomial, 0) + c * times
    return poly_of(sums)


def scaled(a: Poly, by: Number) -> Poly:
    """Return a * by."""
    return poly_of({m: c * by for m, c in a.terms})


def times(a: Poly, b: Poly) -> Poly:
    """Return a * b."""
    products: dict[Monomial, Number] = {}
    for m, c in a.terms:
        for n, d in b.terms:
            product = tuple(sorted((*m, *n), key=str))
            products[product] = products.get(product, 0) + c * d
    return poly_of(products)
