"""Rows that each microbatch counts: values, bytes, skews, bounds, and what the verifier sees."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, LoweringError, ProgramError, Shard
from mdfuse.hir.instructions import counts_of
from mdfuse.hir.text.parser import parse
from mdfuse.hir.traffic import received
from mdfuse.hir.verify.check import verify
from passes.test_count_rows import MESHES, SKEWS, by_loop, given, layer, router

EP, BATCH = DeviceMesh.arange(ep=2), {"x": 0, "ids": 0}


def in_microbatches(count: int = 2, t: int = 8, **how: Any) -> mf.Program:
    fd = layer(EP, t, 4, 2, {"ep": Shard(0)})
    return mf.pipeline(fd, microbatches=count, batch=BATCH, **how)


@pytest.mark.parametrize("name", MESHES)
def test_each_microbatch_counts_its_rows(name: str) -> None:
    mesh, experts, layouts = MESHES[name]
    fd = layer(mesh, 16, 4, 2, experts, **layouts)
    program = mf.pipeline(fd, microbatches=2, batch=BATCH)
    assert "as they are counted in a run" in program.explain()
    values = given(16, 4, router(16, 4, 2))
    check_everywhere(program, values, by_loop(*values))


@pytest.mark.parametrize("skew", [*SKEWS, "none"])
def test_skews(skew: str) -> None:
    t, e = 12, 4
    ids = torch.full((t, 2), -1) if skew == "none" else SKEWS[skew](t, e)
    values = given(t, e, ids)
    wanted = by_loop(*values) if skew != "none" else [torch.zeros_like(v) for v in values]
    wanted = wanted if skew != "none" else [wanted[0], wanted[0], *wanted[2:]]
    check_everywhere(in_microbatches(3, t), values, wanted)


def test_bytes_are_those_of_the_whole_batch() -> None:
    def rows(program: mf.Program, at_worst: bool) -> int:
        posts = received(program.host, 0, at_worst)
        return sum(size for i, size in posts if counts_of(i) is not None)

    whole = mf.compile(layer(EP, 8, 4, 2, {"ep": Shard(0)}))
    for at_worst in (False, True):
        assert rows(in_microbatches(), at_worst) == rows(whole, at_worst) > 0


@pytest.mark.parametrize("seed", range(24))
def test_microbatches_of_any_number_of_rows(seed: int) -> None:
    """Chunks are as `torch.chunk` cuts each rank's tokens; ranks, too, may have unequal numbers."""
    draw = random.Random(seed)
    t, count, ep = draw.randint(1, 19), draw.randint(2, 5), draw.choice([2, 3])
    fd = layer(DeviceMesh.arange(ep=ep), t, 4, 2, {"ep": Shard(0)})
    options = mf.Options(counts=draw.choice(["host", "device"]), poison=True)
    program = mf.pipeline(fd, microbatches=count, batch=BATCH, options=options)
    values = given(t, 4, router(t, 4, 2))
    check_everywhere(program, values, by_loop(*values))


def test_each_microbatch_has_room_for_the_largest() -> None:
    text = str(in_microbatches(2, 10))
    assert "most=6)" in text
    assert "line_up_rows(%x.i, %ids.i, %n.i, %ids.places.i, bound=12)" in text
    verify(parse(text))
    for broken in ("bound=8", "bound=10", "bound=14"):
        with pytest.raises(ProgramError):
            verify(parse(text.replace("bound=12", broken)))


#: tokens, how they are cut, parts, what is said, what to do.
OTHER_PARTS: list[tuple[int, dict[str, int], int, str, str]] = [
    (8, {"ep": 2}, 4, "%each is (ep=S0), with parts=4", "parts=2"),
    (8, {"ep": 2}, 1, "%each is (ep=S0), with parts=1", "parts=2"),
    (10, {"dp": 2, "ep": 2}, 4, "ranks have 2 or 3 tokens", "parts=[3, 2, 3, 2]"),
]


@pytest.mark.parametrize(("t", "axes", "parts", "says", "hint"), OTHER_PARTS)
def test_a_microbatch_has_tokens_of_one_part(
    t: int, axes: dict[str, int], parts: int, says: str, hint: str
) -> None:
    mesh, split = DeviceMesh.arange(**axes), dict.fromkeys(axes, Shard(0))
    with pytest.raises(LoweringError) as refusal:
        mf.pipeline(doubled(mesh, split, t, parts), microbatches=2, batch=BATCH)
    assert says in str(refusal.value) and hint in str(refusal.value)


def test_rows_of_a_batch_that_have_several_tokens() -> None:
    fd = doubled(EP, {"ep": Shard(0)}, 10, 2, positions=4)
    with pytest.raises(LoweringError, match="several tokens of a row of the batch"):
        mf.pipeline(fd, microbatches=2, batch=BATCH)


def doubled(
    mesh: DeviceMesh, split: dict[str, Shard], t: int, parts: int, positions: int = 0
) -> FusionDefinition:
    """Rows go to four experts, which return them as they are."""
    inner = [positions] * bool(positions)
    with FusionDefinition("doubled") as fd:
        x = fd.define_tensor([t, *inner, 3], torch.float64, mesh, split, name="x")
        ids = fd.define_tensor([t, *inner, 2], torch.int64, mesh, split, name="ids")
        rows, each = x.reshape(-1, 3), ids.reshape(-1, 2)
        n = fd.ops.counts(each, experts=4, parts=parts)
        there = fd.ops.set(fd.ops.group_rows(rows, each, n)).on(mesh, {**split, "ep": Shard(1)})
        y = fd.ops.ungroup_rows(fd.ops.set(there).on(mesh, split), each)
        fd.add_output(y.reshape(t, *inner, 3))
    return fd


def test_a_batch_that_is_filled_up() -> None:
    """Rows whose ids are -1 go nowhere, and change nothing."""
    values = given(6, 4, router(6, 4, 2))
    wanted = by_loop(*values)
    x, ids, *others = values
    filled = [torch.cat([x, x[:2]]), torch.cat([ids, torch.full((2, 2), -1)]), *others]
    y, dx, *wanted_others = wanted
    made = mf.simulate(in_microbatches(2, 8), filled).outputs
    for got, want in zip(made, (y, dx, *wanted_others), strict=True):
        torch.testing.assert_close(got[: len(want)], want)


def test_a_capacity_of_the_whole_batch_is_refused() -> None:
    with FusionDefinition("capacity") as fd:
        x = fd.define_tensor([8, 3], torch.float32, EP, {"ep": Shard(0)}, name="x")
        ids = fd.define_tensor([8, 2], torch.int64, EP, {"ep": Shard(0)}, name="ids")
        n = fd.ops.counts(ids, experts=4, parts=2)
        rows = fd.ops.set(fd.ops.group_rows(x, ids, n, capacity=1, drop=True)).on(
            EP, {"ep": Shard(1)}
        )
        fd.add_output(fd.ops.ungroup_rows(fd.ops.set(rows).on(EP, {"ep": Shard(0)}), ids))
    with pytest.raises(LoweringError, match="rows of the whole batch"):
        mf.pipeline(fd, microbatches=2, batch=BATCH)


@pytest.mark.parametrize("scale", [False, True])
def test_counts_of_the_whole_batch_beside(scale: bool) -> None:
    """A sum over counts is one of the batch; rows that need it before they go are refused."""
    with FusionDefinition("balance") as fd:
        x = fd.define_tensor([8, 3], torch.float64, EP, {"ep": Shard(0)}, name="x")
        ids = fd.define_tensor([8, 2], torch.int64, EP, {"ep": Shard(0)}, name="ids")
        n = fd.ops.counts(ids, experts=4, parts=2)
        total = (n.to(torch.float64) * n.to(torch.float64)).sum()
        rows = fd.ops.group_rows(x * total if scale else x, ids, n)
        rows = fd.ops.set(fd.ops.set(rows).on(EP, {"ep": Shard(1)}) * 2).on(EP, {"ep": Shard(0)})
        fd.add_output(fd.ops.ungroup_rows(rows, ids))
        fd.add_output(total)
    if scale:
        with pytest.raises(LoweringError, match="counts of the whole batch before"):
            mf.pipeline(fd, microbatches=2, batch=BATCH)
        return
    values = [torch.randn(8, 3, dtype=torch.float64), router(8, 4, 2)]
    counted = torch.stack([part.flatten().bincount(minlength=4) for part in values[1].chunk(2)])
    wanted = [4 * values[0], (counted.double() ** 2).sum()]
    check_everywhere(mf.pipeline(fd, microbatches=2, batch=BATCH), values, wanted)


#: name -> what is written, what by hand instead, what the verifier says.
BROKEN: dict[str, tuple[str, str, str]] = {
    "counts of another chunk": (
        "%n.i.counted: i64[2,4] (ep=R, chunk(P(sum),2,%i))",
        "%n.i.counted: i64[2,4] (ep=R, chunk(P(sum),2,0))", "counts chunk"),
    "a chunk of whole counts": (
        "%n.i.counted: i64[2,4] (ep=R, chunk(P(sum),2,%i))",
        "%n.i.counted: i64[2,4] (ep=R)", "fetch|counts all rows"),
    "rows of another chunk": (
        "%rows.i: f64[<=8:%n.i.counted,64] of [2,4,8,64] (ep=S1, chunk(2,2,%i))",
        "%rows.i: f64[<=8:%n.i.counted,64] of [2,4,8,64] (ep=S1, chunk(2,2,1))", "chunk"),
    "rows in chunks of columns": (
        "%t_2.i: f64[<=8:%n.i.counted,8] of [2,4,8,8] (ep=S1, chunk(2,2,%i))",
        "%t_2.i: f64[<=16:%n.i.counted,4] of [2,4,8,8] (ep=S1, chunk(3,2,%i))", "other dims"),
    "a post without counts": (" counts=%n.i.counted", "", "post of 2 operands"),
    "other counts of the rows": (
        "rows_mm(%rows.i, %up, %n.ep_S1.i,", "rows_mm(%rows.i, %up, %n.ep_S1.i.other,", "counts"),
    "too many rows of a chunk": ("most=4)", "most=5)", "may have 5 rows by its fetch, and 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_counts_broken_by_hand_are_seen(name: str) -> None:
    written, by_hand, says = BROKEN[name]
    text = str(in_microbatches())
    verify(parse(text))
    if name == "other counts of the rows":
        at = next(x for x in text.splitlines() if "%n.ep_S1.i:" in x)
        other = (
            at.split("#")[0]
            .replace("%n.ep_S1.i", "%n.ep_S1.i.other")
            .replace("narrow(%n.i.all)", "add(%n.ep_S1.i, 1)")
        )
        text = text.replace(at, f"{at}\n{other}")
    assert written in text
    with pytest.raises(ProgramError, match=says):
        verify(parse(text.replace(written, by_hand, 1)))


def test_posts_by_counts_are_in_the_loop() -> None:
    (loop,) = (i for i in in_microbatches().host.instructions if any(map(counts_of, i.body)))
    assert sum(counts_of(i) is not None for i in loop.body) == 4
    assert [i.op for i in loop.body].count("fetch") == 1


@pytest.mark.parametrize("axes", [{"ep": 2, "tp": 2}, {"tp": 2, "ep": 3}], ids=str)
def test_rows_that_are_dense_in_microbatches(axes: dict[str, int]) -> None:
    """A bias is added to what ranks of tp sum up where the experts are: rows are dense."""
    mesh, split, e = DeviceMesh.arange(**axes), {"ep": Shard(0)}, 4
    parts = axes["ep"]
    shapes = (4 * parts, 6), (e, 6, 8), (e, 8, 6), (e, 1, 6)
    of = split, split | {"tp": Shard(2)}, split | {"tp": Shard(1)}, split
    with FusionDefinition("bias") as fd:
        x, up, down, bias = (
            fd.define_tensor(s, torch.float64, mesh, at) for s, at in zip(shapes, of, strict=True)
        )
        ids = fd.define_tensor([4 * parts, 2], torch.int64, mesh, split, name="ids")
        rows = fd.ops.group_rows(x, ids, fd.ops.counts(ids, experts=e, parts=parts))
        rows = fd.ops.set(rows).on(mesh, {"ep": Shard(1)})
        y = fd.ops.grouped_mm(fd.ops.grouped_mm(rows, up), down) + bias
        y = fd.ops.ungroup_rows(fd.ops.set(y).on(mesh, split), ids)
        for result in (y, *mf.grad((y * y).sum(), [x, up, down, bias])):
            fd.add_output(result)
    program = mf.pipeline(fd, microbatches=2, batch={"in": 0, "ids": 0})
    assert "are dense, with zeros" in program.explain()
    assert "is added up along tp before it goes back, as a bias asks" in program.explain()
    values = [torch.randn(*s, dtype=torch.float64) for s in shapes]
    choices = router(4 * parts, e, 2)
    leaves = [v.clone().requires_grad_() for v in values]
    a, u, d, b = leaves
    each = [
        sum(a[i] @ u[k] @ d[k] + b[k, 0] for k in row) for i, row in enumerate(choices.tolist())
    ]
    wanted = torch.stack(each)
    grads = torch.autograd.grad((wanted * wanted).sum(), leaves)
    check_everywhere(program, [*values, choices], [wanted.detach(), *grads])


@pytest.mark.parametrize("has_grads", [False, True])
@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("counts", ["host", "device"])
@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 1}], ids=str)
def test_matrices_split_as_tokens_are(
    axes: dict[str, int], counts: Any, capacity: int | None, has_grads: bool
) -> None:
    """Matrices come to the rows of dp; no post is before a refusal."""
    mesh, of = DeviceMesh.arange(**axes), {"dp": Shard(2)}
    t, how = 16 * mesh.size, {"up": of, "down": of, "capacity": capacity}
    fd = layer(mesh, t, 4, 2, {"ep": Shard(0)}, has_grads, **how)
    program = mf.pipeline(fd, microbatches=8, batch=BATCH, options=mf.Options(counts=counts))
    assert "are dense, with zeros" not in program.explain()
    values = given(t, 4, torch.tensor([[0, 1], [2, 3], [3, 1], [1, 0]] * (t // 4)))
    check_everywhere(program, values, by_loop(*values)[: 4 if has_grads else 1])
    if capacity is not None:
        values[1] = torch.full((t, 2), 1)
        with pytest.raises(mf.CountsError, match="4 rows of part 0 for expert 1, of which there"):
            mf.simulate(program, values)


def test_rows_that_come_together_are_refused() -> None:
    """Three tokens of a rank are less than matrices: their rows meet, dense, on the ranks of dp."""
    mesh, split = DeviceMesh.arange(dp=2, ep=2), {"dp": Shard(0), "ep": Shard(0)}
    ep, t, e, d, h = {"ep": Shard(0)}, 12, 5, 64, 32

    def defined(is_gathered: bool) -> FusionDefinition:
        with FusionDefinition("few") as fd:
            x = fd.define_tensor([t, d], torch.float64, mesh, split, name="x")
            ids = fd.define_tensor([t, 1], torch.int64, mesh, split, name="ids")
            up = fd.define_tensor([e, d, h], torch.float64, mesh, ep | {"dp": Shard(2)})
            down = fd.define_tensor([e, h, d], torch.float64, mesh, ep | {"dp": Shard(1)})
            n = fd.ops.counts(ids, experts=e, parts=4)
            rows = fd.ops.group_rows(x, ids, n)
            rows = fd.ops.set(rows).on(mesh, {"dp": Shard(0), "ep": Shard(1)})
            both = [fd.ops.set(w).on(mesh, ep) if is_gathered else w for w in (up, down)]
            y = fd.ops.grouped_mm(F.silu(fd.ops.grouped_mm(rows, both[0])), both[1])
            y = fd.ops.ungroup_rows(fd.ops.set(y).on(mesh, split), ids)
            for result in (y, *mf.grad((y * y).sum(), [x, up, down])):
                fd.add_output(result)
        return fd

    with pytest.raises(LoweringError, match="come together along dp") as refusal:
        mf.pipeline(defined(False), microbatches=2, batch=BATCH)
    assert "fd.ops.set(w).on(mesh, ...) without dp" in str(refusal.value)
    program = mf.pipeline(defined(True), microbatches=2, batch=BATCH)
    torch.manual_seed(0)
    x, up, down = (torch.randn(*s, dtype=torch.float64) for s in ((t, d), (e, d, h), (e, h, d)))
    values = [x, router(t, e, 1), up, down]
    check_everywhere(program, values, by_loop(*values))


def test_one_rank_counts_on_its_device() -> None:
    fd = layer(DeviceMesh.arange(ep=1), 6, 4, 2, {"ep": Shard(0)})
    program = mf.pipeline(fd, microbatches=3, batch=BATCH, options=mf.Options(counts="device"))
    values = given(6, 4, router(6, 4, 2))
    check_everywhere(program, values, by_loop(*values))
