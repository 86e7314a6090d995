"""Blocks of a dim: each of them is split over the axes that split the dim.

A dim without blocks is one block. So what a rank holds of a dim is a list of intervals, one for
each block, and all that is about parts of tensors goes through this list.

In zigzag order a dim has 2 n chunks for n ranks, of which rank r has two, r and 2 n - 1 - r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from mdfuse.errors import LayoutError, shown
from mdfuse.layouts.boxes import Interval, ManyRows, Rows, clipped, nth_chunk
from mdfuse.layouts.stream import Stream

#: How many equal blocks, or the sizes of blocks of which some differ, or chunks in zigzag order.
Blocks = int | tuple[int, ...] | Literal["zigzag"]

#: How many blocks a dim may have.
MOST_BLOCKS = 1 << 16


class Cut(NamedTuple):
    """The cut of a dim in blocks.

    Attributes:
        blocks: that the dim has.
        plain: the axes that split what the others leave as one run of rows, not every block.
    """

    blocks: Blocks
    plain: frozenset[str] = frozenset()

    def along(self, axis: str) -> Blocks | None:
        """Return the blocks that an axis splits; None where it splits plainly."""
        return None if axis in self.plain else self.blocks

    def check(self, dim: int, axes: Sequence[str], size: Callable[[str], int]) -> None:
        """Check that the axes which split all blocks find whole ones, or pieces of each.

        Args:
            dim: that is cut.
            axes: that split it, outermost first.
            size: axis -> how many ranks.
        """
        if self.blocks == "zigzag":
            self._check_zigzag(dim, axes)
            return
        outer = list[str]()
        whole = self.blocks if isinstance(self.blocks, int) else 1  # blocks that a part has
        for axis in axes:
            if axis not in self.plain and outer:
                raise LayoutError(
                    f"{axis} splits the blocks of dim {dim} inside of {' and '.join(outer)}",
                    because="a plain split cuts through blocks, of which parts then have unequal "
                    f"pieces: only equal blocks can be shared out whole, here {self.blocks}",
                    hint=f"let {axis} split the dim first: order={{{dim}: ({axis!r}, …)}}",
                )
            if axis in self.plain and size(axis) > 1:
                outer += [axis] if whole % size(axis) else []
                whole = 1 if whole % size(axis) else whole // size(axis)

    def _check_zigzag(self, dim: int, axes: Sequence[str]) -> None:
        """Check that axes which split chunks in zigzag order follow each other."""
        at = [i for i, a in enumerate(axes) if a not in self.plain]
        between = next((a for a in axes[at[0] : at[-1]] if a in self.plain), None)
        if between is not None:
            raise LayoutError(
                f"{axes[at[-1]]} splits dim {dim} in zigzag order, {between} before it plainly",
                because="a plain split cuts the two chunks of a rank as one run of rows",
                hint=f"split it in zigzag order by {between}, too, or change order={{{dim}: …}}",
            )

    def check_chunks(self, dim: int, axes: Sequence[str], stream: Stream) -> None:
        """Check that a stream takes one block after the other, of which each axis has a piece.

        In zigzag order it takes a rank's rows, which are side by side, in any chunks.
        """
        is_apart = self.plain or stream.chunks != self.blocks or not isinstance(self.blocks, int)
        if is_apart and self.blocks != "zigzag":
            because = "a chunk is one run of a rank's rows: a piece of one of equal blocks"
        elif stream.rotate is not None:
            because = "in a ring each rank starts at its own chunk, and here all have a piece"
        else:
            return
        raise LayoutError(
            f"{stream} of dim {dim}, which {' and '.join(axes)} split in blocks",
            because=because,
            hint="stream another dim, one equal block after the other, or give the blocks a dim of "
            "their own with reshape",
        )

    def whole_first(
        self, axes: tuple[str, ...], size: Callable[[str], int]
    ) -> tuple[tuple[str, ...], bool]:
        """Return the axes, those first that share out whole blocks, and whether one is left."""
        if not isinstance(self.blocks, int):
            return axes, False
        outer, whole = list[str](), self.blocks
        for axis in (a for a in axes if a in self.plain):
            if whole % size(axis):
                break
            outer, whole = [*outer, axis], whole // size(axis)
        return (*outer, *(a for a in axes if a not in outer)), whole == 1


def chunks_as_blocks(dim: int, axes: Sequence[str], stream: Stream | None) -> int:
    """Return the blocks that axes split inside of a stream of the dim: they are its chunks.

    >>> chunks_as_blocks(0, ("stream", "tp"), Stream(0, 4))
    4
    """
    chunks = stream.chunks if stream is not None and stream.dim == dim else None
    if axes[0] != "stream" or not isinstance(chunks, int):
        raise LayoutError(
            f"order {{{dim}: {axes}}}: the stream comes before {axes[-1]}",
            because="chunks that axes split are equal parts of the whole dim",
            hint="put the stream first, with a number of chunks of this dim, or last",
        )
    return chunks


def as_blocks(given: int | Sequence[int]) -> Blocks | None:
    """Return blocks in the one form that they have; None for a single one.

    Raises:
        LayoutError: neither a number of blocks nor their sizes.

    >>> as_blocks(3), as_blocks([4, 2, 2]), as_blocks([4, 4]), as_blocks([4, 0])
    (3, (4, 2, 2), 2, None)
    """
    if isinstance(given, int) and _is_size(given) and given:
        if given > MOST_BLOCKS:
            raise _too_many(given)
        return None if given == 1 else given
    sizes = tuple(given) if isinstance(given, list | tuple) else ()
    if not sizes or not all(map(_is_size, sizes)) or not any(sizes):
        raise LayoutError(
            f"blocks={shown(given)}",
            because="blocks is how many equal ones there are, or a list of their sizes",
            hint="for example Shard(0, blocks=3) or Shard(0, blocks=[4096, 1024, 1024])",
        )
    if len(sizes) > MOST_BLOCKS:
        raise _too_many(len(sizes))
    sizes = tuple(n for n in sizes if n)
    return as_blocks(len(sizes)) if len({*sizes}) == 1 else sizes


def _too_many(blocks: int) -> LayoutError:
    return LayoutError(
        f"{shown(blocks)} blocks of a dim",
        because=f"a dim has at most {MOST_BLOCKS}: each rank has a run of rows of each",
        hint="give the blocks a dim of their own with reshape, and split the other one",
    )


def _is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 0


def blocks_text(blocks: Blocks) -> str:
    """Return blocks as programs show them: `3`, `[4096,1024,1024]`, `zigzag`."""
    return str(blocks).replace(" ", "").replace("(", "[").replace(")", "]")


@lru_cache(maxsize=1024)
def _known_segments(blocks: int | tuple[int, ...], extent: int) -> Rows:
    n = blocks if isinstance(blocks, int) else len(blocks)
    sizes = (extent // n,) * n if isinstance(blocks, int) else blocks
    if sum(sizes) != extent:
        raise LayoutError(
            f"blocks {blocks_text(blocks)} of a dim with {extent} rows",
            because=f"they have {sum(sizes)} rows together"
            if isinstance(blocks, tuple)
            else f"{extent} rows are not {blocks} equal blocks",
            hint="give the sizes of all blocks: they add up to the dim",
        )
    return tuple(pairwise(accumulate(sizes, initial=0)))


def segments(blocks: Blocks | None, extent: int) -> Rows:
    """Return the blocks of a dim as intervals; without blocks it is one.

    Raises:
        LayoutError: they are not as long as the dim, or a run chooses its extent.

    >>> segments(3, 6), segments((4, 2), 6), segments(None, 6)
    (((0, 2), (2, 4), (4, 6)), ((0, 4), (4, 6)), ((0, 6),))
    """
    if blocks is None or isinstance(blocks, str):
        return ((0, extent),)
    if type(extent) is not int:
        raise LayoutError(
            f"blocks {blocks_text(blocks)} of a dim whose extent a run chooses",
            because="where blocks begin is known when a program is compiled",
            hint="give the blocks a dim of their own with reshape, and split the other one",
        )
    return _known_segments(blocks, extent)


def split(
    rows: ManyRows, parts: int, i: Any, is_plain: bool, blocks: Blocks | None = None
) -> ManyRows:
    """Return the i-th of some parts of the rows of a dim: a piece of every run, or of all as one.

    Numbers may be arrays.

    >>> rows = (0, 2), (4, 8)
    >>> split(rows, 2, 1, is_plain=False), split(rows, 2, 1, is_plain=True)
    (((1, 2), (6, 8)), ((2, 2), (5, 8)))
    >>> split(((0, 8),), 2, 0, is_plain=False, blocks="zigzag")
    ((0, 2), (6, 8))
    """
    if not is_plain and blocks == "zigzag":
        return _zigzag(rows, parts, i)
    if not is_plain or len(rows) == 1:
        return tuple([nth_chunk(interval, parts, i) for interval in rows])
    return run(rows, nth_chunk((0, sum(stop - start for start, stop in rows)), parts, i))


def _zigzag(rows: ManyRows, parts: int, i: Any) -> ManyRows:
    """Return the i-th chunk from the front, and the i-th from the back.

    An outer axis leaves two runs of rows: the first is counted from the front, the other from the
    back.
    """
    if len(rows) == 1:
        first = last = rows[0]
        parts *= 2
    else:
        first, last = rows
    return nth_chunk(first, parts, i), nth_chunk(last, parts, parts - 1 - i)


def run(rows: ManyRows, interval: tuple[Any, Any]) -> ManyRows:
    """Return an interval of the rows of a dim, counted through all runs of them.

    >>> run(((0, 2), (4, 8)), (1, 4))
    ((1, 2), (4, 6))
    """
    (first, last), intervals = interval, list[tuple[Any, Any]]()
    for start, stop in rows:
        n = stop - start
        intervals.append((start + clipped(first, n), start + clipped(last, n)))
        first, last = first - n, last - n
    return tuple(intervals)


def part_of_blocks(blocks: Blocks | None, extent: int, part: Interval) -> Blocks | None:
    """Return the blocks of an interval that consists of whole blocks; 0 where it does not.

    >>> [part_of_blocks(3, 6, part) for part in [(0, 2), (2, 6), (0, 3)]]
    [None, 2, 0]
    """
    inside = [(a, b) for a, b in segments(blocks, extent) if part[0] <= a and b <= part[1]]
    is_all = sum(b - a for a, b in inside) == part[1] - part[0]
    return as_blocks([b - a for a, b in inside]) if inside and is_all else 0
