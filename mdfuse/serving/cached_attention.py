"""Attention of a step: each slot's token, and a chunk of one slot, over rows of caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.serving.shape import StepShape

#: The name of `attend` in transformers' table of attention functions.
NAME = "mdfuse"


class Places:
    """Facts of a step that attention reads besides queries.

    Attributes:
        attended: the layers whose caches were read.
    """

    def __init__(
        self, shape: StepShape, caches: Any, positions: Tensor, table: Tensor, slot: Tensor
    ) -> None:
        self.shape, self.caches, self.table, self.slot = shape, caches, table, slot
        self.attended: set[int] = set()
        n = shape.slots
        #: positions of queries: [slots, 1, 1, 1], [1, 1, chunk, 1]
        self._queries = positions[:n].view(n, 1, 1, 1), positions[n:].view(1, 1, -1, 1)
        self._masks: dict[Seen, tuple[Tensor, Tensor]] = {}

    def masks(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """The positions that queries see: [slots, 1, 1, positions], [1, 1, chunk, positions]."""
        if seen not in self._masks:
            keys = torch.arange(self.shape.positions, device=self.table.device)
            one, many = (seen.rule(0, 0, at, keys) for at in self._queries)
            self._masks[seen] = one, many
        return self._masks[seen]

    def all_slots(self, name: str) -> Tensor:
        """A cache as [slots, heads, positions, features]."""
        x: Tensor = getattr(self.caches, name)
        if self.shape.pages:
            return self._pages(x, self.table)
        return self._by_positions(x).permute(1, 2, 0, 3)

    def one_slot(self, name: str) -> Tensor:
        """A cache of the chunk's slot as [1, heads, positions, features]."""
        x: Tensor = getattr(self.caches, name)
        if self.shape.pages:
            return self._pages(x, self.table.index_select(0, self.slot))
        return self._by_positions(x).index_select(1, self.slot).permute(1, 2, 0, 3)

    def _by_positions(self, x: Tensor) -> Tensor:
        return x.view(self.shape.positions, self.shape.slots, *x.shape[1:])

    def _pages(self, x: Tensor, table: Tensor) -> Tensor:
        s = self.shape
        pages = x.view(s.pages, s.page_size, *x.shape[1:]).index_select(0, table.flatten())
        return pages.view(table.shape[0], s.positions, *x.shape[1:]).transpose(1, 2)


class Written:
    """Part of what models of transformers ask a cache for, whatever it keeps.

    Attributes:
        written: layer -> the keys and values that it wrote in this step.
    """

    def __init__(self) -> None:
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def get_query_offset(self, *_: Any) -> int:
        """The place of the first query, which masks are asked for; `Seen` knows positions."""
        return 0

    def get_mask_sizes(self, length: int, *_: Any) -> tuple[int, int]:
        """The number of keys that masks are asked for, and the place of the first one."""
        return length, 0


class Noting(Written):
    """Stands for a cache in a forward that writes none: it notes the types of what would be.

    Attributes:
        types: name of a cache -> heads, features, dtype.
        attended: the layers whose caches would be read.
    """

    shape = None

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, tuple[int, int, torch.dtype]] = {}
        self.caches, self.attended = self, set[int]()

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Note the types of the keys and values of a layer."""
        for c, x in (("k", k), ("v", v)):
            self.types[f"{c}{layer}"] = (x.shape[1], x.shape[3], x.dtype)
        self.written[layer] = k, v
        return k, v


_places: ContextVar[Places | Noting] = ContextVar("places")


@contextmanager
def attending(places: Places | Noting) -> Iterator[None]:
    """Let `attend` read these places meanwhile; with `Noting` it attends to nothing."""
    token = _places.set(places)
    try:
        yield
    finally:
        _places.reset(token)


def register() -> None:
    """Add `attend` to transformers' table, and what takes the place of its masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _seen)


@dataclass(frozen=True, eq=False)
class Seen:
    """Takes the place of a mask: which keys a query sees, by the positions of both.

    Attributes:
        rule: (batch, head, position of a query, position of a key) -> bool, as transformers has it.
    """

    rule: Callable[[int, int, Tensor, Tensor], Tensor]


def _seen(*, mask_function: Any, attention_mask: Tensor | None = None, **_: Any) -> Seen:
    """Return what stands for a mask of transformers.

    Raises:
        DefinitionError: it hides tokens besides, as padding is hidden.
    """
    if attention_mask is not None:
        raise _other_mask("the model", "it hides some tokens of a text besides")
    return Seen(mask_function)


@cache
def _causal(window: int | None) -> Seen:
    def rule(batch: int, head: int, at: Tensor, keys: Tensor) -> Tensor:
        seen = keys <= at
        return seen if window is None else seen & (keys > at - window)

    return Seen(rule)


def _other_mask(name: str, because: str) -> DefinitionError:
    hint = "generate() serves models whose masks follow from positions alone"
    return DefinitionError(f"a mask of {name}", because=because, hint=hint)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from query, [1, heads, tokens, features], to the caches of a layer.

    Args:
        s_aux: a logit for each head that takes part in the softmax, and brings no value.

    Returns:
        [1, tokens, heads, features].
    """
    places, scale = _places.get(), query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = _layer_of(module, places.caches.written, (key, value))
    places.attended.add(layer)
    if not isinstance(attention_mask, Seen | None):
        raise _other_mask(type(module).__name__, "it computes a mask of its own")
    if isinstance(places, Noting):
        return query[..., :1].expand(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None
    n, how = places.shape.slots, (scale, softcap, s_aux, places.shape)
    if attention_mask is None:
        attention_mask = _causal(sliding_window)
    masks = places.masks(attention_mask)
    one = _attention(
        query[0, :, :n].transpose(0, 1).unsqueeze(2),
        places.all_slots(f"k{layer}"), places.all_slots(f"v{layer}"), masks[0], *how,
    ).squeeze(2)  # fmt: skip
    if not places.shape.chunk:
        return one[None], None
    many = _attention(
        query[:, :, n:],
        places.one_slot(f"k{layer}"), places.one_slot(f"v{layer}"), masks[1], *how,
    )[0].transpose(0, 1)  # fmt: skip
    return torch.cat((one, many))[None], None


def _layer_of(
    module: Any, written: Mapping[int, tuple[Tensor, Tensor]], read: tuple[Tensor, Tensor]
) -> int:
    """Return the layer that wrote what a layer attends to: itself, or one whose it shares.

    Raises:
        DefinitionError: no layer wrote it.
    """
    for layer, pair in written.items():
        if all(a is b for a, b in zip(pair, read, strict=True)):
            return layer
    raise DefinitionError(
        f"a cache for {type(module).__name__}",
        because="it attends to keys and values other than those that were written into caches",
        hint="generate() serves layers that keep the keys and values that they attend to",
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    shape: StepShape,
) -> Tensor:
    """Attention of q, [batch, heads, n, features], to k and v of as many or fewer heads."""
    if not shape.is_grouped:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    batch, heads, n, _ = q.shape
    groups = heads // k.shape[1]  # queries of one head of keys: rows of one product
    q = q.reshape(batch, k.shape[1], groups * n, -1)
    if n > 1 and groups > 1:
        mask = mask.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
    if softcap is None and sinks is None:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return y.reshape(batch, heads, n, -1)
    scores = (q @ k.mT).float() * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, k.shape[1], groups, 1, 1).expand(batch, -1, -1, n, 1)
        scores = torch.cat((scores, sink.flatten(2, 3)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).reshape(batch, heads, n, -1)
