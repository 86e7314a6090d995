"""What ends a sum comes behind its reduction: counts, factors, quotients, roundings to 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers.drawn import drawn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard, Stream

F = torch.nn.functional
INF = float("inf")
f16, bf16, f64 = torch.float16, torch.bfloat16, torch.float64


def program(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    ranks: int,
    placed: Any = Shard(0),  # noqa: B008
    options: mf.Options | None = None,
) -> mf.Program:
    mesh = DeviceMesh.arange(x=ranks)
    with mf.FusionDefinition("f") as fd:
        values = [fd.define_tensor([*x.shape], x.dtype, mesh, {"x": placed}) for x in inputs]
        fd.add_output(function(*values))
    return mf.compile(fd, options=options)


def computed(function: Callable[..., Any], *inputs: Tensor, ranks: int = 2, **how: Any) -> Tensor:
    return mf.simulate(program(function, inputs, ranks, **how), [*inputs]).outputs[0]


def check(function: Callable[..., Any], *inputs: Tensor, ranks: Sequence[int] = (1, 2, 3)) -> None:
    """The same bits as torch's on whole tensors, on any number of ranks."""
    expected = function(*inputs)
    for n in ranks:
        got = computed(function, *inputs, ranks=n)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


#: name -> (function, operands): torch's bits, whatever the terms of the ranks are.
EXACT: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "by 0": (lambda x: x.sum() / 0, [torch.tensor([5.0, -2.0, 1.0])]),
    "by -0": (lambda x: x.sum() / -0.0, [torch.tensor([5.0, -2.0, 1.0])]),
    "by a tensor with zeros": (
        lambda x: x.sum(0) / x.new_zeros([2]), [torch.tensor([[5.0, 1.0], [-2.0, -1.0]])],
    ),
    "times an infinity": (lambda x: x.sum() * INF, [torch.tensor([5.0, -2.0, 0.0])]),
    "times an infinite tensor": (
        lambda x: x.sum(0) * x.new_full([2], INF), [torch.tensor([[5.0, 0.0], [-2.0, 1.0]])],
    ),
    "times what overflows": (lambda x: x.sum() * 10, [torch.tensor([3e38, -3e38, 1.0])]),
    "integers, by 2": (lambda x: x.sum() / 2, [torch.tensor([2**24 + 1, -(2**24), 0])]),
    "integers that wrap": (
        lambda x: x.sum(dtype=torch.int32) * 0.5, [torch.tensor([2**31 - 1, 1, 0]).int()],
    ),
    "integers that wrap, plus wider ones": (
        lambda x: x.sum(dtype=torch.int32) + x.sum(), [torch.tensor([2**31 - 1, 1, 0])],
    ),
    "integers that wrap, added up further": (
        lambda x: x.sum(0, dtype=torch.int32).sum(), [torch.tensor([[2**31 - 1, 3], [1, 4]])],
    ),
    "bytes that wrap, as floats": (
        lambda x: x.sum(dtype=torch.uint8).float() * 2, [torch.tensor([200, 100, 3])],
    ),
    "integers by an integer": (lambda x: -(x.sum(0) * 3), [torch.arange(10).reshape(5, 2)]),
    "f16 that overflows": (
        lambda x: x.sum(), [torch.tensor([6e4, 6e4, -6e4, -6e4, 1.0]).to(f16)],
    ),
    "f16 by a number": (lambda x: x.sum() * 1e-3, [torch.tensor([6e4, 3.0, -5e4]).to(f16)]),
    "bf16 that cancels": (
        lambda x: x.sum(0), [torch.tensor([[256.0], [1.0], [-256.0], [1.0]]).to(bf16)],
    ),
    "f16 of another dtype": (
        lambda x: x.sum(dtype=f16), [torch.tensor([7e4, -7e4, 1.0])],
    ),
    "mean of f16 that overflows": (
        lambda x: x.mean(0), [torch.tensor([[6e4], [6e4], [5e4]]).to(f16)],
    ),
    "mean of nothing": (lambda x: x.mean(0), [torch.ones(0, 3)]),
    "mean of doubles": (lambda x: x.mean(), [torch.full((7,), 1.0, dtype=f64)]),
    "mean of complex numbers": (lambda x: x.mean(), [torch.full((7,), 1 + 2j)]),
    "variance of one": (lambda x: x.var(0), [torch.ones(1, 2)]),
    "variance, more subtracted than there are": (
        lambda x: torch.var(x, 0, correction=5), [torch.tensor([[1.0], [2.0], [4.0]])],
    ),
    "variance, as many subtracted": (
        lambda x: torch.var(x, 0, correction=3), [torch.tensor([[1.0], [2.0], [4.0]])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_values_are_those_of_whole_tensors(name: str) -> None:
    function, inputs = EXACT[name]
    check(function, *inputs)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, f16, bf16])
def test_a_mean_of_ones_is_one(ranks: int, dtype: torch.dtype) -> None:
    for n in (1, 3, 5, 7, 11, 13, 49):
        got = computed(lambda x: x.mean(0), torch.ones(n, 2, dtype=dtype), ranks=ranks)
        assert got.tolist() == [1.0, 1.0], n


def test_products_of_16_bits_do_not_overflow_on_one_rank() -> None:
    x = torch.tensor([300.0, 300.0, 1e-3, 1e-3], dtype=f16)
    torch.testing.assert_close(computed(lambda x: x.prod(), x), x.double().prod().to(f16))


@pytest.mark.parametrize("name", ["mse", "l1", "smooth_l1", "bce", "cross_entropy"])
def test_losses_of_ones_are_exact(name: str) -> None:
    x = torch.ones(7)
    losses: Mapping[str, Callable[..., Any]] = {
        "mse": lambda x: F.mse_loss(x, x * 2),
        "l1": lambda x: F.l1_loss(x, x * 2),
        "smooth_l1": lambda x: F.smooth_l1_loss(x, x * 2.5),
        "bce": lambda x: F.binary_cross_entropy_with_logits(x, x),
        "cross_entropy": lambda x: F.cross_entropy(
            x[:, None].expand(7, 3), x.long(), label_smoothing=0.5
        ),
    }
    got = computed(losses[name], x, ranks=4)
    torch.testing.assert_close(got, losses[name](x), rtol=1e-7, atol=0)


def test_statistics_along_a_split_dim() -> None:
    """Layer norms along a split dim take means of their own."""
    x = torch.ones(4, 700) * 3.0
    for normal in (
        lambda x: F.layer_norm(x, (700,), None, None, 1e-5),
        lambda x: F.rms_norm(x, (700,), None, 1e-5),
        lambda x: F.batch_norm(x.permute(1, 0), None, None, training=True).permute(1, 0),
    ):
        got = computed(normal, x, ranks=4, placed=Shard(1))
        torch.testing.assert_close(got, normal(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 7])
def test_symbolic_extents(n: int) -> None:
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([-1, 3], mesh=mesh, layout={"x": Shard(0)})
        for y in (x.mean(0), torch.var(x, 0), torch.var(x, 0, correction=2), x.to(bf16).mean()):
            fd.add_output(y)
    whole = torch.ones(n, 3) * 3.0
    got = mf.simulate(mf.compile(fd), [whole]).outputs
    expected = [whole.mean(0), whole.var(0), whole.var(0, correction=2), whole.to(bf16).mean()]
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_a_gradient_of_a_mean() -> None:
    x = torch.tensor([[1.0, -INF], [2.0, 5.0], [3.0, 1.0]])

    def gradient(x: Any) -> Any:
        return mf.grad(x.exp().mean(0).sum(), [x])[0]

    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("f") as fd:
        y = fd.define_tensor([3, 2], mesh=mesh, layout={"x": Shard(0)})
        fd.add_output(gradient(y))
    ref = x.clone().requires_grad_()
    ref.exp().mean(0).sum().backward()
    assert ref.grad is not None
    torch.testing.assert_close(mf.simulate(mf.compile(fd), [x]).outputs[0], ref.grad)


# -- in parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, bf16, f16])
@pytest.mark.parametrize("placed", [{}, {"x": Shard(0)}])
def test_microbatches_are_added_up_before_the_count(dtype: torch.dtype, placed: Any) -> None:
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([14, 3], dtype, mesh, placed, name="x")
        fd.add_output(x.mean(0))
        fd.add_output(x.sum(0))
    step = mf.pipeline(fd, microbatches=7, batch={"x": 0})
    whole = torch.ones(14, 3, dtype=dtype)
    whole[::2] = 256.0
    whole[1::4] = -256.0
    got = mf.simulate(step, [whole]).outputs
    torch.testing.assert_close(got, [whole.mean(0), whole.sum(0)], rtol=0, atol=0)


def test_a_streamed_mean() -> None:
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([8, 7], mesh=mesh, layout={"x": Shard(1)})
        y = x.mean(1).on(mesh, {}, stream=Stream(0, 4))
        fd.add_output(y * 2.0)
    got = mf.simulate(mf.compile(fd), [torch.ones(8, 7)]).outputs[0]
    assert got.tolist() == [2.0] * 8


# -- bytes ---------------------------------------------------------------------------------------


def _bytes(function: Callable[..., Any], *shapes: Sequence[int], placed: Any = Shard(1)) -> Any:  # noqa: B008
    made = program(function, [torch.empty(*s) for s in shapes], 4, placed)
    return [c.kind for c in made.communications], made.bytes_received(0)


def test_a_factor_costs_no_bytes() -> None:
    """The bias of a row-parallel linear, before a factor, a slope or a gradient's scale."""
    shapes = (8, 32), (16, 32)
    once = _bytes(F.linear, *shapes)
    for function in (
        lambda x, w: F.linear(x, w) * 0.5,
        lambda x, w: F.linear(x, w) / 3,
        lambda x, w: -(F.linear(x, w) * 2.0).permute(1, 0) * 0.25,
    ):
        assert _bytes(function, *shapes) == once


def test_a_factor_before_a_reduce_scatter() -> None:
    mesh = DeviceMesh.arange(x=4)
    with mf.FusionDefinition("f") as fd:
        x, w = (fd.define_tensor(s, mesh=mesh, layout={"x": Shard(1)}) for s in ([8, 32], [16, 32]))
        y = (F.linear(x, w) * 0.5).permute(1, 0) / 3
        fd.add_output(fd.ops.set(y).on(mesh, {"x": Shard(0)}))
    made = mf.compile(fd)
    assert [c.kind for c in made.communications] == ["ReduceScatter"]
    x, w = drawn(8, 32), drawn(16, 32)
    torch.testing.assert_close(mf.simulate(made, [x, w]).outputs[0], (F.linear(x, w) * 0.5).T / 3)


def test_weights_of_experts_go_into_the_terms() -> None:
    """One all-reduce for all experts, not one for each."""
    mesh = DeviceMesh.arange(x=4)
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([8, 32], mesh=mesh, layout={"x": Shard(1)})
        gates = fd.define_tensor([8, 3], mesh=mesh)
        ws = [fd.define_tensor([16, 32], mesh=mesh, layout={"x": Shard(1)}) for _ in range(3)]
        parts = [F.linear(x, w) * gates[:, i : i + 1] for i, w in enumerate(ws)]
        fd.add_output(parts[0] + parts[1] + parts[2])
    made = mf.compile(fd)
    assert [c.kind for c in made.communications] == ["Allreduce"]
    tensors = [drawn(8, 32), drawn(8, 3), *(drawn(16, 32) + i for i in range(3))]
    x, gates, *weights = tensors
    expected = sum(F.linear(x, w) * gates[:, i : i + 1] for i, w in enumerate(weights))
    torch.testing.assert_close(mf.simulate(made, tensors).outputs[0], expected)


def test_products_of_16_bits_travel_as_they_are() -> None:
    """A product is rounded by its kernel on each rank, so nothing is won by wider terms."""
    x, w = torch.empty(8, 32, dtype=bf16), torch.empty(16, 32, dtype=bf16)
    made = program(F.linear, [x, w], 4, Shard(1))
    (sent,) = made.communications
    assert made.bytes_received(0) == 2 * 3 * (8 * 16 * 2) // 4, sent


def test_terms_that_are_to_stay_terms() -> None:
    """A result that is declared Partial has quotients, and roundings, of the terms."""
    mesh = DeviceMesh.arange(x=2)
    for dtype in (torch.float32, bf16):
        with mf.FusionDefinition("f") as fd:
            x = fd.define_tensor([4], dtype, mesh, {"x": Shard(0)})
            fd.add_output(x.mean().on(mesh, {"x": Partial()}))
            fd.add_output(x.sum().on(mesh, {"x": Partial()}))
        made = mf.compile(fd)
        assert not made.communications
        found = mf.simulate(made, [torch.tensor([1, 2, 4, 8], dtype=dtype)]).per_rank
        assert [[x.item() for x in row] for row in found] == [[0.75, 3.0], [3.0, 12.0]]


def test_a_linear_without_its_bias_has_no_copies_of_before() -> None:
    """To gather both operands takes fewer bytes, which the linear with its bias would do."""
    mesh, rows = DeviceMesh.arange(tp=2), {"tp": Shard(0)}
    shapes = {"x": [12, 8], "up": [16, 8], "down": [8, 16], "bias": [8]}
    split = {"x": rows, "up": rows, "down": {"tp": Shard(1)}, "bias": {}}
    with mf.FusionDefinition("mlp") as fd:
        x, up, down, bias = (
            fd.define_tensor(s, f64, mesh, split[n], name=n) for n, s in shapes.items()
        )
        h = mf.ops.relu(mf.ops.linear(x, up))
        fd.add_output(mf.ops.linear(h, down, bias).on(mesh, rows))
    program = mf.compile(fd)
    assert [c.kind for c in program.communications] == ["Allgather", "ReduceScatter"]
    inputs = [torch.randn(s, dtype=f64) for s in shapes.values()]
    want = F.linear(F.linear(inputs[0], inputs[1]).relu(), *inputs[2:])
    torch.testing.assert_close(mf.simulate(program, inputs).outputs[0], want)
