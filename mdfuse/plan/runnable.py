"""What an evaluator keeps for arguments of a kind: a plan, or what stands for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mdfuse.errors import IndexRangeError
from mdfuse.plan.build import Plan
from mdfuse.plan.index_checks import IndexChecks


class Runnable(Protocol):
    """A plan, eager or captured; see `Plan` for what is asked of it."""

    @property
    def numbers(self) -> bool: ...

    @property
    def may_overlap(self) -> bool: ...

    @property
    def records(self) -> bool: ...

    def run(self, arguments: Sequence[Any], out: Sequence[Any] | None = None) -> list[Any]: ...

    def release(self) -> None: ...


@dataclass(frozen=True)
class _Around:
    """Something around a plan."""

    plan: Plan

    @property
    def numbers(self) -> bool:
        return self.plan.numbers

    @property
    def may_overlap(self) -> bool:
        return self.plan.may_overlap

    @property
    def records(self) -> bool:
        return self.plan.records

    def run(self, arguments: Sequence[Any], out: Sequence[Any] | None = None) -> list[Any]:
        return self.plan.run(arguments, out)

    def release(self) -> None:
        self.plan.release()


@dataclass(frozen=True)
class Once(_Around):
    """The plan of a kind of arguments that ran once, and where they lay: next it is captured."""

    addresses: dict[int, int]


@dataclass(frozen=True)
class CheckedPlan(_Around):
    """A plan after each run of which all ranks meet.

    Attributes:
        checks: what it finds.
        meet: raises on all ranks where one has a problem.
    """

    checks: IndexChecks
    meet: Callable[[IndexRangeError | None], None]

    def run(self, arguments: Sequence[Any], out: Sequence[Any] | None = None) -> list[Any]:
        """Run once; the results where no rank found anything."""
        self.checks.take()
        results = self.plan.run(arguments, out)
        self.meet(self.checks.take())
        return results
