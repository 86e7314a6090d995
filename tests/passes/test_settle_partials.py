"""A Partial that several expressions read is reduced once; one that a single one reads, late."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.drawn import drawn
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard

MESH = DeviceMesh.arange(tp=4)
F = torch.nn.functional
#: One all-reduce of [8,16] in f32: 2 x 3/4 of 512 bytes.
ONCE = 768


#: name -> (function of the product of x and w, and of a second input; kinds; bytes per rank)
CASES: dict[str, tuple[Callable[..., Any], list[str], int]] = {
    "once": (lambda y, g: y * 2.0 * g, ["Allreduce"], ONCE),
    "rms_norm": (lambda y, g: F.rms_norm(y, (16,), g), ["Allreduce"], ONCE),
    "both operands": (lambda y, g: y * y, ["Allreduce"], ONCE),
    "two readers": (lambda y, g: (y * g, y * 3.0), ["Allreduce"], ONCE),
    "readers that meet": (lambda y, g: y * g + y * 3.0, ["Allreduce"], ONCE),
    "sums of it": (lambda y, g: (y.sum(0), y.sum(1)), ["Allreduce"] * 2, 96 + 48),
    "it and a sum of it": (lambda y, g: (torch.exp(y), y.sum(0)), ["Allreduce"], ONCE),
    "an output": (lambda y, g: (y, y * 2.0), ["Allreduce"], ONCE),
    "centred": (lambda y, g: (y - y.mean(1, keepdim=True)).exp(), ["Allreduce"], ONCE),
    "joined": (lambda y, g: torch.cat([y, y * g], 1)[:, 3:], ["Allreduce"], ONCE),
    "a long way": (
        lambda y, g: (y * g * 2.0).exp() + (-y * 4.0).permute(1, 0).permute(1, 0),
        ["Allreduce"], ONCE,
    ),
    "small ones": (lambda y, g: y.sum(0) * 2.0 + (y * g).sum(0), ["Allreduce"], 96),
    "a count behind": (lambda y, g: y.mean(0) * g, ["Allreduce"], 96),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_sum_of_a_row_parallel_linear(name: str) -> None:
    function, kinds, size = CASES[name]
    with mf.FusionDefinition("linear") as fd:
        x = fd.define_tensor([8, 32], mesh=MESH, layout={"tp": Shard(1)})
        w = fd.define_tensor([16, 32], mesh=MESH, layout={"tp": Shard(1)})
        g = fd.define_tensor([16], mesh=MESH)
        result = function(fd.ops.linear(x, w), g)
        for y in result if isinstance(result, tuple) else (result,):
            fd.add_output(y)
    program = mf.compile(fd)
    tensors = [drawn(8, 32), drawn(16, 32), drawn(16)]
    expected = function(F.linear(*tensors[:2]), tensors[2])
    check_everywhere(program, tensors, expected if isinstance(expected, tuple) else [expected])
    assert [c.kind for c in program.communications] == kinds, program
    assert program.bytes_received(0) == size


@pytest.mark.parametrize("name", CASES)
def test_a_partial_input(name: str) -> None:
    """The user placed it so; what reads it shares a copy."""
    function, kinds, size = CASES[name]
    with mf.FusionDefinition("input") as fd:
        y = fd.define_tensor([8, 16], mesh=MESH, layout={"tp": Partial()})
        g = fd.define_tensor([16], mesh=MESH)
        result = function(y, g)
        for z in result if isinstance(result, tuple) else (result,):
            fd.add_output(z)
    program = mf.compile(fd)
    tensors = [drawn(8, 16), drawn(16)]
    expected = function(*tensors)
    if name != "an output":  # that stays as it was placed
        expected = expected if isinstance(expected, tuple) else [expected]
        check_everywhere(program, tensors, expected)
        assert [c.kind for c in program.communications] == kinds, program
        assert program.bytes_received(0) == size


def test_tensors_that_are_joined_are_reduced_as_one() -> None:
    with mf.FusionDefinition("cat") as fd:
        xs = [fd.define_tensor([8, 16], mesh=MESH, layout={"tp": Partial()}) for _ in range(3)]
        fd.add_output(fd.ops.cat(xs, 0))
        fd.add_output(fd.ops.stack([x * 2.0 for x in xs]))
    program = mf.compile(fd)
    assert [c.kind for c in program.communications] == ["Allreduce"] * 2 or (
        program.bytes_received(0) == 3 * ONCE
    )
    tensors = [drawn(8, 16) + i for i in range(3)]
    expected = [torch.cat(tensors), torch.stack([x * 2.0 for x in tensors])]
    check_everywhere(program, tensors, expected)


@pytest.mark.parametrize("op", ["max", "prod", "avg"])
def test_views_of_every_reduce_op_are_joined(op: str) -> None:
    with mf.FusionDefinition("cat") as fd:
        xs = [fd.define_tensor([8, 3], mesh=MESH, layout={"tp": Partial(op)}) for _ in range(2)]
        fd.add_output(fd.ops.cat(xs, 1).permute(1, 0))
    program = mf.compile(fd)
    (comm,) = program.communications
    assert (comm.kind, comm.reduce_op) == ("Allreduce", op)
    tensors = [torch.arange(24.0).reshape(8, 3) - 9, torch.arange(24.0).reshape(8, 3)]
    check_everywhere(program, tensors, [torch.cat(tensors, 1).T])


def test_different_reduce_ops_are_joined_after_they_are_reduced() -> None:
    with mf.FusionDefinition("cat") as fd:
        x = fd.define_tensor([8, 3], mesh=MESH, layout={"tp": Partial("max")})
        y = fd.define_tensor([8, 3], mesh=MESH, layout={"tp": Partial("min")})
        fd.add_output(fd.ops.cat([x, y], 1))
    tensors = [torch.arange(24.0).reshape(8, 3) - 9, torch.arange(24.0).reshape(8, 3)]
    check_everywhere(mf.compile(fd), tensors, [torch.cat(tensors, 1)])


def test_readers_that_want_one_split_share_a_reduce_scatter() -> None:
    """Sequence parallel: what follows the linear runs on rows."""
    rows = {"tp": Shard(0)}
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([8, 32], mesh=MESH, layout={"tp": Shard(1)})
        w = fd.define_tensor([16, 32], mesh=MESH, layout={"tp": Shard(1)})
        y = fd.ops.linear(x, w)
        fd.add_output(fd.ops.rms_norm(y, None).on(MESH, rows))
        fd.add_output((y * 2.0).on(MESH, rows))
    program = mf.compile(fd)
    tensors = [drawn(8, 32), drawn(16, 32)]
    y = F.linear(*tensors)
    check_everywhere(program, tensors, [F.rms_norm(y, (16,)), y * 2.0])
    assert [c.kind for c in program.communications] == ["ReduceScatter"], program


def test_what_the_user_wants_partial_stays_so() -> None:
    with mf.FusionDefinition("laws") as fd:
        x = fd.define_tensor([8, 16], mesh=MESH, layout={"tp": Partial()})
        fd.add_output((x * 2.0).on(MESH, {"tp": Partial()}))
        fd.add_output(fd.ops.set(x).on(MESH, {"tp": Partial()}))
        fd.add_output(x * x)
    program = mf.compile(fd)
    tensor = drawn(8, 16)
    check_everywhere(program, [tensor], [tensor * 2, tensor, tensor * tensor])
    assert program.bytes_received(0) == ONCE


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("where", [({"x": 1}, {}), ({"x": 2}, {"x": Shard(0)}), ({"tp": 3}, {})])
def test_a_view_of_a_partial_moves_to_another_mesh(
    size: int, where: tuple[dict[str, int], dict[str, Any]]
) -> None:
    """The other mesh may lack the axis, or have one of that name."""
    axes, layout = where
    with mf.FusionDefinition("moved") as fd:
        x = fd.define_tensor([size, 2], mesh=DeviceMesh.arange(tp=2), layout={"tp": Partial()})
        fd.add_output(fd.ops.permute(x, (1, 0)).on(DeviceMesh.arange(**axes), layout))
    program = mf.compile(fd)
    tensor = drawn(size, 2)
    check_everywhere(program, [tensor], [tensor.T])


def test_a_product_that_leaves_the_mesh_is_one_of_the_sum() -> None:
    """It is reduced as itself, not as its terms, and before it leaves."""
    with mf.FusionDefinition("moved") as fd:
        x = fd.define_tensor([8, 3], mesh=DeviceMesh.arange(tp=2), layout={"tp": Partial()})
        fd.add_output((x * 3.0).on(DeviceMesh.arange(x=1), {}))
        fd.add_output(x.sum(0).on(DeviceMesh.arange(tp=1), {}))
    program = mf.compile(fd)
    tensor = drawn(8, 3)
    check_everywhere(program, [tensor], [tensor * 3.0, tensor.sum(0)])
    assert [c.kind for c in program.communications] == ["Allreduce"], program


PLACES = torch.tensor([6, 0, 3, 3, 1, 5, 2, 0, 4, 6, 6, 1])
COLUMNS = torch.tensor(
    [[1, 0, 4], [4, 4, 2], [3, 0, 0], [2, 1, 1], [0, 3, 2], [1, 1, 1], [4, 2, 0]]
)

#: name -> (function of x @ w.T [7,5], of factors [6,1], places and columns; reduced elements)
LOOKED_UP: dict[str, tuple[Callable[..., Any], int]] = {
    "rows, added up": (lambda y, g, at, to: y[at[:6]].unflatten(0, (3, 2)).sum(1), 3 * 5),
    "rows by factors": (lambda y, g, at, to: (g * y[at[:6]]).unflatten(0, (2, 3)).sum(1), 2 * 5),
    "fewer rows": (lambda y, g, at, to: y.index_select(0, at[:4]).exp(), 4 * 5),
    "more rows": (lambda y, g, at, to: y[at].exp(), 7 * 5),
    "elements": (lambda y, g, at, to: y.gather(1, to).exp(), 7 * 3),
    "added to rows": (
        lambda y, g, at, to: (y[:2] * 0).index_add(0, at[:7] % 2, y).exp(), 2 * 5,
    ),
    "no row": (lambda y, g, at, to: y[at[:0]].sum(0), 0),
    "twice": (lambda y, g, at, to: (y[at[:7]].sum(0), y[at[:7]].sum(1)), 5 + 7),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOOKED_UP)
def test_a_sum_of_rows_that_are_looked_up(name: str, dtype: torch.dtype) -> None:
    """A lookup takes terms as they are, so that the fewer elements are reduced."""
    function, elements = LOOKED_UP[name]
    mesh = DeviceMesh.arange(tp=3)
    with mf.FusionDefinition("rows") as fd:
        x, w = (fd.define_tensor([n, 9], dtype, mesh, {"tp": Shard(1)}) for n in (7, 5))
        g = fd.define_tensor([6, 1], dtype, mesh)
        at, columns = (fd.define_tensor(i.shape, i.dtype, mesh) for i in (PLACES, COLUMNS))
        result = function(fd.ops.linear(x, w), g, at, columns)
        for y in result if isinstance(result, tuple) else (result,):
            fd.add_output(y)
    program = mf.compile(fd)
    tensors = [drawn(7, 9).to(dtype), drawn(5, 9).to(dtype), drawn(6, 1).to(dtype)]
    tensors += [PLACES, COLUMNS]
    expected = function(F.linear(*tensors[:2]), *tensors[2:])
    outputs = mf.simulate(program, tensors, options=mf.Options(poison=True)).outputs
    for got, want in zip(
        outputs, expected if isinstance(expected, tuple) else [expected], strict=True
    ):
        exact = {"rtol": 0.1, "atol": 0.3} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(got, want, **exact)
    assert {"Allreduce"}.issuperset(c.kind for c in program.communications), program
    if dtype == torch.float64:
        assert sum(math.prod(c.shape) for c in program.communications) == elements


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_rows_of_other_reduce_ops_are_looked_up_before_they_are_joined(op: str) -> None:
    with mf.FusionDefinition("rows") as fd:
        y = fd.define_tensor([7, 5], mesh=MESH, layout={"tp": Partial(op)})
        fd.add_output(y[fd.ops.tensor([6, 0, 3])])
        fd.add_output(y.sum(0))
    program = mf.compile(fd)
    terms = drawn(7, 5)
    outputs = mf.simulate(program, [terms]).outputs
    for got, want in zip(outputs, (terms[PLACES[:3]], terms.sum(0)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("index", [{"tp": Shard(0)}, {"tp": Partial()}], ids=str)
def test_indices_that_ranks_hold_parts_or_terms_of_are_brought_together(index: Any) -> None:
    with mf.FusionDefinition("indices") as fd:
        x, w = (fd.define_tensor([n, 8], mesh=MESH, layout={"tp": Shard(1)}) for n in (7, 5))
        places = fd.define_tensor([12], torch.int64, MESH, index)
        fd.add_output(fd.ops.linear(x, w)[places].sum(0))
    tensors = [drawn(7, 8), drawn(5, 8), PLACES]
    check_everywhere(mf.compile(fd), tensors, [F.linear(*tensors[:2])[PLACES].sum(0)])


def test_what_experts_of_one_token_yield_is_added_up_before_it_is_reduced() -> None:
    """Written out by hand, with gradients; a token has four of eight experts."""
    mesh, tokens, each = DeviceMesh.arange(ep=4), 12, 4

    def moe(x: Any, scores: Any, up: Any, down: Any) -> Any:
        weights, ids = scores.softmax(-1).topk(each, -1)
        ids, places = ids.flatten().sort(stable=True)
        ends = F.one_hot(ids, 8).sum(0).cumsum(0).to(torch.int32)
        y = F.grouped_mm(F.silu(F.grouped_mm(x[places // each], up, offs=ends)), down, offs=ends)
        y = y * weights.flatten()[places].unsqueeze(-1)
        return y[places.argsort()].unflatten(0, (-1, each)).sum(1)

    shapes = (tokens, 64), (tokens, 8), (8, 64, 40), (8, 40, 64), (tokens, 64)
    split = {"ep": Shard(0)}
    with mf.FusionDefinition("experts") as fd:
        *given, dy = (fd.define_tensor(s, torch.float64, mesh, split) for s in shapes)
        y = moe(*given)
        for value in (y, *mf.grad((y * dy).sum(), given)):
            fd.add_output(value)
    program = mf.compile(fd)
    values = [drawn(*s).double() for s in shapes]
    for got, want in zip(
        mf.simulate(program, values, options=mf.Options(poison=True)).outputs,
        mf.reference(fd, values),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    rows = [c.shape for c in program.communications if c.kind != "Allgather"]
    assert rows.count((tokens, 64)) == 2, program  # of y, and of the gradient of x
    assert (tokens * each, 64) not in rows


@pytest.mark.parametrize("index", [{}, {"tp": Shard(0)}, {"dp": Shard(0)}], ids=str)
@pytest.mark.parametrize("op", ["max", "min", "prod", "avg", "sum"])
def test_a_table_is_partial_along_one_axis_and_split_along_another(op: str, index: Any) -> None:
    """Rows elsewhere are zeros, which are added up: that is no sum of maxima."""
    mesh = DeviceMesh.arange(dp=2, tp=2)
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([7, 5], torch.float64, mesh, {"dp": Partial(op), "tp": Shard(0)})
        places = fd.define_tensor([3], torch.int64, mesh, index)
        columns = fd.define_tensor([2, 5], torch.int64, mesh)
        fd.add_output(x[places])
        fd.add_output(x.gather(0, columns))
    tensors = [drawn(7, 5).double() - 9, PLACES[:3], COLUMNS.flatten()[:10].reshape(2, 5)]
    wanted = [tensors[0][tensors[1]], tensors[0].gather(0, tensors[2])]
    check_everywhere(mf.compile(fd), tensors, wanted)


def test_a_quotient_by_zero_that_is_added_to_a_sum_is_one_of_the_sum() -> None:
    """Terms by 0 are infinities of either sign, which have no sum."""
    with mf.FusionDefinition("quotient") as fd:
        pairs = [
            [fd.define_tensor([n, 8], torch.float64, MESH, {"tp": Shard(1)}) for n in (7, 5)]
            for _ in range(2)
        ]
        z = fd.define_tensor([5], torch.float64, MESH)
        fd.add_output(fd.ops.linear(*pairs[0]) + fd.ops.linear(*pairs[1]) / z)
    w = drawn(5, 8).double()
    xs = [torch.arange(56.0).reshape(7, 8).double().sin() * 10 + i for i in range(2)]
    z = torch.tensor([1.0, 0.0, 2.0, -0.0, 4.0], dtype=torch.float64)
    wanted = F.linear(xs[0], w) + F.linear(xs[1], w) / z
    check_everywhere(mf.compile(fd), [xs[0], w, xs[1], w, z], [wanted])


def test_what_is_a_partial_of_min_becomes_no_term_of_a_sum() -> None:
    mesh = DeviceMesh.arange(dp=2, tp=2)
    layouts = {"tp": Partial("min")}, {"dp": Shard(1)}, {"dp": Shard(1)}
    with mf.FusionDefinition("difference") as fd:
        x, a, w = (
            fd.define_tensor(s, torch.float64, mesh, at)
            for s, at in zip(((7, 5), (7, 9), (5, 9)), layouts, strict=True)
        )
        fd.add_output(x - fd.ops.linear(a, w))
    tensors = [drawn(*s).double() - 4 for s in ((7, 5), (7, 9), (5, 9))]
    wanted = tensors[0] - F.linear(*tensors[1:])
    check_everywhere(mf.compile(fd), tensors, [wanted])


def test_a_view_of_what_is_reduced_is_not_reduced_again() -> None:
    """Readers of the view ask for it along one axis, and those of its operand along both."""
    mesh = DeviceMesh.arange(dp=2, tp=2)

    def function(x: Any, y: Any, at: Any, to: Any) -> tuple[Any, ...]:
        rows, picked = x.permute(1, 0).permute(1, 0), y.gather(0, to % 1)
        x.permute(1, 0).permute(1, 0)  # which nobody reads
        joined = (picked * 0).scatter_reduce(1, to, rows, "sum")
        return rows[at] + y[at], picked.sum(0), joined

    layouts = {"dp": Partial(), "tp": Partial()}, {"dp": Shard(1), "tp": Partial()}
    split = {"dp": Shard(0)}
    with mf.FusionDefinition("views") as fd:
        x, y = (fd.define_tensor([1, 5], torch.int64, mesh, layout) for layout in layouts)
        at = fd.define_tensor([3], torch.int64, mesh, split)
        to = fd.define_tensor([1, 5], torch.int64, mesh, split)
        for result in function(x, y, at, to):
            fd.add_output(result)
    tensors = [drawn(1, 5).long(), drawn(1, 5).long() + 2]
    tensors += [torch.tensor([0, -1, 0]), torch.tensor([[4, 0, 0, 1, 4]])]
    program = mf.compile(fd)
    check_everywhere(program, tensors, function(*tensors))
    assert program.bytes_received(0) <= 128
