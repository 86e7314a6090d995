"""The op table: one row per op says what torch call runs it and how its dims correspond."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mdfuse.ir import attention, calls, creation, dims, out_forms, random, reductions, shapes
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import Attr, attr, word
from mdfuse.ir.extremes import highest, lowest
from mdfuse.ir.local_attributes import ExprPart, Localize
from mdfuse.ir.out_forms import ANYHOW, DENSE, Writes, exact, on_tensors, product, rounded

#: The host instructions of elementwise ops: their result may be written into the buffer of an
#: operand that has the result's shape and memory order.
ELEMENTWISE = ("unary", "binary", "where")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A row of the op table: which torch call runs an op, and what the passes ask about it.

    Attributes:
        name: as in `fd.ops.<name>`.
        call: `call(*operands, **attrs)` on whole tensors or on a rank's parts.
        rule: gives the labels of the dims of operands and result.
        shape: gives the shape of the result; None: torch is asked, which takes longer, and
            symbolic extents are pinned to their examples.
        writes: how the result comes into a buffer.
        host: the host instruction that runs it.
        localize: turns the attributes of the whole op into those for one rank's part.
        globalize: turns the attributes of one rank's part into those of the whole; None: those
            that only a part has are left out.
        partial: which operands may stay Partial. "view": any; "all": all of them, by one reduce op;
            "sum": all of them, by sum; "scale": the first alone, by sum; "reduce": an operand that
            is Partial by the op's own reduce op.
        is_view: the result may share storage with the first operand.
        is_single: runs as a single host op; others are merged into segments by default.
        indexed: the position of the operand (a table) whose rows the first operand indexes.
        stays: the position of a matrix operand that keeps its split of the result's dims; the
            other operand moves (weights stay where they are).
        attrs: all attributes that it may have.
        operands: the least and the greatest number of operands; None: no limit.
        may_copy: a view that becomes a copy where the strides of its operand allow no view.
        is_library: a library's kernels run it, which a compiler calls as well.
        results: how many results it has; where there are several, `call` returns a tuple of new
            tensors, and they live on one mesh.
    """

    name: str
    call: Callable[..., Any]
    rule: dims.Rule
    shape: shapes.ShapeRule | None
    writes: Writes
    host: str
    localize: Localize | None = None
    globalize: Localize | None = None
    partial: Literal["", "view", "all", "sum", "scale", "reduce"] = ""
    is_view: bool = False
    is_single: bool = True
    indexed: int | None = None
    stays: int | None = None
    attrs: tuple[Attr, ...] = ()
    operands: tuple[int, int | None] = (1, 1)
    may_copy: bool = False
    is_library: bool = False
    results: int = 1

    @property
    def is_creation(self) -> bool:
        """Whether the op makes a tensor without reading one."""
        return self.rule is dims.creation

    @property
    def is_elementwise(self) -> bool:
        """Whether each element of the result is computed from one element of each operand."""
        return self.host in ELEMENTWISE


#: field of a row -> what must hold of it.
_MUST: dict[str, Callable[[Op], bool]] = {
    "call": lambda op: callable(op.call),
    "rule": lambda op: callable(op.rule),
    "shape": lambda op: op.shape is None or callable(op.shape),
    "writes": lambda op: type(op.writes) is Writes and (op.writes is ANYHOW or not op.is_view),
    "localize": lambda op: op.localize is None or callable(op.localize),
    "globalize": lambda op: (
        op.globalize is None or (callable(op.globalize) and op.localize is not None)
    ),
    "partial": lambda op: op.partial in ("", "view", "all", "sum", "scale", "reduce"),
    "attrs": lambda op: len({a.name for a in op.attrs}) == len(op.attrs),
    "may_copy": lambda op: op.is_view or not op.may_copy,
    "results": lambda op: (
        op.results == 1
        or (op.results > 1 and not (op.writes.form or op.is_view or op.partial or op.is_creation))
    ),
    "name": lambda op: op.name not in TABLE,
}

TABLE: dict[str, Op] = {}


def _row(
    name: str,
    call: Callable[..., Any],
    rule: dims.Rule,
    shape: shapes.ShapeRule | None,
    writes: Writes,
    **more: Any,
) -> None:
    """Check a row and add it to `TABLE`; by default its host instruction is named after the op."""
    row = Op(name=name, call=call, rule=rule, shape=shape, writes=writes, **{"host": name, **more})
    for field, holds in _MUST.items():
        if not holds(row):
            raise TypeError(f"the row of {name!r} has the {field} {getattr(row, field)!r}")
    TABLE[name] = row


def local_attrs(op: Op, attrs: Mapping[str, Any], part: ExprPart) -> dict[str, Any]:
    """Return the attributes of an op for one rank's part of it."""
    attrs = dict(attrs)
    return op.localize(attrs, part) if op.localize else attrs


# -- views ---------------------------------------------------------------------------------------


def itself(x: Any) -> Any:
    """Return the operand as it is: a set computes nothing."""
    return x


def _view(
    name: str, call: Callable[..., Any], rule: dims.Rule, shape: shapes.ShapeRule, **more: Any
) -> None:
    """Add the row of a view, which takes any Partial operand as it is."""
    _row(name, call, rule, shape, ANYHOW, is_view=True, partial="view", **more)


_ORDER = attr("order", "permutation", True)
_DIMS = attr("dims", "permutation", True)
_NEW, _GONE = attr("dims", "dims", True, of="result"), attr("dims", "dims", True)
_SHAPE: dict[str, Any] = {
    "localize": of_part.local_shape,
    "globalize": of_part.whole_shape,
    "attrs": (attr("shape", "shape", True),),
}
_WINDOW = (
    attr("starts", "places", True),
    attr("ends", "places", True),
    attr("steps", "steps", True),
)
_view("set", itself, dims.pointwise, shapes.first)
_view("detach", itself, dims.pointwise, shapes.first, host="set")
_view(
    "stride_order",
    calls.in_order,
    dims.pointwise,
    shapes.first,
    host="set",
    attrs=(_ORDER,),
    may_copy=True,
)
_view("permute", lambda x, *, dims: x.permute(dims), dims.permute, shapes.permute, attrs=(_DIMS,))
_view(
    "reshape",
    lambda x, *, shape: x.reshape(shape),
    dims.reshape,
    shapes.reshape,
    may_copy=True,
    **_SHAPE,
)
_view("expand", lambda x, *, shape: x.expand(shape), dims.expand, shapes.expand, **_SHAPE)
_view("unsqueeze", calls.unsqueeze, dims.unsqueeze, shapes.unsqueeze, attrs=(_NEW,))
_view(
    "squeeze",
    calls.squeeze,
    dims.squeeze,
    shapes.squeeze,
    localize=of_part.local_squeeze,
    attrs=(_GONE,),
)
_view(
    "slice",
    calls.window,
    dims.window,
    shapes.window,
    localize=of_part.local_ends,
    globalize=of_part.whole_ends,
    attrs=_WINDOW,
)


# -- pointwise -----------------------------------------------------------------------------------


def _binary(name: str, call: Callable[..., Any], writes: Writes, **more: Any) -> None:
    """Add the row of a pointwise op with two operands."""
    more |= {"host": "binary", "operands": (2, 2)}
    _row(name, call, dims.pointwise, shapes.broadcast, writes, **more)


_binary("add", operator.add, exact(torch.add), partial="sum")
_binary("sub", operator.sub, exact(torch.sub), partial="sum")
_binary("mul", operator.mul, exact(torch.mul), partial="scale")
_binary("div", operator.truediv, exact(torch.div), partial="scale")
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
for _name in ("fmod", "atan2"):
    _call = on_tensors(getattr(torch, _name))
    _binary(_name, _call, rounded(_call))


def _unary(name: str, call: Callable[..., Any], writes: Writes, *attrs: Attr, **more: Any) -> None:
    """Add the row of a pointwise op with one operand."""
    more |= {"host": "unary", "attrs": attrs}
    _row(name, call, dims.pointwise, shapes.first, writes, **more)


for _name in (
    "abs", "bitwise_not", "ceil", "floor", "logical_not", "reciprocal", "round", "sign", "sqrt",
    "square", "trunc",
):  # fmt: skip
    _unary(_name, getattr(torch, _name), exact(getattr(torch, _name)))
for _name in (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "exp", "exp2",
    "expm1", "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "tan", "tanh",
):  # fmt: skip
    _unary(_name, getattr(torch, _name), rounded(getattr(torch, _name)))
for _name in ("isfinite", "isinf", "isnan"):
    _unary(_name, getattr(torch, _name), DENSE)
_unary("neg", torch.neg, exact(torch.neg), partial="scale")

_F, _on = torch.nn.functional, out_forms.activation
_BEND = (attr("beta", "number"), attr("threshold", "number"))
_SLOPE, _FORM = attr("negative_slope", "number"), word("approximate", "none", "tanh")
_unary("relu", _F.relu, DENSE)  # torch's `out=` form of relu computes and copies
_unary("silu", _F.silu, rounded(_on("silu")))
_unary("elu", _F.elu, rounded(_on("elu")), attr("alpha", "number"))
_unary("softplus", _F.softplus, rounded(_on("softplus")), *_BEND)
_unary("leaky_relu", _F.leaky_relu, rounded(_on("leaky_relu")), _SLOPE)
_unary("gelu", _F.gelu, rounded(_on("gelu")), _FORM)
_unary("clamp", torch.clamp, exact(torch.clamp), attr("min", "number"), attr("max", "number"))
_unary("cast", calls.cast, exact(calls.cast), attr("dtype", "dtype", True))
# A cast of floats to wider ones, as lowering makes it: of a sum it is the sum of the casts.
_unary("widen", calls.cast, exact(calls.cast), attr("dtype", "dtype", True), partial="scale")
# Another such cast: each rank rounds its term, as it would have computed it in that dtype.
_unary("round_terms", calls.cast, exact(calls.cast), attr("dtype", "dtype", True), partial="scale")
_row(
    "where",
    lambda condition, a, b: torch.where(condition, a, b),
    dims.pointwise,
    shapes.broadcast,
    exact(out_forms.where),
    is_single=False,
    operands=(3, 3),
)


# -- reductions ----------------------------------------------------------------------------------


def _reduce(
    name: str, call: Callable[..., Any], op: str, writes: Writes, *own: Attr, **more: Any
) -> None:
    """Add the row of a reduction; the parts of a split dim are joined by the reduce op `op`."""
    attrs = (attr("dims", "dims"), attr("keepdim", "bool"), *own)
    more = {"partial": "reduce", **more, "host": "reduce", "attrs": attrs}
    _row(name, call, dims.reduction(op), shapes.reduction, writes, **more)


_WIDER = attr("dtype", "dtype")
_IDENTITY = attr("identity", "bool", is_local=True)
_COUNT = attr("count", "extent", is_local=True)
_reduce("sum", reductions.add_up, "sum", rounded(reductions.add_up), _WIDER)
_reduce("prod", reductions.multiply, "prod", rounded(reductions.multiply), _WIDER)
for _name, _pick in (("max", lowest), ("min", highest)):
    _call = reductions.extreme(f"a{_name}", _pick)
    _reduce(_name, _call, _name, rounded(_call), _IDENTITY, localize=of_part.with_identity)
# A part of a mean is divided by the global count.
_reduce("mean", reductions.average, "sum", DENSE, _COUNT, localize=of_part.global_count)
_any, _all = reductions.truth("any"), reductions.truth("all")
_reduce("any", _any, "bor", exact(_any))
# all(a & b) is not all(a) & all(b) for integers, as 1 & 2 shows: no Partial(band) is taken.
_reduce("all", _all, "band", exact(_all), partial="")


# -- contractions and composite ops --------------------------------------------------------------


_COMPOSITE: dict[str, Any] = {"is_single": False}
_ALONG: dict[str, Any] = {"attrs": (attr("dim", "dim", True),), **_COMPOSITE}
_row(
    "matmul",
    torch.matmul,
    dims.matmul,
    shapes.matmul,
    product(out_forms.matmul),
    stays=1,
    is_library=True,
    operands=(2, 2),
)
_row(
    "linear",
    lambda x, w, b=None: _F.linear(x, w, b),
    dims.linear,
    shapes.linear,
    product(out_forms.linear),
    stays=1,
    is_library=True,
    operands=(2, 3),
)
_row(
    "embedding",
    calls.lookup,
    dims.embedding,
    shapes.embedding,
    DENSE,
    localize=of_part.local_rows,
    indexed=1,
    operands=(2, 2),
    attrs=(attr("part", "part", is_local=True),),
    **_COMPOSITE,
)
_row(
    "window",
    calls.joined_window,
    dims.window_of_parts,
    shapes.window,
    ANYHOW,
    localize=of_part.local_places,
    globalize=of_part.whole_places,
    partial="reduce",
    attrs=(
        word("reduce", "sum", "bor", required=True),
        *_WINDOW,
        attr("places", "box", is_local=True),
        attr("shape", "shape", is_local=True),
    ),
    **_COMPOSITE,
)
for _call in (torch.softmax, torch.log_softmax):
    _row(_call.__name__, _call, dims.rowwise, shapes.along, rounded(_call), **_ALONG)
_RANKED: dict[str, Any] = {"results": 2, "is_library": True, **_COMPOSITE}
_DIM = attr("dim", "dim", True)
for _name, _call, *_own in (
    ("topk", calls.top, attr("k", "extent", True), _DIM, attr("smallest", "bool")),
    ("sort", calls.sort, _DIM, attr("descending", "bool"), attr("stable", "bool")),
):
    _row(_name, _call, dims.ranked, shapes.ranked, DENSE, attrs=tuple(_own), **_RANKED)
_row(
    "layer_norm",
    calls.normalize,
    dims.layer_norm,
    shapes.layer_norm,
    DENSE,
    operands=(3, 3),
    attrs=(attr("normalized_shape", "shape", True), attr("eps", "number", True)),
    **_COMPOSITE,
)
_ATTEND = attr("is_causal", "bool"), attr("scale", "number"), attr("enable_gqa", "bool")
_row(
    "rms_norm",
    calls.root_mean_square_normalize,
    dims.layer_norm,
    shapes.layer_norm,
    DENSE,
    operands=(2, 2),
    attrs=(attr("normalized_shape", "shape", True), attr("eps", "number", True)),
    **_COMPOSITE,
)
_row(
    "scaled_dot_product_attention",
    calls.attend,
    dims.attention,
    shapes.attention,
    ANYHOW,
    host="attention",
    is_library=True,
    operands=(3, 4),
    attrs=_ATTEND,
    **_COMPOSITE,
)
for _name, _call, _rule, _shape, _counts in (
    ("attention", attention.attend, dims.attended, shapes.attended, (2, 3, 4)),
    (
        "attention_grad",
        attention.attend_grad,
        dims.attention_grad,
        shapes.attention_grad,
        (3, 6, 7),
    ),
):
    _more: dict[str, Any] = {"results": _counts[0], "operands": _counts[1:], "is_library": True}
    _row(_name, _call, _rule, _shape, ANYHOW, attrs=_ATTEND, **_more, **_COMPOSITE)
_row(
    "cat",
    calls.cat,
    dims.concatenation,
    shapes.cat,
    exact(calls.cat),
    operands=(1, None),
    partial="all",
    **_ALONG,
)


# -- numbers -------------------------------------------------------------------------------------


_STREAM, _BOX = attr("stream", "int", True), attr("box", "box", is_local=True)
_EXTENTS, _DTYPE = attr("shape", "shape", True), attr("dtype", "dtype", True)


def _creation(
    name: str,
    call: Callable[..., Any],
    operands: int,
    *attrs: Attr,
    shape: shapes.ShapeRule = shapes.created,
    **more: Any,
) -> None:
    """Add the row of an op that makes a tensor of numbers; each rank makes its own box of it."""
    more |= {"localize": of_part.local_draw, "operands": (operands, operands)}
    _row(name, call, dims.creation, shape, ANYHOW, attrs=(_EXTENTS, *attrs, _BOX), **more)


_VALUES = attr("values", "numbers", True)
_RANGE = (attr("low", "number"), attr("high", "number"))
_creation(
    "uniform", random.uniform, 1, attr("dtype", "drawn", True), *_RANGE, _STREAM, **_COMPOSITE
)
_creation("full", creation.full, 1, _DTYPE)
_creation("arange", creation.arange, 2, _DTYPE, shape=shapes.numbered)
_creation("constant", creation.constant, 0, _VALUES, _DTYPE, shape=shapes.listed)
_row(
    "embedding_grad",
    calls.lookup_grad,
    dims.embedding_grad,
    shapes.embedding_grad,
    DENSE,
    localize=of_part.local_draw,
    operands=(2, 2),
    attrs=(_EXTENTS, _BOX),
    **_COMPOSITE,
)
_row(
    "slice_grad",
    calls.window_grad,
    dims.window_grad,
    shapes.window_grad,
    DENSE,
    localize=of_part.local_taken,
    attrs=(
        _EXTENTS,
        attr("starts", "places", True),
        attr("steps", "steps", True),
        _BOX,
        attr("taken", "box", is_local=True),
        attr("at", "places", is_local=True),
    ),
    **_COMPOSITE,
)
_row(
    "full_like",
    creation.full_like,
    dims.likeness,
    shapes.first,
    ANYHOW,
    operands=(2, 2),
    attrs=(_DTYPE,),
)
_row(
    "dropout",
    random.dropout,
    dims.pointwise,
    shapes.first,
    ANYHOW,
    localize=of_part.local_draw,
    operands=(2, 2),
    attrs=(attr("p", "probability", True), _STREAM, attr("shape", "shape", is_local=True), _BOX),
    **_COMPOSITE,
)
