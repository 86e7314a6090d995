"""Calls of a unit for two lengths as calls for any length."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mdfuse.plan.lines import Line, SlotRef
from mdfuse.plan.many_lengths import Calls, Size, fit, joined
from mdfuse.plan.tensor_meta import form_of


def test_what_fits() -> None:
    sizes = [(3, 5), (7, 7)]
    assert fit((3, 5), sizes) == Size((0,))
    assert fit((21, 35), sizes) == Size((0,), 7)
    assert fit((27, 125), sizes) == Size((0, 0, 0))
    assert fit((18, 50), sizes) == Size((0, 0), 2)
    assert fit((2, 4), sizes) == Size((0,), plus=-1)
    assert fit((81, 625), sizes) is None  # a power of 4
    assert fit((1, 9), sizes) is None


@pytest.mark.parametrize("at", [(3, 5), (5, 3), (2, 9)])
def test_what_fits_has_both_values(at: tuple[int, int]) -> None:
    for pair in [(a, b) for a in range(1, 60) for b in range(1, 60) if a != b]:
        found = fit(pair, [at])
        if found is not None:
            assert (found.at([at[0]]), found.at([at[1]])) == pair


def calls(build: Callable[[int], list[Line]], n: int, takes: int = 1, first: int = 0) -> Calls:
    """Calls for a length, whose slots begin at a number."""
    lines = build(n)
    makes = lines[-1].targets
    forms = tuple(form_of(torch.empty(n, 4, device="meta")) for _ in range(takes))
    return Calls(tuple(lines), tuple(range(first, first + takes)), makes, forms)


def view(n: int) -> list[Line]:
    return [Line(run="reshape", args=(SlotRef(0), (2 * n, 2)), into=1)]


def test_numbers_of_arguments() -> None:
    found = joined(calls(view, 3), calls(view, 5))
    assert found is not None and found.hints == (5,) and found.places == ((0, 0),)
    for n in (3, 5, 8):
        assert found.are(calls(view, n))
        (y,) = found.run(torch.arange(4.0 * n).view(n, 4))
        assert y.shape == (2 * n, 2)


def test_other_numbers_than_those_of_sizes() -> None:
    """A number that agrees at two lengths by chance does not at a third."""

    def other(n: int) -> list[Line]:
        return [Line(run="narrow", args=(SlotRef(0), 0, 0, {3: 2, 5: 4}.get(n, 1)), into=1)]

    found = joined(calls(other, 3), calls(other, 5))
    assert found is not None
    assert not found.are(calls(other, 8))


def test_numbers_of_no_sizes() -> None:
    def squared(n: int) -> list[Line]:
        return [Line(run="narrow", args=(SlotRef(0), 0, 0, n // 4), into=1)]

    assert joined(calls(squared, 9), calls(squared, 30)) is None


def holding(n: int) -> Callable[..., Any]:
    """A function that holds on to a number."""
    return lambda x, *, start=0: x.narrow(0, start, n - 1)


@pytest.mark.parametrize(
    "run",
    [
        holding,
        lambda n: functools.partial(torch.narrow, dim=0, start=1, length=n - 1),
        lambda n: functools.partial(holding(n), start=1),
    ],
    ids=["closure", "partial", "both"],
)
def test_numbers_that_functions_hold_on_to(run: Callable[[int], Any]) -> None:
    def build(n: int) -> list[Line]:
        return [Line(run=run(n), args=(SlotRef(0),), into=1)]

    found = joined(calls(build, 3), calls(build, 5))
    assert found is not None
    x = torch.arange(32.0).view(8, 4)
    (y,) = found.run(x)
    assert torch.equal(y, run(8)(x)) and found.are(calls(build, 8))


def test_slots_have_other_numbers() -> None:
    """What counts is which is which."""

    def build(a: int, b: int, c: int) -> list[Line]:
        return [Line(run=torch.sub, args=(SlotRef(a), SlotRef(b)), into=c)]

    def of(n: int, *slots: int, takes: tuple[int, int] = (0, 1)) -> Calls:
        forms = (form_of(torch.empty(n, 4, device="meta")),) * 2
        return Calls(tuple(build(*slots)), tuple(slots[t] for t in takes), (slots[2],), forms)

    assert joined(of(3, 0, 1, 2), of(5, 7, 3, 1)) is not None
    assert joined(of(3, 0, 1, 2), of(5, 7, 3, 1, takes=(1, 0))) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda n: [Line(run="reshape", args=(SlotRef(0), [2 * n, 2]), into=1)],
        lambda n: [Line(run="view", args=(SlotRef(0), (2 * n, 2)), into=1)],
        lambda n: [Line(run="reshape", args=(SlotRef(0, "flat"), (2 * n, 2)), into=1)],
        lambda n: [Line(run="reshape", args=(SlotRef(0), (2 * n, 2, 1)), into=1)],
        lambda n: [Line(run="reshape", args=(SlotRef(0), (2 * n, True)), into=1)],
        lambda n: [*view(n), *view(n)],
        lambda n: [Line(run=operator.add, args=(SlotRef(0), n + 0.5), into=1)],
        lambda n: [Line(run="to", args=(SlotRef(0),), kwargs=(("dtype", torch.int8),), into=1)],
    ],
)
def test_calls_that_differ_in_more(other: Callable[[int], list[Line]]) -> None:
    assert joined(calls(view, 3), calls(other, 5)) is None
    assert joined(calls(other, 3), calls(view, 5)) is None


def test_no_lengths_of_none_or_one() -> None:
    for a, b in ((1, 5), (5, 1), (0, 5), (5, 0), (5, 5)):
        assert joined(calls(view, a), calls(view, b)) is None


def test_extents_that_are_made_of_smaller_ones() -> None:
    def of(n: int, m: int) -> Calls:
        shapes = [(n, n), (2 * n, m), (n * m, 1)]
        forms = tuple(form_of(torch.empty(shape, device="meta")) for shape in shapes)
        line = Line(run=torch.cat, args=([SlotRef(0)] * 3, n * m), into=3)
        return Calls((line,), (0, 1, 2), (3,), forms)

    found = joined(of(4, 9), of(6, 11))
    assert found is not None and len(found.places) == 2
    assert found.are(of(5, 30))
    assert not found.are(replace(of(5, 5), forms=of(5, 6).forms))
