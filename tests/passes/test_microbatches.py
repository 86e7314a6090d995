"""Microbatches: results are those of torch on one device, in the memory of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.golden import Golden
from helpers.microbatches import LAYOUTS, Net, network
from helpers.programs import program_text

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard, hir
from mdfuse.hir.verify.check import verify

DP = DeviceMesh.arange(dp=2)
POISON = mf.Options(poison=True)


def printed(program: Any) -> str:
    return "\n".join(line.partition("#")[0].rstrip() for line in str(program).splitlines())


def test_the_program(golden: Golden) -> None:
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([16, 4], mesh=DP, layout={"dp": Shard(0)}, name="x")
        w = fd.define_tensor([3, 4], mesh=DP, name="w")
        (dw,) = mf.grad(mf.ops.linear(x, w).sum(), [w])
        fd.add_output(w - dw, reuse=w)
    program = mf.pipeline(fd, microbatches=4, batch={"x": 0})
    golden(printed(program))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_equals_torch(name: str, count: int) -> None:
    """Outputs, a loss, its gradients, their norm, and the update; all from one loop.

    One microbatch takes none.
    """
    net = network(name)
    program = mf.pipeline(net.definition, microbatches=count, batch={"x": 0, "t": 0})
    check(net, program)
    loops = [i for i in program.host if i.op == "for" and i.outputs[0] != "s"]
    assert len(loops) == (count > 1)
    whole = mf.compile(net.definition)
    reduced = [c.kind for c in program.communications if c.reduce_op is not None]
    assert len(reduced) == len([c for c in whole.communications if c.reduce_op is not None])


def check(net: Net, program: mf.Program, options: mf.Options = POISON, **how: Any) -> Any:
    given = [x.clone() for x in net.inputs]
    result = mf.simulate(program, given, options=options, **how)
    for found, want in zip(result.outputs, net.wanted(), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)
    return result


def test_memory_is_that_of_one_microbatch() -> None:
    """Call by call: what a compiled function holds inside is not seen."""
    net, options = network("dp", keeps=False, batch=24), mf.Options(compile="never")
    batch = {"x": 0, "t": 0}
    programs = [
        mf.pipeline(net.definition, microbatches=n, batch=batch, options=options)
        for n in (1, 2, 12)
    ]
    peaks = [max(check(net, program).peak_bytes) for program in programs]
    weights = 2 * sum(p.nbytes for p in net.inputs[2:])  # and what is added up
    inputs = sum(x.nbytes for x in net.inputs[:2]) // 2
    activations = [peak - weights - inputs for peak in peaks]
    assert activations[1] <= 0.55 * activations[0] and activations[2] <= 0.15 * activations[0]


@pytest.mark.parametrize("schedule", range(3))
@pytest.mark.parametrize("streams", [1, 3])
def test_streams_and_shuffled_ranks(schedule: int, streams: int) -> None:
    net, options = network("dp tp"), mf.Options(poison=True, streams=streams)
    program = mf.pipeline(net.definition, microbatches=3, batch={"x": 0, "t": 0}, options=options)
    check(net, program, options, schedule=schedule)


@pytest.mark.parametrize(
    "how",
    [
        {"bucket_bytes": 1 << 20},
        {"prefetch_bytes": 1 << 20},
        {"reduce_dtype": torch.float64, "bucket_bytes": 1 << 20, "streams": 1},
        {"stream_policy": "copy_compute"},
        {"stream_policy": "round_robin"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["dp sp", "fsdp"])
def test_options(name: str, how: dict[str, Any]) -> None:
    net, options = network(name), mf.Options(**how)
    program = mf.pipeline(net.definition, microbatches=3, batch={"x": 0, "t": 0}, options=options)
    check(net, program)


#: What follows from the gradient of a batch whose rows come together over all microbatches.
BEHIND: dict[str, Callable[[Any], Any]] = {
    "itself": lambda g: g,
    "a factor": lambda g: (g * 0.5).tanh(),
    "a branch": lambda g: g.exp() + (g * 2.0).sin(),
    "a sum": lambda g: (g * g).sum(),
    "both": lambda g: g.sum() * g.exp(),
}


@pytest.mark.parametrize("how", [{}, {"reduce_dtype": torch.float64}], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize("name", BEHIND)
def test_gradients_that_come_together_behind_all_microbatches(
    name: str, schedule: Any, how: Any
) -> None:
    """Three rows over two ranks, and their gradients a Partial: they come together as a whole."""
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([3, 2, 4], mesh=DP, layout={"dp": Shard(0)}, name="x")
        w = fd.define_tensor([2, 4], mesh=DP, layout={"dp": Shard(0)}, name="w")
        b = fd.define_tensor([2], mesh=DP, layout={"dp": Shard(0)}, name="b")
        y = mf.ops.linear(x, w, b).on(DP, {"dp": Shard(2)})
        dx, db = mf.grad((y * y).sum(), [x, b])
        fd.add_output(db)
        fd.add_output(BEHIND[name](dx))
    options = mf.Options(poison=True, **how)
    program = mf.pipeline(fd, microbatches=3, batch={"x": 0}, schedule=schedule, options=options)
    given = [torch.randn(n).requires_grad_() for n in ((3, 2, 4), (2, 4), (2,))]
    dx, _, db = torch.autograd.grad((F.linear(*given) ** 2).sum(), given)
    found = mf.simulate(program, [x.detach() for x in given], options=options).outputs
    for got, want in zip(found, [db, BEHIND[name](dx)], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_gradient_reads_rows_that_are_together_already() -> None:
    """The forward gathers three rows over two ranks; the gradient reads them there."""
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([3, 2, 4], mesh=DP, layout={"dp": Shard(0)}, name="x")
        w = fd.define_tensor([2, 4], mesh=DP, layout={"dp": Shard(0)}, name="w")
        y = mf.ops.linear(x, w).on(DP, {"dp": Shard(2)})
        fd.add_output(mf.grad((y * y).sum(), [w])[0])
    program = mf.pipeline(fd, microbatches=3, batch={"x": 0}, schedule="1f1b", options=POISON)
    given = [torch.randn(n).requires_grad_() for n in ((3, 2, 4), (2, 4))]
    (want,) = torch.autograd.grad((F.linear(*given) ** 2).sum(), given[1:])
    (grad,) = mf.simulate(program, [x.detach() for x in given], options=POISON).outputs
    torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)
    assert [c.kind for c in program.communications] == ["Allgather"]


def test_a_product_with_rows_that_come_together_is_refused() -> None:
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([3, 2, 4], mesh=DP, layout={"dp": Shard(2)}, name="x")
        w = fd.define_tensor([2, 4], mesh=DP, layout={"dp": Shard(1)}, name="w")
        y = mf.ops.linear(x, w).on(DP, {"dp": Shard(0)})
        fd.add_output(mf.grad((y * y).sum(), [w])[0])
    with pytest.raises(mf.MdfuseError, match="ranks bring the whole batch together") as error:
        mf.pipeline(fd, microbatches=3, batch={"x": 0}, schedule="1f1b")
    assert "it follows from %" in str(error.value) and "even parts" in str(error.value)


def test_parts_of_16_bits_are_added_up_in_f32() -> None:
    """400 parts, of which each is lost in a sum of 8 bits of mantissa."""
    with mf.FusionDefinition("sums") as fd:
        x = fd.define_tensor([400, 4], torch.bfloat16, DP, {}, name="x")
        fd.add_output(x.sum(0))
    program = mf.pipeline(fd, microbatches=400, batch={"x": 0})
    x = torch.rand(400, 4).bfloat16() + 1
    (found,) = mf.simulate(program, [x], options=POISON).outputs
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), x.double().sum(0), rtol=2**-8, atol=0)
    alone = torch.zeros(4, dtype=torch.bfloat16)
    for row in x:
        alone += row
    assert (alone.double() - x.double().sum(0)).abs().max() > 50  # so the case tells


def test_terms_of_ranks_in_16_bits_are_added_up_in_f32() -> None:
    """Each rank has a term of the gradient of a factor before a product with split columns."""
    mesh, dtype = DeviceMesh.arange(tp=2), torch.bfloat16
    with mf.FusionDefinition("terms") as fd:
        x = fd.define_tensor([400, 6], dtype, mesh, name="x")
        g = fd.define_tensor([6], dtype, mesh, name="g")
        v = fd.define_tensor([4, 6], dtype, mesh, {"tp": Shard(0)}, name="v")
        loss = mf.ops.linear(x * g, v).to(torch.float32).square().mean()
        (dg,) = mf.grad(loss, [g])
        fd.add_output(dg)
    program = mf.pipeline(fd, microbatches=4, batch={"x": 0})
    verify(program.host)
    (of_ranks,) = (c for c in program.communications if c.kind == "Allreduce")
    assert of_ranks.axes == ("tp",) and "round_terms(%dg.partial.sum" in str(program)
    draw = torch.Generator().manual_seed(2)
    given = [torch.rand(n, generator=draw).to(dtype) for n in ((400, 6), (6,), (4, 6))]
    (got,) = mf.simulate(program, given, options=POISON).outputs
    wide = [y.double().requires_grad_() for y in given]
    F.linear(wide[0] * wide[1], wide[2]).square().mean().backward()
    torch.testing.assert_close(got.double(), wide[1].grad, rtol=4e-3, atol=0.0)


@pytest.mark.parametrize("bucket", [0, 1 << 20])
def test_sums_in_16_bits_are_rounded_once_where_they_are_reduced_in_f32(bucket: int) -> None:
    """Sums and products of whole numbers, exact in f32: over rows, microbatches and ranks.

    Sums are reduced in f32 in any case, products where that is asked for.
    """
    mesh = DeviceMesh.arange(dp=4)
    with mf.FusionDefinition("sums") as fd:
        x = fd.define_tensor([128, 16], torch.bfloat16, mesh, {"dp": Shard(0)}, name="x")
        for y in (x.sum(0), x.T @ x):
            fd.add_output(fd.ops.set(y).on(mesh, {}))
    x = torch.randint(0, 8, (128, 16), generator=torch.Generator().manual_seed(0))
    exact = [x.sum(0), x.T @ x]
    found = {}
    for dtype in (None, torch.float32):
        options = mf.Options(reduce_dtype=dtype, bucket_bytes=bucket, poison=True)
        program = mf.pipeline(fd, microbatches=8, batch={"x": 0}, options=options)
        posts = [i for i in program.host.walk() if i.comm is not None]
        assert len(posts) == (1 if bucket and dtype else 2)
        found[dtype] = mf.simulate(program, [x.bfloat16()], options=options).outputs
    assert found[torch.float32] and all(
        map(torch.equal, found[torch.float32], [y.bfloat16() for y in exact])
    )
    are_exact = [*map(torch.equal, found[None], [y.bfloat16() for y in exact])]
    assert are_exact == [True, False]  # so it tells


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "prod": lambda x: x.prod(0),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(dim=(0, 1)),
    "place of the max": lambda x: x.max(0)[1],
    "norm of columns": lambda x: (x * x).sum(0).sqrt(),
    "variance": lambda x: x.var(0),
    "with itself": lambda x: x.T @ x,
}


@pytest.mark.parametrize("layout", [{}, {"dp": Shard(0)}, {"dp": Shard(1)}], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, layout: Any) -> None:
    with mf.FusionDefinition("reduced") as fd:
        x = fd.define_tensor([12, 6], torch.float64, DP, layout, name="x")
        fd.add_output(REDUCTIONS[name](x * 2.0))
    x = torch.randn(12, 6, dtype=torch.float64)
    is_extreme = "max" in name or "min" in name
    for count in (1, 3, 6) if is_extreme else (1, 3, 4, 5, 6):  # some do not divide the rows
        program = mf.pipeline(fd, microbatches=count, batch={"x": 0})
        (found,) = mf.simulate(program, [x], options=POISON).outputs
        torch.testing.assert_close(found, REDUCTIONS[name](x * 2.0), rtol=1e-12, atol=1e-12)


def test_a_partial_input_is_added_up() -> None:
    with mf.FusionDefinition("partial") as fd:
        x = fd.define_tensor([8, 3], torch.float64, DP, {"dp": Partial()}, name="x")
        fd.add_output(x.sum(0))
    parts = torch.randn(2, 8, 3, dtype=torch.float64)
    program = mf.pipeline(fd, microbatches=4, batch={"x": 0})
    result = mf.simulate(program, per_rank=[{"x": p} for p in parts], options=POISON)
    torch.testing.assert_close(result.outputs[0], parts.sum((0, 1)))


def test_attention_and_a_loss_that_counts() -> None:
    """Several results in a loop; a loop that counts labels before the one that computes."""
    b, s, heads, d, vocabulary = 8, 6, 4, 8, 24
    wide = heads * d

    def model(ids: Any, labels: Any, e: Any, wq: Any, wk: Any, wv: Any) -> Any:
        h = F.embedding(ids, e)
        q = F.linear(h, wq).view(b, s, heads, d).transpose(1, 2)
        k, v = (F.linear(h, w).view(b, s, 2, d).transpose(1, 2) for w in (wk, wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + y.transpose(1, 2).reshape(b, s, wide)
        return F.cross_entropy(F.linear(h, e).flatten(0, 1), labels.flatten())

    shapes = [vocabulary, wide], [wide, wide], [2 * d, wide], [2 * d, wide]
    layout = {"dp": Shard(0)}
    with mf.FusionDefinition("lm") as fd:
        ids = fd.define_tensor([b, s], torch.int64, DP, layout, name="ids")
        labels = fd.define_tensor([b, s], torch.int64, DP, layout, name="labels")
        weights = [fd.define_tensor(shape, torch.float64, DP, layout) for shape in shapes]
        loss = model(ids, labels, *(fd.ops.set(w).on(DP, {}) for w in weights))
        fd.add_output(loss)
        for w, gradient in zip(weights, mf.grad(loss, weights), strict=True):
            fd.add_output(w - gradient, reuse=w)
    tokens = torch.randint(0, vocabulary, (2, b, s))
    tokens[1, 0, :3] = -100
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    leaves = [w.clone().requires_grad_() for w in given]
    want = model(*tokens, *leaves)
    want.backward()
    news = [(w - w.grad).detach() for w in leaves if w.grad is not None]
    for count in (1, 2, 4):
        program = mf.pipeline(fd, microbatches=count, batch={"ids": 0, "labels": 0})
        copies = [w.clone() for w in given]
        result = mf.simulate(program, [*tokens, *copies], options=POISON)
        for found, right in zip(result.outputs, [want.detach(), *news], strict=True):
            torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)


def test_a_saved_program_is_the_same() -> None:
    program = mf.pipeline(network("dp tp").definition, microbatches=3, batch={"x": 0, "t": 0})
    assert printed(hir.parse(str(program))) == printed(program)


MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda x, w: F.linear(x.flatten(0, 1), w).tanh(),
    "rows, and back": lambda x, w: F.linear(x.flatten(0, 1), w).view(*x.shape[:2], -1).amax(1),
    "in the backward": lambda x, w: F.linear(x, w).softmax(-1),
    "means": lambda x, w: F.linear(x.mean(1), w).tanh(),
}


#: Rows of the batch, ranks, microbatches.
UNEVEN_RANKS = [(5, 2, 1), (3, 2, 3), (4, 3, 2), (2, 3, 1)]
UNEVEN_MICROBATCHES = [(7, 1, 4), (14, 2, 3), (14, 2, 8)]


@pytest.mark.parametrize("weight", [{}, {"dp": Shard(0)}], ids=["whole", "split"])
@pytest.mark.parametrize(("rows", "ranks", "count"), [*UNEVEN_RANKS, *UNEVEN_MICROBATCHES])
@pytest.mark.parametrize("name", MERGED)
def test_rows_that_are_merged_where_parts_are_uneven(
    name: str, rows: int, ranks: int, count: int, weight: Any
) -> None:
    """Ranks gather the batch for the reshape, and then take it in microbatches."""
    f, mesh = MERGED[name], DeviceMesh.arange(dp=ranks)
    x, w = (torch.randn(shape, dtype=torch.float64) for shape in ((rows, 4, 6), (4, 6)))
    with mf.FusionDefinition("merged") as fd:
        hx = fd.define_tensor(x.shape, x.dtype, mesh, {"dp": Shard(0)}, name="x")
        hw = fd.define_tensor(w.shape, w.dtype, mesh, weight)
        loss = f(hx, hw).square().sum()
        for out in (loss, *mf.grad(loss, [hx, hw])):
            fd.add_output(out)
    program = mf.pipeline(fd, microbatches=count, batch={"x": 0})
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    total = f(*leaves).square().sum()
    wanted = [total.detach(), *torch.autograd.grad(total, leaves)]
    found = mf.simulate(program, [x, w], options=POISON).outputs
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_attention_to_all_samples_that_ranks_bring_together() -> None:
    """Queries are cut; gradients of keys and values are sums over what is cut."""
    layout = {"dp": Shard(1)}
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([3, 6, 8], torch.float64, DP, layout, name="x")
        w = [fd.define_tensor([8, 8], torch.float64, DP) for _ in "qkv"]
        loss = F.scaled_dot_product_attention(*(F.linear(x, u) for u in w)).square().mean()
        for y in (loss, *mf.grad(loss, w)):
            fd.add_output(y)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 1}, options=POISON)
    given = [torch.randn(3, 6, 8, dtype=torch.float64), *torch.randn(3, 8, 8, dtype=torch.float64)]
    found = mf.simulate(program, given, options=POISON).outputs
    leaves = [u.clone().requires_grad_() for u in given[1:]]
    y = F.scaled_dot_product_attention(*(F.linear(given[0], u) for u in leaves)).square().mean()
    for got, want in zip(found, [y.detach(), *torch.autograd.grad(y, leaves)], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# -- what cannot be ------------------------------------------------------------------------------


def defined(shape: list[int], build: Callable[[Any], Any]) -> mf.FusionDefinition:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor(shape, mesh=DP, layout={}, name="x")
        fd.add_output(build(x))
    return fd


#: What is computed of x: f32[7,4], why not in 3 microbatches of dim 0, and what to do instead.
WHOLE: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "softmax": (
        lambda x: x.softmax(0),
        "needs dim 0 of %x, the batch's, as a whole",
        "another dim",
    ),
    "product with itself": (
        lambda x: x @ x.T,
        "its dims 0 and 1 are both the batch's: each sample meets all others",
        "name another dim in batch=, or take the batch at once: mf.compile(definition)",
    ),
    "merged otherwise": (
        lambda x: x.reshape(2, 14),
        "do not fall together in [7, 4] and [2, 14] of reshape",
        "choose as many as divide the rows of each rank, or take the batch at once",
    ),
    "merged behind another dim": (
        lambda x: x.reshape(7, 2, 2).transpose(0, 1).reshape(14, 2),
        "reshape needs dim 1 of %t_1, the batch's, as a whole",
        "let the batch be the first of the dims that are merged",
    ),
    "median": (lambda x: x.sort(0)[0], "sort needs dim 0 of %x", "name another dim in batch="),
    "slice": (lambda x: x[:4].amax(0), "slice needs dim 0 of %x", "name another dim in batch="),
    "attention to all samples": (
        lambda x: F.scaled_dot_product_attention(x.sin(), x.cos(), x),
        "needs all of %t_1, whose dim 0 is the batch's",
        "name another dim in batch=",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_the_batch_is_refused(name: str) -> None:
    build, because, hint = WHOLE[name]
    fd = defined([7, 4], build)
    with pytest.raises(mf.LoweringError, match="microbatches") as raised:
        mf.pipeline(fd, microbatches=3, batch={"x": 0})
    for said in ("test_microbatches.py", because, hint):
        assert said in str(raised.value)


@pytest.mark.parametrize("name", WHOLE)
def test_one_microbatch_is_the_batch(name: str) -> None:
    build, x = WHOLE[name][0], torch.randn(7, 4)
    program = mf.pipeline(defined([7, 4], build), microbatches=1, batch={"x": 0})
    torch.testing.assert_close(mf.simulate(program, [x]).outputs[0], build(x))


@pytest.mark.parametrize(("rows", "count"), [(7, 5), (3, 2), (2, 4), (1, 2)])
@pytest.mark.parametrize("layout", [{}, {"dp": Shard(0)}], ids=["whole", "split"])
def test_the_maximum_of_a_microbatch_without_rows(layout: Any, rows: int, count: int) -> None:
    """Three rows are two and one on two ranks: the second has none in its second microbatch."""
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([rows, 4], torch.float64, DP, layout, name="x")
        y = x.sin()
        found = torch.logsumexp(y, (0, 1))
        for made in (y.amax(0), y.amin(), found, *mf.grad(found, [x])):
            fd.add_output(made)
    program = mf.pipeline(fd, microbatches=count, batch={"x": 0})
    given = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    y = given.sin()
    wanted = y.amax(0), y.amin(), torch.logsumexp(y, (0, 1))
    (dx,) = torch.autograd.grad(wanted[-1], [given])
    outputs = mf.simulate(program, [given.detach()], options=POISON).outputs
    for got, want in zip(outputs, (*wanted, dx), strict=True):
        torch.testing.assert_close(got, want.detach())


def test_a_weight_is_no_batch() -> None:
    with mf.FusionDefinition("f") as fd:
        x, w = (fd.define_tensor([6, 4], mesh=DP, name=n) for n in "xw")
        fd.add_output(F.linear(x, w))
    with pytest.raises(mf.LoweringError, match="its dim 1 is dim 0 of %w") as raised:
        mf.pipeline(fd, microbatches=3, batch={"x": 0, "w": 0})
    assert "name in batch= the inputs whose rows are samples" in str(raised.value)


def test_rows_that_the_batch_is_merged_into_are_found() -> None:
    """Naming them as the batch is refused; without them it is right."""
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([6, 3, 4], torch.float64, DP, name="x")
        t = fd.define_tensor([18], torch.int64, DP, name="t")
        fd.add_output(F.cross_entropy(x.reshape(-1, 4), t))
    with pytest.raises(mf.DefinitionError, match="%x has 6 rows, %t has 18 rows") as raised:
        mf.pipeline(fd, microbatches=4, batch={"x": 0, "t": 0})
    assert "none that the batch is only a part of" in str(raised.value)
    x, t = torch.randn(6, 3, 4, dtype=torch.float64), torch.randint(4, (18,))
    (found,) = mf.simulate(mf.pipeline(fd, microbatches=4, batch={"x": 0}), [x, t]).outputs
    torch.testing.assert_close(found, F.cross_entropy(x.reshape(-1, 4), t), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"microbatches": 0, "batch": {"x": 0}}, "microbatches=0"),
        ({"microbatches": 2.0, "batch": {"x": 0}}, "microbatches=2.0"),
        ({"microbatches": True, "batch": {"x": 0}}, "microbatches=True"),
        ({"microbatches": 2, "batch": {}}, "batch={}"),
        ({"microbatches": 2, "batch": "x"}, "batch='x'"),
        ({"microbatches": 2, "batch": {"y": 0}}, "no tensor of that name"),
        ({"microbatches": 2, "batch": {"x": 2}}, "has 2 dims"),
        ({"microbatches": 2, "batch": {"x": "0"}}, "has 2 dims"),
    ],
    ids=str,
)
def test_wrong_arguments(how: dict[str, Any], says: str) -> None:
    with pytest.raises(mf.DefinitionError, match=says):
        mf.pipeline(defined([8, 4], lambda x: x * 2), **how)


def test_what_is_added_up_is_not_for_users_to_say() -> None:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([8, 4], mesh=DP, layout={}, name="x")
        y = x.sum(0)
        y.on(DP, {}, stream=mf.Stream.over("sum", 2))
        fd.add_output(y)
    with pytest.raises(mf.LoweringError, match=r"stream\(P\(sum\),2\)") as raised:
        mf.compile(fd)
    assert "mf.pipeline" in str(raised.value)


def test_streams_of_users_are_refused_beside_microbatches() -> None:
    """Their dim is none of the batch's, and would be taken for it."""
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([8, 6], mesh=DP, layout={}, name="x")
        w = fd.define_tensor([6, 4], mesh=DP, layout={})
        doubled = (w * 2).on(DP, {}, stream=mf.Stream(0, 3))
        fd.add_output((x @ doubled).sum(0))
    with pytest.raises(mf.DefinitionError, match="has a stream of its own"):
        mf.pipeline(fd, microbatches=2, batch={"x": 0})


@pytest.mark.parametrize("op", ["avg", "band", 3])
def test_only_some_ops_join_parts(op: Any) -> None:
    with pytest.raises(mf.LayoutError, match="max, min, prod, sum"):
        mf.Stream.over(op, 2)


def test_batches_of_other_lengths_are_refused() -> None:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([8, 4], mesh=DP, layout={}, name="x")
        y = fd.define_tensor([4, 8], mesh=DP, layout={}, name="y")
        fd.add_output(x + y.T)
    with pytest.raises(mf.DefinitionError, match="%x has 8 rows, %y has 4 rows"):
        mf.pipeline(fd, microbatches=2, batch={"x": 0, "y": 0})


# -- what the verifier sees ----------------------------------------------------------------------

SUMS = program_text("microbatches/sums")


def test_sums_by_hand() -> None:
    program = hir.parse(SUMS)
    verify(program)
    x = torch.randn(8, 3)
    (found,) = mf.simulate(program, [x], options=POISON).outputs
    torch.testing.assert_close(found, x.sum(0) * 2)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("in 0..4", "in 0..3", "only the parts of 3 chunks"),
        ("in 0..4", "in 1..4", "only the parts of 3 chunks"),
        ("in 0..4", "in 0..5", "no chunk 4"),
        ("accumulate(%z.i)\n", "accumulate(%z.i)\n    %z = accumulate(%z.i)\n", "chunk 0"),
        ("accumulate(%z.i)", "add(%z, %z.i)", "only added to what there is"),
        ("accumulate(%z.i)", "set(%z.i)", "makes"),
        ("sum(%x.i, dims=[0])", "max(%x.i, dims=[0])", r"P\(max\)"),
        ("chunk(P(sum),4,%i)) = sum", "chunk(P(sum),5,%i)) = sum", "makes"),
        ("chunk(P(sum),4,%i)) = sum", "chunk(P(max),4,%i)) = sum", "makes"),
        ("(dp=R, chunk(P(sum),4,%i)) = sum", "(dp=R) = sum", "makes"),
        ("(%z.i)\n", "(%z.i)\n    %q: f32[3] (dp=R) = neg(%z)\n", "parts of 1"),
        ("(%z.i)\n", "(%z.i)\n    %z = full(0, shape=[3], dtype=f32)\n", "parts of 1"),
        ("%z: f32[3] (dp=R) = alloc\n", "", "no buffer|nothing|%z"),
        ("accumulate(%z.i)", "accumulate(%x.i)", "shape|part"),
    ],
)  # fmt: skip
def test_wrong_sums_are_refused(old: str, new: str, says: str) -> None:
    assert old in SUMS
    with pytest.raises(mf.MdfuseError, match=says):
        verify(hir.parse(SUMS.replace(old, new)))


def test_parts_of_two_values_are_not_one_sum() -> None:
    more = "    %v.i: f32[3] (dp=R, chunk(P(sum),4,%i)) = sum(%x.i, dims=[0])\n"
    other = "    if %i < 2 {\n      %z = accumulate(%v.i)\n    }\n"
    text = SUMS.replace("    %z = acc", more + other + "    %z = acc")
    with pytest.raises(mf.MdfuseError):
        verify(hir.parse(text))


def test_steps_on_a_rank(unjoined: None) -> None:
    """Plans are kept from run to run, and add up from the first part again."""
    net = network("one")
    program = mf.pipeline(net.definition, microbatches=4, batch={"x": 0, "t": 0})
    x, t, *weights = [x.clone() for x in net.inputs]
    names = program.fusion.inputs[2:]
    taking = mf.Step(program, dict(zip(names, weights, strict=True)))
    given = net.inputs
    for _ in range(4):
        wanted = Net(net.definition, given, net.keeps).wanted()
        loss, norm, h = taking(x, t)
        for found, want in zip((loss, norm, *weights, h), wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)
        given = [x, t, *(w.clone() for w in weights)]


@pytest.mark.parametrize("wide", [None, torch.float64])
def test_rows_that_a_wide_sum_gives_to_other_ranks(wide: torch.dtype | None) -> None:
    """The rows of a sum over features are split: the cast to 16 bits is behind the loop."""
    first, second = (DeviceMesh(ranks, axes=("a",)) for ranks in ([0, 1], [2, 3]))
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([4, 6], torch.bfloat16, first, {"a": Shard(1)})
        w = fd.define_tensor([3, 6], torch.bfloat16, first, {"a": Shard(1)})
        h = fd.ops.set(fd.ops.linear(x, w)).on(second)
        v = fd.define_tensor([5, 3], torch.bfloat16, second, {"a": Shard(1)})
        y = fd.ops.linear(h, v).on(second, {"a": Shard(0)})
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y * 2))
    options = mf.Options(reduce_dtype=wide, poison=True)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0}, options=options)
    given = [torch.randint(-3, 4, shape).bfloat16() for shape in ((4, 6), (3, 6), (5, 3))]
    rows, total = mf.simulate(program, given).outputs
    want = given[0].double() @ given[1].double().T @ given[2].double().T
    torch.testing.assert_close(rows.double(), want, rtol=0.02, atol=0.5)
    torch.testing.assert_close(total.double(), (want * 2).sum(), rtol=0.03, atol=2.0)
