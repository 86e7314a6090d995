"""A stated capacity of experts: who refuses which runs, in which form, and what is verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import CountsError, DefinitionError, DeviceMesh, FusionDefinition, ProgramError, Shard
from mdfuse.hir.text.parser import parse
from mdfuse.hir.verify.check import verify

EP, SPLIT, THERE = DeviceMesh.arange(ep=2), {"ep": Shard(0)}, {"ep": Shard(1)}
T, E, D = 8, 3, 4
FORMS = ("counted", "dense", "microbatches")


def defined(form: str, capacity: int | None, tokens: int = T, **how: Any) -> mf.FusionDefinition:
    with FusionDefinition("bounded") as fd:
        x = fd.define_tensor([tokens, D], torch.float64, EP, SPLIT, name="x")
        ids = fd.define_tensor([tokens, 2], torch.int64, EP, SPLIT, name="ids")
        up = fd.define_tensor([E, D, D], torch.float64, EP, SPLIT, name="up")
        n = fd.ops.counts(ids, experts=E, parts=2)
        rows = fd.ops.set(fd.ops.group_rows(x, ids, n, capacity, **how)).on(EP, THERE)
        product = fd.ops.grouped_mm(rows, up)
        y = fd.ops.ungroup_rows(fd.ops.set(product).on(EP, SPLIT), ids)
        for result in (y, *mf.grad((y * y).sum(), [x, up])):
            fd.add_output(result)
        if form == "dense":
            fd.add_output(product)
    return fd


def compiled(form: str, capacity: int | None, tokens: int = T) -> mf.Program:
    fd = defined(form, capacity, tokens)
    if form != "microbatches":
        return mf.compile(fd)
    return mf.pipeline(fd, microbatches=2, batch={"x": 0, "ids": 0})


def given(ids: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    x, up = (torch.randn(*s, dtype=torch.float64) for s in ((len(ids), D), (E, D, D)))
    return [x, ids, up]


def by_loop(x: Tensor, ids: Tensor, up: Tensor) -> list[Tensor]:
    a, u = (v.clone().requires_grad_() for v in (x, up))
    none = torch.zeros(D, dtype=torch.float64)
    rows = [
        sum((r @ u[e] for e in c if e >= 0), none) for r, c in zip(a, ids.tolist(), strict=True)
    ]
    y = torch.stack([*rows, *(r for r in a[:0])]) + 0 * a
    return [y.detach(), *torch.autograd.grad((y * y).sum() + 0 * u.sum(), [a, u])]


#: What all tokens choose -> the most rows of a part for an expert, whose part, for whom.
CHOICES: dict[str, tuple[list[list[int]], int, int, int]] = {
    "one rank has more": ([[0, 1], [1, 2], [2, 0], [0, 1], *[[2, 0], [2, 1]] * 2], 4, 1, 2),
    "all to one expert": ([[1, -1]] * 8, 4, 0, 1),
    "both choices alike": ([[2, 2]] * 8, 8, 0, 2),
    "a rank without rows": ([[-1, -1]] * 4 + [[0, 1], [0, 2], [0, 1], [1, 2]], 3, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("form", ["counted", "dense"])
@pytest.mark.parametrize("name", CHOICES)
def test_over_the_capacity_a_run_is_refused(name: str, form: str) -> None:
    choices, most, part, expert = CHOICES[name]
    values = given(torch.tensor(choices))
    program = compiled(form, most)
    wanted = by_loop(*values)
    check_everywhere(program, values, wanted + mf.reference(defined(form, most), values)[3:])
    lower = compiled(form, most - 1)
    said = (
        f"counts {most} rows of part {part} for expert {expert}, of which there may be {most - 1}"
    )
    with pytest.raises(CountsError, match=said) as refused:
        mf.simulate(lower, values)
    for text in ("test_count_rows_capacity.py", "group_rows(x, ids, n, capacity", "drop=True"):
        assert text in str(refused.value), refused.value
    none = given(torch.full((T, 2), -1))
    check_everywhere(lower, none, by_loop(*none) + mf.reference(defined(form, most), none)[3:])


def test_each_microbatch_has_the_capacity() -> None:
    """Four rows of the whole batch are two of each microbatch; three of one are too many."""
    even = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2], [1, 0], [2, 0], [1, 0], [2, 0]])
    values = given(even)
    program = compiled("microbatches", 2)
    check_everywhere(program, values, by_loop(*values))
    skewed = torch.tensor([[0, 0], [0, 1], [2, 1], [1, 2], [1, 0], [2, 0], [1, 0], [2, 0]])
    with pytest.raises(CountsError, match="3 rows of part 0 for expert 0, of which there may be 2"):
        mf.simulate(program, given(skewed))
    check_everywhere(program, values, by_loop(*values))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_ranks_without_tokens(tokens: int) -> None:
    values = given(torch.tensor([[2, 0]] * tokens))
    most = -(-tokens // 2)
    check_everywhere(compiled("counted", most, tokens), values, by_loop(*values))
    with pytest.raises(CountsError, match=f"{most} rows of part 0 for expert 0"):
        mf.simulate(compiled("counted", most - 1, tokens), values)


@pytest.mark.parametrize("form", ["counted", "dense"])
@pytest.mark.parametrize(("tokens", "how"), [(3, {"capacity": 0}), (0, {"capacity": None})])
def test_no_row_at_all(form: str, tokens: int, how: dict[str, Any]) -> None:
    """A capacity of 0 drops all rows; where there is no token there is none to move."""
    is_dropped = how["capacity"] is not None
    program = mf.compile(defined(form, tokens=tokens, drop=is_dropped, **how))
    values = given(torch.zeros(tokens, 2, dtype=torch.int64))
    zeros = [torch.zeros_like(v) for v in (values[0], values[0], values[2])]
    wide = torch.zeros(2, E, program.fusion.values[program.fusion.outputs[-1]].shape[2], D)
    check_everywhere(program, values, [*zeros, *([wide.double()] if form == "dense" else [])])
    if tokens:
        with pytest.raises(CountsError, match="4 rows of part 0 for expert 0"):
            mf.simulate(mf.compile(defined(form, 0, tokens)), values)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_explained(form: str) -> None:
    said = "all ranks refuse runs with over 3 rows of a part for an expert"
    assert said in compiled(form, 3).explain()
    assert said not in compiled(form, None).explain()
    drops = mf.compile(defined(form, 3, drop=True)).explain()
    assert "rows over the capacity of 3 per part and expert are dropped" in drops


def test_the_lowest_of_several_counts() -> None:
    with FusionDefinition("two") as fd:
        x = fd.define_tensor([4, D], torch.float64, EP, SPLIT, name="x")
        ids = fd.define_tensor([4], torch.int64, EP, SPLIT, name="ids")
        n = fd.ops.counts(ids, experts=E, parts=2)
        for most in (2, 1, 3):
            rows = fd.ops.set(fd.ops.group_rows(x * most, ids, n, most)).on(EP, THERE)
            fd.add_output(fd.ops.ungroup_rows(fd.ops.set(rows).on(EP, SPLIT), ids))
    program = mf.compile(fd)
    assert "each=1)" in str(program)
    x = torch.randn(4, D, dtype=torch.float64)
    check_everywhere(program, [x, torch.tensor([0, 1, 2, 1])], [2 * x, x, 3 * x])
    with pytest.raises(CountsError, match="2 rows of part 1 for expert 2, of which there may be 1"):
        mf.simulate(program, [x, torch.tensor([0, 1, 2, 2])])


@pytest.mark.parametrize("how", [{"capacity": -1}, {"capacity": None, "drop": True}], ids=str)
def test_wrong_capacities(how: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match="a capacity is a number of rows from 0 on"):
        defined("counted", **how)


#: name -> what is written, what by hand instead.
BROKEN: dict[str, tuple[str, str]] = {
    "not refused": (", each=3)", ")"),
    "a higher bound": ("each=3)", "each=4)"),
    "a lower capacity": ("capacity=3)", "capacity=2)"),
    "other counts": ("fetch(%n.all,", "fetch(%other,"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_capacity_that_nothing_holds_is_seen(name: str, form: str) -> None:
    text = str(compiled(form, 3))
    verify(parse(text))
    index = ".i" if form == "microbatches" else ""
    written, by_hand = (x.replace("%n.", f"%n{index}.") for x in BROKEN[name])
    assert written in text
    if name == "other counts":
        at = next(x for x in text.splitlines() if "= fetch(" in x)
        kind = at[at.index("i64") : at.index("= fetch")]
        text = text.replace(at, f"  %other: {kind}= add(%n{index}.all, 0)\n{at}")
    with pytest.raises(ProgramError, match=r"no fetch before refuses over|counts by"):
        verify(parse(text.replace(written, by_hand, 1)))


@pytest.mark.parametrize("form", ["dense"])
def test_a_fetch_behind_the_rows_is_too_late(form: str) -> None:
    lines = [x.split("#")[0] for x in str(compiled(form, 3)).splitlines()]
    at = next(n for n, x in enumerate(lines) if "= fetch(" in x)
    freed = next(n for n, x in enumerate(lines) if "free" in x and "%n.all" in x)
    moved = [*lines[:at], *lines[freed + 1 :]]
    end = next(n for n, x in enumerate(moved) if "return" in x)
    moved[end:end] = lines[at : at + 1]
    with pytest.raises(ProgramError, match="no fetch before refuses over 3 rows"):
        verify(parse("\n".join(moved)))
