"""Drawn meshes, layouts and programs, each with the same in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import assume
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.ir.graph import dtype_name
from mdfuse.layouts.layout import Placement

FLOATS = (torch.float32, torch.float64)


INTEGERS = (torch.int64, torch.int32)


NARROW = (torch.float16, torch.bfloat16)


RANKS = 9


@st.composite
def meshes(draw: st.DrawFn, pool: Sequence[int] = range(RANKS), names: str = "abc") -> DeviceMesh:
    """One to three axes over some ranks of a pool, in any order."""
    sizes = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(
            lambda s: math.prod(s) <= min(len(pool), 8)
        )
    )
    ranks = draw(st.permutations(list(pool)))[: math.prod(sizes)]
    return DeviceMesh(torch.tensor(ranks).reshape(sizes), axes=tuple(names[: len(sizes)]))


@st.composite
def mesh_pairs(draw: st.DrawFn) -> tuple[DeviceMesh, DeviceMesh]:
    """Equal, with the same ranks otherwise arranged, overlapping, or disjoint."""
    how = draw(st.sampled_from(["equal", "equal", "rearranged", "any", "disjoint"]))
    if how == "disjoint":
        ranks = draw(st.permutations(range(RANKS)))
        return draw(meshes(ranks[:5])), draw(meshes(ranks[5:], "xyz"))
    first = draw(meshes())
    if how == "equal":
        return first, first
    if how == "rearranged":
        ranks = draw(st.permutations(first.ranks))
        return first, DeviceMesh(ranks, axes=("x",))
    return first, draw(meshes(names="xyz"))


def reduce_ops(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bool:
        return ("bor", "band", "bxor")
    if dtype in NARROW:
        return ("sum", "max")
    if dtype in FLOATS:
        return ("sum", "sum", "max", "min", "prod", "avg")
    return ("sum", "sum", "max", "prod", "bor", "bxor")


@st.composite
def layouts(draw: st.DrawFn, mesh: DeviceMesh, ndim: int, op: str | None = None) -> Layout:
    """Any placement along each axis (Partial of one op only), any order where axes share a dim."""
    options: list[Placement] = [Replicate(), *map(Shard, range(ndim)), *map(Shard, range(ndim))]
    if op is not None:
        options.append(Partial(op))
    placements = {axis: draw(st.sampled_from(options)) for axis in mesh.axes}
    order = {}
    for dim in range(ndim):
        axes = [a for a, p in placements.items() if p == Shard(dim)]
        if len(axes) > 1:
            order[dim] = tuple(draw(st.permutations(axes)))
        if axes and draw(st.integers(0, 3)) == 0:  # zigzag from one axis on to another
            first, last = sorted((draw(st.integers(0, len(axes))), draw(st.integers(0, len(axes)))))
            zigzag = order.get(dim, axes)[first:last]
            placements |= dict.fromkeys(zigzag, Shard(dim, zigzag=True))
    return Layout(mesh, placements, order)


def shapes(low: int = 0, high: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    extents = st.integers(0, 9) | st.integers(1, 9)
    listed = st.lists(extents, min_size=low, max_size=high).map(tuple)
    return listed.filter(lambda shape: math.prod(shape) <= 700)


def tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype == torch.bool else (-3, 4)
    return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)


@dataclass(frozen=True)
class Operand:
    """A second input of a program."""

    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class Step:
    """An operation that handles and tensors both do.

    Attributes:
        text: what it is.
        fused: `(ops, handle, second handle or None) -> handle`.
        plain: `(tensor, second tensor or None) -> tensor`.
        operand: the second input.
        law: what the result's layout must be.
    """

    text: str
    fused: Callable[[Any, Any, Any], Any]
    plain: Callable[[Tensor, Tensor | None], Tensor]
    operand: Operand | None = None
    law: Layout | None = None

    def __repr__(self) -> str:
        more = f" with {self.operand}" if self.operand else ""
        on = f" on {self.law.mesh} {self.law}" if self.law else ""
        return self.text + more + on


class Printed:
    """Hypothesis prints a failing example as `repr` does, meshes included."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Drawn(Printed):
    """A program: an input and steps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        head = f"{dtype_name(self.dtype)}{list(self.shape)} on {self.source.mesh} {self.source}"
        return "\n    ".join((head, *map(repr, self.steps)))

    def tensors(self) -> list[Tensor]:
        operands = [s.operand for s in self.steps if s.operand is not None]
        rest = [tensor(o.shape, self.dtype, seed) for seed, o in enumerate(operands, 1)]
        return [tensor(self.shape, self.dtype), *rest]

    def plain(self) -> list[Tensor]:
        """The result of each step."""
        x, *rest = self.tensors()
        results = []
        for step in self.steps:
            x = step.plain(x, rest.pop(0) if step.operand is not None else None)
            results.append(x)
        return results

    def define(self) -> mf.FusionDefinition:
        with mf.FusionDefinition("drawn") as fd:
            x = fd.define_tensor(self.shape, self.dtype, self.source)
            seconds = [
                fd.define_tensor(s.operand.shape, self.dtype, s.operand.layout)
                for s in self.steps
                if s.operand is not None
            ]
            h = x
            for step in self.steps:
                h = step.fused(fd.ops, h, seconds.pop(0) if step.operand is not None else None)
                if step.law is not None:
                    h.on(step.law)
            fd.add_output(h)
        return fd


def method(text: str, function: Callable[..., Any]) -> Step:
    """A step that handles and tensors spell alike."""
    return Step(text, lambda ops, x, y: function(x), lambda x, y: function(x))


def pointwise(dtype: torch.dtype) -> list[Step]:
    if dtype == torch.bool:
        return [method("~x", lambda x: ~x), method("x & x", lambda x: x & x)]
    return [
        method("-x", lambda x: -x),
        method("x * 2", lambda x: x * 2),
        method("x + 1", lambda x: x + 1),
        method("1 - x", lambda x: 1 - x),
        method("x + x", lambda x: x + x),
        method("x - -x", lambda x: x - -x),
        Step("relu", lambda ops, x, y: ops.relu(x), lambda x, y: torch.relu(x)),
        Step(
            "where",
            lambda ops, x, y: ops.where(x > 0, x, 0),
            lambda x, y: torch.where(x > 0, x, 0),
        ),
    ]


@st.composite
def reshapes(draw: st.DrawFn, shape: tuple[int, ...]) -> Step:
    """Merge two neighbouring dims, split one, or flatten."""
    found = [(math.prod(shape),)]
    for d in range(len(shape) - 1):
        found.append((*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]))
    for d, n in enumerate(shape):
        for k in (2, 3):
            if n and n % k == 0:
                found.append((*shape[:d], k, n // k, *shape[d + 1 :]))
    after = draw(st.sampled_from(found))
    return method(f"reshape {after}", lambda x: x.reshape(after))


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> Step:
    ndim = len(shape)
    kind = draw(st.sampled_from(["permute", "unsqueeze", "reshape", "slice", "squeeze", "expand"]))
    if kind == "permute":
        dims = tuple(draw(st.permutations(range(ndim))))
        return method(f"permute {dims}", lambda x: x.permute(dims))
    if kind == "unsqueeze" or not ndim:
        dim = draw(st.integers(-ndim - 1, ndim))
        return method(f"unsqueeze {dim}", lambda x: x.unsqueeze(dim))
    if kind == "reshape":
        return draw(reshapes(shape))
    dim = draw(st.integers(0, ndim - 1))
    if kind == "slice":
        start, stop = sorted(draw(st.tuples(st.integers(0, shape[dim]), st.integers(0, 9))))
        step = draw(st.integers(1, 3))
        where = (*[slice(None)] * dim, slice(start, stop, step))
        return method(f"slice {dim}: {start}:{stop}:{step}", lambda x: x[where])
    if kind == "expand" and shape[dim] == 1:
        after = tuple(3 if d == dim else n for d, n in enumerate(shape))
        return method(f"expand {after}", lambda x: x.expand(after))
    return method(f"squeeze {dim}", lambda x: x.squeeze(dim))


@st.composite
def reductions(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    names = ["any", "all"] if dtype == torch.bool else ["sum", "max", "min"]
    name = draw(st.sampled_from(names))
    dims = tuple(draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True)))
    keep = draw(st.booleans())
    if name in ("max", "min") and any(shape[d] == 0 for d in dims):
        name = "sum"  # torch has no maximum of nothing
    spelled = {"max": torch.amax, "min": torch.amin}.get(name) or getattr(torch, name)

    def plain(x: Tensor, y: Tensor | None) -> Tensor:
        more = {"dtype": x.dtype} if name == "sum" else {}
        return spelled(x, dims, keepdim=keep, **more)

    def fused(ops: Any, x: Any, y: Any) -> Any:
        more = {"dtype": x.dtype} if name == "sum" else {}
        return getattr(ops, name)(x, dims, keepdim=keep, **more)

    return Step(f"{name} {dims} keepdim={keep}", fused, plain)


@st.composite
def rankings(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """One or both results of an op that has two."""
    dim, down = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    k, kept = draw(st.integers(0, shape[dim])), draw(st.sampled_from(["values", "both"]))
    if dtype != torch.bool and draw(st.booleans()):  # which of equal elements topk takes is open
        return method(f"topk {k} {dim} {down}", lambda x: x.topk(k, dim, down).values)

    def both(x: Any) -> Any:
        values, indices = x.sort(dim=dim, descending=down, stable=True)
        return values if kept == "values" else (values + indices % 2).to(x.dtype)

    return method(f"sort {dim} {down}: {kept}", both)


@st.composite
def with_operand(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, where: Sequence[DeviceMesh]
) -> Step:
    """A second input: added (or joined bitwise) by broadcasting, or multiplied as a matrix."""
    mesh = draw(st.sampled_from(where))
    op = draw(st.sampled_from([None, None, reduce_ops(dtype)[0]]))
    if shape and dtype in (*FLOATS, torch.int64) and draw(st.booleans()):
        other = (shape[-1], draw(st.integers(0, 6)))
        layout = draw(layouts(mesh, 2, op))
        return Step("x @ w", lambda ops, x, w: x @ w, lambda x, w: x @ w, Operand(other, layout))
    skip = draw(st.integers(0, len(shape)))
    other = tuple(n if draw(st.booleans()) else 1 for n in shape[skip:])
    layout = draw(layouts(mesh, len(other), op))
    if dtype == torch.bool:
        return Step("x ^ y", lambda ops, x, y: x ^ y, lambda x, y: x ^ y, Operand(other, layout))
    return Step("x + y", lambda ops, x, y: x + y, lambda x, y: x + y, Operand(other, layout))


@st.composite
def operations(draw: st.DrawFn, x: Tensor, where: Sequence[DeviceMesh]) -> Step:
    """Any operation on a tensor of this shape and dtype."""
    shape, dtype = tuple(x.shape), x.dtype
    kinds: list[st.SearchStrategy[Step]] = [views(shape), st.sampled_from(pointwise(dtype))]
    if dtype not in NARROW:  # there, sums of small integers are not exact
        kinds.append(with_operand(shape, dtype, where))
        if shape:
            kinds.append(reductions(shape, dtype))
            kinds.append(rankings(shape, dtype))
    return draw(st.one_of(kinds))


@st.composite
def programs(draw: st.DrawFn) -> Drawn:
    """An input, 0 to 3 operations, a set, 0 to 3 operations, and perhaps a law on the result."""
    before, after = draw(mesh_pairs())
    dtype = draw(st.sampled_from([*FLOATS, *FLOATS, *INTEGERS, *NARROW, torch.bool]))
    shape = draw(shapes())
    op = draw(st.sampled_from([None, *reduce_ops(dtype)]))
    source = draw(layouts(before, len(shape), op))
    x = tensor(shape, dtype)
    steps: list[Step] = []

    def extend(count: int, where: Sequence[DeviceMesh]) -> None:
        nonlocal x
        for _ in range(count):
            step = draw(operations(x, where))
            y = tensor(step.operand.shape, dtype) if step.operand is not None else None
            result = step.plain(x, y)
            assume(result.numel() <= 3000 and result.ndim <= 5)
            steps.append(step)
            x = result

    extend(draw(st.integers(0, 3)), [before])
    law = draw(layouts(after, x.ndim))
    steps.append(Step("set", lambda ops, x, y: ops.set(x), lambda x, y: x, law=law))
    extend(draw(st.integers(0, 3)), [after, before])
    if len(steps) > 1 and steps[-1].law is None and draw(st.booleans()):
        goal = draw(layouts(draw(st.sampled_from([before, after])), x.ndim))
        last = steps.pop()
        steps.append(Step(last.text, last.fused, last.plain, last.operand, goal))
    return Drawn(shape, dtype, source, tuple(steps))
