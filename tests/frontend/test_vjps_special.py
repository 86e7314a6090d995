"""Values and first gradients at 0, at ends, among equals and at infinities, beside torch's.

Those of 16 bits are those of the same numbers in f32, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.drawn import drawn
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

F = torch.nn.functional
INF, NAN = math.inf, math.nan
NUMBERS = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 0.5, -0.5, 2.0, -3.0, 20.0, -100.0, 1e4, -1e4]
SHARES = [0.0, 1.0, 0.5, 0.25, 0.999, 1e-3]

ONE: dict[str, Callable[..., Any]] = {
    "logit": torch.logit, "logit within": lambda x: torch.logit(x, 0.25), "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.5), "celu of a negative": lambda x: F.celu(x, -0.5),
}  # fmt: skip
TWO: dict[str, Callable[..., Any]] = {
    "atan2": torch.atan2, "logaddexp": torch.logaddexp, "prelu": lambda x, y: F.prelu(x[None], y),
    "maximum": torch.maximum, "minimum": torch.minimum, "to a power": lambda x, y: x.abs() ** y,
    "clamp from below": lambda x, y: torch.clamp(x, min=y),
    "clamp from above": lambda x, y: torch.clamp(x, max=y),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.5),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.25),
    "smooth_l1_loss of 0": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.0),
    "add": lambda x, y: torch.add(x, y, alpha=0.3),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=-0.7),
    "max": lambda x, y: torch.stack([x, y, x], -1).max(-1)[0],
    "min": lambda x, y: torch.stack([x, y, x], -1).min(-1)[0],
    "logsumexp": lambda x, y: torch.stack([x, y, x], -1).logsumexp(-1),
}  # fmt: skip
THREE: dict[str, Callable[..., Any]] = {
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=0.3),
    "lerp": torch.lerp,
    "clamp": torch.clamp,
}
for _w in (0.0, 0.25, 0.5, 0.75, 1.0, 2.0, -1.0):
    TWO[f"lerp {_w}"] = lambda x, y, w=_w: torch.lerp(x, y, w)
for _p in (0, 0.5, 1, 1.5, 2, 3, INF, -INF, -1, -0.5):
    TWO[f"norm {_p}"] = lambda x, y, p=_p: torch.linalg.vector_norm(torch.stack([x, y], -1), p, -1)
OF_SHARES = {"binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, y, reduction="none")}
CASES = {**ONE, **TWO, **THREE, **OF_SHARES}

#: Which operands are tried: what torch's kernels say of a NaN, and of infinite norms, differs by
#: dtype, and the sign of an infinity at -0.0; of large numbers they are rough in f32.
OTHERWISE: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("logit", "logit within"), lambda x: ~x.isnan() & ~(x.signbit() & (x == 0))),
    "logsumexp": lambda x, y: ~((x.abs() == 1e4) | (y.abs() == 1e4)),
    "norm 0.5": lambda x, y: x.isfinite() & y.isfinite(),
    "norm -1": lambda x, y: ~x.isnan() & ~y.isnan(),
    "norm -0.5": lambda x, y: ~x.isnan() & ~y.isnan(),
}
DTYPES = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
NARROW = (torch.float16, torch.bfloat16)
ROUGH = {torch.float64: 1e-7, torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def operands(name: str, dtype: torch.dtype) -> list[Tensor]:
    """All pairs, or threes, of the numbers."""
    count = 1 if name in ONE else 3 if name in THREE else 2
    numbers = torch.tensor(SHARES if name in OF_SHARES else NUMBERS, dtype=torch.float64)
    found = torch.meshgrid(*[numbers.to(dtype)] * count, indexing="ij")
    xs = [x.flatten() for x in found]
    keep = OTHERWISE[name](*xs) if name in OTHERWISE else slice(None)
    return [x[keep].contiguous() for x in xs]


def by_torch(f: Callable[..., Any], xs: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in xs]
    y = f(*leaves)
    ct = torch.tensor([1.0, -2.0, 0.5]).repeat(y.numel())[: y.numel()]
    given = ct.reshape(y.shape).to(y.dtype)
    found = torch.autograd.grad(y, leaves, given, allow_unused=True)
    none = (torch.zeros_like(x) for x in xs)
    return given, y.detach(), *(n if g is None else g for g, n in zip(found, none, strict=True))


def by_mdfuse(
    f: Callable[..., Any], xs: list[Tensor], ct: Tensor, ranks: int, dim: int = 0
) -> list[Tensor]:
    mesh = DeviceMesh.arange(x=ranks)
    with mf.FusionDefinition("special") as fd:
        handles = [fd.define_tensor(x.shape, x.dtype, mesh, {"x": Shard(dim)}) for x in xs]
        seed = fd.define_tensor(ct.shape, ct.dtype, mesh)
        y = f(*handles)
        for out in (y, *mf.grad(y, handles, seed=seed)):
            fd.add_output(out)
    return mf.simulate(mf.compile(fd), [*xs, ct]).outputs


@pytest.mark.parametrize("ranks", [2, 1][: sampling.of(2, 1)])
@pytest.mark.parametrize("dtype", DTYPES[: sampling.of(4, 2)])
@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str, dtype: torch.dtype, ranks: int) -> None:
    f, xs = CASES[name], operands(name, dtype)
    ct, *expected = by_torch(f, [x.float() for x in xs] if dtype in NARROW else xs)
    found = by_mdfuse(f, xs, ct.to(dtype), ranks)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        rough = ROUGH[dtype]
        torch.testing.assert_close(
            ours, theirs.to(dtype), rtol=rough, atol=rough / 16, equal_nan=True
        )


def equals_along(dims: tuple[int, ...]) -> Tensor:
    """Small whole numbers, of which many are equal, and one row of NaNs and one of infinities."""
    x = torch.randint(-1, 2, (3, *dims), generator=torch.Generator().manual_seed(7)).float()
    x[0, -1], x[1] = NAN, INF
    return x


AMONG_EQUALS: dict[str, Callable[..., Any]] = {
    "max": lambda x: x.max(1)[0], "min": lambda x: x.min(-1, keepdim=True)[0],
    "torch.max": lambda x: torch.max(x, 2).values, "max of rows": lambda x: x.max(0).values,
    "amax": lambda x: x.nan_to_num().amax(1), "all of them": lambda x: x[2:].max(),
    "topk": lambda x: x[1:].topk(2, 1)[0], "median": lambda x: x[1:].median(1)[0],
    "max_pool1d": lambda x: F.max_pool1d(x, 2, 1), "cummax": lambda x: x.cummax(1)[0],
    "mode": lambda x: x[2:].mode(1)[0], "mode of rows": lambda x: x[2:].mode(2, True).values,
    "median of all": lambda x: x[2:].median(), "nanmedian of all": lambda x: x.nanmedian(),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x[1:], 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x[1:], (2, 3)),
    "adaptive_max_pool2d in parts": lambda x: F.adaptive_max_pool2d(x[1:], (3, 1)),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4, 1][: sampling.of(4, 2)])
@pytest.mark.parametrize("split", [1, 2, 0])
@pytest.mark.parametrize("name", AMONG_EQUALS)
def test_among_equals(name: str, split: int, ranks: int) -> None:
    """Along a dim that is split as well, with parts of several extents, or none on some rank."""
    f, x = AMONG_EQUALS[name], equals_along((7, 6))
    ct, *expected = by_torch(f, [x])
    for ours, theirs in zip(by_mdfuse(f, [x], ct, ranks, split), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("name", ["xlogy", "power", "xlogy of a number", "xlogy of zero"])
def test_logarithms_have_the_precision_of_the_result(name: str, dtype: torch.dtype) -> None:
    f: Callable[..., Any] = {
        "xlogy": torch.xlogy, "power": lambda x, y: torch.pow(y, x),
        "xlogy of a number": lambda x, y: torch.xlogy(x, 3) + y,
        "xlogy of zero": lambda x, y: torch.xlogy(x, 0) + y,
    }[name]  # fmt: skip
    x = torch.tensor([1.0, -1.0, 0.0, 0.3, 2.0], dtype=torch.float64)
    ct, *expected = by_torch(lambda x: f(x, torch.arange(2, 7).to(dtype)), [x])
    found = by_mdfuse(lambda x: f(x, mf.ops.arange(2, 7).to(dtype)), [x], ct, 2)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0, equal_nan=True)


def test_one_number_beside_a_limit_that_is_a_tensor() -> None:
    x, y = (torch.tensor(NUMBERS, dtype=torch.float64)[i].flatten() for i in
            torch.meshgrid(*[torch.arange(len(NUMBERS))] * 2, indexing="ij"))  # fmt: skip
    for ours, theirs in (
        (lambda x, y: torch.clamp(x, y, 0.5), lambda x, y: x.clamp(y, torch.full_like(x, 0.5))),
        (lambda x, y: torch.clamp(x, -1, y), lambda x, y: x.clamp(torch.full_like(x, -1), y)),
    ):
        ct, *expected = by_torch(theirs, [x, y])
        for a, b in zip(by_mdfuse(ours, [x, y], ct, 2), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def masked(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, t, m: loss(x, t, reduction="none").masked_fill(m, 0.0).sum()


@pytest.mark.parametrize("loss", [F.huber_loss, F.smooth_l1_loss, F.l1_loss])
def test_a_masked_infinity_leaves_gradients_alone(loss: Callable[..., Any]) -> None:
    x, t = torch.tensor([0.5, 0.5, -3.0]), torch.tensor([1.0, INF, -INF])
    mask, f = t.isinf(), masked(loss)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf, t, mask), leaf)
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("masked") as fd:
        a, b, m = (fd.define_tensor([3], y.dtype, mesh, {"x": Shard(0)}) for y in (x, t, mask))
        fd.add_output(mf.grad(f(a, b, m), [a])[0])
    check_everywhere(mf.compile(fd), [x, t, mask], [expected])


def test_angles_at_the_origin() -> None:
    """Also of complex numbers; and the second derivative is no NaN."""
    pairs = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, -2.0]], dtype=torch.float64)
    leaf = pairs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(torch.view_as_complex(leaf).angle().sum(), leaf)
    with mf.FusionDefinition("angles") as fd:
        x = fd.define_tensor([3, 2], torch.float64)
        for angle in (torch.view_as_complex(x).angle(), torch.atan2(x[:, 1], x[:, 0])):
            (dx,) = mf.grad(angle.sum(), [x])
            fd.add_output(dx)
            fd.add_output(mf.grad((dx * dx).sum(), [x])[0])
    of_angle, _, of_atan2, second = mf.reference(fd, [pairs])
    torch.testing.assert_close(of_angle, expected)
    torch.testing.assert_close(of_atan2, expected)
    assert second.isfinite().all() and torch.equal(second[0], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_more_equals_than_sixteen_bits_count(dtype: torch.dtype) -> None:
    x = torch.zeros(1000, 67, dtype=dtype)
    places = torch.zeros(1000, 67, dtype=torch.int64)
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("many") as fd:
        a = fd.define_tensor(x.shape, dtype, mesh, {"x": Shard(0)})
        at = fd.define_tensor(x.shape, torch.int64, mesh, {"x": Shard(0)})
        joined = torch.scatter_reduce(a[:1] - 1, 0, at, a, "amax")
        fd.add_output(mf.grad(a.amax().float(), [a])[0])
        fd.add_output(mf.grad(joined.float().sum(), [a])[0])
    whole, along = mf.simulate(mf.compile(fd), [x, places]).outputs
    share = torch.tensor(1 / x.numel()).to(dtype)
    assert torch.equal(whole, share.expand(x.shape))
    assert torch.equal(along, torch.tensor(1 / 1000).to(dtype).expand(x.shape))


def test_products_that_sixteen_bits_cannot_hold() -> None:
    """What a small factor makes of them they can."""
    a = torch.full((3, 4), 300.0, dtype=torch.float16)
    x = torch.ones(3, 3, dtype=torch.float16)
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("products") as fd:
        h, y = (fd.define_tensor(z.shape, z.dtype, mesh, {"x": Shard(0)}) for z in (a, x))
        fd.add_output(torch.addmm(y, h, h.t(), beta=0.5, alpha=1e-3))
        fd.add_output(torch.add(y, h[:, :3], alpha=300) / 2)
    found = mf.simulate(mf.compile(fd), [a, x]).outputs
    wanted = torch.addmm(x, a, a.t(), beta=0.5, alpha=1e-3), torch.add(x, a[:, :3], alpha=300) / 2
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_numbers_of_a_run() -> None:
    """A weight, a value and a limit that a run chooses, as scalars and as tensors without dims."""
    xs = [drawn(5, seed=i) for i in range(3)]
    with mf.FusionDefinition("numbers") as fd:
        a, b, c = (fd.define_tensor([5]) for _ in xs)
        n, t = fd.define_scalar(name="n"), fd.define_tensor([])
        for s in (n, t):
            fd.add_output(torch.lerp(a, b, s))
            fd.add_output(torch.addcmul(a, b, c, value=s))
            fd.add_output(torch.addcdiv(a, b, c, value=s))
            fd.add_output(torch.add(a, b, alpha=s))
            fd.add_output(torch.clamp(a, b, s))
    found = mf.reference(fd, [*xs, 0.75, torch.tensor(0.75)])
    a, b, c = xs
    wanted = [
        torch.lerp(a, b, 0.75), torch.addcmul(a, b, c, value=0.75),
        torch.addcdiv(a, b, c, value=0.75), torch.add(a, b, alpha=0.75),
        torch.clamp(a, b, torch.tensor(0.75)),
    ]  # fmt: skip
    for ours, theirs in zip(found, wanted * 2, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [1e4, 1e8, -1e7])
def test_large_numbers_beside_each_other(size: float) -> None:
    """What is added to a large number is lost; what stands between two of them is not."""
    logits, targets = torch.tensor([[0.0, 1.0, 0.0]]) + size, torch.tensor([0])
    mesh = DeviceMesh.arange(x=3)
    with mf.FusionDefinition("large") as fd:
        x = fd.define_tensor([1, 3], mesh=mesh, layout={"x": Shard(1)})
        t = fd.define_tensor([1], torch.int64, mesh)
        both = torch.logaddexp(x, x)
        for out in (F.cross_entropy(x, t), *mf.grad(both.sum(), [x])):
            fd.add_output(out)
    loss, slopes = mf.simulate(mf.compile(fd), [logits, targets]).outputs
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets))
    assert torch.equal(slopes, torch.ones(1, 3))


#: Smooth, but for where the drawn numbers are not.
BENT: dict[str, Callable[..., Any]] = {
    "lerp": torch.lerp, "lerp of numbers": lambda x, y, z: torch.lerp(x, y, 0.3) * z,
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=0.3),
    "clamp": lambda x, y, z: torch.clamp(x * x, y, z) * x,
    "huber_loss": lambda x, y, z: F.huber_loss(x, y, reduction="none", delta=0.5) * z,
    "smooth_l1_loss": lambda x, y, z: F.smooth_l1_loss(x, y, reduction="none", beta=2.0) * z,
    "binary_cross_entropy": (
        lambda x, y, z: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="none") * z
    ),
    "logit": lambda x, y, z: torch.logit(x.sigmoid(), 0.1) * y + z,
    "celu": lambda x, y, z: F.celu(x, 0.5) * y + F.selu(z),
    "norm": lambda x, y, z: torch.linalg.vector_norm(x * y + z, 0.5, 1),
    "atan2": lambda x, y, z: torch.atan2(x, y) * z,
    "logaddexp": lambda x, y, z: torch.logaddexp(x, y * z),
    "max": lambda x, y, z: (x * y).max(0)[0] * z,
}  # fmt: skip


@pytest.mark.parametrize("name", BENT)
def test_second_derivatives(name: str) -> None:
    xs = [drawn(5, 4, seed=i).double() for i in range(3)]
    leaves = [x.clone().requires_grad_() for x in xs]
    f = BENT[name]

    def twice(xs: Any, grad: Callable[..., Any]) -> Any:
        first = grad(f(*xs).square().sum(), xs)
        return grad(sum((g * (n + 1)).square().sum() for n, g in enumerate(first)), xs)

    def of_torch(y: Tensor, xs: Any) -> Any:
        found = torch.autograd.grad(y, xs, create_graph=True, allow_unused=True)
        return [x * 0 if g is None else g for g, x in zip(found, xs, strict=True)]

    with mf.FusionDefinition("twice") as fd:
        handles = [fd.define_tensor(x.shape, x.dtype) for x in xs]
        for out in twice(handles, mf.grad):
            fd.add_output(out)
    for ours, theirs in zip(mf.reference(fd, xs), twice(leaves, of_torch), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-8)
