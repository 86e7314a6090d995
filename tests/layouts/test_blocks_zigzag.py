"""Zigzag order: two chunks of a dim on each rank, one from the front and one from the back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere, local_part

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, hir
from mdfuse.layouts.placements import Placement

GRID = DeviceMesh.arange(a=2, b=2)
ZIGZAG = Shard(1, zigzag=True)


def chunk(x: torch.Tensor, n: int, i: int) -> torch.Tensor:
    pieces = x.chunk(n)
    return pieces[i] if i < len(pieces) else x[:0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("extent", [0, 1, 2, 3, 5, 7, 8, 16, 17, 33])
def test_a_rank_has_a_chunk_from_the_front_and_one_from_the_back(ranks: int, extent: int) -> None:
    x, mesh = torch.arange(extent), DeviceMesh.arange(cp=ranks)
    layout = Layout(mesh, {"cp": Shard(-1, zigzag=True)}).normalized(1)
    parts = [mf.shard_tensor(x, layout, rank=r) for r in range(ranks)]
    for r, part in enumerate(parts):
        chunks = [chunk(x, 2 * ranks, r), chunk(x, 2 * ranks, 2 * ranks - 1 - r)]
        assert part.tolist() == torch.cat(chunks).tolist()
        assert layout.local_shape((extent,), r) == (len(part),)
    assert layout.local_shape((extent,)) == (max(map(len, parts)),)
    assert torch.equal(mf.unshard_tensor(parts, layout), x)


@pytest.mark.parametrize(
    ("placements", "order", "rows"),
    [
        ((True, True), "ab", [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ((True, False), "ab", [[0, 1], [6, 7], [2, 3], [4, 5]]),
        ((False, True), "ab", [[0, 3], [1, 2], [4, 7], [5, 6]]),
        ((True, False), "ba", [[0, 3], [4, 7], [1, 2], [5, 6]]),
    ],
)
def test_several_axes(placements: tuple[bool, bool], order: str, rows: list[list[int]]) -> None:
    split = {a: Shard(0, zigzag=x) for a, x in zip("ab", placements, strict=True)}
    layout = Layout(GRID, split, {0: tuple(order)}).normalized(1)
    parts = [mf.shard_tensor(torch.arange(8), layout, rank=r).tolist() for r in range(4)]
    assert parts == rows


def test_text_and_identity() -> None:
    layout = Layout(DeviceMesh.arange(cp=2), {"cp": ZIGZAG})
    assert str(layout) == "(cp=S1/zigzag)" and repr(ZIGZAG) == "Shard(dim=1, zigzag=True)"
    assert Shard(1) != ZIGZAG != Shard(1, 2) and Shard(1, zigzag=True) == ZIGZAG
    assert layout != Layout(layout.mesh, {"cp": Shard(1)})
    assert str(layout.normalized(2)) == str(layout)
    text = """
    host @f on mesh(cp=2) {
      input %x: f32[4] of [6] (cp=S0/zigzag)
      %y: f32[4] of [6] (cp=S0/zigzag) = mul(%x, 2)
      return %y
    }"""
    program = hir.parse(text)
    hir.verify.check.verify(program)
    assert str(hir.parse(str(program))) == str(program)
    picture = str(Layout(layout.mesh, {"cp": Shard(0, zigzag=True)}).picture((6,)))
    assert picture.splitlines()[1].split() == ["0:2", "2:4", "4:6"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: Shard(0, blocks=2, zigzag=True), "blocks=2, zigzag=True"),
        (lambda: Shard(0, zigzag=2), "zigzag=2"),
        (lambda: Layout(GRID, {"a": Shard(-3, zigzag=True)}).normalized(2), "zigzag=True"),
        (lambda: Layout(GRID, {"a": Shard(0, zigzag=True), "b": Shard(0, 2)}), "different blocks"),
        (
            lambda: Layout(
                DeviceMesh.arange(a=2, b=2, c=2),
                {"a": Shard(0, zigzag=True), "b": Shard(0), "c": Shard(0, zigzag=True)},
            ),
            "c splits dim 0 in zigzag order, b before it plainly",
        ),
        (
            lambda: Layout(GRID, {"a": Shard(0, zigzag=True)}, stream=mf.Stream(0, 2, "a")),
            "each rank starts at its own chunk",
        ),
    ],
)
def test_refused(given: Callable[[], object], message: str) -> None:
    with pytest.raises(mf.LayoutError, match=message):
        given()


MOVES: list[tuple[Placement, Placement, float]] = [
    (Replicate(), ZIGZAG, 0),
    (ZIGZAG, Replicate(), 1 / 2),
    (Shard(1), ZIGZAG, 1 / 4),
    (ZIGZAG, Shard(1), 1 / 4),
    (ZIGZAG, Shard(0), 1 / 4),
    (Partial(), ZIGZAG, 1 / 2),
    (ZIGZAG, Shard(1, blocks=2), 1 / 4),
]


@pytest.mark.parametrize(("before", "after", "share"), MOVES)
def test_moves_bring_what_is_lacking(before: Placement, after: Placement, share: float) -> None:
    mesh, x = DeviceMesh.arange(cp=2), torch.randn(4, 8, dtype=torch.float64)
    with mf.FusionDefinition("moved") as fd:
        source = fd.define_tensor([4, 8], x.dtype, mesh=mesh, layout={"cp": before})
        fd.add_output(fd.ops.set(source).on(mesh, {"cp": after}))
    program = mf.compile(fd)
    check_everywhere(program, [x], [x])
    assert [program.bytes_received(r) for r in range(2)] == [share * x.nbytes] * 2


LENGTHS = [1, 3, 8, 11]


def rotated(x: Any, ops: Any) -> Any:
    """Numbers of positions, and a mask by them, made in the program."""
    s = x.shape[1]
    arange = ops.arange(s, dtype=torch.float64)
    later = ops.reshape(arange, (1, s, 1)) * ops.reshape(arange, (1, 1, s)) > s
    table = ops.sin(ops.reshape(arange, (1, s, 1)) * 0.1)
    return ops.where(later, x.sum(2, keepdim=True) * table, 0.5)


LOCAL: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x, w, i: (x * 2).exp() - x,
    "norm": lambda x, w, i: F.layer_norm(x, (4,)),
    "product": lambda x, w, i: F.linear(x, w).relu(),
    "softmax": lambda x, w, i: x.softmax(2).amax(2),
    "lookup": lambda x, w, i: F.embedding(i, w),
    "losses": lambda x, w, i: x.log_softmax(2).gather(2, (i % 4).unsqueeze(2)),
    "heads": lambda x, w, i: x.reshape(x.shape[0], x.shape[1], 2, 2).transpose(1, 2),
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("length", LENGTHS)
def test_kept_without_communication(name: str, length: int) -> None:
    mesh, op = DeviceMesh.arange(cp=3), LOCAL[name]
    tensors = [
        torch.randn(2, length, 4, dtype=torch.float64),
        torch.randn(7, 4, dtype=torch.float64),
        torch.randint(7, (2, length)),
    ]
    with mf.FusionDefinition(name) as fd:
        x, w, i = (
            fd.define_tensor(list(t.shape), t.dtype, mesh=mesh, layout=of)
            for t, of in zip(tensors, ({"cp": ZIGZAG}, {}, {"cp": ZIGZAG}), strict=True)
        )
        y = op(x, w, i)
        fd.add_output(y)
    program = mf.compile(fd)
    check_everywhere(program, tensors, [op(*tensors)])
    if length > 1:  # a reshape gives a dim of one row no label
        assert not program.communications, f"{program}"
        assert "zigzag" in str(program.fusion.layout(program.fusion.outputs[0]))


@pytest.mark.parametrize("length", LENGTHS)
def test_numbers_of_rows(length: int) -> None:
    """Ranges, draws, and constants are those of the rows that a rank has."""
    mesh = DeviceMesh.arange(cp=2)

    def define(zigzag: bool) -> mf.Program:
        with mf.FusionDefinition("numbers") as fd:
            there = {"cp": Shard(0, zigzag=zigzag)}
            x = fd.define_tensor([length, 2], torch.float64, mesh=mesh, layout=there)
            seed = fd.define_scalar(dtype=int)
            one = fd.ops.arange(length, dtype=torch.float64).on(mesh, there)
            two = fd.ops.uniform([length, 2], seed=seed, dtype=torch.float64).on(mesh, there)
            three = fd.ops.tensor([*range(length)], dtype=torch.float64).on(mesh, there)
            for y in (one, two, three, fd.ops.dropout(x, 0.5, seed=seed)):
                fd.add_output(y)
        return mf.compile(fd)

    x = torch.randn(length, 2, dtype=torch.float64)
    wanted = mf.simulate(define(False), [x, 7]).outputs
    program = define(True)
    assert torch.equal(wanted[0], torch.arange(length, dtype=torch.float64))
    check_everywhere(program, [x, 7], wanted, exact=True)
    assert not program.communications, f"{program}"
    local = hir.parse(str(program.for_rank(1)))
    hir.verify.check.verify(local)
    assert str(hir.parse(str(local))) == str(local)


@pytest.mark.parametrize("length", LENGTHS)
def test_gradients(length: int) -> None:
    """The reduction over positions, the table's gradient, a mean: against autograd on the whole."""
    mesh = DeviceMesh.arange(cp=2)
    i, w = torch.randint(5, (2, length)), torch.randn(5, 4, dtype=torch.float64)

    def loss(i: Any, w: Any) -> Any:
        h = F.layer_norm(F.embedding(i, w), (4,))
        scores = F.linear(h, w).log_softmax(2)
        return -scores.gather(2, i.unsqueeze(2)).mean()

    with mf.FusionDefinition("trained") as fd:
        ids = fd.define_tensor([2, length], torch.int64, mesh=mesh, layout={"cp": ZIGZAG})
        table = fd.define_tensor([5, 4], torch.float64, mesh=mesh)
        value = loss(ids, table)
        fd.add_output(value)
        fd.add_output(mf.grad(value, [table])[0])
    whole = w.clone().requires_grad_()
    wanted = loss(i, whole)
    (grad,) = torch.autograd.grad(wanted, whole)
    program = mf.compile(fd)
    check_everywhere(program, [i, w], [wanted.detach(), grad])
    assert all(math.prod(c.shape) <= 20 for c in program.communications), f"{program}"


def test_what_asks_for_neighbours_reads_a_plain_part() -> None:
    mesh, x = DeviceMesh.arange(cp=2), torch.randn(2, 10, 4, dtype=torch.float64)
    with mf.FusionDefinition("scan") as fd:
        h = fd.define_tensor([2, 10, 4], x.dtype, mesh=mesh, layout={"cp": ZIGZAG})
        fd.add_output(h.cumsum(1))
        fd.add_output(h[:, 2:9:3])
        fd.add_output(h.flip(1))
        fd.add_output(torch.cat([h, h], 1))
        fd.add_output(h.reshape(20, 4))
    wanted = [x.cumsum(1), x[:, 2:9:3], x.flip(1), torch.cat([x, x], 1), x.reshape(20, 4)]
    check_everywhere(mf.compile(fd), [x], wanted)


@pytest.mark.parametrize("extent", [0, 1, 5, 16, 23])
@pytest.mark.parametrize("chunks", [1, 3, 4, 7])
def test_chunks_are_those_of_the_rows_side_by_side(chunks: int, extent: int) -> None:
    whole = Layout(GRID, {"a": Shard(0, zigzag=True), "b": Shard(0, zigzag=True)})
    for rank in range(GRID.size):
        rows = local_part(torch.arange(extent), whole, rank)
        pieces = rows.chunk(chunks) if extent and len(rows) else ()
        for i in range(chunks):
            at = whole.with_stream(mf.Stream(0, chunks, index=i))
            want = pieces[i].tolist() if i < len(pieces) else []
            (runs,) = at.rows((extent,), rank)
            assert [r for a, b in runs for r in range(a, b)] == want
            ((start, stop),) = at.box((extent,), rank)
            assert rows[start:stop].tolist() == want
