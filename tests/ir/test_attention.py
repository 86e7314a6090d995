"""Attention with its sums, and its gradient, beside torch's autograd of the formula in f64."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard
from mdfuse.frontend.ops.recording import record_several
from mdfuse.ir import attention_kernels
from mdfuse.ir.attention import attend, attend_grad
from mdfuse.ir.attention_blocks import BLOCK

Shape = tuple[int, ...]


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor]:
    """The formula, with all scores at once; a row that is hidden entirely gives zeros."""
    times = q.shape[-3] // k.shape[-3] if how.get("enable_gqa") else 1
    if times > 1:
        k, v = (x.repeat_interleave(times, -3) for x in (k, v))
    scores = q @ k.mT * how.get("scale", 1 / math.sqrt(q.shape[-1] or 1))
    if how.get("is_causal"):
        firsts = (how.get("q_offset", 0), how.get("k_offset", 0))
        rows, keys = (torch.arange(n) + a for n, a in zip(scores.shape[-2:], firsts, strict=True))
        behind = rows.unsqueeze(-1) - keys
        seen = (behind >= 0) & (behind < how.get("window", behind.numel() + 99))
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        hidden = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else None
        scores = scores + mask if hidden is None else hidden
    top = scores.amax(-1, keepdim=True) if k.shape[-2] else scores.sum(-1, keepdim=True)
    powers = (scores - top.detach().clamp(min=-1e9)).exp()
    weights = powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)
    return weights @ v, scores.logsumexp(-1)


def drawn(*shapes: Shape, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


#: shapes of query, key and value; what else is said.
CASES: dict[str, tuple[Shape, Shape, Shape, dict[str, Any]]] = {
    "plain": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {}),
    "causal": ((2, 3, 40, 8), (2, 3, 40, 8), (2, 3, 40, 8), {"is_causal": True}),
    "causal, fewer keys": ((1, 2, 9, 4), (1, 2, 5, 4), (1, 2, 5, 4), {"is_causal": True}),
    "causal, more keys": ((1, 2, 5, 4), (1, 2, 9, 4), (1, 2, 9, 4), {"is_causal": True}),
    "scaled": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"scale": 0.7}),
    "shared heads": ((2, 6, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8), {"enable_gqa": True}),
    "shared, causal": (
        (2, 4, 9, 8), (2, 1, 9, 8), (2, 1, 9, 8), {"enable_gqa": True, "is_causal": True}),
    "long": ((1, 1, 300, 4), (1, 1, 290, 4), (1, 1, 290, 4), {"is_causal": True}),
    "other values": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 3), {}),
    "other values, shared": ((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 3), {"enable_gqa": True}),
    "other values, long": ((2, 300, 8), (2, 290, 8), (2, 290, 3), {"is_causal": True}),
    "no batch": ((4, 7, 8), (4, 9, 8), (4, 9, 8), {}),
    "no heads": ((7, 8), (9, 8), (9, 8), {}),
    "five dims": ((2, 3, 2, 7, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 8), {}),
    "no rows": ((2, 4, 0, 8), (2, 4, 9, 8), (2, 4, 9, 8), {}),
    "no keys": ((2, 4, 7, 8), (2, 4, 0, 8), (2, 4, 0, 8), {}),
    "no batches": ((0, 4, 7, 8), (0, 4, 9, 8), (0, 4, 9, 8), {}),
    "no heads at all": ((2, 0, 7, 8), (2, 0, 9, 8), (2, 0, 9, 8), {}),
    "no features": ((2, 4, 7, 0), (2, 4, 9, 0), (2, 4, 9, 3), {"scale": 1.0}),
    "wide": ((2, 4, 130, 64), (2, 4, 130, 64), (2, 4, 130, 64), {"is_causal": True}),
    "wide, shared": (
        (2, 4, 129, 128), (2, 2, 129, 128), (2, 2, 129, 128),
        {"enable_gqa": True, "is_causal": True}),
    "wide, more keys": ((1, 2, 64, 64), (1, 2, 192, 64), (1, 2, 192, 64), {"scale": 0.2}),
    "later rows": ((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8), {
        "enable_gqa": True, "is_causal": True, "q_offset": 4}),
    "the last row": ((1, 2, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8), {"is_causal": True, "q_offset": 8}),
    "rows behind all keys": (
        (1, 2, 4, 8), (1, 2, 9, 8), (1, 2, 9, 8), {"is_causal": True, "q_offset": 7}),
    "rows before keys": (
        (1, 2, 6, 8), (1, 2, 9, 8), (1, 2, 9, 3), {"is_causal": True, "k_offset": 3}),
    "nothing visible": (
        (1, 2, 3, 8), (1, 2, 9, 8), (1, 2, 9, 8), {"is_causal": True, "k_offset": 3}),
    "window": ((2, 4, 40, 8), (2, 2, 40, 8), (2, 2, 40, 8), {
        "enable_gqa": True, "is_causal": True, "window": 7}),
    "window of one": ((1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), {"is_causal": True, "window": 1}),
    "windows of later rows": ((1, 2, 300, 8), (1, 2, 170, 8), (1, 2, 170, 5), {
        "is_causal": True, "window": 50, "q_offset": 10}),
    "one row": ((1, 2, 1, 5), (1, 2, 1, 5), (1, 2, 1, 5), {}),
}  # fmt: skip
KERNELS = ["torch's", "none"]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels, and our own blocks."""
    if request.param == "none":
        monkeypatch.setattr(attention_kernels, "kernels", lambda *_: None)


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: dict[str, Any]) -> None:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, sums = plain(*leaves, mask, **how)
    (ct,) = drawn(tuple(want.shape))
    grads = torch.autograd.grad((want * ct).sum(), leaves)
    made = attend(q, k, v, mask, **how)
    assert [x.dtype for x in made] == [torch.float64] * 2
    found = attend_grad(q, k, v, *made, ct, mask, **how)
    for x, y in zip((*made, *found), (want, sums, *grads), strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, kernels: None) -> None:
    *shapes, how = CASES[name]
    q, k, v = drawn(*shapes)
    check(q, k, v, None, how)


MASKS: dict[str, Shape] = {
    "plane": (7, 9), "keys": (1, 9), "rows": (7, 1), "heads": (4, 7, 9), "one head": (1, 7, 9),
    "batches": (2, 1, 1, 9), "whole": (2, 4, 7, 9), "of all": (1, 1), "one batch": (1, 4, 7, 9),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bool", "float", "infinite"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, kind: str, kernels: None) -> None:
    """Some rows see no key at all."""
    hows: list[dict[str, Any]] = [{}, {"is_causal": True, "q_offset": 1}, {}]
    hows[2] = {"is_causal": True, "window": 3, "q_offset": 2}
    leads = [(4, (2,)), (2, (2,)), (4, (3, 2)) if name != "batches" else (4, (2,))]
    for (heads, lead), how in itertools.product(leads, hows):
        q, k, v = drawn((*lead, 4, 7, 8), (*lead, heads, 9, 8), (*lead, heads, 9, 8))
        (mask,) = drawn(MASKS[name])
        if kind == "bool":
            mask = mask > 0.3
        if kind == "infinite":
            mask = mask.masked_fill(mask < 0.3, -math.inf)
        check(q, k, v, mask, {**how, "enable_gqa": heads == 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "shared, causal", "other values", "long"])
def test_narrow_dtypes(name: str, dtype: torch.dtype, kernels: None) -> None:
    *shapes, how = CASES[name]
    q, k, v = drawn(*shapes, dtype=dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want, sums = plain(*leaves, None, **how)
    (ct,) = drawn(tuple(want.shape), dtype=dtype)
    grads = torch.autograd.grad((want * ct).sum(), leaves)
    made = attend(q, k, v, **how)
    assert [x.dtype for x in made] == [dtype, torch.float32]
    found = attend_grad(q, k, v, *made, ct, **how)
    far = 2e-6 if dtype == torch.float32 else 3e-2
    for x, y in zip((*made, *found), (want, sums, *grads), strict=True):
        torch.testing.assert_close(x.double(), y.detach(), rtol=far, atol=far)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("shape", [(2048, 8192), (1500, 7000), (1024, 1100)], ids=str)
def test_a_triangle_behind_many_keys_on_a_gpu(shape: tuple[int, int]) -> None:
    """Keys that all rows see are computed apart where that pays; values and gradients are alike."""
    n, m = shape
    how: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "q_offset": m - n}
    at: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    q, ct = (torch.randn(1, 4, n, 128, **at) for _ in range(2))
    k, v = (torch.randn(1, 2, m, 128, **at) for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    many = [x.repeat_interleave(2, 1) for x in leaves[1:]]
    seen = torch.ones(n, m, dtype=torch.bool, device="cuda").tril(m - n)
    scores = (leaves[0] @ many[0].mT / 128**0.5).masked_fill(~seen, -math.inf)
    want = scores.softmax(-1) @ many[1]
    grads = torch.autograd.grad((want * ct).sum(), leaves)
    made = attend(q, k, v, **how)
    results = *made, *attend_grad(q, k, v, *made, ct, **how)
    for x, y in zip(results, (want, scores.logsumexp(-1), *grads), strict=True):
        error = torch.linalg.vector_norm(x.double() - y) / torch.linalg.vector_norm(y)
        assert float(error) < 1e-2


class Largest(TorchDispatchMode):
    """Notes the most elements of one tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = made if isinstance(made, tuple | list) else (made,)
        self.most = max(self.most, *(x.numel() for x in found if isinstance(x, Tensor)))
        return made


class Sums(TorchDispatchMode):
    """Notes the strides of the sums that a library's gradients take."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.strides.append(args[5].stride())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("runs", [[(0, 16), (48, 64)], [(16, 48)], [(0, 32)]])
def test_gradients_of_tiles_take_sums_side_by_side(runs: list[tuple[int, int]]) -> None:
    """Kernels of GPUs read them so, whatever their strides say."""
    n, how = sum(b - a for a, b in runs), {"is_causal": True, "rows": runs}
    q, k, v = drawn((1, 2, n, 8), (1, 2, 64, 8), (1, 2, 64, 8), dtype=torch.float32)
    out, sums = attend(q, k, v, **how)
    with Sums() as noted:
        attend_grad(q, k, v, out, sums, torch.ones_like(out), **how)
    assert noted.strides
    for strides in noted.strides:
        assert strides[0] == 2 * strides[1] and strides[2] == 1 and strides[1] <= n // len(runs)


def test_no_scores_are_kept() -> None:
    """The largest tensor that blocks make grows with the rows, not with their square."""
    most = []
    for n in (512, 2048):
        q, k, v = drawn((1, 2, n, 4), (1, 2, n, 4), (1, 2, n, 3))
        with Largest() as largest:
            made = attend(q, k, v)
            attend_grad(q, k, v, *made, made[0])
        most.append(largest.most)
    assert most == [512 * 2 * BLOCK, 2048 * 2 * BLOCK]


WRONG: dict[str, tuple[tuple[Shape, ...], dict[str, Any], type[Exception]]] = {
    "other features": (((2, 7, 8), (2, 9, 7), (2, 9, 7)), {}, ValueError),
    "other keys": (((2, 7, 8), (2, 9, 8), (2, 8, 8)), {}, ValueError),
    "broadcast": (((2, 7, 8), (1, 9, 8), (1, 9, 8)), {}, ValueError),
    "heads": (((3, 7, 8), (2, 9, 8), (2, 9, 8)), {"enable_gqa": True}, ValueError),
    "mask": (((2, 7, 8), (2, 9, 8), (2, 9, 8), (7, 8)), {}, ValueError),
    "window without causal": (((2, 7, 8), (2, 9, 8), (2, 9, 8)), {"window": 3}, ValueError),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str, device: str) -> None:
    shapes, how, kind = WRONG[name]
    with pytest.raises(kind):
        attend(*(x.to(device) for x in drawn(*shapes)), **how)


def test_dtypes_that_do_not_fit_are_refused() -> None:
    q, k, v, ct = drawn((2, 7, 8), (2, 9, 8), (2, 9, 8), (2, 7, 8))
    made = attend(q, k, v)
    for wrong in (lambda: attend(q.float(), k, v), lambda: attend(*(x.long() for x in (q, k, v)))):
        with pytest.raises(TypeError, match="one floating dtype"):
            wrong()
    with pytest.raises(TypeError, match="bools or floats"):
        attend(q, k, v, torch.ones(7, 9, dtype=torch.int64))
    with pytest.raises(TypeError, match="cotangent"):
        attend_grad(q, k, v, *made, ct.float())
    with pytest.raises(ValueError, match="is not"):
        attend_grad(q, k, v, *made, ct[:, 1:])


# -- on ranks ------------------------------------------------------------------------------------

GRID = DeviceMesh.arange(dp=2, tp=3)
#: Placements with which nothing is asked of other ranks, and what else is said.
PLACES: dict[str, tuple[dict[str, Shard], dict[str, Any]]] = {
    "whole": ({}, {"is_causal": True}),
    "batch": ({"dp": Shard(0)}, {"is_causal": True}),
    "heads": ({"tp": Shard(1)}, {"is_causal": True}),
    "both": ({"dp": Shard(0), "tp": Shard(1)}, {}),
    "one dim": ({"dp": Shard(1), "tp": Shard(1)}, {}),
}


def gradients(how: dict[str, Any], layouts: Any, shapes: tuple[Shape, ...]) -> mf.FusionDefinition:
    with mf.FusionDefinition("attention") as fd:
        q, k, v, ct, *mask = [
            fd.define_tensor(s, torch.float64, GRID, where)
            for s, where in zip(shapes, layouts, strict=True)
        ]
        made = fd.ops.attention(q, k, v, *mask, **how)
        found = record_several("attention_grad", q, k, v, *made, ct, *mask, **how)
        for x in (*made, *found):
            fd.add_output(x)
    return fd


def expected(tensors: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out, sums = plain(q, k, v, *(tensors[4:] or [None]), **how)
    return [x.detach() for x in (out, sums, *torch.autograd.grad(out, (q, k, v), tensors[3]))]


@pytest.mark.parametrize(
    ("place", "heads"), [(p, h) for p in PLACES for h in (6, 3) if (p, h) != ("one dim", 3)]
)
def test_batches_and_heads_stay_where_they_are(place: str, heads: int) -> None:
    where, how = PLACES[place]
    how = {**how, "enable_gqa": True}
    shapes = ((4, 6, 5, 8), (4, heads, 7, 8), (4, heads, 7, 8), (4, 6, 5, 8))
    program = mf.compile(gradients(how, [where] * 4, shapes))
    tensors = drawn(*shapes)
    check_everywhere(program, tensors, expected(tensors, how))
    assert not program.communications


def test_split_rows_of_the_query_add_up_the_rest() -> None:
    """Two reductions, of what keys and values get."""
    shapes = ((4, 6, 5, 8), (4, 6, 7, 8), (4, 6, 7, 8), (4, 6, 5, 8), (5, 7))
    where = {"tp": Shard(2)}
    layouts = [where, {}, {}, where, {"tp": Shard(0)}]
    program = mf.compile(gradients({}, layouts, shapes))
    tensors = drawn(*shapes)
    check_everywhere(program, tensors, expected(tensors, {}))
    assert [c.reduce_op for c in program.communications if c.reduce_op] == ["sum", "sum"]


@pytest.mark.parametrize("seed", range(30))
def test_drawn_layouts(seed: int) -> None:
    draw = random.Random(seed)
    shared, is_causal, has_mask = (draw.random() < 0.5 for _ in range(3))
    n, rows, keys, f = (draw.choice([0, 1, 2, 5]) for _ in range(4))
    how = {"enable_gqa": shared, "is_causal": is_causal, "scale": draw.choice([0.5, 1.0])}
    if is_causal and draw.random() < 0.5:
        how |= {"window": draw.choice([1, 2, 4]), "q_offset": draw.choice([0, 2, 6])}
    heads = draw.choice([1, 2, 4]) if shared else 4
    of_key = (n, heads, keys)
    shapes: tuple[Shape, ...] = ((n, 4, rows, 3), (*of_key, 3), (*of_key, f), (n, 4, rows, f))
    if has_mask and not is_causal:
        shapes = (*shapes, draw.choice([(rows, keys), (n, 1, 1, keys), (4, rows, keys), (1, keys)]))
    options = [Shard(d) for d in range(4)] + [Partial("sum")]

    def layout(ndim: int) -> dict[str, Any]:
        chosen = {axis: draw.choice(options) for axis in GRID.axes if draw.random() < 0.7}
        return {a: p for a, p in chosen.items() if not isinstance(p, Shard) or p.dim < ndim}

    program = mf.compile(gradients(how, [layout(len(x)) for x in shapes], shapes))
    tensors = drawn(*shapes)
    check_everywhere(program, tensors, expected(tensors, how))


#: shapes: batch, heads, heads of keys, rows, features; the axes of a mesh; what is said.
SPLIT: dict[str, tuple[tuple[int, ...], dict[str, int], dict[str, Any]]] = {
    "even": ((1, 4, 4, 16, 8), {"cp": 4}, {}),
    "uneven": ((2, 4, 2, 13, 8), {"cp": 4}, {}),
    "fewer rows than ranks": ((1, 2, 1, 3, 8), {"cp": 4}, {}),
    "one row": ((1, 2, 2, 1, 4), {"cp": 3}, {}),
    "no row": ((1, 2, 2, 0, 4), {"cp": 2}, {}),
    "one head of keys": ((1, 6, 1, 10, 8), {"cp": 2}, {}),
    "window": ((1, 4, 2, 23, 8), {"cp": 4}, {"window": 5}),
    "heads, too": ((1, 4, 2, 11, 8), {"cp": 2, "tp": 2}, {}),
    "batches, too": ((4, 2, 2, 9, 8), {"dp": 2, "cp": 2}, {"window": 3}),
    "rows over two axes": ((1, 2, 2, 11, 8), {"cp": 2, "dp": 2}, {}),
}
PLACED = {"cp": Shard(2), "tp": Shard(1), "dp": Shard(0)}


@pytest.mark.parametrize("name", SPLIT)
def test_causal_rows_stay_where_they_are(name: str) -> None:
    """Keys and values are gathered, and their gradients are scattered: nothing else travels."""
    (n, heads, shared, rows, f), axes, how = SPLIT[name]
    mesh = DeviceMesh.arange(**axes)
    where = {a: PLACED[a] for a in axes} if name != "rows over two axes" else {
        "cp": Shard(2), "dp": Shard(2)}  # fmt: skip
    shapes = (n, heads, rows, f), (n, shared, rows, f), (n, shared, rows, f), (n, heads, rows, f)
    with mf.FusionDefinition("attention") as fd:
        q, k, v, ct = (fd.define_tensor(s, torch.float64, mesh, where) for s in shapes)
        made = fd.ops.attention(q, k, v, is_causal=True, enable_gqa=True, **how)
        for x in (*made, *mf.grad((made.output * ct).sum(), [q, k, v])):
            fd.add_output(x)
    program = mf.compile(fd, mf.Options(context="gather"))
    tensors = drawn(*shapes)
    how = {"is_causal": True, "enable_gqa": True, **how}
    check_everywhere(program, tensors, expected(tensors, how))
    kinds = {"Allgather", "ReduceScatter", "Exchange", "ReduceExchange"}
    assert {c.kind for c in program.communications} <= kinds
    calls = [i for i in program.for_rank(0).walk() if i.fn in ("attention", "attention_grad")]
    assert all(i.kwargs["rows"][0][0] == 0 for i in calls if rows > 1)
    made = [program.for_rank(0).local_shape(i.outputs[0])[2] for i in calls]
    assert made and all(m <= -(-rows // axes["cp"]) for m in made)


def test_extents_that_a_run_chooses() -> None:
    with mf.FusionDefinition("rows") as fd:
        q, k, ct = (fd.define_tensor([-1, 2, n, 8], torch.float64, GRID, {"dp": Shard(0)})
                    for n in (-1, -1, -1))  # fmt: skip
        made = fd.ops.attention(q, k, k, is_causal=True)
        for x in (*made, *record_several("attention_grad", q, k, k, *made, ct, is_causal=True)):
            fd.add_output(x)
    program = mf.compile(fd)
    tensors = drawn((3, 2, 5, 8), (3, 2, 7, 8), (3, 2, 5, 8))
    q, k, ct = tensors
    want = expected([q, k, k, ct], {"is_causal": True})
    for x, y in zip(mf.simulate(program, tensors).outputs, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("features", [2, 5, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_number_of_a_row_is_as_exact_as_its_result(dtype: torch.dtype, features: int) -> None:
    """A row that sees one key has no gradient: two numbers of some hundred cancel."""
    draw = torch.Generator().manual_seed(features)
    q, k, v, ct = (torch.randn(2, 3, 7, features, generator=draw).to(dtype) for _ in "qkvc")
    ct = ct * 100
    ct[..., 0] = 0
    out, sums = attend(q, k, v, is_causal=True)
    weighed = (out.float() * ct.float()).sum(-1)
    dq, dk, dv = attend_grad(q, k, v, weighed, sums, ct, is_causal=True)
    assert dq[..., 0, :].abs().max() < 2e-2, weighed[..., 0].abs().max()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(plain(*leaves, None, is_causal=True)[0], leaves, ct.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip((dq, dk, dv), wanted, strict=True):
        assert (got.double() - want).norm() < tolerance * want.norm()
