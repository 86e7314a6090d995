"""Expressions with several results: text, layouts, laws, orders, segments, what is not allowed."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import (
    DefinitionError,
    DeviceMesh,
    LoweringError,
    MdfuseError,
    ProgramError,
    Shard,
    Stream,
    hir,
)
from mdfuse.hir.verify.check import verify
from mdfuse.ir.graph import Expr, check_fusion, has_same_code

LINE = DeviceMesh.arange(tp=4)
GRID = DeviceMesh.arange(dp=2, tp=2)
X = torch.randn((8, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def plain(text: object) -> str:
    return re.sub(r" +#.*", "", str(text))


def two(layout: dict[str, Shard], dim: int, mesh: DeviceMesh = LINE) -> mf.FusionDefinition:
    with mf.FusionDefinition("two") as fd:
        x = fd.define_tensor([8, 6], torch.float64, mesh, layout)
        v, i = x.sort(dim=dim, stable=True)
        fd.add_output(v)
        fd.add_output(i)
    return fd


def sorted_rows() -> list[Tensor]:
    return [*torch.sort(X, dim=1, stable=True)]


# -- text ----------------------------------------------------------------------------------------


def test_the_text_names_each_result_with_its_type() -> None:
    fd = two({"tp": Shard(0)}, 1)
    assert plain(fd).splitlines()[2].strip() == (
        "%v: f64[8,6] (tp=S0), %i: i64[8,6] (tp=S0) = sort(%x, dim=1, stable=True)"
    )
    program = mf.compile(fd)
    assert hir.parse(str(program)) == program.host
    assert "%v.made: f64[2,6] of [8,6] (tp=S0), %i.made: i64[2,6] of [8,6] (tp=S0) = sort(" in str(
        program
    )


def test_names_of_variables_are_those_of_the_results() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4])
        top, (_, where) = x.topk(2), x.sort()
        assert [top.values.name, top.indices.name, where.name] == ["t", "t_1", "t_3"]
        values, indices = mf.ops.topk(x, 1)
        assert [values.name, indices.name] == ["values", "indices"]
        best = x.topk(1).values.on(LINE, {})
        assert best.name == "best"
        assert fd.ops.sort(x)[1].name == "t_6"


def test_a_definition_is_found_again() -> None:
    mf.FusionCache.reset()
    assert mf.compile(two({}, 1)) is mf.compile(two({}, 1))
    assert mf.compile(two({}, 1)) is not mf.compile(two({}, 0))
    info = mf.FusionCache.get().info()
    assert (info.hits, info.misses) == (2, 2)


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "merge", [None, mf.segmentation.merge_local, mf.segmentation.merge_nothing]
)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "layout", [{}, {"tp": Shard(0)}, {"tp": Shard(1)}, {"dp": Shard(1), "tp": Shard(0)}]
)
def test_both_results_are_those_of_one_device(
    layout: dict[str, Shard], dim: int, merge: mf.segmentation.ShouldMerge | None
) -> None:
    program = mf.compile(two(layout, dim, GRID), should_merge=merge)
    check_everywhere(program, [X], [*torch.sort(X, dim=dim, stable=True)], exact=True)


def test_what_is_split_elsewhere_stays_split() -> None:
    program = mf.compile(two({"tp": Shard(0)}, 1))
    assert not program.communications
    assert [str(program.fusion.layout(n)) for n in program.fusion.outputs] == ["(tp=S0)"] * 2


def test_each_result_may_have_a_law() -> None:
    """One law is taken for both; where they differ, each gets what it asks for."""
    for laws in (({}, None), (None, {"tp": Shard(0)}), ({"tp": Shard(1)}, {"tp": Shard(0)})):
        with mf.FusionDefinition("laws") as fd:
            x = fd.define_tensor([8, 6], torch.float64, LINE)
            v, i = x.sort(dim=1, stable=True)
            for result, law in zip((v, i), laws, strict=True):
                if law is not None:
                    result.on(LINE, law)
                fd.add_output(result)
        program = mf.compile(fd)
        check_everywhere(program, [X], sorted_rows(), exact=True)
        assert not program.communications  # each rank has all it needs
    assert [str(program.fusion.layout(n)) for n in program.fusion.outputs] == ["(tp=S1)", "(tp=S0)"]


def test_a_result_may_live_on_another_mesh_by_a_law() -> None:
    other = DeviceMesh([3, 5], axes=("z",))
    with mf.FusionDefinition("apart") as fd:
        x = fd.define_tensor([8, 6], torch.float64, LINE, {"tp": Shard(0)})
        v, i = x.sort(dim=1, stable=True)
        fd.add_output(v.on(other, {"z": Shard(1)}))
        fd.add_output(i)
    check_everywhere(mf.compile(fd), [X], sorted_rows(), exact=True)


def test_uneven_and_empty_parts() -> None:
    for shape, k in (((5, 3), 2), ((1, 4), 4), ((0, 4), 1), ((3, 0), 0), ((6, 6), 0)):
        x = torch.randn(shape, dtype=torch.float64)
        for split in (0, 1):
            with mf.FusionDefinition("top") as fd:
                h = fd.define_tensor(shape, torch.float64, LINE, {"tp": Shard(split)})
                for result in h.topk(k, 1):
                    fd.add_output(result)
            check_everywhere(mf.compile(fd), [x], [*x.topk(k, 1)], exact=True)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_chains(seed: int) -> None:
    """Results that are read, returned, or neither, on drawn layouts."""
    draw = random.Random(seed)
    options = [{}, {"tp": Shard(0)}, {"dp": Shard(1)}, {"dp": Shard(0), "tp": Shard(1)}]
    with mf.FusionDefinition("chain") as fd:
        h = fd.define_tensor([8, 6], torch.float64, GRID, draw.choice(options))
        values, wanted = [h], [X]
        for _ in range(draw.randint(1, 4)):
            at, dim, down = draw.randrange(len(values)), draw.randrange(2), draw.random() < 0.5
            results = values[at].sort(dim=dim, descending=down, stable=True)
            plains = torch.sort(wanted[at], dim=dim, descending=down, stable=True)
            for result, want in zip(results, plains, strict=True):
                if draw.random() < 0.4:
                    result.on(GRID, draw.choice(options))
                values.append(result)
                wanted.append(want)
            values.append(results[0] * 2 + results[1])
            wanted.append(plains[0] * 2 + plains[1])
        chosen = draw.sample(range(1, len(values)), draw.randint(1, len(values) - 1))
        for n in chosen:
            fd.add_output(values[n])
    program = mf.compile(fd)
    assert hir.parse(str(program)) == program.host
    check_everywhere(program, [X], [wanted[n] for n in chosen], exact=True)


# -- memory --------------------------------------------------------------------------------------


def test_an_unread_result_is_freed_at_once() -> None:
    with mf.FusionDefinition("one") as fd:
        x = fd.define_tensor([8, 6], mesh=LINE)
        fd.add_output(x.topk(2).indices + 1)
    lines = [line.strip() for line in plain(mf.compile(fd)).splitlines()]
    at = next(n for n, line in enumerate(lines) if "topk" in line)
    assert lines[at + 1] == "free %t"


def test_nothing_is_computed_of_which_both_results_are_unread() -> None:
    with mf.FusionDefinition("none") as fd:
        x = fd.define_tensor([8, 6], mesh=LINE)
        x.topk(2)
        fd.add_output(x + 1)
    assert "topk" not in str(mf.compile(fd).host)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_memory_order_may_be_required_of_either(order: tuple[int, int]) -> None:
    with mf.FusionDefinition("order") as fd:
        x = fd.define_tensor([8, 6], torch.float64, LINE, {"tp": Shard(0)})
        v, i = x.sort(dim=1, stable=True)
        fd.add_output(v)
        fd.add_output(i, stride_order=order)
    program = mf.compile(fd)
    check_everywhere(program, [X], sorted_rows(), exact=True)
    _, made = mf.simulate(program, [X]).per_rank[0]
    assert made.stride() == ((1, 2) if order == (0, 1) else (6, 1))


def test_a_result_may_take_the_place_of_an_input() -> None:
    with mf.FusionDefinition("again") as fd:
        x = fd.define_tensor([8, 6], torch.float64, LINE, {"tp": Shard(0)})
        v, i = x.sort(dim=1, stable=True)
        fd.add_output(v, reuse=x)
        fd.add_output(i)
    program = mf.compile(fd)
    given = X.clone()
    found = mf.simulate(program, [given])
    for made, want in zip(found.outputs, sorted_rows(), strict=True):
        assert torch.equal(made, want)
    assert "alias %v" in str(program.host)


def test_results_are_written_into_buffers_that_are_passed() -> None:
    fd = two({}, 1, DeviceMesh.arange(x=1))
    out = [torch.empty(8, 6, dtype=torch.float64), torch.empty(8, 6, dtype=torch.int64)]
    for _ in range(2):
        mf.simulate(mf.compile(fd), per_rank=[{"x": X, "v": out[0], "i": out[1]}])
        assert torch.equal(out[0], sorted_rows()[0]) and torch.equal(out[1], sorted_rows()[1])


# -- extents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 8, 13])
def test_an_extent_that_a_run_chooses(n: int) -> None:
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([-1, 6], torch.float64, LINE, {"tp": Shard(0)})
        v, i = x.topk(3, 1)
        s, j = x.sort(dim=0, stable=True)
        for result in (v, i, s, j):
            fd.add_output(result)
    program = mf.compile(fd)
    assert "x.0" in str(fd)
    rows = torch.randn((n, 6), dtype=torch.float64)
    want = [*rows.topk(3, 1), *torch.sort(rows, dim=0, stable=True)]
    for made, expected in zip(mf.simulate(program, [rows]).outputs, want, strict=True):
        assert torch.equal(made, expected)


def test_too_few_elements_in_a_run_are_refused() -> None:
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([-1, 6], mesh=LINE)
        fd.add_output(x.topk(3, 0).values)
    with pytest.raises(MdfuseError, match=r"x\.0 > 2"):
        mf.simulate(mf.compile(fd), [torch.randn(2, 6)])


# -- segments ------------------------------------------------------------------------------------


def test_segments_have_both_results() -> None:
    fd = two({"tp": Shard(1)}, 1)
    segments = mf.segmentation.segment(mf.compile(fd).fusion)
    assert ("v", "i") in [s.outputs for s in segments]
    mf.segmentation.check(fd.fusion, [["v", "i"]])
    mf.segmentation.check(fd.fusion, [["i"]])
    with pytest.raises(LoweringError, match="%i is in two groups"):
        mf.segmentation.check(fd.fusion, [["v"], ["i"]])


# -- what is wrong -------------------------------------------------------------------------------


def test_the_only_output_of_several_is_refused() -> None:
    (expr,) = two({}, 1).fusion.exprs
    assert expr.outputs == ("v", "i")
    with pytest.raises(ValueError, match="unpack"):
        _ = expr.output


def test_a_value_is_defined_once() -> None:
    fusion = two({}, 1).fusion
    (expr,) = fusion.exprs
    again = Expr(op="sort", inputs=("x",), outputs=("w", "i"), attrs=expr.attrs)
    with pytest.raises(MdfuseError, match="sort -> %w, %i defines a value twice"):
        check_fusion(replace(fusion, exprs=(expr, again)))


def test_what_is_checked_again() -> None:
    """What a pass says of values needs no check of the expressions; another expression does."""
    fusion = two({}, 1).fusion
    (expr,) = fusion.exprs
    assert has_same_code(fusion, replace(fusion, values={}, exprs=(*fusion.exprs,)))
    for other in ((), (replace(expr),), (expr, expr)):
        assert not has_same_code(fusion, replace(fusion, exprs=other))
    assert not has_same_code(fusion, replace(fusion, inputs=()))
    assert not has_same_code(fusion, replace(fusion, outputs=()))


def test_a_stream_of_one_of_several_is_refused() -> None:
    with mf.FusionDefinition("streamed") as fd:
        x = fd.define_tensor([8, 6], mesh=LINE)
        v, _ = x.sort(dim=1)
        fd.add_output(v.on(LINE, {}, stream=Stream(0, 4)))
    with pytest.raises(LoweringError, match="sort computes 2 results at once") as caught:
        mf.compile(fd)
    assert "fd.ops.set(v)" in str(caught.value)


def test_scalars_have_no_order() -> None:
    with mf.FusionDefinition(), pytest.raises(DefinitionError, match="sort of scalars"):
        mf.ops.sort(mf.ops.current.get().define_scalar())


HOST = """
host @two on mesh(x=2) {{
  input %x: f32[4,3] (x=R)
  {}
  return %v
}}
"""
GOOD = "%v: f32[4,3] (x=R), %i: i64[4,3] (x=R) = sort(%x, dim=0)"


def test_a_host_program_is_read_and_runs() -> None:
    program = hir.parse(HOST.format(GOOD))
    assert hir.parse(str(program)) == program
    x = torch.randn(4, 3)
    (made,) = mf.simulate(program, [x]).outputs
    assert torch.equal(made, x.sort(0).values)


def test_results_are_written_into_buffers_that_are_there() -> None:
    """Also where one of them is the operand itself."""
    for made in (
        "%v: f32[4,3] (x=R) = alloc\n%i: i64[4,3] (x=R) = alloc\n%v, %i = sort(%x, dim=0)",
        "alias %v: f32[4,3] (x=R) = %x\n%v, %i: i64[4,3] (x=R) = sort(%x, dim=0)",
        "%v: f32[4,3] (x=R) = add(%x, 0.0)\n%v, %i: i64[4,3] (x=R) = sort(%v, dim=0)",
    ):
        x = torch.randn(4, 3)
        want = x.sort(0)
        text = HOST.format(made).replace("return %v", "return %v, %i")
        found = mf.simulate(hir.parse(text), [x]).outputs
        assert torch.equal(found[0], want.values) and torch.equal(found[1], want.indices)


WRONG = {
    "sort defines 1 names": "%v: f32[4,3] (x=R) = sort(%x, dim=0)",
    "add defines 2 names": "%v: f32[4,3] (x=R), %i: f32[4,3] (x=R) = add(%x, 1.0)",
    "sort defines %v twice": "%v: f32[4,3] (x=R), %v = sort(%x, dim=0)",
    "sort with a memory order": GOOD + " contiguous",
    "%i has no type": "%v: f32[4,3] (x=R), %i = sort(%x, dim=0)",
    "is i64[4, 3]": "%v: f32[4,3] (x=R), %i: i32[4,3] (x=R) = sort(%x, dim=0)",
    "is i64[2, 3]": "%v: f32[2,3] (x=R), %i: i64[4,3] (x=R) = topk(%x, k=2, dim=0)",
    "makes (x=R) as result 1": "%v: f32[4,3] (x=R), %i: i64[2,3] of [4,3] (x=S0) = sort(%x, dim=0)",
}


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_host_program_is_refused(says: str) -> None:
    with pytest.raises(ProgramError) as caught:
        verify(hir.parse(HOST.format(WRONG[says])))
    assert says in str(caught.value), caught.value


def test_results_live_on_one_mesh() -> None:
    text = HOST.format(GOOD).replace("mesh(x=2)", "m0=mesh(x=2), m1=mesh(y=1)")
    text = text.replace("(x=R)", "m0(x=R)").replace("%i: i64[4,3] m0(x=R)", "%i: i64[4,3] m1(y=R)")
    with pytest.raises(ProgramError, match="computes all its results on one mesh"):
        verify(hir.parse(text))


def test_a_race_on_the_second_result_is_found() -> None:
    """What is read on another stream than it is written on."""
    text = HOST.format(
        "set_stream 1\n%w: f32[4,3] (x=R), %i: i64[4,3] (x=R) = sort(%x, dim=0)\n"
        "set_stream 2\n%v: f32[4,3] (x=R) = add(%i, 1.0)\nset_stream 0\nsync 2"
    )
    with pytest.raises(ProgramError, match="%i"):
        verify(hir.parse(text))
