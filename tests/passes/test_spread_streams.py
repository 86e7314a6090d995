"""Streams spread to what is computed of chunks, and to what chunks are computed of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


def _smooth(x: Any) -> Any:
    return F.avg_pool1d(x.t().unsqueeze(0), 3, 1, 1)[0].t()


#: What is computed of f64[rows,3], which rows of it a chunk is made of.
BETWEEN: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "parted": (20, lambda x: x.unflatten(0, (5, 4))),
    "merged": (20, lambda x: (x.unflatten(0, (5, 4)) * 2.0).flatten(0, 1)),
    "turned": (24, lambda x: (x.unflatten(0, (4, 6)) * 2.0).reshape(6, 4, 3)),
    "one": (7, lambda x: x.unsqueeze(0).reshape(7, 1, 3).reshape(1, 7, 3)[0]),
    "window": (9, _smooth),
    "halves": (8, lambda x: F.avg_pool1d(x.t().unsqueeze(0), 2)[0].t()),
    "repeated": (4, lambda x: x.repeat(2, 1)),
}


@pytest.mark.parametrize("layout", [{}, ROWS], ids=["whole", "split"])
@pytest.mark.parametrize("name", BETWEEN)
def test_chunks_end_at_what_has_other_borders(name: str, layout: Any) -> None:
    """A stream in front of it, or behind it, is no reason to refuse the program."""
    rows, between = BETWEEN[name]
    x = torch.randn(rows, 3, dtype=torch.float64)
    for count, at in itertools.product((1, 2, 3, 4, 5), range(2)):
        with mf.FusionDefinition("between") as fd:
            h = fd.define_tensor([rows, 3], torch.float64, MESH, layout, name="x").sin()
            stream = Stream(0, count)
            h = between(h.on(MESH, layout, stream=stream) if at == 0 else h).cos()
            fd.add_output(h.on(MESH, layout, stream=stream) if at == 1 else h)
        found = mf.simulate(mf.compile(fd), [x], options=mf.Options(poison=True)).outputs[0]
        torch.testing.assert_close(found, between(x.sin()).cos())


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 7, (2, 3), (0, 5), (4, 1)])
def test_a_reshape_of_uneven_rows(chunks: Any) -> None:
    """Five rows in two chunks are 3 and 2, and 12 and 8 of the 20 that they are made of."""
    x = torch.randn(20, 3, dtype=torch.float64)
    lengths = tuple(4 * n for n in chunks) if isinstance(chunks, tuple) else None
    with mf.FusionDefinition("parted") as fd:
        h = fd.define_tensor([20, 3], torch.float64, MESH, name="x").sin()
        y = h.unflatten(0, (5, 4)).on(MESH, {}, stream=Stream(0, chunks))
        fd.add_output(y)
        if lengths is not None:
            fd.add_output((y * 2.0).flatten(0, 1).on(MESH, {}, stream=Stream(0, lengths)))
    program = mf.compile(fd)
    assert [i for i in program if i.op == "for"]
    first, *more = mf.simulate(program, [x], options=mf.Options(poison=True)).outputs
    assert torch.equal(first, x.sin().unflatten(0, (5, 4)))
    assert all(torch.equal(y, x.sin() * 2.0) for y in more)


def test_a_window_is_not_streamed() -> None:
    with mf.FusionDefinition("window") as fd:
        x = fd.define_tensor([2, 3, 8], mesh=MESH, name="x")
        fd.add_output(F.avg_pool1d(x, 2).on(MESH, {}, stream=Stream(2, 2)))
    with pytest.raises(mf.LoweringError, match="mean_pool reaches over rows of dim 2"):
        mf.compile(fd)
    with mf.FusionDefinition("window") as fd:
        x = fd.define_tensor([2, 3, 8], mesh=MESH, name="x")
        fd.add_output(F.avg_pool1d(x, 2))
    with pytest.raises(mf.LoweringError, match="mean_pool reaches over rows of the batch"):
        mf.pipeline(fd, microbatches=2, batch={"x": 2})
