"""Exchanges of drawn layouts on drawn meshes: what is sent is what is received, and is needed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch
from helpers.oracle import coordinate, local_part

from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, communication
from mdfuse.communication import Communication
from mdfuse.layouts import messages
from mdfuse.layouts.boxes import Box, box_shape, box_size
from mdfuse.layouts.layout import Placement
from mdfuse.layouts.recv_volume import is_lacking, lacks

MESHES = (
    DeviceMesh.arange(a=2, b=4),
    DeviceMesh([3, 1, 9, 4, 0, 8], axes=("q",)),
    DeviceMesh([[1, 2], [3, 0], [5, 7]]),
    DeviceMesh.arange(a=2, b=2, c=2),
    DeviceMesh([[16, 17, 18], [20, 21, 22]]),
)
P = Partial("max")


def layouts(mesh: DeviceMesh, *more: Placement) -> Iterator[Layout]:
    """Every layout of a matrix, every order of axes that split one dim included."""
    for chosen in product((Replicate(), Shard(0), Shard(1), *more), repeat=mesh.ndim):
        placements = dict(zip(mesh.axes, chosen, strict=True))
        splits = [[a for a, p in placements.items() if p == Shard(d)] for d in (0, 1)]
        for first, second in product(*map(permutations, splits)):
            order = {d: axes for d, axes in ((0, first), (1, second)) if axes}
            yield Layout(mesh, placements, order)


def drawn(seed: int, hosts: bool = False) -> tuple[Layout, Layout, tuple[int, int]]:
    draw = random.Random(seed)
    one = draw.choice(MESHES)
    other = one if draw.random() < 0.5 else draw.choice(MESHES)
    if hosts:
        host = [draw.randrange(3) for _ in range(max(one.last_rank, other.last_rank) + 1)]
        one, other = (mesh.with_hosts([host[r] for r in mesh.ranks]) for mesh in (one, other))
    source, goal = (draw.choice([*layouts(mesh)]) for mesh in (one, other))
    return source, goal, (draw.randint(0, 13), draw.randint(0, 9))


def held(layout: Layout, shape: tuple[int, int], rank: int) -> set[int]:
    """The numbers of the elements that a rank holds."""
    if rank not in layout.mesh.ranks:
        return set()
    index = torch.arange(shape[0] * shape[1]).reshape(shape)
    return set(local_part(index, layout, rank).flatten().tolist())


def within(layout: Layout, shape: tuple[int, int], rank: int, box: Box) -> list[int]:
    """The numbers of the elements of a box of what a rank holds."""
    index = torch.arange(shape[0] * shape[1]).reshape(shape)
    cut = tuple(slice(*interval) for interval in box)
    return local_part(index, layout, rank)[cut].flatten().tolist()


@pytest.fixture(params=["", "hosts", "shares"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whether hosts are known, or single elements are worth a message."""
    if request.param == "shares":
        monkeypatch.setattr(messages, "_LEAST_SHARE", 1)
    kept = communication._known_part, communication._known_exchanging
    for answers in kept:
        answers.cache_clear()
    yield request.param
    for answers in kept:
        answers.cache_clear()


@pytest.mark.parametrize("first", range(0, 600, 50))
def test_ranks_receive_just_what_they_lack(first: int, case: str) -> None:
    for seed in range(first, first + 50):
        source, goal, shape = drawn(seed, case == "hosts")
        comm = Communication(
            kind="Exchange", source=source, destination=goal, shape=shape, dtype=torch.float32
        )
        ranks = sorted({*source.mesh.ranks, *goal.mesh.ranks})
        parts = {r: comm.part(r) for r in ranks}
        calls = {r: part.call for r, part in parts.items() if part.call is not None}
        sent: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
        got: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
        for r, call in calls.items():
            for peer, box in zip(call.sends, parts[r].sends, strict=True):
                sent[r, peer, tuple(within(source, shape, r, box))] += 1
            for peer, box in zip(call.recvs, parts[r].recvs, strict=True):
                got[peer, r, tuple(within(goal, shape, r, box))] += 1
        assert sent == got, (seed, source, goal, shape)
        for r in goal.mesh.ranks:
            lacked = [i for part in parts[r].recvs for i in within(goal, shape, r, part)]
            need, have = held(goal, shape, r), held(source, shape, r)
            assert sorted(lacked) == sorted(need - have), (seed, source, goal, shape)
            for before, after in parts[r].copies:
                assert within(source, shape, r, before) == within(goal, shape, r, after)
        team = comm.whole_group
        assert {*team} == {*calls}, (seed, source, goal, shape)
        assert all(call.team == team for call in calls.values())
        lacked = [len(held(goal, shape, r) - held(source, shape, r)) for r in goal.mesh.ranks]
        assert lacks(source, goal, shape)[0] == max(lacked)
        is_inside = {*goal.mesh.ranks} <= {*source.mesh.ranks}
        assert is_lacking(source, goal, shape) == (max(lacked) > 0 or not is_inside)


@pytest.mark.parametrize("seed", range(40))
def test_a_receiver_gets_each_term_of_what_it_reduces(seed: int) -> None:
    draw = random.Random(seed)
    mesh = draw.choice((MESHES[0], MESHES[3]))
    source = draw.choice([x for x in layouts(mesh, P) if x.partial_axes])
    goal = draw.choice([*layouts(mesh)])
    shape = (draw.randint(1, 13), draw.randint(1, 9))
    comm = Communication(
        kind="ReduceExchange", source=source, destination=goal, shape=shape, reduce_op="max",
        dtype=torch.float32,
    )  # fmt: skip
    terms: dict[int, set[tuple[int, ...]]] = {r: set() for r in mesh.ranks}
    for r in mesh.ranks:
        place = coordinate(mesh, r)
        terms[r] = {tuple(place[a] for a in source.partial_axes)}
    every = set().union(*terms.values())
    for r in mesh.ranks:
        part, found = comm.part(r), Counter[int]()
        for box in part.recvs:
            found.update(within(goal, shape, r, box))
        for before, after in part.copies:
            assert within(source, shape, r, before) == within(goal, shape, r, after)
            found.update(within(goal, shape, r, after))
        assert found == Counter(dict.fromkeys(held(goal, shape, r), len(every)))
        numbers = [n for row in part.terms for n in row]
        assert sorted(numbers) == [*range(-len(part.copies), len(part.recvs))]


def test_holders_send_in_turn() -> None:
    """Sixteen ranks that hold quarters send to sixteen others: each sends once."""
    one = DeviceMesh.arange(a=4, b=4)
    other = DeviceMesh.of((4, 4), range(16, 32), ("p", "q"))
    comm = Communication(
        kind="Exchange", source=Layout(one, {"a": Shard(0)}),
        destination=Layout(other, {"q": Shard(0)}), shape=(16, 3), dtype=torch.float32,
    )  # fmt: skip
    assert [len(comm.part(r).sends) for r in one.ranks] == [1] * 16


def test_holders_without_a_message_send_shares() -> None:
    """Rank 4 is to hold what ranks 0 to 3 hold: each sends a quarter, of the longer dim."""
    comm = Communication(
        kind="Exchange", source=Layout(DeviceMesh.arange(a=4)),
        destination=Layout(DeviceMesh([4, 5]), {"x": Shard(0)}), shape=(80, 100),
        dtype=torch.float32,
    )  # fmt: skip
    assert [comm.part(r).sends for r in range(4)] == [
        (((rows, rows + 40), (first, first + 50)),) for rows in (0, 40) for first in (0, 50)
    ]
    assert comm.part(4).call == replace(comm.part(5).call, rank=4, recvs=(0, 1))


def test_three_messages_of_two_holders_are_halved() -> None:
    """Else the one would send twice as much as the other."""
    comm = Communication(
        kind="Exchange", source=Layout(DeviceMesh.arange(a=2)),
        destination=Layout(DeviceMesh([2, 3, 4]), {"x": Shard(0)}), shape=(90, 100),
        dtype=torch.float32,
    )  # fmt: skip
    for r in (0, 1):
        half = (0, 50) if r == 0 else (50, 100)
        assert [*comm.part(r).sends] == [((rows, rows + 30), half) for rows in (0, 30, 60)]


def test_ranks_that_lack_nothing_take_no_turn() -> None:
    """Every second part of the destination is on ranks that hold it: the others are four."""
    mesh = DeviceMesh.arange(a=2, b=2, c=2)
    columns = dict.fromkeys("abc", Shard(1))
    for goal in (Layout(mesh, columns), Layout(mesh, columns, {1: ("c", "a", "b")})):
        comm = Communication(
            kind="Exchange", source=Layout(mesh, {"c": Shard(0)}), destination=goal,
            shape=(8, 8), dtype=torch.float32,
        )  # fmt: skip
        assert [len(comm.part(r).sends) for r in mesh.ranks] == [1] * 8


def test_a_rank_that_holds_another_term_lacks_its_own() -> None:
    """Ranks 0 and 2 hold the first term of two; rank 2 is to hold the second."""
    source = Layout(DeviceMesh([[0, 1], [2, 3]], ("y", "x")), {"x": P})
    goal = Layout(DeviceMesh([0, 2]), {"x": P})
    comm = Communication(
        kind="Exchange", source=source, destination=goal, shape=(4,), dtype=torch.float32
    )
    assert [len(comm.part(r).recvs) for r in goal.mesh.ranks] == [0, 1]
    assert lacks(source, goal, (4,))[0] == 4
    assert is_lacking(source, goal, (4,))
    assert 2 in comm.whole_group and 0 not in comm.whole_group


def sent_between(comm: Communication, hosts: list[int]) -> Counter[tuple[int, int]]:
    """(host, other host) -> elements sent from the one to the other."""
    found: Counter[tuple[int, int]] = Counter()
    for r in comm.source.mesh.ranks:
        part = comm.part(r)
        for peer, box in zip(part.call.sends if part.call else (), part.sends, strict=True):
            found[hosts[r], hosts[peer]] += box_size(box)
    return found


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_nothing_crosses_hosts_that_the_own_host_has(first: int) -> None:
    for seed in range(first, first + 50):
        source, goal, shape = drawn(seed, hosts=True)
        comm = Communication(
            kind="Exchange", source=source, destination=goal, shape=shape, dtype=torch.float32
        )
        host = {
            r: h for m in (source.mesh, goal.mesh) for r, h in zip(m.ranks, m.hosts, strict=True)
        }
        near: dict[int, set[int]] = {h: set() for h in host.values()}
        for r in source.mesh.ranks:
            near[host[r]] |= held(source, shape, r)
        for r in goal.mesh.ranks:
            part = comm.part(r)
            for peer, box in zip(part.call.recvs if part.call else (), part.recvs, strict=True):
                got = {*within(goal, shape, r, box)}
                assert host[peer] == host[r] or not got & near[host[r]], (seed, source, goal)


def test_holders_on_hosts_send_evenly() -> None:
    """Two hosts hold a whole, two others need it split: all four ranks send, from both hosts."""
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    one, other = (
        DeviceMesh([0, 1, 2, 3], hosts=hosts[:4]),
        DeviceMesh([4, 5, 6, 7], hosts=hosts[4:]),
    )
    comm = Communication(
        kind="Exchange", source=Layout(one), destination=Layout(other, {"x": Shard(0)}),
        shape=(4,), dtype=torch.float32,
    )  # fmt: skip
    assert [len(comm.part(r).sends) for r in one.ranks] == [1] * 4
    assert [*sent_between(comm, hosts).values()] == [1] * 4
    assert {*comm.whole_group} == {*range(8)}


def test_on_two_hosts_of_replicas_nothing_crosses() -> None:
    """Each host has all of it, so that each sends to its own ranks alone."""
    hosts = [0, 0, 0, 0, 1, 1, 1, 1]
    mesh = DeviceMesh.arange(a=2, b=4).with_hosts(hosts)
    comm = Communication(
        kind="Exchange", source=Layout(mesh, {"b": Shard(0)}), shape=(8, 8), dtype=torch.float32,
        destination=Layout(mesh, {"a": Shard(1), "b": Shard(1)}),
    )  # fmt: skip
    found = sent_between(comm, hosts)
    assert {*found} == {(0, 0), (1, 1)}
    assert found[0, 0] == found[1, 1] == 4 * 3 * 2


def test_one_rank_of_many_costs_what_its_messages_cost() -> None:
    """Counted in boxes looked at, not in time: the same for 64 ranks and for 8,192."""
    looked = []
    for n in (64, 8192):
        one = DeviceMesh.of((n // 8, 8), range(n), ("a", "b"))
        other = DeviceMesh.of((n // 8, 8), range(n, 2 * n), ("a", "b"))
        comm = Communication(
            kind="Exchange", source=Layout(one), destination=Layout(other, {"a": Shard(0)}),
            shape=(16384, 4), dtype=torch.float32,
        )  # fmt: skip
        assert len(comm.whole_group) == len((*one.ranks, *other.ranks)) == 2 * n
        looked.append(calls_of(comm, n // 2 + 1))
        assert sum(map(box_size, comm.part(n // 2 + 1).sends)) == box_size(
            tuple((0, e) for e in box_shape(comm.part(n + n // 2 + 1).recvs[0]))
        )
    assert looked[1] < 1.5 * looked[0]  # other tests may have left some of it in caches


def calls_of(comm: Communication, rank: int) -> int:
    """How many calls a rank's part takes."""
    import sys

    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        comm.part(rank)
    finally:
        sys.setprofile(None)
    return counted
