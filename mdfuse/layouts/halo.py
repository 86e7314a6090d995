"""Reaches: which rows of a split dim ranks read besides their parts, as windows over it need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mdfuse.errors import LayoutError
from mdfuse.layouts.boxes import clipped, is_array


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Rows of a dim that belong to a part of another dim, as those that a convolution reads.

    Row i of the other dim belongs to the rows from `(i * up + first) // down` to
    `(i * up + last) // down`, the last one left out; rows that are not there are left out.

    Attributes:
        of: the extent of the other dim, of which each rank has a part.
        up, down: how far its rows are from each other, a fraction.
        first: where the rows begin that belong to row 0, times `down`.
        last: where they end.

    >>> window = Reach(of=8, up=1, down=1, first=-1, last=2)  # three rows around each of eight
    >>> window.rows((0, 4), 8), window.rows((4, 8), 8), window.rows((8, 8), 8)
    ((0, 5), (3, 8), (7, 7))
    """

    of: int
    up: int
    down: int
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.of < 0 or self.up < 1 or self.down < 1:
            raise LayoutError(
                f"{self}",
                because="it tells the rows that belong to each row of another dim",
                hint="reach(dim, extent from 0 on, up and down from 1 on, first, last)",
            )

    @property
    def is_move(self) -> bool:
        """True if one row belongs to each row of the other dim."""
        return self.up == self.down == self.last - self.first == 1

    def wanted(self, part: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the rows that belong to a part of the other dim, also those that are not there."""
        start, stop = part
        begin = (start * self.up + self.first) // self.down
        end = ((stop - 1) * self.up + self.last) // self.down
        if is_array(end):
            return begin, begin + (end - begin) * (start < stop)
        return begin, end if start < stop else begin

    def rows(self, part: tuple[Any, Any], extent: int) -> tuple[Any, Any]:
        """Return the rows that belong to a part of the other dim, of those that are there."""
        begin, end = (clipped(row, extent) for row in self.wanted(part))
        return begin, end.clip(min=begin) if is_array(end) else max(begin, end)

    def text(self, dim: int) -> str:
        """Return it as programs print it."""
        numbers: tuple[Any, ...] = (dim, self.of, self.up, self.down, self.first, self.last)
        return f"reach({','.join(map(str, numbers))})"
