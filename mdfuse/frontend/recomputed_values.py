"""Blocks of `recompute`: the values of a definition that gradients compute again."""

from __future__ import annotations

from collections.abc import Iterable

from mdfuse.frontend.handle import ValueId


class RecomputedValues:
    """The values that gradients compute again, by block.

    Attributes:
        open: the number of the open block; 0 outside of all.
    """

    def __init__(self) -> None:
        self.open = 0
        self._count = 0
        self._named: dict[str, int] = {}
        self._block_of: dict[int, int] = {}

    def begin(self, begins: bool | str | None) -> None:
        """Begin a block, go on with the last (None) or with the one of a name; False ends it."""
        is_new = begins is True or (isinstance(begins, str) and begins not in self._named)
        self._count += is_new
        self.open = 0 if begins is False else self._count
        if isinstance(begins, str):
            self.open = self._named.setdefault(begins, self._count)

    def block(self, value: int) -> int | None:
        """Return the block of a value by its id; None: it is kept."""
        return self._block_of.get(value)

    def note(self, value: int) -> None:
        """Note that a value is computed in the open block."""
        if self.open:
            self._block_of[value] = self.open

    def read(self, operands: Iterable[object]) -> None:
        """Keep operands of named blocks that something outside of their block reads."""
        for x in operands:
            block = self._block_of.get(x) if isinstance(x, ValueId) else None
            if block is not None and block != self.open and block in self._named.values():
                del self._block_of[x]
