"""Caches of a processor: what work takes more since they no longer hold what it reads.

Costs are measured where one thing is done again and again, so that its code is in the cache of its
core. In a program other work goes through more bytes than that holds before its like comes again.
Weights are measured where some shared cache has them; a program that has many reads them from
memory in each of its runs. The more rows a product has, the more of that it does beside computing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mdfuse.errors import ProgramError
from mdfuse.hir.instructions import COMMUNICATIONS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.seeing.amounts import buffer_bytes, is_work, nbytes, product
from mdfuse.seeing.curves import Curve

#: What all work has in common: what hands it to a library.
ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """What the caches of a processor hold, and what it takes where they do not.

    Attributes:
        core: bytes that work goes through until the cache of its core has lost what was there.
        returns: kind of work, "gelu", or "*" for those not measured -> seconds that it takes more
            where it comes again behind so many bytes; "any" -> what any work takes more behind one
            of another kind that went through so many by itself.
        shared: bytes of inputs of a program that some cache has from run to run.
        stale: seconds more for each byte that is read of inputs, in a program with more of them, by
            rows of the product that reads them: of fewer than the first, and of what is no product,
            the first; of more than the last, the last. None: nothing is known of it.

    Raises:
        ProgramError: a number is negative or infinite.
    """

    core: int = 0
    returns: Mapping[str, float] = field(default_factory=dict)
    shared: int = 0
    stale: Curve | None = None

    def __post_init__(self) -> None:
        found: dict[str, float] = {"core": self.core, "shared": self.shared}
        found |= {f"returns[{kind!r}]": seconds for kind, seconds in self.returns.items()}
        for name, number in found.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not 0 <= number < math.inf:
                raise ProgramError(
                    f"{name}={number!r}",
                    because="it is bytes that a cache holds, or seconds",
                    hint="a number of at least 0",
                )

    def again(self, kind: str) -> float:
        """Return the seconds that a kind of work takes more where its code is in no near cache."""
        return self.returns.get(kind, 0.0 if kind == ANY else self.returns.get("*", 0.0))

    def of_memory(self, rows: int) -> float:
        """Return the seconds more for each byte that a product of some rows reads from memory."""
        if self.stale is None:
            return 0.0
        return self.stale.seconds(min(rows, self.stale.points[-1][0]))


class Cold:
    """What the work of one rank takes more than in a loop of its like, asked in its order.

    The program runs again and again: before its first instruction comes its last.

    Args:
        program: a rank's, written out.
        caches: of its processor; None: nothing is known of them.
    """

    def __init__(self, program: HostProgram, caches: Caches | None) -> None:
        self._program, self._caches = program, caches
        self._stale: set[str] = set()
        self._at, self._last = 0, dict[str, int]()
        self._before: tuple[str, ...] = ()
        if caches is None:
            return
        if sum(buffer_bytes(program, x) for x in program.inputs) > caches.shared:
            self._stale.update(program.inputs)
        for i in program.instructions:
            if is_work(i):
                self._pass(i)
            elif i.op not in COMMUNICATIONS and not self._stale.isdisjoint(i.reads):
                self._stale.update(i.outputs)  # a view of it
        self._last = {kind: at - self._at for kind, at in self._last.items()}
        self._at = 0

    def seconds(self, i: Instruction) -> float:
        """Return the seconds that the next work takes more."""
        if self._caches is None:
            return 0.0
        kinds = _kinds(i)
        asked = kinds if kinds == self._before else (*kinds, ANY)
        lost = [k for k in asked if self._at - self._last[k] > self._caches.core]
        self._pass(i)
        return self._from_memory(self._caches, i) + sum(map(self._caches.again, lost))

    def _from_memory(self, caches: Caches, i: Instruction) -> float:
        read = sum(buffer_bytes(self._program, x) for x in {*i.reads} & self._stale)
        if not read:
            return 0.0
        _, rows, *_ = product(self._program, i) or (1, 1)
        return caches.of_memory(rows) * min(read, nbytes(self._program, i))

    def _pass(self, i: Instruction) -> None:
        self._last[ANY] = self._at
        self._at += nbytes(self._program, i)
        self._before = _kinds(i)
        self._last.update(dict.fromkeys(self._before, self._at))


def _kinds(i: Instruction) -> tuple[str, ...]:
    """Return the kinds of work that an instruction is, or those in a launch."""
    some = i.body if i.op == "launch" else (i,)
    return tuple(dict.fromkeys(j.fn or j.op for j in some if is_work(j)))
