"""Attention reads the numbers of documents packed into rows, where its mask compares these.

    %m: bool[1,64,64] = eq(%a, %b)             # %a: i64[1,64,1], %b: i64[1,1,64]
    %n: bool[1,1,64,64] = unsqueeze(%m, dims=[1])
    %c: bool[1,1,64,64] = bitwise_and(%n, %d)  # %d: ge(arange(64) as rows, arange(64))
    %y = attention(%q, %k, %v, %c)
->
    %e: i64[1,1,64] = squeeze(unsqueeze(%a, dims=[1]), dims=[3])
    %f: i64[1,1,64] = squeeze(unsqueeze(%b, dims=[1]), dims=[2])
    %y = attention(%q, %k, %v, %e, %f, is_causal=True)

So no mask is in memory, and kernels of GPUs leave out blocks of rows and keys whose documents do
not meet. Any other mask stays one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from mdfuse.extents.extent import are_same
from mdfuse.ir.documents import has_kernels
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.passes.later_keys import NOT_BEFORE, hides_later
from mdfuse.passes.rewriting import Maker, rewritten
from mdfuse.passes.sharded.attention_masks import BACKWARD, FORWARD
from mdfuse.passes.sharded.split_attention import ATTENTIONS

name = "read_documents"

#: op -> its operand that is a mask.
_AT = {**dict.fromkeys(ATTENTIONS, FORWARD), "attention_grad": BACKWARD}

#: Dims that a mask has behind what it is made of, counted from the last one; of each view.
_Opened = tuple[tuple[int, ...], ...]


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with numbers of documents in the place of masks that compare them.

    Args:
        fusion: without layouts but those that are stated.
    """
    masks = _Masks(fusion)
    readers = [e for e in fusion.exprs if masks.has_documents(e)]
    if not readers:
        return fusion
    fusion = rewritten(fusion, {e.outputs[0]: masks.read for e in readers})
    attentions = [e for e in readers if e.op in ATTENTIONS]
    by_kernels = [has_kernels(*_heads(fusion, e)) for e in attentions]
    lines = [
        _line([e for e, has in zip(attentions, by_kernels, strict=True) if has is some], some)
        for some in sorted({*by_kernels})
    ]
    return replace(fusion, notes=(*fusion.notes, *lines))


def _heads(fusion: Fusion, e: Expr) -> tuple[torch.dtype, int, int]:
    """Return the dtype of an attention, and the features of its keys and values."""
    _, k, v = (fusion.values[x] for x in e.reads[:3])
    return k.dtype, k.shape[-1], v.shape[-1]


def _line(attentions: Sequence[Expr], by_kernels: bool) -> str:
    """Return a line of a report about attentions."""
    first, others = attentions[0], len(attentions) - 1
    where = f" ({first.source})" if first.source else ""
    name = f"attention %{first.outputs[0]}{where}" + f", and {others} more" * (others > 0)
    masks = "masks of a few rows each are made of these, and nothing is left out"
    how = f"on GPUs kernels leave out blocks of other documents; elsewhere {masks}"
    return f"{name}: numbers of documents in the place of a mask: {how if by_kernels else masks}"


@dataclass(frozen=True, slots=True)
class _Documents:
    """Numbers of documents that a mask compares.

    Attributes:
        rows, keys: the numbers of their documents.
        opened: the dims that the mask has besides.
        is_causal: whether it hides later keys, too.
    """

    rows: str
    keys: str
    opened: _Opened
    is_causal: bool


@dataclass
class _Masks:
    """The masks of a fusion that compare numbers of documents; it lives inside one call of `run`.

    Attributes:
        fusion: the fusion.
        known: mask -> what it compares; None: something else.
        views: mask -> the numbers of rows and of keys, as attention reads them.
    """

    fusion: Fusion
    known: dict[str, _Documents | None] = field(default_factory=dict)
    views: dict[str, list[str]] = field(default_factory=dict)

    def has_documents(self, e: Expr) -> bool:
        """Return whether the mask of an attention, or of its gradient, compares documents."""
        at, values = _AT.get(e.op), self.fusion.values
        mask = e.inputs[at] if at is not None and len(e.inputs) == at + 1 else None
        if not isinstance(mask, str):
            return False
        if mask not in self.known:
            self.known[mask] = _compared(self.fusion, mask)
        known = self.known[mask]
        is_placed = bool(e.kwargs.get("q_offset") or e.kwargs.get("k_offset"))
        if known is None or (known.is_causal and is_placed):
            return False
        q, k = (values[x].shape for x in e.reads[:2])
        rows, keys = values[known.rows].shape[-2], values[known.keys].shape[-1]
        return are_same(rows, q[-2]) and are_same(keys, k[-2])

    def read(self, maker: Maker, by: Expr) -> None:
        """Append an attention, or its gradient, that reads numbers."""
        *given, mask = by.inputs
        known = self.known[str(mask)]
        assert known is not None
        if mask not in self.views:
            ends = (known.rows, -1), (known.keys, -2)
            self.views[str(mask)] = [_opened(maker, by, x, known.opened, d) for x, d in ends]
        attrs = by.kwargs | ({"is_causal": True} if known.is_causal else {})
        inputs = (*given, *self.views[str(mask)])
        maker.exprs.append(replace(by, inputs=inputs, attrs=(*attrs.items(),)))


def _opened(maker: Maker, by: Expr, x: str, opened: _Opened, dim: int) -> str:
    """Append views with the dims of a mask but one; those before all that are there go without."""
    for dims in opened:
        for d in sorted(dims, reverse=True):
            at = len(maker.values[x].shape) + 1 + d
            x = maker.op(by, "unsqueeze", x, dims=(at,)) if at >= 0 else x
    shape = maker.values[x].shape
    return maker.op(by, "squeeze", x, dims=(len(shape) + dim,)) if len(shape) >= -dim else x


def _compared(fusion: Fusion, mask: str) -> _Documents | None:
    terms = [*_terms(fusion, mask, ())]
    equal = [(e, opened) for e, opened in terms if e is not None and e.op == "eq"]
    sides = _sides(fusion, equal[0][0]) if len(equal) == 1 else None
    if sides is None:
        return None
    ((numbers, opened),) = equal
    others = [(e, at) for e, at in terms if e is not numbers]
    if not all(e is not None and hides_later(fusion, e, *sides, at == opened) for e, at in others):
        return None
    return _Documents(*sides, opened, bool(others))


def _terms(fusion: Fusion, x: object, opened: _Opened) -> Iterator[tuple[Expr | None, _Opened]]:
    """Yield the comparisons that all hold where a mask does; None for anything else."""
    e = fusion.producers.get(str(x))
    if e is None or not _is_mask(fusion.values[e.outputs[0]]):
        yield None, ()
    elif e.op in ("bitwise_and", "logical_and"):
        for y in e.inputs:
            yield from _terms(fusion, y, opened)
    elif e.op == "full" and e.inputs[0] is True:
        return
    elif e.op == "expand" and _keeps_ends(fusion, e):
        yield from _terms(fusion, e.reads[0], opened)
    elif e.op == "unsqueeze":
        n = len(fusion.values[e.output].shape)
        dims = tuple(d % n - n for d in e.kwargs["dims"])
        yield from _terms(fusion, e.reads[0], (dims, *opened)) if max(dims) < -2 else [(None, ())]
    else:
        yield e if e.op == "eq" or e.op in NOT_BEFORE else None, opened


def _is_mask(value: Value) -> bool:
    """Return whether a value is one of bools of which nobody says where it lies."""
    is_free = value.layout is None and value.like is None and value.stream is None
    return is_free and value.dtype == torch.bool


def _keeps_ends(fusion: Fusion, e: Expr) -> bool:
    before, after = (fusion.values[x].shape for x in (e.reads[0], e.output))
    pairs = zip(before[-2:], after[-2:], strict=False)
    return len(before) > 1 and all(are_same(a, b) for a, b in pairs)


def _sides(fusion: Fusion, e: Expr) -> tuple[str, str] | None:
    """Return the operands of a comparison that are integers of rows and of columns; else None."""
    if len(e.reads) != 2:
        return None
    for rows, keys in (e.reads, e.reads[::-1]):
        a, b = (fusion.values[x] for x in (rows, keys))
        is_whole = not any(x.dtype.is_floating_point or x.dtype.is_complex for x in (a, b))
        is_free = all(x.is_tensor and x.stream is None for x in (a, b))
        is_row = len(a.shape) > 1 and are_same(a.shape[-1], 1)
        is_column = len(b.shape) == 1 or (len(b.shape) > 1 and are_same(b.shape[-2], 1))
        if is_whole and is_free and is_row and is_column:
            return rows, keys
    return None
