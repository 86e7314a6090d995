"""Rows grouped by expert, of which a run counts how many are there: ragged values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import are_same
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.pointwise import clamp
from mdfuse.frontend.ops.recording import as_dtype, record, shown
from mdfuse.frontend.ops.reductions import sum


def counts(ids: Handle, experts: int, parts: int | Sequence[int] = 1) -> Handle:
    """Count the rows of each part of the tokens that go to each expert: [parts, experts].

    Args:
        ids: [t], or [t,k] for k experts of each token, integers; others than 0 to experts - 1 are
            no expert.
        experts: how many there are.
        parts: into which tokens are cut, as `torch.chunk` cuts them: the extent of the axes that
            split them, so that a rank counts its own. Or how many tokens each part has, as where
            ranks split a batch unevenly, whose rows have several tokens each.
    """
    is_whole = not (ids.dtype.is_floating_point or ids.dtype == torch.bool)
    sizes = None if isinstance(parts, int) else tuple(parts)
    count = parts if isinstance(parts, int) else len(parts)
    are_numbers = sizes is None or all(type(n) is int and n >= 0 for n in sizes)
    *_, tokens = accumulate(sizes if sizes and are_numbers else (), initial=0)
    are_tokens = sizes is None or (are_numbers and are_same(tokens, ids.shape[0]))
    if ids.ndim not in (1, 2) or not is_whole or experts < 1 or count < 1 or not are_tokens:
        raise DefinitionError(
            f"counts of {shown(ids)} with experts={experts}, parts={parts}",
            because="ids are integers, [t] or [t,k]; there is an expert, and a part; the tokens of "
            "all parts are all tokens",
            hint="scores.topk(k, -1) gives ids [t,k]; parts=2, or parts=[3, 2] of five tokens",
        )
    given = {} if sizes is None else {"sizes": sizes}
    return record("counts", ids, experts=experts, parts=count, **given)


def group_rows(
    x: Handle, ids: Handle, n: Handle, capacity: int | None = None, drop: bool = False
) -> Handle:
    """Group rows by part and expert, in the order of the tokens: [parts, experts, <=bound : n, d].

    The result is a ragged value: n of its rows are there, behind them are zeros. It may be moved by
    `set` from rows split by parts to rows split by experts.

    Args:
        x: [t,d], or [t,k,d] where each choice of a token has a row of its own.
        ids: [t] or [t,k], the experts of each token.
        n: `counts` of these ids.
        capacity: the most rows of a part for an expert, in microbatches of each of them. In a run
            that counts more, all ranks raise `CountsError` before rows are posted. None: any.
        drop: rows behind the capacity are dropped instead, and come back as zeros.
    """
    fits = x.ndim in (2, 3) and ids.ndim in (1, 2) and x.shape[0] == ids.shape[0]
    fits = fits and (x.ndim == 2 or (ids.ndim == 2 and x.shape[1] == ids.shape[1]))
    if not fits or n.ndim != 2:
        raise DefinitionError(
            f"group_rows of {shown(x)}, {shown(ids)} and {shown(n)}",
            because="x is [t,d] or [t,k,d], ids are [t] or [t,k], n is [parts,experts]",
            hint="n = counts(ids, experts=e, parts=p)",
        )
    if capacity is None and not drop:
        return record("group_rows", x, ids, n)
    if capacity is None or capacity < 0:
        raise DefinitionError(
            f"group_rows with capacity={capacity}, drop={drop}",
            because="a capacity is a number of rows from 0 on, behind which rows may be dropped",
            hint="capacity=64, or leave both out",
        )
    if drop:
        return record("group_rows", x, ids, clamp(n, None, capacity))
    return record("group_rows", x, ids, n, capacity=capacity)


def ungroup_rows(y: Handle, ids: Handle, weight: Handle | None = None) -> Handle:
    """Put rows back to their tokens, weighted, and sum those of each token: [t,d].

    Args:
        y: a ragged value, [parts, experts, <=bound : n, d], made of rows that `group_rows` grouped.
        ids: those by which they were grouped.
        weight: [t] or [t,k], as ids: of each choice; None: one.
    """
    if weight is not None and weight.shape != ids.shape:
        raise DefinitionError(
            f"ungroup_rows with {shown(ids)} and the weight {shown(weight)}",
            because="each choice of a token has a weight",
            hint="scores.topk(k, -1) gives weights and ids",
        )
    rows = record("ungroup_rows", y, ids)
    if weight is not None:
        each = record("unsqueeze", weight, dims=(1, 2)[weight.ndim - 1 :])
        rows = rows * as_dtype(each, rows.dtype)
    return record("squeeze", rows, dims=(1,)) if ids.ndim == 1 else sum(rows, 1)
