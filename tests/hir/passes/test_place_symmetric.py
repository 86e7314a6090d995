"""What is sent through shared memory lies in it, where the program makes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.oracle import POISON, local_part

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard, hir, simulate
from mdfuse.hir.passes import place_symmetric
from mdfuse.hir.verify.check import verify

LINE, GRID = DeviceMesh.arange(tp=4), DeviceMesh.arange(dp=2, tp=2)
SYMMETRIC = mf.Options(backend="symmetric")

Define = Callable[[mf.FusionDefinition], None]


def gathered(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([8, 4], mesh=LINE, layout={"tp": Shard(0)}, name="x")
    h = x + 1.0
    fd.add_output(fd.ops.set(h).on(LINE))


def product(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([6, 8], mesh=LINE, layout={"tp": Shard(1)}, name="x")
    w = fd.define_tensor([8, 4], mesh=LINE, layout={"tp": Shard(0)}, name="w")
    fd.add_output(fd.ops.set(x @ w).on(LINE))


def ring(fd: mf.FusionDefinition) -> None:
    """A scatter in a ring, of chunks that are computed before it."""
    x = fd.define_tensor([9, 8], mesh=LINE, layout={"tp": Shard(1)}, name="x")
    w = fd.define_tensor([8, 4], mesh=LINE, layout={"tp": Shard(0)}, name="w")
    around = mf.Stream(0, 4, rotate="tp")
    fd.add_output(fd.ops.set(x @ w).on(LINE, {"tp": Shard(0)}, stream=around))


def to_all(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([8, 8], mesh=LINE, layout={"tp": Shard(0)}, name="x")
    fd.add_output(fd.ops.set(x * 2.0).on(LINE, {"tp": Shard(1)}))


def split(fd: mf.FusionDefinition) -> None:
    """Terms that are computed before they are added up, as they may be where nothing is rounded."""
    p = fd.define_tensor([8, 4], mesh=LINE, layout={"tp": Partial("sum")}, name="p")
    fd.add_output(fd.ops.set(-p).on(LINE, {"tp": Shard(0)}))


def compiled(define: Define, options: mf.Options) -> mf.Program:
    with mf.FusionDefinition(define.__name__) as fd:
        define(fd)
    return mf.compile(fd, options)


def places(host: hir.HostProgram) -> list[str]:
    """What is allocated in symmetric memory."""
    return [i.outputs[0] for i in host.walk() if i.kwargs.get("memory") == "symmetric"]


@pytest.mark.parametrize("define", [gathered, product, ring, to_all, split])
def test_what_is_sent_is_placed_and_right(define: Define) -> None:
    program, plain = compiled(define, SYMMETRIC), compiled(define, mf.Options(backend="gloo"))
    assert len(places(program.host)) == 1 and places(plain.host) == []
    verify(program.host)
    assert hir.parse(str(program)) == program.host
    draw = torch.Generator().manual_seed(3)
    values = [program.fusion.values[n] for n in program.fusion.inputs]
    wholes = [torch.randint(-3, 4, v.shape, generator=draw).float() for v in values]
    expected = {
        "gathered": lambda x: x + 1,
        "product": torch.matmul,
        "ring": torch.matmul,
        "to_all": lambda x: x * 2,
        "split": torch.neg,
    }[define.__name__](*wholes)
    for seed in (None, 1, 2):
        found = simulate(program, wholes, options=POISON, schedule=seed)
        assert torch.equal(found.outputs[0], expected)
        for rank, (mine,) in enumerate(found.per_rank):
            layout = program.fusion.layout(program.fusion.outputs[0])
            assert torch.equal(mine, local_part(expected, layout, rank))


def test_the_programs_text() -> None:
    text = str(compiled(gathered, SYMMETRIC))
    assert ": f32[2,4] of [8,4] (tp=S0) = alloc(memory=symmetric)" in text


def test_only_what_goes_through_shared_memory() -> None:
    """Along tp, where the backend is named for tp alone."""

    def both(fd: mf.FusionDefinition) -> None:
        x = fd.define_tensor([8, 4], mesh=GRID, layout={"tp": Shard(0), "dp": Shard(1)}, name="x")
        along = fd.ops.set(x + 1.0).on(GRID, {"dp": Shard(1)})
        fd.add_output(fd.ops.set(along * 2.0).on(GRID, {}))

    for named, count in (("tp", 1), ("dp", 1), ("meshes", 0)):
        program = compiled(both, mf.Options(backend=f"gloo, {named}=symmetric"))
        assert len(places(program.host)) == count


@pytest.mark.parametrize(
    "body",
    [
        # the caller's
        "%y: f32[4] (tp=R) = alloc %c0 = post allgather(%x) -> %y wait %c0 return %y",
        # returned
        "%h: f32[2] of [4] (tp=S0) = neg(%x) %y: f32[4] (tp=R) = alloc "
        "%c0 = post allgather(%h) -> %y wait %c0 return %h, %y",
        # lies elsewhere by the user's word
        "%h: f32[2] of [4] (tp=S0) = alloc(memory=pinned) %h = neg(%x) %y: f32[4] (tp=R) = alloc "
        "%c0 = post allgather(%h) -> %y wait %c0 return %y",
    ],
)  # fmt: skip
def test_what_stays_where_it_is(body: str) -> None:
    body = body.replace("-> %y wait", "-> %y f32[4] (tp=S0) => (tp=R) axis=tp dim=0 wait")
    words = body.replace(" %", "\n%").replace(" wait", "\nwait").replace(" return", "\nreturn")
    lines = words.replace("->\n", "-> ").replace("wait\n", "wait ").replace("return\n", "return ")
    lines = lines.replace(",\n", ", ")
    text = f"host @p on mesh(tp=2) {{\ninput %x: f32[2] of [4] (tp=S0)\n{lines}\n}}"
    program = hir.parse(text)
    assert place_symmetric.run(program, SYMMETRIC) == program
