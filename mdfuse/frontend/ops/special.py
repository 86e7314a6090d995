"""Composed elementwise operations: angles, closeness, activations, quantisation."""

from __future__ import annotations

import math

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.pointwise import ROWS, cast, clamp, elu, tanh, where
from mdfuse.frontend.ops.recording import (
    again,
    check_dtype,
    check_factor,
    floating,
    is_inexact,
    real_only,
    record,
    shown,
)
from mdfuse.frontend.ops.views import reshape


def positive(x: Handle) -> Handle:
    """The value itself; not of bools."""
    if x.dtype == torch.bool:
        raise DefinitionError(
            f"positive of {shown(x)}", because="a bool has no sign", hint="the value itself"
        )
    return record("set", x)


def deg2rad(x: Handle) -> Handle:
    """Degrees as radians: x * pi / 180."""
    real_only("deg2rad", x)
    return floating(x) * (math.pi / 180.0)


def rad2deg(x: Handle) -> Handle:
    """Radians as degrees: x * 180 / pi."""
    real_only("rad2deg", x)
    return floating(x) * (180.0 / math.pi)


def logit(x: Handle, eps: float | None = None) -> Handle:
    """log(x / (1 - x)); with eps of x limited to [eps, 1 - eps]."""
    real_only("logit", x)
    return record("logit", floating(x), **({} if eps is None else {"eps": float(eps)}))


def isclose(
    x: Handle, other: Handle, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Handle:
    """True where abs(x - other) <= atol + rtol * abs(other)."""
    check_dtype(x, other, "isclose of {} and {}", "cast one: other.to({})")
    if rtol < 0 or atol < 0:
        raise DefinitionError(
            f"isclose with rtol={rtol} and atol={atol}",
            because="a distance is not negative",
            hint="numbers from 0 on",
        )
    is_equal = ROWS["eq"](x, other)
    if equal_nan and is_inexact(x):
        both = ROWS["logical_and"](ROWS["isnan"](x), ROWS["isnan"](other))
        is_equal = ROWS["logical_or"](is_equal, both)
    if x.dtype == torch.bool:
        x, other = cast(x, torch.int64), cast(other, torch.int64)
    other = floating(other)  # as torch: a difference may overflow integers
    distance = ROWS["abs"](x - other)
    is_near = ROWS["le"](distance, atol + ROWS["abs"](other * rtol))
    is_near = ROWS["logical_and"](ROWS["isfinite"](distance), is_near)
    return ROWS["logical_or"](is_equal, is_near)


# -- complex numbers ------------------------------------------------------------------------------


def conj(x: Handle) -> Handle:
    """The complex conjugate; of real numbers they themselves."""
    return record("conj", x) if x.dtype.is_complex else record("set", x)


def real(x: Handle) -> Handle:
    """The real part; of real numbers they themselves."""
    return record("real", x) if x.dtype.is_complex else record("set", x)


def view_as_complex(x: Handle) -> Handle:
    """Pairs along the last dim, of extent 2, as complex numbers."""
    if not x.ndim or x.shape[-1] != 2 or x.dtype not in _PARTS:
        raise DefinitionError(
            f"view_as_complex of {shown(x)}",
            because="the last dim holds the real and the imaginary parts",
            hint="x.reshape(…, 2) of float32, float64 or float16",
        )
    return record("view_as_complex", x)


_PARTS = (torch.float16, torch.float32, torch.float64)


def view_as_real(x: Handle) -> Handle:
    """Complex numbers as pairs along a new last dim."""
    if not x.dtype.is_complex:
        raise DefinitionError(
            f"view_as_real of {shown(x)}", because="it is real", hint="the value itself"
        )
    return record("view_as_real", x)


# -- activations ---------------------------------------------------------------------------------


def tanhshrink(x: Handle) -> Handle:
    """x - tanh(x)."""
    return x - tanh(x)


def celu(x: Handle, alpha: float = 1.0) -> Handle:
    """x where positive, else alpha * (exp(x / alpha) - 1)."""
    if alpha == 0:
        raise DefinitionError(
            f"celu of {shown(x)} with alpha=0",
            because="what is negative is divided by it",
            hint="relu, which celu comes close to",
        )
    return elu(x) if alpha == 1.0 else record("elu", x, alpha=alpha, input_scale=1.0 / alpha)


def prelu(x: Handle, weight: Handle) -> Handle:
    """x where positive, else x times a learned factor: one for all, or one for each place of dim 1.

    Args:
        x: a tensor.
        weight: [1], or [n] for n places along dim 1.
    """
    n = x.shape[1] if x.ndim > 1 else 1
    if weight is None or weight.ndim > 1 or (weight.ndim and weight.shape[0] not in (1, n)):
        raise DefinitionError(
            f"prelu of {shown(x)} with {shown(weight) if weight is not None else None}",
            because="there is one factor, or one for each place of dim 1",
            hint="a weight of one dim",
        )
    check_dtype(x, weight, "prelu of {} with {}", "weight.to({})")
    ones = (1,) * max(x.ndim - 2, 0)
    if weight.ndim:  # along dim 1 if it exists
        weight = reshape(weight, (*weight.shape, *ones) if x.ndim else ())
    with again(x):
        slope = where(ROWS["gt"](x, 0), 1.0, weight)
    return slope * x


def threshold(x: Handle, threshold: float, value: float) -> Handle:
    """x where it is above the threshold, else the value."""
    if not x.dtype.is_floating_point and any(isinstance(n, float) for n in (threshold, value)):
        raise DefinitionError(
            f"threshold of {shown(x)} with {threshold} and {value}",
            because=f"numbers that go with {x.dtype} are of that dtype",
            hint="integers, or x.to(torch.float32)",
        )
    check_factor("threshold", threshold, x, is_wide=True)
    check_factor("threshold", value, x)
    return where(ROWS["le"](x, threshold), value, x)


def hardshrink(x: Handle, lambd: float = 0.5) -> Handle:
    """x, but 0 within [-lambd, lambd]."""
    return record("hardshrink", x, lambd=lambd)


def softshrink(x: Handle, lambd: float = 0.5) -> Handle:
    """x moved towards 0 by lambd, and 0 within [-lambd, lambd]."""
    return record("softshrink", x, lambd=lambd)


# -- quantisation --------------------------------------------------------------------------------


def fake_quantize_per_tensor_affine(
    x: Handle, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> Handle:
    """x rounded to the numbers that integers from quant_min to quant_max stand for."""
    if x.dtype != torch.float32 or not quant_min <= zero_point <= quant_max or not scale > 0:
        raise DefinitionError(
            f"fake_quantize_per_tensor_affine of {shown(x)} with the scale {scale}, the zero point "
            f"{zero_point} and the range from {quant_min} to {quant_max}",
            because="x is float32, the scale is positive, the zero point is in the range",
            hint="cast it: x.to(torch.float32)",
        )
    steps = ROWS["round"](x * (1.0 / scale)) + zero_point
    quantized = (clamp(steps, quant_min, quant_max) - zero_point) * scale
    inside = ROWS["logical_and"](ROWS["ge"](steps, quant_min), ROWS["le"](steps, quant_max))
    return record("detach", quantized) + where(
        inside, x - record("detach", x), 0.0
    )  # a gradient goes straight through
