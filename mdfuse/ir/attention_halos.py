"""Gradients of attention with a window whose positions are split: keys' gradients come in halos.

    %b, %c, %dq, %e, %f = attention_halo_grad(%q, %k, %v, %y, %l, %ct, …, parts=4, chunk=6, halo=4)
    %dk = add_halos(%e, %b, chunk=6)                                             # %dv of %f, %c

%e: f32[1,2,23,4] (cp=S2) is what the rows of a rank mean for its own keys, and %b: f32[4,1,2,4,4]
(cp=S0) what they mean for the four keys before these, which other ranks have and add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir import shapes as known
from mdfuse.ir.attention import attend_grad
from mdfuse.ir.attention_dims import attended
from mdfuse.ir.dims import DimMap, Shape, Shapes
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.ir.visible import Run
from mdfuse.layouts.halo import Reach

Attrs = Mapping[str, Any]


def attend_grad_in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    ct: Tensor,
    *,
    parts: int,
    chunk: int,
    halo: int,
    rows: Sequence[Run] | None = None,
    keys: Sequence[Run] | None = None,
    **how: Any,
) -> tuple[Tensor, ...]:
    """Compute `attend_grad`, where keys before a part of the rows get gradients of their own.

    Args:
        q, k, v, out, sums, ct, rows, keys, how: as `attend_grad` takes them; the rows are one run.
        parts: how many parts of the rows are here; none of them is empty.
        chunk: the rows of a part; the last one may have fewer.
        halo: how many keys before a part its rows may see.

    Returns:
        what each part means for the keys before it, for k and v: [parts, …, halo, features]; then
        the gradient of q, and those of k and v without these.
    """
    rows, keys = (x or ((0, like.shape[-2]),) for x, like in ((rows, q), (keys, k)))
    ((start, stop),), ((first, _),) = rows, keys
    before = [x.new_zeros((parts, *x.shape[:-2], halo, x.shape[-1])) for x in (k, v)]
    grads = [x.new_zeros((*x.shape[:-2], stop - start, x.shape[-1])) for x in (q, k, v)]
    for i, a in enumerate(range(start, stop, chunk)[:parts] if q.device.type != "meta" else ()):
        b, low = min(a + chunk, stop), max(a - halo, first)
        of_q, of_out, of_sums, of_ct = (
            x.narrow(sums.ndim - 1, a - start, b - a) for x in (q, out, sums, ct)
        )
        of_k, of_v = (x.narrow(-2, low - first, b - low) for x in (k, v))
        placed: dict[str, Any] = {"rows": ((a, b),), "keys": ((low, b),), **how}
        dq, *others = attend_grad(of_q, of_k, of_v, of_out, of_sums, of_ct, **placed)
        grads[0].narrow(-2, a - start, b - a).copy_(dq)
        for whole, ahead, x in zip(grads[1:], before, others, strict=True):
            whole.narrow(-2, a - start, b - a).copy_(x.narrow(-2, a - low, b - a))
            ahead[i].narrow(-2, halo - (a - low), a - low).copy_(x.narrow(-2, 0, a - low))
    return (*before, *grads)


def grad_shapes(shapes: Shapes, attrs: Attrs) -> tuple[Shape, ...]:
    """Return the shapes of the results of `attend_grad_in_parts`."""
    q, k, v = known.attention_grad(shapes, attrs)
    parts, halo = attrs["parts"], attrs["halo"]
    before = [(parts, *x[:-2], halo, x[-1]) for x in (k, v)]
    return (*before, q, (*k[:-2], q[-2], k[-1]), (*v[:-2], q[-2], v[-1]))


def grad_labels(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label the rows of all: a rank has one part of them, and the keys that their windows reach."""
    q, k, v = shapes[:3]
    assert q is not None and k is not None and v is not None
    of = attended((q, k, v), (*q[:-1], v[-1]), attrs)
    (of_q, of_k, of_v), (out, sums) = of.operands, of.results
    rows = sums[-1]
    before = tuple((rows, *x[:-2], None, None) for x in (of_k, of_v))

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        return _is_part(sizes, attrs["chunk"], q[-2]) if label == rows else of.fits(label, sizes)

    first = sums if shapes[3] is not None and len(shapes[3]) == len(sums) else out
    given = of_q, of_k, of_v, first, sums, out
    return replace(of, operands=given, results=(*before, of_q, of_k, of_v), fits=fits)


def _is_part(sizes: Sequence[int], chunk: int, rows: int) -> bool:
    """Return whether axes of these sizes split rows in chunks of so many."""
    n = math.prod(sizes)
    return -(-rows // n) == chunk and (len(sizes) == 1 or rows % n == 0)


# -- what is added ---------------------------------------------------------------------------------


def add_halos(
    x: Tensor, *blocks: Tensor, chunk: int, starts: Sequence[int] | None = None
) -> Tensor:
    """Add to the last rows of each part what later parts mean for them.

    Args:
        x: […,rows,features]
        blocks: for each of the next parts [parts,…,n,features], of the last n rows of a part.
        chunk: the rows of a part; one that has a later part has so many.
        starts: the part where x begins, and those where blocks do; None: the first one.

    >>> x, block = torch.zeros(5, 1), torch.tensor([[[7.0]], [[1.0]], [[2.0]]])
    >>> add_halos(x, block, chunk=2).flatten().tolist()
    [0.0, 1.0, 0.0, 2.0, 0.0]
    """
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    first, *others = starts or (0,) * (len(blocks) + 1)
    for ahead, (block, start) in enumerate(zip(blocks, others, strict=True), 1):
        n = block.shape[-2]
        for i in range(block.shape[0]):
            at = (start + i - ahead - first + 1) * chunk - n
            if at >= 0 and at + n <= x.shape[-2]:
                total.narrow(-2, at, n).add_(block[i])
    return total.to(x.dtype)


def halo_shape(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the first operand, to whose rows others are added."""
    x, *blocks = (s for s in shapes if s is not None)
    for block in blocks:
        if (*block[1:-2], block[-1]) != (*x[:-2], x[-1]) or block[-2] > attrs["chunk"]:
            raise ValueError(f"{block} beside {x} in parts of {attrs['chunk']} rows")
    return x


def halo_labels(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label rows, of which a rank has a part, and reads the blocks of later parts."""
    n, rows, chunk = len(result), len(result) - 2, attrs["chunk"]

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        return label != rows or _is_part(sizes, chunk, result[-2])

    def reach(ahead: int) -> Reach:
        at = ahead * chunk
        return Reach(of=result[-2], up=1, down=chunk, first=at, last=at + chunk)

    return DimMap(
        operands=(tuple(range(n)), *((rows, *range(rows), None, n - 1) for _ in shapes[1:])),
        results=(tuple(range(n)),),
        fits=fits,
        reaches={(at, 0): reach(at) for at in range(1, len(shapes))},
        plain=frozenset({rows}),
    )


def local_halos(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which part is here, and from which one on the blocks are those of later parts."""
    blocks = [part[i] for i in range(1, len(part.operands))]
    if all(x.has_all(0) for x in blocks):
        return attrs
    firsts = (x.box[0][0] for x in blocks)
    return {**attrs, "starts": (part.out.box[-2][0] // attrs["chunk"], *firsts)}
