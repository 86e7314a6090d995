"""Waits stand where the data is needed."""

from __future__ import annotations

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir
from mdfuse.hir.passes import sink_waits
from mdfuse.hir.verify.check import verify

MESH = DeviceMesh.arange(tp=4)


def kinds(program: mf.Program) -> list[str]:
    return [i.fn or i.op for i in program.host if i.op != "free"]


def test_independent_work_comes_before_the_wait() -> None:
    with mf.FusionDefinition("overlap") as fd:
        x = fd.define_tensor([8, 8], mesh=MESH, layout={"tp": Shard(1)})
        w = fd.define_tensor([8, 8], mesh=MESH)
        whole = fd.ops.set(x).on(MESH, {})
        product = fd.ops.relu(w @ w)
        fd.add_output(whole + product)
    program = mf.compile(fd)
    assert kinds(program) == [
        "permute", "alloc", "post", "matmul", "relu", "wait", "permute", "add", "return",
    ]  # fmt: skip
    given = [torch.randn(8, 8), torch.randn(8, 8)]
    result = mf.simulate(program, given, options=mf.Options(poison=True))
    torch.testing.assert_close(result.outputs[0], given[0] + (given[1] @ given[1]).relu())


def test_two_posts_are_under_way_at_once() -> None:
    with mf.FusionDefinition("both") as fd:
        a = fd.define_tensor([8], mesh=MESH, layout={"tp": Shard(0)})
        b = fd.define_tensor([8], mesh=MESH, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(a).on(MESH, {}) + fd.ops.set(b).on(MESH, {}))
    program = mf.compile(fd)
    order = [i.op for i in program.host if i.op in ("post", "wait", "binary")]
    assert order == ["post", "post", "wait", "wait", "binary"]
    given = [torch.randn(8), torch.randn(8)]
    assert torch.equal(mf.simulate(program, given).outputs[0], given[0] + given[1])


def test_what_is_cast_once_it_is_reduced_is_not_waited_for() -> None:
    """Gradients that are added up in f32: each travels while the layers before it compute."""
    mesh, options = DeviceMesh.arange(fsdp=2), mf.Options(reduce_dtype=torch.float32)
    with mf.FusionDefinition("sharded") as fd:
        shard, dtype = {"fsdp": Shard(0)}, torch.bfloat16
        x = fd.define_tensor([4, 6], dtype, mesh, shard)
        ws = [fd.define_tensor([6, 6], dtype, mesh, shard) for _ in range(3)]
        h = x
        for w in ws:
            h = fd.ops.tanh(fd.ops.linear(h, fd.ops.set(w).on(mesh, {})))
        for w, gradient in zip(ws, mf.grad(h.sum(), ws), strict=True):
            fd.add_output(w - gradient, reuse=w)
    program = mf.compile(fd, options)
    made = [i for i in program.host if i.op in ("post", "wait") or i.fn == "cast"]
    posts = [i.outputs[0] for i in made if i.op == "post" and i.comm.kind == "ReduceScatter"]
    assert len(posts) == 3
    last = max(n for n, i in enumerate(made) if i.op == "post")
    waits = [n for n, i in enumerate(made) if i.op == "wait" and i.reads[0] in posts]
    assert len(waits) == 3 and min(waits) > last  # and the casts behind them

    given = [torch.randn(4, 6).bfloat16(), *torch.randn(3, 6, 6).bfloat16()]
    leaves = [g.double().requires_grad_() for g in given[1:]]
    want = given[0].double()
    for w in leaves:
        want = torch.tanh(torch.nn.functional.linear(want, w))
    want.sum().backward()
    result = mf.simulate(program, given, options=mf.Options(poison=True))
    for found, w in zip(result.outputs, leaves, strict=True):
        torch.testing.assert_close(found.double(), (w - w.grad).detach(), rtol=0.1, atol=0.15)


def test_an_output_that_nothing_else_reads_is_waited_for_before_the_return() -> None:
    with mf.FusionDefinition("last") as fd:
        a = fd.define_tensor([8], mesh=MESH, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(a).on(MESH, {}))
        fd.add_output(a * 2)
    assert kinds(mf.compile(fd))[-3:] == ["mul", "wait", "return"]


def test_what_nobody_reads_is_not_run() -> None:
    with mf.FusionDefinition("unread") as fd:
        a = fd.define_tensor([8], mesh=MESH, layout={"tp": Shard(0)})
        fd.ops.set(a).on(MESH, {}).sum()
        fd.add_output(a * 2)
    assert kinds(mf.compile(fd)) == ["mul", "return"]


def test_a_dependent_chain_stays_as_it_is() -> None:
    with mf.FusionDefinition("chain") as fd:
        x = fd.define_tensor([8, 8], mesh=MESH, layout={"tp": Shard(0)})
        for _ in range(2):
            x = fd.ops.set(fd.ops.set(x).on(MESH, {}) * 2).on(MESH, {"tp": Shard(0)})
            x = x + 1
        fd.add_output(x)
    ops = [i.op for i in mf.compile(fd).host if i.op in ("post", "wait")]
    assert ops == ["post", "wait"] * 2


def test_what_a_group_sends_arrives_before_the_group() -> None:
    program = hir.parse(
        """host @sent on mesh(x=2) {
             input %p: f32[4] (x=P(sum))
             %s: f32[4] (x=R) = alloc
             %c = post allreduce[sum](%p) -> %s f32[4] (x=P(sum)) => (x=R) axis=x
             wait %c
             %g: f32[4] (x=R) = alloc
             group_start
             %d = send(%s, to=1 - rank)
             %e = recv(%g, from=1 - rank)
             group_end
             wait %d
             wait %e
             return %g
           }"""
    )
    sunk = sink_waits.run(program, mf.Options())
    verify(sunk)
    assert [i.op for i in sunk][2:6] == ["alloc", "wait", "group_start", "send"]
    terms = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 0, 1, 1])]
    result = mf.simulate(sunk, per_rank=[{"p": x} for x in terms])
    assert all(torch.equal(y, torch.tensor([6.0, 2, 4, 5])) for (y,) in result.per_rank)
