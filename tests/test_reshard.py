"""The table *layout transition -> communication*, row by row, with numbers written by hand.

A row says what every rank of the program sees of each communication: its team, the root, and the
bytes that arrive there in the ring model. Ranks that a row does not mention have no part in it.
Every row is also run on the simulator, against the global tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import CommunicationError, DeviceMesh, Layout, LayoutError, Partial, Replicate, Shard
from mdfuse.communication import KINDS, Communication
from mdfuse.layouts.layout import Placement

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
P = Partial("sum")

#: rank -> (team, root, bytes received)
Seen = dict[int, tuple[tuple[int, ...], int | None, int]]


@dataclass(frozen=True)
class Post:
    """A communication as its ranks must see it."""

    kind: str
    seen: Seen
    op: str | None = None


@dataclass(frozen=True)
class Row:
    """A transition of an f32 tensor, and the communications that it must become."""

    name: str
    shape: tuple[int, ...]
    source: Layout
    destination: Layout
    posts: tuple[Post, ...] = ()

    def __str__(self) -> str:
        return self.name

    def compile(self, dtype: torch.dtype = torch.float32) -> mf.Program:
        with mf.FusionDefinition("transition") as fd:
            x = fd.define_tensor(self.shape, dtype, self.source)
            fd.add_output(fd.ops.set(x).on(self.destination))
        return mf.compile(fd)

    def tensor(self) -> Tensor:
        return torch.arange(math.prod(self.shape), dtype=torch.float32).reshape(self.shape)


def on(ranks: Any, *placements: Placement, order: dict[int, Sequence[str]] | None = None) -> Layout:
    """A layout on a mesh of these ranks: axes x, or y and x."""
    mesh = ranks if isinstance(ranks, DeviceMesh) else DeviceMesh(ranks)
    return Layout(mesh, dict(zip(mesh.axes, placements, strict=False)), order)


def team(*ranks: int, bytes: int, root: int | None = None) -> Seen:
    """Every member receives the same; a root receives nothing."""
    return {r: (ranks, root, 0 if r == root else bytes) for r in ranks}


def pair(sender: int, receiver: int, *, bytes: int) -> Seen:
    return team(sender, receiver, root=sender, bytes=bytes)


def to_root(*ranks: int, root: int, bytes: int) -> Seen:
    """Only the root receives."""
    return {r: (ranks, root, bytes if r == root else 0) for r in ranks}


def among(*ranks: int, **received: int) -> Seen:
    """A team without a root in which rank k receives `r<k>` bytes."""
    return {r: (ranks, None, received.get(f"r{r}", 0)) for r in ranks}


def change(
    name: str, source: Layout, destination: Layout, *posts: Post, shape: tuple[int, ...] = (8, 3)
) -> Row:
    return Row(name, shape, source, destination, posts)


FOUR = [0, 1, 2, 3]
GRID = [[0, 1], [2, 3]]
TALL = [[0, 1], [2, 3], [4, 5], [6, 7]]

SAME_MESH = [
    change("R->R", on(FOUR, R), on(FOUR, R)),
    change("S0->S0", on(FOUR, S0), on(FOUR, S0)),
    change("P->P", on(FOUR, P), on(FOUR, P)),
    change("R->S0", on(FOUR, R), on(FOUR, S0)),
    change("R->S1 uneven", on(FOUR, R), on(FOUR, S1), shape=(3, 5)),
    # 24 elements of 4 bytes; three blocks of 6 elements arrive.
    change("S0->R", on(FOUR, S0), on(FOUR, R), Post("Allgather", team(*FOUR, bytes=72))),
    change("S1->R", on(FOUR, S1), on(FOUR, R),
           Post("Allgather", team(*FOUR, bytes=72)), shape=(3, 8)),
    change("S0->R in mesh order", on([3, 1, 0, 2], S0), on([3, 1, 0, 2], R),
           Post("Allgather", team(3, 1, 0, 2, bytes=72))),
    # Five rows in blocks of 2, 2, 1, 0, each padded to 2.
    change("S0->R uneven", on(FOUR, S0), on(FOUR, R),
           Post("Allgather", team(*FOUR, bytes=72)), shape=(5, 3)),
    # Each rank keeps a quarter of its 2 x 4 block and receives three of 2 x 1.
    change("S0->S1", on(FOUR, S0), on(FOUR, S1),
           Post("AllToAll", team(*FOUR, bytes=24)), shape=(8, 4)),
    change("S2->S0", on(FOUR, S2), on(FOUR, S0),
           Post("AllToAll", team(*FOUR, bytes=36)), shape=(4, 3, 4)),
    # One column each; the rows of the others are 5 minus one's own 2, 2, 1, 0.
    change("S0->S1 uneven", on(FOUR, S0), on(FOUR, S1),
           Post("AllToAll", among(*FOUR, r0=12, r1=12, r2=16, r3=20)), shape=(5, 4)),
    # A ring all-reduce: 2 x 3/4 of 96 bytes.
    change("P->R", on(FOUR, P), on(FOUR, R), Post("Allreduce", team(*FOUR, bytes=144), "sum")),
    change("P->R rounded up", on(FOUR, P), on(FOUR, R),
           Post("Allreduce", team(*FOUR, bytes=92), "sum"), shape=(5, 3)),
    change("P->S0", on(FOUR, P), on(FOUR, S0), Post("ReduceScatter", team(*FOUR, bytes=72), "sum")),
    change("P->S1", on(FOUR, P), on(FOUR, S1),
           Post("ReduceScatter", team(*FOUR, bytes=72), "sum"), shape=(3, 8)),
    change("P->S0 uneven", on(FOUR, P), on(FOUR, S0),
           Post("ReduceScatter", team(*FOUR, bytes=72), "sum"), shape=(5, 3)),
    change("R->P", on(FOUR, R), on(FOUR, P)),
    change("S0->P", on(FOUR, S0), on(FOUR, P)),
    change("S0->P uneven", on(FOUR, S0), on(FOUR, P), shape=(5, 3)),
    *(change(f"R->P({op})", on(FOUR, R), on(FOUR, Partial(op))) for op in ("min", "max", "avg")),
    *(change(f"P({op})->R", on(FOUR, Partial(op)), on(FOUR, R),
             Post("Allreduce", team(*FOUR, bytes=144), op))
      for op in ("prod", "min", "max", "avg")),
    *(change(f"P({op})->S0", on(FOUR, Partial(op)), on(FOUR, S0),
             Post("ReduceScatter", team(*FOUR, bytes=72), op))
      for op in ("prod", "min", "max", "avg")),
]  # fmt: skip

TWO_AXES = [
    # The innermost axis alone: the teams are the rows of the mesh, or its columns.
    change("(R,S0)->(R,R)", on(GRID, R, S0), on(GRID, R, R),
           Post("Allgather", team(0, 1, bytes=48) | team(2, 3, bytes=48))),
    change("(S0,R)->(R,R)", on(GRID, S0, R), on(GRID, R, R),
           Post("Allgather", team(0, 2, bytes=48) | team(1, 3, bytes=48))),
    change("(S0,S0)->(S0,R)", on(GRID, S0, S0), on(GRID, S0, R),
           Post("Allgather", team(0, 1, bytes=24) | team(2, 3, bytes=24))),
    change("(R,P)->(R,S0)", on(GRID, R, P), on(GRID, R, S0),
           Post("ReduceScatter", team(0, 1, bytes=48) | team(2, 3, bytes=48), "sum")),
    change("(R,R)->(S0,S1)", on(GRID, R, R), on(GRID, S0, S1), shape=(8, 4)),
    change("(S0,R)->(S0,S0)", on(GRID, S0, R), on(GRID, S0, S0)),
    # Not a local slice: rank 1 holds rows 4:8 and needs 2:4, rank 2 holds 0:4 and needs 4:6.
    change("(R,S0)->(S0,S0)", on(GRID, R, S0), on(GRID, S0, S0),
           Post("Exchange", among(1, 2, r1=24, r2=24))),
    # With the other order it is one.
    change("(R,S0)->(S0,S0) x outside", on(GRID, R, S0), on(GRID, S0, S0, order={0: ("x", "y")})),
    # Only the order changes: ranks 1 and 2 swap.
    change("(S0,S0)->(S0,S0) x outside", on(GRID, S0, S0), on(GRID, S0, S0, order={0: ("x", "y")}),
           Post("Exchange", among(1, 2, r1=24, r2=24))),
    # Ranks 0 and 3 hold what they need; a gathering would send them the other half as well.
    change("(S0,R)->(R,S0)", on(GRID, S0, R), on(GRID, R, S0),
           Post("Exchange", among(0, 1, 2, r1=48, r2=48))),
    # The outer of two axes: rank (y, x) holds rows 4y+2x.. and needs 4x..4x+4.
    change("(S0,S0)->(R,S0)", on(GRID, S0, S0), on(GRID, R, S0),
           Post("Exchange", among(0, 1, 2, 3, r0=24, r1=48, r2=48, r3=24))),
    # Each collective brings half of what is whole by then: 8 elements, then 16.
    change("(S0,S1)->(R,R)", on(GRID, S0, S1), on(GRID, R, R),
           Post("Allgather", team(0, 2, bytes=32) | team(1, 3, bytes=32)),
           Post("Allgather", team(0, 1, bytes=64) | team(2, 3, bytes=64)), shape=(8, 4)),
    # The slice comes first, so half as much is reduced.
    change("(P,R)->(R,S0)", on(GRID, P, R), on(GRID, R, S0),
           Post("Allreduce", team(0, 2, bytes=48) | team(1, 3, bytes=48), "sum")),
    change("(P,P)->(S0,R)", on(GRID, P, P), on(GRID, S0, R),
           Post("ReduceScatter", team(0, 2, bytes=48) | team(1, 3, bytes=48), "sum"),
           Post("Allreduce", team(0, 1, bytes=48) | team(2, 3, bytes=48), "sum")),
    change("(P,P)->(S0,S0)", on(GRID, P, P), on(GRID, S0, S0),
           Post("ReduceScatter", team(0, 1, 2, 3, bytes=72), "sum")),
    # Along several axes at once; where both ways bring as much, two collectives are two.
    change("(P,P)->(R,R)", on(GRID, P, P), on(GRID, R, R),
           Post("Allreduce", team(*FOUR, bytes=144), "sum")),
    change("(P,P)->(S0,S0) x outside", on(GRID, P, P), on(GRID, S0, S0, order={0: ("x", "y")}),
           Post("ReduceScatter", team(0, 2, 1, 3, bytes=72), "sum")),
    change("(S0,S0)->(R,R)", on(GRID, S0, S0), on(GRID, R, R),
           Post("Allgather", team(*FOUR, bytes=72))),
    # Nothing is sent twice: the ranks along x hold the same, and reduce one half each.
    change("(P,R)->(R,R)", on(TALL, P, R), on(TALL, R, R),
           Post("Allreduce", team(0, 2, 4, 6, bytes=96) | team(1, 3, 5, 7, bytes=96), "sum"),
           Post("Allgather", {r: x for a, b in TALL for r, x in team(a, b, bytes=64).items()}),
           shape=(8, 4)),
    # Scattered before it is gathered along the other axis.
    change("(P,S0)->(S1,R)", on(GRID, P, S0), on(GRID, S1, R),
           Post("ReduceScatter", team(0, 2, bytes=32) | team(1, 3, bytes=32), "sum"),
           Post("Allgather", team(0, 1, bytes=32) | team(2, 3, bytes=32)), shape=(8, 4)),
    change("(P,S0)->(P,R)", on(GRID, P, S0), on(GRID, P, R),
           Post("Allgather", team(0, 1, bytes=48) | team(2, 3, bytes=48))),
]  # fmt: skip

OTHER_MESH = [
    change("R->R subset", on([0, 1], R), on([1], R)),
    change("R->R reordered", on([0, 1], R), on([1, 0], R)),
    change("R->S0 subset", on([0, 1, 2], R), on([2, 0], S0)),
    change("R->R disjoint", on([0], R), on([1], R),
           Post("SendRecv", pair(0, 1, bytes=96))),
    change("R->R more", on([0], R), on(FOUR, R), Post("Broadcast", team(*FOUR, root=0, bytes=96))),
    # Rank 1 holds it already.
    change("R->R overlapping", on([0, 1], R), on([1, 2, 3], R),
           Post("Broadcast", team(0, 2, 3, root=0, bytes=96))),
    change("R->R root is the first of the mesh", on([1, 0], R), on([2, 0], R),
           Post("Broadcast", team(1, 2, root=1, bytes=96))),
    change("R->R root listed last", on([1], R), on([0, 1], R),
           Post("Broadcast", team(0, 1, root=1, bytes=96))),
    change("S0->R receiver sends too", on(FOUR, S0), on([0], R),
           Post("Gather", to_root(*FOUR, root=0, bytes=72))),
    change("S0->R receiver outside", on(FOUR, S0), on([4], R),
           Post("Gather", to_root(*FOUR, 4, root=4, bytes=96))),
    change("S1->R receiver in the middle, uneven", on([2, 0, 1], S1), on([0], R),
           Post("Gather", to_root(2, 0, 1, root=0, bytes=48)), shape=(3, 5)),
    change("S0->R several receivers", on([0, 1], S0), on([2, 3], R),
           Post("Exchange", among(0, 1, 2, 3, r2=96, r3=96))),
    change("S0->R several that send too", on([0, 1], S0), on([1, 0], R),
           Post("Exchange", among(0, 1, r0=48, r1=48))),
    change("R->S0 disjoint", on([0], R), on([1, 2], S0),
           Post("Scatter", team(0, 1, 2, root=0, bytes=48))),
    change("R->S0 root receives", on([0], R), on(FOUR, S0),
           Post("Scatter", team(*FOUR, root=0, bytes=24))),
    # Rank 1 slices its part off what it has.
    change("R->S0 overlapping", on([0, 1], R), on([1, 2], S0),
           Post("Exchange", among(1, 2, r2=48))),
    change("R->S1 uneven", on([1], R), on([3, 1, 0], S1),
           Post("Scatter", team(3, 1, 0, root=1, bytes=16)), shape=(2, 5)),
    change("R->S1 one row", on([1], R), on([0, 1], S1),
           Post("Scatter", team(0, 1, root=1, bytes=12)), shape=(1, 5)),
    change("S0->S0 disjoint", on([0, 1], S0), on([2, 3], S0),
           Post("SendRecv", pair(0, 2, bytes=48) | pair(1, 3, bytes=48))),
    change("S0->S0 swapped", on([0, 1], S0), on([1, 0], S0),
           Post("SendRecv", {0: ((1, 0), 1, 48), 1: ((0, 1), 0, 48)})),
    # 0 to itself, 1 to 3, 2 to 1: a rank that both sends and receives sees the pair it receives in.
    change("S0->S0 overlapping", on([0, 1, 2], S0), on([0, 3, 1], S0),
           Post("SendRecv", {0: ((0,), 0, 0)} | pair(1, 3, bytes=16) | pair(2, 1, bytes=16)),
           shape=(6, 2)),
    change("S0->S0 more ranks", on([0, 1], S0), on(FOUR, S0),
           Post("Exchange", among(0, 1, 2, 3, r1=24, r2=24, r3=24))),
    change("S0->S1", on([0, 1], S0), on([2, 3], S1),
           Post("Exchange", among(0, 1, 2, 3, r2=64, r3=64)), shape=(8, 4)),
    change("grid->line", on(GRID, S0, R), on([3, 0], S0),
           Post("Exchange", among(0, 2, 3, r0=48, r3=48))),
    # Ranks that hold the same send in turn, and on one mesh of two names nothing travels.
    change("R->S0 every holder sends", on([0, 1], R), on([2, 3], S0),
           Post("Exchange", among(0, 1, 2, 3, r2=48, r3=48))),
    change("S0->S0 of a flat mesh", on(GRID, S0, S0), on(FOUR, S0)),
    change("P->P of a transposed mesh", on(GRID, P, S0), on([[0, 2], [1, 3]], S0, P)),
    change("P->R of a flat mesh", on(GRID, P, P), on(FOUR, R),
           Post("Allreduce", team(*FOUR, bytes=144), "sum")),
    change("R->P elsewhere", on([0, 1], R), on([1, 0], P)),
    change("P->P elsewhere", on([0, 1], Partial("prod")), on([2, 1], Partial("prod")),
           Post("Exchange", among(0, 2, r2=96))),
    change("P->R at a sender", on([0, 1], P), on([1], R),
           Post("Reduce", to_root(0, 1, root=1, bytes=96), "sum")),
    # A receiver that does not contribute is no root: reduce at a sender, then send.
    change("P->R outside", on([0, 1], Partial("max")), on([2], R),
           Post("ReduceScatter", team(0, 1, bytes=48), "max"),
           Post("Gather", to_root(0, 1, 2, root=2, bytes=96))),
    change("P->R several", on([0, 1], P), on([1, 2], R),
           Post("Reduce", to_root(0, 1, root=1, bytes=96), "sum"),
           Post("Broadcast", team(1, 2, root=1, bytes=96))),
    change("P->S0 disjoint", on([0, 1], P), on([2, 3], S0),
           Post("ReduceScatter", team(0, 1, bytes=48), "sum"),
           Post("SendRecv", pair(0, 2, bytes=48) | pair(1, 3, bytes=48))),
]  # fmt: skip

ONE = [[0], [1]]
SIZE_ONE = [
    # An axis, or a mesh, of one rank splits nothing and leaves nothing Partial.
    change("one S0->R", on([0], S0), on([0], R)),
    change("one P->R", on([0], P), on([0], R)),
    change("one R->P", on([0], R), on([0], Partial("prod"))),
    change("one P->S1", on([0], P), on([0], S1)),
    change("(R,S0)->(R,R) of an axis of one", on(ONE, R, S0), on(ONE, R, R)),
    change("(P,P)->(P,R) of an axis of one", on(ONE, P, P), on(ONE, P, R)),
    change("(S0,S1)->(R,S1) of an axis of one", on(ONE, S0, S1), on(ONE, R, S1),
           Post("Allgather", team(0, 1, bytes=48))),
    change("one S0->R elsewhere", on([1], S0), on([0], R),
           Post("SendRecv", pair(1, 0, bytes=96))),
    change("one P->R elsewhere", on([1], P), on([0], R),
           Post("SendRecv", pair(1, 0, bytes=96))),
]  # fmt: skip

NOBODY_LACKS = [
    # There are no elements, or the one rank that holds any keeps them.
    change("S0->R empty", on(FOUR, S0), on(FOUR, R), shape=(0, 3)),
    change("S0->S0 empty elsewhere", on([0, 1], S0), on([2, 3], S0), shape=(0, 3)),
    change("P->R empty", on(FOUR, P), on(FOUR, R), shape=(3, 0)),
    change("S0->S1 of one element", on(FOUR, S0), on(FOUR, S1), shape=(1, 1)),
    change("order of one element", on(GRID, S0, S0), on(GRID, S0, S0, order={0: ("x", "y")}),
           shape=(1, 3)),
    change("S0->S0 on fewer ranks of the same parts", on(FOUR, S0), on([0, 1], S0), shape=(2, 3)),
]  # fmt: skip

ROWS = [*SAME_MESH, *TWO_AXES, *OTHER_MESH, *SIZE_ONE, *NOBODY_LACKS]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_transition(row: Row) -> None:
    program = row.compile()
    ranks = range(program.host.last_rank + 1)
    found = tuple(
        Post(
            c.kind,
            {r: (c.team(r), c.root(r), c.bytes_received(r)) for r in ranks if c.team(r)},
            c.reduce_op,
        )
        for c in program.communications
    )
    assert found == row.posts, program
    for rank in ranks:
        total = sum(p.seen[rank][2] for p in row.posts if rank in p.seen)
        assert program.bytes_received(rank) == total
    check_everywhere(program, [row.tensor()], [row.tensor()])


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ranks_outside_post_nothing(row: Row) -> None:
    """A rank posts the communications whose teams it is in, except where it is alone in one."""
    program = row.compile()
    for rank in range(program.host.last_rank + 1):
        posts = [i for i in program.for_rank(rank) if i.op == "post"]
        for comm in program.communications:
            call = comm.part(rank).call
            if len(comm.team(rank)) < 2:
                assert call is None
        assert len(posts) <= len(program.communications)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.int64, "band"),
        (torch.int32, "bxor"),
        (torch.bool, "bor"),
        (torch.bool, "band"),
        (torch.float64, "avg"),
        (torch.int64, "prod"),
    ],
    ids=str,
)
def test_every_reduce_op_travels_under_its_name(dtype: torch.dtype, op: str) -> None:
    row = change(op, on(FOUR, Partial(op)), on(FOUR, S0))
    (comm,) = row.compile(dtype).communications
    assert (comm.kind, comm.reduce_op, comm.dtype) == ("ReduceScatter", op, dtype)
    assert comm.bytes_received(2) == 18 * dtype.itemsize


ILLEGAL = [
    (on(FOUR, P), on(FOUR, Partial("max"))),
    (on(GRID, R, Partial("prod")), on(GRID, R, Partial("max"))),
]


@pytest.mark.parametrize(("source", "destination"), ILLEGAL, ids=str)
def test_no_other_way_into_partial(source: Layout, destination: Layout) -> None:
    with pytest.raises(LayoutError, match="cannot become") as caught:
        change("illegal", source, destination).compile()
    text = str(caught.value)
    assert "test_reshard.py:" in text
    assert "%x" in text
    assert "try " in text


# -- expanded dims -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split_elsewhere", [False, True], ids=["whole", "split"])
def test_an_expanded_dim_does_not_travel(is_split_elsewhere: bool) -> None:
    """Gathering a [8] tensor that expand made [8, 3] sends 8 elements."""
    x = torch.arange(8.0)
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor([8, 1], mesh=on(FOUR, S0))
        e = fd.ops.expand(h, [8, 3])
        goal = on(FOUR, S1) if is_split_elsewhere else on(FOUR, R)
        fd.add_output(fd.ops.set(e).on(goal))
    program = mf.compile(fd)
    assert [c.kind for c in program.communications] == ["Allgather"]
    assert [program.bytes_received(r) for r in range(4)] == [24] * 4
    check_everywhere(program, [x[:, None]], [x[:, None].expand(8, 3)])


def test_an_expanded_dim_stays_one_through_set_permute_and_slice() -> None:
    x = torch.arange(8.0)
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor([8, 1], mesh=on(FOUR, S0))
        e = fd.ops.set(fd.ops.permute(fd.ops.expand(h, [8, 6]), (1, 0)))[1:5]
        fd.add_output(fd.ops.set(e).on(on([5], R)) * 2)
    program = mf.compile(fd)
    assert sum(program.bytes_received(r) for r in range(6)) == 32
    check_everywhere(program, [x[:, None]], [x.expand(4, 8) * 2])


def test_an_input_with_stride_zero_is_copied() -> None:
    """What the caller expanded is not known when the program is made."""
    x = torch.arange(8.0)[:, None].expand(8, 3)
    row = change("stride 0", on(FOUR, S0), on(FOUR, R))
    program = row.compile()
    assert program.bytes_received(0) == 72
    result = mf.simulate(program, [x], options=mf.Options(poison=True))
    assert torch.equal(result.outputs[0], x)


# -- a communication checks itself ---------------------------------------------------------------


GOOD: dict[str, dict[str, Any]] = {
    "Gather": {"source": on(FOUR, S0), "destination": on([0], R), "dim": 0, "axes": ("x",)},
    "Allgather": {"source": on(FOUR, S0), "destination": on(FOUR, R), "dim": 0, "axes": ("x",)},
    "Scatter": {"source": on([0], R), "destination": on(FOUR, S0), "dim": 0, "axes": ("x",)},
    "Reduce": {"source": on(FOUR, P), "destination": on([0], R), "reduce_op": "sum"},
    "Allreduce": {
        "source": on(FOUR, P), "destination": on(FOUR, R), "reduce_op": "sum", "axes": ("x",),
    },
    "ReduceScatter": {
        "source": on(FOUR, P), "destination": on(FOUR, S0), "dim": 0, "reduce_op": "sum",
        "axes": ("x",),
    },
    "Broadcast": {"source": on([0], R), "destination": on(FOUR, R)},
    "Barrier": {"source": on(FOUR, R), "destination": on(FOUR, R)},
    "SendRecv": {"source": on([0, 1], S0), "destination": on([2, 3], S0)},
    "AllToAll": {
        "source": on(FOUR, S0), "destination": on(FOUR, S1), "dim": 0, "to_dim": 1, "axes": ("x",),
    },
    "Exchange": {"source": on([0, 1], S0), "destination": on([2, 3], S1)},
    "ReduceExchange": {"source": on(FOUR, P), "destination": on(FOUR, S1), "reduce_op": "sum"},
}  # fmt: skip


def make(kind: str, **changes: Any) -> Communication:
    fields = {
        **GOOD.get(kind, GOOD["Exchange"]),
        "shape": (8, 8),
        "dtype": torch.float32,
        **changes,
    }
    return Communication(kind=kind, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_a_root_exactly_for_the_kinds_that_have_one(kind: str) -> None:
    comm = make(kind)
    has_root = kind in ("Gather", "Scatter", "Reduce", "Broadcast", "SendRecv")
    assert set(KINDS) == set(GOOD)
    for rank in range(4):
        root = comm.root(rank)
        assert (root is not None) == (has_root and bool(comm.team(rank)))
        assert root is None or root in comm.team(rank)
    assert comm.team(99) == ()
    assert comm.root(99) is None
    assert comm.bytes_received(99) == 0
    assert comm.part(99).call is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduce_op_exactly_for_the_kinds_that_reduce(kind: str) -> None:
    reduces = kind in ("Reduce", "Allreduce", "ReduceScatter", "ReduceExchange")
    assert (make(kind).reduce_op is not None) == reduces
    with pytest.raises(CommunicationError, match=kind):
        make(kind, reduce_op=None if reduces else "sum")


@pytest.mark.parametrize("kind", KINDS)
def test_a_dim_exactly_for_the_kinds_that_split_one(kind: str) -> None:
    splits = kind in ("Gather", "Allgather", "Scatter", "ReduceScatter", "AllToAll")
    with pytest.raises(CommunicationError, match=kind):
        make(kind, dim=None if splits else 0)


def test_an_unknown_kind() -> None:
    with pytest.raises(CommunicationError, match="'AllGather' is no kind"):
        make("AllGather")


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("band", torch.float32),
        ("bor", torch.float16),
        ("bxor", torch.float64),
        ("avg", torch.int64),
        ("avg", torch.bool),
        ("sum", torch.bool),
    ],
    ids=str,
)
def test_a_reduce_op_that_the_dtype_does_not_have(op: str, dtype: torch.dtype) -> None:
    with pytest.raises(CommunicationError, match=op):
        make("Allreduce", reduce_op=op, dtype=dtype)
    with pytest.raises(LayoutError, match=op), mf.FusionDefinition() as fd:
        fd.define_tensor([8], dtype, on(FOUR, Partial(op)))
