"""Extents as expressions: their numbers, their texts, and the guards that decisions leave."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from helpers import sampling
from hypothesis import given

from mdfuse.errors import ProgramError
from mdfuse.extents.assumptions import Assumptions, assuming
from mdfuse.extents.extent import (
    Extent,
    are_same,
    example,
    larger,
    mapped,
    pinned,
    smaller,
    symbolic,
    with_examples,
    with_numbers,
)

#: An expression: a function of the symbols x and y.
Drawn = Callable[[Any, Any], Any]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> Drawn:
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        n = draw(st.integers(0, 9))
        return draw(st.sampled_from([lambda x, y: x, lambda x, y: y, lambda x, y: n]))
    a, b = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    k = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return draw(
        st.sampled_from(
            [
                lambda x, y: a(x, y) + b(x, y),
                lambda x, y: a(x, y) - b(x, y),
                lambda x, y: a(x, y) * b(x, y),
                lambda x, y: a(x, y) // k,
                lambda x, y: a(x, y) % k,
                lambda x, y: -(-a(x, y) // k),
                lambda x, y: smaller(a(x, y), b(x, y)),
                lambda x, y: larger(a(x, y), b(x, y)),
            ]
        )
    )


TESTS: list[Callable[[Any, Any], bool]] = [
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
    lambda a, b: bool(a - b),
]

NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 24, 100])


@given(
    conditions=st.lists(
        st.tuples(expressions(), expressions(), st.sampled_from(TESTS)), min_size=1, max_size=4
    ),
    examples=st.tuples(NUMBERS, NUMBERS),
)
@sampling.examples(150)
def test_where_the_guards_hold_all_decisions_are_the_same(
    conditions: list[tuple[Drawn, Drawn, Callable[[Any, Any], bool]]], examples: tuple[int, int]
) -> None:
    """And the expressions have the right numbers; the examples themselves satisfy the guards."""
    with assuming(Assumptions()) as assumed:
        x, y = (symbolic(s, n) for s, n in zip("xy", examples, strict=True))
        sides = [(a(x, y), b(x, y)) for a, b, _ in conditions]
        decided = [bool(test(a, b)) for (a, b), (_, _, test) in zip(sides, conditions, strict=True)]
        later = [a(x, y) for a, _, _ in conditions]
    assert assumed.hold(dict(zip("xy", examples, strict=True)))
    for n in range(16):
        for m in (*range(6), 8, 24):
            extents = {"x": n, "y": m}
            if not assumed.hold(extents):
                continue
            plain = [(a(n, m), b(n, m)) for a, b, _ in conditions]
            assert [bool(t(*p)) for p, (_, _, t) in zip(plain, conditions, strict=True)] == decided
            assert with_numbers(later, extents) == [a for a, _ in plain]


@given(drawn=expressions(4), examples=st.tuples(NUMBERS, NUMBERS))
@sampling.examples(150)
def test_expressions_have_the_numbers_of_their_symbols(
    drawn: Drawn, examples: tuple[int, int]
) -> None:
    made = drawn(*(symbolic(s, n) for s, n in zip("xy", examples, strict=True)))
    assert example(made) == drawn(*examples)
    for n in range(0, 20, 3):
        for m in (0, 1, 5):
            assert with_numbers((made,), {"x": n, "y": m}) == (drawn(n, m),)


def guards(decide: Callable[..., object], **examples: int) -> list[str]:
    with assuming(Assumptions()) as assumed:
        decide(*(symbolic(s, n) for s, n in examples.items()))
    return [str(g) for g in assumed.guards]


@pytest.mark.parametrize(
    ("decide", "expected"),
    [
        (lambda x: x > 1, ["x > 1"]),
        (lambda x: x % 4 == 0, ["x mod 4 == 0"]),
        (lambda x: (x % 4 == 0, x % 6 == 0), ["x mod 12 == 0"]),
        (lambda x: (x > 3, x > 1, x > 5), ["x > 5"]),
        (lambda x: (x != 1, x != 0), ["x > 1"]),
        (lambda x: 0 in (3, x), ["x > 0"]),
        (lambda x: 64 * x > 4096, ["x > 64"]),
        (lambda x: -(-x // 4) <= 1, ["x > 4"]),
        (lambda x: x < 100, ["x > 99"]),
        (lambda x: 4 * (-(-x // 4)) == x, ["x mod 4 == 0"]),
        (lambda x: (x >= 0, x == -1, x - x == 0, 2 * x == x + x, x // x == 1), ["x > 0"]),
        (lambda x: smaller(-(-x // 4), x) > x, []),
        (lambda x: range(x), ["x == 840"]),
        (lambda x: math.sqrt(x), ["x == 840"]),
        (lambda x: hash(x), ["x == 840"]),
        (lambda x: x / 2, ["x == 840"]),
        (lambda x: x > 1.5, ["x == 840"]),
        (lambda x: [1, 2, 3][:x], ["x == 840"]),
        (lambda x: divmod(x, 8), []),
        (lambda x: abs(x), []),
    ],
)
def test_guards(decide: Callable[[int], object], expected: list[str]) -> None:
    assert guards(decide, x=840) == expected


def test_guards_of_two_symbols() -> None:
    assert guards(lambda x, y: x == y, x=8, y=8) == ["y == x"]
    assert guards(lambda x, y: (x == y, y % 8 == 0, x > 3), x=8, y=8) == [
        "y == x", "x mod 8 == 0", "x > 3"
    ]  # fmt: skip
    assert guards(lambda x, y: x * y > 2 * x, x=8, y=8) == ["x > 0", "y > 2"]
    assert guards(lambda x, y: x * 5 > y * 4, x=8, y=8) == ["5*x > 4*y"]
    assert guards(lambda x, y: (x == 8, x == y), x=8, y=8) == ["x == 8", "y == 8"]


def test_texts() -> None:
    x, y = symbolic("x.0", 8), symbolic("y.1", 3)
    assert str(x * 2 + y - 1) == "2*x.0+y.1-1"
    assert str(-(-x // 4)) == "(x.0+3)//4"
    assert f"{x * y}" == "x.0*y.1"
    assert repr((x, 3)) == "(x.0, 3)"
    assert str(smaller(x, y)) == "min(x.0, y.1)"
    with assuming(Assumptions()):
        assert x % 4 == 0
        assert str(-(-x // 4)) == "x.0//4"


def test_numbers_stay_numbers() -> None:
    x = symbolic("x", 8)
    assert type(x - x) is int
    assert type(x * 0 + 3) is int
    assert smaller(3, 4) == 3
    assert larger(3, 4) == 4
    assert are_same(x + 1, 1 + x)
    assert not are_same(x, 8)
    assert (x == "x") is False
    with pytest.raises(ZeroDivisionError):
        x // 0
    with pytest.raises(TypeError):
        x + "a"


def test_changing_programs() -> None:
    x = symbolic("x", 8)
    nested = {"a": (x, [x * 2]), "b": (1, 2)}
    assert with_numbers(nested, {"x": 3}) == {"a": (3, [6]), "b": (1, 2)}
    assert mapped(nested, example) == {"a": (8, [16]), "b": (1, 2)}
    plain = (1, (2, 3))
    assert with_numbers(plain, {}) is plain
    (renamed,) = with_examples((x * 2,), {"z": 5}, {"x": "z"})
    assert str(renamed) == "2*z"
    assert example(renamed) == 10
    again = pickle.loads(pickle.dumps(x + 1))
    assert isinstance(again, Extent)
    assert str(again) == "x+1"


def test_pinned() -> None:
    assert pinned(symbolic("x", 8)) == 8
    assert guards(pinned, x=8) == ["x == 8"]
    assert pinned(7) == 7


@pytest.mark.parametrize(("start", "end"), [(1, 0), (0, 1), (1, 1), (2, 3)])
def test_slices_of_slices_stay_short(start: int, end: int) -> None:
    """Each x[start:-end] refers to the extent before several times; its text must not double."""
    x = symbolic("x", 1680)
    extent: Any = x
    for _ in range(30):
        first = smaller(start, extent)
        last = larger(extent - end, 0)
        extent = larger(smaller(larger(first, last), extent) - smaller(first, extent), 0)
    assert str(extent) == f"max(0, x-{30 * (start + end)})"
    for n in (0, 1, 29, 30, 60, 151, 500):
        rows = list(range(n))
        for _ in range(30):
            rows = rows[start : len(rows) - end if len(rows) > end else 0]
        assert with_numbers(extent, {"x": n}) == len(rows)


def test_extents_that_nobody_could_read_are_refused() -> None:
    x = symbolic("x", 1680)

    def nested(extent: Any) -> Any:
        return nested(x + extent % (extent // 7 * (extent // 3) + 2))

    def multiplied(product: Any, n: int) -> Any:
        return multiplied(product * (symbolic(f"y{n}", 3) + 1), n + 1)

    with pytest.raises(ProgramError, match=r"an expression with \d+ operations"):
        nested(x)
    with pytest.raises(ProgramError, match=r"an expression with \d+ terms"):
        multiplied(1, 0)
