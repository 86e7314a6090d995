"""Index expressions as sums of terms times numbers, so that equal ones can be told apart.

(coord(tp) - %i) mod 4   ->   coord(tp) + 3*%i, modulo 4
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from mdfuse.extents.expressions import Index, Term


class Linear(NamedTuple):
    """A sum of terms times numbers, plus a number.

    Attributes:
        factors: term -> its factor, which is not 0, sorted.
        constant: the number.
        modulus: the sum is taken modulo this number; 0: it is the number itself.
    """

    factors: tuple[tuple[Term, int], ...]
    constant: int
    modulus: int = 0

    def factor(self, term: Term) -> int:
        """Return the factor of a term; 0 where it does not occur."""
        return next((n for t, n in self.factors if t == term), 0)

    def plus(self, other: Linear, times: int = 1) -> Linear:
        """Return the sum of this and a multiple of another one, modulo `modulus`."""
        if not other.factors and not other.constant:
            return self
        factors = dict(self.factors)
        for term, n in other.factors:
            factors[term] = factors.get(term, 0) + times * n
        return simplified(factors, self.constant + times * other.constant, self.modulus)

    def with_term(self, term: Term, other: Linear) -> Linear:
        """Return this with a sum in the place of a term."""
        n = self.factor(term)
        others = simplified(
            {t: f for t, f in self.factors if t != term}, self.constant, self.modulus
        )
        return others.plus(other, n) if n else self


def simplified(factors: Mapping[Term, int], constant: int, modulus: int = 0) -> Linear:
    """Return a sum in the form in which equal sums are equal."""
    if modulus:
        factors, constant = {t: n % modulus for t, n in factors.items()}, constant % modulus
    nonzero = [pair for pair in factors.items() if pair[1]]
    if len(nonzero) > 1:
        nonzero.sort(key=lambda pair: (pair[0].kind, pair[0].name, pair[0].dim))
    return Linear(tuple(nonzero), constant, modulus)


@lru_cache(maxsize=4096)
def linear(index: Index | bool, modulus: int = 0) -> Linear | None:
    """Return an index expression as a sum of terms times numbers; None where it is none.

    Args:
        index: the expression.
        modulus: look at it modulo this number; then `mod` of the same number may occur inside.

    >>> from mdfuse.extents.expressions import Calc, Term
    >>> i, c = Term("index", "i"), Term("coord", "tp")
    >>> a = linear(Calc("mod", Calc("-", c, i), 4), 4)
    >>> a == linear(Calc("+", c, Calc("*", 3, i)), 4)
    True
    """
    if isinstance(index, int):
        return Linear((), index % modulus if modulus else int(index), modulus)
    if isinstance(index, Term):
        return Linear(((index, 1),) if modulus != 1 else (), 0, modulus)
    if index.op == "mod":
        return linear(index.left, modulus) if modulus and index.right == modulus else None
    if index.op not in ("+", "-", "*"):
        return None
    left, right = linear(index.left, modulus), linear(index.right, modulus)
    if left is None or right is None:
        return None
    if index.op != "*":
        return left.plus(right, 1 if index.op == "+" else -1)
    if left.factors and right.factors:
        return None
    number, factor = (right, left) if left.factors else (left, right)
    return simplified({}, 0, modulus).plus(factor, number.constant)
