"""Blocks of `recompute`: the values of a definition that gradients compute again."""

from __future__ import annotations

from collections.abc import Iterable

from mdfuse.frontend.handle import ValueId


class RecomputedValues:
    """The values that gradients compute again, by block.

    A value that another block reads is kept, unless that is a part of an operation. A block with a
    name is in the region of that name; its values that are read outside of the region are kept.

    Attributes:
        open: the number of the open block; 0 outside of all.
    """

    def __init__(self) -> None:
        self.open = 0
        self._region = 0
        self._is_part = False
        self._count = 0
        self._named: dict[str, int] = {}
        self._block_of: dict[int, int] = {}

    def begin(self, begins: bool | str | None) -> None:
        """Begin a block, go on with the last (None) or with the one of a name; False ends it.

        The empty name begins a block for a part of an operation.
        """
        self._count += begins is True or begins == ""
        self._is_part = begins == "" or begins is None
        self.open = 0 if begins is False else self._count
        if isinstance(begins, str) and begins:
            self.open = self._of(begins)

    def enter(self, region: str | None) -> None:
        """Enter a region, or leave the last one."""
        self._region = 0 if region is None else self._of(region)

    def _of(self, name: str) -> int:
        self._count += name not in self._named
        return self._named.setdefault(name, self._count)

    def block(self, value: int) -> int | None:
        """Return the block of a value by its id; None: it is kept."""
        return self._block_of.get(value)

    def note(self, value: int) -> None:
        """Note that a value is computed in the open block."""
        self._block_of[value] = self.open

    def read(self, operands: Iterable[object]) -> None:
        """Keep operands that are read outside of their block."""
        if not self._block_of:
            return
        is_block = self.open > 0 and not self._is_part
        for x in operands:
            if not isinstance(x, ValueId):
                continue
            block = self._block_of.get(x, self.open)
            is_left = is_block or block in self._named.values()
            if is_left and block not in (self.open, self._region):
                del self._block_of[x]
