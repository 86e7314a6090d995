"""Placements: what ranks along one axis of a mesh hold of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mdfuse.errors import LayoutError, counted, shown
from mdfuse.layouts.blocks import Blocks, as_blocks, blocks_text
from mdfuse.layouts.boxes import is_dim
from mdfuse.layouts.stream import Stream

REDUCE_OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
#: The ops that may stand along several axes of one layout: an op with itself, and these together.
#: Two ops commute if (a . b) * (c . d) = (a * c) . (b * d). Where both have a neutral element, as
#: all but avg have, they are then one op (Eckmann and Hilton 1962); avg is linear, as sum is, and
#: commutes with no other: max(avg(0, 1), avg(1, 0)) is 1/2, avg(max(0, 1), max(1, 0)) is 1.
_LINEAR = frozenset({"sum", "avg"})
#: The ops that make of equal terms the term itself.
IDEMPOTENT = ("min", "max", "avg", "band", "bor")


@dataclass(frozen=True, slots=True)
class Shard:
    """Split `dim` of the tensor along this axis, into the parts that `torch.chunk` makes.

    Args:
        dim: the dim.
        blocks: into how many equal blocks the dim falls, or the sizes of all of them: then each
            block is split, and a rank's part is its piece of every block, in order. As the rows of
            a fused projection need it: `Shard(0, blocks=3)` of queries, keys and values.
        zigzag: cut the dim into 2 n chunks for n ranks, as `torch.chunk` does; rank r has chunks r
            and 2 n - 1 - r, one behind the other. Then causal attention over positions that are
            split so is as much work on each rank.

    Raises:
        LayoutError: no dim, or no blocks, or blocks in zigzag order.

    >>> [str(Shard(0)), str(Shard(0, blocks=3)), str(Shard(0, blocks=(4096, 1024, 1024)))]
    ['S0', 'S0/3', 'S0/[4096,1024,1024]']
    >>> str(Shard(1, zigzag=True))
    'S1/zigzag'
    """

    dim: int
    blocks: int | tuple[int, ...] | None = None
    zigzag: bool = False

    def __post_init__(self) -> None:
        if not is_dim(self.dim):
            raise LayoutError(
                f"Shard({shown(self.dim)})",
                because="a dim is an integer of 64 bits",
                hint="for example Shard(0)",
            )
        if not isinstance(self.zigzag, bool):
            raise LayoutError(
                f"zigzag={shown(self.zigzag)}", because="zigzag is True or False", hint="Shard(1)"
            )
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_blocks(self.blocks))
        if self.zigzag and self.blocks is not None:
            raise LayoutError(
                f"Shard({self.dim}, blocks={self.blocks}, zigzag=True)",
                because="zigzag order is of one run of rows, of which a rank has two chunks",
                hint="one of both, or give the blocks a dim of their own with reshape",
            )

    @property
    def pieces(self) -> Blocks | None:
        """The blocks, or `zigzag`; None for one run of rows."""
        return "zigzag" if self.zigzag else self.blocks

    def in_pieces(self, pieces: Blocks | None) -> Shard:
        """Return a split of the dim in other blocks, or in zigzag order."""
        if isinstance(pieces, str):
            return replace(self, blocks=None, zigzag=True)
        return replace(self, blocks=pieces, zigzag=False)

    def __repr__(self) -> str:
        blocks = f", blocks={self.blocks}" if self.blocks else ""
        return f"Shard(dim={self.dim}{blocks}{', zigzag=True' if self.zigzag else ''})"

    def __str__(self) -> str:
        return f"S{self.dim}" + (f"/{blocks_text(self.pieces)}" if self.pieces is not None else "")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Hold the same elements on every rank along this axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Hold one term on each rank along this axis: reducing the terms with `op` gives the value."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or self.op not in REDUCE_OPS:
            raise LayoutError(f"Partial({shown(self.op)})", hint="one of " + ", ".join(REDUCE_OPS))

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True, slots=True)
class Varies:
    """Hold something of its own on each rank along this axis: the parts make up no whole.

    For host programs only; each rank's part counts as a whole.
    """

    def __str__(self) -> str:
        return "varies"


Placement = Shard | Replicate | Partial | Varies


def commute(ops: Iterable[str]) -> bool:
    """True if axes that are Partial by these ops may be reduced in any order, as a layout requires.

    >>> commute(["max", "max"]), commute(["sum", "avg"]), commute(["sum", "max"])
    (True, True, False)
    """
    different = {*ops}
    return len(different) < 2 or different <= _LINEAR


def wrapped(dim: int, ndim: int, what: str) -> int:
    """Return a dim counted from 0; `what` asks for it, and is part of an error's text."""
    if not -ndim <= dim < ndim:
        raise LayoutError(
            f"{what}: dim {dim} is out of range for a tensor with {counted(ndim, 'dim')}",
            hint=f"dims go from {-ndim} to {ndim - 1}" if ndim else "a scalar cannot be split",
        )
    return dim % ndim


def check_placement(axis: str, placement: object) -> None:
    """Raise LayoutError where what an axis has is no placement."""
    if isinstance(placement, Stream):
        what = f"axis {axis}: {placement} is not a placement of a mesh axis"
        raise LayoutError(what, hint="pass stream=Stream(dim, chunks)")
    if not isinstance(placement, Placement):
        raise LayoutError(
            f"axis {axis}: {shown(placement)} is not a placement",
            hint="mdfuse's own: mdfuse.Shard(dim), mdfuse.Replicate(), mdfuse.Partial(op)",
        )


def check_dicts(placements: object, order: object, reaches: object) -> None:
    """Raise LayoutError where what a layout is made of is no dict, or an order names no axes."""
    for name, given in (("placements", placements), ("order", order), ("reaches", reaches)):
        if not isinstance(given, Mapping | None):
            raise LayoutError(
                f"{name}={shown(given)}",
                because="a layout tells of each axis, or of each dim, by a dict",
                hint="Layout(mesh, {axis: placement}, {dim: axes})",
            )
    for dim, axes in order.items() if isinstance(order, Mapping) else ():
        is_list = isinstance(axes, str | list | tuple)
        if not is_dim(dim) or not is_list or not all(isinstance(a, str) for a in axes):
            raise LayoutError(
                f"order {shown({dim: axes})}",
                because="it has the names of the axes that split a dim, the outermost first",
                hint='order={0: ("tp", "dp")}',
            )
