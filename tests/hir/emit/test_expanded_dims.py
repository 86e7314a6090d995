"""Expanded dims do not travel; as outputs they are written out, and may be sent besides."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.host_checks import accepted, parse, refused
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Replicate, Shard
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.check import verify
from mdfuse.hir.verify.result_types import check_types

SHAPES = [(4, 6), (1, 1), (4, 1), (1, 2), (2, 3), (5, 3)]


def _sent(program: mf.Program) -> list[tuple[int, ...]]:
    return [c.shape for c in program.communications]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reuses", [False, True])
def test_an_output_that_is_gathered_besides(
    shape: tuple[int, int], ranks: int, reuses: bool
) -> None:
    """Written out as an output, or into an input: one row of it travels."""
    mesh = DeviceMesh.arange(tp=ranks)
    x, b = torch.randn(shape), torch.randn(3, *shape)
    with FusionDefinition("gathered") as fd:
        hx = fd.define_tensor(x.shape, mesh=mesh, layout={"tp": Shard(1)})
        hb = fd.define_tensor(b.shape, mesh=mesh, layout={"tp": Shard(2)})
        e = hx.expand(3, *shape)
        fd.add_output(e, **({"reuse": hb} if reuses else {}))
        fd.add_output(fd.ops.set(e).on(mesh, {}))
        fd.add_output(hb.sum())
    program = mf.compile(fd)
    assert ranks == 1 or _sent(program)[0] == (1, *shape)
    made = x.expand(3, *shape)
    check_everywhere(program, [x, b.clone()], [made, made, b.sum()])


@pytest.mark.parametrize("shape", SHAPES)
def test_an_output_that_is_gathered_into_the_place_of_an_input(shape: tuple[int, int]) -> None:
    """Nothing else reads the input, so that it is written at once, and sent from there."""
    mesh = DeviceMesh.arange(tp=2)
    x, b = torch.randn(shape), torch.randn(3, *shape)
    with FusionDefinition("in_place") as fd:
        hx = fd.define_tensor(x.shape, mesh=mesh, layout={"tp": Shard(1)})
        hb = fd.define_tensor(b.shape, mesh=mesh, layout={"tp": Shard(2)})
        e = hx.expand(3, *shape)
        fd.add_output(e, reuse=hb)
        fd.add_output(fd.ops.set(e).on(mesh, {}))
    check_everywhere(mf.compile(fd), [x, b.clone()], [x.expand(3, *shape)] * 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_an_output(shape: tuple[int, int]) -> None:
    mesh = DeviceMesh.arange(tp=2)
    columns = 6 if shape[1] == 1 else shape[1]
    x, z = (torch.randn(shape[0], n, dtype=torch.float64) for n in (shape[1], columns))

    def attended(x: Any, z: Any) -> Any:
        e = x.expand(3, *shape)
        y = e + z
        return e, F.scaled_dot_product_attention(y, y, y)

    with FusionDefinition("attended") as fd:
        handles = [fd.define_tensor(x.shape, x.dtype, mesh, {"tp": Shard(1)}, name="x"),
                   fd.define_tensor(z.shape, z.dtype, mesh, name="z")]  # fmt: skip
        made = attended(*handles)
        for t in (*made, *mf.grad(made[1].square().sum(), handles)):
            fd.add_output(t)
    given = [t.clone().requires_grad_() for t in (x, z)]
    wanted = attended(*given)
    grads = torch.autograd.grad(wanted[1].square().sum(), given)
    check_everywhere(mf.compile(fd), [x, z], [t.detach() for t in (*wanted, *grads)])


def test_what_a_communication_has_written_out_goes_as_it_is() -> None:
    """Ranks without a row have none to send, so all of it is gathered, and so are views of it."""
    mesh = DeviceMesh.arange(tp=4)
    x = torch.arange(5)
    with FusionDefinition("written_out") as fd:
        hx = fd.define_tensor([5], torch.int64, mesh, {"tp": Shard(0)})
        rows = hx.expand(2, 3, 5).on(mesh, {"tp": Shard(0)})
        flat = rows.reshape(6, 5).on(mesh, {"tp": Shard(1)})
        fd.add_output(flat)
        fd.add_output(fd.ops.set(flat.expand(2, 6, 5)).on(mesh, {"tp": Shard(1)}))
    check_everywhere(mf.compile(fd), [x], [x.expand(6, 5), x.expand(2, 6, 5)])


EXPANDED = "input %x: T; %e: M = expand(%x, shape=[4,4]) order=[0,1]"
ONE = "%y: f32[1,4] (x=R) = unexpand(%e, dims=[0])"


def test_rows_are_alike_until_one_is_written() -> None:
    accepted(parse(f"{EXPANDED}; {ONE}; return %y"))
    row = "%r: T = select(%e, dim=0, index=1)"
    accepted(parse(f"{EXPANDED}; {row}; {ONE}; return %y, %r"))
    for write in ("%r = mul(%r, 2.0)", "%v: T = detach(%r); %r = mul(%v, 2.0)"):
        refused(f"{EXPANDED}; {row}; {write}; {ONE}; return %y", "no expand made dim 0 of %e")
    swap = "%s = send(%b, to=1 - coord(x), axis=x); %r = recv(%e, from=1 - coord(x), axis=x)"
    refused(
        f"input %b: M; {EXPANDED}; group_start; {swap}; group_end; wait %s; wait %r; "
        f"{ONE}; return %y",
        "no expand made dim 0 of %e",
    )


def test_rows_of_an_input_are_alike_once_they_are_written() -> None:
    head = "input %x: T; input %b: M; alias %e = %b"
    write = "%e = expand(%x, shape=[4,4])"
    accepted(parse(f"{head}; {write}; {ONE}; return %e, %y"))
    refused(f"{head}; {ONE}; {write}; return %e, %y", "no expand made dim 0 of %e")
    looped = f"for %i in 0..1 {{ {ONE}; {write}; }}"
    refused(f"{head}; {looped}; return %e", "no expand made dim 0 of %e")
    itself = "input %b: M; alias %e = %b; %e = expand(%b, shape=[4,4])"
    refused(f"{itself}; {ONE}; return %e, %y", "no expand made dim 0 of %e")


@pytest.mark.parametrize("rows", [5, 4, 7])
def test_a_cut_of_alike_rows_is_alike_where_a_rank_has_one_of_them(rows: int) -> None:
    """What a projection says of a cut is about its part: here a single row on some ranks."""
    mesh = DeviceMesh.arange(a=2, b=2, c=2)
    x = torch.randn(1, 1, 1)
    with FusionDefinition("cut") as fd:
        e = fd.define_tensor(x.shape, mesh=mesh).expand(3, rows, 6)[:, :, :4]
        law = {"a": Shard(1), "c": Shard(1)}
        part = fd.ops.set(e).on(mesh, law, order={1: ("c", "a")})
        fd.add_output(fd.ops.set(part).on(mesh, {}))
    program = mf.compile(fd)
    check_everywhere(program, [x], [x.expand(3, rows, 4)])
    projections = {rank: project(program.host, rank) for rank in range(8)}
    verify(projections)
    for local in projections.values():
        check_types(local)


def _drawn(draw: random.Random, x: Any, t: torch.Tensor, mesh: DeviceMesh) -> tuple[Any, Any]:
    """A view of x, or x in another layout, and the same of a tensor."""
    n, dim = t.ndim, draw.randrange(t.ndim)
    match draw.choice(("expand", "rows", "turn", "join", "cut", "set", "add")):
        case "expand" if n < 4:
            return x.expand(2, *t.shape), t.expand(2, *t.shape)
        case "rows":
            shape = [draw.randint(1, 3) if m == 1 else m for m in t.shape]
            return x.broadcast_to(shape), t.broadcast_to(shape)
        case "turn":
            dims = draw.sample(range(n), n)
            return x.permute(dims), t.permute(dims)
        case "join" if n > 1:
            shape = [math.prod(t.shape[:2]), *t.shape[2:]]
            return x.reshape(shape), t.reshape(shape)
        case "cut":
            rows = (*(slice(None),) * dim, slice(draw.randint(0, 1), None))
            return (x, t) if t.shape[dim] < 2 else (x[rows], t[rows])
        case "set":
            where = {a: draw.choice((Replicate(), *map(Shard, range(n)))) for a in mesh.axes}
            return mf.ops.set(x).on(mesh, where), t
    return x + x, t + t


@pytest.mark.parametrize("seed", range(60))
def test_drawn_views_as_outputs(seed: int) -> None:
    draw = random.Random(seed)
    mesh = DeviceMesh.arange(**draw.choice(({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2})))
    shape = [draw.choice((1, 2, 3, 5)) for _ in range(draw.randint(1, 2))]
    x = torch.randint(-9, 9, shape).double().requires_grad_()
    place = {"tp": draw.choice((Replicate(), *map(Shard, range(len(shape)))))}
    with FusionDefinition("views") as fd:
        pairs = [(fd.define_tensor(shape, x.dtype, mesh, place), x)]
        for _ in range(draw.randint(2, 5)):
            pairs.append(_drawn(draw, *draw.choice(pairs[-2:]), mesh))
        made = [(h * 1 if h is pairs[0][0] else h, t) for h, t in dict(pairs[1:]).items()]
        picked = draw.sample(made, min(3, len(made)))
        for h, _ in picked:
            fd.add_output(h)
        (grad,) = mf.grad(sum((h * h).sum() for h, _ in picked), [pairs[0][0]])
        fd.add_output(grad)
    wanted = [t for _, t in picked]
    wanted += torch.autograd.grad(sum((t * t).sum() for t in wanted), x)
    check_everywhere(mf.compile(fd), [x.detach()], [t.detach() for t in wanted])
