"""Drawn programs, meshes and layouts against plain torch on global tensors.

A drawn program is an input, a few operations, a set to a drawn layout (on the same mesh, or on one
that overlaps it or not), a few more operations. Values are small integers, so results are exact
whatever the order of sums. The examples are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from oracle import (
    check_everywhere,
    coordinate,
    dense_strides,
    has_strides,
    local_part,
    memory_order,
    simulate_shares,
)
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, LayoutError, Partial, Replicate, Shard
from mdfuse.communication import Communication
from mdfuse.ir.graph import dtype_name
from mdfuse.layouts.layout import Placement
from mdfuse.passes.segmentation import ShouldMerge, merge_local, merge_nothing

SAME_EVERY_TIME = settings(max_examples=500, derandomize=True, deadline=None, database=None)
FEWER = settings(SAME_EVERY_TIME, max_examples=250)

FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32)
NARROW = (torch.float16, torch.bfloat16)
RANKS = 9

# -- meshes and layouts --------------------------------------------------------------------------


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
    return Layout(mesh, placements, order)


def shapes(low: int = 0, high: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    extents = st.integers(0, 9) | st.integers(1, 9)
    listed = st.lists(extents, min_size=low, max_size=high).map(tuple)
    return listed.filter(lambda shape: math.prod(shape) <= 700)


def tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype == torch.bool else (-3, 4)
    return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)


# -- programs ------------------------------------------------------------------------------------


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


@given(drawn=programs(), merge=st.sampled_from([None, merge_local, merge_nothing]))
@SAME_EVERY_TIME
def test_programs_give_what_one_device_gives(drawn: Drawn, merge: ShouldMerge | None) -> None:
    program = mf.compile(drawn.define(), should_merge=merge)
    tensors, expected = drawn.tensors(), drawn.plain()[-1]
    is_exact = not any(p == Partial("avg") for p in drawn.source.placements)
    check_everywhere(program, tensors, [expected], exact=is_exact)
    (reference,) = mf.reference(drawn.define(), tensors)
    assert torch.equal(reference, expected)


@given(drawn=programs())
@FEWER
def test_computed_outputs_are_dense_in_the_order_of_one_device(drawn: Drawn) -> None:
    """Except where the result itself was communicated: it keeps the order left behind."""
    expected = drawn.plain()[-1]
    if any(s == 0 for s in expected.stride()):
        return  # expanded: torch itself has no order of those dims
    program = mf.compile(drawn.define())
    (name,) = program.fusion.outputs
    if program.fusion.producers[name].op == "set":
        return
    order = memory_order(expected)
    for rank, (output,) in enumerate(simulate_shares(program, drawn.tensors()).per_rank):
        if output is not None:
            strides = dense_strides(output.shape, order)
            assert has_strides(output, strides), f"rank {rank}: {output.stride()}\n{program}"


# -- one reshard: what it moves ------------------------------------------------------------------


@dataclass(frozen=True)
class Reshard(Printed):
    """A tensor, where it is and where it goes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    destination: Layout

    def __repr__(self) -> str:
        here = f"{dtype_name(self.dtype)}{list(self.shape)} on {self.source.mesh} {self.source}"
        return f"{here} -> {self.destination.mesh} {self.destination}"

    def compile(self) -> mf.Program:
        with mf.FusionDefinition("reshard") as fd:
            x = fd.define_tensor(self.shape, self.dtype, self.source)
            fd.add_output(fd.ops.set(x).on(self.destination))
        return mf.compile(fd)

    def tensor(self) -> Tensor:
        return tensor(self.shape, self.dtype)

    def lacking(self, rank: int) -> int:
        """Elements of the destination's part that the rank has not, Partial axes aside."""
        if rank not in self.destination.mesh.ranks:
            return 0
        index = torch.arange(math.prod(self.shape)).reshape(self.shape)
        need = set(local_part(index, self.destination, rank).flatten().tolist())
        if rank in self.source.mesh.ranks:
            need -= set(local_part(index, self.source, rank).flatten().tolist())
        return len(need)


@st.composite
def reshards(draw: st.DrawFn, is_partial: bool = False) -> Reshard:
    before, after = draw(mesh_pairs())
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool]))
    shape = draw(shapes(0, 4))
    op = draw(st.sampled_from(reduce_ops(dtype))) if is_partial else None
    source = draw(layouts(before, len(shape), op))
    return Reshard(shape, dtype, source, draw(layouts(after, len(shape))))


@given(reshard=reshards())
@SAME_EVERY_TIME
def test_a_reshard_moves_what_is_lacking(reshard: Reshard) -> None:
    program = reshard.compile()
    check_everywhere(program, [reshard.tensor()], [reshard.tensor()], exact=True)
    ranks = range(program.host.last_rank + 1)
    lacking = [reshard.lacking(rank) for rank in ranks]
    # A rank outside the source has no value of its own, even where its part is empty.
    has_value = {*reshard.destination.mesh.ranks} <= {*reshard.source.mesh.ranks}
    if not any(lacking) and (has_value or not math.prod(reshard.shape)):
        assert not program.communications, f"nobody lacks anything\n{program}"
    itemsize = reshard.dtype.itemsize
    for rank in ranks:
        received = program.bytes_received(rank)
        assert received <= itemsize * padded_size(reshard), f"rank {rank}: {received}\n{program}"
        if [c.kind for c in program.communications] == ["Exchange"]:
            assert received == itemsize * lacking[rank], f"rank {rank}: {received}\n{program}"
        for comm in program.communications:
            check_team(comm, rank)


def padded_size(reshard: Reshard) -> int:
    """Elements of the whole tensor, each dim rounded up to full blocks."""
    size = 1
    for dim, extent in enumerate(reshard.shape):
        longest = extent
        for layout in (reshard.source, reshard.destination):
            block, parts = extent, 1
            for axis in layout.split_axes(dim):
                n = layout.mesh.axis_size(axis)
                block, parts = -(-block // n), parts * n
            longest = max(longest, block * parts)
        size *= longest
    return size


def check_team(comm: Communication, rank: int) -> None:
    """Every member of a rank's team sees the same team and root; the root is in it."""
    team = comm.team(rank)
    if not team:
        assert comm.root(rank) is None
        assert comm.bytes_received(rank) == 0
        return
    assert rank in team
    assert len(set(team)) == len(team)
    if comm.kind != "SendRecv":  # a rank may be in two pairs: it sends to one, receives from one
        assert {comm.team(r) for r in team} == {team}
        assert len({comm.root(r) for r in team}) == 1
    root = comm.root(rank)
    assert root is None or root in team


@given(reshard=reshards(is_partial=True))
@FEWER
def test_partial_values_are_reduced_on_the_way(reshard: Reshard) -> None:
    program = reshard.compile()
    ops = [p.op for p in reshard.source.placements if isinstance(p, Partial)]
    is_exact = "avg" not in ops
    check_everywhere(program, [reshard.tensor()], [reshard.tensor()], exact=is_exact)
    itemsize, size = reshard.dtype.itemsize, padded_size(reshard)
    for rank in range(program.host.last_rank + 1):
        # The worst is an all-reduce of the whole along each Partial axis, then a gathering.
        most = itemsize * size * (2 * len(ops) + 1)
        assert program.bytes_received(rank) <= most, f"rank {rank}\n{program}"


INTO_PARTIAL = {
    Replicate: ("sum", "min", "max", "avg"),
    Shard: ("sum",),
}


def may_become(before: Placement, after: Placement, size: int) -> bool:
    """The rows of the table with a Partial destination, along one axis."""
    if not isinstance(after, Partial) or before == after or size == 1:
        return True
    return after.op in INTO_PARTIAL.get(type(before), ())


@st.composite
def into_partial(draw: st.DrawFn) -> Reshard:
    before, after = draw(mesh_pairs())
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    shape = draw(shapes(0, 3))
    op = draw(st.sampled_from(reduce_ops(dtype)))
    source = draw(layouts(before, len(shape), draw(st.sampled_from([None, None, op]))))
    destination = draw(layouts(after, len(shape), op))
    assume(any(isinstance(p, Partial) for p in destination.placements))
    return Reshard(shape, dtype, source, destination)


@given(reshard=into_partial())
@FEWER
def test_into_partial_as_the_table_says_or_not_at_all(reshard: Reshard) -> None:
    source, destination = reshard.source, reshard.destination
    partial = [
        axis
        for axis in destination.mesh.axes
        if isinstance(destination.placement(axis), Partial) and destination.mesh.axis_size(axis) > 1
    ]
    if source.mesh == destination.mesh:
        is_legal = all(
            may_become(source.placement(a), destination.placement(a), source.mesh.axis_size(a))
            for a in source.mesh.axes
        )
    else:
        is_legal = not partial
    if not is_legal:
        with pytest.raises(LayoutError):
            reshard.compile()
        return
    program = reshard.compile()
    is_exact = Partial("avg") not in (*source.placements, *destination.placements)
    check_everywhere(program, [reshard.tensor()], [reshard.tensor()], exact=is_exact)


@given(reshard=into_partial())
@settings(SAME_EVERY_TIME, max_examples=60)
def test_an_oracle_that_agrees_with_itself(reshard: Reshard) -> None:
    """The parts that the oracle cuts cover a tensor, each element once per copy."""
    source = reshard.source
    counts = torch.zeros(reshard.shape, dtype=torch.int64).flatten()
    index = torch.arange(counts.numel()).reshape(reshard.shape)
    for rank in source.mesh.ranks:
        counts[local_part(index, source, rank).flatten()] += 1
        assert list(coordinate(source.mesh, rank)) != [] or source.mesh.ndim == 0
    copies = math.prod(
        n
        for axis, n in zip(source.mesh.axes, source.mesh.shape, strict=True)
        if not isinstance(source.placement(axis), Shard)
    )
    assert (counts == copies).all()
