"""Results written into a buffer: torch's own `out=` forms, where they give the same bits.

Most of torch's loops compute an element otherwise where they go through memory in another way: a
sigmoid in vectors and one at a time, a product in blocks that start at an aligned address or not.
So `write_of` writes in place where the buffer lies as the plain result would, or where the op is
exact whatever the way; else it computes and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import reduced_dims
from mdfuse.ir.extremes import highest, lowest

Write = Callable[..., Any]

_ATEN: Any = torch.ops.aten

#: Ops that IEEE arithmetic, or none, defines to the last bit.
EXACT = {
    "add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or",
    "bitwise_xor", "bitwise_not", "maximum", "minimum", "logical_and", "logical_or", "logical_xor",
    "logical_not", "abs", "ceil", "floor", "neg", "reciprocal", "round", "sign", "sqrt", "square",
    "trunc", "clamp", "cast", "where", "any", "all", "cat",
}  # fmt: skip

#: The host instructions of ops that read an element of each operand and write one: what they write
#: may take the place of an operand that lies as the result does.
ELEMENTWISE = ("unary", "binary", "where")

#: Ops whose `out=` form has the name and the arguments of the op.
_SAME = [
    "add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "eq", "ne", "lt", "le", "gt",
    "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "abs", "acos", "acosh", "asin", "asinh",
    "atan", "atanh", "bitwise_not", "ceil", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1",
    "floor", "log", "log10", "log1p", "log2", "logical_not", "neg", "reciprocal", "round", "rsqrt",
    "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "clamp", "softmax",
    "log_softmax",
]  # fmt: skip

#: Ops that want tensors on both sides.
_ON_TENSORS = ["maximum", "minimum", "fmod", "atan2", "logical_and", "logical_or", "logical_xor"]

#: Activations, whose Python functions take no buffer.
_ACTIVATIONS = ["silu", "elu", "softplus", "leaky_relu", "gelu"]


def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A torch function that wants tensors, made to take a number on either side."""

    def call(a: Any, b: Any, **more: Any) -> Any:
        like = a if isinstance(a, Tensor) else b
        return function(_as_tensor(a, like), _as_tensor(b, like), **more)

    return call


def _as_tensor(x: Any, like: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x
    dtype = torch.result_type(like, x)
    return torch.full((), x, dtype=dtype, device=like.device)


def _activation(name: str) -> Write:
    function = getattr(_ATEN, name).out

    def write(x: Tensor, *, out: Tensor, **attrs: Any) -> None:
        function(x, out=out, **attrs)

    write.__name__ = name
    return write


def _cast(x: Tensor, *, dtype: torch.dtype, out: Tensor) -> None:
    out.copy_(x)


def _where(condition: Tensor, a: Any, b: Any, *, out: Tensor) -> None:
    """Only two tensors have an `out=` form."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        torch.where(condition, a, b, out=out)
    else:
        out.copy_(torch.where(condition, a, b))


# -- reductions: over one or more dims; over none they are copies --------------------------------


def _reduction(name: str) -> Write:
    function = getattr(torch, name)

    def write(
        x: Tensor, *, out: Tensor, dims: Any = None, keepdim: bool = False, **more: Any
    ) -> None:
        chosen = reduced_dims(dims, x.ndim)
        if chosen:
            function(x, dim=chosen, keepdim=keepdim, out=out, **more)
        else:
            out.copy_(x)

    write.__name__ = name
    return write


def _truth(name: str) -> Write:
    reduce = _reduction(name)

    def write(x: Tensor, *, out: Tensor, dims: Any = None, **more: Any) -> None:
        if reduced_dims(dims, x.ndim):
            reduce(x, out=out, dims=dims, **more)
        else:
            out.copy_(x != 0)

    write.__name__ = name
    return write


def _sum(x: Tensor, *, out: Tensor, dtype: Any = None, **more: Any) -> None:
    _SUM(x, out=out, dtype=out.dtype, **more)


_SUM = _reduction("sum")


def _prod(
    x: Tensor, *, out: Tensor, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> None:
    """torch multiplies over one dim at a time."""
    *others, last = sorted(reduced_dims(dims, x.ndim), reverse=True) or (None,)
    for d in others:
        x = torch.prod(x, d, keepdim=keepdim, dtype=dtype)
    if last is None:
        out.copy_(x)
    else:
        torch.prod(x, last, keepdim=keepdim, dtype=out.dtype, out=out)


def _extreme(name: str, pick: Callable[[torch.dtype], float | int | bool]) -> Write:
    """An empty shard contributes the identity where the whole is not empty."""
    reduce = _reduction(name)

    def write(
        x: Tensor, *, out: Tensor, dims: Any = None, identity: bool = False, **more: Any
    ) -> None:
        if identity and 0 in (x.shape[d] for d in reduced_dims(dims, x.ndim)):
            out.fill_(pick(x.dtype))
        else:
            reduce(x, out=out, dims=dims, **more)

    write.__name__ = name
    return write


# -- contractions and composite ops --------------------------------------------------------------


def _matmul(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Of a vector and a matrix torch would make a matrix of the buffer and back."""
    if a.ndim == 1 and b.ndim > 1:
        out.copy_(torch.matmul(a, b))
    else:
        torch.matmul(a, b, out=out)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """With a bias one fused product, as `torch.nn.functional.linear` does it of dense operands."""
    if bias is None:
        _matmul(x, weight.t(), out=out)
    elif x.ndim == weight.ndim == 2:
        torch.addmm(bias, x, weight.t(), out=out)
    elif x.ndim > 2 and weight.ndim == 2 and x.is_contiguous():
        torch.addmm(bias, x.flatten(0, -2), weight.t(), out=out.flatten(0, -2))
    else:
        out.copy_(torch.nn.functional.linear(x, weight, bias))


def _cat(*xs: Tensor, dim: int, out: Tensor) -> None:
    torch.cat(xs, dim, out=out)


#: Ops that copy their operands into blocks before they compute.
PRODUCTS = {"matmul", "linear"}

#: op -> `write(*operands, out=buffer, **attrs)`. The first operand is a tensor. `mean` is not here
#: because a part of it is divided by the global count; of relu, embedding and layer_norm torch has
#: an `out=` form that computes and copies.
WRITES: dict[str, Write] = {
    **{name: getattr(torch, name) for name in _SAME},
    **{name: on_tensors(getattr(torch, name)) for name in _ON_TENSORS},
    **{name: _activation(name) for name in _ACTIVATIONS},
    "cast": _cast,
    "where": _where,
    "sum": _sum,
    "prod": _prod,
    "max": _extreme("amax", lowest),
    "min": _extreme("amin", highest),
    "any": _truth("any"),
    "all": _truth("all"),
    "matmul": _matmul,
    "linear": _linear,
    "cat": _cat,
}


#: Ops without such a form whose result is dense where the operands are.
DENSE = {"relu", "mean", "layer_norm", "embedding", "isfinite", "isinf", "isnan"}


def is_dense_result(name: str, facts: Sequence[Tensor | None]) -> bool:
    """Whether the op's own result is contiguous, whatever torch may choose for other operands."""
    if name in PRODUCTS and all(x is not None and x.ndim == 2 for x in facts):
        return True
    known = (name in WRITES or name in DENSE) and all(
        x is not None and x.is_contiguous() for x in facts
    )
    shapes = {x.shape for x in facts if x is not None and x.ndim}
    return known and (len(shapes) == 1 or name in DENSE)


def fresh_write(name: str, facts: Sequence[Tensor | None]) -> Write | None:
    """How an op fills a new buffer with what its call would give; None where it may differ.

    Args:
        name: the op.
        facts: for each tensor operand, a meta tensor with its strides, or None: not known.
    """
    if name == "matmul" and all(x is not None and x.ndim == 2 for x in facts):
        return torch.mm  # what matmul comes to, without its look at the shapes
    if name in EXACT or name in PRODUCTS or all(x is not None and x.is_contiguous() for x in facts):
        return WRITES.get(name)
    return None


# -- new buffers in another memory order ---------------------------------------------------------


def has_orders(name: str, host: str, order: Sequence[int], ranks: Sequence[int]) -> bool:
    """Whether torch writes the op's result in another memory order than its own, with no copy.

    Exact ops give the same bits in all of them. A sum or a product adds in another sequence where
    its result lies otherwise, so an order that is asked for is a part of what is computed: it is
    written by `ordered_write`, in whatever buffer (`in_order`).

    Args:
        name: the op.
        host: the instruction that runs it.
        order: dims from outermost to innermost.
        ranks: how many dims each tensor operand has.
    """
    if name in PRODUCTS:
        return _product_in(order, name, ranks) is not None
    if host == "reduce":
        return name in WRITES
    return name in EXACT and host in (*ELEMENTWISE, "cat")


def ordered_write(
    name: str, host: str, order: Sequence[int], facts: Sequence[Tensor | None]
) -> Write | None:
    """How an op fills a new buffer that is dense in an order; None where it may have to copy."""
    known = [x for x in facts if x is not None]
    if name not in PRODUCTS:
        return WRITES[name] if has_orders(name, host, order, ()) else None
    if len(known) < len(facts) or any(1 in x.shape for x in known):
        return None
    x, w = known[:2]
    write = _product_in(order, name, [x.ndim, w.ndim])
    if write in (_columns, _linear_columns):
        return write if x.ndim == 2 or x.is_contiguous() else None
    return write if write is not torch.bmm or x.shape[0] == w.shape[0] else None


def in_order(order: Sequence[int], write: Write) -> Write:
    """`ordered_write` into a buffer that may lie anyhow: the same bits."""
    order, back = tuple(order), [list(order).index(d) for d in range(len(order))]

    def either(*operands: Any, out: Tensor, **attrs: Any) -> None:
        if _lies_plainly(out.permute(order)):
            write(*operands, out=out, **attrs)
        else:
            new = out.new_empty([out.shape[d] for d in order]).permute(back)
            write(*operands, out=new, **attrs)
            out.copy_(new)

    return either


def _product_in(order: Sequence[int], name: str, ranks: Sequence[int]) -> Write | None:
    """The product whose result lies so."""
    x, w = ranks[:2]
    if w == 2 and tuple(order) == (x - 1, *range(x - 1)):
        return _columns if name == "matmul" else _linear_columns
    if w == 2 and tuple(order) == (1, 0, 2):
        return _rows if name == "matmul" else _linear_rows
    return torch.bmm if x == w == 3 and order[-1] != 0 else None


def _columns(x: Tensor, w: Tensor, *, out: Tensor, bias: Tensor | None = None) -> None:
    """The columns of the result outermost: a product of two matrices."""
    x, into = x.flatten(0, -2), out.flatten(0, -2)
    if bias is None:
        torch.mm(x, w, out=into)
    else:
        torch.addmm(bias, x, w, out=into)


def _rows(x: Tensor, w: Tensor, *, out: Tensor, bias: Tensor | None = None) -> None:
    """Dims 0 and 1 of the result change places: a product for each element of dim 0."""
    w = w.expand(x.shape[0], *w.shape)
    if bias is None:
        torch.bmm(x, w, out=out)
    else:
        torch.baddbmm(bias, x, w, out=out)


def _linear_columns(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    _columns(x, w.t(), out=out, bias=bias)


def _linear_rows(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    _rows(x, w.t(), out=out, bias=bias)


def write_of(name: str, call: Callable[..., Any]) -> Write | None:
    """How an op writes into a buffer what `call` would give; None where torch cannot."""
    write = WRITES.get(name)
    if write is None or name in EXACT:
        return write
    return _where_alike(call, write, _are_rows if name in PRODUCTS else _are_dense)


def _where_alike(
    call: Callable[..., Any], write: Write, may: Callable[[Tensor, Sequence[Any]], bool]
) -> Write:
    """`write` where that goes through memory as `call` does."""

    def either(*operands: Any, out: Tensor, **attrs: Any) -> None:
        if _lies_plainly(out) and may(out, operands):
            write(*operands, out=out, **attrs)
        else:
            out.copy_(call(*operands, **attrs))

    return either


def _lies_plainly(out: Tensor) -> bool:
    """As a new buffer does: dense, at an address that is a multiple of 64."""
    return out.is_contiguous() and out.data_ptr() % 64 == 0


def _are_dense(out: Tensor, operands: Sequence[Any]) -> bool:
    """Results of operands that lie otherwise would not be dense in their own order."""
    return all(x.is_contiguous() for x in operands if isinstance(x, Tensor))


def _are_rows(out: Tensor, operands: Sequence[Any]) -> bool:
    """Products are dense however the operands lie; of one row cuBLAS still looks at the stride."""
    return out.ndim < 2 or out.stride(-2) >= out.shape[-1]
