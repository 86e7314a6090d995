"""Chains of reshapes and permutations, simplified to one view of their base.

`[s,b,e] -> [s,b*h,d] -> [b*h,s,d] -> [b,h,s,d]` needs no dim that merges b and h, which would
prevent a split of either. So each view is made directly from the base of its chain, whose dims are
cut into atoms: the finest dims of the chain. Unread views are dropped from the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mdfuse.extents.extent import are_same
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle

ops: Any = operations


@dataclass(frozen=True, slots=True)
class AtomView:
    """A view of a base: its atoms, permuted and grouped to dims.

    Attributes:
        base: the first value of the chain.
        atoms: extents whose row-major order is that of base.
        order: the index in `atoms` of each atom, in the view's order.
        groups: the number of atoms of each dim of the view.
    """

    base: Handle
    atoms: tuple[int, ...]
    order: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def dims(self) -> list[tuple[int, ...]]:
        """The atoms of each dim."""
        left = iter(self.order)
        return [tuple(next(left) for _ in range(n)) for n in self.groups]

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the view."""
        return tuple(math.prod(self.atoms[a] for a in dim) for dim in self.dims)


class Views:
    """The views of a recording; equal views are made once."""

    def __init__(self) -> None:
        self._known: dict[int, AtomView] = {}
        self._made: dict[tuple[Any, ...], Handle] = {}

    def permute(self, x: Handle, dims: Sequence[int]) -> Handle:
        """Dims in another order."""
        view = self._of(x)
        dims = [d % x.ndim for d in dims]
        atoms = view.dims
        order = tuple(a for d in dims for a in atoms[d])
        groups = tuple(view.groups[d] for d in dims)
        return self._handle(AtomView(view.base, view.atoms, order, groups))

    def transpose(self, x: Handle, dim0: int, dim1: int) -> Handle:
        """Two dims swapped."""
        dims = [*range(x.ndim)]
        if x.ndim:
            dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
        return self.permute(x, dims)

    def reshape(self, x: Handle, shape: Sequence[int]) -> Handle:
        """The same elements in another shape."""
        whole = math.prod(x.shape)
        known = math.prod(n for n in shape if not are_same(n, -1))
        is_empty = are_same(whole, 0) or are_same(known, 0)
        if not is_empty:
            shape = [whole // known if are_same(n, -1) else n for n in shape]
        is_fitting = not is_empty and are_same(math.prod(shape), whole)
        cut = _cut(self._of(x), shape) if is_fitting else None
        if cut is None:
            reshaped: Handle = ops.reshape(x, shape)
            return reshaped
        return self._handle(cut)

    def flatten(self, x: Handle, start_dim: int = 0, end_dim: int = -1) -> Handle:
        """Dims from start to end (inclusive) as one."""
        if not x.ndim:
            return self.reshape(x, (1,))
        first, last = start_dim % x.ndim, end_dim % x.ndim
        merged = math.prod(x.shape[first : last + 1])
        return self.reshape(x, (*x.shape[:first], merged, *x.shape[last + 1 :]))

    def unflatten(self, x: Handle, dim: int, sizes: Sequence[int]) -> Handle:
        """One dim as several."""
        at = dim % x.ndim
        known = math.prod(n for n in sizes if not are_same(n, -1))
        is_open = not are_same(known, 0)
        whole = [x.shape[at] // known if are_same(n, -1) and is_open else n for n in sizes]
        return self.reshape(x, (*x.shape[:at], *whole, *x.shape[at + 1 :]))

    def beginning(self, x: Handle) -> Handle:
        """Return the base of a view; other values unchanged."""
        return self._of(x).base

    def rows(self, x: Handle) -> Handle | None:
        """Return a matrix with its merged row dims unmerged; None for others."""
        view = self._known.get(x.id)
        if view is None or len(view.groups) != 2 or view.groups[0] < 2:
            return None
        groups = (1,) * view.groups[0] + view.groups[1:]
        return self._handle(AtomView(view.base, view.atoms, view.order, groups))

    def front(self, x: Handle) -> tuple[int, ...] | None:
        """Return the extents that the first dim merges; None if it is a single dim."""
        view = self._known.get(x.id)
        if view is None or view.groups[0] < 2:
            return None
        return tuple(view.atoms[a] for a in view.dims[0])

    def _of(self, x: Handle) -> AtomView:
        ndim = x.ndim
        return self._known.get(x.id) or AtomView(x, x.shape, tuple(range(ndim)), (1,) * ndim)

    def _handle(self, view: AtomView) -> Handle:
        """Make a view of its base: reshape to atoms, permute, merge."""
        x = self._once("reshape", view.base, view.atoms)
        if view.order != tuple(range(len(view.order))):
            x = self._once("permute", x, view.order)
        x = self._once("reshape", x, view.shape)
        if x.id != view.base.id:
            self._known[x.id] = view
        return x

    def _once(self, op: str, x: Handle, how: tuple[int, ...]) -> Handle:
        if op == "reshape" and len(how) == x.ndim and all(map(are_same, how, x.shape)):
            return x
        key = (op, x.id, str(how))
        if key not in self._made:
            self._made[key] = ops.BY_NAME[op](x, how)
        return self._made[key]


def _cut(view: AtomView, shape: Sequence[int]) -> AtomView | None:
    """Return a view in another shape, its atoms cut at the new dims; None if impossible."""
    atoms = [view.atoms[a] for a in view.order]
    pieces: list[list[int]] = [[] for _ in atoms]
    groups: list[int] = []
    at, left = 0, (atoms[0] if atoms else 1)
    for extent in shape:
        count, need = 0, extent
        while not are_same(need, 1):
            if are_same(left, 1):
                at, left = at + 1, atoms[at + 1]
                continue
            piece = _piece(left, need)
            if piece is None:
                return None
            pieces[at].append(piece)
            left, need, count = left // piece, need // piece, count + 1
        groups.append(count)
    return _renumbered(view, pieces, groups)


def _piece(left: int, need: int) -> int | None:
    """Return the smaller of two extents, if it divides the other in all runs."""
    for small, large in ((left, need), (need, left)):
        if type(small) is type(large) is int:
            if small <= large:
                return small if large % small == 0 else None
        elif are_same(large // small * small, large):
            return small
    return None


def _renumbered(view: AtomView, pieces: Sequence[Sequence[int]], groups: Sequence[int]) -> AtomView:
    """Return a view whose atoms are these pieces, given in its order."""
    of_atom = dict(zip(view.order, pieces, strict=True))
    first: dict[int, int] = {}
    atoms: list[int] = []
    for a in range(len(view.atoms)):
        first[a] = len(atoms)
        atoms += of_atom[a]
    order = [first[a] + i for a in view.order for i in range(len(of_atom[a]))]
    return AtomView(view.base, tuple(atoms), tuple(order), tuple(groups))
