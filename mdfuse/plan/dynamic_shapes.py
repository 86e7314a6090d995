"""The compiled functions of a program's units, for all lengths of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from mdfuse.plan import compilation
from mdfuse.plan.compilation import Made
from mdfuse.plan.inductor import TracedGraph
from mdfuse.plan.many_lengths import Calls, SymbolicCalls, joined

#: The first lengths of a unit have a function each; the later ones share one where they can.
ALONE = 2


@dataclass(frozen=True, slots=True)
class _Shared:
    """A function for many lengths: its calls, its trace, and its compiled form."""

    calls: SymbolicCalls
    traced: TracedGraph
    compiled: Made

    def serving(self, key: Hashable, calls: Calls) -> Made | None:
        """Return the function for some calls; None where it does not serve them."""
        serves, sizes = self.compiled.serves, self.calls.sizes(calls.forms)
        if serves is None or sizes is None or min(sizes) < 2 or not self.calls.are(calls):
            return None
        if not serves(sizes):
            return None
        return compilation.serve(key, calls.forms, self.compiled, self.traced.results_at(sizes))


@dataclass
class Lengths:
    """The functions of the units of one program.

    Attributes:
        counts: unit -> how many were compiled.
    """

    counts: Counter[str] = field(default_factory=Counter)
    _seen: dict[str, list[Calls]] = field(default_factory=dict)
    _shared: dict[str, list[_Shared]] = field(default_factory=dict)

    def served(self, unit: str, key: Hashable, calls: Calls) -> Made | None:
        """Return the function for many lengths that does some calls of a unit, if there is one."""
        functions = (shared.serving(key, calls) for shared in self._shared.get(unit, ()))
        return next((function for function in functions if function is not None), None)

    def added(self, unit: str, key: Hashable, calls: Calls) -> Made:
        """Return a new function of a unit, which is to be compiled."""
        self.counts[unit] += 1
        seen = self._seen.setdefault(unit, [])
        seen.append(calls)
        for earlier in reversed(seen[:-1] if len(seen) > ALONE else ()):
            many = joined(earlier, calls)
            if many is None:
                continue
            pair = compilation.traced_with_sizes(key, calls.forms, calls.run, many)
            if pair is not None:
                function, traced = pair
                self._shared.setdefault(unit, []).append(_Shared(many, traced, function))
                return function
        return compilation.traced(key, calls.forms, calls.run)
