"""The op table: one row per op says what torch call runs it and how its dims correspond."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir import creation, dims, random
from mdfuse.ir.attributes import Attr, attr, word
from mdfuse.ir.extremes import highest, lowest
from mdfuse.ir.writes import on_tensors, write_of
from mdfuse.layout import Box, box_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank holds of an expression's operands and result.

    Attributes:
        shapes: global shapes of the operands; None for those that are not tensors.
        boxes: this rank's parts of the operands.
        shape: global shape of the result.
        box: this rank's part of the result.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    boxes: tuple[Box | None, ...]
    shape: tuple[int, ...]
    box: Box


Localize = Callable[[dict[str, Any], Part], dict[str, Any]]


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


def _local_shape(attrs: dict[str, Any], part: Part) -> dict[str, Any]:
    return {**attrs, "shape": box_shape(part.box)}


def _local_ends(attrs: dict[str, Any], part: Part) -> dict[str, Any]:
    """Dims taken entirely end where this rank's part ends; the others are whole here."""
    box = part.boxes[0]
    assert box is not None
    ends = tuple(min(e, stop - start) for e, (start, stop) in zip(attrs["ends"], box, strict=True))
    return {**attrs, "ends": ends}


def itself(x: Any) -> Any:
    """What a set computes where the layout does not change."""
    return x


def _window(
    x: Tensor, *, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]
) -> Tensor:
    return x[tuple(map(slice, starts, ends, steps))]


def _unsqueeze(x: Tensor, *, dims: Sequence[int]) -> Tensor:
    rank = x.ndim + len(dims)
    for d in sorted(d % rank for d in dims):
        x = x.unsqueeze(d)
    return x


def _squeeze(x: Tensor, *, dims: Sequence[int]) -> Tensor:
    return x.squeeze(tuple(dims))


def _local_squeeze(attrs: dict[str, Any], part: Part) -> dict[str, Any]:
    """Only dims whose global extent is 1 go; a local extent of 1 is no reason."""
    shape = part.shapes[0]
    assert shape is not None
    return {"dims": tuple(d % len(shape) for d in attrs["dims"] if shape[d] == 1)}


def _in_order(x: Tensor, *, order: Sequence[int]) -> Tensor:
    """The tensor itself where its dims lie in `order`, outermost first, else a copy that does."""
    back = [order.index(d) for d in range(x.ndim)]
    return x.permute(tuple(order)).contiguous().permute(back)


_VIEW: dict[str, Any] = {"is_view": True, "partial": "view"}
_row("set", itself, dims.pointwise, "set", **_VIEW)
_row(
    "stride_order",
    _in_order,
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
    localize=_local_shape,
    attrs=_SHAPE,
    may_copy=True,
    **_VIEW,
)
_row(
    "expand",
    lambda x, *, shape: x.expand(shape),
    dims.expand,
    "expand",
    localize=_local_shape,
    attrs=_SHAPE,
    **_VIEW,
)
_NEW, _GONE = attr("dims", "dims", True, of="result"), attr("dims", "dims", True)
_WINDOW = (
    attr("starts", "places", True),
    attr("ends", "places", True),
    attr("steps", "steps", True),
)
_row("unsqueeze", _unsqueeze, dims.unsqueeze, "unsqueeze", attrs=(_NEW,), **_VIEW)
_row(
    "squeeze",
    _squeeze,
    dims.squeeze,
    "squeeze",
    localize=_local_squeeze,
    attrs=(_GONE,),
    **_VIEW,
)
_row("slice", _window, dims.window, "slice", localize=_local_ends, attrs=_WINDOW, **_VIEW)


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


def _global_count(attrs: dict[str, Any], part: Part) -> dict[str, Any]:
    """Where a reduced dim is split, a part of a mean is divided by the global count."""
    if not _is_partial(attrs, part):
        return attrs
    shape = part.shapes[0] or ()
    chosen = dims.reduced_dims(attrs.get("dims"), len(shape))
    return {**attrs, "count": math.prod(shape[d] for d in chosen)}


def _is_partial(attrs: dict[str, Any], part: Part) -> bool:
    """This rank has only a part of a dim that is reduced."""
    shape, box = part.shapes[0], part.boxes[0]
    assert shape is not None and box is not None
    return any(box[d] != (0, shape[d]) for d in dims.reduced_dims(attrs.get("dims"), len(shape)))


def _with_identity(attrs: dict[str, Any], part: Part) -> dict[str, Any]:
    """Where a reduced dim is split, an empty part is no error."""
    return {**attrs, "identity": True} if _is_partial(attrs, part) else attrs


_REDUCED = (attr("dims", "dims"), attr("keepdim", "bool"))


def _reduce(name: str, call: Callable[..., Any], op: str, *own: Attr, **more: Any) -> None:
    more = {"partial": "reduce", **more, "attrs": (*_REDUCED, *own)}
    _row(name, call, dims.reduction(op), "reduce", **more)


_WIDER = attr("dtype", "dtype")
_IDENTITY = attr("identity", "bool", is_local=True)
_COUNT = attr("count", "extent", is_local=True)
_reduce("sum", _sum, "sum", _WIDER)
_reduce("prod", _prod, "prod", _WIDER)
_reduce("max", _extreme("amax", lowest), "max", _IDENTITY, localize=_with_identity)
_reduce("min", _extreme("amin", highest), "min", _IDENTITY, localize=_with_identity)
_reduce("mean", _mean, "sum", _COUNT, localize=_global_count)
_reduce("any", _truth("any"), "bor")
# The bits that all parts of an integer share say nothing of what each part is: no Partial(band).
_reduce("all", _truth("all"), "band", partial="")


# -- contractions and composite ops --------------------------------------------------------------


def _lookup(indices: Tensor, table: Tensor, *, part: tuple[int, int, int] | None = None) -> Tensor:
    """Rows of a table; with `part=(start, stop, rows in all)` the table is a piece of a larger one.

    Rows outside the piece come back as zeros, so that the sum over all pieces is the lookup.
    """
    if not table.shape[0]:
        return table.new_zeros((*indices.shape, table.shape[1]))
    if part is None:
        return _F.embedding(indices, table)
    start, stop, _ = part
    here = (indices >= start) & (indices < stop)
    rows = _F.embedding((indices - start).clamp(0, stop - start - 1), table)
    return torch.where(here.unsqueeze(-1), rows, 0)


def _local_rows(attrs: dict[str, Any], part: Part) -> dict[str, Any]:
    shape, box = part.shapes[1], part.boxes[1]
    assert shape is not None and box is not None
    if box[0] == (0, shape[0]):
        return attrs
    return {**attrs, "part": (*box[0], shape[0])}


def _joined_window(
    x: Tensor,
    *,
    reduce: str,
    starts: Sequence[int],
    ends: Sequence[int],
    steps: Sequence[int],
    places: Sequence[tuple[int, int]] | None = None,
    shape: Sequence[int] = (),
) -> Tensor:
    """A slice; of a part of x what that has of it, in zeros of that shape."""
    rows = _window(x, starts=starts, ends=ends, steps=steps)
    if places is None:
        return rows.clone()
    result = x.new_zeros(tuple(shape))
    result[tuple(slice(*place) for place in places)] = rows
    return result


def _local_places(attrs: dict[str, Any], part: Part) -> dict[str, Any]:
    """From where to where the slice goes in this rank's part, and its place in the whole slice."""
    shape, box = part.shapes[0], part.boxes[0]
    assert shape is not None and box is not None
    found = []
    for d, (n, here) in enumerate(zip(shape, box, strict=True)):
        start, end, step = (attrs[name][d] for name in ("starts", "ends", "steps"))
        if (start, step) == (0, 1) and end >= n:  # taken entirely, from what is here
            start, end = here
        first, stop = (max(-(-(at - start) // step), 0) for at in (here[0], min(here[1], end)))
        stop = max(first, stop)
        begin = max(start + first * step - here[0], 0)
        found.append((begin, begin + (stop - first) * step, (first, stop)))
    starts, ends, places = zip(*found, strict=True) if found else ((), (), ())
    local = {"starts": starts, "ends": ends, "places": places, "shape": box_shape(part.box)}
    return {**attrs, **local}


def _normalize(
    x: Tensor, weight: Any, bias: Any, *, normalized_shape: Sequence[int], eps: float
) -> Tensor:
    return _F.layer_norm(x, list(normalized_shape), weight, bias, eps)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    return _F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)


def _local_draw(attrs: dict[str, Any], part: Part) -> dict[str, Any]:
    return {**attrs, "shape": part.shape, "box": part.box}


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
    _lookup,
    dims.embedding,
    "embedding",
    localize=_local_rows,
    indexed=1,
    operands=(2, 2),
    attrs=(attr("part", "part", is_local=True),),
    **_COMPOSITE,
)
_row(
    "window",
    _joined_window,
    dims.window_of_parts,
    "window",
    localize=_local_places,
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
    _normalize,
    dims.layer_norm,
    "layer_norm",
    operands=(3, 3),
    attrs=(attr("normalized_shape", "shape", True), attr("eps", "number", True)),
    **_COMPOSITE,
)
_row(
    "scaled_dot_product_attention",
    _attend,
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
    localize=_local_draw,
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
    localize=_local_draw,
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
    localize=_local_draw,
    attrs=_MADE,
)
_row(
    "arange",
    creation.arange,
    dims.creation,
    "arange",
    localize=_local_draw,
    operands=(2, 2),
    attrs=_MADE,
)
_row(
    "constant",
    creation.constant,
    dims.creation,
    "constant",
    localize=_local_draw,
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
