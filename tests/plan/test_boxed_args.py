"""Launches that free what they read last: which operands those are, and what stays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mdfuse.plan.boxed_args import freeing
from mdfuse.plan.context import PlanStep
from mdfuse.plan.lines import Line, SlotRef, drop, write


class Compiled:
    """A function as torch's compiler makes one; it notes which operands it was left alone with."""

    def __init__(self, function: Callable[..., list[Tensor]]) -> None:
        self.freed: list[bool] = []

        def inner(given: list[Tensor]) -> list[Tensor]:
            operands, seen = [*given], [weakref.ref(x) for x in given]
            given.clear()
            results = function(*operands)
            del operands
            self.freed = [x() is None for x in seen]
            return results

        inner._boxed_call = True  # type: ignore[attr-defined]
        self._compiled_fn = inner

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        return self._compiled_fn([*operands])


def made(first: Compiled, then: Compiled, *between: Line, late: bool = False) -> Any:
    """Two launches of x; the second one reads both results of the first, which are dropped."""
    a, b, c = 1, 2, 3
    calls = (
        Line(run=first, args=(SlotRef(0),), into=(a, b), makes=64),
        Line(run=then, args=(SlotRef(a), SlotRef(0), SlotRef(b)), into=(c,), makes=64),
    )
    steps = [PlanStep(lines=(line,), label="", op="launch") for line in calls]
    steps += [PlanStep(lines=(line,), label="", op="view") for line in between]
    more = Line(run=torch.neg, args=(SlotRef(c),), into=9)
    steps += [PlanStep(lines=(more,), label="", op="neg")] if late else []
    steps.append(PlanStep(lines=(drop(a, b),), label="", op="free"))
    slots = count(20)
    context: Any = SimpleNamespace(new_slot=lambda: next(slots))
    lines = [line for step in freeing(steps, context) for line in step.lines]
    return write("two", lines, [0], [c], owned={}).call


def first() -> Compiled:
    return Compiled(lambda x: [x.sin(), x * 3])


def then() -> Compiled:
    return Compiled(lambda a, x, b: [a * x + b])


def test_what_is_dropped_behind_a_launch() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    one, two = first(), then()
    (got,) = made(one, two)(x)
    assert torch.equal(got, x.sin() * x + x * 3)
    assert one.freed == [False] and two.freed == [True, False, True]


def test_a_view_behind_the_launch_reads_it() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    view = Line(run="t", args=(SlotRef(1),), into=7, shares=(1,), is_view=True)
    two = then()
    (got,) = made(first(), two, view, drop(7))(x)
    assert torch.equal(got, x.sin() * x + x * 3)
    assert two.freed == [False, False, True]


def test_what_is_computed_before_the_drop() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    two = then()
    (got,) = made(first(), two, late=True)(x)
    assert torch.equal(got, x.sin() * x + x * 3)
    assert two.freed == [False, False, False]


def test_a_function_that_is_called_in_another_way() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    run: Any = made(lambda x: [x.sin(), x * 3], lambda a, x, b: [a * x + b])  # type: ignore[arg-type]
    assert torch.equal(run(x)[0], x.sin() * x + x * 3)
