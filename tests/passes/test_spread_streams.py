"""Streams spread to what is computed of chunks, and to what chunks are computed of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream

MESH = DeviceMesh.arange(tp=2)
COLUMNS, ROWS = {"tp": Shard(1)}, {"tp": Shard(0)}


def perceptron(stream: Stream | None, at: int) -> mf.FusionDefinition:
    """Two products whose weights are split; the value of one number has the stream."""
    with mf.FusionDefinition("perceptron") as fd:
        x = fd.define_tensor([8, 4], mesh=MESH)
        w = fd.define_tensor([4, 6], mesh=MESH, layout=COLUMNS)
        v = fd.define_tensor([6, 4], mesh=MESH, layout=ROWS)
        steps: list[Callable[[Any], Any]] = [
            lambda h: h @ w,
            lambda h: h.relu(),
            lambda h: (h @ v).on(MESH, {}, stream=stream if at == 2 else None),
            lambda h: h * 2.0,
            lambda h: fd.ops.softmax(h, -1),
        ]
        h = x
        for n, step in enumerate(steps):
            h = step(h)
            if n == at and n != 2:
                layout = COLUMNS if n < 2 else {}
                h = h.on(MESH, layout, stream=stream)
        fd.add_output(h)
    return fd


def loops(program: mf.Program) -> list[list[str]]:
    """The operations of each loop over chunks."""
    found = (i for i in program if i.op == "for" and any(j.outputs for j in i.body))
    return [[j.fn if j.op in ("binary", "unary") else j.op for j in i.walk()] for i in found]


@pytest.mark.parametrize("at", range(5))
def test_one_word_makes_one_loop_up_to_what_communicates(at: int) -> None:
    """From before or behind the all-reduce alone: then it stays as it is, and so does the rest."""
    program = mf.compile(perceptron(Stream(0, 4), at), mf.Options(streams=1))
    (inside,) = loops(program)
    products = [op for op in inside if op == "matmul"]
    if at == 2:
        assert products == ["matmul"] * 2 and {"relu", "post", "mul", "softmax"} <= {*inside}
    elif at < 2:
        assert products == ["matmul"] * 2 and "relu" in inside and "post" not in inside
    else:
        assert not products and {"mul", "softmax"} <= {*inside} and "post" not in inside
    given = [torch.randn(s) for s in ([8, 4], [4, 6], [6, 4])]
    (found,) = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
    x, w, v = given
    torch.testing.assert_close(found, torch.softmax(2 * ((x @ w).relu() @ v), -1))
    plain = mf.compile(perceptron(None, at))
    assert program.bytes_received(0) == plain.bytes_received(0)


def streamed(define: Callable[[mf.FusionDefinition], Any], *shapes: list[int]) -> list[list[str]]:
    with mf.FusionDefinition("f") as fd:
        for y in define(fd):
            fd.add_output(y)
    program = mf.compile(fd, mf.Options(streams=1))
    given = [torch.randn(s) for s in shapes]
    wanted: list[Tensor] = mf.reference(fd, given)
    for got, want in zip(mf.simulate(program, given).outputs, wanted, strict=True):
        torch.testing.assert_close(got, want)
    return loops(program)


def test_what_needs_the_dim_as_a_whole_ends_it() -> None:
    def define(fd: mf.FusionDefinition) -> Any:
        x = fd.define_tensor([8, 4], mesh=MESH)
        y = (x + 1.0).on(MESH, {}, stream=Stream(0, 4))
        return ((y.exp() - y.sum(0)).tanh(),)

    found = streamed(define, [8, 4])
    assert [op for inside in found for op in inside if op in ("add", "sum")] == ["add"]


def test_transposed_it_is_the_other_dim() -> None:
    def define(fd: mf.FusionDefinition) -> Any:
        x, w = (fd.define_tensor(s, mesh=MESH) for s in ([8, 4], [8, 3]))
        y = (x + 1.0).on(MESH, {}, stream=Stream(1, 2))
        return (y.T @ w, y * 2.0)

    (inside,) = streamed(define, [8, 4], [8, 3])
    assert {"add", "matmul", "mul"} <= {*inside}


def test_other_streams_and_rings_stay_as_they_are_stated() -> None:
    def define(fd: mf.FusionDefinition) -> Any:
        x = fd.define_tensor([8, 4], mesh=MESH, layout=ROWS)
        w = fd.define_tensor([4, 4], mesh=MESH)
        ring = fd.ops.set(x).on(MESH, {}, stream=Stream(0, 2, rotate="tp"))
        y = (ring @ w).on(MESH, {}, stream=Stream(0, 2, rotate="tp"))
        return (y * 2.0,)

    found = streamed(define, [8, 4], [4, 4])
    assert all("mul" not in inside for inside in found)
    with mf.FusionDefinition("g") as fd:
        x = fd.define_tensor([8, 4], mesh=MESH)
        y = (x + 1.0).on(MESH, {}, stream=Stream(0, 4))
        fd.add_output((y * 3.0).on(MESH, {}, stream=Stream(0, 2)))
    counts = [i.kwargs["stop"] for i in mf.compile(fd, mf.Options(streams=1)) if i.op == "for"]
    assert counts == [4, 2]
