"""Attention whose keys and values travel around the ranks that split its positions.

    %y: f32[1,8,64,4] (cp=S2), %l = attention(%q, %k, %v, is_causal=True)
->
    %a: f32[1,8,64,4] (cp=R, stream(2,4,rotate=cp))! = set(%k)              # likewise %b, of %v
    %t: f32[1,8,64,5] (cp=S2, stream(P(lse),4)) = attention_terms(%q, %a, %b, is_causal=True)
    %y: f32[1,8,64,4] (cp=S2) = slice(%t)                                   # likewise %l

One loop sends a rank's keys and values to one other rank after the other, computes what its rows
make of the shard that came, and joins that to what the rows made of others. The shard of the next
iteration arrives meanwhile, and no rank ever has more than two of them. A gradient takes the joined
results, adds up that of its rows, and sends that of each shard to the rank that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard
from mdfuse.layouts.stream import Stream
from mdfuse.passes.rewriting import Maker, Rule
from mdfuse.passes.sharded.attention_masks import BACKWARD, FORWARD, Masks
from mdfuse.passes.sharded.split_attention import HEADS, ROWS, SplitAttention
from mdfuse.passes.strategy import choose


def because(split: SplitAttention) -> str:
    """Return the reason why keys cannot travel around the ranks; "" where they can."""
    q, k, v = split.operands
    if len(split.axes) > 1:
        return f"{' and '.join(split.axes)} split the positions: a ring goes along one axis"
    if any(is_symbolic(split.shape(x)) for x in (q, k, v)):
        return "a run chooses its extents"
    lead = [split.shape(x)[:HEADS] for x in (q, k, v)]
    if min(len(split.shape(x)) for x in (q, k, v)) < 3 or any(x != lead[0] for x in lead):
        return "keys and values are those of other batches"
    (axis,) = split.axes
    places = [split.fusion.layout(x) for x in (k, v)]
    at = {layout.placement(axis) for layout in places}
    if at - {Shard(split.dim(ROWS)), Shard(split.dim(ROWS), zigzag=True)} or len(at) > 1:
        return f"{axis} does not split the positions of keys and values alike"
    if any(layout.split_axes(split.dim(ROWS)) != (axis,) for layout in places):
        return f"other axes than {axis} split the positions of keys"
    strategy = choose(split.expr, split.fusion.values)
    rows = (axis,) if strategy is None else strategy.wanted[q].split_axes(split.dim(ROWS))
    if {*rows} - {axis} and at == {Shard(split.dim(ROWS), zigzag=True)}:
        return f"{' and '.join(rows)} split the rows of its mask in zigzag order: a ring turns one"
    return ""


def rules(split: SplitAttention, masks: Masks) -> Iterator[tuple[str, Rule]]:
    """Yield first result -> rule, of an attention and of its gradients."""
    yield split.expr.outputs[0], partial(_forward, split=split, masks=masks)
    for e in split.gradients:
        yield e.outputs[0], partial(_backward, split=split, masks=masks)


def looped(fusion: Fusion) -> frozenset[str]:
    """Return the values that rings of attention compute."""
    ops = ("attention_terms", "attention_grad")
    rings = [e for e in fusion.exprs if e.op in ops and _stream(fusion, e) is not None]
    names = [(*e.outputs, *e.inputs[1:3]) for e in rings]
    names += [x.outputs for e in rings for y in e.outputs[1:] for x in fusion.consumers[y]]
    return frozenset(str(x) for each in names for x in each)


def _stream(fusion: Fusion, expr: Expr) -> Stream | None:
    stream = fusion.values[expr.outputs[0]].stream
    return stream if stream is not None and stream.rotate is not None else None


# -- the loops -------------------------------------------------------------------------------------


def _travelling(split: SplitAttention) -> Stream:
    """Return the stream of keys: a chunk is what one rank has of them."""
    (axis,) = split.axes
    layout = split.fusion.layout(split.operands[1])
    is_zigzag = layout.placement(axis) == Shard(split.dim(ROWS), zigzag=True)
    return Stream(split.dim(ROWS), layout.mesh.axis_size(axis), axis, zigzag=is_zigzag)


def _arriving(maker: Maker, by: Expr, split: SplitAttention, names: Sequence[str]) -> list[str]:
    """Append sets of keys and values, which come to each rank in turn."""
    stream, copies = _travelling(split), []
    for x, like in zip(names, split.operands[1:], strict=True):
        at = _read(split, like)
        if at != (maker.values[x].layout or split.fusion.layout(x)) or maker.values[x].expanded:
            x = maker.op(by, "set", x)  # before the loop, in which other axes change nothing
            _stated(maker, x, at, None)
            maker.values[x] = replace(maker.values[x], expanded=frozenset())
        copy = maker.op(by, "set", x)
        _stated(maker, copy, at.with_placement(str(stream.rotate), Replicate()), stream)
        copies.append(copy)
    return copies


def _read(split: SplitAttention, x: str) -> Layout:
    """Return the layout of an operand as attention reads it along the axes that do not turn.

    Heads that axes split in other places than those of the query come together.
    """
    layout, (turning,) = split.fusion.layout(x), split.axes
    strategy = choose(split.expr, split.fusion.values)
    wanted = layout if strategy is None else strategy.wanted[x]
    for axis in layout.mesh.axes:
        if axis != turning and layout.placement(axis) != wanted.placement(axis):
            layout = layout.with_placement(axis, wanted.placement(axis))
    return layout


def _stated(maker: Maker, x: str, layout: Layout | None, stream: Stream | None) -> None:
    value = maker.values[x]
    maker.values[x] = replace(value, layout=layout, is_law=layout is not None, stream=stream)


def _joined(split: SplitAttention, op: str) -> Stream:
    return replace(_travelling(split), dim=-1, op=op)


def _mask(maker: Maker, by: Expr, split: SplitAttention, masks: Masks) -> list[str]:
    at = _read(split, split.operands[0])
    return masks.read(maker, by, split, at, _travelling(split))


def _forward(maker: Maker, by: Expr, split: SplitAttention, masks: Masks) -> None:
    q, k, v = split.operands
    mask = _mask(maker, by, split, masks)
    k, v = _arriving(maker, by, split, (k, v))
    terms = maker.op(by, "attention_terms", q, k, v, *mask, **by.kwargs)
    _stated(maker, terms, None, _joined(split, "lse"))
    shape, n = maker.values[terms].shape, maker.values[by.outputs[0]].shape[-1]
    maker.cast_as(by, maker.columns(by, terms, 0, n))
    if len(by.outputs) == 2:
        sums = maker.columns(by, terms, n, n + 1)
        maker.op(by, "squeeze", sums, last=True, dims=(len(shape) - 1,))


def _backward(maker: Maker, by: Expr, split: SplitAttention, masks: Masks) -> None:
    q, k, v, *others = by.reads
    at = _read(split, split.operands[0])
    others = [_at_rows(maker, by, split, x, at) for x in others[: BACKWARD - FORWARD]]
    others += _mask(maker, by, split, masks)
    copies = _arriving(maker, by, split, (k, v))
    stream, (axis,) = _travelling(split), split.axes
    names = [_named(maker, x) for x in by.outputs]
    maker.exprs.append(replace(by, inputs=(q, *copies, *others), outputs=(*names,)))
    _stated(maker, names[0], at if at != split.rows else None, _joined(split, "sum"))
    _ended(maker, by, names[0], by.outputs[0], None, None)
    for x, old, like in zip(names[1:], by.outputs[1:], split.operands[1:], strict=True):
        at = _read(split, like)
        _stated(maker, x, at.with_placement(axis, Partial()), replace(stream, rotate=axis))
        law = maker.values[old].layout if maker.values[old].is_law else None
        if law == at or (law is None and at == split.fusion.layout(like)):
            _ended(maker, by, x, old, at, stream)
            continue
        shard = _named(maker, old)
        _ended(maker, by, x, shard, at, stream)
        _ended(maker, by, shard, old, law, None)


def _at_rows(maker: Maker, by: Expr, split: SplitAttention, x: str, at: Layout) -> str:
    """Return a value whose rows lie as those of the query: in the loop no other rows are read."""
    (axis,), layout = split.axes, maker.values[x].layout
    wanted = at.placement(axis)
    if layout is None or layout.placement(axis) in (wanted, Replicate()):
        return x
    copy = maker.op(by, "set", x)
    _stated(maker, copy, layout.with_placement(axis, wanted), None)
    return copy


def _named(maker: Maker, old: str) -> str:
    """Add a value like another one, without its layout, under a name of its own."""
    name = fresh_name(maker.values, f"{old}.ring")
    value: Value = replace(maker.values[old], name=name, layout=None, is_law=False)
    maker.values[name] = replace(value, like=None, copies=())
    return name


def _ended(
    maker: Maker, by: Expr, x: str, to: str, layout: Layout | None, stream: Stream | None
) -> None:
    """Append the set that gives a value of a loop the name that it had."""
    maker.exprs.append(replace(by, op="set", inputs=(x,), outputs=(to,), attrs=()))
    if layout is not None:
        _stated(maker, to, layout, stream)
