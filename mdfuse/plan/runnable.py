"""The plans, or functions in their place, that an evaluator keeps for each kind of arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor

from mdfuse.errors import IndexRangeError
from mdfuse.plan.build import Plan
from mdfuse.plan.index_checks import IndexChecks
from mdfuse.plan.tensor_meta import Form, form_of

if TYPE_CHECKING:
    from mdfuse.plan.graphs import GraphPlan


#: A plan, eager or captured, or a function in its place; `Plan` describes the members.
Runnable: TypeAlias = "Plan | GraphPlan | ByCall"


@dataclass(frozen=True)
class ByCall:
    """A run that a function makes, for arguments of one kind.

    Attributes:
        call: takes the arguments and the caller's buffers, and returns the results.
        numbers, may_overlap, records: as of a plan.
        release: gives up buffers that it keeps.
        quick: the run by one graph alone, which there is not.
    """

    call: Callable[[Sequence[Any], Sequence[Any] | None], list[Any]]
    numbers: bool
    may_overlap: bool
    records: bool
    release: Callable[[], None]
    quick: ClassVar[None] = None

    def run(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None = None,
        at: Sequence[int] | None = None,
    ) -> list[Any]:
        return self.call(arguments, out)


@dataclass(frozen=True)
class Once(ByCall):
    """A plan that has run once; when arguments of its kind come again, it is captured.

    Attributes:
        plan: the plan.
        addresses: slot -> the address of the caller's buffer in that run.
        fresh: for each output of that run its form; None where it is no dense tensor with memory of
            its own.
    """

    plan: Plan
    addresses: dict[int, int]
    fresh: list[Form | None]

    def stay(self, other: Plan, now: Mapping[int, int]) -> dict[int, int]:
        """Return the addresses of the caller's buffers that did not move, by slots of another plan.

        Args:
            other: a plan of the same program.
            now: slot of this plan -> the address in this run.
        """
        pairs = [
            *zip(self.plan.inputs, other.inputs, strict=True),
            *zip(self.plan.given, other.given, strict=False),
        ]
        return {
            new: at
            for old, new in pairs
            if old is not None and new is not None
            if (at := self.addresses.get(old)) is not None and at == now[old]
        }


def once(plan: Plan, addresses: dict[int, int]) -> Once:
    """Return a plan before its first run, whose results it looks at."""
    fresh: list[Form | None] = []

    def call(arguments: Sequence[Any], out: Sequence[Any] | None) -> list[Any]:
        results = plan.run(arguments, out)
        taken = Counter(
            x.untyped_storage().data_ptr()
            for x in (*arguments, *(out or ()), *results)
            if isinstance(x, Tensor)
        )
        fresh[:] = [
            form_of(x)
            if isinstance(x, Tensor)
            and taken[x.untyped_storage().data_ptr()] == 1
            and x.untyped_storage().nbytes() == x.nbytes
            else None
            for x in results
        ]
        return results

    return Once(**_around(plan, call), plan=plan, addresses=addresses, fresh=fresh)


def checked(
    plan: Plan | ByCall, checks: IndexChecks, meet: Callable[[IndexRangeError | None], None]
) -> ByCall:
    """Return a plan that checks indices; after each run all ranks exchange their errors.

    Args:
        plan: the plan.
        checks: the checks of this rank.
        meet: raises on all ranks where one of them has a problem.
    """

    def call(arguments: Sequence[Any], out: Sequence[Any] | None) -> list[Any]:
        checks.take()
        results = plan.run(arguments, out)
        meet(checks.take())
        return results

    return ByCall(**_around(plan, call))


def _around(
    plan: Plan | ByCall, call: Callable[[Sequence[Any], Sequence[Any] | None], list[Any]]
) -> dict[str, Any]:
    """Return the fields of a run in the place of a plan's."""
    return {
        "call": call,
        "numbers": plan.numbers,
        "may_overlap": plan.may_overlap,
        "records": plan.records,
        "release": plan.release,
    }
