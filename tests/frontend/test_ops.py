"""Every operation of `fd.ops`: on one device as the plain torch call, and on any layout the same.

Each case is one row: operands, how the fusion spells it, how torch does. The sweeps run a row over
layouts of its operands and of its result: every dim split over 2, 3 and 4 ranks (with extents that
do not divide, and ranks that hold nothing), operands split differently, meshes with two axes,
Partial operands, and with or without a law on the result.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, permutations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import sampling
from helpers.oracle import check_everywhere, dense_strides, has_strides, is_close
from helpers.surface_cases import CASES as SURFACE
from helpers.surface_cases import OWN
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.frontend import ops as frontend

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I32, I64, BOOL = torch.int32, torch.int64, torch.bool


# -- operands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arg:
    """An operand.

    Values are multiples of 1/4, exact in every dtype, so that ties, zeros and sums are exact too.

    Attributes:
        shape: global extents.
        dtype: element type.
        values: from which set: see `tensor`; an integer n means indices below n.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = F64
    values: str | int = "any"

    def tensor(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, self.shape, generator=generator)

        if isinstance(self.values, int):
            return draw(0, self.values).to(self.dtype)
        if self.dtype == BOOL:
            return draw(0, 2).bool()
        scale = 4 if self.dtype.is_floating_point else 1
        ranges = {"positive": (1, 9), "unit": (-3, 4), "above": (4, 12)}
        x = draw(*ranges.get(self.values, (-8, 9))).to(self.dtype) / scale
        if self.values == "nonzero":
            x = torch.where(x == 0, 5 / scale, x)
        if self.values == "special":
            strange = torch.tensor([torch.nan, torch.inf, -torch.inf])[draw(0, 3)]
            x = torch.where(draw(0, 2) == 0, x, strange.to(x.dtype))
        return x.to(self.dtype)

    @property
    def may_be_partial(self) -> bool:
        """Whether a sum of parts gives the value exactly."""
        wide = self.dtype in (F64, F32, I32, I64)
        return wide and self.values != "special"


@dataclass(frozen=True)
class Case:
    """One row: an operation on operands, and the plain torch call.

    Attributes:
        name: of the test.
        args: the operands.
        fused: `(ops, *handles) -> handle`.
        plain: `(*tensors) -> tensor`.
        tries: how many combinations of layouts a sweep tries on a mesh.
        op: name of the operation that the row covers; by default the part of `name` before "-".
    """

    name: str
    args: tuple[Arg, ...]
    fused: Callable[..., Any]
    plain: Callable[..., Any]
    tries: int = 5
    op: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def covers(self) -> str:
        return self.op or self.name.split("-")[0]

    def tensors(self) -> list[Tensor]:
        return [a.tensor(seed) for seed, a in enumerate(self.args)]


def named(name: str) -> Callable[..., Any]:
    """The operation of this name, called with handles only."""
    return lambda ops, *handles: getattr(ops, name)(*handles)


def spelled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One function for handles and tensors alike: Python operators and methods."""
    return lambda ops, *handles: function(*handles)


def with_more(
    name: str,
    args: tuple[Arg, ...],
    plain: Callable[..., Any],
    *more: Any,
    tries: int = 5,
    **settings: Any,
) -> Case:
    """A row of an operation and a torch call that take, behind the operands, the same arguments."""
    op = name.split("-")[0]
    return Case(
        name,
        args,
        lambda ops, *handles: getattr(ops, op)(*handles, *more, **settings),
        lambda *tensors: plain(*tensors, *more, **settings),
        tries,
    )


# -- the rows ------------------------------------------------------------------------------------

UNARY_VALUES = {
    "acos": "unit", "asin": "unit", "atanh": "unit", "acosh": "above", "log": "positive",
    "log10": "positive", "log2": "positive", "log1p": "positive", "sqrt": "positive",
    "rsqrt": "positive", "reciprocal": "nonzero", "isfinite": "special", "isinf": "special",
    "isnan": "special",
}  # fmt: skip
UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf",
    "erfc", "exp", "exp2", "expm1", "floor", "isfinite", "isinf", "isnan", "log", "log10",
    "log1p", "log2", "logical_not", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign",
    "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc",
)  # fmt: skip
ACTIVATIONS = ("relu", "silu", "elu", "softplus", "gelu", "leaky_relu")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
PLAIN_BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floor_divide": torch.floor_divide, "remainder": torch.remainder, "mod": torch.remainder,
    "pow": torch.pow, "maximum": torch.maximum, "minimum": torch.minimum, "fmod": torch.fmod,
    "atan2": torch.atan2, **{name: getattr(torch, name) for name in COMPARISONS},
    "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}  # fmt: skip
BITWISE = {
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
}


def unary_rows() -> Iterator[Case]:
    for name in UNARY:
        arg = Arg((5, 3), F64, UNARY_VALUES.get(name, "any"))
        yield Case(name, (arg,), named(name), getattr(torch, name))
    for name in ACTIVATIONS:
        yield Case(name, (Arg((5, 3)),), named(name), getattr(F, name))
    for dtype in (I64, BOOL):
        yield Case(
            f"bitwise_not-{dtype}", (Arg((5, 3), dtype),), named("bitwise_not"), torch.bitwise_not
        )
    yield with_more("gelu-tanh", (Arg((5, 3)),), F.gelu, approximate="tanh")
    yield with_more("leaky_relu-slope", (Arg((5, 3)),), F.leaky_relu, 0.25)
    for limits in ({"min": -1}, {"max": 0.5}, {"min": -0.25, "max": 1}):
        yield with_more(f"clamp-{limits}", (Arg((5, 3)),), torch.clamp, **limits)
    casts = (F64, F32), (F32, BF16), (F64, I64), (I32, F32), (F64, BOOL), (BOOL, F64)
    for before, after in casts:
        yield with_more(f"cast-{before}-{after}", (Arg((5, 3), before),), Tensor.to, after)


def binary_rows() -> Iterator[Case]:
    left, right = Arg((5, 3)), Arg((5, 3), F64, "nonzero")
    for name, plain in PLAIN_BINARY.items():
        base = Arg((5, 3), F64, "positive") if name == "pow" else left
        yield Case(name, (base, right), named(name), plain, tries=10)
    for name, plain in BITWISE.items():
        for dtype in (I64, BOOL):
            args = Arg((5, 3), dtype), Arg((5, 3), dtype)
            yield Case(f"{name}-{dtype}", args, named(name), plain)
    for shapes in (((5, 3), (3,)), ((5, 3), (5, 1)), ((4, 1, 3), (5, 1)), ((5, 3), ())):
        args = Arg(shapes[0]), Arg(shapes[1])
        yield Case(f"add-{shapes}", args, named("add"), torch.add, tries=12)
        yield Case(f"mul-{shapes}", args, named("mul"), torch.mul, tries=12)
    pairs = ((F32, F64), (F16, F32), (BF16, F16), (I64, F32), (I32, I64), (BOOL, I32), (BOOL, F16))
    for a, b in pairs:
        args = Arg((5, 3), a), Arg((5, 3), b)
        yield Case(f"add-{a}-{b}", args, named("add"), torch.add, tries=4)
        yield Case(f"mul-{b}-{a}", args[::-1], named("mul"), torch.mul, tries=4)
    for a, b in ((I64, I64), (I32, F32), (I64, F64)):
        args = Arg((5, 3), a), Arg((5, 3), b, "nonzero")
        for name in ("div", "floor_divide", "remainder", "fmod", "maximum"):
            yield Case(f"{name}-{a}-{b}", args, named(name), PLAIN_BINARY[name], tries=4)
    yield Case(
        "add-itself", (Arg((5, 3)),), lambda ops, x: ops.add(x, x), lambda x: torch.add(x, x)
    )


#: Python operators with a number on one side: one spelling for handles and tensors.
OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda x: x + 2, "radd": lambda x: 2.5 + x, "sub": lambda x: x - 2,
    "rsub": lambda x: 2 - x, "mul": lambda x: x * 2.5, "rmul": lambda x: 3 * x,
    "div": lambda x: x / 2, "rdiv": lambda x: 2 / x, "floordiv": lambda x: x // 2,
    "rfloordiv": lambda x: 7 // x, "mod": lambda x: x % 3, "rmod": lambda x: 7 % x,
    "pow": lambda x: x**2, "rpow": lambda x: 2**x, "neg": operator.neg, "abs": operator.abs,
    "lt": lambda x: x < 1, "le": lambda x: x <= 1, "gt": lambda x: x > 1, "ge": lambda x: x >= 1,
    "eq": lambda x: x == 1, "ne": lambda x: x != 1, "rlt": lambda x: x > 1,
    "true": lambda x: x + True,
}  # fmt: skip
INTEGER_OPERATORS: dict[str, Callable[..., Any]] = {
    "and": lambda x: x & 3, "rand": lambda x: 3 & x, "or": lambda x: x | 3, "ror": lambda x: 3 | x,
    "xor": lambda x: x ^ 3, "rxor": lambda x: 3 ^ x, "invert": operator.invert,
}  # fmt: skip
METHODS: dict[str, Callable[..., Any]] = {
    "T": lambda x: x.permute(1, 0), "sum": lambda x: x.sum(0), "mean": lambda x: x.mean(),
    "reshape": lambda x: x.reshape(-1), "view": lambda x: x.view(3, 5),
    "transpose": lambda x: x.transpose(0, -1), "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0), "to": lambda x: x.to(torch.float32),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 2, 3), "matmul": lambda x: x @ x.transpose(0, 1),
}  # fmt: skip


def operator_rows() -> Iterator[Case]:
    for name, function in OPERATORS.items():
        for dtype in (F64, I64):
            if (name, dtype) == ("rpow", I64):
                continue  # torch refuses negative integer powers
            arg = Arg((5, 3), dtype, "nonzero")
            yield Case(f"python-{name}-{dtype}", (arg,), spelled(function), function, tries=4)
    for name, function in INTEGER_OPERATORS.items():
        yield Case(f"python-{name}", (Arg((5, 3), I64),), spelled(function), function, tries=4)
    for name, function in METHODS.items():
        yield Case(f"python-{name}", (Arg((5, 3)),), spelled(function), function, tries=6)


def view_rows() -> Iterator[Case]:
    def same(name: str, shape: tuple[int, ...], function: Callable[..., Any], tries: int) -> Case:
        """A row that indexes or calls a method that tensors have as well."""
        return Case(name, (Arg(shape),), spelled(function), function, tries)

    yield Case("set", (Arg((5, 3)),), named("set"), lambda x: x, tries=40)
    for dims in ((1, 0, 2), (2, 0, 1), (-1, 0, -2)):
        yield with_more(f"permute-{dims}", (Arg((5, 3, 2)),), Tensor.permute, dims)
    yield Case("transpose", (Arg((5, 3, 2)),), named("transpose"), lambda x: x.transpose(-2, -1))
    yield with_more("transpose-02", (Arg((5, 3, 2)),), Tensor.transpose, 0, 2)
    reshapes = (
        ((6, 4), (24,)), ((24,), (6, 4)), ((6, 4), (2, 3, 4)), ((2, 3, 4), (6, 4)),
        ((6, 4), (4, 6)), ((5, 4), (20,)), ((20,), (5, 4)), ((5,), (5, 1)), ((1, 5), (5,)),
        ((5, 1, 3), (1, 15)), ((2, 3, 4), (2, -1)), ((0, 4), (0, 2, 2)), ((3, 0), (0,)),
        ((1,), ()), ((), (1, 1)), ((12, 2), (3, 4, 2)), ((8, 3), (2, 4, 3)), ((7, 2), (14,)),
    )  # fmt: skip
    for before, after in reshapes:
        for op in ("reshape", "view"):
            if op == "view" and len(before) != 2:
                continue
            name = f"{op}-{before}-{after}"
            yield with_more(name, (Arg(before),), Tensor.reshape, after, tries=10)
    for span in ((0, -1), (1, 2), (0, 1), (-2, -1)):
        yield with_more(f"flatten-{span}", (Arg((5, 2, 3)),), Tensor.flatten, *span)
    expanded = ((5, 1), (5, 4)), ((1, 3), (2, 5, 3)), ((5, 1, 3), (-1, 4, -1)), ((), (3,))
    for before, after in expanded:
        for op in ("expand", "broadcast_to", "broadcast"):
            yield with_more(f"{op}-{before}-{after}", (Arg(before),), Tensor.expand, after)
    yield Case(
        "broadcast-bools",
        (Arg((5, 3)),),
        lambda ops, x: ops.broadcast(x, [True, False, True, False]),
        lambda x: x[None, :, None, :],
    )
    for shape, after, where in (
        ((5,), (5, 3), (0,)),
        ((3,), (5, 3), (1,)),
        ((5, 3), (5, 4, 3), (0, 2)),
    ):
        yield Case(
            f"broadcast_in_dim-{shape}-{after}-{where}",
            (Arg(shape),),
            lambda ops, x, after=after, where=where: ops.broadcast_in_dim(x, after, where),
            lambda x, after=after, where=where: x.reshape(
                [x.shape[where.index(d)] if d in where else 1 for d in range(len(after))]
            ).expand(after),
        )
    for dim in (0, 1, 2, -1, -3):
        yield same(f"unsqueeze-{dim}", (5, 3), lambda x, dim=dim: x.unsqueeze(dim), 5)
    for dims in (None, 1, -2, (1, 3), (0, 1)):
        yield Case(
            f"squeeze-{dims}",
            (Arg((5, 1, 3, 1)),),
            lambda ops, x, dims=dims: ops.squeeze(x, dims),
            lambda x, dims=dims: x.squeeze() if dims is None else x.squeeze(dims),
        )
    yield Case(
        "slice",
        (Arg((7, 5)),),
        lambda ops, x: ops.slice(x, [1, 0], [6, 5]),
        lambda x: x[1:6, 0:5],
    )
    yield Case(
        "slice-strides",
        (Arg((7, 5)),),
        lambda ops, x: ops.slice(x, [0, 1], [7, 5], [2, 3]),
        lambda x: x[0:7:2, 1:5:3],
    )
    indices: dict[str, Any] = {
        "int": 2, "negative": -1, "range": slice(1, 4), "open": slice(None, 3),
        "step": slice(None, None, 2), "from-end": slice(-3, -1), "beyond": slice(2, 99),
        "empty": slice(3, 3), "ellipsis": (..., 1), "new": (None, slice(None), 0),
        "mixed": (slice(1, None), None, ..., -1), "whole": slice(None), "both": (3, 1),
        "backwards": slice(4, 2),
    }  # fmt: skip
    for name, where in indices.items():
        yield same(f"index-{name}", (5, 3), lambda x, where=where: x[where], 10)

    def cat(name: str, args: tuple[Arg, ...], times: int = 1, dim: int = 0, tries: int = 5) -> Case:
        return Case(
            f"cat-{name}",
            args,
            lambda ops, *xs: ops.cat(xs * times, dim),
            lambda *xs: torch.cat(xs * times, dim),
            tries,
        )

    for dim in (0, 1, -1):
        yield cat(f"{dim}", (Arg((5, 3)),) * 3, dim=dim, tries=24)
    yield cat("uneven", (Arg((5, 3)), Arg((0, 3)), Arg((2, 3))))
    yield cat("itself", (Arg((5, 3)),), times=3, dim=1)
    yield cat("dtypes", (Arg((5, 3), F32), Arg((5, 3), F64)))
    yield with_more("stride_order", (Arg((5, 3, 2)),), lambda x, order: x, [0, 2, 1])


def where_rows() -> Iterator[Case]:
    mask = Arg((5, 3), BOOL)
    yield Case("where", (mask, Arg((5, 3)), Arg((3,))), named("where"), torch.where, tries=24)
    yield Case(
        "where-dtypes", (mask, Arg((5, 3), F32), Arg((5, 3), F64)), named("where"), torch.where
    )
    yield with_more("where-number", (mask, Arg((5, 3))), torch.where, 2)
    yield with_more("where-numbers", (mask,), torch.where, 1.5, 0.0)
    yield Case(
        "where-compared",
        (Arg((5, 3)), Arg((5, 3))),
        lambda ops, x, y: ops.where(x > y, x, -y),
        lambda x, y: torch.where(x > y, x, -y),
        tries=24,
    )


REDUCED = (None, 0, 1, -1, (0, 2), (0, 1, 2), (-1, 0))


def all_dims(dims: Any, rank: int) -> tuple[int, ...]:
    if dims is None:
        return tuple(range(rank))
    return tuple(d % rank for d in ((dims,) if isinstance(dims, int) else dims))


def torch_prod(x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    """torch.prod takes one dim at a time."""
    for d in sorted(all_dims(dims, x.ndim), reverse=True):
        x = x.prod(d, keepdim=keepdim)
    return x


PLAIN_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x, dims, keep: torch.sum(x, all_dims(dims, x.ndim), keepdim=keep),
    "prod": torch_prod,
    "amax": lambda x, dims, keep: torch.amax(x, all_dims(dims, x.ndim), keepdim=keep),
    "amin": lambda x, dims, keep: torch.amin(x, all_dims(dims, x.ndim), keepdim=keep),
    "mean": lambda x, dims, keep: torch.mean(x, all_dims(dims, x.ndim), keepdim=keep),
    "any": lambda x, dims, keep: torch.any(x, all_dims(dims, x.ndim), keepdim=keep),
    "all": lambda x, dims, keep: torch.all(x, all_dims(dims, x.ndim), keepdim=keep),
}


def reduction_rows() -> Iterator[Case]:
    def row(op: str, arg: Arg, dims: Any, keep: bool, name: str, tries: int = 8) -> Case:
        plain = PLAIN_REDUCTIONS[op]
        return Case(
            f"{op}-{name}",
            (arg,),
            lambda ops, x: getattr(ops, op)(x, dims, keepdim=keep),
            lambda x: plain(x, dims, keep),
            tries,
        )

    for op in PLAIN_REDUCTIONS:
        dtype = BOOL if op in ("any", "all") else F64
        values = "nonzero" if op == "prod" else "any"
        for dims, keep in product(REDUCED, (False, True)):
            yield row(op, Arg((5, 2, 3), dtype, values), dims, keep, f"{dims}-{keep}")
        yield row(op, Arg((), dtype), None, False, "scalar", 4)
        if op not in ("mean", "amax", "amin"):
            yield row(op, Arg((0, 3), dtype), 0, False, "nothing", 5)
        yield row(op, Arg((0, 3), dtype), 1, False, "beside-nothing", 5)
        for other in (I64, I32, F32, BOOL):
            if other == dtype or (op == "mean" and other in (I64, I32, BOOL)):
                continue
            yield row(op, Arg((5, 3), other, values), 0, False, f"{other}", 5)
    for dtype in (F16, BF16):
        for op in ("sum", "mean", "amax"):
            yield row(op, Arg((5, 3), dtype), 0, False, f"{dtype}", 6)
    for op in ("sum", "prod"):
        arg = Arg((5, 3), F32, "nonzero")
        yield with_more(f"{op}-dtype", (arg,), getattr(torch, op), 0, dtype=F64)


def contraction_rows() -> Iterator[Case]:
    shapes = (
        ((5, 7), (7, 3)), ((7,), (7,)), ((5, 7), (7,)), ((7,), (7, 3)), ((3, 5, 7), (3, 7, 2)),
        ((3, 5, 7), (7, 2)), ((5, 7), (3, 7, 2)), ((2, 1, 3, 4), (5, 4, 3)), ((3, 5, 7), (7,)),
        ((5, 0), (0, 3)), ((0, 4), (4, 3)), ((1, 4), (4, 1)),
    )  # fmt: skip
    for a, b in shapes:
        tries = 60 if (a, b) == shapes[0] else 24
        yield Case(f"matmul-{a}-{b}", (Arg(a), Arg(b)), named("matmul"), torch.matmul, tries)
    for dtype in (I64, F32, F16, BF16):
        args = Arg((5, 7), dtype), Arg((7, 3), dtype)
        yield Case(f"matmul-{dtype}", args, named("matmul"), torch.matmul)
    yield Case("matmul-itself", (Arg((5, 5)),), lambda ops, x: x @ x, lambda x: x @ x)
    weight, bias = Arg((3, 7)), Arg((3,))
    for shape in ((5, 7), (2, 5, 7), (7,)):
        args = Arg(shape), weight
        yield Case(f"linear-{shape}", args, named("linear"), F.linear, 32)
        yield Case(f"linear-bias-{shape}", (*args, bias), named("linear"), F.linear, 40)
    yield Case("linear-row", (Arg((5, 7)), Arg((7,))), named("linear"), F.linear)
    for vocabulary, dtype in ((7, I64), (5, I32), (9, I64)):
        for shape in ((5,), (2, 3)):
            yield Case(
                f"embedding-{vocabulary}-{shape}",
                (Arg(shape, dtype, vocabulary), Arg((vocabulary, 3))),
                named("embedding"),
                F.embedding,
                32,
            )


def composite_rows() -> Iterator[Case]:
    for op, plain in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        for dim in (-1, 0, 1):
            yield with_more(f"{op}-{dim}", (Arg((5, 3, 4)),), plain, dim)
    x, weight = Arg((5, 3, 4)), Arg((4,))
    yield Case("layer_norm", (x,), named("layer_norm"), lambda x: F.layer_norm(x, [4]))
    yield Case(
        "layer_norm-affine",
        (x, weight, weight),
        lambda ops, x, w, b: ops.layer_norm(x, 4, w, b),
        lambda x, w, b: F.layer_norm(x, [4], w, b),
        24,
    )
    yield Case(
        "layer_norm-two-dims",
        (x, Arg((3, 4))),
        lambda ops, x, w: ops.layer_norm(x, (3, 4), w, eps=1e-3),
        lambda x, w: F.layer_norm(x, [3, 4], w, None, 1e-3),
    )
    yield Case("rms_norm", (x,), named("rms_norm"), lambda x: F.rms_norm(x, [4]))
    yield Case(
        "rms_norm-affine",
        (x, weight),
        lambda ops, x, w: ops.rms_norm(x, 4, w, 1e-3),
        lambda x, w: F.rms_norm(x, [4], w, 1e-3),
        24,
    )
    yield Case(
        "rms_norm-two-dims",
        (x, Arg((3, 4))),
        lambda ops, x, w: ops.rms_norm(x, (3, 4), w),
        lambda x, w: F.rms_norm(x, [3, 4], w),
    )
    q, k, v = Arg((2, 3, 5, 4)), Arg((2, 3, 6, 4)), Arg((2, 3, 6, 2))
    attend = F.scaled_dot_product_attention
    fused = named("scaled_dot_product_attention")
    yield Case("scaled_dot_product_attention", (q, k, v), fused, attend, 40)
    for shape in ((5, 6), (2, 1, 5, 6), (2, 3, 1, 6)):
        yield Case(
            f"scaled_dot_product_attention-mask-{shape}", (q, k, v, Arg(shape)), fused, attend, 30
        )
    bools = Arg((5, 6), BOOL)
    yield Case("scaled_dot_product_attention-bool", (q, k, v, bools), fused, attend, 20)
    for heads, batch in (((2, 1), (2, 3)), ((1, 3), (2, 1)), ((1, 1), (1, 3))):
        few = Arg((*heads, 6, 4)), Arg((*batch, 6, 2))
        yield Case(f"scaled_dot_product_attention-{heads}-{batch}", (q, *few), fused, attend, 20)
    for more in ({"is_causal": True}, {"scale": 0.25}):
        name = f"scaled_dot_product_attention-{more}"
        yield with_more(name, (q, k, v), attend, tries=30, **more)
    yield Case(
        "scaled_dot_product_attention-3d",
        (Arg((3, 5, 4)), Arg((3, 5, 4)), Arg((3, 5, 4))),
        fused,
        attend,
        20,
    )


GROUPS = (
    unary_rows, binary_rows, operator_rows, view_rows, where_rows, reduction_rows,
    contraction_rows, composite_rows,
)  # fmt: skip
CASES = [case for rows in GROUPS for case in rows()]
#: Rows of these are much alike: a fault that one finds on a mesh, the next one finds, too.
ALIKE = {
    case.name
    for rows in (unary_rows, binary_rows, operator_rows, view_rows, reduction_rows)
    for case in rows()
}
MESHES = {
    "two": DeviceMesh([1, 0]),
    "three": DeviceMesh([2, 0, 3]),
    "four": DeviceMesh.arange(x=4),
    "grid": DeviceMesh([[0, 2, 4], [3, 1, 5]]),
}
#: Those on which every operation is swept: the grid has an axis of two ranks, which is not arranged
#: as they are numbered either.
SWEPT = {name: mesh for name, mesh in MESHES.items() if name != "two"}


def swept_on(number: int, case: Case) -> tuple[str, ...]:
    """The meshes on which a row is swept: of a sample, the grid and a line, or one in turn."""
    if sampling.is_whole():
        return tuple(SWEPT)
    if case.name in ALIKE:
        return ([*SWEPT][number % len(SWEPT)],)
    return (("three", "four")[number % 2], "grid")


SWEEPS = [(case, name) for n, case in enumerate(CASES) for name in swept_on(n, case)]


# -- running a row -------------------------------------------------------------------------------


def define(case: Case, layouts: list[Layout | None], law: Layout | None) -> mf.FusionDefinition:
    with mf.FusionDefinition("op") as fd:
        handles = [
            fd.define_tensor(a.shape, dtype=a.dtype, mesh=layout)
            for a, layout in zip(case.args, layouts, strict=True)
        ]
        result = case.fused(fd.ops, *handles)
        if law is not None:
            result = fd.ops.set(result) if any(result is h for h in handles) else result
            result.on(law)
        fd.add_output(result)
    return fd


def layouts_of(shape: tuple[int, ...], mesh: DeviceMesh, may_be_partial: bool) -> list[Layout]:
    """Every layout of a tensor on a mesh, both orders where two axes split one dim."""
    per_axis = [Replicate(), *map(Shard, range(len(shape)))]
    if may_be_partial:
        per_axis.append(Partial("sum"))
    found = []
    for placements in product(per_axis, repeat=mesh.ndim):
        by_axis = dict(zip(mesh.axes, placements, strict=True))
        found.append(Layout(mesh, by_axis))
        if mesh.ndim == 2 and placements[0] == placements[1] and isinstance(placements[0], Shard):
            found.append(Layout(mesh, by_axis, {placements[0].dim: mesh.axes[::-1]}))
    return found


def sweep(case: Case, mesh: DeviceMesh, result: Tensor) -> list[tuple[Any, ...]]:
    """Combinations of layouts of the operands and of the result: all, or a fixed sample."""
    choices: list[list[Layout | None]] = [
        list(layouts_of(a.shape, mesh, a.may_be_partial)) for a in case.args
    ]
    choices.append([None, *layouts_of(tuple(result.shape), mesh, False)])
    tries = case.tries * mesh.ndim
    if math.prod(map(len, choices)) <= tries:
        return list(product(*choices))
    generator = random.Random(case.name)
    return [*zip(*(evenly(layouts, tries, generator) for layouts in choices), strict=True)]


def evenly(layouts: list[Any], n: int, generator: random.Random) -> list[Any]:
    """n draws in which no layout comes twice more often than another."""
    whole, rest = divmod(n, len(layouts))
    drawn = [generator.sample(layouts, len(layouts)) for _ in range(whole)]
    return [*chain(*drawn), *generator.sample(layouts, rest)]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_a_required_memory_order_is_kept_on_every_rank(order: tuple[int, ...]) -> None:
    x = Arg((5, 4, 6)).tensor(0)
    dims = sorted(range(3), key=lambda d: -order[d])
    mesh = MESHES["three"]
    for source, goal in product(layouts_of((5, 4, 6), mesh, True), repeat=2):
        if any(isinstance(p, Partial) for p in goal.placements):
            continue
        with mf.FusionDefinition() as fd:
            h = fd.define_tensor([5, 4, 6], F64, source)
            fd.add_output((h * 2).on(goal), stride_order=order)
            fd.add_output(fd.ops.set(h).on(goal), stride_order=order)
            fd.add_output(h.permute(1, 2, 0), stride_order=order)
            fd.add_output(fd.ops.stride_order(h, order).on(goal))
        program = mf.compile(fd)
        expected = [x * 2, x, x.permute(1, 2, 0), x]
        for outputs, i in product(check_everywhere(program, [x], expected).per_rank, range(4)):
            if outputs[i] is not None:
                assert has_strides(outputs[i], dense_strides(outputs[i].shape, dims)), program


def test_every_operation_has_a_row() -> None:
    covered = {c.covers for c in CASES} | {"uniform", "dropout"}
    covered |= {name.split("-")[0] for name in (*SURFACE, *OWN)}  # as torch spells it, or not
    assert not frontend.BY_NAME.keys() - covered


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_torch_call(case: Case) -> None:
    tensors = case.tensors()
    expected = case.plain(*tensors)
    fd = define(case, [None] * len(tensors), None)
    (result,) = mf.reference(fd, tensors)
    assert is_close(result, expected, exact=True)
    # What is printed and what buffers are made of was inferred when the operation was recorded.
    (name,) = fd.fusion.outputs
    assert fd.fusion.values[name].shape == expected.shape
    assert fd.fusion.values[name].dtype == expected.dtype


@pytest.mark.parametrize(("case", "name"), SWEEPS, ids=str)
def test_any_layout_gives_the_same(case: Case, name: str) -> None:
    mesh, tensors = SWEPT[name], case.tensors()
    expected = case.plain(*tensors)
    for *layouts, law in sweep(case, mesh, expected):
        program = mf.compile(define(case, layouts, law))
        check_everywhere(program, tensors, [expected])


#: Cases whose other dtypes matter: they compute, and narrow floats round.
NARROW = (
    "add", "mul", "div", "exp", "tanh", "gelu", "silu", "softmax--1", "layer_norm",
    "rms_norm-affine", "sigmoid",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_other_float_dtypes(name: str, dtype: torch.dtype) -> None:
    (base,) = (c for c in CASES if c.name == name)
    args = tuple(Arg(a.shape, dtype, a.values) for a in base.args)
    case = Case(base.name, args, base.fused, base.plain, 6)
    tensors = case.tensors()
    expected = case.plain(*tensors)
    assert expected.dtype == dtype
    for *layouts, law in sweep(case, MESHES["three"], expected):
        check_everywhere(mf.compile(define(case, layouts, law)), tensors, [expected])


@pytest.mark.parametrize("op", ["max", "min", "prod", "avg", "band", "bor", "bxor"])
def test_partial_operands_of_every_reduce_op(op: str) -> None:
    """What is Partial is joined before an op that needs the whole, and by its own op."""
    dtype = I64 if op in ("band", "bor", "bxor") else F64
    x = Arg((5, 3), dtype, "nonzero").tensor(0)
    for name, mesh in MESHES.items():
        axis = mesh.axes[-1]
        for goal in layouts_of((5, 3), mesh, False):
            with mf.FusionDefinition(name) as fd:
                h = fd.define_tensor([5, 3], dtype, mesh, {axis: Partial(op)})
                fd.add_output((h * 2).on(goal))
                fd.add_output(fd.ops.set(h).on(goal))
                fd.add_output(fd.ops.permute(h, (1, 0)))
                if op in ("max", "min", "prod"):
                    fd.add_output(getattr(fd.ops, {"max": "amax", "min": "amin"}.get(op, op))(h, 0))
            expected = [x * 2, x, x.T]
            if op in ("max", "min", "prod"):
                expected.append(
                    PLAIN_REDUCTIONS[{"max": "amax", "min": "amin"}.get(op, op)](x, 0, False)
                )
            check_everywhere(mf.compile(fd), [x], expected)


@pytest.mark.parametrize("op", ["bor", "band", "bxor"])
def test_partial_bool(op: str) -> None:
    x = Arg((5, 3), BOOL).tensor(0)
    for mesh in MESHES.values():
        with mf.FusionDefinition() as fd:
            h = fd.define_tensor([5, 3], BOOL, mesh, {mesh.axes[-1]: Partial(op)})
            fd.add_output(~h)
            fd.add_output(fd.ops.set(h).on(mesh, {mesh.axes[-1]: Shard(0)}))
        check_everywhere(mf.compile(fd), [x], [~x, x])


# -- scalars -------------------------------------------------------------------------------------

SCALAR_PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, s: x * s,
    "difference": lambda x, s: s - x,
    "arithmetic": lambda x, s: x * (s * 2 + 1) / (s + 3),
    "power": lambda x, s: x ** (s - 1),
    "negated": lambda x, s: x + -s,
    "compared": lambda x, s: x > s,
}


@pytest.mark.parametrize("number", [2.0, 3], ids=repr)
@pytest.mark.parametrize("is_input", [False, True], ids=["constant", "input"])
@pytest.mark.parametrize("name", SCALAR_PROGRAMS)
@pytest.mark.parametrize("dtype", [F32, I64], ids=str)
def test_scalars(name: str, is_input: bool, number: float, dtype: torch.dtype) -> None:
    """A number of the fusion is a number to torch: it never widens a tensor's dtype of its kind."""
    program = SCALAR_PROGRAMS[name]
    x = Arg((5, 3), dtype, "positive").tensor(0)
    expected = program(x, number)
    for mesh in MESHES.values():
        with mf.FusionDefinition() as fd:
            h = fd.define_tensor([5, 3], dtype, mesh, {mesh.axes[0]: Shard(0)})
            s = fd.define_scalar(dtype=type(number)) if is_input else fd.define_scalar(number)
            fd.add_output(program(h, s))
        inputs = [x, number] if is_input else [x]
        check_everywhere(mf.compile(fd), inputs, [expected])
        assert is_close(mf.reference(fd, inputs)[0], expected)


def test_the_dtype_of_a_scalar_input_decides() -> None:
    """Results have the dtypes that the definition printed, whatever kind of number a run passes."""
    x = Arg((5, 3), I64).tensor(0)
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor([5, 3], I64, MESHES["two"], {"x": Shard(0)})
        s = fd.define_scalar()
        fd.add_output(h * s)
        fd.add_output(h + s / 2)
    for number in (3, torch.tensor(3.0), torch.tensor(3)):
        inputs = [x, number]
        check_everywhere(mf.compile(fd), inputs, [x * 3.0, x + 1.5])
        assert is_close(mf.reference(fd, inputs)[0], x * 3.0)


def test_bool_scalars() -> None:
    x = Arg((5, 3), F32).tensor(0)
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor([5, 3], F32, MESHES["two"], {"x": Shard(0)})
        s = fd.define_scalar(dtype=bool)
        fd.add_output(h * s)
        fd.add_output(fd.ops.logical_and(h > 0, s))
    for number in (True, False):
        expected = [x * number, torch.logical_and(x > 0, torch.tensor(number))]
        check_everywhere(mf.compile(fd), [x, number], expected)


# -- random numbers ------------------------------------------------------------------------------


def draws(
    layout: Layout | None, dtype: torch.dtype = F32, seed: int = 0, shape: tuple[int, ...] = (7, 5)
) -> mf.FusionDefinition:
    """Two draws of one seed, and a dropout, placed the same way."""
    with mf.FusionDefinition("draws") as fd:
        x = fd.define_tensor(shape, dtype, mesh=layout)
        outputs = [
            fd.ops.uniform(shape, dtype=dtype, seed=seed),
            fd.ops.uniform(shape, -2.0, 3.0, dtype=dtype, seed=seed),
            fd.ops.dropout(x, 0.25, seed=seed),
        ]
        for output in outputs:
            fd.add_output(output.on(layout) if layout is not None else output)
    return fd


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_random_numbers_are_the_same_on_any_mesh(dtype: torch.dtype) -> None:
    x = torch.ones(7, 5, dtype=dtype)
    expected = mf.reference(draws(None, dtype, seed=3), [x])
    for mesh in MESHES.values():
        for layout in layouts_of((7, 5), mesh, False):
            program = mf.compile(draws(layout, dtype, seed=3))
            check_everywhere(program, [x], expected, exact=True)


def test_uniform_without_a_layout_is_drawn_where_it_is_read() -> None:
    mesh = MESHES["four"]
    x = Arg((7, 5), F32).tensor(0)
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor([7, 5], F32, mesh, {"x": Shard(0)})
        fd.add_output(h + fd.ops.uniform([7, 5], seed=1))
    program = mf.compile(fd)
    assert not program.communications
    check_everywhere(program, [x], mf.reference(fd, [x]), exact=True)


def test_uniform_is_uniform() -> None:
    fd = draws(None, shape=(100, 200))
    unit, wide, dropped = mf.reference(fd, [torch.full((100, 200), 3.0)])
    for x, low, high in ((unit, 0.0, 1.0), (wide, -2.0, 3.0)):
        assert low <= x.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < x.max() < high
        # The mean of 20,000 uniform numbers has a standard deviation of 0.29 / 141 = 0.002.
        assert abs(x.mean() - (low + high) / 2) < 0.01 * (high - low)
        histogram = torch.histc(x, 10, low, high) / x.numel()
        assert ((histogram - 0.1).abs() < 0.015).all()
    assert set(dropped.unique().tolist()) == {0.0, 4.0}
    assert abs((dropped == 0).float().mean() - 0.25) < 0.015


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_uniform_never_reaches_its_upper_bound(dtype: torch.dtype) -> None:
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.ops.uniform([300, 300], dtype=dtype))
        fd.add_output(fd.ops.uniform([300, 300], 1.0, 4.0, dtype=dtype))
    unit, wide = mf.reference(fd, [])
    assert unit.min() >= 0.0
    assert unit.max() < 1.0
    assert wide.min() >= 1.0
    assert wide.max() < 4.0


def test_streams_and_seeds_differ() -> None:
    """Two draws of one program differ, as do two seeds; neighbours do not correlate."""
    x = torch.ones(100, 200)
    one = mf.reference(draws(None, shape=(100, 200), seed=1), [x])
    other = mf.reference(draws(None, shape=(100, 200), seed=2), [x])
    columns = [one[0], (one[1] + 2) / 5, other[0], (other[1] + 2) / 5]
    correlation = torch.corrcoef(torch.stack([c.flatten() for c in columns]))
    assert (correlation - torch.eye(4)).abs().max() < 0.03
    assert not torch.equal(one[2], other[2])
    shifted = torch.corrcoef(torch.stack([one[0].flatten()[1:], one[0].flatten()[:-1]]))
    assert shifted[0, 1].abs() < 0.03


def test_a_seed_may_be_an_input_of_each_run() -> None:
    mesh = MESHES["three"]
    x = torch.ones(7, 5)
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor([7, 5], F32, mesh, {"x": Shard(0)})
        seed = fd.define_scalar(dtype=int)
        fd.add_output(fd.ops.dropout(h, 0.5, seed=seed))
        fd.add_output(fd.ops.uniform([7, 5], seed=seed).on(mesh, {"x": Shard(1)}))
    program = mf.compile(fd)
    results = {}
    for number in (1, 2):
        expected = mf.reference(fd, [x, number])
        check_everywhere(program, [x, number], expected, exact=True)
        results[number] = expected
    assert not torch.equal(results[1][1], results[2][1])


def test_dropout_at_its_ends() -> None:
    x = torch.ones(5, 3)
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor([5, 3], F32, MESHES["two"], {"x": Shard(0)})
        fd.add_output(fd.ops.dropout(h, 0.0) + 0)
        fd.add_output(fd.ops.dropout(h, 1.0))
        fd.add_output(fd.ops.dropout(h, 0.5, training=False) * 1)
    expected = [x, torch.zeros_like(x), x]
    check_everywhere(mf.compile(fd), [x], expected, exact=True)


def test_dropout_of_a_partial_is_drawn_after_the_sum() -> None:
    x = Arg((7, 5), F32).tensor(0)
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor([7, 5], F32, MESHES["four"], {"x": Partial()})
        fd.add_output(fd.ops.dropout(h, 0.5, seed=4))
    check_everywhere(mf.compile(fd), [x], mf.reference(fd, [x]))
