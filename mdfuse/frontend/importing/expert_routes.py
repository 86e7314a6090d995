"""Route rows to experts without a sort: rows sorted by expert, multiplied, and put back.

A module sorts rows by expert. If rows are split over ranks, the sort would gather all of them,
though no result depends on their order. So a sort of expert numbers is deferred: an `InOrder` keeps
the unsorted rows, and the expert number of a row selects its matrix (`mf.ops.routed_mm`).
Operations without a rule here sort the rows. If the matrices are split over ranks, values between
two products keep a dim of parts: see `routed_mm`. If the same ranks split tokens, too, rows go to
the ranks of their experts, and back (`mdfuse.frontend.importing.dispatch`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mdfuse.extents.extent import are_same
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing import dispatch
from mdfuse.frontend.importing.deferred import (
    KINDS,
    Back,
    Counted,
    DeferredSort,
    GraphCall,
    InOrder,
    bases,
    leaves,
)
from mdfuse.frontend.importing.indices import END
from mdfuse.frontend.importing.joined import GROUPED, JoinedTensors, in_one

ops: Any = operations

#: The deferred sorts.
SORTS = ("aten.sort.default", "aten.sort.stable")


def is_pointwise(node: Node) -> bool:
    """Return whether the operation of a node goes element by element."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def on_rows(call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a call to unsorted rows; None if it needs sorted ones."""
    if call.target in SORTS:
        return _put_off(call, args, kwargs)
    if not any(isinstance(x, KINDS) for x in leaves((args, kwargs))):
        return None
    rule = RULES.get(call.target)
    if rule is not None:
        return rule(call, *args, **kwargs)
    if call.target in ALONG:
        return _along(call, *args, **kwargs)
    is_mapped = call.is_pointwise or call.target in MAPPED
    return _mapped(call, args, kwargs) if is_mapped else None


def sorted_again(x: Any) -> Any:
    """Return rows in the module's order."""
    return x.whole() if isinstance(x, KINDS) else x


def _put_off(call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x = args[0]
    descends = kwargs.get("descending") or any(args[2:])
    is_number = isinstance(x, Handle) and x.ndim == 1 and not x.dtype.is_floating_point
    if not is_number or descends:
        return None
    order = DeferredSort(x, lambda: call.apply(call.target, args, kwargs))
    return InOrder(order, x), InOrder(order, 1)


# -- rows by their places --------------------------------------------------------------------------


def _index(call: GraphCall, x: Any, where: Sequence[Any], *_: Any) -> Any:
    return _taken(call, x, where[0]) if len(where) == 1 else None


def _index_select(call: GraphCall, x: Any, dim: int, index: Any) -> Any:
    return _taken(call, x, index) if dim % max(x.ndim, 1) == 0 else None


def _taken(call: GraphCall, x: Any, index: Any) -> Any:
    """Take rows at sorted places, or put rows back."""
    if isinstance(index, Back):
        is_its = isinstance(x, InOrder) and x.order is index.order and not isinstance(x.base, int)
        return x.together() if is_its else None
    if not isinstance(index, InOrder) or index.ndim != 1 or index.apart:
        return None
    order = index.order
    if isinstance(x, KINDS):
        return None
    each = call.each(order, index.base)
    if each and are_same(x.shape[0] * each, order.ids.shape[0]):
        if each == 1:
            return InOrder(order, x)
        return InOrder(order, call.apply("aten.repeat_interleave.self_int", (x, each, 0), {}))
    if isinstance(index.base, int):
        return None
    table = x if isinstance(x, Handle) and index.base is order.ids and x.ndim == 2 else None
    return InOrder(order, call.apply("aten.index.Tensor", (x, [index.base]), {}), table=table)


def _index_put(
    call: GraphCall, x: Any, where: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    """`inverse[places] = arange(n)`, and sorted rows written to their original places."""
    at = where[0] if len(where) == 1 else None
    if not isinstance(at, InOrder) or at.base != 1 or accumulate:
        return None
    if not isinstance(values, InOrder) and call.each(at.order, values) == 1:
        return Back(at.order)
    is_its = isinstance(values, InOrder) and values.order is at.order
    return values.together() if is_its and not isinstance(values.base, int) else None


def _argsort(call: GraphCall, x: Any, *how: Any, **said: Any) -> Any:
    is_places = isinstance(x, InOrder) and isinstance(x.base, int) and x.base == 1
    descends = any(how[1:]) or said.get("descending")
    return Back(x.order) if is_places and not descends else None


def _index_add(
    call: GraphCall, x: Any, dim: int, index: Any, rows: Any, *, alpha: float = 1
) -> Any:
    """Add sorted rows to their original places, maybe several to one."""
    are_both = isinstance(index, InOrder) and isinstance(rows, InOrder)
    if not are_both or index.order is not rows.order or dim != 0 or isinstance(x, KINDS):
        return None
    each, added = call.each(index.order, index.base), rows.together()
    if not each or alpha != 1 or not are_same(x.shape[0] * each, added.shape[0]):
        return None
    apart = call.apply("aten.view.default", (added, (x.shape[0], each, *added.shape[1:])), {})
    return call.apply("aten.add.Tensor", (x, ops.sum(apart, 1)), {})


def _floor_divide(call: GraphCall, x: Any, by: Any, **said: Any) -> Any:
    """Divide row numbers by the number of copies per row."""
    is_floor = "rounding_mode" not in said or said["rounding_mode"] == "floor"
    is_places = isinstance(x, InOrder) and isinstance(x.base, int) and type(by) is int and by > 0
    return InOrder(x.order, x.base * by) if is_places and is_floor else None


def _like(call: GraphCall, x: Any, *how: Any, **said: Any) -> Any:
    """Return a value of the rows' shape that does not read them."""
    is_plain = isinstance(x, InOrder) and not x.apart
    base = x.order.ids if is_plain and isinstance(x.base, int) else getattr(x, "base", None)
    return call.apply(call.target, (base, *how), said) if is_plain else None


# -- products --------------------------------------------------------------------------------------


def _histc(call: GraphCall, x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Count the rows of each expert, which needs no order."""
    if not isinstance(x, InOrder) or isinstance(x.base, int) or (min, max) != (0, bins - 1):
        return None
    return Counted(x.order, bins, call.apply(call.target, (x.base, bins, min, max), {}))


def _cumsum(call: GraphCall, x: Any, dim: int, **said: Any) -> Any:
    if not isinstance(x, Counted) or x.are_ends:
        return None
    return Counted(x.order, x.experts, call.apply(call.target, (x.counts, dim), said), True)


def _grouped(call: GraphCall, x: Any, weight: Any, offs: Any = None, *how: Any) -> Any:
    """Multiply each row by the matrix of its expert."""
    is_by_ends = isinstance(x, InOrder) and isinstance(offs, Counted) and offs.are_ends
    if not is_by_ends or x.order is not offs.order or any(y is not None for y in how):
        return None
    is_joined = isinstance(weight, JoinedTensors) and weight.dim == 2
    experts = weight.shape[0]
    if not (is_joined or isinstance(weight, Handle)) or experts != offs.experts or x.ndim != 2:
        return None
    split = call.parts(weight.parts[0] if is_joined else weight)
    is_here = not x.is_sent and x.apart is None and split > 1
    parts = dispatch.parts_for(x.order.ids, call.tokens()) if is_here else 1
    if x.is_sent or parts != 1:
        rows = dispatch.grouped(x, experts, parts, call.capacity)
        each_product = partial(ops.grouped_mm, rows)
        products = weight.mapped(each_product, 3) if is_joined else each_product(weight)
        return InOrder(x.order, products, is_sent=True)
    if x.apart is None:
        count = split if experts % split == 0 else 1
        each = experts // count
        dispatch.note_parts(x.order.ids, count)
    else:
        count, each = x.apart
    rows = in_one(x.base)

    def product(w: Handle) -> Any:
        cut = call.apply("aten.unflatten.int", (w, 0, (count, each)), {})
        return ops.routed_mm(rows, cut, x.order.ids)

    apart = (count, each) if x.apart is None else None
    products = weight.mapped(product, 1 + bool(apart)) if is_joined else product(weight)
    return InOrder(x.order, products, apart)


# -- operations that keep the order of rows --------------------------------------------------------


def _mapped(call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a rowwise or elementwise operation to the unsorted rows."""
    ordered = [x for x in leaves((args, kwargs)) if isinstance(x, InOrder)]
    others = [x for x in leaves((args, kwargs)) if isinstance(x, Handle | Tensor | JoinedTensors)]
    counted = [x for x in leaves((args, kwargs)) if isinstance(x, Counted)]
    if counted and not ordered and not others and len(counted) == 1 and call.target in CASTS:
        (x,) = counted
        counts = call.apply(call.target, (x.counts, *args[1:]), kwargs)
        return Counted(x.order, x.experts, counts, x.are_ends)
    if not ordered or counted or any(isinstance(x.base, int) for x in ordered):
        return None
    first = ordered[0]
    are_alike = all(x.order is first.order and x.ndim == first.ndim for x in ordered)
    if call.target in ROW_BY_ROW and not _has_rows(call, first, args):
        return None
    if not are_alike or (call.is_pointwise and not all(_is_in_each(x, first.ndim) for x in others)):
        return None
    apart = next((x.apart for x in ordered if x.apart), None)
    if any(x.is_sent for x in ordered):
        return dispatch.applied(call, args, kwargs, ordered)
    return _applied_in_order(call, first.order, apart, args, kwargs)


def _has_rows(call: GraphCall, x: InOrder, args: Sequence[Any]) -> bool:
    """Return whether an operation of trailing dims leaves the rows alone."""
    trailing = 1 if call.target == ROW_BY_ROW[0] else len(args[1])
    return args[0] is x and x.ndim > trailing


def _is_in_each(x: Any, ndim: int) -> bool:
    """Return whether all rows are combined with the same numbers of a value."""
    return x.ndim < ndim or (x.ndim == ndim and are_same(x.shape[0], 1))


def _along(call: GraphCall, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operation along a dim after the rows."""
    place = ALONG[call.target]
    if not isinstance(x, InOrder) or isinstance(x.base, int):
        return None
    given = [*args, *[0] * (place - len(args))] if len(args) < place else [*args]
    if len(args) < place and "dim" in kwargs:
        return None
    if x.is_sent and call.target not in dispatch.COLUMNS:
        x = dispatch.come_back(x)
    ndim = x.ndim + (call.target == "aten.unsqueeze.default")
    said = given[place - 1]
    dims = [d % ndim - ndim for d in (said if isinstance(said, tuple | list) else [said])]
    if -ndim in dims or not dims:
        is_all = call.target == "aten.slice.Tensor" and given[1:] in ([], [0], [None], [0, END])
        return x if is_all and dims else None
    given[place - 1] = dims if isinstance(said, tuple | list) else dims[0]
    return _applied_in_order(call, x.order, x.apart, (x, *given), kwargs, x.is_sent)


def _cat(call: GraphCall, tensors: Sequence[Any], dim: int = 0) -> Any:
    ordered = [x for x in tensors if isinstance(x, InOrder) and not isinstance(x.base, int)]
    first = ordered[0] if ordered else None
    if first is None or len(ordered) < len(tensors) or dim % first.ndim == 0:
        return None
    key = first.order, first.apart, first.is_sent
    are_alike = all((x.order, x.apart, x.is_sent) == key for x in ordered)
    at = dim % first.ndim - first.ndim
    return (
        _applied_in_order(call, *key[:2], (tensors, at), {}, first.is_sent) if are_alike else None
    )


def _reshape(call: GraphCall, x: Any, shape: Sequence[Any]) -> Any:
    """Reshape the dims after the rows."""
    is_kept = isinstance(x, InOrder) and not isinstance(x.base, int) and len(shape) > 0
    if not is_kept or not are_same(shape[0], x.shape[0]):
        return None
    x = dispatch.come_back(x)
    front = [x.apart[0]] if x.apart else []
    return _applied_in_order(call, x.order, x.apart, (x, [*front, *shape]), {})


def _applied_in_order(
    call: GraphCall,
    order: DeferredSort,
    apart: tuple[int, int] | None,
    args: Any,
    kwargs: Mapping[str, Any],
    is_sent: bool = False,
) -> Any:
    applied = call.apply(call.target, *bases((args, dict(kwargs)), InOrder))
    if isinstance(applied, tuple | list):
        return [InOrder(order, x, apart, is_sent) for x in applied]
    return InOrder(order, applied, apart, is_sent)


#: Operations that keep the dims without the pointwise tag.
CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.to.dtype_layout", "aten.to.device")
ROW_BY_ROW = ("aten.linear.default", "aten.layer_norm.default", "aten.rms_norm.default")
MAPPED = frozenset(
    (*CASTS, "aten.alias.default", "aten.contiguous.default", "aten.clone.default",
     "aten.detach.default", "aten.detach_.default", "aten.dropout.default", *ROW_BY_ROW)
)  # fmt: skip

#: overload -> position of the dim argument, or of the list of dims.
ALONG: Mapping[str, int] = {
    "aten.chunk.default": 2, "aten.split.Tensor": 2, "aten.split_with_sizes.default": 2,
    "aten.split.sizes": 2, "aten.slice.Tensor": 1, "aten.select.int": 1, "aten.unbind.int": 1,
    "aten.unsqueeze.default": 1, "aten.squeeze.dim": 1, "aten.softmax.int": 1,
    "aten._softmax.default": 1, "aten.sum.dim_IntList": 1, "aten.mean.dim": 1,
    "aten.amax.default": 1,
}  # fmt: skip

RULES: dict[str, Callable[..., Any]] = {
    str(operator.getitem): lambda call, pieces, place: pieces[place],
    "aten.index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.index_put.default": _index_put,
    **dict.fromkeys(("aten.argsort.default", "aten.argsort.stable"), _argsort),
    "aten.index_add.default": _index_add,
    **dict.fromkeys(
        ("aten.floor_divide.default", "aten.div.Tensor_mode", "aten.div.Scalar_mode"),
        _floor_divide,
    ),
    **dict.fromkeys(("aten.empty_like.default", "aten.zeros_like.default"), _like),
    "aten.histc.default": _histc,
    "aten.cumsum.default": _cumsum,
    **dict.fromkeys(GROUPED, _grouped),
    "aten.cat.default": _cat,
    **dict.fromkeys(
        ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"), _reshape
    ),
}
