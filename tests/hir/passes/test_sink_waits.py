"""Waits stand where the data is needed."""

from __future__ import annotations

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

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
