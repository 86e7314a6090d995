"""Which rows of a split dim belong to parts of another dim."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from mdfuse import DeviceMesh, Layout, LayoutError, Replicate, Shard
from mdfuse.communication import Communication
from mdfuse.layouts.halo import Reach
from mdfuse.reshard import steps
from mdfuse.reshard.clock import messages_of


@pytest.mark.parametrize(
    ("n", "kernel", "stride", "padding"), [*product((5, 9), (1, 3), (1, 2), (0, 1))]
)
def test_rows_are_those_that_windows_read(n: int, kernel: int, stride: int, padding: int) -> None:
    """From the first row to the last: with strides wider than windows, also those between."""
    made = (n + 2 * padding - kernel) // stride + 1
    reach = Reach(of=made, up=stride, down=1, first=-padding, last=kernel - padding)
    layout = Layout(DeviceMesh.arange(tp=3), {"tp": Shard(0)}, reaches={0: reach})
    size = -(-made // 3)
    for rank in range(3):
        windows = range(made)[rank * size : (rank + 1) * size]
        read = {i * stride - padding + k for i in windows for k in range(kernel)} & {*range(n)}
        held = {*range(*layout.box((n,), rank)[0])}
        assert (
            read <= held <= {*range(min(read, default=0) - stride, max(read, default=0) + stride)}
        )
        assert held == read or stride > kernel


@pytest.mark.parametrize(("n", "first", "last"), [(3, -2, 3), (5, -1, 2), (2, -1, 2)])
def test_parts_without_rows_count_no_messages(n: int, first: int, last: int) -> None:
    """On four ranks the last parts of few rows are empty."""
    mesh = DeviceMesh.arange(tp=4).with_hosts([0, 0, 1, 1])
    before = Layout(mesh, {"tp": Shard(0)})
    reach = Reach(of=n, up=1, down=1, first=first, last=last)
    after = before.reaching({0: reach}, (n,))
    comm = Communication(kind="Exchange", source=before, destination=after, shape=(n,))
    parts = [comm.part(rank) for rank in mesh.ranks]
    assert messages_of(comm, (n,)) == max(max(len(p.sends), len(p.recvs)) for p in parts)


def test_what_is_no_more_than_the_parts_is_left_out() -> None:
    layout = Layout(DeviceMesh.arange(tp=2), {"tp": Shard(1)})
    alone = Reach(of=4, up=2, down=1, first=0, last=2)
    more = Reach(of=4, up=2, down=1, first=0, last=3)
    assert layout.reaching({1: alone}, (3, 8)) == layout
    assert layout.reaching({0: more}, (3, 8)) == layout  # that dim is whole
    assert str(layout.reaching({1: more}, (3, 8))) == "(tp=S1, reach(1,4,2,1,0,3))"


def test_whole_rows_are_cut_and_parts_are_exchanged() -> None:
    mesh = DeviceMesh.arange(tp=2)
    part = Layout(mesh, {"tp": Shard(0)})
    wide = part.reaching({0: Reach(of=8, up=1, down=1, first=-1, last=2)}, (8,))
    assert [s.kind for s in steps(Layout(mesh), wide, (8,))] == ["slice"]
    assert [s.kind for s in steps(part, wide, (8,))] == ["Exchange"]


@pytest.mark.parametrize("seed", range(60))
def test_a_team_is_those_who_send_or_receive(seed: int) -> None:
    """Compared with all ranks, one by one; parts are uneven, empty, and met by distant windows."""
    draw = random.Random(seed)
    mesh = DeviceMesh.arange(a=draw.choice((2, 3)), b=draw.choice((2, 4)))
    places = [Shard(0), Shard(1), Replicate()]
    source, part = (Layout(mesh, {axis: draw.choice(places) for axis in "ab"}) for _ in range(2))
    shape = draw.randint(1, 13), draw.randint(1, 6)
    up, first = draw.randint(1, 3), draw.randint(-4, 3)
    reach = Reach(
        of=draw.randint(1, 13), up=up, down=draw.randint(1, 2), first=first,
        last=first + draw.randint(1, 6),
    )  # fmt: skip
    wide = part.reaching({0: reach}, shape)
    sent = Communication(kind="Exchange", source=source, destination=wide, shape=shape)
    posts = {rank: sent.part(rank) for rank in mesh.ranks}
    busy = {rank for rank, post in posts.items() if post.sends or post.recvs}
    assert {*sent.whole_group} == busy
    for rank, post in posts.items():
        have, need = (
            {*product(*(range(*rows) for rows in x.box(shape, rank)))} for x in (source, wide)
        )
        assert sum(math.prod(b - a for a, b in box) for box in post.recvs) == len(need - have)


def test_windows_of_a_few_ranks_leave_out_the_others() -> None:
    """On eight ranks, the windows of the first two reach rows of the first five."""
    mesh = DeviceMesh.arange(tp=8)
    part = Layout(mesh, {"tp": Shard(0)})
    wide = part.reaching({0: Reach(of=2, up=2, down=1, first=0, last=3)}, (8,))
    sent = Communication(kind="Exchange", source=part, destination=wide, shape=(8,))
    assert sent.whole_group == (0, 1, 2, 3, 4)


def test_no_rows() -> None:
    with pytest.raises(LayoutError, match="up and down from 1 on"):
        Reach(of=4, up=0, down=1, first=0, last=1)
