"""What is posted in another order of dims than it has: its producer writes it so, with no copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.host_programs import POISON
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Partial, Shard, Stream
from mdfuse.frontend.handle import Handle
from mdfuse.passes.segmentation import merge_local

MESH = DeviceMesh.arange(tp=2)
FOUR = DeviceMesh.arange(dp=2, tp=2)
RANK0 = DeviceMesh([0])

Define = Callable[[FusionDefinition], None]
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A program, and what plain torch makes of its inputs.

    Attributes:
        define: adds inputs and outputs to a definition.
        plain: the same in torch.
        written: the instruction that writes what is posted.
    """

    define: Define
    plain: Callable[..., Tensor]
    written: str


def case(plain: Callable[..., Tensor], written: str) -> Callable[[Define], Define]:
    def add(define: Define) -> Define:
        CASES[define.__name__] = Case(define, plain, written)
        return define

    return add


def split(fd: FusionDefinition, *shape: int, dim: int | None = None) -> Handle:
    layout: Any = {} if dim is None else {"tp": Shard(dim)}
    return fd.define_tensor(shape, torch.float64, MESH, layout)


def onto(fd: FusionDefinition, x: Handle, dim: int | None, **more: Any) -> Handle:
    return fd.ops.set(x).on(MESH, {} if dim is None else {"tp": Shard(dim)}, **more)


@case(lambda x: x.sum(2), r"sum\(%[\w.]+, dims=\[2\]\) order=\[1,0\]")
def a_sum(fd: FusionDefinition) -> None:
    x = split(fd, 4, 6, 8, dim=2)
    fd.add_output(fd.ops.sum(x, dims=[2]).on(MESH, {"tp": Shard(1)}))


@case(lambda x: x.amax(0).permute(1, 2, 0), r"max\(%[\w.]+, dims=\[0\]\) order=\[1,2,0\]")
def through_a_view(fd: FusionDefinition) -> None:
    """The dims of a maximum change places before one of them is gathered."""
    x = split(fd, 8, 2, 4, 3, dim=2)
    fd.add_output(onto(fd, fd.ops.permute(fd.ops.max(x, dims=[0]), [1, 2, 0]), None) * 1.0)


@case(lambda x, w: (x @ w).T, r"matmul\(%[\w.]+, %[\w.]+\) order=\[1,0\]")
def a_transposed_product(fd: FusionDefinition) -> None:
    x, w = split(fd, 4, 8), split(fd, 8, 6, dim=1)
    fd.add_output(onto(fd, (x @ w).T, None))


@case(lambda x: x * 2 + 1, r"add\(%\w+, 1.0\) order=\[1,0\]")
def exact_ops(fd: FusionDefinition) -> None:
    x = split(fd, 4, 6, dim=1)
    fd.add_output(onto(fd, x * 2.0 + 1.0, None))


@case(lambda x, w: x @ w, r"matmul\(%[\w.]+, %[\w.]+\) order=\[1,0\]")
def a_product(fd: FusionDefinition) -> None:
    x, w = split(fd, 4, 8), split(fd, 8, 6, dim=1)
    fd.add_output(onto(fd, x @ w, None))


@case(torch.nn.functional.linear, r"linear\(%[\w.]+, %[\w.]+, %[\w.]+\) order=\[1,0\]")
def a_linear_with_bias(fd: FusionDefinition) -> None:
    x, w, b = split(fd, 4, 8), split(fd, 6, 8, dim=0), split(fd, 6, dim=0)
    fd.add_output(onto(fd, fd.ops.linear(x, w, b), None))


@case(torch.nn.functional.linear, r"linear\(%[\w.]+, %[\w.]+\) order=\[1,0\]")
def a_linear_with_bias_of_partials(fd: FusionDefinition) -> None:
    x, w, b = split(fd, 4, 8, dim=1), split(fd, 6, 8, dim=1), split(fd, 6)
    fd.add_output(fd.ops.linear(x, w, b).on(MESH, {"tp": Shard(1)}))


@case(torch.nn.functional.linear, r"linear\(%[\w.]+, %[\w.]+\) order=\[1,0,2\]")
def a_sequence(fd: FusionDefinition) -> None:
    """Sequence parallelism: what a row-parallel linear gives is scattered along dim 1."""
    x, w, b = split(fd, 3, 4, 8, dim=2), split(fd, 6, 8, dim=1), split(fd, 6)
    fd.add_output(fd.ops.linear(x, w, b).on(MESH, {"tp": Shard(1)}))


@case(torch.nn.functional.linear, r"linear\(%[\w.]+, %[\w.]+, %[\w.]+\) order=\[2,0,1\]")
def columns_of_a_sequence(fd: FusionDefinition) -> None:
    x, w, b = split(fd, 3, 4, 8), split(fd, 6, 8, dim=0), split(fd, 6, dim=0)
    fd.add_output(onto(fd, fd.ops.linear(x, w, b), None))


@case(torch.bmm, r"matmul\(%[\w.]+, %[\w.]+\) order=\[2,0,1\]")
def a_batch(fd: FusionDefinition) -> None:
    x, w = split(fd, 3, 4, 8), split(fd, 3, 8, 6, dim=2)
    fd.add_output(onto(fd, x @ w, None))


@case(torch.nn.functional.linear, r"linear\(%[\w.]+, %[\w.]+, %[\w.]+\) order=\[1,0\]")
def scattered(fd: FusionDefinition) -> None:
    """One rank computes, all get a part."""
    x, w, b = (fd.define_tensor(s, torch.float64, RANK0) for s in ([4, 8], [6, 8], [6]))
    fd.add_output(onto(fd, fd.ops.linear(x, w, b), 1))


@case(lambda x: (x + 1).sum(2) * 2, r"sum\(%[\w.]+, dims=\[2\]\) order=\[1,0\]")
def in_a_loop(fd: FusionDefinition) -> None:
    x = split(fd, 4, 6, 8, dim=2)
    y = fd.ops.sum(x, dims=[2]).on(MESH, {"tp": Partial()}, stream=Stream(0, 2))
    z = onto(fd, y, 1, stream=Stream(0, 2)) * 2.0
    fd.add_output(z + 2.0 * 8)


#: What stays a copy, and why.
KEPT: dict[str, Case] = {}


def kept(plain: Callable[..., Tensor]) -> Callable[[Define], Define]:
    def add(define: Define) -> Define:
        KEPT[define.__name__] = Case(define, plain, r"permute\(%\w+(\.\w+)*, dims=\[1,0\]\) contig")
        return define

    return add


@kept(lambda x: x.exp())
def not_exact(fd: FusionDefinition) -> None:
    fd.add_output(onto(fd, fd.ops.exp(split(fd, 4, 6, dim=1)), None))


@kept(lambda x: x * 2)
def read_twice(fd: FusionDefinition) -> None:
    """The other reader finds it as the op lays it."""
    y = split(fd, 4, 6, dim=1) * 2.0
    fd.add_output(onto(fd, y, None))
    fd.add_output(fd.ops.sum(y))


@kept(lambda x: x * 2)
def an_output(fd: FusionDefinition) -> None:
    y = split(fd, 4, 6, dim=1) * 2.0
    fd.add_output(onto(fd, y, None))
    fd.add_output(y)


@kept(lambda x: x * 2)
def required(fd: FusionDefinition) -> None:
    y = fd.ops.stride_order(split(fd, 4, 6, dim=1) * 2.0, (1, 0))
    fd.add_output(onto(fd, y, None))


def compiled(define: Define, merge: bool) -> mf.Program:
    with FusionDefinition(define.__name__) as fd:
        define(fd)
    return mf.compile(fd, should_merge=merge_local if merge else None)


def drawn(program: mf.Program) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [program.fusion.values[n].shape for n in program.fusion.inputs]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


@pytest.mark.parametrize("merge", [False, True], ids=["ops", "units"])
@pytest.mark.parametrize("name", CASES)
def test_the_producer_writes_what_is_posted(name: str, merge: bool) -> None:
    text = str(compiled(CASES[name].define, merge))
    assert re.search(CASES[name].written, text), text
    assert not re.search(r"\.(send|dense): .* (contiguous|order=)", text), text


@pytest.mark.parametrize("name", KEPT)
def test_what_would_be_no_gain_is_copied(name: str) -> None:
    text = str(compiled(KEPT[name].define, False))
    assert re.search(KEPT[name].written, text), text


@pytest.mark.parametrize("merge", [False, True], ids=["ops", "units"])
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", [*CASES, *KEPT])
def test_the_values_are_torch_s(name: str, merge: bool, seed: int | None) -> None:
    found = (CASES | KEPT)[name]
    program = compiled(found.define, merge)
    inputs = drawn(program)
    result = mf.simulate(program, inputs, options=POISON, schedule=seed)
    torch.testing.assert_close(result.outputs[0], found.plain(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["a_sum", "exact_ops", "a_product", "a_sequence"])
def test_a_plan_copies_nothing(name: str, unjoined: None) -> None:
    """The op, the post and its wait are all calls of a run that concern it."""
    program = compiled(CASES[name].define, False)
    inputs = drawn(program)
    mine = [
        mf.shard_tensor(x, *_placed(program, n), rank=0)
        for n, x in zip(program.fusion.inputs, inputs, strict=True)
    ]
    comm = mf.init(backend="null", rank=0, size=2)
    try:
        program.run(*mine)
        plan = re.sub(" +#.*", "", str(program.plans.recent))
    finally:
        comm.close()
    assert "copy" not in plan and "contiguous" not in plan and "in_order" not in plan, plan


def _placed(program: mf.Program, name: str) -> tuple[DeviceMesh, Any]:
    layout = program.fusion.layout(name)
    return layout.mesh, layout.by_axis()


# -- what a program says of where its outputs lie ------------------------------------------------


@pytest.mark.parametrize("before", [{}, {"tp": Shard(0)}, {"dp": Shard(1), "tp": Shard(2)}])
@pytest.mark.parametrize("after", [{}, {"tp": Shard(1)}, {"dp": Shard(0), "tp": Shard(0)}])
@pytest.mark.parametrize("shape", [(4, 8, 12), (5, 7, 6)])
def test_outputs_lie_as_the_program_says(
    before: dict[str, Any], after: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Whatever a communication leaves: row by row, a permutation of that, or what is computed."""
    with FusionDefinition("lies") as fd:
        x = fd.define_tensor(shape, torch.float64, FOUR, before)
        y = fd.ops.set(x).on(FOUR, after)
        fd.add_output(y)
        fd.add_output(fd.ops.permute(y, [2, 0, 1]) + 1)
    host = mf.compile(fd).host
    found = mf.simulate(host, [torch.randn(shape, dtype=torch.float64)])
    for name, *parts in zip(host.outputs, *found.per_rank, strict=True):
        order = host.orders[name]
        assert order.lies is not None or not host.communications
        for part in parts:
            strides = [part.stride()[d] for d in order.lies or ()]
            assert strides == sorted(strides, reverse=True), f"{order}\n{host}"
        if order.stated is not None:
            assert order.lies == order.stated


def test_what_is_written_later_lies_where_the_buffer_was_made() -> None:
    host = mf.hir.parse("""
    host @made on mesh(x=1) {
      input %x: f32[2,3] (x=R)
      %y: f32[2,3] (x=R) = alloc order=[1,0]
      %y = add(%x, 1.0)
      %z: f32[3,2] (x=R) = permute(%y, dims=[-1,0])
      return %y, %z
    }""")
    assert [host.orders[n].lies for n in "yz"] == [(1, 0), (0, 1)]
    ((y, z),) = mf.simulate(host, [torch.ones(2, 3)]).per_rank
    assert (y.stride(), z.stride()) == ((1, 2), (2, 1))
