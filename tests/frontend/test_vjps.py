"""The rule of each op, on one device, against torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.drawn import numbers
from helpers.surface_cases import CASES, operands
from torch import Tensor

import mdfuse as mf
from mdfuse.frontend.vjps import NO_GRADIENT, RULES
from mdfuse.ir.ops import TABLE

F = torch.nn.functional


def test_every_op_has_a_rule_or_a_reason() -> None:
    assert {*RULES} | {*NO_GRADIENT} == {*TABLE}
    assert not {*RULES} & {*NO_GRADIENT}


def floating(x: Any) -> bool:
    return x.dtype.is_floating_point


def seeds(results: Sequence[Any]) -> list[Tensor]:
    """A cotangent for each floating result."""
    found = []
    for i, y in enumerate(results):
        if floating(y):
            generator = torch.Generator().manual_seed(100 + i)
            found.append(torch.randn(tuple(y.shape), generator=generator, dtype=torch.float64))
    return found


def listed(results: Any) -> list[Any]:
    return [*results] if isinstance(results, tuple | list) else [results]


def loss(results: Any, cotangents: Sequence[Any], cast: Callable[[Any], Any]) -> Any:
    """One number that depends on every floating result."""
    kept = [y for y in listed(results) if floating(y)]
    total = None
    for y, ct in zip(kept, cotangents, strict=True):
        part = (cast(y) * ct).sum()
        total = part if total is None else total + part
    return total


def gradients_of_torch(f: Callable[..., Any], xs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() if floating(x) else x for x in xs]
    results = f(*leaves)
    total = loss(results, seeds(listed(results)), lambda y: y.to(torch.float64))
    wrt = [x for x in leaves if floating(x)]
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in wrt]
    found = torch.autograd.grad(total, wrt, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wrt, found, strict=True)]


def gradients_of_mdfuse(f: Callable[..., Any], xs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        cotangents = seeds(listed(f(*xs)))
    with mf.FusionDefinition("gradients") as fd:
        handles = [fd.define_tensor(x.shape, x.dtype) for x in xs]
        given = [fd.define_tensor(ct.shape, ct.dtype) for ct in cotangents]
        total = loss(f(*handles), given, lambda y: y.to(torch.float64))
        for g in mf.grad(total, [x for x in handles if floating(x)]):
            fd.add_output(g)
    return mf.reference(fd, [*xs, *cotangents])


def check(f: Callable[..., Any], xs: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    expected = gradients_of_torch(f, xs)
    found = gradients_of_mdfuse(f, xs)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        is_rough = theirs.dtype in (torch.bfloat16, torch.float16)
        most = 4e-2 if is_rough else tolerance
        torch.testing.assert_close(ours, theirs, rtol=most, atol=most, equal_nan=True)


#: What torch does otherwise: it has no derivative of quotients that are rounded down; it looks at
#: what beta=0 leaves out; it divides by the number of elements that equal a NaN.
OTHERWISE = {"floor_divide", "operators", "div-floor", "addmm-zero", "max-nan", "median-nan"}
#: torch rounds the slope, 1/6, to f32.
ROUGH = {"hardsigmoid-F", "hardswish-F"}

DIFFERENTIABLE = [
    name
    for name, (names, f) in CASES.items()
    if name not in OTHERWISE
    and any(map(floating, operands(names)))
    and any(map(floating, listed(f(*operands(names)))))
]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_operations_as_torch(name: str) -> None:
    names, f = CASES[name]
    check(f, operands(names), 1e-7 if name in ROUGH else 1e-10)


#: Operands of products: vectors, matrices, batches that repeat, extents of 1 and 0.
PRODUCTS = [
    ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)), ((3,), (5, 3, 4)), ((2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3, 4)),
    ((1, 2, 3), (5, 3, 4)), ((6, 1, 2, 3), (5, 3, 4)), ((6, 5, 2, 3), (1, 3, 4)),
    ((6, 5, 2, 3), (3, 4)), ((0, 3), (3, 4)), ((2, 0), (0, 4)), ((1, 1), (1, 1)),
    ((0, 2, 3), (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), PRODUCTS, ids=str)
def test_products(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check(torch.matmul, [numbers(*a), numbers(*b, seed=1)])


#: x, weight, bias
LINEAR = [
    ((5, 3), (4, 3), (4,)), ((3,), (4, 3), (4,)), ((2, 5, 3), (4, 3), (4,)), ((2, 5, 3), (4, 3)),
    ((5, 3), (3,)), ((3,), (3,)), ((3,), (4, 3)), ((2, 5, 3), (3,), ()),
    ((0, 3), (4, 3), (4,)), ((5, 1), (1, 1), (1,)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", LINEAR, ids=str)
def test_linear(shapes: Sequence[tuple[int, ...]]) -> None:
    check(F.linear, [numbers(*shape, seed=i) for i, shape in enumerate(shapes)])


@pytest.mark.parametrize("wanted", range(3))
def test_only_one_operand_is_asked_for(wanted: int) -> None:
    xs = [numbers(2, 5, 3), numbers(4, 3, seed=1), numbers(4, seed=2)]

    def of_one(x: Any) -> Any:
        return F.linear(*xs[:wanted], x, *xs[wanted + 1 :]).tanh()

    leaf = xs[wanted].clone().requires_grad_()
    seed = numbers(2, 5, 4, seed=9)
    (expected,) = torch.autograd.grad(of_one(leaf), leaf, seed)
    with mf.FusionDefinition() as fd:
        handles = [fd.define_tensor(x.shape, x.dtype) for x in xs]
        ct = fd.define_tensor(seed.shape, seed.dtype)
        y = torch.tanh(F.linear(*handles))
        for g in mf.grad(y, [handles[wanted]], seed=ct):
            fd.add_output(g)
    (found,) = mf.reference(fd, [*xs, seed])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


BROADCAST = [((5, 4), (4,)), ((5, 1), (1, 4)), ((), (5, 4)), ((2, 1, 3), (4, 1)), ((0, 4), (4,)),
             ((1,), (1, 1)), ((3, 1), (3, 0))]  # fmt: skip
TWO = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "pow": lambda x, y: (x.abs() + 0.5) ** y, "atan2": torch.atan2,
    "remainder": torch.remainder, "fmod": torch.fmod, "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x * 2, y * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("shapes", BROADCAST, ids=str)
def test_operands_that_repeat(name: str, shapes: Sequence[tuple[int, ...]]) -> None:
    check(TWO[name], [numbers(*shape, seed=i) for i, shape in enumerate(shapes)])


def with_zeros(*shape: int) -> Tensor:
    """Small whole numbers, of which some are equal, and some 0."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-2, 3, shape, generator=generator).to(torch.float64)


#: Where a derivative jumps, is infinite, or is hidden: as torch has it.
SPECIAL: dict[str, Callable[..., Any]] = {
    "ties of maximum": lambda x: (torch.maximum(x, x.flip(0) if type(x) is Tensor else turned(x))),
    "ties of amax": lambda x: (x.amax(1), x.amax(), x.amax((0, 1), keepdim=True)),
    "ties of amin": lambda x: x.amin(0, keepdim=True),
    "relu": lambda x: (F.relu(x), F.leaky_relu(x, 0.1), F.elu(x), x.abs(), torch.sign(x)),
    "clamp": lambda x: (x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=-2), x.clamp(1, -1)),
    "hardtanh": lambda x: (F.hardtanh(x), F.relu6(x * 6), F.hardtanh(x, -2, 0)),
    "square": lambda x: (x**2, x.square(), x * x, x**0, x**1, x**3, x**0.5),
    "power": lambda x: (2.0**x, (x * 0) ** 2, (x * 0.0) ** x.abs()),
    "zero to a power": lambda x: torch.pow(torch.zeros_like(x), x.abs()),
    "powers of zero": lambda x: torch.pow(0.0, x),
    "powers of a negative": lambda x: torch.pow(-2.0, x),
    "a power of x": lambda x: torch.pow(x.abs(), x),
    "sqrt": lambda x: (x.abs().sqrt(), (x * x).sqrt()),
    "norm": lambda x: ((x * 0).norm(), x.norm(dim=0), (x * 0).norm(p=3), (x * 0).norm(p=1)),
    "std": lambda x: ((x * 0).std(), (x * 0 + 3).std(1), x.std()),
    "prod": lambda x: (x.prod(), x.prod(0), x[:, 1:2].prod(1), (x + 5).prod(1, keepdim=True)),
    "hidden infinities": lambda x: torch.where(x == 0, torch.zeros_like(x), 1 / x),
    "an infinite cotangent": lambda x: torch.where(x > 0, x, x * 2).log().exp().log(),
    "logsumexp": lambda x: ((x * 500).logsumexp(1), x.softmax(0), x.log_softmax(0)),
    "softplus": lambda x: F.softplus(x * 12, 2.0, 20.0),
    "slices": lambda x: (x[1::2], x[::3, 1:3], x[-1], x[:0], x[2:4, None, 3], x[4:5]),
    "read often": lambda x: x * x + x / (x + 9) - x.t() @ x * x.sum() + x[0],
    "nothing of it": lambda x: (x > 0).to(x.dtype) + x.detach() + x.floor() + torch.zeros_like(x),
    "detached": lambda x: x * x.detach(),
    "integers on the way": lambda x: x * x.to(torch.int64).to(x.dtype),
    "narrow on the way": lambda x: x.to(torch.float32).to(torch.float64) * 3,
}  # fmt: skip


def turned(x: Any) -> Any:
    """The rows from the last to the first; handles have no flip."""
    return torch.cat([x[i : i + 1] for i in reversed(range(x.shape[0]))])


@pytest.mark.parametrize("name", SPECIAL)
def test_where_derivatives_are_special(name: str) -> None:
    check(SPECIAL[name], [with_zeros(4, 4)])


def test_embedding_with_repeated_indices() -> None:
    indices, table = torch.tensor([[1, 1, 4], [0, 1, 4]]), numbers(7, 3)
    check(lambda i, t: F.embedding(i, t) * 2, [indices, table])
    check(lambda i, t: F.embedding(i, t), [indices[:, :0], table])


@pytest.mark.parametrize(
    "how", ["plain", "causal", "bool", "rows that see nothing", "float", "scaled"]
)
def test_attention(how: str) -> None:
    q, k, v = numbers(2, 3, 5, 4), numbers(2, 3, 6, 4, seed=1), numbers(2, 3, 6, 7, seed=2)
    mask = numbers(3, 5, 6, seed=3)
    attend = F.scaled_dot_product_attention
    match how:
        case "causal":
            check(lambda q: attend(q, q * 2, q.sin(), is_causal=True), [q])
        case "bool":
            check(lambda q, k, v, m: attend(q, k, v, m > -0.5), [q, k, v, mask])
        case "rows that see nothing":
            seen = (mask > -0.5) & (torch.arange(5) != 2)[:, None]
            check(lambda q, k, v, m: attend(q, k, v, m > 0.5), [q, k, v, seen.double()])
        case "float":
            check(lambda q, k, v, m: attend(q, k, v, m), [q, k, v, mask])
        case "scaled":
            check(lambda q, k, v: attend(q, k, v, scale=0.3), [q, k, v])
        case _:
            check(attend, [q, k, v])


def plain_attention(q: Any, k: Any, v: Any, *mask: Any, is_causal: bool = False) -> Any:
    """Heads of key and value repeated, scores, softmax: by operations that have gradients."""
    n = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(n, -3) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    for m in mask:
        scores = scores.masked_fill(~m, -torch.inf) if m.dtype == torch.bool else scores + m
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores).bool().tril(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("is_again", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("how", ["plain", "causal", "float", "float per head", "bool"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)], ids=str)
def test_attention_of_grouped_heads(heads: tuple[int, int], how: str, is_again: bool) -> None:
    """Gradients of query, key, value and mask, through the result and the sums, once and twice."""
    many, few = heads
    xs = [numbers(2, many, 5, 4), numbers(2, few, 5, 4, seed=1), numbers(2, few, 5, 3, seed=2)]
    if "float" in how:
        xs.append(numbers(*((many, 5, 5) if "head" in how else (5, 5)), seed=3))
    seen = numbers(5, 5, seed=4) > -0.5
    given = {"is_causal": True} if how == "causal" else {}

    def gradients(attend: Any, xs: Any, grad: Any, more: Any) -> Any:
        y, lse = attend(*xs, *more, **given)
        first = [y, lse, *grad((y * y).sum() + lse.sin().sum(), xs)]
        if not is_again:
            return first
        y, lse = attend(*xs, *more, **given)
        inner = grad((y * y).sum() + lse.sin().sum(), xs[:3])
        return [*first, *grad(sum((g * g).sum() for g in inner), xs)]

    leaves = [x.clone().requires_grad_() for x in xs]
    mask = [seen] if how == "bool" else []

    def by_torch(y: Tensor, xs: Any) -> Any:
        return torch.autograd.grad(y, xs, create_graph=True)

    expected = gradients(plain_attention, leaves, by_torch, mask)
    with mf.FusionDefinition() as fd:
        handles = [fd.define_tensor(x.shape, x.dtype) for x in xs]
        seens = [fd.define_tensor(x.shape, x.dtype) for x in mask]

        def ours(*operands: Any, **how: Any) -> Any:
            return fd.ops.attention(*operands, **how, enable_gqa=True)

        for g in gradients(ours, handles, mf.grad, seens):
            fd.add_output(g)
    for found, wanted in zip(mf.reference(fd, [*xs, *mask]), expected, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("rows", "keys"), [(3, 0), (0, 3), (0, 0)])
def test_sums_of_attention_to_no_keys(rows: int, keys: int) -> None:
    """Such a row sees nothing: it gives 0, and so do all gradients."""
    xs = [numbers(2, rows, 4), numbers(2, keys, 4), numbers(2, keys, 4), numbers(rows, keys)]
    with mf.FusionDefinition() as fd:
        q, k, v, m = (fd.define_tensor(x.shape, x.dtype) for x in xs)
        y, sums = fd.ops.attention(q, k, v, m > 0)
        for x in (y, sums, *mf.grad(y.sum() + sums.sum(), [q, k, v])):
            fd.add_output(x)
    never = torch.full((2, rows), -torch.inf, dtype=torch.float64)
    wanted = [torch.zeros_like(xs[0]), never, *map(torch.zeros_like, xs[:3])]
    for result, want in zip(mf.reference(fd, xs), wanted, strict=True):
        assert torch.equal(result, want)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, normalized = numbers(2, 3, 4).to(dtype), shape
    weight, bias = numbers(*shape, seed=1).to(dtype), numbers(*shape, seed=2).to(dtype)
    check(lambda x, w, b: F.layer_norm(x, normalized, w, b, 1e-3), [x, weight, bias])
    check(lambda x: F.layer_norm(x, normalized), [x])


def test_dropout_drops_the_same() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([40, 5])
        seed = fd.define_scalar(dtype=int)
        y = fd.ops.dropout(x, 0.4, seed=seed)
        (dx,) = mf.grad(y.sum(), [x])
        for out in (y, dx):
            fd.add_output(out)
    ones = torch.ones(40, 5)
    y, dx = mf.reference(fd, [ones, 7])
    assert torch.equal(y, dx)
    assert {*dx.unique().tolist()} == {0.0, ones.div(0.6)[0, 0].item()}


#: Without tanh and log_softmax: their rules read the result, which is rounded, as torch's do.
NARROW: dict[str, Callable[..., Any]] = {
    "gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (64,)), "rms_norm": lambda x: F.rms_norm(x, (64,)),
    "quotient": lambda x: 3 / x, "power": lambda x: x.abs() ** 1.5, "std": lambda x: x.std(1),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus,
    "prod": lambda x: x[:, :6].prod(1), "mean": lambda x: x.mean(0), "elu": F.elu,
    "mish": F.mish, "hardswish": F.hardswish, "leaky_relu": F.leaky_relu,
}  # fmt: skip


@pytest.mark.parametrize("name", NARROW)
def test_sixteen_bits_are_rounded_once(name: str) -> None:
    """Beside the gradient in f64 of the same numbers: half a unit in the last place, or one."""
    f, x = NARROW[name], numbers(8, 64).to(torch.bfloat16)
    exact = x.double().requires_grad_()
    y = f(exact)
    ct = numbers(*y.shape, seed=3).to(torch.bfloat16)
    (expected,) = torch.autograd.grad(y, exact, ct.double())
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor(x.shape, x.dtype)
        seed = fd.define_tensor(ct.shape, ct.dtype)
        for g in mf.grad(f(h), [h], seed=seed):
            fd.add_output(g)
    (found,) = mf.reference(fd, [x, ct])
    assert found.dtype == torch.bfloat16
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=scale * 2**-9)
