"""Pack buffers into one piece of memory, so that those in use at the same time lie apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mdfuse.plan.lines import NewBuffer

#: With more buffers than this only those of equal size share a place: packing is quadratic.
MANY = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRange:
    """A buffer, and the first and last line that use it.

    Attributes:
        slot: the slot that it is bound to.
        new: the form of the buffer; None where torch allocates it in each run.
        nbytes: its size in bytes.
        start: the first line that uses it.
        stop: the last line that uses it.
    """

    slot: int
    new: NewBuffer | None
    nbytes: int
    start: int
    stop: int


def place(lives: Sequence[LiveRange], alignment: int) -> dict[int, int]:
    """Choose an offset for each buffer, so that those in use at the same time do not overlap.

    Three orders are tried, and the one that takes the least memory is used: the largest first, the
    longest in use first, each as far down as it fits; and the order of use.

    Args:
        lives: the buffers.
        alignment: in bytes; offsets are multiples of it.

    Returns:
        slot -> offset in bytes.
    """
    if len(lives) > MANY:
        return _place_equal(lives, alignment)
    orders = (
        sorted(lives, key=lambda x: (-x.nbytes, x.start)),
        sorted(lives, key=lambda x: (x.start - x.stop, -x.nbytes)),
    )
    tried = [place_in(order, alignment) for order in orders]
    tried.append(_place_in_time(lives, alignment))
    return min(tried, key=lambda offsets: size_of(lives, offsets))


def size_of(lives: Sequence[LiveRange], offsets: Mapping[int, int]) -> int:
    """Return the bytes that placed buffers take together."""
    return max((offsets[x.slot] + x.nbytes for x in lives), default=0)


_Ints = npt.NDArray[np.int64]


class _Placed:
    """Buffers that have their place: columns of numbers, since all of them are compared with each.

    Args:
        most: how many there will be.
        alignment: of offsets, in bytes.
    """

    def __init__(self, most: int, alignment: int) -> None:
        #: first and last line of use, first byte and the one behind the last, that one aligned
        self._columns: _Ints = np.empty((5, most), dtype=np.int64)
        self._count, self._alignment = 0, alignment

    def add(self, life: LiveRange, offset: int) -> None:
        """Place a buffer."""
        end = offset + life.nbytes
        column = (life.start, life.stop, offset, end, _up(end, self._alignment))
        self._columns[:, self._count] = column
        self._count += 1

    def beside(self, life: LiveRange) -> tuple[_Ints, _Ints]:
        """Return the free intervals beside those that are in use together with another buffer.

        Returns:
            First bytes, and the bytes behind the last ones, in the order of the buffers that end
            them. The last first byte is the start of the open end, which has no last byte. An
            interval may have a negative size.
        """
        start, stop, offset, end, aligned = self._columns[:, : self._count]
        met = np.flatnonzero((start <= life.stop) & (stop >= life.start))
        order = met[np.lexsort((end[met], offset[met]))]
        free = np.concatenate(([0], np.maximum.accumulate(aligned[order])))
        return free, offset[order]


def place_in(order: Sequence[LiveRange], alignment: int) -> dict[int, int]:
    offsets: dict[int, int] = {}
    placed = _Placed(len(order), alignment)
    for life in order:
        free, ends = placed.beside(life)
        fits = np.flatnonzero(free[:-1] + life.nbytes <= ends)
        at = int(free[fits[0]] if len(fits) else free[-1])
        offsets[life.slot] = at
        placed.add(life, at)
    return offsets


def _place_in_time(lives: Sequence[LiveRange], alignment: int) -> dict[int, int]:
    """Place buffers in the order of use, each in the smallest gap, at either end of the memory.

    So a small buffer does not split the space that the next large one needs: in a chain of large
    buffers with small ones between them, the large ones alternate.
    """
    bound, offsets = _up(peak(lives), alignment), dict[int, int]()
    placed = _Placed(len(lives), alignment)
    for life in sorted(lives, key=lambda x: (x.start, -x.nbytes)):
        free, ends = placed.beside(life)
        size, ends = _up(life.nbytes, alignment), np.append(ends, bound)
        lengths = ends - free
        gaps = np.flatnonzero(lengths >= size)
        if len(gaps):
            gap = gaps[np.argmin(lengths[gaps])]
            start, stop = int(free[gap]), int(ends[gap])
            at = stop - size if start > 0 and stop == bound else start
        else:
            at = int(free[-1])
        offsets[life.slot] = at
        placed.add(life, at)
    return offsets


def _place_equal(lives: Sequence[LiveRange], alignment: int) -> dict[int, int]:
    """Give a buffer the place of an equally large one that is no longer in use."""
    offsets: dict[int, int] = {}
    free: dict[int, list[tuple[int, int]]] = defaultdict(list)  # size -> (in use until, offset)
    end = 0
    for life in lives:
        places = free[life.nbytes]
        ready = next((p for p in places if p[0] < life.start), None)
        if ready is not None:
            places.remove(ready)
        offset = end if ready is None else ready[1]
        end = max(end, _up(offset + life.nbytes, alignment))
        offsets[life.slot] = offset
        places.append((life.stop, offset))
    return offsets


def _up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def peak(lives: Iterable[LiveRange]) -> int:
    """Return the most bytes that are in use at once."""
    held = LiveBytes()
    held.add(lives)
    return held.most


class LiveBytes:
    """Bytes in use at each line, of more and more buffers."""

    def __init__(self) -> None:
        self._changes: _Ints = np.zeros(0, dtype=np.int64)

    def add(self, buffers: Iterable[LiveRange]) -> None:
        """Hold some more buffers."""
        lives = [(x.start, x.stop, x.nbytes) for x in buffers]
        if not lives:
            return
        start, stop, nbytes = np.array(lives, dtype=np.int64).T
        lacking = 2 * int(stop.max()) + 2 - len(self._changes)
        if lacking > 0:
            self._changes = np.append(self._changes, np.zeros(lacking, dtype=np.int64))
        # odd positions lie between lines: a buffer is in use to the end of its last line
        np.add.at(self._changes, 2 * start, nbytes)
        np.subtract.at(self._changes, 2 * stop + 1, nbytes)

    @property
    def most(self) -> int:
        """The most bytes that are in use at once."""
        return max(0, int(self._changes.cumsum().max())) if len(self._changes) else 0
