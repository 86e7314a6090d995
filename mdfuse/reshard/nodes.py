"""Layouts and steps on one mesh as numbers, and tables of facts that all searches share."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh

#: The axes that split each dim, outermost first.
Splits = tuple[tuple[int, ...], ...]
#: (axis, backend) of the axes whose communications have a backend of their own
Carriers = tuple[tuple[str, str], ...]


def spanned(axes: Collection[str], carriers: Carriers) -> int:
    """Return the number of axes; 0 if one backend serves all of them.

    >>> spanned(("a", "b"), (("a", "mpi"),)), spanned(("b", "c"), (("a", "mpi"),))
    (2, 0)
    """
    by_axis = dict(carriers)
    return len(axes) if by_axis and len({by_axis.get(a) for a in axes}) > 1 else 0


class LayoutNode(NamedTuple):
    """A layout on the mesh: axes are numbers, outermost first where several split one dim."""

    splits: Splits
    #: axes whose Partial is still to be reduced
    partial: tuple[int, ...]
    #: axes that have become the destination's Partial
    goal_partial: tuple[int, ...] = ()


class Move(NamedTuple):
    """A step between two nodes; its kind is that of a communication or a local step."""

    kind: str
    after: LayoutNode
    axes: tuple[int, ...] = ()
    dim: int | None = None
    to_dim: int | None = None


class Tables(NamedTuple):
    """Facts about a tensor on a mesh that all searches share."""

    #: axes that split dims -> elements of the largest part
    parts: dict[Splits, int]
    #: axes -> number of ranks along them
    counts: dict[tuple[int, ...], int]
    #: (whether pairs count, axes) -> number of teams, or of pairs, that span hosts
    teams: dict[tuple[bool, tuple[int, ...]], int]
    #: (splits before, splits afterwards, copies) -> receive volume of an exchange
    lacks: dict[tuple[Splits, Splits, int], tuple[int, int]]


def tables_of(layout: Layout, shape: tuple[int, ...]) -> Tables:
    """Return the tables of a mesh and extents; those of dims in blocks, or of symbols, are new."""
    is_plain = not layout.blocked and not is_symbolic(shape)
    return _tables(layout.mesh, shape) if is_plain else Tables({}, {}, {}, {})


@lru_cache(maxsize=64)
def _tables(mesh: DeviceMesh, shape: tuple[int, ...]) -> Tables:
    return Tables({}, {}, {}, {})
