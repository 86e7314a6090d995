"""Where buffers lie in one piece of memory, so that those in use at the same time lie apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mdfuse.plan.lines import NewBuffer

#: With more buffers than this only those of equal size share a place: packing is quadratic.
MANY = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A buffer, and the first and last line that use it.

    Attributes:
        slot: where it is bound.
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

    def meets(self, other: Life) -> bool:
        """Tell whether both buffers are in use at some time."""
        return self.start <= other.stop and other.start <= self.stop


def place(found: Sequence[Life], alignment: int) -> dict[int, int]:
    """Choose an offset for each buffer, so that those in use at the same time do not overlap.

    Three ways are tried, and the one that takes the least memory is taken: the largest first, the
    longest in use first, each as far down as it fits; and in the order of use.

    Args:
        found: the buffers.
        alignment: in bytes; offsets are multiples of it.

    Returns:
        slot -> offset in bytes.
    """
    if len(found) > MANY:
        return _place_equal(found, alignment)
    orders = (
        sorted(found, key=lambda x: (-x.nbytes, x.start)),
        sorted(found, key=lambda x: (x.start - x.stop, -x.nbytes)),
    )
    tried = [place_in(order, alignment) for order in orders]
    tried.append(_place_in_time(found, alignment))
    return min(tried, key=lambda offsets: size_of(found, offsets))


def size_of(found: Sequence[Life], offsets: Mapping[int, int]) -> int:
    """Return the bytes that placed buffers take together."""
    return max((offsets[x.slot] + x.nbytes for x in found), default=0)


class _Placed:
    """Buffers that have their place, by the blocks of lines in which they are in use.

    Most are in use for a few lines, so only few of all are compared with the next one.
    """

    def __init__(self) -> None:
        self._by_block: dict[int, list[Life]] = defaultdict(list)

    def add(self, life: Life) -> None:
        for block in _blocks(life):
            self._by_block[block].append(life)

    def meeting(self, life: Life) -> Iterator[Life]:
        """Yield those that are in use at some time together with another one."""
        for block in _blocks(life):
            for x in self._by_block.get(block, ()):
                first_together = max(x.start, life.start) // _BLOCK
                if first_together == block and x.meets(life):
                    yield x


#: Lines in a block.
_BLOCK = 32


def _blocks(life: Life) -> range:
    return range(life.start // _BLOCK, life.stop // _BLOCK + 1)


def place_in(order: Sequence[Life], alignment: int) -> dict[int, int]:
    offsets: dict[int, int] = {}
    placed = _Placed()
    for life in order:
        taken = sorted((offsets[x.slot], offsets[x.slot] + x.nbytes) for x in placed.meeting(life))
        at = 0
        for start, stop in taken:
            if at + life.nbytes <= start:
                break
            at = max(at, _up(stop, alignment))
        offsets[life.slot] = at
        placed.add(life)
    return offsets


def _place_in_time(found: Sequence[Life], alignment: int) -> dict[int, int]:
    """Place buffers in the order of use, each in the smallest gap, at either end of the memory.

    So a small buffer does not lie in the middle of what the next large one needs: in a chain of
    large buffers and small ones between them, the large ones change places.
    """
    bound, offsets = _up(peak(found), alignment), dict[int, int]()
    placed = _Placed()
    for life in sorted(found, key=lambda x: (x.start, -x.nbytes)):
        taken = [(offsets[x.slot], offsets[x.slot] + x.nbytes) for x in placed.meeting(life)]
        size = _up(life.nbytes, alignment)
        gaps = [(a, b) for a, b in _gaps(taken, bound, alignment) if b - a >= size]
        if gaps:
            start, stop = min(gaps, key=lambda gap: gap[1] - gap[0])
            offsets[life.slot] = stop - size if start > 0 and stop == bound else start
        else:
            offsets[life.slot] = max((_up(stop, alignment) for _, stop in taken), default=0)
        placed.add(life)
    return offsets


def _gaps(taken: Sequence[tuple[int, int]], bound: int, alignment: int) -> list[tuple[int, int]]:
    """Return the free intervals between pieces of memory that are taken."""
    gaps, at = [], 0
    for start, stop in sorted(taken):
        gaps.append((at, start))
        at = max(at, _up(stop, alignment))
    return [*gaps, (at, bound)]


def _place_equal(found: Sequence[Life], alignment: int) -> dict[int, int]:
    """Give a buffer the place of an equally large one that is no longer in use."""
    offsets: dict[int, int] = {}
    free: dict[int, list[tuple[int, int]]] = defaultdict(list)  # size -> (in use until, offset)
    end = 0
    for life in found:
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


def peak(found: Iterable[Life]) -> int:
    """Return the most bytes that are in use at once."""
    changes: dict[int, int] = defaultdict(int)
    for life in found:
        # odd keys lie between lines: a buffer is in use to the end of its last line
        changes[2 * life.start] += life.nbytes
        changes[2 * life.stop + 1] -= life.nbytes
    now = most = 0
    for _, change in sorted(changes.items()):
        now += change
        most = max(most, now)
    return most
