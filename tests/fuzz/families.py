"""Operations with arguments that fit: one function for values of a definition and for tensors.

A family draws an operation on a value. It returns the function and its operands, or nothing where
the value does not fit; more operands are values that are there, or new inputs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from fuzz.definitions import Known

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """An operation.

    Attributes:
        name: what it is.
        function: of handles, and of tensors.
        operands: what it reads.
        is_smooth: whether a rounding error of an operand makes one of the result.
        has_slope: whether a rounding error of an operand makes one of the gradient.
        is_exact: whether there are no rounding errors in the result.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[Known, ...]
    is_smooth: bool = True
    has_slope: bool = True
    is_exact: bool = False


class Program(Protocol):
    """What families draw from."""

    @property
    def draw(self) -> random.Random: ...

    def extent(self) -> int:
        """An extent; a program has few, so that shapes fit each other."""
        ...

    def operand(self, shape: Shape, like: Known) -> Known:
        """A value of this shape and of the dtype of another one: known, or a new input."""
        ...

    def places(self, shape: Shape, below: int) -> Known:
        """A new input of integers from 0 to below - 1."""
        ...


Family = Callable[[Program, Known], Call | None]


def shape_of(x: Known) -> Shape:
    assert x.whole is not None
    return tuple(x.whole.shape)


def dim_of(p: Program, x: Known) -> int:
    return p.draw.randrange(len(shape_of(x)))


# -- products ----------------------------------------------------------------------------------


def matmul(p: Program, x: Known) -> Call | None:
    if not shape_of(x):
        return None
    batch = shape_of(x)[:-2] if p.draw.random() < 0.2 else ()
    w = p.operand((*batch, shape_of(x)[-1], p.extent()), x)
    return Call("matmul", torch.matmul, (x, w))


def of_another(p: Program, x: Known) -> Call | None:
    if len(shape_of(x)) < 2:
        return None
    w = p.operand((p.extent(), shape_of(x)[-2]), x)
    return Call("matmul", torch.matmul, (w, x))


def linear(p: Program, x: Known) -> Call | None:
    if not shape_of(x):
        return None
    n = p.extent()
    w = p.operand((n, shape_of(x)[-1]), x)
    bias = (p.operand((n,), x),) if p.draw.random() < 0.3 else ()
    return Call("linear", F.linear, (x, w, *bias))


def with_itself(p: Program, x: Known) -> Call | None:
    if len(shape_of(x)) < 2:
        return None
    return Call("x @ x.mT", lambda a: a @ a.mT, (x,))


def einsum(p: Program, x: Known) -> Call | None:
    n = len(shape_of(x))
    if not 0 < n < 4:
        return None
    labels = "abcd"[:n]
    summed = p.draw.choice(labels)
    kept = labels.replace(summed, "") if p.draw.random() < 0.5 else labels[:1].replace(summed, "")
    w = p.operand((shape_of(x)[labels.index(summed)], p.extent()), x)
    text = f"{labels},{summed}z->{''.join(p.draw.sample([*kept, 'z'], len(kept) + 1))}"
    return Call(f"einsum {text}", lambda a, b: torch.einsum(text, a, b), (x, w))


def conv(p: Program, x: Known) -> Call | None:
    shape, draw = shape_of(x), p.draw
    if len(shape) not in (3, 4) or shape[1] == 0:  # without channels torch gives no output either
        return None
    dims = len(shape) - 2
    kernel = tuple(draw.choice((1, 2, 3)) for _ in range(dims))
    w = p.operand((p.extent(), shape[1], *kernel), x)
    how: dict[str, Any] = {"stride": draw.choice((1, 1, 2)), "padding": draw.choice((0, 1))}
    function = F.conv1d if dims == 1 else F.conv2d
    return Call(f"conv {how}", lambda a, b: function(a, b, **how), (x, w))


def pool(p: Program, x: Known) -> Call | None:
    if len(shape_of(x)) not in (3, 4) or 0 in shape_of(x):
        return None
    dims, kernel, stride = len(shape_of(x)) - 2, p.draw.choice((1, 2)), p.draw.choice((1, 2))
    largest = p.draw.random() < 0.5
    names = ("max_pool1d", "max_pool2d") if largest else ("avg_pool1d", "avg_pool2d")
    function = getattr(F, names[dims - 1])
    return Call(names[0], lambda a: function(a, kernel, stride), (x,), has_slope=not largest)


def attention(p: Program, x: Known) -> Call | None:
    shape = shape_of(x)
    if len(shape) < 2 or len(shape) > 4 or 0 in shape:
        return None
    rows = shape[-2] if p.draw.random() < 0.5 else p.extent()
    k = p.operand((*shape[:-2], rows, shape[-1]), x)
    v = p.operand((*shape[:-2], rows, p.draw.choice((shape[-1], p.extent()))), x)
    causal = p.draw.random() < 0.3 and rows == shape[-2]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Call(f"attention causal={causal}", attend, (x, k, v))


# -- element-wise work -------------------------------------------------------------------------

#: name -> function, whether its gradient is continuous.
UNARY: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "neg": (lambda x: -x, True),
    "x * 0.5": (lambda x: x * 0.5, True),
    "x + 1": (lambda x: x + 1, True),
    "1 - x": (lambda x: 1 - x, True),
    "relu": (torch.relu, False),
    "abs": (torch.abs, False),
    "tanh": (torch.tanh, True),
    "sin": (torch.sin, True),
    "sigmoid": (torch.sigmoid, True),
    "gelu": (F.gelu, True),
    "silu": (F.silu, True),
    "clamp": (lambda x: torch.clamp(x, -1.0, 0.75), False),
    "square": (torch.square, True),
    "atan": (torch.atan, True),
    "softplus": (F.softplus, True),
    "x.exp() of tanh": (lambda x: torch.exp(torch.tanh(x)), True),
    "log1p of square": (lambda x: torch.log1p(x * x), True),
    "rsqrt of square": (lambda x: torch.rsqrt(x * x + 1), True),
    "x / (1 + x * x)": (lambda x: x / (1 + x * x), True),
}
BINARY: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "add": (torch.add, True),
    "sub": (torch.sub, True),
    "mul": (torch.mul, True),
    "rsub": (lambda x, y: y - x, True),
    "maximum": (torch.maximum, False),
    "minimum": (torch.minimum, False),
    "hypot": (lambda x, y: torch.sqrt(x * x + y * y + 1), True),
    "mse": (lambda x, y: (x - y).square(), True),
}


def unary(p: Program, x: Known) -> Call | None:
    name = p.draw.choice([*UNARY])
    function, has_slope = UNARY[name]
    return Call(name, function, (x,), has_slope=has_slope, is_exact=name in ("neg", "abs"))


def binary(p: Program, x: Known) -> Call | None:
    draw, shape = p.draw, shape_of(x)
    if draw.random() < 0.4:  # a broadcast one
        shape = shape[draw.randint(0, len(shape)) :]
        shape = tuple(1 if draw.random() < 0.3 else n for n in shape)
    name = draw.choice([*BINARY])
    function, has_slope = BINARY[name]
    return Call(name, function, (x, p.operand(shape, x)), has_slope=has_slope)


def where(p: Program, x: Known) -> Call | None:
    y = p.operand(shape_of(x), x)
    return Call("where", lambda a, b: torch.where(a > b, a, b * 2), (x, y), is_smooth=False)


def cast(p: Program, x: Known) -> Call | None:
    dtype = p.draw.choice((torch.float64, torch.float32, torch.float64, torch.bfloat16))
    return Call(f"to {dtype}", lambda a: a.to(dtype), (x,))


# -- reductions --------------------------------------------------------------------------------


def reduction(p: Program, x: Known) -> Call | None:
    shape, draw = shape_of(x), p.draw
    if not shape:
        return None
    dims = draw.sample(range(len(shape)), draw.randint(1, min(2, len(shape))))
    keep = draw.random() < 0.5
    names = ["sum", "sum", "mean", "amax", "amin", "logsumexp", "var", "norm", "prod"]
    if 0 in shape or math.prod(shape[d] for d in dims) < 2:
        names = ["sum"]
    name = draw.choice(names)
    if name == "prod":
        dims = dims[:1]
        return Call("prod", lambda a: torch.prod(a, dims[0], keepdim=keep), (x,))
    if name == "norm":
        return Call("norm", lambda a: torch.linalg.vector_norm(a + 2, 2, dims, keep), (x,))
    function = getattr(torch, name)
    has_slope = name not in ("amax", "amin")
    call = Call(f"{name} {dims}", lambda a: function(a, dims, keepdim=keep), (x,))
    return Call(call.name, call.function, call.operands, has_slope=has_slope)


def softmax(p: Program, x: Known) -> Call | None:
    if not shape_of(x):
        return None
    dim, function = dim_of(p, x), p.draw.choice((F.softmax, F.log_softmax))
    return Call(f"softmax {dim}", lambda a: function(a, dim), (x,))


def norm(p: Program, x: Known) -> Call | None:
    shape = shape_of(x)
    if not shape or shape[-1] < 2:
        return None
    over = shape[-1:]
    how = p.draw.randrange(3)
    if how == 2:
        w = p.operand(over, x)
        return Call("rms_norm", lambda a, b: F.rms_norm(a, over, b, 1e-2), (x, w))
    more = (p.operand(over, x), p.operand(over, x)) if how else ()
    return Call("layer_norm", lambda a, *b: F.layer_norm(a, over, *b, eps=1e-2), (x, *more))


def ranking(p: Program, x: Known) -> Call | None:
    if not shape_of(x) or 0 in shape_of(x):
        return None
    dim, down = dim_of(p, x), p.draw.random() < 0.5
    how, k = p.draw.randrange(4), p.draw.randint(1, shape_of(x)[dim])
    if how == 0:
        return Call("argmax", lambda a: torch.argmax(a, dim), (x,), is_smooth=False, is_exact=True)
    if how == 1:
        values = lambda a: torch.topk(a, k, dim, down)[0]  # noqa: E731
    elif how == 2:
        values = lambda a: torch.sort(a, dim=dim, descending=down, stable=True)[0]  # noqa: E731
    else:
        return Call("cumsum", lambda a: torch.cumsum(a, dim), (x,))
    return Call("topk" if how == 1 else "sort", values, (x,), has_slope=False)


# -- views -------------------------------------------------------------------------------------


def view(p: Program, x: Known) -> Call | None:
    """What often is a view of its operand."""
    shape, draw = shape_of(x), p.draw
    n, how = len(shape), draw.randrange(10)
    if how == 0 or not n:
        dim = draw.randint(0, n)
        return _view(f"unsqueeze {dim}", lambda a: a.unsqueeze(dim), x)
    dim = dim_of(p, x)
    if how == 1:
        dims = draw.sample(range(n), n)
        return _view(f"permute {dims}", lambda a: a.permute(dims), x)
    if how == 2:
        return _reshape(p, x)
    if how == 3:
        start = draw.randint(0, shape[dim])
        cut = (
            *[slice(None)] * dim,
            slice(start, draw.choice((9, shape[dim])), draw.choice((1, 2))),
        )
        return _view(f"{cut}", lambda a: a[cut], x)
    if how == 4 and shape[dim]:
        at = draw.randrange(shape[dim])
        return _view(f"select {dim} {at}", lambda a: a.select(dim, at), x)
    if how == 5:
        front = p.extent()
        return _view(f"expand {front}", lambda a: a.expand(front, *shape), x)
    if how == 6:
        squeezed = lambda a: a.squeeze(dim)  # noqa: E731
        return _view(f"squeeze {dim}", squeezed, x)
    if how == 8:
        copied = draw.choice((lambda a: a.contiguous(), lambda a: a.clone(), lambda a: a * 1))
        return _view("copy", copied, x)
    if how == 7:
        parts = draw.choice((1, 2, 3))
        return _view(f"chunk {parts} {dim}", lambda a: torch.chunk(a, parts, dim), x)
    return _view(f"transpose {dim}", lambda a: a.transpose(0, dim), x)


def _view(name: str, function: Callable[[Any], Any], x: Known) -> Call:
    return Call(name, function, (x,), is_exact=True)


def _reshape(p: Program, x: Known) -> Call:
    shape = shape_of(x)
    found: list[Shape] = [(math.prod(shape),), (*shape[:1], math.prod(shape[1:]))]
    for d, n in enumerate(shape):
        found += [(*shape[:d], k, n // k, *shape[d + 1 :]) for k in (2, 3) if n and n % k == 0]
        found += [(*shape[:d], n * shape[d + 1], *shape[d + 2 :])] if d + 1 < len(shape) else []
    after = p.draw.choice(found)
    return _view(f"reshape {after}", lambda a: a.reshape(after), x)


def joined(p: Program, x: Known) -> Call | None:
    shape = shape_of(x)
    if not shape:
        return None
    dim = dim_of(p, x)
    if p.draw.random() < 0.3:
        y = p.operand(shape, x)
        return Call(f"stack {dim}", lambda a, b: torch.stack([a, b], dim), (x, y), is_exact=True)
    n = shape[dim] if p.draw.random() < 0.5 else p.extent()
    y = p.operand((*shape[:dim], n, *shape[dim + 1 :]), x)
    return Call(f"cat {dim}", lambda a, b: torch.cat([a, b], dim), (x, y), is_exact=True)


def moved(p: Program, x: Known) -> Call | None:
    """What moves elements along a dim."""
    if not shape_of(x):
        return None
    dim, how, n = dim_of(p, x), p.draw.randrange(4), p.draw.choice((1, 2))
    front = [0, 0] * (len(shape_of(x)) - 1 - dim)
    functions: list[Callable[[Any], Any]] = [
        lambda a: a.flip(dim),
        lambda a: torch.roll(a, n, dim),
        lambda a: F.pad(a, [*front, n, 1]),
        lambda a: torch.repeat_interleave(a, n, dim),
    ]
    return _view(("flip", "roll", "pad", "repeat_interleave")[how], functions[how], x)


# -- indices -----------------------------------------------------------------------------------


def indexed(p: Program, x: Known) -> Call | None:
    shape = shape_of(x)
    if not shape:
        return None
    dim, how = dim_of(p, x), p.draw.randrange(4)
    if not shape[dim]:
        return None
    if how == 0:
        i = p.places((p.draw.choice((1, 2, 5)),), shape[dim])
        return Call(
            "index_select", lambda a, i: torch.index_select(a, dim, i), (x, i), is_exact=True
        )
    if how == 1:
        i = p.places(tuple(n if d != dim else 2 for d, n in enumerate(shape)), shape[dim])
        return Call("gather", lambda a, i: torch.gather(a, dim, i), (x, i), is_exact=True)
    if how == 2 and len(shape) == 2:
        i = p.places((p.draw.choice((1, 3)), 2), shape[0])
        return Call("embedding", lambda w, i: F.embedding(i, w), (x, i), is_exact=True)
    i = p.places((2,), shape[dim])
    y = p.operand(tuple(2 if d == dim else n for d, n in enumerate(shape)), x)
    return Call("index_add", lambda a, i, b: torch.index_add(a, dim, i, b), (x, i, y))


def loss(p: Program, x: Known) -> Call | None:
    shape = shape_of(x)
    if len(shape) < 2 or 0 in shape:
        return None
    if p.draw.random() < 0.5:
        return Call("mse_loss", F.mse_loss, (x, p.operand(shape, x)))
    target = p.places((shape[0], *shape[2:]), shape[1])
    return Call("cross_entropy", F.cross_entropy, (x, target))


PRODUCTS: tuple[Family, ...] = (matmul, matmul, of_another, linear, linear, with_itself, einsum)
FAMILIES: tuple[Family, ...] = (
    *PRODUCTS, *PRODUCTS, conv, pool, attention, attention, unary, unary, unary, binary, binary,
    binary, where, cast, reduction, reduction, reduction, softmax, norm, norm, ranking, view, view,
    view, view, joined, moved, indexed, indexed, loss,
)  # fmt: skip

# -- row by row --------------------------------------------------------------------------------


def _inner(p: Program, x: Known) -> Call | None:
    """A view or a sum of dims behind the first."""
    shape, draw = shape_of(x), p.draw
    if len(shape) < 2 or 0 in shape[1:]:
        return None
    dim, how = draw.randrange(1, len(shape)), draw.randrange(6)
    if how == 0:
        return _view("flatten(1)", lambda a: a.flatten(1), x)
    if how == 1 and len(shape) > 2:
        return Call(f"sum {dim}", lambda a: a.sum(dim), (x,))
    if how == 2:
        return _view("cat with itself", lambda a: torch.cat([a, a * 2], dim), x)
    if how == 3 and len(shape) > 2:
        return _view(f"transpose {dim} -1", lambda a: a.transpose(dim, -1), x)
    if how == 4:
        return _view("slice", lambda a: a[..., : (shape[-1] + 1) // 2], x)
    return _view("unsqueeze 1", lambda a: a.unsqueeze(1), x) if len(shape) < 4 else None


def _mixed(p: Program, x: Known) -> Call | None:
    shape = shape_of(x)
    if len(shape) != 3 or 0 in shape:
        return None
    attend = F.scaled_dot_product_attention
    return Call("attention", lambda a: attend(a, torch.tanh(a), a * 0.5), (x,))


def _by_features(family: Family) -> Family:
    return lambda p, x: family(p, x) if len(shape_of(x)) > 1 else None


def _over_features(p: Program, x: Known) -> Call | None:
    return Call("softmax -1", lambda a: F.softmax(a, -1), (x,)) if len(shape_of(x)) > 1 else None


#: What computes each row of the first dim by itself.
ROWS: tuple[Family, ...] = (
    _by_features(linear), _by_features(linear), _by_features(linear), unary, unary, _inner,
    _by_features(norm), _over_features, _mixed,
)  # fmt: skip
