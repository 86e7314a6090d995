"""Multiply rows by the experts that a module chooses, where it multiplies them by all.

A module scatters the scores of k experts per token among those of all, of which the others become
zeros, and multiplies all tokens by all experts (Llama 4). An expert makes zeros of zeros. So where
the same ranks split tokens and experts, the rows of chosen experts go there, and back
(`mdfuse.frontend.importing.dispatch`). Operations without a rule here compute all rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.deferred import (
    CHOSEN,
    Chosen,
    GraphCall,
    Later,
    Repeated,
    bases,
    leaves,
    mapped_leaves,
)
from mdfuse.frontend.importing.dispatch import COLUMNS, counted, note, parts_for
from mdfuse.frontend.importing.joined import JoinedTensors, in_one
from mdfuse.frontend.ragged_operands import RaggedRefusal

ops: Any = operations

#: What begins such values, and what multiplies them.
SCATTER, PRODUCT = "aten.scatter.src", "aten.bmm.default"


def is_in(targets: Collection[str]) -> bool:
    """Return whether a graph has calls that begin and multiply such values."""
    return SCATTER in targets and PRODUCT in targets


def on_chosen(call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a call to the values of chosen experts; None if it needs those of all."""
    given = [*leaves((args, kwargs))]
    if call.target not in _FIRST and not any(isinstance(x, CHOSEN) for x in given):
        return None
    every = partial(mapped_leaves, (args, dict(kwargs)), _of_all)
    later = Later(lambda: call.apply(call.target, *every()))
    rule = RULES.get(call.target)
    if rule is not None:
        return rule(call, later, *args, **kwargs)
    chosen = [x for x in given if isinstance(x, Chosen)]
    if chosen and all(x.is_sent for x in chosen) and (call.is_pointwise or call.target in COLUMNS):
        return _where_sent(call, later, chosen[0], args, kwargs)
    return None


# -- scores ----------------------------------------------------------------------------------------


def _scattered(call: GraphCall, later: Later, x: Any, dim: int, ids: Any, scores: Any) -> Any:
    """Put the scores of chosen experts among those of all."""
    is_known = isinstance(x, Tensor) and x.ndim == 2 and x.numel() > 0
    are_values = isinstance(ids, Handle) and isinstance(scores, Handle) and ids.ndim == 2
    if not is_known or not are_values or dim % 2 != 1 or ids.shape != scores.shape:
        return None
    if not bool((x == x[0, 0]).all()) or x.shape[0] != ids.shape[0]:
        return None
    return Chosen(ids, scores, "te", x.shape[1], x[0, 0].item(), later)


def _sigmoid(call: GraphCall, later: Later, x: Any) -> Any:
    if not isinstance(x, Chosen) or x.is_sent:
        return None if not isinstance(x, Chosen) else _where_sent(call, later, x, (x,), {})
    fill = torch.tensor(x.fill, dtype=torch.float64).sigmoid().item()
    return replace(x, base=call.apply(call.target, (x.base,), {}), fill=fill, later=later)


def _cast(call: GraphCall, later: Later, x: Any, *how: Any, **said: Any) -> Any:
    if not isinstance(x, Chosen):
        return None
    return replace(x, base=call.apply(call.target, (x.base, *how), said), later=later)


def _same(call: GraphCall, later: Later, x: Any, *how: Any, **said: Any) -> Any:
    return x if isinstance(x, Chosen) else None


def _turned(call: GraphCall, later: Later, x: Any, *dims: int) -> Any:
    is_scores = (
        isinstance(x, Chosen) and x.dims == "te" and {d % 2 for d in dims} in ({0, 1}, set())
    )
    return replace(x, dims="et", later=later) if is_scores else None


# -- rows ------------------------------------------------------------------------------------------


def _repeated(call: GraphCall, later: Later, x: Any, times: Sequence[Any]) -> Any:
    is_rows = isinstance(x, Handle) and x.ndim == 2 and len(times) == 2 and times[1] == 1
    return Repeated(x, times[0], later) if is_rows and type(times[0]) is int else None


def _reshape(call: GraphCall, later: Later, x: Any, shape: Sequence[Any]) -> Any:
    if not isinstance(x, Chosen) or x.dims == "te" or not all(type(n) is int for n in shape):
        return None
    tokens, experts = x.ids.shape[0], x.experts
    wide = (x.base.shape[-1],) if x.is_sent or x.base.ndim == 3 else (1,)
    size = math.prod((experts, tokens, *wide))
    known = math.prod(n for n in shape if n != -1)
    asked = tuple(size // max(known, 1) if n == -1 else n for n in shape)
    dims = {(experts * tokens, *wide): "flat", (experts, tokens, *wide): "et"}.get(asked)
    return None if dims is None else replace(x, dims=dims, later=later)


def _times(call: GraphCall, later: Later, a: Any, b: Any) -> Any:
    """Multiply the rows of all tokens by their scores."""
    x, rows = (a, b) if isinstance(a, Chosen) else (b, a)
    if not isinstance(x, Chosen):
        return None
    if x.is_sent:
        return _where_sent(call, later, x, (a, b), {})
    is_all = isinstance(rows, Repeated) and rows.times == x.experts and x.dims == "flat"
    if not is_all or x.fill != 0 or x.base.ndim != 2 or rows.rows.shape[0] != x.ids.shape[0]:
        return None
    each = call.apply(call.target, (ops.unsqueeze(rows.rows, 1), ops.unsqueeze(x.base, 2)), {})
    return replace(x, base=each, later=later)


def _product(call: GraphCall, later: Later, x: Any, weight: Any) -> Any:
    """Multiply the rows of each expert with its matrix, where this is."""
    is_joined = isinstance(weight, JoinedTensors) and weight.dim == 2
    if not isinstance(x, Chosen) or not (is_joined or isinstance(weight, Handle)):
        return None
    is_rows = x.dims == "et" and (x.is_sent or x.base.ndim == 3) and weight.shape[0] == x.experts
    is_split = is_rows and call.parts(weight.parts[0] if is_joined else weight) > 1
    parts = parts_for(x.ids, call.tokens()) if is_split and not x.is_sent else 1
    if not is_rows or (not x.is_sent and parts == 1):
        return None
    rows = in_one(x.base)
    if not x.is_sent:
        n = counted(x.ids, x.experts, parts)
        rows = ops.group_rows(rows, x.ids, n, call.capacity)
    product = partial(ops.grouped_mm, rows)
    base = weight.mapped(product, 3) if is_joined else product(weight)
    return replace(x, base=base, later=later, is_sent=True)


def _sum(call: GraphCall, later: Later, x: Any, dims: Sequence[int], keepdim: bool = False) -> Any:
    """Sum over the experts what comes back from those that are chosen."""
    is_sum = isinstance(x, Chosen) and x.is_sent and x.dims == "et" and [*dims] in ([0], [-3])
    return ops.ungroup_rows(in_one(x.base), x.ids) if is_sum and not keepdim else None


def _where_sent(
    call: GraphCall, later: Later, x: Chosen, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Apply an operation where the experts are; None where it is none of such rows."""
    given = [y for y in leaves((args, kwargs)) if isinstance(y, (*CHOSEN, Handle, JoinedTensors))]
    if not all(isinstance(y, Chosen) and y.ids is x.ids and y.dims == x.dims for y in given):
        return None
    if call.target in COLUMNS and (len(args) < 3 or args[2] not in (-1, 2)):
        return None
    if call.target in COLUMNS:
        args = (*args[:2], -1, *args[3:])
    try:
        base = call.apply(call.target, *bases((tuple(args), dict(kwargs)), Chosen))
    except RaggedRefusal as refusal:
        note(x.ids, f"all tokens are multiplied by all experts for {call.target}", refusal)
        return None
    if not isinstance(base, tuple | list):
        return replace(x, base=base, later=later)
    pieces = range(len(base))
    parts = [Later(partial(lambda at: later.whole()[at], n)) for n in pieces]
    return [replace(x, base=base[n], later=parts[n]) for n in pieces]


def _of_all(x: Any) -> Any:
    return x.whole() if isinstance(x, CHOSEN) else x


#: Calls that begin such values.
_FIRST = (SCATTER, "aten.repeat.default")

RULES: dict[str, Callable[..., Any]] = {
    str(operator.getitem): lambda call, later, pieces, place: pieces[place],
    SCATTER: _scattered,
    "aten.repeat.default": _repeated,
    "aten.sigmoid.default": _sigmoid,
    **dict.fromkeys(("aten.to.dtype", "aten._to_copy.default"), _cast),
    **dict.fromkeys(("aten.clone.default", "aten.contiguous.default", "aten.alias.default"), _same),
    **dict.fromkeys(("aten.transpose.int", "aten.t.default"), _turned),
    **dict.fromkeys(
        ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"), _reshape
    ),
    "aten.mul.Tensor": _times,
    PRODUCT: _product,
    "aten.sum.dim_IntList": _sum,
}
