"""Which groups of expressions become segments, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard
from mdfuse.passes.segmentation import Group, check, merge_local, merge_nothing

TWO = DeviceMesh.arange(tp=2)
ROWS = {"tp": Shard(0)}


def residual(should_merge: Any = None) -> list[str]:
    """The segments of a program with single ops, composite ones and a reshard."""
    with FusionDefinition("residual") as fd:
        x = fd.define_tensor([8, 4], mesh=TWO, layout=ROWS)
        h = fd.ops.softmax(x, 1)
        g = fd.ops.log_softmax(h, 1)
        n = fd.ops.neg(g)
        a = fd.ops.set(n).on(TWO, {})
        b = fd.ops.exp(a)
        c = fd.ops.sin(b)
        fd.add_output(c)
    program = mf.compile(fd, should_merge=should_merge)
    return [" ".join(e.op for e in s.exprs) for s in program.segments]


def test_by_default_composite_operations_merge() -> None:
    assert residual() == ["softmax log_softmax", "neg", "set", "exp", "sin"]


def test_predicates_decide() -> None:
    assert residual(merge_local) == ["softmax log_softmax neg", "set", "exp sin"]
    assert residual(merge_nothing) == ["softmax", "log_softmax", "neg", "set", "exp", "sin"]

    def pairs(a: Group, b: Group) -> bool:
        return len(a.exprs) + len(b.exprs) <= 2

    assert residual(pairs) == ["softmax log_softmax", "neg", "set", "exp sin"]


def test_the_predicate_is_not_asked_of_reshards() -> None:
    asked = []

    def merge(a: Group, b: Group) -> bool:
        asked.append((str(a), str(b)))
        return True

    residual(merge)
    assert asked == [("(%h)", "(%g)"), ("(%h, %g)", "(%n)"), ("(%b)", "(%c)")]


def test_a_merge_that_would_make_a_cycle_is_not_made() -> None:
    """y needs a, and what a reshard makes of a."""
    with FusionDefinition("round") as fd:
        x = fd.define_tensor([4, 4], mesh=TWO, layout=ROWS)
        a = x + 1
        b = fd.ops.set(a).on(TWO, {})
        fd.add_output(a * fd.ops.set(b).on(TWO, ROWS))
    program = mf.compile(fd, should_merge=merge_local)
    assert [[e.op for e in s.exprs] for s in program.segments] == [
        ["add"],
        ["set"],
        ["set"],
        ["mul"],
    ]


# -- what is refused -----------------------------------------------------------------------------


def round_trip() -> FusionDefinition:
    with FusionDefinition("round") as fd:
        x = fd.define_tensor([4], name="x")
        a = x + 1
        b = a * 2
        c = b - a
        fd.add_output(c)
    return fd


def test_groups_in_a_cycle_are_refused() -> None:
    fusion = round_trip().fusion
    check(fusion, [["a", "b"], ["c"]])
    check(fusion, [["a", "b", "c"]])
    with pytest.raises(mf.LoweringError) as caught:
        check(fusion, [["a", "c"]])
    text = str(caught.value)
    for part in (
        "(%a, %c)", "(%b)", "@round", "%b = mul reads %a", "b = a * 2", "%c = sub reads %b",
        "c = b - a", "leave one of these expressions out",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([["a"], ["b", "a"]], r"%a is in two groups of @round\n.*a = x \+ 1"),
        ([["x"]], "%x is no result of an expression of @round"),
        ([["nothing"]], "%nothing is no result of an expression of @round"),
    ],
)
def test_groups_that_are_none_are_refused(groups: list[list[str]], says: str) -> None:
    with pytest.raises(mf.LoweringError, match=says):
        check(round_trip().fusion, groups)


def test_predicates_that_do_not_answer_are_refused() -> None:
    with pytest.raises(mf.LoweringError, match="should_merge=3") as caught:
        residual(3)
    assert "a function of two groups" in str(caught.value)
    with pytest.raises(mf.LoweringError) as caught:
        residual(lambda a, b: None)
    for part in ("answered None for (%h) and (%g)", "h = fd.ops.softmax(x, 1)", "True or False"):
        assert part in str(caught.value)

    def raises(a: Group, b: Group) -> bool:
        raise KeyError("missing")

    with pytest.raises(mf.LoweringError) as caught:
        residual(raises)
    for part in ("KeyError: 'missing'", "asked of (%h) and (%g)", "g = fd.ops.log_softmax(h, 1)"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
