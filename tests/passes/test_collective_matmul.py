"""Windows are found where a communication stands beside a product; all forms give its values."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import sampling
from helpers.oracle import check_everywhere
from helpers.overlaps import CASES, in_forms, prepared, program
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream, hir_lowering
from mdfuse.ir.graph import Fusion
from mdfuse.passes import collective_matmul

LINE = DeviceMesh.arange(tp=4)
GRID = DeviceMesh.arange(dp=2, tp=2)


def shown(fusion: Fusion) -> list[str]:
    """Each window with its forms: (chunks, rotated axis)."""
    return [
        f"{' '.join(e.op for e in w.exprs)}: "
        + " ".join(f"{f.chunks}{f.rotate or ''}" for f in collective_matmul.forms(fusion, w))
        for w in collective_matmul.windows(fusion)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gather", ["set matmul: 2 4 8 16 4tp 8tp 16tp"]),
        ("three", ["set linear linear linear: 2 2 4 8 16 4tp 8tp 16tp"]),
        ("trained", ["set linear: 2 2 4 8 16 4tp 8tp 16tp"]),
        ("scatter", ["matmul set: 4 4tp 8tp 16tp"]),
        ("reduce", ["matmul set: 2 4 8 16"]),
        ("experts", ["set matmul: 2 4 8 2 4 8 16"]),
        ("mlp", ["set matmul relu matmul set: 4 4tp 8tp 16tp", "set matmul: 2 4 8 16 4tp 8tp 16tp",
                 "matmul set: 4 4tp 8tp 16tp"]),
        ("fused", ["set matmul relu matmul set: 4 4tp 8tp 16tp",
                   "set matmul: 2 4 8 16 4tp 8tp 16tp", "matmul set: 4 4tp 8tp 16tp"]),
        ("sum of blocks", ["matmul set: 2 4 8 16"]),
        ("experts in blocks", ["set matmul: 2 4 8 16"]),
    ],
)  # fmt: skip
def test_windows_and_forms(name: str, expected: list[str]) -> None:
    assert shown(prepared(CASES[name], LINE, 16)) == expected


@pytest.mark.parametrize("rows", [16, 11, 3])
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
@pytest.mark.parametrize("name", CASES)
def test_all_forms_give_the_values(name: str, mesh: DeviceMesh, rows: int) -> None:
    """Small integers, so that sums are exact; uneven shards; teams of a mesh of two axes."""
    case = CASES[name]
    fusion = prepared(case, mesh, rows)
    inputs = case.inputs(fusion)
    found = list(in_forms(fusion))
    assert found or rows == 3
    for _, _, streamed in found:
        check_everywhere(program(streamed), inputs, case.expected(inputs), exact=True)


def in_blocks(draw: random.Random, size: int) -> dict[str, Any]:
    """Blocks of a dim, half of the time: equal ones, or two that are not."""
    if size < 2 or draw.random() < 0.5:
        return {}
    equal = [n for n in (2, 3, 4) if size % n == 0]
    first = draw.randrange(1, size)
    return {"blocks": draw.choice([*equal, (first, size - first)])}


def drawn_layout(draw: random.Random, mesh: DeviceMesh, shape: Sequence[int]) -> dict[str, Shard]:
    blocks = [in_blocks(draw, n) for n in shape]
    dims = ((axis, draw.randrange(len(shape))) for axis in mesh.axes if draw.random() < 0.6)
    return {axis: Shard(dim, **blocks[dim]) for axis, dim in dims}


def drawn(draw: random.Random) -> tuple[mf.FusionDefinition, Callable[..., Tensor]]:
    """One or two products, or one for each expert, with layouts of all dims, also in blocks."""
    ranks = draw.choice([{"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}])
    order = draw.sample(range(math.prod(ranks.values())), math.prod(ranks.values()))
    mesh = DeviceMesh(np.reshape(order, [*ranks.values()]).tolist(), axes=(*ranks,))
    dtype = draw.choice([torch.float32, torch.float64, torch.complex64, torch.int32, torch.uint8])
    rows, batch, two = draw.choice([24, 13, 8, 3, 1]), draw.choice([(), (2,), (8,)]), False
    shapes = [(*batch, rows, 6), (6, 8)]
    if batch == (8,):
        shapes[1] = (8, 6, 8)
    elif two := draw.random() < 0.5:
        shapes.append((8, 5))
    with mf.FusionDefinition("für_1") as fd:

        def given(shape: Sequence[int], name: str) -> Any:
            return fd.define_tensor(shape, dtype, mesh, drawn_layout(draw, mesh, shape), name=name)

        def moved(x: Any) -> Any:
            is_moved = draw.random() < 0.7
            return fd.ops.set(x).on(mesh, drawn_layout(draw, mesh, x.shape)) if is_moved else x

        x, *ws = map(given, shapes, ("größe", "c0", "i"))
        y = moved(moved(x) @ ws[0])
        if two:
            y = moved((y + y) @ ws[1])
        fd.add_output(y)
    return fd, lambda x, w, v=None: (2 * (x @ w)) @ v if two else x @ w


@pytest.mark.parametrize("seed", range(sampling.of(48, 16)))
def test_forms_of_drawn_layouts(seed: int) -> None:
    fd, plain = drawn(random.Random(seed))
    fusion, generator = hir_lowering.prepare(fd.fusion), torch.Generator().manual_seed(seed)
    values = [fusion.values[x] for x in fusion.inputs]
    inputs = [torch.randint(0, 3, v.shape, generator=generator).to(v.dtype) for v in values]
    for _, _, streamed in in_forms(fusion):
        check_everywhere(program(streamed), inputs, [plain(*inputs)], exact=True)


def test_most_drawn_layouts_have_forms_and_blocks() -> None:
    """So that those tests are about something."""
    found: Counter[str] = Counter()
    for seed in range(48):
        fusion = hir_lowering.prepare(drawn(random.Random(seed))[0].fusion)
        for window, _, streamed in in_forms(fusion):
            layouts = [streamed.layout(v) for v in window.values]
            blocks = any(isinstance(p, Shard) and p.blocks for x in layouts for p in x.placements)
            found.update([" ".join(e.op for e in window.exprs), "blocks" if blocks else "none"])
    assert min(found[x] for x in ("set matmul", "matmul set", "blocks", "none")) > 20, found


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_pieces_of_a_short_last_shard(name: str) -> None:
    """16 rows on three ranks: 6, 6 and 4; halves of 4 are no chunks of the whole, thirds of 3 are.

    12 rows on five ranks: 3, 3, 3, 3 and none.
    """
    case = CASES[name]
    for size, rows, pieces in ((3, 16, [3]), (3, 18, [3, 6]), (5, 12, [5]), (5, 10, [5, 10])):
        fusion = prepared(case, DeviceMesh.arange(tp=size), rows)
        inputs = case.inputs(fusion)
        found = list(in_forms(fusion))
        assert [f.chunks for _, f, _ in found if f.rotate] == pieces
        for _, _, streamed in found:
            check_everywhere(program(streamed), inputs, case.expected(inputs), exact=True)


def test_pieces_that_lie_side_by_side_are_sent_from_where_they_lie() -> None:
    fusion = prepared(CASES["gather"], LINE, 16)
    pieces = [program(x) for _, form, x in in_forms(fusion) if form.rotate and form.chunks > 4]
    sent = [i.reads[0] for p in pieces for i in p.host.walk() if i.op == "send"]
    assert len(pieces) == 2 and sent == ["x.i.piece"] * 2
    loops = [i for p in pieces for i in p.host if i.op == "for" and len(i.body) > 2]
    assert len(loops) == 2 and not any(j.fn == "set" for i in loops for j in i.walk())


@pytest.mark.parametrize("name", ["gather", "three", "reduce", "experts"])
def test_floats_are_those_of_the_plain_program(name: str) -> None:
    """Where chunks do not change a sum, only a kernel for other sizes may round otherwise."""
    fusion = prepared(CASES[name], LINE, 16)
    draw = torch.Generator().manual_seed(3)
    inputs = [torch.randn(fusion.values[x].shape, generator=draw) for x in fusion.inputs]
    plain = mf.simulate(program(fusion), inputs).outputs
    for _, _, streamed in in_forms(fusion):
        for x, y in zip(plain, mf.simulate(program(streamed), inputs).outputs, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-7, atol=2e-6)


def narrow(dtype: torch.dtype) -> Fusion:
    with mf.FusionDefinition("narrow") as fd:
        x = fd.define_tensor([64, 48], dtype, mesh=LINE, layout={"tp": Shard(1)})
        w = fd.define_tensor([48, 32], dtype, mesh=LINE, layout={"tp": Shard(0)})
        fd.add_output((x @ w).on(LINE, {"tp": Shard(0)}))
    return hir_lowering.prepare(fd.fusion)


def test_narrow_sums_are_not_rounded_once_per_rank() -> None:
    """Sums of 16 bits are added up in f32, so that no form is further from float64."""
    fusion = narrow(torch.bfloat16)
    draw = torch.Generator().manual_seed(3)
    inputs = [torch.randn(n, generator=draw).bfloat16() for n in ((64, 48), (48, 32))]
    right = inputs[0].double() @ inputs[1].double()

    def error(found: Fusion) -> float:
        (y,) = mf.simulate(program(found), inputs).outputs
        return float(torch.linalg.vector_norm(y.double() - right))

    plain = error(fusion)
    forms = [(form, error(streamed)) for _, form, streamed in in_forms(fusion)]
    assert [(f.chunks, f.rotate) for f, _ in forms] == [(4, None), (4, "tp"), (8, "tp"), (16, "tp")]
    assert all(found <= 1.001 * plain for _, found in forms), (plain, forms)


def test_sums_of_eight_bits_go_in_no_ring() -> None:
    assert shown(narrow(torch.uint8)) == ["matmul set: 4"]


def test_a_stream_of_the_user_is_left_alone() -> None:
    with mf.FusionDefinition("own") as fd:
        x = fd.define_tensor([16, 6], mesh=LINE, layout={"tp": Shard(0)})
        w = fd.define_tensor([6, 8], mesh=LINE, layout={"tp": Shard(1)})
        y = (x @ w).on(LINE, {"tp": Shard(1)})
        fd.add_output(y)
        fd.add_output(fd.ops.exp(y).on(LINE, {"tp": Shard(1)}, stream=Stream(0, 2)))
    assert collective_matmul.windows(hir_lowering.prepare(fd.fusion)) == ()


def test_an_order_that_is_required_is_kept() -> None:
    with mf.FusionDefinition("ordered") as fd:
        x = fd.define_tensor([16, 6], mesh=LINE, layout={"tp": Shard(0)})
        w = fd.define_tensor([6, 8], mesh=LINE, layout={"tp": Shard(1)})
        y = (x @ w).on(LINE, {"tp": Shard(1)})
        fd.add_output(fd.ops.stride_order(y, [0, 1]))
    fusion = hir_lowering.prepare(fd.fusion)
    assert collective_matmul.windows(fusion) == ()


def test_a_product_that_must_come_between_is_no_part() -> None:
    """The second product reads what the first one becomes by a sum: one loop cannot have both."""
    with mf.FusionDefinition("twice") as fd:
        x = fd.define_tensor([16, 16], mesh=LINE, layout={"tp": Shard(0)})
        w = fd.define_tensor([16, 16], mesh=LINE, layout={"tp": Shard(1)})
        whole = fd.ops.set(x).on(LINE, {})
        first = whole @ w
        scale = fd.ops.set(first.sum()).on(LINE, {})
        fd.add_output(whole @ (w * scale))
        fd.add_output(first)
    assert shown(hir_lowering.prepare(fd.fusion)) == ["set matmul matmul: "]


def test_rows_in_blocks_are_not_cut() -> None:
    """Each rank has a part of each block of a fused projection; other rows are cut."""
    blocks = Shard(1, blocks=(8, 4, 4))
    with mf.FusionDefinition("blocks") as fd:
        x = fd.define_tensor([3, 16, 6], mesh=GRID, layout={"dp": blocks, "tp": Shard(2)})
        w = fd.define_tensor([6, 8], mesh=GRID, layout={})
        fd.add_output(fd.ops.set(x).on(GRID, {"dp": blocks}) @ w)
    fusion = hir_lowering.prepare(fd.fusion)
    draw = torch.Generator().manual_seed(3)
    x, w = (torch.randint(-2, 3, n, generator=draw).float() for n in ((3, 16, 6), (6, 8)))
    found = list(in_forms(fusion))
    assert [(form.dims, form.chunks) for _, form, _ in found] == [((0, 0), 2)]
    for _, _, streamed in found:
        check_everywhere(program(streamed), [x, w], [x @ w], exact=True)


def test_several_results_between_two_windows_are_no_chain() -> None:
    with mf.FusionDefinition("several") as fd:
        x = fd.define_tensor([16, 6], mesh=LINE, layout={"tp": Shard(0)})
        w = fd.define_tensor([6, 8], mesh=LINE, layout={"tp": Shard(1)})
        v = fd.define_tensor([4, 6], mesh=LINE, layout={})
        y, _ = fd.ops.topk(fd.ops.set(x @ w).on(LINE, {"tp": Shard(0)}), 4)
        fd.add_output(fd.ops.set(y @ v).on(LINE, {}))
    found = hir_lowering.prepare(fd.fusion)
    assert [w.split(":")[0] for w in shown(found)] == ["set matmul", "matmul set", "matmul set"]


def test_side_by_side_in_the_order_that_is_left() -> None:
    """What stands between a set and its product goes before or after them."""
    with mf.FusionDefinition("apart") as fd:
        x = fd.define_tensor([16, 6], mesh=LINE, layout={"tp": Shard(0)})
        w = fd.define_tensor([6, 8], mesh=LINE, layout={"tp": Shard(1)})
        whole = fd.ops.set(x).on(LINE, {})
        fd.add_output(whole @ fd.ops.exp(w * 2))
    fusion = hir_lowering.prepare(fd.fusion)
    assert [e.op for e in fusion.exprs] == ["set", "mul", "exp", "matmul"]
    (window,) = collective_matmul.windows(fusion)
    (streamed, *_) = collective_matmul.forms(fusion, window).values()
    assert [e.op for e in streamed.exprs] == ["mul", "exp", "set", "matmul"]
