"""A rank's own product adds to what arrived as it writes."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from helpers.oracle import POISON
from helpers.overlaps import CASES, in_forms, prepared, program

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream, hir, simulate
from mdfuse.hir.rank.pipelines import as_run
from mdfuse.hir.verify.flow import Flow
from mdfuse.hir.verify.result_types import check_types

#: dtype -> what a sum of so few numbers may be off, relative to the largest.
OFF = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def ring(
    ranks: int, pieces: int, dtype: torch.dtype, product: str, shape: tuple[int, ...]
) -> mf.Program:
    """A product whose rows are summed in a ring, in so many pieces for each rank."""
    mesh = DeviceMesh.arange(tp=ranks)
    *batch, rows, inner, columns = shape
    last = len(batch) + 1
    with mf.FusionDefinition("ring") as fd:
        x = fd.define_tensor([*batch, rows, inner], dtype, mesh, {"tp": Shard(last)})
        stream = Stream(last - 1, ranks * pieces, rotate="tp")
        if product == "linear":
            w = fd.define_tensor([columns, inner], dtype, mesh, {"tp": Shard(1)})
            y = fd.ops.linear(x, w)
        else:
            own = batch if product == "batches" else []
            w = fd.define_tensor([*own, inner, columns], dtype, mesh, {"tp": Shard(len(own))})
            y = x @ w
        fd.add_output(y.on(mesh, {"tp": Shard(last - 1)}, stream=stream))
    return mf.compile(fd, mf.Options(compile="never"))


def sums(program: mf.Program, rank: int) -> list[str]:
    """What is added, and how, in what a rank runs."""
    code = as_run(program.for_rank(rank)).instructions
    return [i.fn or i.op for i in code if "add" in (i.fn, i.op[:3])]


def check_runs(program: mf.Program) -> None:
    """What ranks run is right by the verifier's own rules: types, contents, streams and frees."""
    for rank in program.host.meshes[0].ranks:
        run = as_run(program.for_rank(rank))
        check_types(run)
        Flow(run, has_frees=True).run()


@pytest.mark.parametrize("compiled", ["never", "always"])
@pytest.mark.parametrize("mesh", [DeviceMesh.arange(tp=2), DeviceMesh.arange(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_form_is_right(name: str, mesh: DeviceMesh, compiled: str) -> None:
    """In chains the own part comes first, and is computed where the sum is."""
    found = Counter[str]()
    options = mf.Options(compile=compiled, backend="symmetric")
    for window, form, fusion in in_forms(prepared(CASES[name], mesh, 16)):
        run = program(fusion, options)
        check_runs(run)
        if form.rotate is not None and window.exprs[-1].op == "set":
            found.update(i.op for i in as_run(run.for_rank(0)).instructions)
    assert bool(found["own"]) == (name in ("mlp", "fused"))
    assert bool(found["addmm"]) == (name in ("scatter", "mlp", "fused"))


@pytest.mark.parametrize(
    ("product", "batch"), [("matmul", ()), ("linear", (3,)), ("linear", ()), ("batches", (3,))]
)
@pytest.mark.parametrize("dtype", OFF, ids=str)
@pytest.mark.parametrize(("ranks", "pieces"), [(2, 1), (2, 2), (3, 2), (4, 2)])
def test_values(
    ranks: int, pieces: int, dtype: torch.dtype, product: str, batch: tuple[int, ...]
) -> None:
    shape = (*batch, 48, 24, 10)
    program = ring(ranks, pieces, dtype, product, shape)
    torch.manual_seed(ranks + pieces)
    x = torch.randn(*batch, 48, 24, dtype=torch.float64).to(dtype)
    w = torch.randn(*(batch if product == "batches" else ()), 24, 10, dtype=torch.float64).to(dtype)
    given = w.mT.contiguous() if product == "linear" else w
    (got,) = simulate(program, [x, given], options=POISON).outputs
    right = x.double() @ w.double()
    scale = (x.double().abs() @ w.double().abs()).amax()
    assert got.dtype == dtype
    assert (got.double() - right).abs().amax() <= OFF[dtype] * scale
    is_kept = ranks > 2 and dtype == torch.bfloat16  # and added up at the end
    own = 0 if pieces == 1 or is_kept else pieces
    assert [sums(program, r).count("addmm") for r in range(ranks)] == [own] * ranks
    assert not (is_kept and any("add" in sums(program, r) for r in range(ranks)))
    check_runs(program)


@pytest.mark.parametrize("pieces", [1, 2])
def test_terms_of_16_bits_are_added_up_at_once(pieces: int) -> None:
    """A rank's own product is computed among them, and is sent to nobody."""
    program = ring(4, pieces, torch.bfloat16, "matmul", (48, 24, 10))
    for rank in range(4):
        code = as_run(program.for_rank(rank)).instructions
        counts = Counter(i.op for i in code)
        assert (counts["own"], counts["send"], counts["reduce"]) == (pieces, 3 * pieces, 1)
        (added,) = (i for i in code if i.fn == "sum")
        terms = program.for_rank(rank).types[added.reads[0]]
        assert (terms.shape, terms.dtype) == ((4, 48, 10), torch.bfloat16)


@pytest.mark.parametrize(("ranks", "first"), [(2, "wait"), (3, "sync")])
def test_a_product_waits_for_what_it_adds_to(ranks: int, first: str) -> None:
    """Two ranks wait for the part that arrives, and for no later one; else for the sums before."""
    code = as_run(ring(ranks, 4, torch.float32, "matmul", (48, 6, 4)).for_rank(0)).instructions
    moved = [i for i in code if i.op not in ("alloc", "chunk", "free")]
    at = [n for n, i in enumerate(moved) if i.op == "addmm"]
    assert [moved[n - 1].op for n in at] == [first] * 4
    if ranks == 2:
        arriving = [i.outputs[0] for i in code if i.op == "recv" and i.kwargs["from"] != 0]
        assert [moved[n - 1].reads[0] for n in at] == arriving


def test_it_prints_and_parses() -> None:
    """What a rank runs is a program as any other: it may be read, and run as it stands."""
    run = as_run(ring(2, 2, torch.float32, "linear", (8, 6, 4)).for_rank(0))
    lines = [line.partition("  # ")[0].rstrip() for line in str(run).splitlines()]
    text = re.sub(r"(?<=\w)@", "_", "\n".join(lines))  # iterations have names that no one gives
    assert text.count("addmm(") == 2
    assert str(hir.parse(text)) == text


HEAD = """host @own on mesh(tp=2) {
  input %x: f32[8,6] of [8,12] (tp=S1)
  input %w: f32[6,5] of [12,5] (tp=S0)
"""


def run_text(body: str) -> torch.Tensor:
    x, w = torch.arange(96.0).reshape(8, 12), torch.arange(60.0).reshape(12, 5)
    (y,) = simulate(hir.parse(HEAD + body + "}\n"), [x, w], options=POISON).outputs
    return y


def test_a_rank_adds_its_own_rows() -> None:
    """Each rank adds its product to what it has; no one else's."""
    y = run_text(
        """  %own: f32[4,6] of [8,12] (tp=S1, chunk(0,2,coord(tp))) = chunk(%x)
  %y: f32[4,5] of [8,5] (tp=S0) = alloc(fill=1.0)
  %y = addmm(%y, %own, %w)
  return %y
"""
    )
    x, w = torch.arange(96.0).reshape(8, 12), torch.arange(60.0).reshape(12, 5)
    top, bottom = x[:4, :6] @ w[:6], x[4:, 6:] @ w[6:]
    assert torch.equal(y, torch.cat([top, bottom]) + 1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("%y: f32[8,5] (tp=R) = alloc(fill=0)\n  %y = addmm(%y, %x, %w)", "same sum"),
        ("%y: f32[8,5] (tp=P(sum)) = alloc(fill=0)\n  %y = addmm(%y, %x, %w)", "one buffer is P"),
        ("%y: f32[4,5] of [8,5] (tp=S0) = alloc(fill=0)\n  %y = addmm(%y, %x, %w)", "other rows"),
        ("%y: f64[4,5] of [8,5] (tp=S0) = alloc(fill=0)\n  %y = addmm(%y, %x, %w)", "one dtype"),
        ("%y: f32[4,6] of [8,6] (tp=S0) = alloc(fill=0)\n  %y = addmm(%y, %x, %w)", r"\[8, 5\]"),
        (
            "%z: f32[4,5] of [8,5] (tp=S0) = alloc(fill=0)\n"
            "  %y: f32[4,5] of [8,5] (tp=S0) = addmm(%z, %x, %w)",
            "adds to the buffer that it reads",
        ),
        ("%y: f32[4,5] of [8,5] (tp=S0) = alloc\n  %y = addmm(%y, %x, 2.0)", "addmm"),
    ],
)
def test_what_is_no_sum_of_own_products(body: str, words: str) -> None:
    with pytest.raises(mf.ProgramError, match=words):
        run_text(f"  {body}\n  return %y\n")


def test_a_buffer_without_a_value() -> None:
    body = """  %own: f32[4,6] of [8,12] (tp=S1, chunk(0,2,coord(tp))) = chunk(%x)
  %y: f32[4,5] of [8,5] (tp=S0) = alloc
  %y = addmm(%y, %own, %w)
  return %y
"""
    with pytest.raises(mf.ProgramError, match="%y"):
        run_text(body)
