"""Rows grouped by part of the tokens and by expert, of which a run counts how many are there.

A ragged value is a tensor [parts, experts, bound, d] beside its counts, [parts, experts]: behind
the rows that are counted there are zeros. Tokens are cut into parts as `torch.chunk` cuts them, or
as many as `sizes` says to each, so that axes that split tokens split parts. A token has k experts:
it is k rows.

Calls take such a tensor, or the rows that are there alone: see `mdfuse.ir.packed_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from mdfuse.extents.extent import are_same
from mdfuse.ir import packed_rows
from mdfuse.ir.dims import Shape, Shapes, present
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.ir.ragged_dims import choices

Attrs = Mapping[str, Any]
Part = tuple[int, int, int]


class PartsOfTokens(TypedDict, total=False):
    """The cut of tokens into parts, and the tokens and parts that a call has.

    Attributes:
        sizes: how many tokens each part has; None: as `torch.chunk` cuts them.
        rows: (first, behind the last, all) of the tokens that are here; None: all.
        part: the same of the parts.
    """

    sizes: Sequence[int] | None
    rows: Part | None
    part: Part | None


# -- calls -----------------------------------------------------------------------------------------


def count(ids: Tensor, *, experts: int, parts: int, **cut: Unpack[PartsOfTokens]) -> Tensor:
    """Count how many rows of each part go to each expert.

    Args:
        ids: [t] or [t,k], the experts of each token; others than 0 to experts - 1 are none.
        experts: how many there are.
        parts: into which tokens are cut.
        cut: how they are cut.
    """
    groups = _size_here(parts, cut.get("part")), experts
    keys = _keys(ids, groups, parts, cut)
    ones = torch.ones_like(keys)
    zeros = ones.new_zeros(groups[0] * groups[1] + 1)
    return zeros.index_add_(0, keys, ones)[:-1].view(groups)


def group(
    x: Tensor,
    ids: Tensor,
    n: Tensor,
    at: Tensor | None = None,
    *,
    bound: int | None = None,
    capacity: int | None = None,
    **cut: Unpack[PartsOfTokens],
) -> Tensor:
    """Put the rows of each part and expert one behind the other, in the order of the tokens.

    Args:
        x: [t,d], or [t,k,d] where each choice of a token has a row.
        ids: as `count` takes them.
        n: [parts,experts], how many rows to keep.
        at: the `places` of these rows, for rows that lie one behind the other.
        bound: how many rows a part has room for; None: as many as its tokens have choices.
        capacity: of a part for an expert; the fetch of the counts refuses more.
        cut: how tokens are cut.
    """
    bound = _bound(ids.shape, n.shape, cut) if bound is None else bound
    return _put(x, ids, _places(ids, n, bound, cut), (*n.shape, bound))


def ungroup(
    y: Tensor, ids: Tensor, n: Tensor, at: Tensor | None = None, **cut: Unpack[PartsOfTokens]
) -> Tensor:
    """Return the row of each choice of each token, [t,k,d]; zeros for those that are not there."""
    return _taken(y, ids, _places(ids, n, y.shape[2], cut))


def line_up(
    x: Tensor,
    ids: Tensor,
    n: Tensor,
    at: Tensor | None = None,
    *,
    bound: int | None = None,
    capacity: int | None = None,
    **cut: Unpack[PartsOfTokens],
) -> Tensor:
    """Put the rows of each part one behind the other, by expert: [p,b,d]; see `group`."""
    bound = _bound(ids.shape, n.shape, cut) if bound is None else bound
    at = places(ids, n, **cut) if at is None else at
    return _put(x, ids, _lined_up(ids, at, (n.shape[0], bound), cut), (n.shape[0], bound))


def places(ids: Tensor, n: Tensor, **cut: Unpack[PartsOfTokens]) -> Tensor:
    """Return where each row lies among those of its part, by expert; -1 if it lies nowhere.

    The result has the shape of ids; see `group`.
    """
    keys, order = _keys_of_counts(ids, n, cut).sort(stable=True)
    at = torch.arange(keys.shape[0], device=keys.device)
    at = at - torch.searchsorted(keys, torch.arange(n.numel() + 1, device=keys.device))[keys]
    none, starts = n.new_zeros(1), (n.cumsum(1) - n).flatten()
    is_there = at < torch.cat([n.flatten(), none])[keys]
    at = torch.where(is_there, at + torch.cat([starts, none])[keys], -1)
    return torch.empty_like(at).index_copy_(0, order, at).view(ids.shape)


def put_back(
    y: Tensor, ids: Tensor, n: Tensor, at: Tensor | None = None, **cut: Unpack[PartsOfTokens]
) -> Tensor:
    """Return the row of each choice of each token, of rows that `line_up` made; see `ungroup`."""
    at = places(ids, n, **cut) if at is None else at
    return _taken(y, ids, _lined_up(ids, at, (n.shape[0], y.shape[1]), cut))


def _put(x: Tensor, ids: Tensor, at: Tensor, places: Shape) -> Tensor:
    """Put the row of each choice of each token at its place; one behind the last is dropped."""
    count, rows = ids.shape[0] * choices(ids.shape), x.flatten(0, -2)
    of = torch.arange(count, device=x.device)
    if x.ndim == 2:
        of = of.div(choices(ids.shape), rounding_mode="floor")
    taken = of.new_full((math.prod(places) + 1,), rows.shape[0]).index_copy_(0, at, of)[:-1]
    return torch.cat([rows, rows.new_zeros((1, x.shape[-1]))])[taken].view(*places, x.shape[-1])


def _taken(y: Tensor, ids: Tensor, at: Tensor) -> Tensor:
    """Take the row of each choice of each token from its place; zeros from behind the last."""
    flat = torch.cat([y.flatten(0, -2), y.new_zeros((1, y.shape[-1]))])
    return flat[at].view(ids.shape[0], choices(ids.shape), y.shape[-1])


def to_experts(x: Tensor, n: Tensor) -> Tensor:
    """Put rows that lie part by part in the order of their experts; others have places of both."""
    return packed_rows.to_experts(x, n) if x.ndim == 2 else x


def to_parts(x: Tensor, n: Tensor) -> Tensor:
    """Put rows that lie expert by expert in the order of their parts; see `to_experts`."""
    return packed_rows.to_parts(x, n) if x.ndim == 2 else x


def multiply(x: Tensor, weight: Tensor, n: Tensor, *, by_expert: bool = False) -> Tensor:
    """Multiply the rows of each expert, [p,e,b,k], with its matrix, of [e,k,n].

    Args:
        x: the rows, dense or those that are there.
        weight: the matrices.
        n: how many rows are there.
        by_expert: those that are there lie expert by expert; else part by part.
    """
    return packed_rows.multiply(x, weight, n, by_expert) if x.ndim == 2 else torch.matmul(x, weight)


def multiply_grad(x: Tensor, ct: Tensor, n: Tensor, *, by_expert: bool = False) -> Tensor:
    """Return the gradient of the matrices [e,k,n]: of each expert the product of its rows."""
    if x.ndim == 2:
        return packed_rows.multiply_grad(x, ct, n, by_expert)
    left, right = (t.transpose(0, 1).flatten(1, 2) for t in (x, ct))
    return torch.bmm(left.transpose(1, 2), right)


def total(x: Tensor, n: Tensor, *, by_expert: bool = False) -> Tensor:
    """Sum the rows of each part and expert: [p,e,b,d] -> [p,e,d]; see `multiply`."""
    return packed_rows.total(x, n, by_expert) if x.ndim == 2 else x.sum(2)


def spread(rows: Tensor, x: Tensor, n: Tensor, *, by_expert: bool = False) -> Tensor:
    """Repeat a row per part and expert, [p,e,d], for each row of x that is there.

    The result has the columns of x, or those of the rows where x has one; see `multiply`.
    """
    if x.ndim == 2:
        return packed_rows.spread(rows, x, n, by_expert)
    return mask(rows.unsqueeze(2).expand(*x.shape[:3], max(x.shape[3], rows.shape[2])), n)


def mask(x: Tensor, n: Tensor) -> Tensor:
    """Set rows to zero that are not there."""
    if x.ndim == 2:
        return x
    is_there = torch.arange(x.shape[2], device=x.device) < n.unsqueeze(2)
    return torch.where(is_there.unsqueeze(3), x, x.new_zeros(()))


def _size_here(whole: int, part: Part | None) -> int:
    return whole if part is None else part[1] - part[0]


def _keys(ids: Tensor, groups: tuple[int, int], parts: int, cut: PartsOfTokens) -> Tensor:
    """Return which of the groups here each row belongs to, [t*k]; the last for those elsewhere."""
    ids = (ids if ids.ndim == 2 else ids.unsqueeze(1)).long()
    is_here = (ids >= 0) & (ids < groups[1])
    is_one = cut.get("rows") is not None and groups[0] == 1
    if parts == 1 or is_one:  # a rank has the tokens of its parts
        return torch.where(is_here, ids, groups[1]).flatten()
    at = _parts_here(ids, parts, cut).unsqueeze(1)
    is_here = is_here & (at >= 0) & (at < groups[0])
    return torch.where(is_here, at * groups[1] + ids, groups[0] * groups[1]).flatten()


def _keys_of_counts(ids: Tensor, n: Tensor, cut: PartsOfTokens) -> Tensor:
    """Return `_keys` for the groups that have counts."""
    count, experts = n.shape
    return _keys(ids, (count, experts), _extent(count, cut.get("part")), cut)


def _extent(count: int, span: Part | None) -> int:
    """Return how many tokens or parts there are in all, of which some may be here."""
    return count if span is None else span[2]


def _parts_here(ids: Tensor, parts: int, cut: PartsOfTokens) -> Tensor:
    """Return to which of the parts here each token belongs; to none below 0 or behind the last."""
    sizes, rows, part = cut.get("sizes"), cut.get("rows"), cut.get("part")
    at = torch.arange(ids.shape[0], device=ids.device).add(rows[0] if rows else 0)
    if sizes is None:
        tokens = _extent(ids.shape[0], rows)
        at = at.div(max(-(-tokens // parts), 1), rounding_mode="floor")
    elif behind := [at >= end for end in accumulate(sizes)]:
        at = torch.stack(behind).sum(0)
    return at - (part[0] if part else 0)


def _places(ids: Tensor, n: Tensor, bound: int, cut: PartsOfTokens) -> Tensor:
    """Return where each row lies among all places, [t*k]; behind the last if it lies nowhere.

    Rows of one part and expert lie in the order of the tokens, so in that of a stable sort.
    """
    keys = _keys_of_counts(ids, n, cut)
    in_order, order = keys.sort(stable=True)
    groups = torch.arange(n.numel() + 1, device=keys.device)
    starts = torch.searchsorted(in_order, groups)
    places = torch.arange(keys.shape[0], device=keys.device) - starts[in_order]
    places = torch.empty_like(places).index_copy_(0, order, places)
    limits = torch.cat([n.flatten().clamp(max=bound), n.new_zeros(1)])
    return torch.where(places < limits[keys], keys * bound + places, n.numel() * bound)


def _lined_up(ids: Tensor, at: Tensor, size: tuple[int, int], cut: PartsOfTokens) -> Tensor:
    """Return where each row lies where the rows of a part lie one behind the other, [t*k].

    Args:
        ids: see `count`; likewise cut.
        at: see `places`.
        size: how many parts there are, and how many rows each has room for.
    """
    (parts, bound), k = size, choices(ids.shape)
    nowhere, at = parts * bound, at.flatten()
    if parts == 1:
        return torch.where((at >= 0) & (at < bound), at, nowhere)
    each = _parts_here(ids, _extent(parts, cut.get("part")), cut).repeat_interleave(k)
    is_there = (at >= 0) & (at < bound) & (each >= 0) & (each < parts)
    return torch.where(is_there, at + each * bound, nowhere)


def _bound(ids: Shape, n: Shape, cut: PartsOfTokens | Attrs) -> int:
    """Return the number of rows of a part, all of which may go to one expert."""
    sizes: Sequence[int] | None = cut.get("sizes")
    if sizes is not None:
        return max(sizes, default=0) * choices(ids)
    tokens, parts = _extent(ids[0], cut.get("rows")), _extent(n[0], cut.get("part"))
    return -(-tokens // max(parts, 1)) * choices(ids)


# -- shapes ----------------------------------------------------------------------------------------


def _given(shapes: Shapes, *ndims: tuple[int, ...]) -> list[Shape]:
    """Return the shapes of operands, each with one of some numbers of dims."""
    given = present(shapes)
    if len(given) != len(ndims) or any(len(s) not in n for s, n in zip(given, ndims, strict=True)):
        raise ValueError(f"operands of the shapes {', '.join(map(str, shapes))}")
    return given


def _alike(*pairs: tuple[int, int]) -> None:
    if not all(are_same(a, b) for a, b in pairs):
        raise ValueError("extents that differ: " + ", ".join(f"{a} and {b}" for a, b in pairs))


def shape_of_count(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [parts, experts], or those of one rank."""
    (ids,) = _given(shapes, (1, 2))
    _check_sizes(ids[0], attrs["parts"], attrs)
    whole = (attrs["parts"], attrs.get("part")), (attrs["experts"], None)
    return tuple(_size_here(n, part) for n, part in whole)


def _check_sizes(tokens: int, parts: int, attrs: Attrs) -> None:
    """Raise ValueError unless the tokens of all parts are all tokens."""
    sizes = attrs.get("sizes")
    if sizes is None:
        return
    tokens, parts = _extent(tokens, attrs.get("rows")), _extent(parts, attrs.get("part"))
    if len(sizes) != parts or not are_same(sum(sizes), tokens):
        raise ValueError(f"sizes of {len(sizes)} parts, {sum(sizes)} tokens together")


def _check_places(shapes: Shapes, ids: Shape) -> None:
    """Raise ValueError unless places, if they are given, are those of all ids."""
    for at in shapes[3:]:
        _alike(*zip(at or (), ids, strict=True))


def shape_of_places(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the ids."""
    ids, n = _given(shapes, (1, 2), (2,))
    _check_sizes(ids[0], n[0], attrs)
    return ids


def shape_of_group(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [parts, experts, bound, d]."""
    x, ids, n = _given(shapes[:3], (2, 3), (1, 2), (2,))
    _check_places(shapes, ids)
    _alike((x[0], ids[0]), *([(x[1], ids[1])] if len(x) == 3 else []))
    _check_sizes(ids[0], n[0], attrs)
    most = _bound(ids, n, attrs)
    bound = attrs.get("bound", most)
    if "rows" not in attrs and bound < most:  # a rank's tokens may be a chunk of a part's
        raise ValueError(f"room for {bound} rows of a part, which may have {most}")
    return (*n, bound, x[-1])


def shape_of_line_up(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [parts, bound, d]."""
    parts, _, bound, d = shape_of_group(shapes, attrs)
    return (parts, bound, d)


def shape_of_put_back(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [t, k, d]."""
    y, ids, n = _given(shapes[:3], (3,), (1, 2), (2,))
    _check_places(shapes, ids)
    _alike((y[0], n[0]))
    _check_sizes(ids[0], n[0], attrs)
    return (ids[0], choices(ids), y[2])


def shape_of_ungroup(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [t, k, d]."""
    y, ids, n = _given(shapes[:3], (4,), (1, 2), (2,))
    _check_places(shapes, ids)
    _alike(*zip(y[:2], n, strict=True))
    _check_sizes(ids[0], n[0], attrs)
    return (ids[0], choices(ids), y[3])


def shape_of_multiply(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [p, e, bound, n]."""
    x, weight, n = _given(shapes, (2, 4), (3,), (2,))
    if len(x) == 2:
        _alike((x[1], weight[1]), (weight[0], n[1]))
        return (x[0], weight[2])
    _alike((x[1], weight[0]), (x[3], weight[1]), *zip(x[:2], n, strict=True))
    return (*x[:3], weight[2])


def shape_of_multiply_grad(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [e, k, n]."""
    x, ct, n = _given(shapes, (2, 4), (2, 4), (2,))
    if len(x) == 2:
        _alike((x[0], ct[0]))
        return (n[1], x[1], ct[1])
    _alike(*zip(x[:3], ct[:3], strict=True), *zip(x[:2], n, strict=True))
    return (x[1], x[3], ct[3])


def shape_of_total(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [p, e, d]."""
    x, n = _given(shapes, (2, 4), (2,))
    if len(x) == 4:
        _alike(*zip(x[:2], n, strict=True))
    return (*n, x[-1])


def shape_of_spread(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of x, with the columns of the first operand where x has one."""
    rows, x, n = _given(shapes, (3,), (2, 4), (2,))
    wide = rows[2] if are_same(x[-1], 1) else x[-1]
    for a, b in zip(rows, (*n, wide), strict=True):
        if not are_same(a, 1):
            _alike((a, b))
    if len(x) == 4:
        _alike(*zip(x[:2], n, strict=True))
    return (*x[:-1], wide)


def shape_of_mask(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of x."""
    x, n = _given(shapes, (2, 4), (2,))
    if len(x) == 4:
        _alike(*zip(x[:2], n, strict=True))
    return x


# -- one rank -------------------------------------------------------------------------------------


def local_groups(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the tokens and the parts that this rank has."""
    parts = (*part.operands, part.out)
    ids, counts = parts[:2] if len(parts) < 4 else parts[1:3]
    assert ids is not None and counts is not None
    if ids.has_all(0) and counts.has_all(0):
        return attrs
    return {**attrs, "rows": ids.ends(0), "part": counts.ends(0)}


def local_rows(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add, besides, the most rows of a part in a chunk of them."""
    attrs, (begin, stop) = local_groups(attrs, part), part.out.box[-2]
    return attrs if stop - begin == part.out.shape[-2] else {**attrs, "bound": stop - begin}


def whole_rows(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """State the room of all rows of a part, where it is not for as many as there may be."""
    if not attrs:
        return attrs
    bound, (_, ids, n) = part.out.shape[-2], (x.shape for x in part.operands[:3] if x is not None)
    others = {name: value for name, value in attrs.items() if name != "bound"}
    most = _bound(ids, n, {"sizes": attrs.get("sizes")})
    return others if bound == most else {**others, "bound": bound}
