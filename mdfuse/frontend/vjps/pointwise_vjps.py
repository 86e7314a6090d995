"""Gradients of elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.slice_cotangents import Part
from mdfuse.frontend.vjps.table import (
    RULES,
    Applied,
    Rule,
    by_operand,
    conj,
    cos,
    cosh,
    eq,
    exp,
    floor_divide,
    ge,
    gt,
    le,
    log,
    logical_and,
    lt,
    rsqrt,
    rule,
    sigmoid,
    sign,
    sin,
    sinh,
    tanh,
    trunc,
    where,
    widely,
)
from mdfuse.ir import slopes

# -- pointwise: two operands ---------------------------------------------------------------------


RULES["add"] = by_operand(lambda e, ct: ct, lambda e, ct: ct)
RULES["sub"] = by_operand(lambda e, ct: ct, lambda e, ct: -ct)
RULES["div"] = by_operand(
    lambda e, ct: ct / conj(e[1]), lambda e, ct: -ct * conj(e[0] / e[1] / e[1])
)
RULES["remainder"] = by_operand(lambda e, ct: ct, lambda e, ct: -ct * floor_divide(e[0], e[1]))
RULES["fmod"] = by_operand(lambda e, ct: ct, lambda e, ct: -ct * trunc(e[0] / e[1]))


def _turned(e: Applied, side: Any) -> Handle:
    """Return a side divided by the squared distance from the origin; 0 at the origin."""
    square = e[0] * e[0] + e[1] * e[1]
    is_zero = eq(square, 0)
    return where(is_zero, 0.0, side / where(is_zero, 1.0, square))


RULES["atan2"] = by_operand(
    lambda e, ct: ct * _turned(e, e[1]), lambda e, ct: ct * _turned(e, -e[0])
)


@rule("mul")
def _mul(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    if e.is_square:  # bitwise equal to ct * x + ct * x
        return ct * conj(e[0]) * 2, None
    return ct * conj(e[1]) if e.wants(0) else None, ct * conj(e[0]) if e.wants(1) else None


def _base_of_power(e: Applied, ct: Handle) -> Handle:
    """n * x ** (n - 1), but 0 for n = 0, where x ** -1 would be infinite at 0."""
    x: Handle = e[0]
    n = e[1]
    if not isinstance(n, Handle):
        return ct * (x if n == 2 else x ** (n - 1)) * n if n != 0 else creations.zeros_like(ct)
    slope = ct * (n * x ** (n - 1))
    return where(eq(n, 0), 0.0, slope) if n.is_tensor else slope


def _log(x: Handle, ct: Handle) -> Handle:
    """log(x) in the precision of the cotangent, if x has another dtype, as integers."""
    is_other = x.is_tensor and x.dtype != ct.dtype and ct.dtype.is_floating_point
    return log(record("cast", x, dtype=ct.dtype) if is_other else x)


def _exponent_of_power(e: Applied, ct: Handle) -> Handle:
    """y * log(x), but 0 where 0 to a power is 0 or 1."""
    x, n = e[0], e[1]
    if not isinstance(x, Handle):
        if x == 0:
            return where(ge(n, 0), 0.0, ct * (e.y * -math.inf))
        return ct * (e.y * (math.log(x) if x > 0 else math.nan))
    slope = ct * (e.y * _log(x, ct))
    return where(logical_and(eq(x, 0), ge(n, 0)), 0.0, slope) if x.is_tensor else slope


RULES["pow"] = by_operand(_base_of_power, _exponent_of_power)


def _extreme_of_two(is_left: Callable[..., Handle]) -> Rule:
    """Half to each where they are equal; where one is a NaN, all to both."""

    def cotangents(e: Applied, ct: Handle) -> Sequence[Handle | None]:
        half = ct / 2

        def share(mine: Any, other: Any) -> Handle:
            return where(eq(mine, other), half, where(is_left(mine, other), 0.0, ct))

        return (
            share(e[0], e[1]) if e.wants(0) else None,
            share(e[1], e[0]) if e.wants(1) else None,
        )

    return cotangents


def _first_or_second(is_chosen: Callable[..., Handle]) -> Rule:
    """All to the first where they are equal, or the second is a NaN."""

    def cotangents(e: Applied, ct: Handle) -> Sequence[Handle | None]:
        first = record("logical_or", is_chosen(e[0], e[1]), record("ne", e[1], e[1]))
        return (
            where(first, ct, 0.0) if e.wants(0) else None,
            where(first, 0.0, ct) if e.wants(1) else None,
        )

    return cotangents


RULES["maximum"] = _extreme_of_two(lt)
RULES["minimum"] = _extreme_of_two(gt)
RULES["fmax"] = _first_or_second(ge)
RULES["fmin"] = _first_or_second(le)


def _sided(mine: int) -> Callable[[Applied, Handle], Handle]:
    return lambda e, ct: where(eq(e.y, 0), 0.0, ct * (e[mine] / e.y))


RULES["logaddexp"] = by_operand(
    lambda e, ct: ct * sigmoid(e[0] - e[1]), lambda e, ct: ct * sigmoid(e[1] - e[0])
)
RULES["hypot"] = by_operand(_sided(0), _sided(1))


def _factor_of_log(e: Applied, ct: Handle) -> Handle:
    """log(y), but 0 where 0 * log(y) is 0."""
    x, y = e[0], e[1]
    if isinstance(y, Handle):
        return where(logical_and(eq(x, 0), le(y, 0)), 0.0, ct * _log(y, ct))
    if y > 0:
        return ct * math.log(y)
    return where(eq(x, 0), 0.0, ct * (-math.inf if y == 0 else math.nan))


RULES["xlogy"] = by_operand(_factor_of_log, lambda e, ct: ct * e[0] / e[1])
RULES["copysign"] = by_operand(
    lambda e, ct: where(eq(e[0], 0), 0.0, ct * (e.y / e[0])),
    lambda e, ct: creations.zeros_like(ct),
)


# Selected, not multiplied: a hidden value may be infinite, and 0 * inf is NaN.
RULES["where"] = by_operand(
    None, lambda e, ct: where(e[0], ct, 0.0), lambda e, ct: where(e[0], 0.0, ct)
)


# -- pointwise: several at once ------------------------------------------------------------------


RULES["lerp"] = widely(
    by_operand(
        lambda e, ct: ct * conj(1.0 - e[2]),
        lambda e, ct: ct * conj(e[2]),
        lambda e, ct: ct * conj(e[1] - e[0]),
    )
)


@rule("addcmul")
@widely
def _addcmul(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    a, b, value = e[1], e[2], e[3]
    return (
        ct if e.wants(0) else None,
        ct * conj(b * value) if e.wants(1) else None,
        ct * conj(a * value) if e.wants(2) else None,
        None,
    )


@rule("addcdiv")
@widely
def _addcdiv(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    a, b, value = e[1], e[2], e[3]
    return (
        ct if e.wants(0) else None,
        ct * conj(value / b) if e.wants(1) else None,
        -ct * conj(a * value / b / b) if e.wants(2) else None,
        None,
    )


@rule("squared_distance")
def _squared_distance(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """No cotangent for the centre: it is a mean, so its cotangents sum to 0."""
    return ct * ((e[0] - e[1]) * 2.0), None


@rule("limit")
def _limit(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """x gets the cotangent within and on the limits; below, the min gets it; above, the max.

    If the limits cross, the result is the max; if they are equal, the min gets nothing.
    """
    x, least, most = e[0], e[1], e[2]
    inside, low, high = ct, None, None
    if least is not None:
        inside = where(ge(x, least), inside, 0.0)
        low = where(lt(x, least), ct, 0.0) if e.wants(1) else None
    if most is not None:
        inside = where(le(x, most), inside, 0.0)
        high = where(gt(x, most), ct, 0.0) if e.wants(2) else None
    if least is not None and most is not None:
        low = low if low is None else where(lt(least, most), low, 0.0)
        high = high if high is None else where(lt(most, least), ct, high)
    return inside if e.wants(0) else None, low, high


_LEAST = torch.tensor(1e-12).item()


@rule("binary_cross_entropy")
@widely
def _binary_cross_entropy(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """torch's slope, also at p = 0 and p = 1, where it divides by 1e-12 of 32 bits."""
    p, target = e[0], e[1]
    square = record("clamp", (1.0 - p) * p, min=_LEAST, max=None)
    return (
        ct * (p - target) / square if e.wants(0) else None,
        ct * (record("log1p", -p) - log(p)) if e.wants(1) else None,
    )


def _robust(unit: str, scale: Callable[[Handle, float], Handle]) -> Rule:
    """The slope is the distance, scaled and limited."""

    @widely
    def cotangents(e: Applied, ct: Handle) -> Sequence[Handle | None]:
        slope = ct * scale(e[0] - e[1], e.attrs[unit])
        return slope if e.wants(0) else None, -slope if e.wants(1) else None

    return cotangents


def _within(x: Handle, most: float) -> Handle:
    limited: Handle = record("clamp", x, min=-most, max=most)
    return limited


RULES["huber_loss"] = _robust("delta", _within)
RULES["smooth_l1_loss"] = _robust("beta", lambda far, beta: _within(far / beta, 1.0))

# -- pointwise: one operand ----------------------------------------------------------------------


def _clamp(e: Applied, ct: Handle) -> Handle:
    least, most = e.attrs.get("min"), e.attrs.get("max")
    limits = [x for x in (least, most) if x is not None]
    if any(isinstance(x, float) and math.isnan(x) for x in limits):
        return creations.zeros_like(ct)
    if least is not None:
        ct = where(ge(e[0], least), ct, 0.0)
    return ct if most is None else where(le(e[0], most), ct, 0.0)


def _dropout(e: Applied, ct: Handle) -> Handle:
    """Draw the same mask of the same stream for the cotangent."""
    return record("dropout", ct, e[1], p=e.attrs["p"], stream=e.attrs["stream"])


def _i1(e: Applied, ct: Handle) -> Handle:
    """I0(x) - I1(x) / x, which is 1/2 at 0 (Abramowitz, Stegun 9.6.26)."""
    x = e[0]
    at_zero = eq(x, 0)
    slope = record("i0", x) - e.y / where(at_zero, 1.0, x)
    return ct * where(at_zero, 0.5, slope)


def _sinc(e: Applied, ct: Handle) -> Handle:
    """(cos(pi x) - sinc(x)) / x, which is as -pi^2 x / 3 at 0."""
    x = e[0]
    at_zero = eq(x, 0)
    slope = (cos(x * math.pi) - e.y) / where(at_zero, 1.0, x)
    return ct * where(at_zero, x * (-(math.pi**2) / 3.0), slope)


_LN2, _LN10 = math.log(2.0), math.log(10.0)
_UNARY: dict[str, Callable[[Applied, Handle], Handle]] = {
    "neg": lambda e, ct: -ct,
    "abs": lambda e, ct: ct * (record("sgn", e[0]) if e[0].dtype.is_complex else sign(e[0])),
    "reciprocal": lambda e, ct: -ct * e.y * e.y,
    "sqrt": lambda e, ct: ct / (e.y * 2.0),
    "rsqrt": lambda e, ct: ct * -0.5 * (e.y * e.y * e.y),
    "square": lambda e, ct: ct * (e[0] * 2.0),
    "exp": lambda e, ct: ct * e.y,
    "exp2": lambda e, ct: ct * e.y * _LN2,
    "expm1": lambda e, ct: ct * (e.y + 1.0),
    "log": lambda e, ct: ct / e[0],
    "log1p": lambda e, ct: ct / (e[0] + 1.0),
    "log2": lambda e, ct: ct / (e[0] * _LN2),
    "log10": lambda e, ct: ct / (e[0] * _LN10),
    "sin": lambda e, ct: ct * cos(e[0]),
    "cos": lambda e, ct: -ct * sin(e[0]),
    "tan": lambda e, ct: ct * (e.y * e.y + 1.0),
    "asin": lambda e, ct: ct * rsqrt(1.0 - e[0] * e[0]),
    "acos": lambda e, ct: -ct * rsqrt(1.0 - e[0] * e[0]),
    "atan": lambda e, ct: ct / (e[0] * e[0] + 1.0),
    "sinh": lambda e, ct: ct * cosh(e[0]),
    "cosh": lambda e, ct: ct * sinh(e[0]),
    "asinh": lambda e, ct: ct * rsqrt(e[0] * e[0] + 1.0),
    "acosh": lambda e, ct: ct * rsqrt(e[0] * e[0] - 1.0),
    "atanh": lambda e, ct: ct / (1.0 - e[0] * e[0]),
    "erf": lambda e, ct: ct * (exp(-(e[0] * e[0])) * (2.0 / math.sqrt(math.pi))),
    "erfc": lambda e, ct: ct * (exp(-(e[0] * e[0])) * (-2.0 / math.sqrt(math.pi))),
    "erfinv": lambda e, ct: ct * (exp(e.y * e.y) * (math.sqrt(math.pi) / 2.0)),
    "lgamma": lambda e, ct: ct * record("digamma", e[0]),
    "digamma": lambda e, ct: ct * record("polygamma", e[0], n=1),
    "polygamma": lambda e, ct: ct * record("polygamma", e[0], n=e.attrs["n"] + 1),
    "i0": lambda e, ct: ct * record("i1", e[0]),
    "i1": _i1,
    "sinc": _sinc,
    "clamp": _clamp,
    "cast": lambda e, ct: ct,  # by the caller
    "dropout": _dropout,
}


def _of_one(formula: Callable[[Applied, Handle], Handle]) -> Rule:
    return lambda e, ct: (formula(e, ct), *(None,) * (e.count - 1))


#: Formulas of one step, or of several that are exact.
_EXACT = (
    "neg", "abs", "square", "exp", "log", "clamp", "cast", "dropout",
)  # fmt: skip
RULES.update(
    {
        name: _of_one(formula) if name in _EXACT else widely(_of_one(formula))
        for name, formula in _UNARY.items()
    }
)
for _name in ("div", "pow", "atan2", "logaddexp", "hypot", "xlogy"):
    RULES[_name] = widely(RULES[_name])

# -- pointwise: by one kernel --------------------------------------------------------------------


def _gelu_twice(x: Handle, approximate: str = "none") -> Handle:
    """phi(x) * (2 - x^2), or its approximation by tanh."""
    if approximate == "none":
        phi = exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
        return phi * (2.0 - x * x)
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
    t = tanh((x + x * x * x * cubic) * scale)
    once, twice = (x * x * (3.0 * cubic) + 1.0) * scale, x * (6.0 * cubic * scale)
    return (1.0 - t * t) * (once + x * 0.5 * (twice - t * once * once * 2.0))


def _silu_twice(x: Handle) -> Handle:
    s = sigmoid(x)
    return s * (1.0 - s) * (x * (1.0 - s * 2.0) + 2.0)


def _mish_twice(x: Handle) -> Handle:
    s, t = sigmoid(x), tanh(record("softplus", x))
    return (1.0 - t * t) * s * (x * (1.0 - s - t * s * 2.0) + 2.0)


def _logit_twice(x: Handle, eps: float = 0.0) -> Handle:
    """(2 x - 1) / (x * (1 - x))^2, and 0 where x is limited."""
    square = x * (1.0 - x)
    inside = logical_and(ge(x, eps), le(x, 1.0 - eps))
    return where(inside, (x * 2.0 - 1.0) / (square * square), 0.0)


def _softplus_twice(x: Handle, beta: float = 1.0, threshold: float = 20.0) -> Handle:
    s = sigmoid(x * beta)
    return where(gt(x * beta, threshold), 0.0, s * (1.0 - s) * beta)


#: Op whose gradient is one kernel -> its second derivative, by the kernel's operands; missing ops
#: are piecewise linear.
_TWICE: dict[str, Callable[..., Handle]] = {
    "elu": lambda x, alpha=1.0, scale=1.0, input_scale=1.0: where(
        gt(x, 0), 0.0, exp(x * input_scale) * (alpha * scale * input_scale**2)
    ),
    "gelu": _gelu_twice,
    "hardswish": lambda x: where(lt(record("abs", x), 3), 1.0 / 3.0, 0.0),
    "logit": _logit_twice,
    "mish": _mish_twice,
    "sigmoid": lambda y: 1.0 - y * 2.0,
    "silu": _silu_twice,
    "softplus": _softplus_twice,
    "tanh": lambda y: y * -2.0,
}


def _by_kernel(name: str) -> Rule:
    is_of_result = name in slopes.OF_RESULT

    def cotangents(e: Applied, ct: Handle) -> Sequence[Handle | None]:
        return (record(f"{name}_grad", ct, e.y if is_of_result else e[0], **e.attrs),)

    return cotangents


def _of_kernel(name: str) -> Rule:
    """It is linear in the cotangent."""
    twice = _TWICE.get(name)

    @widely
    def bent(e: Applied, ct: Handle) -> Sequence[Handle | None]:
        assert twice is not None
        return None, ct * e[0] * twice(e[1], **e.attrs)

    def cotangents(e: Applied, ct: Handle) -> Sequence[Part | None]:
        first = record(f"{name}_grad", ct, e[1], **e.attrs) if e.wants(0) else None
        return first, bent(e, ct)[1] if twice and e.wants(1) else None

    return cotangents


for _name in slopes.NAMES:
    RULES[_name], RULES[f"{_name}_grad"] = _by_kernel(_name), _of_kernel(_name)
