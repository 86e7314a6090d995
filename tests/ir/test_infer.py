"""What torch makes of operands: told by few elements where these tell, and asked for once."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.drawn_rows import drawn_call
from torch import Tensor

import mdfuse as mf
from mdfuse.frontend.handle import Handle
from mdfuse.ir import infer
from mdfuse.ir.graph import Value
from mdfuse.ir.ops import TABLE


def dtype_of(compute: Callable[[Any], Any], dtype: torch.dtype) -> torch.dtype:
    mf.FusionCache.reset()
    with mf.FusionDefinition("f") as fd:
        y: Handle = compute(fd.define_tensor([2, 2], dtype))
        fd.add_output(y)
    return y.dtype


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_numbers_that_are_equal_give_what_torch_gives_for_each(
    dtype: torch.dtype, default: torch.dtype
) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for number in (True, 1, 1.0, 1):
            want = (torch.ones(2, 2, dtype=dtype) * number).dtype
            assert dtype_of(lambda x, number=number: x * number, dtype) == want
    finally:
        torch.set_default_dtype(before)


def test_equal_layers_ask_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = infer.infer

    def counted(op: Any, *arguments: Any) -> Any:
        asked.append(op.name)
        return ask(op, *arguments)

    monkeypatch.setattr(infer, "infer", counted)
    infer.ANSWERS.empty()
    mf.FusionCache.reset()
    with mf.FusionDefinition("layers") as fd:
        x = fd.define_tensor([3, 4])
        for _ in range(5):
            x = fd.ops.tanh(x @ fd.define_tensor([4, 4]))
        fd.add_output(x)
    assert sorted(asked) == ["matmul", "tanh"]
    assert fd.fusion.values[fd.fusion.outputs[0]].shape == (3, 4)


# -- few elements --------------------------------------------------------------------------------


def relaid(drawn: random.Random, x: Any, floats: torch.dtype) -> tuple[Any, Any]:
    """A value in some memory order, some of whose dims repeat, and an operand that lies so."""
    if not isinstance(x, Tensor):
        return x, x
    order = tuple(drawn.sample(range(x.ndim), x.ndim) if drawn.random() < 0.7 else range(x.ndim))
    repeats = frozenset(d for d, n in enumerate(x.shape) if n > 1 and drawn.random() < 0.05)
    dtype = floats if x.dtype == torch.float32 else x.dtype
    value = Value(
        name="x", shape=tuple(x.shape), dtype=dtype, kind="tensor", order=order, expanded=repeats
    )
    strides = infer.meta_tensor(value).stride()
    made = torch.empty(x.numel(), dtype=dtype)
    kept = [1 if d in repeats else n for d, n in enumerate(x.shape)]
    made.as_strided(kept, strides).copy_(x[tuple(map(slice, kept))])
    return value, made.as_strided(x.shape, strides)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.is_told_by_few])
def test_few_elements_tell_what_torch_makes_of_all(name: str) -> None:
    """Also where dims of one element, broadcast ones or repeated ones decide about the order."""
    row, drawn, told = TABLE[name], random.Random(name), 0
    for _ in range(150):
        operands, attrs = drawn_call(drawn, row)
        floats = drawn.choice((torch.float32, torch.float64))
        pairs = [relaid(drawn, x, floats) for x in operands]
        values, given = [value for value, _ in pairs], [x for _, x in pairs]
        found = infer.told_by_few(row, values, attrs)
        if found is None:
            continue
        made = infer.as_results(row.call(*given, **attrs))
        for a, b in zip(found, made, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            order = range(b.ndim) if row.is_plain else infer.memory_order(b.stride())
            assert infer.memory_order(a.stride()) == tuple(order), (given, attrs)
            assert row.is_plain or infer.expanded_dims(a) == infer.expanded_dims(b)
        told += 1
        if told == 40:
            return
    assert told >= 3, told


FIRST = """
import sys, torch
import mdfuse as mf
from mdfuse import DeviceMesh, Shard
with mf.FusionDefinition("first") as fd:
    mesh = DeviceMesh.arange(tp=2)
    tokens = fd.define_tensor([1, 4], torch.int64, mesh=mesh)
    table, w = (fd.define_tensor([6, 8], mesh=mesh, layout={"tp": Shard(0)}) for _ in range(2))
    scale = fd.define_tensor([8], mesh=mesh)
    x = fd.ops.embedding(tokens, table)
    x = fd.ops.layer_norm(x, [8], scale, None) + fd.ops.rms_norm(x, [8], scale)
    heads = x.reshape([1, 4, 2, 4]).permute([0, 2, 1, 3])
    heads = fd.ops.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    x = fd.ops.cat([x, heads.permute([0, 2, 1, 3]).reshape([1, 4, 8])], 1)
    y = fd.ops.linear(fd.ops.gelu(x), w)
    fd.add_output(fd.ops.softmax(y.mean([0]), dim=-1))
inputs = [torch.zeros(1, 4, dtype=torch.int64), torch.randn(6, 8), torch.randn(6, 8), torch.ones(8)]
made = mf.simulate(mf.compile(fd), inputs).outputs[0]
assert (made - mf.reference(fd, inputs)[0]).abs().max() < 1e-5
assert not {"torch._dynamo", "sympy"} & {*sys.modules}
"""


def test_a_first_program_does_without_the_compilers_import() -> None:
    """It takes longer than all that mdfuse does until the first result."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
