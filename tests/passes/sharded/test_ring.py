"""Attention whose keys travel around a ring, beside whole tensors in f64: values and gradients."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
import torch
from helpers.drawn import drawn
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard

RING = Options(context="ring")
AXES = [{"cp": 2}, {"cp": 3}, {"cp": 4}, {"cp": 5}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}]


def defined(
    axes: dict[str, int],
    shape: tuple[int, ...],
    zigzag: bool,
    dtype: torch.dtype = torch.float64,
    is_trained: bool = True,
    **how: Any,
) -> mf.FusionDefinition:
    n, heads, shared, rows, f = shape
    placed = {"cp": Shard(2, zigzag=zigzag), "tp": Shard(1), "dp": Shard(0)}
    with mf.FusionDefinition("around") as fd:
        q, k, v = (
            fd.define_tensor(
                [n, h, rows, f],
                dtype,
                DeviceMesh.arange(**axes),
                {a: placed[a] for a in axes},
                name=name,
            )
            for name, h in (("q", heads), ("k", shared), ("v", shared))
        )
        y, sums = mf.ops.attention(q, k, v, enable_gqa=True, **how)
        fd.add_output(y)
        fd.add_output(sums)
        for x in mf.grad((y * y).sum(), [q, k, v]) if is_trained else ():
            fd.add_output(x)
    return fd


def expected(
    tensors: list[Tensor], is_trained: bool = True, **how: Any
) -> tuple[list[Tensor], Tensor]:
    """Attention of whole tensors in f64, with the rows that see a key."""
    q, k, v = (x.clone().double().requires_grad_() for x in tensors)
    times, rows = q.shape[1] // k.shape[1], q.shape[2]
    many = [x.repeat_interleave(times, 1) for x in (k, v)]
    scores = q @ many[0].mT / q.shape[-1] ** 0.5
    far = torch.arange(rows).unsqueeze(-1) - torch.arange(rows)
    far = far + how.get("q_offset", 0) - how.get("k_offset", 0)
    seen = torch.ones(rows, rows, dtype=torch.bool)
    if how.get("is_causal"):
        seen = (far >= 0) & (far < how.get("window", 1 << 20))
    scores = scores.masked_fill(~seen, -torch.inf)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.masked_fill(sums == -torch.inf, 0).unsqueeze(-1)).exp()
    y = weights @ many[1]
    grads = torch.autograd.grad((y * y).sum(), (q, k, v)) if is_trained else ()
    return [x.detach() for x in (y, sums, *grads)], seen.any(-1)


def given(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    n, heads, shared, rows, f = shape
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, h, rows, f, dtype=torch.float64, generator=generator).to(dtype)
        for h in (heads, shared, shared)
    ]


@pytest.mark.parametrize("seed", range(24))
def test_values_sums_and_gradients(seed: int) -> None:
    """Uneven lengths, fewer rows than ranks, one row, no row; rows that see nothing at all."""
    draw = random.Random(seed)
    axes, zigzag = draw.choice(AXES), seed % 2 == 0
    heads, shared = draw.choice([(4, 4), (4, 2), (6, 2)])
    rows = draw.choice([0, 1, 3, 5, 11, 16, 24, 37])
    shape = (draw.choice([1, 2, 3]), heads, shared, rows, 4)
    how = draw.choice([{}, {"is_causal": True}, {"is_causal": True}])
    if how and draw.random() < 0.3:
        how = {**how, **draw.choice([{"window": 3}, {"k_offset": 2}, {"q_offset": 3}])}
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    program = mf.compile(defined(axes, shape, zigzag, dtype, **how), RING)
    tensors = given(shape, dtype, seed)
    want, _ = expected(tensors, **how)
    check_everywhere(program, tensors, [x.to(dtype) for x in want])
    assert "positions split along cp: ring, as context= asks" in program.explain()


@pytest.mark.parametrize(
    ("axes", "heads", "shared"),
    [({"cp": 3}, 4, 1), ({"tp": 2, "cp": 2}, 3, 1), ({"cp": 2, "tp": 2}, 6, 3), ({"cp": 2}, 2, 2)],
)
@pytest.mark.parametrize("zigzag", [False, True])
def test_several_attentions_with_the_same_keys(
    axes: dict[str, int], heads: int, shared: int, zigzag: bool
) -> None:
    """Each has loops of its own, whatever heads other axes split; keys of another length."""
    placed = {"cp": Shard(2, zigzag=zigzag), "tp": Shard(1)}
    layout, mesh = {a: placed[a] for a in axes}, DeviceMesh.arange(**axes)
    shapes = [2, heads, 7, 4], [2, shared, 5, 4], [2, shared, 5, 4]

    def results(q: Any, k: Any, v: Any, attend: Any) -> Any:
        y = attend(q, k, v)
        return y, attend(y.tanh() + q, k, v)

    with mf.FusionDefinition("twice") as fd:
        given = [fd.define_tensor(s, torch.float64, mesh, layout) for s in shapes]
        a, b = results(*given, lambda q, k, v: mf.ops.attention(q, k, v, enable_gqa=True)[0])
        for x in (a, b, *mf.grad((a * a + b * 3).sum(), given)):
            fd.add_output(x)
    wholes = [drawn(*s, seed=n).double().requires_grad_() for n, s in enumerate(shapes)]

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        many = [x.repeat_interleave(heads // shared, 1) for x in (k, v)]
        return (q @ many[0].mT / 2).softmax(-1) @ many[1]

    a, b = results(*wholes, alone)
    want = [a, b, *torch.autograd.grad((a * a + b * 3).sum(), wholes)]
    program = mf.compile(fd, RING)
    check_everywhere(program, [x.detach() for x in wholes], [x.detach() for x in want])
    loops = re.findall(r"  for %[ijk_0-9]+ in 0\.\..*?\n  }\n", str(program), re.S)
    assert sum("attention_" in loop for loop in loops) == 4
    assert all(loop.count("send(") in (2, 4) for loop in loops if "attention_" in loop)


@pytest.mark.parametrize("shape", [[1, 3, 5, 2], [2, 1, 5, 2]])
@pytest.mark.parametrize("axes", [{"cp": 2}, {"tp": 2, "cp": 2}])
def test_expanded_keys_travel(shape: list[int], axes: dict[str, int]) -> None:
    """Keys that an expand repeats over batches, or over heads that an axis splits unevenly."""
    placed = {"cp": Shard(2), "tp": Shard(1)}
    layout, mesh = {a: placed[a] for a in axes}, DeviceMesh.arange(**axes)
    with mf.FusionDefinition("expanded") as fd:
        q, k, v = (
            fd.define_tensor(s, torch.float64, mesh, layout) for s in ([2, 3, 5, 2], shape, shape)
        )
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k.expand(2, 3, 5, 2), v.expand(2, 3, 5, 2)
        )
        for x in (y, *mf.grad((y * y).sum(), [q, k, v])):
            fd.add_output(x)
    wholes = [drawn(*s, seed=n).double().requires_grad_()
              for n, s in enumerate(([2, 3, 5, 2], shape, shape))]  # fmt: skip
    q, k, v = (x.expand(2, 3, 5, 2) for x in wholes)
    y = (q @ k.mT / 2**0.5).softmax(-1) @ v
    want = [y, *torch.autograd.grad((y * y).sum(), wholes)]
    program = mf.compile(fd, RING)
    check_everywhere(program, [x.detach() for x in wholes], [x.detach() for x in want])
    assert "send(" in str(program)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_terms_of_16_bits_are_joined_in_f32(dtype: torch.dtype, zigzag: bool) -> None:
    """The result is as near to f64 as that of one device."""
    shape, how = (2, 4, 2, 40, 8), {"is_causal": True}
    tensors = given(shape, dtype, 0)
    outs = mf.simulate(mf.compile(defined({"cp": 4}, shape, zigzag, dtype, **how), RING), tensors)
    want, _ = expected(tensors, **how)
    one = mf.simulate(mf.compile(defined({"cp": 1}, shape, False, dtype, **how)), tensors)
    for x, y, z in zip(outs.outputs, one.outputs, want, strict=True):
        far, least = ((a.double() - z).norm() / z.norm() for a in (x, y))
        assert far <= 1.5 * least + 1e-6


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("zigzag", [False, True])
def test_a_rank_has_what_two_ranks_have_of_keys(ranks: int, zigzag: bool) -> None:
    """Never all of them: the next shard arrives while it computes with one."""
    program = mf.compile(
        defined({"cp": ranks}, (1, 2, 2, 64 * ranks, 4), zigzag, is_trained=False, is_causal=True),
        RING,
    )
    shard = 2 * 64 * 4 * 8
    for rank in range(ranks):
        assert program.bytes_received(rank) == 2 * (ranks - 1) * shard
    text = str(program)
    (loop,) = re.findall(r"  for %i in 0\.\..*?\n  }\n", text, re.S)
    before, _, behind = loop.partition("next")
    assert before.count("recv") == 2 and "attention_terms" in behind
    assert len(re.findall(r"cp=R\b(?!, chunk)", text)) == 0


@pytest.mark.parametrize(
    ("rows", "is_trained", "form"),
    [(1 << 17, False, "ring"), (1 << 17, True, "gather"), (1 << 10, False, "gather")],
)
def test_bytes_and_time_decide(rows: int, is_trained: bool, form: str) -> None:
    """Work hides what a ring brings; with gradients it brings keys once more: it is not taken."""
    shape = (1, 4, 4, rows, 128)
    fd = defined({"cp": 8}, shape, True, torch.bfloat16, is_trained, is_causal=True)
    (line,) = (x for x in mf.compile(fd).explain().splitlines() if "positions split" in x)
    assert f"along cp: {form}; to the busiest rank: gather " in line
    each = {
        w: int(n.replace(",", "")) for w, n in re.findall(r"(gather|ring) ([\d,]+) bytes", line)
    }
    assert each["ring"] * 2 == each["gather"] * (3 if is_trained else 2)


def test_same_bits_leave_the_ring_out() -> None:
    """Leaves of a ring would begin at different chunks: "auto" takes another form."""
    fd = defined({"cp": 8}, (1, 4, 4, 1 << 17, 128), True, torch.bfloat16, False, is_causal=True)
    (line,) = (x for x in mf.compile(fd).explain().splitlines() if "positions split" in x)
    assert "along cp: ring;" in line
    text = str(mf.compile(fd, Options(same_bits=True)))
    assert "attention(" in text and "send(" not in text


def test_bytes_are_those_that_are_priced() -> None:
    for is_trained in (False, True):
        fd = defined({"cp": 4}, (2, 4, 2, 64, 8), True, is_trained=is_trained, is_causal=True)
        program = mf.compile(fd, RING)
        (priced,) = re.findall(r"ring ([\d,]+) bytes", program.explain())
        received = {program.bytes_received(rank) for rank in range(4)}
        assert received == {int(priced.replace(",", ""))}


def refusal(fd: mf.FusionDefinition, compiled: Any = mf.compile) -> str:
    with pytest.raises(mf.MdfuseError) as caught:
        compiled(fd, RING)
    text = str(caught.value)
    assert 'context="ring" for %' in text and "test_ring.py" in text
    return text


def test_what_cannot_go_around_is_refused_with_a_reason() -> None:
    with mf.FusionDefinition("two_axes") as fd:
        placed = {"a": Shard(2), "b": Shard(2)}
        q, k, v = (fd.define_tensor([1, 2, 8, 4], mesh=DeviceMesh.arange(a=2, b=2), layout=placed)
                   for _ in "qkv")  # fmt: skip
        fd.add_output(mf.ops.attention(q, k, v)[0])
    assert "a ring goes along one axis" in refusal(fd)
    fd = defined({"cp": 2}, (4, 2, 2, 8, 4), False, is_causal=True)
    same = Options(context="ring", same_bits=True)
    assert "leaves of same_bits" in refusal(fd, lambda x, o: mf.compile(x, same))
    batch = dict.fromkeys("qkv", 0)
    text = refusal(fd, lambda x, o: mf.pipeline(x, microbatches=2, batch=batch, options=o))
    assert "microbatches" in text


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_gradient_whose_result_is_split_otherwise(dim: int, is_copy: bool) -> None:
    """A layout that is asked of the result itself, or of a copy: the loops have the query's."""
    mesh, rows = DeviceMesh.arange(cp=2), {"cp": Shard(2)}
    with mf.FusionDefinition("split_otherwise") as fd:
        q, k, v = (fd.define_tensor([2, 4, 8, 4], torch.float64, mesh, rows) for _ in "qkv")
        y, _ = mf.ops.attention(q, k, v, is_causal=True)
        y = (fd.ops.set(y) if is_copy else y).on(mesh, {"cp": Shard(dim)})
        fd.add_output(y)
        for g in mf.grad(y.square().sum(), [q, k, v]):
            fd.add_output(fd.ops.set(g).on(mesh, rows))
    given = [torch.randn(2, 4, 8, 4, dtype=torch.float64) for _ in "qkv"]
    leaves = [x.clone().requires_grad_() for x in given]
    want = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(want.square().sum(), leaves)
    check_everywhere(mf.compile(fd, RING), given, [want.detach(), *grads])


@pytest.mark.parametrize("rows", [1, 6, 11])
@pytest.mark.parametrize("zigzag", [False, True])
def test_windows_and_one_head_of_keys_that_no_axis_splits(zigzag: bool, rows: int) -> None:
    """Heads of the query come together, in the order of its rows."""
    how, shape = {"is_causal": True, "window": 3}, (1, 4, 1, rows, 4)
    fd = defined({"tp": 2, "cp": 3}, shape, zigzag, **how)
    tensors = given(shape, torch.float64, 3)
    check_everywhere(mf.compile(fd, RING), tensors, expected(tensors, **how)[0])


@pytest.mark.parametrize("form", ["ring", "auto"])
@pytest.mark.parametrize("zigzag", [False, True])
def test_rows_that_another_axis_splits_add_up_in_the_loop(zigzag: bool, form: str) -> None:
    """A mask says so: a sum over that axis arrives before a group sends it on around the ring."""
    mesh, shape = DeviceMesh.arange(cp=2, tp=2), [1, 4, 8, 4]
    across = {"cp": Shard(2, zigzag=zigzag)}
    with mf.FusionDefinition("hidden") as fd:
        q, k, v = (fd.define_tensor(shape, torch.float64, mesh, across) for _ in "qkv")
        rows = across | {"tp": Shard(2, zigzag=zigzag)}
        mask = fd.define_tensor([1, 4, 8, 8], torch.float64, mesh, rows)
        y = mf.ops.attention(q, k, v, mask).output
        fd.add_output(y)
        for x in mf.grad((y * y).sum(), [q, k, v]):
            fd.add_output(x)
    if zigzag and form == "ring":
        with pytest.raises(mf.MdfuseError, match="positions are split along cp") as caught:
            mf.compile(fd, RING)
        assert "cp and tp split the rows of its mask in zigzag order" in str(caught.value)
        assert "test_ring.py" in str(caught.value)
        return
    tensors = [*given((1, 4, 4, 8, 4), torch.float64, 2), drawn(1, 4, 8, 8, seed=3).double()]
    a, b, c = (x.clone().requires_grad_() for x in tensors[:3])
    want = (a @ b.mT / 2 + tensors[3]).softmax(-1) @ c
    wants = [want.detach(), *torch.autograd.grad((want * want).sum(), (a, b, c))]
    program = mf.compile(fd, Options(context=form))  # type: ignore[arg-type]
    check_everywhere(program, tensors, wants)
    inside = [j for i in program.host if i.op == "for" for j in i.walk() if j.comm is not None]
    assert {j.comm.kind for j in inside} == ({"Allreduce"} if form == "ring" else set())


@pytest.mark.parametrize("zigzag", [False, True])
def test_wide_sums_are_rounded_behind_the_loop(zigzag: bool) -> None:
    options = Options(context="ring", reduce_dtype=torch.float64)
    shape, dtype = (1, 4, 2, 11, 4), torch.float32
    program = mf.compile(defined({"cp": 2}, shape, zigzag, dtype, is_causal=True), options)
    tensors = given(shape, dtype, 4)
    wants, _ = expected(tensors, is_causal=True)
    check_everywhere(program, tensors, [x.float() for x in wants])
    assert not any(j.fn == "cast" for i in program.host if i.op == "for" for j in i.walk())


@pytest.mark.parametrize("zigzag", [False, True])
def test_joined_terms_change_their_layout_behind_the_loop(zigzag: bool) -> None:
    """One head of keys for all: heads of the query, and of terms, are whole; of sinks not."""
    mesh, across = DeviceMesh.arange(cp=2, tp=2), {"cp": Shard(2, zigzag=zigzag), "tp": Shard(1)}
    with mf.FusionDefinition("sinks") as fd:
        sizes = [1, 4, 8, 4], [1, 1, 9, 4], [1, 1, 9, 4]
        q, k, v = (fd.define_tensor(n, torch.float64, mesh, across) for n in sizes)
        sink = fd.define_tensor([4, 1], torch.float64, mesh, {"tp": Shard(0)})
        y, sums = mf.ops.attention(q, k, v, enable_gqa=True)
        fd.add_output(y * (sums - sink).sigmoid().unsqueeze(-1))
    tensors = [drawn(*n, seed=at).double() for at, n in enumerate((*sizes, [4, 1]))]
    q, k, v, sink = tensors
    scores = q @ k.mT / 2
    with_sink = torch.cat([scores, sink.view(1, 4, 1, 1).expand(1, 4, 8, 1)], -1)
    want = with_sink.softmax(-1)[..., :-1] @ v
    check_everywhere(mf.compile(fd, RING), tensors, [want])


@pytest.mark.parametrize("places", [*itertools.product([False, True], repeat=3)], ids=str)
@pytest.mark.parametrize("rows", [5, 16])
def test_rows_keys_and_masks_in_zigzag_order_and_not(
    places: tuple[bool, bool, bool], rows: int
) -> None:
    """All that is read of rows comes to those of the query before the loop; the report says so.

    Where a rank computes some heads, it has all rows of the mask, in whatever order they were.
    """
    mesh, sizes = DeviceMesh.arange(cp=2), ([2, 4, rows, 8], [2, 2, rows, 8], [2, 2, rows, 8])
    of_rows, of_keys, of_mask = ({"cp": Shard(2, zigzag=z)} for z in places)
    with mf.FusionDefinition("places") as fd:
        q, k, v = (
            fd.define_tensor(n, torch.float64, mesh, at)
            for n, at in zip(sizes, (of_rows, of_keys, of_keys), strict=True)
        )
        mask = fd.define_tensor([1, 1, rows, rows], torch.bool, mesh, of_mask, name="mask")
        y, _ = mf.ops.attention(q, k, v, mask, enable_gqa=True)
        for x in (y, *mf.grad((y * y).sum(), [q, k, v])):
            fd.add_output(x)
    tensors = [drawn(*n, seed=at).double() for at, n in enumerate(sizes)]
    seen = (drawn(1, 1, rows, rows, seed=7) > -0.5) | torch.eye(rows).bool()
    a, b, c = leaves = [x.clone().requires_grad_() for x in tensors]
    b, c = (x.repeat_interleave(2, 1) for x in (b, c))
    want = (a @ b.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ c
    wants = [want.detach(), *torch.autograd.grad((want * want).sum(), leaves)]
    program = mf.compile(fd, RING)
    check_everywhere(program, [*tensors, seen], wants)
    said, is_moved = "resharded to the rows of its query: %mask", places[0] != places[2]
    assert (said in program.explain()) == is_moved
    by_heads = mf.compile(fd, Options(context="heads"))
    check_everywhere(by_heads, [*tensors, seen], wants)
    assert said not in by_heads.explain()


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("shared", [4, 2, 1])
@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_few_rows_beside_repeated_heads_and_padding(
    rows: int, shared: int, axes: dict[str, int]
) -> None:
    """One row, or none, stays split where heads are repeated: keys travel, as of many rows."""
    mesh, split = DeviceMesh.arange(**axes), {"cp": Shard(2)}
    sizes = [2, 4, rows, 8], [2, shared, rows, 8], [2, shared, rows, 8]
    with mf.FusionDefinition("few") as fd:
        q, *keys = (fd.define_tensor(n, torch.float64, mesh, split) for n in sizes)
        padding = fd.define_tensor([2, rows], torch.int64, mesh, {"cp": Shard(1)})
        many = (2, shared, 4 // shared, rows, 8)
        k, v = (x[:, :, None].expand(*many).reshape(2, 4, rows, 8) for x in keys)
        y, _ = mf.ops.attention(q, k, v, (padding > 0)[:, None, None, :])
        for x in (y, *mf.grad((y * y).sum(), [q, *keys])):
            fd.add_output(x)
    tensors = [drawn(*n, seed=at).double() for at, n in enumerate(sizes)]
    here = torch.tensor([[1, 0], [1, 1]])[:, :rows]
    a, b, c = leaves = [x.clone().requires_grad_() for x in tensors]
    b, c = (x.repeat_interleave(4 // shared, 1) for x in (b, c))
    hidden = (here == 0)[:, None, None, :]
    want = (a @ b.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ c
    wants = [want.detach(), *torch.autograd.grad((want * want).sum(), leaves)]
    check_everywhere(mf.compile(fd, RING), [*tensors, here], wants)
