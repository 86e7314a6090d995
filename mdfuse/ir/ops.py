"""The op table: one row per op says what torch call runs it and how its dims correspond."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir import calls, creation, dims, random
from mdfuse.ir.attributes import Attr, attr, word
from mdfuse.ir.extremes import highest, lowest
from mdfuse.ir.local_attributes import (
    Localize,
    Part,
    global_count,
    local_draw,
    local_ends,
    local_places,
    local_rows,
    local_shape,
    local_squeeze,
    with_identity,
)
from mdfuse.ir.writes import on_tensors, write_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A row of the op table.

    Attributes:
        name: as in `fd.ops.<name>`.
        call: `call(*operands, **attrs)` on whole tensors or on a rank's parts.
        rule: the labels of its dims.
        host: the host instruction that runs it.
        out: `out(*operands, out=buffer, **attrs)`, where torch can write in place; the first
            operand is a tensor.
        localize: the attributes for one rank's part.
        partial: which Partial operands it may take as they are:
            "view" any, "all" all operands in one way, "sum" all operands Partial(sum), "scale" the
            first Partial(sum), "reduce" an operand with the op that it reduces by itself.
        is_view: the result may share storage with the first operand.
        is_single: runs as a single host op; others are merged into host units.
        indexed: the position of the operand whose rows the first operand names by their numbers.
        stays: the position of a matrix operand that keeps its split of the result's dims; the
            other operand moves (weights stay where they are).
        attrs: its attributes; there are no others.
        operands: how many it takes at least, and at most; None: any number.
        may_copy: a view that has to be a copy where the elements do not lie so.
    """

    name: str
    call: Callable[..., Any]
    rule: dims.Rule
    host: str
    out: Callable[..., Any] | None = None
    localize: Localize | None = None
    partial: str = ""
    is_view: bool = False
    is_single: bool = True
    indexed: int | None = None
    stays: int | None = None
    attrs: tuple[Attr, ...] = ()
    operands: tuple[int, int | None] = (1, 1)
    may_copy: bool = False

    @property
    def is_creation(self) -> bool:
        """It makes a tensor of numbers alone."""
        return self.rule is dims.creation


TABLE: dict[str, Op] = {}


def _row(name: str, call: Callable[..., Any], rule: dims.Rule, host: str, **more: Any) -> None:
    TABLE[name] = Op(name=name, call=call, rule=rule, host=host, out=write_of(name, call), **more)


def local_attrs(op: Op, attrs: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """The attributes of an op for one rank's part of it."""
    attrs = dict(attrs)
    return op.localize(attrs, part) if op.localize else attrs


# -- views ---------------------------------------------------------------------------------------


def itself(x: Any) -> Any:
    """What a set computes where the layout does not change."""
    return x


_VIEW: dict[str, Any] = {"is_view": True, "partial": "view"}
_row("set", itself, dims.pointwise, "set", **_VIEW)
_row(
    "stride_order",
    calls.in_order,
    dims.pointwise,
    "set",
    attrs=(attr("order", "permutation", True),),
    may_copy=True,
    **_VIEW,
)
_row(
    "permute",
    lambda x, *, dims: x.permute(dims),
    dims.permute,
    "permute",
    attrs=(attr("dims", "permutation", True),),
    **_VIEW,
)
_SHAPE = (attr("shape", "shape", True),)
_row(
    "reshape",
    lambda x, *, shape: x.reshape(shape),
    dims.reshape,
    "reshape",
    localize=local_shape,
    attrs=_SHAPE,
    may_copy=True,
    **_VIEW,
)
_row(
    "expand",
    lambda x, *, shape: x.expand(shape),
    dims.expand,
    "expand",
    localize=local_shape,
    attrs=_SHAPE,
    **_VIEW,
)
_NEW, _GONE = attr("dims", "dims", True, of="result"), attr("dims", "dims", True)
_WINDOW = (
    attr("starts", "places", True),
    attr("ends", "places", True),
    attr("steps", "steps", True),
)
_row("unsqueeze", calls.unsqueeze, dims.unsqueeze, "unsqueeze", attrs=(_NEW,), **_VIEW)
_row(
    "squeeze",
    calls.squeeze,
    dims.squeeze,
    "squeeze",
    localize=local_squeeze,
    attrs=(_GONE,),
    **_VIEW,
)
_row("slice", calls.window, dims.window, "slice", localize=local_ends, attrs=_WINDOW, **_VIEW)


# -- pointwise -----------------------------------------------------------------------------------


def _binary(name: str, call: Callable[..., Any], **more: Any) -> None:
    _row(name, call, dims.pointwise, "binary", operands=(2, 2), **more)


_binary("add", operator.add, partial="sum")
_binary("sub", operator.sub, partial="sum")
_binary("mul", operator.mul, partial="scale")
_binary("div", operator.truediv, partial="scale")
_binary("floor_divide", operator.floordiv)
_binary("remainder", operator.mod)
_binary("pow", operator.pow)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _binary(_name, getattr(operator, _name))
for _name, _symbol in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
    _binary(f"bitwise_{_name}", _symbol)
for _name in ("maximum", "minimum", "fmod", "atan2", "logical_and", "logical_or", "logical_xor"):
    _binary(_name, on_tensors(getattr(torch, _name)))

UNARY = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "cos",
    "cosh", "erf", "erfc", "exp", "exp2", "expm1", "floor", "isfinite", "isinf", "isnan", "log",
    "log10", "log1p", "log2", "logical_not", "neg", "reciprocal", "round", "rsqrt", "sigmoid",
    "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc",
]  # fmt: skip
for _name in UNARY:
    _linear = {"partial": "scale"} if _name == "neg" else {}
    _row(_name, getattr(torch, _name), dims.pointwise, "unary", **_linear)

_F = torch.nn.functional
_row("relu", _F.relu, dims.pointwise, "unary")
_row("silu", _F.silu, dims.pointwise, "unary")
_SLOPE, _FORM = attr("negative_slope", "number"), word("approximate", "none", "tanh")
_BEND = (attr("beta", "number"), attr("threshold", "number"))
_LIMITS = (attr("min", "number"), attr("max", "number"))
_row("elu", _F.elu, dims.pointwise, "unary", attrs=(attr("alpha", "number"),))
_row("softplus", _F.softplus, dims.pointwise, "unary", attrs=_BEND)
_row("leaky_relu", _F.leaky_relu, dims.pointwise, "unary", attrs=(_SLOPE,))
_row("gelu", _F.gelu, dims.pointwise, "unary", attrs=(_FORM,))
_row("clamp", torch.clamp, dims.pointwise, "unary", attrs=_LIMITS)
_row(
    "cast",
    lambda x, *, dtype: x.to(dtype, copy=True),
    dims.pointwise,
    "unary",
    attrs=(attr("dtype", "dtype", True),),
)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b)


_row("where", _where, dims.pointwise, "where", is_single=False, operands=(3, 3))


# -- reductions ----------------------------------------------------------------------------------


def _dims(x: Tensor, chosen: Sequence[int] | None) -> tuple[int, ...]:
    return dims.reduced_dims(chosen, x.ndim)


def _sum(x: Tensor, *, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    if not _dims(x, dims):
        return x.to(dtype or torch.sum(x.new_empty(0)).dtype, copy=True)
    return torch.sum(x, _dims(x, dims), keepdim=keepdim, dtype=dtype)


def _prod(x: Tensor, *, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    chosen = sorted(_dims(x, dims), reverse=True)
    if not chosen:
        return x.to(dtype or torch.prod(x.new_empty(0)).dtype, copy=True)
    for d in chosen:
        x = torch.prod(x, d, keepdim=keepdim, dtype=dtype)
    return x


def _extreme(name: str, pick: Callable[[torch.dtype], float | int | bool]) -> Callable[..., Tensor]:
    """min or max; an empty shard contributes the identity where the whole is not empty."""
    function = getattr(torch, name)

    def call(
        x: Tensor, *, dims: Any = None, keepdim: bool = False, identity: bool = False
    ) -> Tensor:
        chosen = _dims(x, dims)
        if not chosen:
            return x.clone()
        if identity and 0 in (x.shape[d] for d in chosen):
            shape = [n if d not in chosen else 1 for d, n in enumerate(x.shape)]
            kept = [n for d, n in enumerate(shape) if keepdim or d not in chosen]
            return x.new_full(kept, pick(x.dtype))
        return function(x, dim=chosen, keepdim=keepdim)  # type: ignore[no-any-return]

    return call


def _mean(
    x: Tensor, *, dims: Any = None, keepdim: bool = False, count: int | None = None
) -> Tensor:
    """The mean; with `count`, this part's share of the mean over `count` elements."""
    chosen = _dims(x, dims)
    if count is None:
        return torch.mean(x, chosen, keepdim=keepdim) if chosen else x.clone()
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return (torch.sum(x, chosen, keepdim=keepdim, dtype=wide) / count).to(x.dtype)


def _truth(name: str) -> Callable[..., Tensor]:
    function = getattr(torch, name)

    def call(x: Tensor, *, dims: Any = None, keepdim: bool = False) -> Tensor:
        chosen = _dims(x, dims)
        if chosen:
            return function(x, dim=chosen, keepdim=keepdim)  # type: ignore[no-any-return]
        return (x != 0).to(torch.uint8 if x.dtype == torch.uint8 else torch.bool)

    return call


_REDUCED = (attr("dims", "dims"), attr("keepdim", "bool"))


def _reduce(name: str, call: Callable[..., Any], op: str, *own: Attr, **more: Any) -> None:
    more = {"partial": "reduce", **more, "attrs": (*_REDUCED, *own)}
    _row(name, call, dims.reduction(op), "reduce", **more)


_WIDER = attr("dtype", "dtype")
_IDENTITY = attr("identity", "bool", is_local=True)
_COUNT = attr("count", "extent", is_local=True)
_reduce("sum", _sum, "sum", _WIDER)
_reduce("prod", _prod, "prod", _WIDER)
_reduce("max", _extreme("amax", lowest), "max", _IDENTITY, localize=with_identity)
_reduce("min", _extreme("amin", highest), "min", _IDENTITY, localize=with_identity)
_reduce("mean", _mean, "sum", _COUNT, localize=global_count)
_reduce("any", _truth("any"), "bor")
# The bits that all parts of an integer share say nothing of what each part is: no Partial(band).
_reduce("all", _truth("all"), "band", partial="")


# -- contractions and composite ops --------------------------------------------------------------


_COMPOSITE: dict[str, Any] = {"is_single": False}
_ALONG = {"attrs": (attr("dim", "dim", True),), **_COMPOSITE}
_row("matmul", torch.matmul, dims.matmul, "matmul", stays=1, operands=(2, 2))
_row(
    "linear",
    lambda x, w, b=None: _F.linear(x, w, b),
    dims.linear,
    "linear",
    stays=1,
    operands=(2, 3),
)
_row(
    "embedding",
    calls.lookup,
    dims.embedding,
    "embedding",
    localize=local_rows,
    indexed=1,
    operands=(2, 2),
    attrs=(attr("part", "part", is_local=True),),
    **_COMPOSITE,
)
_row(
    "window",
    calls.joined_window,
    dims.window_of_parts,
    "window",
    localize=local_places,
    partial="reduce",
    attrs=(
        word("reduce", "sum", "bor", required=True),
        *_WINDOW,
        attr("places", "box", is_local=True),
        attr("shape", "shape", is_local=True),
    ),
    **_COMPOSITE,
)
_row("softmax", lambda x, *, dim: torch.softmax(x, dim), dims.rowwise, "softmax", **_ALONG)
_row(
    "log_softmax",
    lambda x, *, dim: torch.log_softmax(x, dim),
    dims.rowwise,
    "log_softmax",
    **_ALONG,
)
_row(
    "layer_norm",
    calls.normalize,
    dims.layer_norm,
    "layer_norm",
    operands=(3, 3),
    attrs=(attr("normalized_shape", "shape", True), attr("eps", "number", True)),
    **_COMPOSITE,
)
_row(
    "scaled_dot_product_attention",
    calls.attend,
    dims.attention,
    "attention",
    operands=(3, 4),
    attrs=(attr("is_causal", "bool"), attr("scale", "number")),
    **_COMPOSITE,
)
_row(
    "cat",
    lambda *xs, dim: torch.cat(xs, dim),
    dims.concatenation,
    "cat",
    operands=(1, None),
    partial="all",
    **_ALONG,
)
_BOX = attr("box", "box", is_local=True)
_STREAM = attr("stream", "int", True)
_row(
    "uniform",
    random.uniform,
    dims.creation,
    "uniform",
    localize=local_draw,
    attrs=(
        *_SHAPE,
        attr("dtype", "drawn", True),
        attr("low", "number"),
        attr("high", "number"),
        _STREAM,
        _BOX,
    ),
    **_COMPOSITE,
)
_row(
    "dropout",
    random.dropout,
    dims.pointwise,
    "dropout",
    localize=local_draw,
    operands=(2, 2),
    attrs=(
        attr("p", "probability", True),
        _STREAM,
        attr("shape", "shape", is_local=True),
        _BOX,
    ),
    **_COMPOSITE,
)
_MADE = (*_SHAPE, attr("dtype", "dtype", True), _BOX)
_row(
    "full",
    creation.full,
    dims.creation,
    "full",
    localize=local_draw,
    attrs=_MADE,
)
_row(
    "arange",
    creation.arange,
    dims.creation,
    "arange",
    localize=local_draw,
    operands=(2, 2),
    attrs=_MADE,
)
_row(
    "constant",
    creation.constant,
    dims.creation,
    "constant",
    localize=local_draw,
    operands=(0, 0),
    attrs=(attr("values", "numbers", True), *_MADE),
)
_row(
    "full_like",
    creation.full_like,
    dims.likeness,
    "full_like",
    operands=(2, 2),
    attrs=(attr("dtype", "dtype", True),),
)
