"""What needs a dim whole, of values that are split there: torch's values, and what travels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement

FOUR = DeviceMesh.arange(tp=4)
GRID = DeviceMesh([[3, 0], [2, 1]], axes=("a", "b"))
S1: dict[str, Placement] = {"tp": Shard(1)}


def compiled(
    build: Callable[..., Any], shape: tuple[int, ...], layout: Layout, dtype: torch.dtype
) -> mf.Program:
    with mf.FusionDefinition("split") as fd:
        result = build(fd.define_tensor(shape, dtype, layout))
        for y in result if isinstance(result, tuple) else (result,):
            fd.add_output(y)
    return mf.compile(fd)


def check(build: Callable[..., Any], x: Tensor, layout: Layout) -> mf.Program:
    """The program, after its values were compared."""
    program = compiled(build, tuple(x.shape), layout, x.dtype)
    expected = build(x)
    check_everywhere(program, [x], expected if isinstance(expected, tuple) else [expected])
    return program


def received(program: mf.Program) -> list[int]:
    return [program.bytes_received(rank) for rank in range(program.host.last_rank + 1)]


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 4).to(dtype)


# -- slices --------------------------------------------------------------------------------------

SLICES: dict[str, Callable[[Any], Any]] = {
    "the last": lambda x: x[:, -1],
    "one": lambda x: x[:, 3],
    "a few": lambda x: x[:, 5:8],
    "steps": lambda x: x[:, 1:20:7],
    "another dim as well": lambda x: x[1:, 2:4],
    "nothing": lambda x: x[:, 7:7],
    "several": lambda x: (x[:, 0], x[:, 9:11]),
}


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("extent", [21, 24, 25], ids="{} rows".format)
def test_a_slice_of_a_split_dim(name: str, extent: int) -> None:
    """Only what is kept travels: at most twice, as an all-reduce takes it."""
    x = numbers(3, extent, 2)
    program = check(SLICES[name], x, Layout(FOUR, S1))
    kept = SLICES[name](x)
    kept = sum(y.numel() for y in (kept if isinstance(kept, tuple) else (kept,)))
    assert max(received(program)) <= 2 * 8 * kept


@pytest.mark.parametrize("placements", list(product([Shard(0), Shard(1), Replicate()], repeat=2)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_slices_on_two_axes(placements: tuple[Placement, ...], dtype: torch.dtype) -> None:
    layout = Layout(GRID, dict(zip("ab", placements, strict=True)))
    x = numbers(9, 17).mul(2).to(dtype)
    program = check(lambda x: (x[3, 2:6], x[8:, -1:]), x, layout)
    assert max(received(program)) <= 2 * 5 * dtype.itemsize * 2  # each axis joins five elements


def test_what_is_no_number_stays_where_it_is() -> None:
    x = torch.tensor([[-0.0, 0.0, torch.nan, torch.inf, -torch.inf, -0.0, 1.0, 2.0] * 4])
    program = compiled(lambda x: x[:, 4:12], (1, 32), Layout(FOUR, S1), x.dtype)
    (row,) = mf.simulate(program, [x], options=mf.Options(poison=True)).outputs
    torch.testing.assert_close(row, x[:, 4:12], rtol=0, atol=0, equal_nan=True)


def test_halves_come_together_once() -> None:
    """Both halves of a split dim: one all-gather moves less than two reductions."""
    program = check(lambda x: x.chunk(2, 1), numbers(3, 24), Layout(FOUR, S1))
    assert [c.kind for c in program.communications] == ["Allgather"]


def test_a_value_that_is_gathered_anyway_is_sliced_then() -> None:
    def build(x: Any) -> Any:
        return x[:, -1], torch.roll(x, 0) if isinstance(x, Tensor) else mf.ops.set(x).on(FOUR, {})

    program = check(build, numbers(3, 24), Layout(FOUR, S1))
    assert [c.kind for c in program.communications] == ["Allgather"]


def test_a_slice_that_is_read_split_is_scattered() -> None:
    with mf.FusionDefinition("scattered") as fd:
        x = fd.define_tensor([8, 24], mesh=FOUR, layout=S1)
        fd.add_output(x[:, 4:6].on(FOUR, {"tp": Shard(0)}))
    program = mf.compile(fd)
    (comm,) = program.communications
    assert comm.kind == "ReduceScatter" and comm.bytes_received(0) == 3 * 2 * 2 * 4
    x = numbers(8, 24, dtype=torch.float32)
    check_everywhere(program, [x], [x[:, 4:6]])


def test_a_slice_that_says_where_it_is_wanted_partial() -> None:
    with mf.FusionDefinition("partial") as fd:
        x = fd.define_tensor([8, 24], mesh=FOUR, layout=S1)
        fd.add_output(x[:, -1].on(FOUR, {"tp": Partial()}))
    program = mf.compile(fd)
    assert not program.communications
    x = numbers(8, 24, dtype=torch.float32)
    check_everywhere(program, [x], [x[:, -1]])


# -- softmax and norms ---------------------------------------------------------------------------

#: name -> (function, the reductions that it is made of)
ROWS: dict[str, tuple[Callable[[Any], Any], list[str | None]]] = {
    "softmax": (lambda x: torch.softmax(x, 1), ["max", "sum"]),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), ["max", "sum"]),
    "layer_norm": (lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), ["sum", "sum"]),
    "rms_norm": (lambda x: torch.nn.functional.rms_norm(x, x.shape[1:], eps=1e-5), ["sum"]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("extent", [40, 41, 43], ids="{} columns".format)
def test_rows_along_a_split_dim(name: str, extent: int) -> None:
    """Small reductions: a number for each of 3 rows, of which 2 x 3/4 arrive, rounded up."""
    build, ops = ROWS[name]
    program = check(build, numbers(3, extent), Layout(FOUR, S1))
    assert [c.reduce_op for c in program.communications] == ops
    assert received(program) == [len(ops) * 5 * 8] * 4
    (output,) = program.fusion.outputs
    assert program.fusion.layout(output) == Layout(FOUR, S1)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rows_of_narrow_floats_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """Every element is torch's, or the next number of the dtype."""
    x = numbers(5, 200, dtype=dtype)
    program = compiled(ROWS[name][0], (5, 200), Layout(FOUR, S1), dtype)
    (found,) = mf.simulate(program, [x], options=mf.Options(poison=True)).outputs
    exact = ROWS[name][0](x.double())
    assert found.dtype == dtype
    error = (found.double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps * exact.abs().clamp(min=1e-3)).all() or (
        dtype == torch.float32 and (error <= 1e-5 * exact.abs().clamp(min=1)).all()
    )


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_infinities_as_torch_has_them(name: str) -> None:
    inf = torch.inf
    x = numbers(5, 40)
    x[0, :39], x[1, 3], x[2], x[3, 17], x[4, ::2] = -inf, inf, -inf, torch.nan, -inf
    program = compiled(ROWS[name][0], (5, 40), Layout(FOUR, S1), x.dtype)
    (found,) = mf.simulate(program, [x], options=mf.Options(poison=True)).outputs
    torch.testing.assert_close(found, ROWS[name][0](x), equal_nan=True)


@pytest.mark.parametrize("placements", list(product([Shard(0), Shard(1), Replicate()], repeat=2)))
@pytest.mark.parametrize("name", ROWS)
def test_rows_on_two_axes(name: str, placements: tuple[Placement, ...]) -> None:
    layout = Layout(GRID, dict(zip("ab", placements, strict=True)))
    program = check(ROWS[name][0], numbers(3, 65), layout)
    assert all(c.kind == "Allreduce" for c in program.communications)


def test_weights_are_read_as_they_are_split() -> None:
    with mf.FusionDefinition("norm") as fd:
        x = fd.define_tensor([3, 40], mesh=FOUR, layout=S1)
        w = fd.define_tensor([40], mesh=FOUR, layout={"tp": Shard(0)})
        b = fd.define_tensor([40], mesh=FOUR)
        fd.add_output(fd.ops.layer_norm(x, None, w, b, 1e-3))
    program = mf.compile(fd)
    tensors = [numbers(*shape, dtype=torch.float32) for shape in ((3, 40), (40,), (40,))]
    expected = torch.nn.functional.layer_norm(tensors[0], (40,), *tensors[1:], 1e-3)
    check_everywhere(program, tensors, [expected])
    assert [c.kind for c in program.communications] == ["Allreduce"] * 2


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [{}, {"tp": Shard(0)}], ids=["whole", "split"])
def test_rms_norm_with_a_weight_of_another_dtype(
    dtype: torch.dtype, weight: torch.dtype, split: dict[str, Placement]
) -> None:
    """It is rounded once, to the dtype of what is normalised."""
    with mf.FusionDefinition("norm") as fd:
        x = fd.define_tensor([3, 41], dtype, FOUR, S1 if split else {})
        w = fd.define_tensor([41], weight, FOUR, split)
        fd.add_output(fd.ops.rms_norm(x, None, w, 1e-3))
    program = mf.compile(fd)
    given = [numbers(3, 41, dtype=dtype), numbers(41, dtype=weight)]
    (found,) = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
    exact = torch.nn.functional.rms_norm(given[0].double(), (41,), given[1].double(), 1e-3)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-6
    assert ((found.double() - exact).abs() <= eps * exact.abs().clamp(min=1e-3)).all()
    assert [c.kind for c in program.communications] == ["Allreduce"] * bool(split)


@pytest.mark.parametrize("law", [{}, {"tp": Shard(0)}], ids=str)
def test_a_result_that_is_wanted_otherwise(law: dict[str, Placement]) -> None:
    """The operand is brought there, and nothing is reduced."""
    with mf.FusionDefinition("elsewhere") as fd:
        x = fd.define_tensor([8, 40], mesh=FOUR, layout=S1)
        fd.add_output(fd.ops.softmax(x, 1).on(FOUR, law))
    program = mf.compile(fd)
    x = numbers(8, 40, dtype=torch.float32)
    check_everywhere(program, [x], [torch.softmax(x, 1)])
    assert [c.kind for c in program.communications] == ["AllToAll" if law else "Allgather"]
