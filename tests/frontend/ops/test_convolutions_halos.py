"""Rows of other parts that windows read lie in copies of their own, whatever else reads a value."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard

#: what else reads the value h[2,4,n] that a convolution reads
READERS: dict[str, Callable[[Any], Any]] = {
    "an output": lambda h: h,
    "a pointwise op": lambda h: h.exp(),
    "a sum": lambda h: h.sum(),
    "a sum over the places": lambda h: h.exp().mean((0, 2)),
    "a sum over others": lambda h: h.sum(0),
    "the largest": lambda h: h.amax(2),
    "an op that reads it twice": lambda h: h * h,
    "rows": lambda h: h.softmax(2),
    "a transpose": lambda h: h.transpose(1, 2),
    "a slice of others": lambda h: h[:, 1:],
    "a slice of places": lambda h: h[..., ::2],
    "an op that joins": lambda h: torch.cat([h, h], 1),
    "an op that turns": lambda h: h.flip(2),
    "a scan": lambda h: h.cumsum(2),
    "an op that picks": lambda h: h.topk(1, 2)[0],
    "other windows": lambda h: F.max_pool1d(h, 2, ceil_mode=True),
    "the same windows": lambda h: F.avg_pool1d(h, 3, 1, 1),
    "a reshape": lambda h: h.reshape(-1),
    "a matrix": lambda h: h @ h.transpose(1, 2),
}


def _step(reader: Callable[[Any], Any], x: Any, w: Any, law: Callable[[Any], Any]) -> list[Any]:
    h = F.relu(x)
    return [law(F.conv1d(h, w, padding=1)), reader(h)]


def _check_borders(program: mf.Program) -> None:
    """No input, no output, and nothing but what windows read has rows of other parts."""
    fusion = program.fusion
    wide = {n for n, v in fusion.values.items() if v.layout is not None and v.layout.reaches}
    assert wide.isdisjoint((*fusion.inputs, *fusion.outputs))
    assert {fusion.producers[n].op for n in wide} <= {"set"}
    readers = {r.op for n in wide for r in fusion.consumers[n]}
    pools = {"max_pool", "max_pool_grad", "mean_pool"}
    assert readers <= {"convolution", "convolution_weight", *pools}


@pytest.mark.parametrize(("ranks", "n"), [(2, 8), (3, 7), (4, 3), (2, 1)])
@pytest.mark.parametrize("name", READERS)
def test_readers_of_a_value_that_a_split_convolution_reads(name: str, ranks: int, n: int) -> None:
    mesh = DeviceMesh.arange(tp=ranks)
    reader = READERS[name]
    x, w = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, n), (4, 4, 3)))
    with FusionDefinition("read") as fd:
        hx = fd.define_tensor(x.shape, x.dtype)
        hw = fd.define_tensor(w.shape, w.dtype, mesh)
        made = _step(reader, hx, hw, lambda y: y.on(mesh, {"tp": Shard(2)}))
        for t in (*made, *mf.grad(sum((t * t).sum() for t in made), [hx, hw])):
            fd.add_output(t)
    program = mf.compile(fd)
    _check_borders(program)
    given = [t.clone().requires_grad_() for t in (x, w)]
    wanted = _step(reader, *given, lambda y: y)
    wanted += torch.autograd.grad(sum((t * t).sum() for t in wanted), given)
    check_everywhere(program, [x, w], [t.detach() for t in wanted])


@pytest.mark.parametrize("name", ["an output", "a pointwise op", "rows"])
def test_readers_without_gradients(name: str) -> None:
    mesh, reader = DeviceMesh.arange(tp=2), READERS[name]
    x, w = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 8), (4, 4, 3)))
    with FusionDefinition("read") as fd:
        handles = fd.define_tensor(x.shape, x.dtype), fd.define_tensor(w.shape, w.dtype, mesh)
        for t in _step(reader, *handles, lambda y: y.on(mesh, {"tp": Shard(2)})):
            fd.add_output(t)
    program = mf.compile(fd)
    _check_borders(program)
    check_everywhere(program, [x, w], _step(reader, x, w, lambda y: y))


def _sent(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], *, dims: Sequence[int] = (2,)
) -> list[tuple[str, int]]:
    """The posts of a function of x, whose results are split along some dims: (kind, bytes)."""
    mesh = DeviceMesh.arange(**{f"a{d}": 2 for d in dims})
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes]
    with FusionDefinition("sent") as fd:
        x, *weights = (fd.define_tensor(t.shape, t.dtype) for t in tensors)
        for y in function(x, *weights):
            fd.add_output(y.on(mesh, {f"a{d}": Shard(d) for d in dims}))
    program = mf.compile(fd)
    _check_borders(program)
    check_everywhere(program, tensors, function(*tensors))
    return [
        (c.kind, sum(c.bytes_received(rank) for rank in mesh.ranks)) for c in program.communications
    ]


def test_windows_that_are_alike_share_one_exchange() -> None:
    shapes = [(2, 4, 8), (4, 4, 3), (6, 4, 3), (4, 4, 5)]
    row = 2 * 4 * 8

    def alike(x: Any, v: Any, w: Any, _: Any) -> Any:
        h = F.relu(x)
        return F.conv1d(h, v, padding=1), F.conv1d(h, w, padding=1), F.avg_pool1d(h, 3, 1, 1)

    def other(x: Any, v: Any, _: Any, w: Any) -> Any:
        h = F.relu(x)
        return F.conv1d(h, v, padding=1), F.conv1d(h, w, padding=2)

    assert _sent(alike, shapes) == [("Exchange", 2 * row)]
    assert _sent(other, shapes) == [("Exchange", 2 * row), ("Exchange", 4 * row)]


def test_rows_and_columns_of_other_parts() -> None:
    def image(x: Any, w: Any) -> Any:
        return [F.conv2d(F.relu(x), w, padding=1)]

    shapes = [(1, 2, 5, 7), (3, 2, 3, 3)]
    assert [kind for kind, _ in _sent(image, shapes, dims=(2, 3))] == ["Exchange"]


def test_windows_are_cut_out_of_what_is_whole() -> None:
    """The softmax needs all places, so that each rank has them, of x and of the result."""

    def rows(x: Any, w: Any) -> Any:
        return [F.conv1d(x.softmax(2), w, stride=2, padding=1)]

    assert _sent(rows, [(2, 4, 8), (4, 4, 2)]) == []


def test_an_update_in_place_of_what_windows_read() -> None:
    mesh = DeviceMesh.arange(tp=3)
    x, w = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 7), (4, 4, 3)))
    with FusionDefinition("update") as fd:
        hx = fd.define_tensor(x.shape, x.dtype)
        hw = fd.define_tensor(w.shape, w.dtype, mesh)
        h = F.relu(hx)
        fd.add_output(F.conv1d(h, hw, padding=1).on(mesh, {"tp": Shard(2)}))
        fd.add_output(h, reuse=hx)
    program = mf.compile(fd)
    _check_borders(program)
    check_everywhere(program, [x.clone(), w], [F.conv1d(x.relu(), w, padding=1), x.relu()])


def _drawn(draw: random.Random) -> Callable[..., list[Any]]:
    """Convolutions and pools of one value, with windows of any form, and what else reads it."""
    kinds = [draw.choice(("conv", "transposed", "max", "mean")) for _ in range(2)]
    hows = [
        (draw.randint(1, 2), draw.randint(0, 1), draw.randint(1, 2), draw.choice((1, 2)))
        for _ in kinds
    ]
    reader = draw.choice([*READERS.values()])

    def function(x: Any, *weights: Any) -> list[Any]:
        h, made = x * x, []
        for kind, (stride, padding, spread, groups), w in zip(kinds, hows, weights, strict=True):
            if kind == "conv":
                y = F.conv1d(h, w[:, : 4 // groups], None, stride, padding, spread, groups)
            elif kind == "transposed":
                y = F.conv_transpose1d(h, w[:, : 4 // groups], None, stride, padding, 0, groups)
            elif kind == "max":
                y = F.max_pool1d(h, 3, stride, padding, spread)
            else:
                y = F.avg_pool1d(h, 3, stride, padding)
            made.append(y)
        return [*made, reader(h)]

    return function


@pytest.mark.parametrize("seed", range(24))
def test_drawn_windows_and_readers(seed: int) -> None:
    draw = random.Random(seed)
    mesh, n = DeviceMesh.arange(tp=draw.randint(2, 4)), draw.randint(5, 9)
    function = _drawn(draw)
    x, *ws = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, n), (4, 4, 3), (4, 4, 2)))
    with FusionDefinition("drawn") as fd:
        handles = [fd.define_tensor(t.shape, t.dtype) for t in (x, *ws)]
        first, second, other = function(*handles)
        made = [y.on(mesh, {"tp": Shard(2)}) for y in (first, second)]
        for t in (*made, other, *mf.grad(sum((t * t).sum() for t in (*made, other)), handles)):
            fd.add_output(t)
    program = mf.compile(fd)
    _check_borders(program)
    given = [t.clone().requires_grad_() for t in (x, *ws)]
    wanted = function(*given)
    total = sum((t * t).sum() for t in wanted)
    grads = torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True)
    check_everywhere(program, [x, *ws], [t.detach() for t in (*wanted, *grads)])
