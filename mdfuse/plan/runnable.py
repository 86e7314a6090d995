"""The plans, or wrappers of plans, that an evaluator keeps for each kind of arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from mdfuse.errors import IndexRangeError
from mdfuse.plan.build import Plan
from mdfuse.plan.index_checks import IndexChecks
from mdfuse.plan.tensor_meta import Form, form_of

if TYPE_CHECKING:
    from mdfuse.plan.graphs import GraphPlan


#: A plan, eager or captured, or a wrapper; `Plan` describes the members.
Runnable: TypeAlias = "Plan | GraphPlan | ByCall | _Around"


@dataclass(frozen=True)
class ByCall:
    """A run that a function makes, for arguments of one kind.

    Attributes:
        call: takes the arguments and the caller's buffers, and returns the results.
        numbers, may_overlap, records: as of a plan.
        forget: gives up buffers that it keeps.
    """

    call: Callable[[Sequence[Any], Sequence[Any] | None], list[Any]]
    numbers: bool
    may_overlap: bool
    records: bool
    forget: Callable[[], None]

    @property
    def quick(self) -> None:
        """The run by one graph alone, which there is not."""
        return None

    def run(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None = None,
        at: Sequence[int] | None = None,
    ) -> list[Any]:
        return self.call(arguments, out)

    def release(self) -> None:
        self.forget()


@dataclass(frozen=True)
class _Around:
    """A wrapper that passes everything on to a plan."""

    plan: Plan | ByCall

    @property
    def numbers(self) -> bool:
        return self.plan.numbers

    @property
    def may_overlap(self) -> bool:
        return self.plan.may_overlap

    @property
    def records(self) -> bool:
        return self.plan.records

    @property
    def quick(self) -> None:
        """The run by one graph alone, if there is one; `GraphPlan` has it."""
        return None

    def run(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None = None,
        at: Sequence[int] | None = None,
    ) -> list[Any]:
        return self.plan.run(arguments, out, at)

    def release(self) -> None:
        self.plan.release()


@dataclass(frozen=True)
class Once(_Around):
    """A plan that has run once; when arguments of its kind come again, it is captured.

    Attributes:
        addresses: slot -> the address of the caller's buffer in that run.
        fresh: for each output of that run its form; None where it is no dense tensor with memory of
            its own.
    """

    plan: Plan
    addresses: dict[int, int]
    fresh: list[Form | None] = field(default_factory=list)

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

    def run(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None = None,
        at: Sequence[int] | None = None,
    ) -> list[Any]:
        results = self.plan.run(arguments, out)
        taken = Counter(
            x.untyped_storage().data_ptr()
            for x in (*arguments, *(out or ()), *results)
            if isinstance(x, Tensor)
        )
        self.fresh[:] = [
            form_of(x)
            if isinstance(x, Tensor)
            and taken[x.untyped_storage().data_ptr()] == 1
            and x.untyped_storage().nbytes() == x.nbytes
            else None
            for x in results
        ]
        return results


@dataclass(frozen=True)
class CheckedPlan(_Around):
    """A plan that checks indices; after each run all ranks exchange their errors.

    Attributes:
        checks: the checks of this rank.
        meet: raises on all ranks where one of them has a problem.
    """

    checks: IndexChecks
    meet: Callable[[IndexRangeError | None], None]

    def run(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None = None,
        at: Sequence[int] | None = None,
    ) -> list[Any]:
        """Run once; return the results where no rank found an index out of range."""
        self.checks.take()
        results = self.plan.run(arguments, out)
        self.meet(self.checks.take())
        return results
