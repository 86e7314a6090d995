"""Sizes of an engine's step, and the integers that a step reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a step: one token of each slot behind `chunk` tokens before that of one slot.

    Attributes:
        slots: how many requests are computed at once.
        chunk: how many tokens of one request a step takes besides; 0: none.
        context: the most tokens of a request, prompt included.
        pages: how many pages there are; the first one is for slots without a request. 0: each slot
            has `context` rows of the caches.
        page_size: positions of a page.
        parts_of_positions: how many ranks share the positions of a cache.
        is_grouped: whether queries of one head of keys are rows of one product, which no axis that
            splits heads of queries alone allows.
    """

    slots: int
    chunk: int
    context: int
    pages: int = 0
    page_size: int = 0
    parts_of_positions: int = 1
    is_grouped: bool = True

    @property
    def tokens(self) -> int:
        """The number of tokens that a step computes."""
        return self.slots + self.chunk

    @property
    def cache_rows(self) -> int:
        """The number of positions that the caches have in all."""
        return self.pages * self.page_size if self.pages else self.slots * self.positions

    @property
    def pages_of_slot(self) -> int:
        """The number of pages that a request may have."""
        return -(-self.context // self.page_size) if self.pages else 0

    @property
    def positions(self) -> int:
        """The number of positions that attention reads for a slot."""
        if self.pages:
            return self.pages_of_slot * self.page_size
        return -(-self.context // self.parts_of_positions) * self.parts_of_positions

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The integers of a step, name -> shape.

        ids, positions, rows: of each token, and the row of the caches that it is written to.
        slot: the one that the chunk is of.
        table: the pages of each slot.
        """
        n, of_chunk = (self.tokens,), (1,) if self.chunk else (0,)
        table = (self.slots, self.pages_of_slot)
        return {"ids": n, "positions": n, "rows": n, "slot": of_chunk, "table": table}

    @property
    def size(self) -> int:
        """The number of integers of a step."""
        return sum(map(prod, self.fields.values()))

    @property
    def places(self) -> dict[str, slice]:
        """The place of each field among the integers."""
        ends = accumulate(map(prod, self.fields.values()), initial=0)
        return {name: slice(*ab) for name, ab in zip(self.fields, pairwise(ends), strict=True)}

    def parts(self, step: Any) -> dict[str, Any]:
        """Return the fields of a step's integers, each in its shape: of tensors or of arrays."""
        return {name: step[at].reshape(self.fields[name]) for name, at in self.places.items()}
