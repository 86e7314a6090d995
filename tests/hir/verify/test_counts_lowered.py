"""Lowered programs whose counts are broken by hand: no verifier takes two values for one."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError, Shard
from mdfuse.hir.text.parser import parse
from mdfuse.hir.verify.check import verify

SPLIT, THERE = {"ep": Shard(0)}, {"ep": Shard(1)}


@cache
def text(capacity: int | None = None) -> str:
    """Two routes of as many parts as experts, so that any counts fit as types; both first."""
    mesh = DeviceMesh.arange(ep=2)
    with mf.FusionDefinition("two") as fd:
        x = fd.define_tensor([8, 4], torch.float64, mesh, SPLIT, name="x")
        up = fd.define_tensor([2, 4, 4], torch.float64, mesh, SPLIT, name="up")
        for name in ("ids", "jds"):
            ids = fd.define_tensor([8, 2], torch.int64, mesh, SPLIT, name=name)
            n = fd.ops.counts(ids, 2, 2)
            r = fd.ops.set(fd.ops.group_rows(x, ids, n, capacity)).on(mesh, THERE)
            y = fd.ops.set(fd.ops.grouped_mm(r, up)).on(mesh, SPLIT)
            fd.add_output(fd.ops.ungroup_rows(y, ids))
    shown = [line.split("  #")[0].rstrip() for line in str(mf.compile(fd)).splitlines()]
    lines = [
        x.replace("    %", "  %") for x in shown if not x.startswith(("  free", "  launch", "  }"))
    ]
    at = next(n for n, line in enumerate(lines) if line.startswith("  %n_1: i64"))
    first = next(n for n, line in enumerate(lines) if line.startswith("  %n.counted"))
    lines[at : at + 6], counted = [], lines[at : at + 6]
    return "\n".join((*lines[: first + 1], *counted, *lines[first + 1 :]))


FETCH = "  %n.counted: i64[2,2] (ep=R) = fetch("
BACK = "  %y: f64[<=8:%n.counted,4] of [2,2,8,4] (ep=S0) = alloc(%n.counted)"
GATHER = (
    "  %c0 = post allgather(%n) -> %n.all i64[2,2] (ep=S0) => (ep=R) axis=ep dim=0\n  wait %c0\n"
)

#: name -> what is written, what by hand instead.
BROKEN: dict[str, tuple[str, str]] = {
    "a transposed table": (
        f"{FETCH}%n.all", f"  %m: i64[2,2] (ep=R) = permute(%n.all, dims=[1,0])\n{FETCH}%m"),
    "a table in another order": (
        f"{FETCH}%n.all", f"  %m: i64[2,2] (ep=R) = flip(%n.all, dims=[0])\n{FETCH}%m"),
    "a computed table": (
        f"{FETCH}%n.all", f"  %m: i64[2,2] (ep=R) = add(%n.all, 0)\n{FETCH}%m"),
    "a table of another route": ("allgather(%n_1) -> %n_1.all", "allgather(%n) -> %n_1.all"),
    "a table that is gathered over": (
        FETCH, GATHER.replace("%c0", "%c9").replace("(%n)", "(%n_1)") + FETCH),
    "a table that nobody gathers": (GATHER, ""),
    "a table of one rank": (f"{FETCH}%n.all", f"{FETCH}%n"),
    "a table that is not there yet": (
        "  wait %c0\n" + FETCH + "%n.all, most=8)",
        FETCH + "%n.all, most=8)\n  wait %c0"),
    "counts that are written again": ("  %t.lined:", "  %n = add(%n, 1)\n  %t.lined:"),
    "rows lined up by others": ("row_places(%ids, %n)", "row_places(%ids, %n_1)"),
    "rows lined up in other parts": (
        "row_places(%ids, %n)", "row_places(%ids, %n, sizes=[4,4])"),
    "rows put back in other parts": (
        "(%y.lined, %ids, %n, %ids.places)", "(%y.lined, %ids, %n, %ids.places, sizes=[5,3])"),
    "rows put back by others": ("(%y.lined, %ids, %n,", "(%y.lined, %ids, %n_1,"),
    "places of others": ("(%y.lined, %ids, %n, %ids", "(%y.lined, %ids, %n, %jds"),
    "rows unpacked by others": ("rows(%y, %n.counted)", "rows(%y, %n_1.counted)"),
    "rows multiplied by others": ("= narrow(%n.all)", "= narrow(%n_1.all)"),
    "a buffer by others": (BACK, BACK.replace("(%n.", "(%n_1.")),
    "a buffer and a type by others": (BACK, BACK.replace("%n.", "%n_1.")),
    "a way back by others": ("to_dim=0 counts=%n.", "to_dim=0 counts=%n_1."),
}  # fmt: skip
BROKEN_CAPACITY: dict[str, tuple[str, str]] = {
    "no fetch holds it": (", each=8)", ")"),
    "the fetch has a higher one": ("capacity=8)", "capacity=7)"),
    "the fetch is of others": (f"{FETCH}%n.all", f"{FETCH}%n_1.all"),
}


@pytest.mark.parametrize("capacity", [None, 8])
def test_the_program_is_right(capacity: int | None) -> None:
    verify(parse(text(capacity)))


@pytest.mark.parametrize("name", BROKEN)
def test_counts_of_two_values_are_seen(name: str) -> None:
    check(text(), *BROKEN[name])


@pytest.mark.parametrize("name", BROKEN_CAPACITY)
def test_a_capacity_that_nothing_holds_is_seen(name: str) -> None:
    check(text(8), *BROKEN_CAPACITY[name])


def check(right: str, written: str, by_hand: str) -> None:
    assert written in right, right
    with pytest.raises(ProgramError) as refused:
        verify(parse(right.replace(written, by_hand, 1)))
    assert "%n" in str(refused.value) or "%y" in str(refused.value), refused.value
