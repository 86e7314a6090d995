"""Pointwise ops; pairs of real numbers as complex ones."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from mdfuse.ir import calls, dims, out_forms, shapes, slopes
from mdfuse.ir.attributes import Attr, attr, word
from mdfuse.ir.op_table import TABLE, row
from mdfuse.ir.out_forms import ANYHOW, DENSE, Writes, exact, on_tensors, rounded


def _binary(name: str, call: Callable[..., Any], writes: Writes, **fields: Any) -> None:
    """Add the row of a pointwise op with two operands."""
    fields |= {"host": "binary", "operands": (2, 2)}
    row(name, call, dims.pointwise, shapes.broadcast, writes, **fields)


_binary("add", operator.add, exact(torch.add), partial="sum")
_binary("sub", operator.sub, exact(torch.sub), partial="sum")
_binary("mul", operator.mul, exact(torch.mul), partial="factor")
_binary("div", operator.truediv, exact(torch.div), partial="quotient")
_binary("floor_divide", operator.floordiv, rounded(torch.floor_divide))
_binary("remainder", operator.mod, rounded(torch.remainder))
_binary("pow", operator.pow, rounded(torch.pow))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _binary(_name, getattr(operator, _name), exact(getattr(torch, _name)))
for _name, _symbol in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
    _binary(f"bitwise_{_name}", _symbol, exact(getattr(torch, f"bitwise_{_name}")))
for _name in ("maximum", "minimum", "logical_and", "logical_or", "logical_xor"):
    _call = on_tensors(getattr(torch, _name))
    _binary(_name, _call, exact(_call))
for _name in (
    "bitwise_left_shift", "bitwise_right_shift", "fmax", "fmin", "copysign", "heaviside",
    "nextafter",
):  # fmt: skip
    _call = on_tensors(getattr(torch, _name))
    _binary(_name, _call, exact(_call))
for _name in ("fmod", "atan2", "hypot", "logaddexp", "xlogy"):
    _call = on_tensors(getattr(torch, _name))
    _binary(_name, _call, rounded(_call))


def _unary(
    name: str, call: Callable[..., Any], writes: Writes, *attrs: Attr, **fields: Any
) -> None:
    """Add the row of a pointwise op with one operand."""
    fields |= {"host": "unary", "attrs": attrs}
    row(name, call, dims.pointwise, shapes.first, writes, **fields)


for _name in (
    "abs", "bitwise_not", "ceil", "floor", "logical_not", "reciprocal", "round", "sign", "sqrt",
    "sgn", "square", "trunc",
):  # fmt: skip
    _unary(_name, getattr(torch, _name), exact(getattr(torch, _name)))
for _name in (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "i0", "lgamma", "log", "log10", "log1p", "log2", "rsqrt",
    "sigmoid", "sin", "sinc", "sinh", "tan", "tanh",
):  # fmt: skip
    _unary(_name, getattr(torch, _name), rounded(getattr(torch, _name)))
for _name in ("isfinite", "isinf", "isnan", "signbit"):
    _unary(_name, getattr(torch, _name), DENSE)
_unary("i1", torch.special.i1, rounded(torch.special.i1))
_unary("polygamma", calls.polygamma, rounded(calls.polygamma), attr("n", "extent", True))
_unary("neg", torch.neg, exact(torch.neg), partial="scale")

_F, _on = torch.nn.functional, out_forms.activation
_BEND = (attr("beta", "number"), attr("threshold", "number"))
_SLOPE, _FORM = attr("negative_slope", "number"), word("approximate", "none", "tanh")
_unary("relu", _F.relu, DENSE)  # torch's `out=` form of relu computes and copies
_unary("silu", _F.silu, rounded(_on("silu")))
_ELU = tuple(attr(name, "number") for name in ("alpha", "scale", "input_scale"))
_unary("elu", calls.elu, rounded(_on("elu")), *_ELU)
_unary("logit", torch.logit, rounded(torch.logit), attr("eps", "number"))
_unary("softplus", _F.softplus, rounded(_on("softplus")), *_BEND)
_unary("leaky_relu", _F.leaky_relu, rounded(_on("leaky_relu")), _SLOPE)
_unary("gelu", _F.gelu, rounded(_on("gelu")), _FORM)
for _name in ("hardsigmoid", "hardswish", "mish"):
    _unary(_name, getattr(_F, _name), rounded(_on(_name)))
_unary("hardshrink", _F.hardshrink, exact(_on("hardshrink")), attr("lambd", "number"))
_unary("softshrink", _F.softshrink, rounded(_on("softshrink")), attr("lambd", "number"))
for _name in ("clamp", "hardtanh"):  # whose gradients differ at the limits
    _limits = (attr("min", "number"), attr("max", "number"))
    _unary(_name, torch.clamp, exact(torch.clamp), *_limits)
_unary("cast", calls.cast, exact(calls.cast), attr("dtype", "dtype", True))
for _name in slopes.NAMES:  # linear in the cotangent, which comes first
    _call, _write = slopes.slope(_name)
    _is_exact = _name in ("relu", "leaky_relu", "hardtanh")
    _writes = DENSE if _write is None else exact(_write) if _is_exact else rounded(_write)
    _how: dict[str, Any] = {"host": "binary", "operands": (2, 2), "attrs": TABLE[_name].attrs}
    _is_choice = _name in ("relu", "hardtanh", "hardshrink", "softshrink")
    _how["partial"] = "scale" if _is_choice else "factor"
    row(f"{_name}_grad", _call, dims.pointwise, shapes.alike, _writes, **_how)
_binary("squared_distance", calls.squared_distance, exact(calls.squared_distance))
_binary("binary_cross_entropy", on_tensors(calls.binary_cross_entropy), DENSE)
for _name, _unit in (("huber_loss", "delta"), ("smooth_l1_loss", "beta")):
    _call = on_tensors(calls.robust_loss(_name))
    _binary(_name, _call, rounded(_call), attrs=(attr(_unit, "number", True),))
_THREE: dict[str, Any] = {"host": "ternary", "operands": (3, 3)}
_FOUR: dict[str, Any] = {"host": "ternary", "operands": (4, 4)}  # with a number
for _call, _how in ((calls.lerp, _THREE), (calls.addcmul, _FOUR), (calls.addcdiv, _FOUR)):
    row(_call.__name__, _call, dims.pointwise, shapes.broadcast, rounded(_call), **_how)
row("limit", calls.limit, dims.pointwise, shapes.broadcast, exact(calls.limit), **_THREE)
# A cast of floats to wider ones, as lowering makes it: of a sum it is the sum of the casts.
_unary("widen", calls.cast, exact(calls.cast), attr("dtype", "dtype", True), partial="scale")
# Another such cast: each rank rounds its term, as it would have computed it in that dtype.
_unary("round_terms", calls.cast, exact(calls.cast), attr("dtype", "dtype", True), partial="scale")
row("where", lambda condition, a, b: torch.where(condition, a, b), dims.pointwise, shapes.broadcast,
    exact(out_forms.where), is_single=False, operands=(3, 3))  # fmt: skip
for _name, _call in (
    ("conj", lambda x: torch.conj_physical(x) if x.is_complex() else x.clone()),
    ("real", lambda x: torch.real(x).clone()),
    ("imag", lambda x: torch.imag(x).clone()),
    ("angle", torch.angle),
):
    _unary(_name, _call, ANYHOW)
_binary("complex", torch.complex, ANYHOW)
_binary("polar", torch.polar, ANYHOW)
row("view_as_complex", lambda x: torch.view_as_complex(x.contiguous()).clone(), dims.without_last,
    shapes.without_last, ANYHOW, is_single=False)  # fmt: skip
row("view_as_real", lambda x: torch.view_as_real(x).clone(), dims.with_last, shapes.with_last,
    ANYHOW, is_single=False)  # fmt: skip
