"""Drawn programs, meshes and layouts against plain torch on global tensors.

A drawn program is an input, a few operations, a set to a drawn layout (on the same mesh, or on one
that overlaps it or not), a few more operations. Values are small integers, so results are exact
whatever the order of sums. The examples are the same in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from helpers import sampling
from helpers.drawn_views import (
    Drawn,
    Printed,
    layouts,
    mesh_pairs,
    programs,
    reduce_ops,
    shapes,
    tensor,
)
from helpers.oracle import (
    check_everywhere,
    coordinate,
    dense_strides,
    has_strides,
    local_part,
    memory_order,
    simulate_shares,
)
from hypothesis import assume, given
from torch import Tensor

import mdfuse as mf
from mdfuse import Layout, Partial, Shard
from mdfuse.communication import Communication
from mdfuse.ir.graph import dtype_name
from mdfuse.passes.segmentation import ShouldMerge, merge_local, merge_nothing

# -- meshes and layouts --------------------------------------------------------------------------


# -- programs ------------------------------------------------------------------------------------


@given(drawn=programs(), merge=st.sampled_from([None, merge_local, merge_nothing]))
@sampling.examples(500)
def test_programs_give_what_one_device_gives(drawn: Drawn, merge: ShouldMerge | None) -> None:
    program = mf.compile(drawn.define(), should_merge=merge)
    tensors, expected = drawn.tensors(), drawn.plain()[-1]
    is_exact = not any(p == Partial("avg") for p in drawn.source.placements)
    check_everywhere(program, tensors, [expected], exact=is_exact)
    (reference,) = mf.reference(drawn.define(), tensors)
    assert torch.equal(reference, expected)


@given(drawn=programs())
@sampling.examples(250)
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
@sampling.examples(500)
def test_a_reshard_moves_what_is_lacking(reshard: Reshard) -> None:
    program = reshard.compile()
    check_everywhere(program, [reshard.tensor()], [reshard.tensor()], exact=True)
    ranks = range(program.host.last_rank + 1)
    lacking = [reshard.lacking(rank) for rank in ranks]
    # A rank outside the source has no value of its own, even where its part is empty.
    has_value = {*reshard.destination.mesh.ranks} <= {*reshard.source.mesh.ranks}
    if not any(lacking) and (has_value or not math.prod(reshard.shape)):
        posts = [c for c in program.communications if c.source.blocked == c.destination.blocked]
        assert not posts, f"nobody lacks anything\n{program}"
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
@sampling.examples(250)
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
@sampling.examples(250)
def test_anything_becomes_partial(reshard: Reshard) -> None:
    program = reshard.compile()
    is_exact = Partial("avg") not in (*reshard.source.placements, *reshard.destination.placements)
    check_everywhere(program, [reshard.tensor()], [reshard.tensor()], exact=is_exact)


@given(reshard=into_partial())
@sampling.examples(60)
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
