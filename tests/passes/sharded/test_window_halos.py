"""Windows over split positions: keys' gradients come in halos, beside torch on whole tensors."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import Options
from mdfuse.ir.attention import attend, attend_grad
from mdfuse.ir.attention_halos import add_halos, attend_grad_in_parts
from passes.sharded.test_context_parallel import defined, expected

GATHER = Options(context="gather")

#: axes; shape: batch, heads, heads of keys, positions, features; window.
CASES: dict[str, tuple[dict[str, int], tuple[int, ...], int]] = {
    "less than a chunk": ({"cp": 4}, (1, 2, 2, 64, 4), 5),
    "a chunk": ({"cp": 4}, (1, 4, 2, 24, 4), 6),
    "one more than a chunk": ({"cp": 4}, (1, 4, 2, 24, 4), 7),
    "two more than a chunk": ({"cp": 4}, (1, 4, 2, 24, 4), 8),
    "several chunks": ({"cp": 4}, (1, 4, 2, 23, 4), 15),
    "all": ({"cp": 4}, (1, 4, 1, 23, 4), 100),
    "its own key": ({"cp": 4}, (1, 2, 2, 9, 4), 1),
    "two keys": ({"cp": 4}, (1, 2, 2, 9, 4), 2),
    "an empty rank": ({"cp": 4}, (1, 2, 2, 5, 4), 3),
    "fewer rows than ranks": ({"cp": 4}, (2, 2, 1, 3, 4), 3),
    "one row": ({"cp": 2}, (1, 2, 2, 1, 4), 3),
    "heads, too": ({"cp": 2, "tp": 2}, (1, 8, 4, 9, 4), 3),
    "one head of keys": ({"cp": 2, "tp": 2}, (1, 4, 1, 9, 4), 3),
    "batches, too": ({"dp": 2, "cp": 3}, (3, 4, 2, 8, 4), 4),
}


def drawn(seed: int) -> tuple[dict[str, int], tuple[int, ...], int]:
    draw = random.Random(seed)
    axes = draw.choice([{"cp": 2}, {"cp": 3}, {"cp": 5}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
    shared, rows = draw.choice([1, 2, 3]), draw.randint(1, 30)
    shape = (draw.choice([1, 2, 3]), shared * draw.choice([1, 2, 3]), shared, rows, 4)
    return axes, shape, draw.choice([1, 2, draw.randint(1, 9), draw.randint(1, 40)])


def keys_before(axes: dict[str, int], rows: int, window: int, at: int) -> tuple[int, int]:
    """The keys before its own that a rank lacks, and its own that each later rank sees, by hand."""
    chunk = -(-rows // axes["cp"])
    starts = [min(r * chunk, rows) for r in range(axes["cp"] + 1)]
    parts = list(itertools.pairwise(starts))
    a, b = parts[at]
    lacks = a - max(a - window + 1, 0) if a < b else 0
    seen = [max(0, b - max(a, first - window + 1)) for first, end in parts[at + 1 :] if first < end]
    return lacks, sum(seen)


def check(axes: dict[str, int], shape: tuple[int, ...], window: int) -> mf.Program:
    program = mf.compile(defined(axes, shape, True, window=window), GATHER)
    check_everywhere(program, *expected(shape, True, window))
    return program


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_windows(name: str) -> None:
    check(*CASES[name])


@pytest.mark.parametrize("seed", range(60))
def test_drawn_windows(seed: int) -> None:
    """Bytes are those of the keys that windows reach, there and back: no rank gets others."""
    axes, shape, window = drawn(seed)
    program = check(axes, shape, window)
    n, _, shared, rows, f = shape
    if "dp" in axes or "tp" in axes:
        return
    each = 2 * 8 * n * shared * f
    for rank in range(axes["cp"]):
        assert program.bytes_received(rank) == each * sum(keys_before(axes, rows, window, rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_few_bits(dtype: torch.dtype) -> None:
    shape, window = (1, 4, 2, 23, 8), 9
    given, (_, _, *wanted) = expected(shape, True, window)
    mesh = mf.DeviceMesh.arange(cp=4)
    with mf.FusionDefinition("windows") as fd:
        q, k, v = (fd.define_tensor(x.shape, dtype, mesh, {"cp": mf.Shard(2)}) for x in given)
        y = fd.ops.attention(q, k, v, is_causal=True, enable_gqa=True, window=window)[0]
        for x in mf.grad((y * y).sum(), [q, k, v]):
            fd.add_output(x)
    outs = mf.simulate(mf.compile(fd, GATHER), [x.to(dtype) for x in given]).outputs
    far = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    for x, want in zip(outs, wanted, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=far, atol=far)


def test_offsets_that_move_windows_take_all_keys() -> None:
    """Rows that see keys behind their own lack other keys than those before."""
    axes, shape = {"cp": 2}, (1, 2, 2, 9, 4)
    program = mf.compile(defined(axes, shape, True, window=3, q_offset=1), GATHER)
    assert not [i for i in program.for_rank(0).walk() if i.fn == "attention_halo_grad"]
    program = mf.compile(defined(axes, shape, True, window=3, q_offset=5, k_offset=5), GATHER)
    assert [i for i in program.for_rank(0).walk() if i.fn == "attention_halo_grad"]
    check_everywhere(program, *expected(shape, True, 3))


def test_windows_of_microbatches() -> None:
    mesh, where = mf.DeviceMesh.arange(cp=2), {"cp": mf.Shard(2)}
    shape, window = (4, 4, 2, 11, 4), 4
    given, (y, _, *wanted) = expected(shape, True, window)
    with mf.FusionDefinition("windows") as fd:
        q, k, v = (fd.define_tensor(x.shape, torch.float64, mesh, where, name=name)
                   for name, x in zip("qkv", given, strict=True))  # fmt: skip
        out = fd.ops.attention(q, k, v, is_causal=True, enable_gqa=True, window=window)[0]
        fd.add_output(out)
        for x in mf.grad((out * out).sum(), [q, k, v]):
            fd.add_output(x)
    program = mf.pipeline(fd, microbatches=2, batch=dict.fromkeys("qkv", 0))
    assert "attention_halo_grad" in str(program)
    for x, want in zip(mf.simulate(program, given).outputs, (y, *wanted), strict=True):
        torch.testing.assert_close(x, want)


# -- the calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "parts", "window"), [(9, 3, 3), (10, 4, 8), (5, 4, 3), (1, 2, 2)])
def test_parts_are_those_of_the_whole_gradient(rows: int, parts: int, window: int) -> None:
    chunk = -(-rows // parts)
    halo = min(window - 1, (parts - 1) * chunk)
    generator = torch.Generator().manual_seed(rows)

    def normal(heads: int) -> Tensor:
        return torch.randn(2, heads, rows, 4, dtype=torch.float64, generator=generator)

    q, k, v, ct = normal(4), normal(2), normal(2), normal(4)
    how: dict[str, Any] = {"is_causal": True, "window": window, "enable_gqa": True}
    out, sums = attend(q, k, v, **how)
    want = attend_grad(q, k, v, out, sums, ct, **how)
    sizes = {"parts": parts, "chunk": chunk, "halo": halo}
    *before, dq, dk, dv = attend_grad_in_parts(q, k, v, out, sums, ct, **sizes, **how)
    ends = range(halo, 0, -chunk)
    made = [dq]
    for x, all_before in zip((dk, dv), before, strict=True):
        blocks = [all_before[..., max(end - chunk, 0) : end, :] for end in ends]
        made.append(add_halos(x, *blocks, chunk=chunk) if blocks else x)
    for x, y in zip(made, want, strict=True):
        torch.testing.assert_close(x, y)
