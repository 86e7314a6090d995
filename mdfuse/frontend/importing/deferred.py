"""Rows that a module sorts by their expert, before they are sorted: see `routes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mdfuse.extents.extent import are_same
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.indices import Ramp
from mdfuse.frontend.importing.joined import in_one

ops: Any = operations


@dataclass(frozen=True, slots=True, eq=False)
class DeferredSort:
    """A deferred sort of numbers.

    Attributes:
        ids: the numbers.
        sort: does the sort: returns the sorted numbers, and their places before.
        sent: unsorted rows -> the ragged value of them, grouped by expert.
    """

    ids: Handle
    sort: Callable[[], Any]
    _made: list[Any] = field(default_factory=list)
    sent: dict[Any, Any] = field(default_factory=dict)

    @property
    def places(self) -> Any:
        """Return the place of each sorted row before the sort."""
        if not self._made:
            self._made.append(self.sort()[1])
        return self._made[0]

    def counts(self, x: Any) -> int:
        """Return how often known numbers repeat each of 0, 1, … in turn; 0 for other numbers."""
        n = self.ids.shape[0]
        if not isinstance(x, Tensor) or x.ndim != 1 or not are_same(x.numel(), n) or not n:
            return 0
        each = int((x == x[0]).sum())
        is_so = torch.equal(x.long(), torch.arange(len(x)) // each)
        return each if is_so and len(x) % each == 0 else 0


@dataclass(frozen=True, slots=True, eq=False)
class InOrder:
    """Rows of a deferred sort.

    Attributes:
        order: the deferred sort.
        base: the unsorted rows; an integer n stands for the numbers from 0, each n times.
        apart: the number of parts of experts in a leading dim of the base, and of experts per part;
            None: no such dim.
        is_sent: whether the base is ragged, [parts of tokens, experts, rows, ...].
        table: of rows that are looked up by expert, [experts, ...]; None for others.
    """

    order: DeferredSort
    base: Any
    apart: tuple[int, int] | None = None
    is_sent: bool = False
    table: Handle | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the rows."""
        if isinstance(self.base, int):
            return (self.order.ids.shape[0],)
        if self.is_sent:
            return (self.order.ids.shape[0], *self.base.shape[3:])
        return tuple(self.base.shape)[self.apart is not None :]

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def together(self) -> Any:
        """Return the unsorted rows, summed over the parts, or brought back from their experts."""
        if self.is_sent:
            return ops.ungroup_rows(in_one(self.base), self.order.ids)
        if self.apart is None:
            return self.base
        rows = in_one(self.base)
        parts, each = self.apart
        if parts == 1:
            return ops.squeeze(rows, 0)
        at = ops.unsqueeze(ops.floor_divide(self.order.ids, each), 0)
        is_there = ops.eq(at, ops.unsqueeze(ops.arange(parts), 1))
        is_there = ops.reshape(is_there, (*is_there.shape, *(1,) * (rows.ndim - 2)))
        return ops.sum(ops.where(is_there, rows, 0.0), 0)

    def whole(self) -> Any:
        """Return the sorted rows."""
        places, rows = self.order.places, self.together()
        if isinstance(rows, int):
            return places if rows == 1 else ops.floor_divide(places, rows)
        return ops.index_select(in_one(rows), 0, places)


@dataclass(frozen=True, slots=True, eq=False)
class Back:
    """The inverse of a deferred sort: the sorted place of each row."""

    order: DeferredSort

    def whole(self) -> Any:
        """Return the places."""
        return ops.argsort(self.order.places)


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """The number of rows of each expert, or the end of its rows in sorted order."""

    order: DeferredSort
    experts: int
    counts: Any
    are_ends: bool = False

    def whole(self) -> Any:
        """Return the numbers."""
        return self.counts


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """A value that is computed where something asks for it."""

    make: Callable[[], Any]
    _made: list[Any] = field(default_factory=list)

    def whole(self) -> Any:
        """Return the value, computed once."""
        if not self._made:
            self._made.append(self.make())
        return self._made[0]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """Rows [t,d], all of them again for each expert: [e*t,d]."""

    rows: Handle
    times: int
    later: Later

    def whole(self) -> Any:
        """Return all rows."""
        return self.later.whole()


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Values of all tokens for all experts, which are one number where an expert is not chosen.

    Attributes:
        ids: [t,k], the chosen experts.
        base: [t,k] or [t,k,d], the values of these; ragged where they are sent.
        dims: "te": the value is [t,e]; "et": [e,t] or [e,t,d]; "flat": [e*t,d].
        experts: how many there are.
        fill: the number of all others.
        later: makes all values, as the module computes them.
        is_sent: whether the values are where their experts are.
    """

    ids: Handle
    base: Any
    dims: str
    experts: int
    fill: float
    later: Later
    is_sent: bool = False

    def whole(self) -> Any:
        """Return the values for all experts."""
        return self.later.whole()


CHOSEN = (Repeated, Chosen)
KINDS = (InOrder, Back, Counted, *CHOSEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCall:
    """A call of a graph with such values.

    Attributes:
        target: the overload.
        is_pointwise: whether it goes element by element.
        apply: makes an operation of other values.
        parts: the number of ranks that split the matrices of a value.
        tokens: how many rows of the batch each part has in which the ranks that split the
            matrices, and maybe others, have the tokens; (): all ranks have all.
        known: the numbers of a constant or a count; other values unchanged.
        capacity: the most rows of a part of the tokens that may go to an expert; None: any.
    """

    target: str
    is_pointwise: bool
    apply: Callable[[str, Any, Any], Any]
    parts: Callable[[Handle], int]
    tokens: Callable[[], tuple[int, ...]]
    known: Callable[[Any], Any]
    capacity: int | None = None

    def each(self, order: DeferredSort, x: Any) -> int:
        """Return how often places or known numbers repeat each of 0, 1, … in turn; 0 for others."""
        known = self.known(x)
        if isinstance(known, Ramp):
            return int(known.ndim == 1 and are_same(known.extent, order.ids.shape[0]))
        return x if isinstance(x, int) else order.counts(known)


# -- arguments of calls ----------------------------------------------------------------------------


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of lists and dicts."""
    if isinstance(tree, tuple | list | dict):
        for x in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(x)
    else:
        yield tree


def mapped_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return lists and dicts with their leaves changed."""
    if isinstance(tree, dict):
        return {key: mapped_leaves(x, change) for key, x in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)([mapped_leaves(x, change) for x in tree])
    return change(tree)


def bases(tree: Any, kind: type[InOrder | Chosen]) -> Any:
    """Return arguments with what deferred values are made of in the place of these."""
    return mapped_leaves(tree, lambda x: x.base if isinstance(x, kind) else x)
