"""The keys that rows of a causal attention see, by their positions in the whole sequence.

Rows and keys are runs of consecutive positions. Between two runs all is visible, or nothing, or a
triangle whose last row sees the last key, or a band: so hidden pairs are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: Consecutive positions: the first, and the one behind the last.
Run = tuple[int, int]

#: How many rows are taken together, at least, where each sees a window of keys.
_ROWS = 128


class Tile(NamedTuple):
    """Rows and keys that they see.

    Attributes:
        rows: counted from the first row that is here.
        keys: likewise.
        shift: row i of the tile sees its keys up to i + shift; None: each row sees all of them.
        window: how many keys a row sees at most, the last ones of these; None: all of these.
    """

    rows: Run
    keys: Run
    shift: int | None = None
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of keys."""
        return self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]

    @property
    def pairs(self) -> int:
        """The number of visible pairs of a row and a key."""
        n, m = self.shape
        if self.shift is None:
            return n * m
        if self.window is None:
            return n * (m - n) + n * (n + 1) // 2
        ends = range(self.shift + 1, self.shift + n + 1)
        return sum(max(min(e, m) - max(e - self.window, 0), 0) for e in ends)

    def halves(self) -> tuple[Tile, Tile]:
        """Return the keys that all rows of a triangle see, and the square that is left."""
        (a, b), (c, d) = self.rows, self.keys
        middle = d - (b - a)
        return Tile(self.rows, (c, middle)), Tile(self.rows, (middle, d), 0)

    def blocks(self, most: int) -> Iterator[Tile]:
        """Yield tiles of at most so many rows each, without the keys behind all of these.

        >>> [*Tile((0, 4), (0, 5), 1).blocks(3)]  # doctest: +NORMALIZE_WHITESPACE
        [Tile(rows=(0, 3), keys=(0, 4), shift=1, window=None),
         Tile(rows=(3, 4), keys=(0, 5), shift=4, window=None)]
        """
        (a, b), (c, d) = self.rows, self.keys
        for start in range(a, max(b, a + 1), most):
            stop = min(start + most, b)
            shift = None if self.shift is None else self.shift + start - a
            end = d if shift is None else min(d, c + shift + stop - start)
            yield Tile((start, stop), (c, end), shift, self.window)


def tiles(
    rows: Sequence[Run], keys: Sequence[Run], is_causal: bool, window: int | None = None
) -> list[Tile]:
    """Return the tiles of rows and keys, both in runs of positions: each visible pair once.

    >>> tiles([(4, 8)], [(0, 8)], True)
    [Tile(rows=(0, 4), keys=(0, 8), shift=4, window=None)]
    >>> tiles([(0, 2), (6, 8)], [(2, 6)], True)
    [Tile(rows=(2, 4), keys=(0, 4), shift=None, window=None)]
    """
    parts, i = list[Tile](), 0
    for a, b in rows:
        j = 0
        for c, d in keys:
            for (p, q), (s, t), shift in _between((a, b), (c, d), is_causal, window):
                where = (i + p - a, i + q - a), (j + s - c, j + t - c)
                parts.append(Tile(*where, shift, window if shift is not None else None))
            j += d - c
        i += b - a
    return parts


def _between(
    rows: Run, keys: Run, is_causal: bool, window: int | None
) -> Iterator[tuple[Run, Run, int | None]]:
    """Yield rows and keys of two runs that see each other, and the shift between them."""
    (a, b), (c, d) = rows, keys
    parts: list[tuple[Run, Run, int | None]]
    if not is_causal:
        parts = [(rows, keys, None)] if a < b and c < d else []
    elif window is not None:
        parts = _bands(rows, keys, window)
    else:
        a, end = max(a, c), min(b, d)
        parts = [((a, end), (c, end), a - c)] if a < end else []
        full = max(a, d), b
        parts += [(full, keys, None)] if full[0] < b and c < d else []
    yield from parts


def _bands(rows: Run, keys: Run, window: int) -> list[tuple[Run, Run, int | None]]:
    """Return a few rows after the other, with the keys that the windows of these reach."""
    (a, b), (c, d) = (max(rows[0], keys[0]), min(rows[1], keys[1] - 1 + window)), keys
    step, parts = max(window, _ROWS), list[tuple[Run, Run, int | None]]()
    for start in range(a, b, step) if c < d else ():
        end = min(start + step, b)
        first = max(c, start - window + 1)
        parts.append(((start, end), (first, min(d, end)), start - first))
    return parts
