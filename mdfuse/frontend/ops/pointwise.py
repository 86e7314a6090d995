"""Elementwise operations: rows of the op table, and compositions of these."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import (
    Elementwise,
    Operand,
    as_dtype,
    check_factor,
    in_f32,
    is_inexact,
    is_narrow,
    named,
    record,
    shown,
)
from mdfuse.ir import slopes
from mdfuse.ir.ops import TABLE


def _unary(name: str) -> Elementwise:
    def function(x: Operand) -> Handle:
        return record(name, x)

    return named(name, f"Elementwise `torch.{name}`.", function)


def _binary(name: str) -> Elementwise:
    def function(x: Operand, other: Operand) -> Handle:
        return record(name, x, other)

    return named(name, f"Elementwise `torch.{name}`, broadcasting.", function)


_RECORDED = {"unary": _unary, "binary": _binary}
_PARTS = {"squared_distance", *(f"{name}_grad" for name in slopes.NAMES)}
#: Operations with no arguments but their operands.
ROWS: dict[str, Elementwise] = {
    name: _RECORDED[row.host](name)
    for name, row in TABLE.items()
    if row.host in _RECORDED and not row.attrs and name not in _PARTS
}
_equal = ROWS["eq"]
maximum, minimum, mul, tanh = ROWS["maximum"], ROWS["minimum"], ROWS["mul"], ROWS["tanh"]
abs, neg, trunc, sigmoid = ROWS["abs"], ROWS["neg"], ROWS["trunc"], ROWS["sigmoid"]


# -- dtypes --------------------------------------------------------------------------------------


def cast(x: Handle, dtype: torch.dtype) -> Handle:
    """Another dtype."""
    return record("cast", x, dtype=dtype)


def type_as(x: Handle, other: Handle) -> Handle:
    """The dtype of another value."""
    return as_dtype(x, other.dtype)


# -- arithmetic ----------------------------------------------------------------------------------


def add(x: Operand, other: Operand, *, alpha: Operand = 1) -> Handle:
    """x + alpha * other."""
    if all(map(_is_bool, (x, other))):
        alpha = bool(alpha)  # torch converts it so
    return _combined("add", x, other, alpha)


def _is_bool(x: Any) -> bool:
    return x.dtype == torch.bool if isinstance(x, Handle) else isinstance(x, bool)


def sub(x: Operand, other: Operand, *, alpha: Operand = 1) -> Handle:
    """x - alpha * other."""
    return _combined("sub", x, other, alpha)


def _combined(op: str, x: Any, other: Any, alpha: Any) -> Handle:
    """Combine x and alpha * other by one op; 16 bits are computed in f32, as in torch's kernel."""
    if not isinstance(alpha, Handle) and alpha == 1:
        return record(op, x, other)
    tensors = [y for y in (x, other) if isinstance(y, Handle) and y.is_tensor]
    check_factor(f"{op} with alpha", alpha, tensors[0] if tensors else None)
    if _are_rounded(tensors):
        x, other = (in_f32(y) if isinstance(y, Handle) else y for y in (x, other))
        return _as_promoted(record(op, x, mul(other, alpha)), tensors)
    return record(op, x, mul(_raised(other, x), alpha))


def _are_rounded(tensors: Sequence[Handle]) -> bool:
    """Return whether all are floats, and some have 16 bits."""
    return any(map(is_narrow, tensors)) and all(x.dtype.is_floating_point for x in tensors)


def _as_promoted(y: Handle, tensors: Sequence[Handle]) -> Handle:
    """Return a result in the dtype to which torch promotes floats with dims."""
    deciding = [x.dtype for x in tensors if x.ndim] or [x.dtype for x in tensors]
    return as_dtype(y, functools.reduce(torch.promote_types, deciding))


def _raised(other: Any, x: Any) -> Any:
    """Return the second operand in the first's dtype, if that is the result's dtype."""
    both = isinstance(x, Handle) and isinstance(other, Handle) and x.is_tensor and other.is_tensor
    if not both or x.dtype == other.dtype or (is_inexact(other) and other.ndim and not x.ndim):
        return other
    is_lower = torch.promote_types(x.dtype, other.dtype) == x.dtype
    return cast(other, x.dtype) if is_lower else other


def rsub(x: Operand, other: Operand, *, alpha: Operand = 1) -> Handle:
    """other - alpha * x."""
    return sub(other, x, alpha=alpha)


def div(x: Operand, other: Operand, *, rounding_mode: str | None = None) -> Handle:
    """x / other; `rounding_mode` "floor" rounds down, "trunc" towards zero."""
    if rounding_mode not in (None, "floor", "trunc"):
        raise DefinitionError(
            f"rounding_mode={rounding_mode!r}",
            because="quotients are rounded down, or towards zero, or not",
            hint='"floor", "trunc" or None',
        )
    if rounding_mode == "floor":
        return record("floor_divide", x, other)
    if rounding_mode is None:
        return record("div", x, other)
    if not (_is_whole(x) and _is_whole(other)):
        return trunc(record("div", x, other))
    # Integer division, because a float quotient may not hold large integers.
    return record("floor_divide", record("sub", x, record("fmod", x, other)), other)


def _is_whole(x: Any) -> bool:
    if isinstance(x, Handle):
        return not is_inexact(x)
    return isinstance(x, int | Extent)


def lerp(x: Handle, end: Handle, weight: Operand) -> Handle:
    """x + weight * (end - x), which is the end for a weight of 1."""
    return record("lerp", x, end, weight)


def addcmul(x: Handle, tensor1: Handle, tensor2: Handle, *, value: Operand = 1) -> Handle:
    """x + value * tensor1 * tensor2; of integers, with the integer towards zero of the value."""
    if not any(map(is_inexact, (x, tensor1, tensor2))) and not isinstance(value, Handle):
        value = _towards_zero("addcmul", x, value)
    return _with_value("addcmul", x, tensor1, tensor2, value)


def _with_value(name: str, x: Handle, tensor1: Handle, tensor2: Handle, value: Any) -> Handle:
    """Record one op with a number; a tensor without dims becomes a factor of the first tensor."""
    if not isinstance(value, Handle) or not value.is_tensor:
        return record(name, x, tensor1, tensor2, value)
    of = (x, tensor1, tensor2)
    if not _are_rounded(of):
        return record(name, x, tensor1 * value, tensor2, 1)
    x, tensor1, tensor2 = map(in_f32, of)
    return _as_promoted(record(name, x, tensor1 * value, tensor2, 1), of)


def _towards_zero(name: str, x: Handle, number: float) -> int:
    """Return a number as torch takes it for integers.

    Raises:
        DefinitionError: it is not finite.
    """
    if math.isfinite(number):
        return int(number)
    raise DefinitionError(
        f"{name} of {shown(x)} with the number {number}",
        because=f"numbers that go with {x.dtype} are of that dtype",
        hint="a number that is finite, or x.to(torch.float32)",
    )


def addcdiv(x: Handle, tensor1: Handle, tensor2: Handle, *, value: Operand = 1) -> Handle:
    """x + value * tensor1 / tensor2."""
    return _with_value("addcdiv", x, tensor1, tensor2, value)


def frac(x: Handle) -> Handle:
    """The part that follows the point: x - trunc(x)."""
    return x - trunc(x)


# -- choices and limits --------------------------------------------------------------------------


def where(condition: Handle, x: Operand, other: Operand) -> Handle:
    """x where the condition holds, else other."""
    return record("where", condition, x, other)


def masked_fill(x: Handle, mask: Handle, value: Operand) -> Handle:
    """x, with a number (or a value without dims) where the mask holds."""
    is_fraction = isinstance(value, float) and not value.is_integer()
    if is_fraction and not is_inexact(x):
        raise DefinitionError(
            f"masked_fill(%{x.name}, …, {value}) of {x.value.type_text()}",
            because=f"{x.dtype} has no such number",
            hint="cast x first, or pass an integer",
        )
    check_factor("masked_fill", value, x)
    filled = where(mask, value, x)
    return filled if filled.dtype == x.dtype else cast(filled, x.dtype)


def clamp(
    x: Handle, min: Handle | float | None = None, max: Handle | float | None = None
) -> Handle:
    """Values limited to [min, max]; the limits are numbers or values."""
    if isinstance(min, Handle) or isinstance(max, Handle):
        return record("limit", x, min, max)
    if any(isinstance(limit, float) and math.isnan(limit) for limit in (min, max)):
        min = max = math.nan  # torch 2.11 ignores a single one
    return record("clamp", x, min=min, max=max)


def clamp_min(x: Handle, min: Handle | float | None) -> Handle:
    """At least min."""
    return clamp(x, min)


def clamp_max(x: Handle, max: Handle | float | None) -> Handle:
    """At most max."""
    return clamp(x, None, max)


def nan_to_num(
    x: Handle, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Handle:
    """Numbers in the place of NaN and infinities, by default 0 and the largest of the dtype."""
    if x.dtype.is_complex:
        halves = (record(name, x) for name in ("real", "imag"))
        return record("complex", *(nan_to_num(half, nan, posinf, neginf) for half in halves))
    if not x.dtype.is_floating_point:
        return record("set", x)
    limits = torch.finfo(x.dtype)
    high = limits.max if posinf is None else posinf
    low = limits.min if neginf is None else neginf
    wide = torch.tensor([nan, high, low], dtype=torch.float64)
    nan, high, low = wide.to(x.dtype).tolist()  # infinite where it is too large
    filled = where(ROWS["isnan"](x), nan, x)
    filled = where(_equal(x, math.inf), high, filled)
    return where(_equal(x, -math.inf), low, filled)


# -- activations ---------------------------------------------------------------------------------


def gelu(x: Handle, approximate: str = "none") -> Handle:
    """Gaussian error linear unit; `approximate` "none" or "tanh"."""
    return record("gelu", x, approximate=approximate)


def leaky_relu(x: Handle, negative_slope: float = 0.01) -> Handle:
    """x where positive, else a fraction of it."""
    return record("leaky_relu", x, negative_slope=negative_slope)


def elu(x: Handle, alpha: float = 1.0) -> Handle:
    """x where positive, else alpha * (exp(x) - 1)."""
    return record("elu", x, **({} if alpha == 1.0 else {"alpha": alpha}))


def softplus(x: Handle, beta: float = 1.0, threshold: float = 20.0) -> Handle:
    """log(1 + exp(beta * x)) / beta; x itself where beta * x is above the threshold."""
    said = {"beta": (beta, 1.0), "threshold": (threshold, 20.0)}
    return record("softplus", x, **{name: n for name, (n, usual) in said.items() if n != usual})


def logsigmoid(x: Handle) -> Handle:
    """log(sigmoid(x)), without overflow."""
    return neg(softplus(neg(x)))


def selu(x: Handle) -> Handle:
    """A scaled elu (Klambauer et al. 2017, arXiv:1706.02515, for the constants)."""
    return record("elu", x, alpha=1.6732632423543772, scale=1.0507009873554805)


def hardtanh(x: Handle, min_val: float = -1.0, max_val: float = 1.0) -> Handle:
    """x limited to [min_val, max_val]; of integers, to the integers towards zero."""
    if not x.dtype.is_floating_point:
        return clamp(x, *(_towards_zero("hardtanh", x, limit) for limit in (min_val, max_val)))
    if any(math.isnan(limit) for limit in (min_val, max_val)):
        return clamp(x, min_val, max_val)
    return record("hardtanh", x, min=min_val, max=max_val)


def relu6(x: Handle) -> Handle:
    """x limited to [0, 6]."""
    return hardtanh(x, 0, 6) if x.dtype.is_floating_point else clamp(x, 0, 6)


def softsign(x: Handle) -> Handle:
    """x / (1 + abs(x))."""
    return x / (abs(x) + 1)
