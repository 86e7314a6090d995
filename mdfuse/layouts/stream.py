"""Streams: values that a loop of the host computes, a chunk of a dim at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mdfuse.errors import LayoutError, shown
from mdfuse.extents.expressions import Index
from mdfuse.layouts.boxes import Interval, Rows, clipped, is_dim, nth_chunk

#: The ops by which the parts of chunks join.
JOINED = ("lse", "max", "min", "prod", "sum")


@dataclass(frozen=True, slots=True)
class Stream:
    """Compute the tensor in a loop of the host over chunks of `dim`.

    A value without the dim, as a sum over it, is accumulated: an iteration computes the part of
    its chunk, and `op` joins it to the parts before; see `Stream.over`.

    Args:
        dim: the dim that is split; each rank splits its own part of it. -1 with `op`.
        chunks: how many chunks, as `torch.chunk` makes them (missing ones are empty), or a tuple of
            their lengths.
        rotate: an axis, along which ranks form a ring: each starts at its own chunk, or ends with
            it where the loop scatters what it computes. Where chunks are gathered or scattered in
            the ring there are as many as ranks, or a multiple of it: then shards go in pieces. With
            lengths the pieces of every shard have the same ones: `(1, 3) * ranks`.
        index: None for the whole tensor; in host programs, which of the chunks a buffer is.
        op: how the parts of chunks join, where the tensor does not have the dim.
        zigzag: chunk i is the part of rank i in zigzag order of as many ranks: see `Shard`.

    Raises:
        LayoutError: no chunks, or an axis that is no name; an op that does not join parts.

    >>> [Stream(0, 4).interval((0, 5), i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """

    dim: int
    chunks: int | tuple[int, ...]
    rotate: str | None = None
    index: Index | None = None
    op: str | None = None
    zigzag: bool = field(default=False, repr=False)

    @staticmethod
    def over(op: str, chunks: int | tuple[int, ...], index: Index | None = None) -> Stream:
        """Return the stream of a value that chunks of a dim that it lacks add up to.

        >>> Stream.over("sum", 8)
        Stream(dim=-1, chunks=8, rotate=None, index=None, op='sum')
        """
        return Stream(-1, chunks, None, index, op)

    def __post_init__(self) -> None:
        if self.op is not None and (self.op not in JOINED or self.dim != -1):
            raise LayoutError(
                f"Stream.over({shown(self.op)}, {shown(self.chunks)})",
                because="the parts of chunks are joined by " + ", ".join(JOINED),
                hint='for example Stream.over("sum", 4)',
            )
        if not is_dim(self.dim):
            raise LayoutError(
                f"Stream({shown(self.dim)}, {shown(self.chunks)})",
                because="a dim is an integer of 64 bits",
                hint="for example Stream(0, 4)",
            )
        if not isinstance(self.rotate, str | None):
            raise LayoutError(f"rotate={shown(self.rotate)}", because="a ring goes along an axis")
        lengths = self.chunks if isinstance(self.chunks, tuple) else (self.chunks,)
        good = all(is_dim(n) and n >= 0 for n in lengths)
        good = good and not (self.zigzag and isinstance(self.chunks, tuple))
        if not good or not lengths or self.chunks == 0:
            raise LayoutError(
                f"Stream({self.dim}, {shown(self.chunks)})",
                because="chunks is how many there are, or a tuple of their lengths; in zigzag "
                "order they are counted",
                hint="for example Stream(0, 4) or Stream(0, (3, 1))",
            )

    @property
    def runs(self) -> int | None:
        """The dim of which a buffer has two runs of rows, as a chunk in zigzag order has."""
        return self.dim if self.zigzag and self.index is not None else None

    @property
    def count(self) -> int:
        """The number of chunks: how often the host loop runs."""
        return len(self.chunks) if isinstance(self.chunks, tuple) else self.chunks

    @property
    def largest(self) -> int:
        """The number of the longest chunk; of several, the first."""
        return self.chunks.index(max(self.chunks)) if isinstance(self.chunks, tuple) else 0

    @property
    def number(self) -> int:
        """The number of the chunk that a buffer is; of the largest if only the loop knows it."""
        return self.index if isinstance(self.index, int) else self.largest

    def interval(self, interval: Interval, i: int) -> Interval:
        """Return the i-th chunk of an interval; LayoutError where it has none, or other lengths."""
        if not 0 <= i < self.count:
            raise LayoutError(
                f"there is no chunk {i} of dim {self.dim}: it has {self.count}",
                hint=f"chunks count from 0 to {self.count - 1}",
            )
        if isinstance(self.chunks, int):
            return nth_chunk(interval, self.chunks, i)
        start, stop = interval
        if sum(self.chunks) != stop - start:
            raise LayoutError(
                f"{self} of a dim with {stop - start} rows on a rank",
                because=f"the chunks have {sum(self.chunks)} rows together",
                hint="give lengths that add up to each rank's part, or a count",
            )
        begin = start + sum(self.chunks[:i])
        return begin, begin + self.chunks[i]

    def rows(self, rows: Rows, i: int) -> Rows:
        """Return the rows of a rank in the i-th chunk: of as many blocks, the i-th is one.

        Otherwise chunks are those of the rows side by side.

        >>> Stream(0, 2).rows(((0, 4),), 1), Stream(0, 2).rows(((0, 4), (8, 12)), 1)
        (((2, 4),), ((0, 0), (8, 12)))
        >>> Stream(0, 3).rows(((0, 4), (8, 10)), 1)
        ((2, 4), (8, 8))
        >>> Stream(0, 2, zigzag=True).rows(((0, 8),), 1)
        ((2, 4), (4, 6))
        """
        if self.zigzag:
            (part,), n = rows, 2 * self.count
            return nth_chunk(part, n, i), nth_chunk(part, n, n - 1 - i)
        if len(rows) == 1:
            return (self.interval(rows[0], i),)
        if self.count == len(rows):
            self.interval((0, 0), i)
            return tuple((a, b if n == i else a) for n, (a, b) in enumerate(rows))
        begin, end = self.within(rows, i)
        parts, before = list[Interval](), 0
        for a, b in rows:
            n = b - a
            parts.append((a + clipped(begin - before, n), a + clipped(end - before, n)))
            before += n
        return tuple(parts)

    def within(self, rows: Rows, i: int) -> Interval:
        """Return where the i-th chunk lies in the rows of a rank, which are side by side."""
        lengths = [b - a for a, b in rows]
        if len(rows) > 1 and self.count == len(rows):
            return sum(lengths[:i]), sum(lengths[: i + 1])
        return self.interval((0, sum(lengths)), i)

    def part(self, dim: int, rows: Rows) -> Rows:
        """Return the rows of a dim, on one rank, that are in the chunk that a buffer is.

        All of them where it is no chunk, or one of another dim; a chunk whose index only the
        running loop knows counts as the largest.
        """
        if self.index is None or self.op is not None or self.dim != dim:
            return rows
        if self.zigzag and not isinstance(self.index, int):
            parts = [self.rows(rows, i) for i in range(self.count)]
            return max(parts, key=lambda part: sum(stop - start for start, stop in part))
        return self.rows(rows, self.number)

    def scaled(self, rows: int, of: int) -> Stream | None:
        """Return the stream of a dim of so many rows, where this one's has `of`, in its order.

        Chunks that are counted stay so; None where those of given lengths have no whole rows.

        >>> Stream(0, (3, 2)).scaled(20, 5)
        Stream(dim=0, chunks=(12, 8), rotate=None, index=None, op=None)
        """
        if isinstance(self.chunks, int) or rows == of:
            return self
        if any(n * rows % of for n in self.chunks):
            return None
        return replace(self, chunks=tuple(n * rows // of for n in self.chunks))

    def of_shard(self, pieces: int) -> Stream:
        """Return the stream of each rank's shard, where chunks are so many pieces of each.

        >>> Stream(0, 4, "tp").of_shard(2), Stream(0, (1, 3, 1, 3), "tp").of_shard(2).chunks
        (Stream(dim=0, chunks=2, rotate=None, index=None, op=None), (1, 3))
        """
        return Stream(self.dim, pieces if isinstance(self.chunks, int) else self.chunks[:pieces])

    def at(self, index: Index) -> Stream:
        """Return this stream with the index of one chunk, as buffers of host programs have it."""
        return replace(self, index=index)

    def __str__(self) -> str:
        chunks = str(self.chunks).replace(" ", "").replace("(", "[").replace(")", "]")
        chunks = chunks.replace(",]", "]")
        of = f"S{self.dim}/zigzag" if self.zigzag else str(self.dim)
        of = f"P({self.op})" if self.op is not None else of
        if self.index is not None:
            return f"chunk({of},{chunks},{self.index})"
        turn = f",rotate={self.rotate}" if self.rotate else ""
        return f"stream({of},{chunks}{turn})"
