"""Products that add to the sums of microbatches: where they do, and that values stay."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.pipelines import batch_of, check_orders, meshes, network, sines
from helpers.programs import program_text
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard, hir, simulate
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.plan import product_steps
from mdfuse.seeing.amounts import nbytes, operations
from mdfuse.seeing.memory_use import memory_of

POISON = Options(poison=True)
COMPILES = ["never", "always"]


def ops_of(program: mf.Program, rank: int) -> Counter[str]:
    return Counter(i.op for i in as_run(project(program.host, rank)).walk())


@pytest.mark.parametrize("compile", COMPILES)
@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_of_weights_add_up_as_they_are_computed(stages: int, compile: Any) -> None:
    """Two in each stage, in three microbatches; the loss adds up by itself."""
    net = network(meshes(stages))
    program = mf.pipeline(
        net.definition, microbatches=3, batch=batch_of(net), options=Options(compile=compile)
    )
    found = [ops_of(program, rank) for rank in range(stages)]
    assert [x["addmm"] for x in found] == [6] * stages
    assert [x["accumulate"] for x in found] == [0] * (stages - 1) + [3]
    check_orders(program, net, seeds=3)


def test_the_first_is_written_and_empty_ones_add_nothing() -> None:
    """The last two of 8 microbatches of 11 rows are empty."""
    net = sines(meshes(2), batch=11)
    program = mf.pipeline(net.definition, microbatches=8, batch=batch_of(net), schedule="1f1b")
    added = [i for i in as_run(project(program.host, 1)).walk() if i.op == "addmm"]
    assert [len(i.inputs) for i in added] == [2, *[3] * 7]
    check_orders(program, net, seeds=3)


def test_each_rank_adds_its_own_products() -> None:
    """Sums over `dp` come once, behind the last microbatch."""
    mesh, dtype = DeviceMesh.arange(dp=2, tp=2), torch.float64
    with mf.FusionDefinition("both") as fd:
        x = fd.define_tensor([8, 6], dtype, mesh, {"dp": Shard(0)}, name="x")
        w = fd.define_tensor([4, 6], dtype, mesh, {"tp": Shard(0)})
        v = fd.define_tensor([6, 4], dtype, mesh, {"tp": Shard(1)})
        y = fd.ops.linear(fd.ops.sin(fd.ops.linear(x, w)), v)
        for dw in mf.grad((y * y).sum(), [w, v]):
            fd.add_output(dw)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0})
    assert ops_of(program, 3)["addmm"] == 4
    given = [torch.randn(s, dtype=dtype) for s in ([8, 6], [4, 6], [6, 4])]
    leaves = [z.clone().requires_grad_() for z in given]
    (torch.sin(leaves[0] @ leaves[1].T) @ leaves[2].T).square().sum().backward()
    for got, leaf in zip(simulate(program, given, options=POISON).outputs, leaves[1:], strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-12, atol=1e-12)


def test_a_part_takes_no_memory() -> None:
    """Beside inputs and outputs there is what one microbatch needs, and no second gradient."""
    mesh, width, rows = DeviceMesh.arange(t=1), 64, 2
    with mf.FusionDefinition("wide") as fd:
        x, t = (fd.define_tensor([4 * rows, width], mesh=mesh, name=n) for n in "xt")
        fd.add_output(fd.ops.permute(x * 2.0, [1, 0]) @ t)
    program = mf.pipeline(fd, microbatches=4, batch={"x": 0, "t": 0})
    given = 4 * (2 * 4 * rows * width + width * width)
    assert memory_of(project(program.host, 0)).peak == given + 4 * rows * width
    x, t = (torch.randn(4 * rows, width) for _ in "xt")
    found = simulate(program, [x, t], options=POISON)
    torch.testing.assert_close(found.outputs[0], 2 * x.T @ t)
    assert found.peak_bytes[0] == given + 4 * rows * width


# -- text ------------------------------------------------------------------------------------------

TEXT = program_text("accumulate_in_place_chunks/text")


def run_text(text: str) -> tuple[list[str], Tensor]:
    program = hir.parse(text)
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    (z,) = simulate(program, [x, y], options=POISON).outputs
    torch.testing.assert_close(z, x @ y)
    return [i.op for i in as_run(project(program, 0)) if i.op in ("addmm", "accumulate")], z


def text_of_run() -> str:
    """What a rank runs, as a program for all: iterations have names that no one gives."""
    text = str(as_run(project(hir.parse(TEXT), 0)))
    return re.sub(r"(?<=\w)@", "_", text).replace(" rank 0", "")


def test_it_prints_and_parses() -> None:
    assert re.findall(r"%z.*= addmm\(.*\)", text_of_run()) == [
        "%z = addmm(%x.i_1, %y.i_1)",
        "%z = addmm(%z, %x.i_2, %y.i_2)",
    ]
    assert str(hir.parse(text_of_run())) == text_of_run()
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    (z,) = simulate(hir.parse(text_of_run()), [x, y], options=POISON).outputs
    torch.testing.assert_close(z, x @ y)


@pytest.mark.parametrize(
    ("old", "new", "added"),
    [
        ("", "", True),
        ("    %z = accum", "    %u: f32[3,4] (t=R) = exp(%x)\n    %z = accum", True),
        ("    %p:", "    %p: f32[3,2] (t=R, chunk(P(sum),2,%i)) = alloc\n    %p:", False),
        ("    %z = accum", "    set_stream 0\n    sync 1\n    %z = accum", False),
        ("matmul(%x.i, %y.i)", "matmul(%x.i, %y.i) order=[1,0]", False),
    ],
)
def test_which_products_do(old: str, new: str, added: bool) -> None:
    """Not one that has a buffer, or is added on another stream, or lies in another order."""
    text = TEXT.replace(old, new, 1)
    if "set_stream" in text:
        text = text.replace("  %z:", "  %c = get_stream\n  set_stream 1\n  sync %c\n  %z:")
        text = text.replace(
            "  }\n", "    set_stream 1\n    sync 0\n  }\n  set_stream %c\n  sync 1\n"
        )
    found, _ = run_text(text)
    assert found == (["addmm"] * 2 if added else ["accumulate"] * 2)


def test_maxima_are_no_sums() -> None:
    text = TEXT.replace("P(sum)", "P(max)")
    with pytest.raises(mf.ProgramError, match="sum"):
        run_text(text)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("addmm(%x.i_1, %y.i_1)", "addmm(%x.i_1, 2.0)", "takes names"),
        ("addmm(%z, %x.i_2", "addmm(%x, %x.i_2", "adds to the buffer"),
        ("addmm(%x.i_1, %y.i_1)", "addmm(%y.i_1, %x.i_1)", "no product"),
        ("addmm(%x.i_1, %y.i_1)", "addmm(%x.i_1)", "operand"),
        ("addmm(%x.i_1, %y.i_1)", "addmm(%z, %x.i_1, %y.i_1)", "%z"),
    ],
)
def test_wrong_products(old: str, new: str, words: str) -> None:
    assert old in text_of_run()
    with pytest.raises(mf.ProgramError, match=words):
        simulate(
            hir.parse(text_of_run().replace(old, new, 1)), [torch.ones(3, 4), torch.ones(4, 2)]
        )


# -- 16 bits ---------------------------------------------------------------------------------------


def narrow_program(compile: Any = "never") -> tuple[mf.Program, list[Tensor], Tensor]:
    """The gradient of a weight of 16 bits, in four microbatches."""
    mesh, dtype = DeviceMesh.arange(t=1), torch.bfloat16
    with mf.FusionDefinition("narrow") as fd:
        x, t = (fd.define_tensor([32, n], dtype, mesh, name=s) for s, n in (("x", 8), ("t", 6)))
        w = fd.define_tensor([6, 8], dtype, mesh)
        (dw,) = mf.grad((fd.ops.linear(x, w) * t).sum(), [w])
        fd.add_output(dw)
    options = Options(compile=compile)
    program = mf.pipeline(fd, microbatches=4, batch={"x": 0, "t": 0}, options=options)
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=draw).bfloat16() for s in ([32, 8], [32, 6], [6, 8])]
    return program, given, given[1].double().T @ given[0].double()


@pytest.mark.parametrize("compile", COMPILES)
def test_sums_of_16_bits_are_in_f32(compile: Any) -> None:
    program, given, want = narrow_program(compile)
    assert ops_of(program, 0)["addmm"] == 4
    (got,) = simulate(program, given, options=POISON).outputs
    rounded = 4 * 8 * 2**-9  # four parts below 8
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=rounded)


def test_nothing_is_rounded_where_torch_adds_16_bits_to_f32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There a gradient is rounded once, at the end."""

    def write(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> None:
        out.copy_(a.to(dtype) @ b.to(dtype))

    def add(into: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> None:
        assert out is into
        out.addmm_(a.to(dtype), b.to(dtype))

    monkeypatch.setattr(product_steps, "adds_wide", lambda device, dtype: True)
    monkeypatch.setattr(product_steps, "_MM", SimpleNamespace(dtype_out=write))
    monkeypatch.setattr(product_steps, "_ADDMM", SimpleNamespace(dtype_out=add))
    program, given, want = narrow_program()
    (got,) = simulate(program, given, options=POISON).outputs
    torch.testing.assert_close(got, want.bfloat16(), rtol=2**-7, atol=1e-5)
    monkeypatch.undo()
    (rounded,) = simulate(narrow_program()[0], given, options=POISON).outputs
    assert not torch.equal(got, rounded)


def test_torch_does_not_on_cpu() -> None:
    assert not product_steps.adds_wide("cpu", torch.bfloat16)


def test_what_a_product_that_adds_takes() -> None:
    local = as_run(project(hir.parse(TEXT), 0))
    first, second = (i for i in local.instructions if i.op == "addmm")
    factors, sums = 4 * (3 * 2 + 2 * 2), 4 * 3 * 2
    amounts = partial(nbytes, local)
    assert [amounts(first), amounts(second)] == [factors + sums, factors + 2 * sums]
    assert [operations(local, i) for i in (first, second)] == [2 * 3 * 2 * 2] * 2


def test_what_products_behind_a_launch_read_is_held_till_then() -> None:
    """Two products with factors of a unit take both factors: not one after the other."""
    mesh, width = DeviceMesh.arange(t=1), 32
    with mf.FusionDefinition("late") as fd:
        x, t = (fd.define_tensor([8, width], mesh=mesh, name=n) for n in "xt")
        for factor in (2.0, 3.0):
            fd.add_output(fd.ops.permute((x * factor).sin(), [1, 0]) @ t)
    options = Options(compile="always")
    program = mf.pipeline(fd, microbatches=4, batch={"x": 0, "t": 0}, options=options)
    given = 4 * (2 * 8 * width + 2 * width * width)
    factor = 4 * 2 * width
    assert (
        memory_of(project(program.host, 0)).peak == given + 3 * factor
    )  # one of them before `sin`
