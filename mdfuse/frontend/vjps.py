"""Rules of gradients: what the cotangent of an op's result adds to the cotangents of its operands.

A rule is made of operations, so it has layouts, and rules of its own. It takes the expression as
`Applied` and the cotangent of its result, and returns one value per operand, or None. Its caller
sums over broadcast dims and casts to the operand's dtype, and leaves out what nobody wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, indexing, parts, reductions, views
from mdfuse.frontend.ops.recording import record
from mdfuse.ir.dims import reduced_dims


class Applied(Protocol):
    """An expression, as a rule sees it."""

    @property
    def attrs(self) -> Mapping[str, Any]:
        """The attributes of the op."""

    @property
    def count(self) -> int:
        """How many operands there are."""

    @property
    def y(self) -> Handle:
        """The result."""

    def __getitem__(self, position: int) -> Any:
        """An operand: a value, a number, or None."""

    def wants(self, position: int) -> bool:
        """Whether the cotangent of an operand is asked for."""

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an operand, which is not computed again for that."""

    def returned(self, ct: Handle) -> Handle:
        """A cotangent, through the change of layout that the expression is back to its operand."""


#: (expression, cotangent of the result) -> cotangents of the operands.
Rule = Callable[[Applied, Handle], Sequence[Handle | None]]

RULES: dict[str, Rule] = {}

#: Ops through which no gradient goes, with the reason.
NO_GRADIENT: dict[str, str] = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "its result is a bool"),
    **dict.fromkeys(("isfinite", "isinf", "isnan", "any", "all"), "its result is a bool"),
    **dict.fromkeys((f"logical_{op}" for op in ("and", "or", "xor", "not")), "on bools"),
    **dict.fromkeys((f"bitwise_{op}" for op in ("and", "or", "xor", "not")), "on integers"),
    **dict.fromkeys(("floor", "ceil", "round", "trunc", "sign", "floor_divide"), "it is a step"),
    **dict.fromkeys(("uniform", "full", "full_like", "arange", "constant"), "it reads no tensor"),
    "detach": "it is there for that",
    "window": "lowering makes it of a slice",
}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _op(name: str) -> Callable[..., Handle]:
    return lambda *operands: record(name, *operands)


_eq, _gt, _ge, _le = map(_op, ("eq", "gt", "ge", "le"))
_exp, _log, _cos, _sin, _cosh, _sinh, _sign = map(
    _op, ("exp", "log", "cos", "sin", "cosh", "sinh", "sign")
)
_square, _rsqrt, _sqrt, _sigmoid, _floor_divide, _trunc, _where, _and = map(
    _op, ("square", "rsqrt", "sqrt", "sigmoid", "floor_divide", "trunc", "where", "logical_and")
)


# -- views ---------------------------------------------------------------------------------------


@_rule("set", "stride_order")
def _set(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (e.returned(ct),)


@_rule("permute")
def _permute(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dims = [d % ct.ndim for d in e.attrs["dims"]]
    return (views.permute(ct, [dims.index(d) for d in range(ct.ndim)]) if dims else ct,)


@_rule("reshape", "unsqueeze", "squeeze")
def _reshape(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (record("reshape", ct, shape=e.shape(0)),)


@_rule("expand")
def _expand(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (ct,)  # summed by the caller


@_rule("slice")
def _slice(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Put the cotangent into zeros, dim by dim: apart by the step first, then at the start."""
    shape = e.shape(0)
    for d, (start, step) in enumerate(zip(e.attrs["starts"], e.attrs["steps"], strict=True)):
        if step != 1:
            apart = views.unsqueeze(ct, d + 1)
            apart = _padded(apart, d + 1, 0, step - 1)
            ct = views.flatten(apart, d, d + 1)
            rest = shape[d] - start
            ct = _padded(ct, d, 0, rest - ct.shape[d]) if ct.shape[d] < rest else ct
            ct = parts.narrow(ct, d, 0, rest) if ct.shape[d] > rest else ct
        ct = _padded(ct, d, start, shape[d] - start - ct.shape[d])
    return (ct,)


def _padded(x: Handle, dim: int, before: int, behind: int) -> Handle:
    """Join zeros to both ends of a dim."""

    def zeros(n: int) -> list[Handle]:
        shape = (*x.shape[:dim], n, *x.shape[dim + 1 :])
        return [creations.full(shape, 0, dtype=x.dtype)] if n != 0 else []

    pieces = [*zeros(before), x, *zeros(behind)]
    return parts.cat(pieces, dim) if len(pieces) > 1 else x


@_rule("cat")
def _cat(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    dim, found, start = e.attrs["dim"] % ct.ndim, [], 0
    for i in range(e.count):
        end = start + e.shape(i)[dim]
        where = (*[slice(None)] * dim, slice(start, end))
        found.append(indexing.index(ct, where) if e.wants(i) else None)
        start = end
    return found


# -- pointwise: two operands ---------------------------------------------------------------------


def _binary(
    name: str,
    first: Callable[[Applied, Handle], Handle],
    second: Callable[[Applied, Handle], Handle],
) -> None:
    """Add the rule of an op of two operands: what each of them gets."""

    def rule(e: Applied, ct: Handle) -> Sequence[Handle | None]:
        return first(e, ct) if e.wants(0) else None, second(e, ct) if e.wants(1) else None

    RULES[name] = rule


_binary("add", lambda e, ct: ct, lambda e, ct: ct)
_binary("sub", lambda e, ct: ct, lambda e, ct: -ct)
_binary("mul", lambda e, ct: ct * e[1], lambda e, ct: ct * e[0])
_binary("div", lambda e, ct: ct / e[1], lambda e, ct: -ct * (e[0] / e[1] / e[1]))
_binary("remainder", lambda e, ct: ct, lambda e, ct: -ct * _floor_divide(e[0], e[1]))
_binary("fmod", lambda e, ct: ct, lambda e, ct: -ct * _trunc(e[0] / e[1]))
_binary(
    "atan2",
    lambda e, ct: ct * (e[1] / (e[0] * e[0] + e[1] * e[1])),
    lambda e, ct: ct * (-e[0] / (e[0] * e[0] + e[1] * e[1])),
)


def _base_of_power(e: Applied, ct: Handle) -> Handle:
    """n * x ** (n - 1), but 0 for n = 0, where x ** -1 would be infinite at 0."""
    x, n = e[0], e[1]
    if isinstance(n, Handle):
        return _where(_eq(n, 0), 0.0, ct * (n * x ** (n - 1)))
    if n == 0:
        return creations.zeros_like(ct)
    return ct * (x if n == 2 else x ** (n - 1)) * n


def _exponent_of_power(e: Applied, ct: Handle) -> Handle:
    """y * log(x), but 0 where 0 to a power is 0 or 1."""
    x, n = e[0], e[1]
    if not isinstance(x, Handle):
        if x != 0:
            log = math.log(x) if x > 0 else math.nan
            return ct * (e.y * log)
        return _where(_ge(n, 0), 0.0, ct * (e.y * -math.inf))
    hidden = _and(_eq(x, 0), _ge(n, 0))
    return _where(hidden, 0.0, ct * (e.y * _log(x)))


_binary("pow", _base_of_power, _exponent_of_power)


def _extreme_of_two(is_chosen: Callable[..., Handle]) -> Rule:
    """Half to each where they are equal."""

    def rule(e: Applied, ct: Handle) -> Sequence[Handle | None]:
        half = ct / 2

        def share(mine: Any, other: Any) -> Handle:
            return _where(_eq(mine, other), half, _where(is_chosen(mine, other), ct, 0.0))

        return (
            share(e[0], e[1]) if e.wants(0) else None,
            share(e[1], e[0]) if e.wants(1) else None,
        )

    return rule


RULES["maximum"] = _extreme_of_two(_gt)
RULES["minimum"] = _extreme_of_two(_op("lt"))


@_rule("where")
def _choice(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Select: what is hidden may be infinite, and 0 times infinity is NaN."""
    return (
        None,
        _where(e[0], ct, 0.0) if e.wants(1) else None,
        _where(e[0], 0.0, ct) if e.wants(2) else None,
    )


# -- pointwise: one operand ----------------------------------------------------------------------


def _gelu(e: Applied, ct: Handle) -> Handle:
    """Phi(x) + x * phi(x), or the derivative of its approximation by tanh."""
    x = e[0]
    if e.attrs.get("approximate", "none") == "none":
        cdf = (record("erf", x * math.sqrt(0.5)) + 1.0) * 0.5
        return ct * (cdf + x * _exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi)))
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
    t = record("tanh", (x + x * x * x * cubic) * scale)
    inner = (x * x * (3.0 * cubic) + 1.0) * scale
    return ct * ((t + 1.0) * 0.5 + x * (1.0 - t * t) * inner * 0.5)


def _silu(e: Applied, ct: Handle) -> Handle:
    x, s = e[0], _sigmoid(e[0])
    return ct * (s * (x * (1.0 - s) + 1.0))


def _softplus(e: Applied, ct: Handle) -> Handle:
    beta, threshold = e.attrs.get("beta", 1.0), e.attrs.get("threshold", 20.0)
    scaled = e[0] if beta == 1.0 else e[0] * beta
    return _where(_gt(scaled, threshold), ct, ct * _sigmoid(scaled))


def _clamp(e: Applied, ct: Handle) -> Handle:
    least, most = e.attrs.get("min"), e.attrs.get("max")
    limits = [x for x in (least, most) if x is not None]
    if any(isinstance(x, float) and math.isnan(x) for x in limits):
        return creations.zeros_like(ct)
    if least is not None:
        ct = _where(_ge(e[0], least), ct, 0.0)
    return ct if most is None else _where(_le(e[0], most), ct, 0.0)


def _cast(e: Applied, ct: Handle) -> Handle:
    return ct  # cast by the caller


def _dropout(e: Applied, ct: Handle) -> Handle:
    """The same numbers of the same stream are drawn for the cotangent."""
    return record("dropout", ct, e[1], p=e.attrs["p"], stream=e.attrs["stream"])


_LN2, _LN10 = math.log(2.0), math.log(10.0)
_UNARY: dict[str, Callable[[Applied, Handle], Handle]] = {
    "neg": lambda e, ct: -ct,
    "abs": lambda e, ct: ct * _sign(e[0]),
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
    "sin": lambda e, ct: ct * _cos(e[0]),
    "cos": lambda e, ct: -ct * _sin(e[0]),
    "tan": lambda e, ct: ct * (e.y * e.y + 1.0),
    "asin": lambda e, ct: ct * _rsqrt(1.0 - e[0] * e[0]),
    "acos": lambda e, ct: -ct * _rsqrt(1.0 - e[0] * e[0]),
    "atan": lambda e, ct: ct / (e[0] * e[0] + 1.0),
    "sinh": lambda e, ct: ct * _cosh(e[0]),
    "cosh": lambda e, ct: ct * _sinh(e[0]),
    "tanh": lambda e, ct: ct * (1.0 - e.y * e.y),
    "asinh": lambda e, ct: ct * _rsqrt(e[0] * e[0] + 1.0),
    "acosh": lambda e, ct: ct * _rsqrt(e[0] * e[0] - 1.0),
    "atanh": lambda e, ct: ct / (1.0 - e[0] * e[0]),
    "erf": lambda e, ct: ct * (_exp(-(e[0] * e[0])) * (2.0 / math.sqrt(math.pi))),
    "erfc": lambda e, ct: ct * (_exp(-(e[0] * e[0])) * (-2.0 / math.sqrt(math.pi))),
    "sigmoid": lambda e, ct: ct * ((1.0 - e.y) * e.y),
    "relu": lambda e, ct: _where(_gt(e.y, 0), ct, 0.0),
    "silu": _silu,
    "elu": lambda e, ct: _where(_gt(e[0], 0), ct, ct * (e.y + e.attrs.get("alpha", 1.0))),
    "softplus": _softplus,
    "leaky_relu": lambda e, ct: _where(_gt(e[0], 0), ct, ct * e.attrs["negative_slope"]),
    "gelu": _gelu,
    "clamp": _clamp,
    "cast": _cast,
    "dropout": _dropout,
}


def _of_one(formula: Callable[[Applied, Handle], Handle]) -> Rule:
    return lambda e, ct: (formula(e, ct), *(None,) * (e.count - 1))


RULES.update({name: _of_one(formula) for name, formula in _UNARY.items()})


# -- reductions ----------------------------------------------------------------------------------


def _kept(e: Applied, reduced: Handle) -> Handle:
    """A result of the reduction with its dims kept, so that it broadcasts against the operand."""
    shape = e.shape(0)
    dims = reduced_dims(e.attrs.get("dims"), len(shape))
    if e.attrs.get("keepdim") or not dims:
        return reduced
    return record("unsqueeze", reduced, dims=dims)


def _count(e: Applied) -> int:
    """How many elements make one of the result."""
    shape = e.shape(0)
    return math.prod(shape[d] for d in reduced_dims(e.attrs.get("dims"), len(shape)))


def _repeated(e: Applied, ct: Handle) -> Handle:
    shape = e.shape(0)
    return views.expand(_kept(e, ct), shape) if shape else ct


@_rule("sum")
def _sum(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (_repeated(e, ct),)


@_rule("mean")
def _mean(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    count = _count(e)
    return (_repeated(e, ct / count if isinstance(count, Extent) or count else ct * math.inf),)


@_rule("prod")
def _prod(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """The product of the others: what is not zero, where at most one is."""
    x, over = e[0], reduced_dims(e.attrs.get("dims"), len(e.shape(0)))
    x = x if x.dtype == ct.dtype else record("cast", x, dtype=ct.dtype)
    if not over:
        return (ct,)
    is_zero = _eq(x, 0)
    rest = _where(is_zero, 1.0, x)
    product = reductions.prod(rest, over, True)
    zeros = reductions.sum(record("cast", is_zero, dtype=ct.dtype), over, True)
    alone = _and(is_zero, _eq(zeros, 1))
    others = _where(_eq(zeros, 0), product / rest, _where(alone, product, 0.0))
    return (_kept(e, ct) * others,)


@_rule("max", "min")
def _extreme(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Evenly among equals."""
    over = reduced_dims(e.attrs.get("dims"), len(e.shape(0)))
    if not over:
        return (ct,)
    is_there = _eq(e[0], _kept(e, e.y))
    equals = reductions.sum(record("cast", is_there, dtype=ct.dtype), over, True)
    return (_where(is_there, _kept(e, ct) / equals, 0.0),)


# -- contractions --------------------------------------------------------------------------------


def _rows(x: Handle) -> Handle:
    """All dims but the last as one."""
    return x if x.ndim == 2 else views.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@_rule("matmul")
def _matmul(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    a, b = len(e.shape(0)), len(e.shape(1))
    if a == b == 1:
        return ct * e[1] if e.wants(0) else None, ct * e[0] if e.wants(1) else None
    if a == 1:
        ct = views.unsqueeze(ct, -2)
    elif b == 1:
        ct = views.unsqueeze(ct, -1)
    return (
        _left_factor(e, ct, a, b) if e.wants(0) else None,
        _right_factor(e, ct, a, b) if e.wants(1) else None,
    )


def _left_factor(e: Applied, ct: Handle, a: int, b: int) -> Handle:
    """ct[…,m,n] @ b[…,k,n]; a vector has one row."""
    if b == 1:
        return ct * e[1]
    x = record("matmul", ct, views.transpose(e[1]))
    return record("squeeze", x, dims=(x.ndim - 2,)) if a == 1 else x


def _right_factor(e: Applied, ct: Handle, a: int, b: int) -> Handle:
    """a[…,k,m] @ ct[…,m,n]; one matrix for a whole batch is one product of all rows."""
    if a == 1:
        return views.unsqueeze(e[0], -1) * ct
    if b == 1:
        return reductions.sum(e[0] * ct, tuple(range(a - 1)))
    if b == 2:
        return record("matmul", views.transpose(_rows(e[0])), _rows(ct))
    return record("matmul", views.transpose(e[0]), ct)


@_rule("linear")
def _linear(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """x[…,k], w[n,k], b[n]; or w[k] and a result without its dim."""
    is_vector = len(e.shape(1)) == 1
    if is_vector:
        ct = views.unsqueeze(ct, -1)
    if is_vector or ct.ndim == 1:  # an outer product, or one row
        x = ct * e[1] if is_vector else record("matmul", ct, e[1])
        w = reductions.sum(e[0] * ct, tuple(range(ct.ndim - 1))) if is_vector else None
        w = views.unsqueeze(ct, -1) * e[0] if w is None else w
    else:
        x = record("matmul", ct, e[1]) if e.wants(0) else None
        w = record("matmul", views.transpose(_rows(ct)), _rows(e[0])) if e.wants(1) else None
    if e.count < 3 or not e.wants(2):
        return (x, w, None)[: e.count]
    over = tuple(range(ct.ndim - 1))
    bias = reductions.sum(ct, over) if over else ct
    return x, w, record("squeeze", bias, dims=(0,)) if is_vector else bias


@_rule("embedding")
def _embedding(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Each row of the table gets the sum of those that were looked up there."""
    rows, _ = e.shape(1)
    places = views.reshape(e[0], (1, math.prod(e.shape(0))))
    is_there = _eq(views.unsqueeze(creations.arange(rows), 1), places)
    flat = views.reshape(ct, (math.prod(e.shape(0)), ct.shape[-1]))
    return None, record("matmul", record("cast", is_there, dtype=ct.dtype), flat)


# -- composite ops -------------------------------------------------------------------------------


@_rule("softmax")
def _softmax(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (_through_softmax(e.y, ct, e.attrs["dim"]),)


def _through_softmax(y: Handle, ct: Handle, dim: int) -> Handle:
    weighed = ct * y
    return weighed - y * reductions.sum(weighed, dim if y.ndim else (), True)


@_rule("log_softmax")
def _log_softmax(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    total = reductions.sum(ct, e.attrs["dim"] if ct.ndim else (), True)
    return (ct - _exp(e.y) * total,)


@_rule("layer_norm")
def _layer_norm(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Ba, Kiros, Hinton 2016, with y = normal * weight + bias."""
    x, weight = e[0], e[1]
    wide = record("cast", x, dtype=torch.float32) if x.dtype.itemsize < 4 else x
    ct = record("cast", ct, dtype=wide.dtype) if ct.dtype != wide.dtype else ct
    over = tuple(range(x.ndim - len(e.attrs["normalized_shape"]), x.ndim))
    distance = wide - reductions.mean(wide, over, True)
    variance = reductions.mean(distance * distance, over, True)
    scale = _rsqrt(variance + e.attrs["eps"])
    normal = distance * scale
    inner = ct if weight is None else ct * weight
    found: list[Handle | None] = [None, None, None]
    if e.wants(0):
        lost = reductions.mean(inner, over, True)
        turned = normal * reductions.mean(inner * normal, over, True)
        found[0] = (inner - lost - turned) * scale
    if e.wants(1):
        found[1] = ct * normal
    if e.wants(2):
        found[2] = ct
    return found


@_rule("scaled_dot_product_attention")
def _attention(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """By the weights, which are computed again: softmax(q k^T * scale + mask)."""
    q, k, v = e[0], e[1], e[2]
    mask = e[3] if e.count > 3 else None
    scale = e.attrs.get("scale")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = record("matmul", q, views.transpose(k)) * scale
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = _where(mask, scores, -math.inf) if is_bool else scores + mask
    if e.attrs.get("is_causal"):
        rows, columns = creations.arange(q.shape[-2]), creations.arange(k.shape[-2])
        seen = _ge(views.unsqueeze(rows, 1), columns)
        scores = _where(seen, scores, -math.inf)
    weights = record("softmax", scores, dim=-1)
    d_weights = record("matmul", ct, views.transpose(v))
    d_scores = _through_softmax(weights, d_weights, -1)
    found: list[Handle | None] = [None] * e.count
    if e.wants(0):
        found[0] = record("matmul", d_scores, k) * scale
    if e.wants(1):
        found[1] = record("matmul", views.transpose(d_scores), q) * scale
    if e.wants(2):
        found[2] = record("matmul", views.transpose(weights), ct)
    if e.count > 3 and e.wants(3):
        found[3] = d_scores
    return found
