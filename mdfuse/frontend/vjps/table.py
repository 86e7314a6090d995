"""Rules of gradients: the cotangents of an op's operands, given that of its result.

A rule is made of operations, so its values have layouts and can be differentiated again. It takes
the expression as `Applied` and the cotangent of its result, and returns one value per operand, or
None. Its caller sums over broadcast dims, casts to the operand's dtype, and drops unwanted values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import in_f32, record
from mdfuse.frontend.vjps.slice_cotangents import Part


class Applied(Protocol):
    """An expression, as a rule sees it."""

    @property
    def attrs(self) -> Mapping[str, Any]:
        """The attributes of the op."""

    @property
    def count(self) -> int:
        """The number of operands."""

    @property
    def is_square(self) -> bool:
        """Return whether both operands are one value."""

    @property
    def y(self) -> Handle:
        """The result."""

    @property
    def results(self) -> Sequence[Handle]:
        """The results, if there are several."""

    def __getitem__(self, position: int) -> Any:
        """An operand: a value, a number, or None."""

    def wants(self, position: int) -> bool:
        """Return whether the cotangent of an operand is wanted."""

    def shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of an operand, without recomputing it."""

    def returned(self, ct: Handle) -> Handle:
        """Return a cotangent in the operand's layout, for an expression that changes the layout."""


#: (expression, cotangent of the result) -> cotangents of the operands. Several results have a list
#: of cotangents, with None for unread results.
Rule = Callable[[Applied, Any], Sequence[Part | None]]

RULES: dict[str, Rule] = {}

#: Ops whose gradient is zero: values read only through them have a gradient, as in torch.
STEPS = ("floor", "ceil", "round", "trunc", "sign")

#: Ops through which no gradient goes, with the reason.
NO_GRADIENT: dict[str, str] = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "its result is a bool"),
    **dict.fromkeys(
        ("isfinite", "isinf", "isnan", "signbit", "any", "all"), "its result is a bool"
    ),
    **dict.fromkeys((f"logical_{op}" for op in ("and", "or", "xor", "not")), "on bools"),
    **dict.fromkeys((f"bitwise_{op}" for op in ("and", "or", "xor", "not")), "on integers"),
    **dict.fromkeys((f"bitwise_{side}_shift" for side in ("left", "right")), "on integers"),
    **dict.fromkeys(STEPS, "it is a step"),
    **dict.fromkeys(("floor_divide", "heaviside", "nextafter"), "it is a step"),
    **dict.fromkeys(("uniform", "full", "full_like", "arange", "constant"), "it reads no tensor"),
    "detach": "it is there for that",
    "counts": "it counts",
    "paged_attention": "it reads caches of what is served; attention has a gradient",
    **dict.fromkeys(
        ("window", "widen", "round_terms", "line_up_rows", "put_back_rows"),
        "lowering makes it",
    ),
    **dict.fromkeys(("attention_parts", "attention_terms"), "lowering makes it"),
    **dict.fromkeys(("row_places", "rows_to_experts", "rows_to_parts"), "lowering makes it"),
    **dict.fromkeys(("attention_halo_grad", "add_halos"), "lowering makes it"),
}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that adds the rule of some ops."""

    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def by_operand(*formulas: Callable[[Applied, Handle], Handle] | None) -> Rule:
    """Return the rule of an op by a formula for each operand; None: it gets no cotangent.

    Only formulas of operands whose cotangent is wanted are computed.
    """

    def cotangents(e: Applied, ct: Handle) -> Sequence[Handle | None]:
        wanted = (f if e.wants(at) else None for at, f in enumerate(formulas))
        return tuple(None if formula is None else formula(e, ct) for formula in wanted)

    return cotangents


class Wide:
    """An expression whose values a rule reads in f32 where they have 16 bits.

    Formulas of several steps are then rounded once, as torch's kernels do.
    """

    def __init__(self, e: Applied) -> None:
        self._e = e
        self.attrs = e.attrs
        self.count = e.count
        self.is_square = e.is_square
        self.wants, self.shape, self.returned = e.wants, e.shape, e.returned

    @property
    def y(self) -> Handle:
        return in_f32(self._e.y)

    @property
    def results(self) -> Sequence[Handle]:
        return [in_f32(x) for x in self._e.results]

    def __getitem__(self, position: int) -> Any:
        x = self._e[position]
        return in_f32(x) if isinstance(x, Handle) and x.is_tensor else x


def widely(rule: Rule) -> Rule:
    """Return a rule that computes 16-bit values in f32; its caller casts back."""
    return lambda e, ct: rule(Wide(e), in_f32(ct))


def op(name: str) -> Callable[..., Handle]:
    """Return the function that records an op without attributes."""

    def function(*operands: Any) -> Handle:
        return record(name, *operands)

    return function


def conj(x: Any) -> Any:
    """Return the conjugate of a complex value; others unchanged."""
    is_complex = isinstance(x, Handle) and x.dtype.is_complex
    return record("conj", x) if is_complex else x


eq, lt, gt, ge, le, where, logical_and = map(
    op, ("eq", "lt", "gt", "ge", "le", "where", "logical_and")
)
exp, log, cos, sin, cosh, sinh = map(op, ("exp", "log", "cos", "sin", "cosh", "sinh"))
sign, rsqrt, sigmoid, tanh, trunc, floor_divide = map(
    op, ("sign", "rsqrt", "sigmoid", "tanh", "trunc", "floor_divide")
)


def product_of_others(
    x: Handle,
    product: Callable[[Handle], Handle],
    total: Callable[[Handle], Handle],
    has_zero: Callable[[Handle], Handle] | None = None,
) -> Handle:
    """Return for each element the product of the others.

    It is the product of nonzero elements times that of zeros. The latter is a polynomial of the
    zeros: its value is 0, but its derivatives matter, so that second derivatives are right.

    For the only nonfinite element it is 0 if there are zeros. Without zeros it is NaN, unless torch
    multiplies the others, as its `prod` does if any element is 0.

    Args:
        x: the elements.
        product, total: of the elements that belong together, at the place of each.
        has_zero: from the places of zeros, whether torch multiplies the others; None: beside zeros.
    """
    is_zero = eq(x, 0)
    nonzero, at_zeros = where(is_zero, 1.0, x), where(is_zero, x, 0.0)
    count = total(record("cast", is_zero, dtype=x.dtype))
    of_other, of_zero = where(eq(count, 0), 1.0, 0.0), where(eq(count, 1), 1.0, 0.0)
    without: Any = 1.0
    for n, of_n in enumerate(symmetric(at_zeros, total), 1):
        without = of_n - at_zeros * without
        of_other = where(eq(count, n), of_n, of_other)
        of_zero = where(eq(count, n + 1), without, of_zero)
    others = product(nonzero) * where(is_zero, of_zero, of_other) / nonzero
    strange = op("logical_not")(op("isfinite")(x))
    is_lone = logical_and(strange, eq(total(record("cast", strange, dtype=x.dtype)), 1))
    beside = gt(count, 0)
    if has_zero is None:
        return where(logical_and(is_lone, beside), 0.0, others)
    finite_others = where(beside, 0.0, product(where(strange, 1.0, nonzero)))
    return where(logical_and(is_lone, has_zero(is_zero)), finite_others, others)


def finite(x: Handle) -> Handle:
    """Replace nonfinite numbers by 0, because they are then multiplied by zeros."""
    return where(op("isfinite")(x), x, 0.0)


#: Derivatives of products are right up to this order, for any number of zeros.
ORDERS = 3


def symmetric(x: Handle, total: Callable[[Handle], Handle]) -> list[Handle]:
    """Return the elementary symmetric sums that `ORDERS` needs: of elements, of pairs, …

    They come from power sums (Newton's identities), so that only totals are computed.
    """
    sums, power = [total(x)], x
    while len(sums) < ORDERS - 1:
        power = power * x
        sums.append(total(power))
    elementary: list[Handle] = []
    for n, term in enumerate(sums, 1):
        for i in range(n - 1, 0, -1):
            term = elementary[n - i - 1] * sums[i - 1] - term
        elementary.append(term / n if n > 1 else term)
    return elementary
