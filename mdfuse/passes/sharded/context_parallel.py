"""Choose how attention whose positions are split is computed (`Options.context`).

    %y: f32[1,8,64,4] (cp=S2) = scaled_dot_product_attention(%q, %k, %v, is_causal=True)
->                                                              # "gather": as it stands, whose
                                                                # keys and values are gathered
    %a: f32[1,8,64,4] (cp=S1)! = set(%q)                        # "heads": likewise %k, %v
    %b: f32[1,8,64,4] (cp=S1) = scaled_dot_product_attention(%a, …)
    %y: f32[1,8,64,4] (cp=S2)! = set(%b)
->                                                              # "ring": see `ring.py`

The form is chosen by the bytes that arrive at a rank and by the pairs of rows and keys that the
rank with most of them computes. A gradient takes the form of its attention, and reads its copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mdfuse.errors import LayoutError
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.layouts.layout import Layout
from mdfuse.passes.propagate_layouts import anew
from mdfuse.passes.rewriting import Maker, Rule, rewritten
from mdfuse.passes.sharded import context_prices, join_parts, ring, window_halos
from mdfuse.passes.sharded.attention_masks import BACKWARD, FORWARD, Masks, parts
from mdfuse.passes.sharded.split_attention import HEADS, ROWS, SplitAttention, splits

name = "context"


def run(fusion: Fusion, form: str = "auto", no_ring: str = "") -> Fusion:
    """Return the fusion with attention in the forms that take the least time.

    Args:
        fusion: with layouts.
        form: of all of them; "auto": that which takes the least.
        no_ring: the reason why keys cannot travel in this program; "" where they can.
    """
    chosen = {s.expr.outputs[0]: (s, *_form(s, form, no_ring)) for s in splits(fusion)}
    notes = [note for _, _, note in chosen.values()]
    masks = Masks(fusion)
    rules = dict(r for s, how, _ in chosen.values() for r in _RULES[how](s, masks))
    if rules:
        fusion = _rewritten(fusion, rules)
    if form != "gather":
        fusion = join_parts.run(fusion)
    return replace(fusion, notes=(*fusion.notes, *notes)) if notes else fusion


def _form(split: SplitAttention, form: str, no_ring: str) -> tuple[str, str]:
    """Return the form of an attention, and a line that says why."""
    rings = ring.because(split) or no_ring
    because = {"heads": split.because, "ring": rings}.get(form, "")
    if because:
        raise LayoutError(
            f'context="{form}" for %{split.expr.outputs[0]}, whose positions are split along '
            f"{' and '.join(split.axes)}",
            where=split.fusion.where(split.expr.outputs[0]),
            because=f"{_NEEDS[form]}, and {because}",
            hint='context="gather"' + ", or fewer ranks along the axis" * (form == "heads"),
        )
    prices = context_prices.prices(split, not rings) if split.is_usual else []
    best = context_prices.best(prices) if prices else "gather"
    chosen = best if form == "auto" else form
    return chosen, context_prices.line(split, chosen, prices, form != "auto")


#: Reasons why a whole program has no rings.
MICROBATCHES = "it is in a loop over microbatches, inside of which there are no other loops"
LEAVES = "ranks of a ring begin at different chunks, and leaves of same_bits at the same one"

#: form -> the work of a rank.
_NEEDS = {
    "heads": "each rank computes whole heads",
    "ring": "a loop brings each rank the keys of one other rank after the other",
}


# -- whole positions of some heads -----------------------------------------------------------------


@dataclass
class _Heads:
    """The copies of an attention's operands and results by heads; lives inside `run`."""

    split: SplitAttention
    masks: Masks
    copies: dict[str, str] = field(default_factory=dict)

    def copy(self, maker: Maker, by: Expr, x: str, like: str) -> str:
        """Return a copy of a value with all positions of the heads that a rank computes."""
        if x not in self.copies:
            source = x
            if like in self.split.operands[1:] and self.shares(maker, x):
                source = self._repeated(maker, by, x)
            copy = maker.op(by, "set", source)
            at = _of_dims(self.split.over_heads(like), maker.values[x])
            maker.values[copy] = replace(maker.values[copy], layout=at, is_law=True)
            self.copies[x] = copy
        return self.copies[x]

    def shares(self, maker: Maker, x: str) -> bool:
        """Return whether a key or a value, or its gradient, has heads that are to be repeated.

        The gradient reads repeated ones where none of the keys and values is wanted.
        """
        few = self.split.shape(self.split.operands[1])
        return self.split.is_shared and maker.values[x].shape[HEADS] == few[HEADS]

    def mask(self, maker: Maker, by: Expr) -> list[str]:
        """Return the mask with all rows; nothing where there is none."""
        to = self.split.over_heads(self.split.operands[0])
        return self.masks.read(maker, by, self.split, to, None)

    def _times(self, maker: Maker, x: str) -> tuple[tuple[int, ...], int]:
        heads = self.split.shape(self.split.operands[0])[HEADS]
        shape = self.split.shape(self.split.operands[1])
        return (*shape[:-2], heads // shape[HEADS]), heads

    def _repeated(self, maker: Maker, by: Expr, x: str) -> str:
        """Repeat heads for those that share them: ranks have parts of these."""
        shape, (groups, heads) = maker.values[x].shape, self._times(maker, x)
        opened = maker.op(by, "unsqueeze", x, dims=(len(shape) - 2,))
        many = maker.op(by, "expand", opened, shape=(*groups, *shape[-2:]))
        return maker.op(by, "reshape", many, shape=(*shape[:-3], heads, *shape[-2:]))

    def back(self, maker: Maker, by: Expr, x: str, old: str, layout: Layout, joins: bool) -> None:
        """Append the value that an expression had, split by positions, made of one by heads."""
        if not joins or not self.shares(maker, old):
            _placed(maker, by, x, old, layout)
            return
        whole = f"{old}.positions"
        maker.values[whole] = replace(maker.values[x], name=whole)
        _placed(maker, by, x, whole, layout)
        shape, (groups, _) = maker.values[whole].shape, self._times(maker, x)
        opened = maker.op(by, "reshape", whole, shape=(*groups, *shape[-2:]))
        expr = replace(by, op="sum", inputs=(opened,), outputs=(old,))
        maker.exprs.append(replace(expr, attrs=(("dims", (len(groups) - 1,)),)))
        maker.values[old] = replace(maker.values[old], layout=None, is_law=False, like=None)


def _of_dims(layout: Layout, value: Value) -> Layout:
    """Return a layout of a query for a value like it, or for numbers of its rows."""
    return layout.with_dims({d: d for d in range(len(value.shape))})


def _placed(maker: Maker, by: Expr, x: str, to: str, layout: Layout) -> None:
    maker.exprs.append(replace(by, op="set", inputs=(x,), outputs=(to,), attrs=()))
    old = maker.values[to]
    law = old.layout if old.is_law and old.layout is not None else layout
    maker.values[to] = replace(old, layout=law, is_law=True)


def _rewritten(fusion: Fusion, rules: Mapping[str, Rule]) -> Fusion:
    changed = [x for e in fusion.exprs if e.outputs[0] in rules for x in e.outputs]
    fusion = rewritten(fusion, rules)
    new = [n for n, v in fusion.values.items() if v.layout is None and v.is_tensor]
    return anew(fusion, [*changed, *new])


def _heads_rules(split: SplitAttention, masks: Masks) -> Iterator[tuple[str, Rule]]:
    heads = _Heads(split, masks)
    yield split.expr.outputs[0], partial(_forward, heads=heads)
    for e in split.gradients:
        yield e.outputs[0], partial(_backward, heads=heads)


def _gather_rules(split: SplitAttention, masks: Masks) -> Iterator[tuple[str, Rule]]:
    """Yield rules where the mask is made of others, or windows reach: the rest is as it stands."""
    yield from window_halos.rules(split)
    if parts(split)[0]:
        for e in (split.expr, *split.gradients):
            yield e.outputs[0], partial(_masked, split=split, masks=masks)


def _masked(maker: Maker, by: Expr, split: SplitAttention, masks: Masks) -> None:
    given = by.inputs[: FORWARD if by is split.expr else BACKWARD]
    mask = masks.read(maker, by, split, split.rows, None)
    maker.exprs.append(replace(by, inputs=(*given, *mask)))


#: form -> first result -> rule, of an attention and of its gradients.
_RULES = {"gather": _gather_rules, "heads": _heads_rules, "ring": ring.rules}


def _by_heads(maker: Maker, by: Expr, inputs: tuple[Any, ...], is_shared: bool) -> tuple[str, ...]:
    """Append the attention of some heads, or its gradient, under names of its own."""
    attrs = {**by.kwargs, "enable_gqa": False} if is_shared else by.kwargs
    outputs = []
    for x in by.outputs:
        value = replace(maker.values[x], name=f"{x}.heads", layout=None, is_law=False)
        maker.values[value.name] = replace(value, like=None, copies=())
        outputs.append(value.name)
    expr = replace(by, inputs=inputs, outputs=(*outputs,), attrs=(*attrs.items(),))
    maker.exprs.append(expr)
    return (*outputs,)


def _forward(maker: Maker, by: Expr, heads: _Heads) -> None:
    q, k, v = heads.split.operands
    moved = tuple(heads.copy(maker, by, x, x) for x in (q, k, v))
    mask = heads.mask(maker, by)
    results = _by_heads(maker, by, (*moved, *mask), heads.split.is_shared)
    heads.copies.update(zip(by.outputs, results, strict=True))
    for x, old in zip(results, by.outputs, strict=True):
        layout = _of_dims(heads.split.rows, maker.values[old])
        heads.back(maker, by, x, old, layout, joins=False)


def _backward(maker: Maker, by: Expr, heads: _Heads) -> None:
    query, *_ = operands = heads.split.operands
    likes = zip(by.reads, (*operands, query, query, query), strict=False)
    moved = [heads.copy(maker, by, x, like) for x, like in likes]
    layouts = [heads.split.fusion.layout(x) for x in operands]
    moved += heads.mask(maker, by)
    results = _by_heads(maker, by, (*moved,), heads.split.is_shared)
    for x in results[1:] if heads.split.is_shared else ():
        value, many = maker.values[x], maker.values[results[0]].shape[HEADS]
        shape = (*value.shape[:HEADS], many, *value.shape[ROWS:])
        maker.values[x] = replace(value, shape=shape)
    for n, (x, old, layout) in enumerate(zip(results, by.outputs, layouts, strict=True)):
        heads.back(maker, by, x, old, layout, joins=n > 0)
