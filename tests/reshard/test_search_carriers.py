"""Axes whose communications have backends of their own: each changes alone, where it can.

An exchange goes by the backend of the axes along which it changes the layout, where they have one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Options, Partial, Replicate, Shard
from mdfuse.config import backend_choice
from mdfuse.layouts.layout import Placement
from mdfuse.reshard import elements_received

MESHES = (
    DeviceMesh.arange(dp=2, tp=2),
    DeviceMesh.arange(tp=2, dp=3),
    DeviceMesh([[3, 0], [1, 2]], axes=("dp", "tp")),
    DeviceMesh.arange(pp=2, dp=2, tp=2),
    DeviceMesh.arange(dp=1, tp=2),
)
BACKENDS = ("nccl, dp=mpi", "nccl, tp=symmetric", "gloo, dp=mpi, tp=ucx", "ucx, pp=mpi, dp=mpi")
SHAPES = ((8, 4), (5, 7), (12,), (1, 9), (8, 8), (3,))


def drawn(draw: random.Random, mesh: DeviceMesh, dims: int, op: str) -> Layout:
    choices: list[Placement] = [*map(Shard, range(dims)), Replicate(), Partial(op)]
    placements = {a: draw.choice(choices) for a in mesh.axes}
    order = {d: draw.sample(axes, len(axes)) for d, axes in Layout(mesh, placements).splits}
    return Layout(mesh, placements, order)


def pairs(first: int, n: int) -> Iterator[tuple[Layout, Layout, tuple[int, ...], str, int]]:
    for seed in range(first, first + n):
        draw = random.Random(seed)
        mesh, shape = draw.choice(MESHES), draw.choice(SHAPES)
        op = draw.choice(["sum", "max"])
        before, after = (drawn(draw, mesh, len(shape), op) for _ in range(2))
        if draw.random() < 0.5:  # nothing stays a Partial
            after = Layout(mesh, {a: p for a, p in after.by_axis().items() if p != Partial(op)})
        yield before, after, shape, draw.choice(BACKENDS), seed


def changed(before: Layout, after: Layout) -> set[str]:
    """The axes along which a layout changes, of more than one rank: written once more, by hand."""
    found = set()
    for axis in before.mesh.axes:
        places = [x.placement(axis) for x in (before, after)]
        if places[0] == places[1] and isinstance(places[0], Shard):
            outer = [x.split_axes(places[0].dim) for x in (before, after)]
            if outer[0][: outer[0].index(axis)] == outer[1][: outer[1].index(axis)]:
                continue
        elif places[0] == places[1]:
            continue
        found.add(axis)
    return {a for a in found if before.mesh.axis_size(a) > 1}


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_drawn_changes(first: int) -> None:
    for before, after, shape, backend, seed in pairs(first, 50):
        x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).double()
        with mf.FusionDefinition("drawn") as fd:
            fd.add_output(fd.ops.set(fd.define_tensor(shape, x.dtype, before)).on(after))
        program = mf.compile(fd, Options(backend=backend))
        choice = backend_choice(backend)
        for comm in program.communications:
            axes = {*comm.axes} or changed(comm.source, comm.destination)
            by = {choice.by_axis.get(a, choice.usual) for a in axes}
            assert len(by) == 1 or not comm.axes, f"{comm}\n{program}"
            carrier = by.pop() if len(by) == 1 else choice.usual
            assert (comm.backend or choice.usual) == carrier, f"{comm}\n{program}"
        check_everywhere(program, [x], [x], exact=True)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_drawn_axes_that_can_change_alone(first: int) -> None:
    """To whole tensors, and from terms to parts in any order, nothing spans several backends."""
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        mesh, shape = draw.choice((CUBE, DeviceMesh.arange(a=2, b=3, c=2))), draw.choice(SHAPES)
        if draw.random() < 0.3:
            mesh = mesh.with_hosts([2 * n // mesh.size for n in range(mesh.size)])
        sums = Layout(mesh, {a: Partial() for a in mesh.axes})
        ends = [(drawn(draw, mesh, len(shape), "sum"), Layout(mesh)), (sums, sums)]
        while ends[1][1].partial_axes:
            ends[1] = sums, drawn(draw, mesh, len(shape), "sum")
        x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).double()
        for before, after in ends:
            with mf.FusionDefinition("drawn") as fd:
                fd.add_output(fd.ops.set(fd.define_tensor(shape, x.dtype, before)).on(after))
            program = mf.compile(fd, Options(backend=OF_THREE))
            assert not spanning(program, OF_THREE), f"{before} -> {after} of {shape}\n{program}"
            check_everywhere(program, [x], [x], exact=True)


def spanning(program: mf.Program, backend: str) -> list[str]:
    """The posts of a program along axes of several backends."""
    choice, found = backend_choice(backend), []
    for comm in program.communications:
        if len({choice.by_axis.get(a, choice.usual) for a in comm.along}) > 1:
            found.append(f"{comm.kind} {','.join(comm.along)}")
    return found


CUBE, OF_THREE = DeviceMesh.arange(a=2, b=2, c=2), "gloo, c=ucx, a=mpi"
ROWS, COLS, SUM, THIRDS = Shard(0), Shard(1), Partial(), Shard(0, blocks=3)


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ({"a": ROWS, "b": ROWS, "c": ROWS}, {}, "Allgather c, Allgather b, Allgather a"),
        ({"a": ROWS, "b": ROWS, "c": ROWS}, {"a": ROWS}, "Allgather c, Allgather b"),
        ({"a": ROWS, "c": ROWS}, {"a": ROWS, "c": COLS}, "AllToAll c"),
        ({"b": ROWS, "c": ROWS}, {"b": COLS}, "Allgather c, AllToAll b"),
        ({}, {"a": ROWS, "b": ROWS, "c": COLS}, ""),
        (
            {"a": SUM, "b": SUM, "c": SUM},
            {"a": ROWS, "b": COLS, "c": ROWS},
            "ReduceScatter a, ReduceScatter c, ReduceScatter b",
        ),
        ({"a": SUM, "c": ROWS}, {"c": ROWS}, "Allreduce a"),
        # axes that change places span, and the third one goes alone
        ({"a": ROWS, "c": COLS}, {"a": COLS, "c": ROWS}, "Exchange a,c"),
        ({"a": ROWS, "b": COLS, "c": ROWS}, {"c": ROWS, "b": COLS}, "Exchange a,c"),
        ({"a": ROWS, "b": COLS, "c": COLS}, {"a": COLS, "b": ROWS}, "Allgather c, Exchange a,b"),
        # blocks
        ({"a": THIRDS, "b": THIRDS, "c": THIRDS}, {}, "Exchange c, Exchange b, Exchange a"),
        ({"a": THIRDS, "c": COLS}, {"a": ROWS}, "Exchange a, Allgather c"),
    ],
)
@pytest.mark.parametrize("rows", [24, 27])
def test_three_axes(
    before: dict[str, Placement], after: dict[str, Placement], kinds: str, rows: int
) -> None:
    layouts = Layout(CUBE, before), Layout(CUBE, after)
    program = mf.compile(define(*layouts, (rows, 8)), Options(backend=OF_THREE))
    got = sorted(f"{c.kind} {','.join(c.along)}" for c in program.communications)
    assert got == sorted(filter(None, kinds.split(", "))) or rows == 27, f"{program}"
    assert spanning(program, OF_THREE) == [x for x in kinds.split(", ") if "," in x]
    x = torch.arange(rows * 8.0).reshape(rows, 8)
    check_everywhere(program, [x], [x], exact=True)


def define(before: Layout, after: Layout, shape: tuple[int, ...]) -> mf.FusionDefinition:
    with mf.FusionDefinition("set") as fd:
        fd.add_output(fd.ops.set(fd.define_tensor(shape, layout=before)).on(after))
    return fd


GRID = MESHES[0]
BOTH = Layout(GRID, {"dp": Shard(0), "tp": Shard(0)})
SUMS = Layout(GRID, {"dp": Partial(), "tp": Partial()})


@pytest.mark.parametrize(
    ("before", "after", "merged", "apart"),
    [
        (
            BOTH,
            Layout(GRID),
            ["Allgather axes=dp,tp dim=0"],
            ["Allgather axis=tp dim=0 backend=ucx", "Allgather axis=dp dim=0 backend=mpi"],
        ),
        (
            SUMS,
            BOTH,
            ["ReduceScatter[sum] axes=dp,tp dim=0"],
            [
                "ReduceScatter[sum] axis=dp dim=0 backend=mpi",
                "ReduceScatter[sum] axis=tp dim=0 backend=ucx",
            ],
        ),
    ],
)
def test_as_many_bytes_as_at_once(
    before: Layout, after: Layout, merged: list[str], apart: list[str]
) -> None:
    choice = backend_choice("gloo, dp=mpi, tp=ucx")
    fd = define(before, after, (8, 8))
    assert [str(c) for c in mf.compile(fd).communications] == merged
    options = Options(backend="gloo, dp=mpi, tp=ucx")
    assert [str(c) for c in mf.compile(fd, options).communications] == apart
    at_once = elements_received(before, after, (8, 8))
    assert elements_received(before, after, (8, 8), choice.carriers) == at_once


@pytest.mark.parametrize("backend", ["ucx, dp=ucx, tp=ucx", "gloo, tp=ucx, dp=ucx", "gloo"])
def test_axes_of_one_backend_go_at_once(backend: str) -> None:
    program = mf.compile(define(SUMS, Layout(GRID), (1,)), Options(backend=backend))
    (comm,) = program.communications
    assert comm.axes == ("dp", "tp")
    assert comm.backend == ("ucx" if "=" in backend else None)


def test_an_exchange_along_one_axis_goes_by_its_backend() -> None:
    """On a mesh of one axis, or of several of which the others stay."""
    alone = DeviceMesh.arange(tp=3)
    for mesh, axis in ((alone, "tp"), (GRID, "tp"), (GRID, "dp")):
        ends = (Layout(mesh, {axis: Shard(0, blocks=n)}) for n in (1, 3))
        program = mf.compile(define(*ends, (9,)), Options(backend="gloo, tp=ucx, dp=mpi"))
        (comm,) = program.communications
        assert (comm.kind, comm.along) == ("Exchange", (axis,))
        assert comm.backend == {"tp": "ucx", "dp": "mpi"}[axis]
        assert "backends:" not in program.explain()


def test_an_exchange_along_axes_of_several_goes_by_the_usual_one() -> None:
    before, after = ({"dp": Shard(n), "tp": Shard(1 - n)} for n in (0, 1))
    fd = define(Layout(GRID, before), Layout(GRID, after), (8, 8))
    program = mf.compile(fd, Options(backend="gloo, dp=mpi"))
    (comm,) = program.communications
    assert (comm.kind, comm.along, comm.backend) == ("Exchange", ("dp", "tp"), None)
    told = [line.strip() for line in program.explain().splitlines() if "backends:" in line]
    assert told == [
        "backends: 1 exchange along dp (mpi) and tp (gloo), by gloo, the usual one: it is one post "
        "along all of them"
    ]
    assert "backends:" not in mf.compile(fd, Options(backend="mpi")).explain()


def test_a_halo_goes_by_the_backend_of_its_axis() -> None:
    with mf.FusionDefinition("halo") as fd:
        x = fd.define_tensor([1, 1, 8], mesh=GRID, layout={"tp": Shard(2)})
        w = fd.define_tensor([1, 1, 3], mesh=GRID, layout={})
        fd.add_output(fd.ops.conv1d(x, w, padding=1).on(GRID, {"tp": Shard(2)}))
    program = mf.compile(fd, Options(backend="gloo, tp=symmetric"))
    assert [c.backend for c in program.communications] == ["symmetric"], f"{program}"
