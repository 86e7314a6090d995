"""Changes of instructions that are made at once, so that positions stay those of before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mdfuse.hir.program import Instruction

#: An index into a code; of what is in a host unit that of the unit, and one into its body.
Position = int | tuple[int, int]


@dataclass(slots=True)
class Edits:
    """Changes of a code, by position.

    Attributes:
        code: the instructions as they are.
        ahead: position -> what comes before the instruction that stands there.
        instead: position -> what takes the place of the instruction.
        gone: names that nothing binds any more, and so nothing frees.
    """

    code: Sequence[Instruction]
    ahead: defaultdict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    instead: dict[Position, list[Instruction]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def drop(self, *positions: Position) -> None:
        """Let instructions go."""
        self.instead.update((n, []) for n in positions)

    def move(self, position: int, to: int) -> None:
        """Move an instruction before the one that stands at another position."""
        self.ahead[to].append(self.code[position])
        self.drop(position)

    def unfree(self, position: int, names: Iterable[str]) -> None:
        """Let a `free` at a position no longer free some names."""
        row = self.instead.get(position, [self.code[position]])
        self.instead[position] = [j for i in row for j in _without(i, {*names})]

    def result(self) -> tuple[Instruction, ...]:
        """Return the code with all changes."""
        code: list[Instruction] = []
        for n, i in enumerate(self.code):
            code += self.ahead.get(n, ())
            row = self.instead.get(n)
            if row is None:
                row = [self._unit(n, i) if i.op == "launch" and self.gone else i]
            code += (k for j in row for k in _without(j, self.gone)) if self.gone else row
        return (*code, *self.ahead.get(len(self.code), ()))

    def _unit(self, n: int, unit: Instruction) -> Instruction:
        """Return a host unit with the changes inside it."""
        outputs = tuple(x for x in unit.outputs if x not in self.gone)
        rows = (self.instead.get((n, m), [j]) for m, j in enumerate(unit.body))
        return replace(unit, outputs=outputs, body=tuple(j for row in rows for j in row))


def _without(i: Instruction, gone: set[str]) -> Sequence[Instruction]:
    """Return an instruction that frees no names that are gone."""
    if i.op != "free" or gone.isdisjoint(i.reads):
        return [i]
    left = tuple(x for x in i.reads if x not in gone)
    return [i.changed(inputs=left)] if left else []
