"""Segments: ids, maps, programs of their own; running them one by one is running the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.drawn import drawn
from helpers.oracle import given_to_each, has_strides, is_close, local_part, simulate_shares
from helpers.segment_runs import by_hand, simulated
from helpers.several_outputs import many
from helpers.stream_cases import CASES as STREAMED
from helpers.symbolic_programs import CASES as SYMBOLIC
from helpers.symbolic_programs import defined, inputs
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Partial, Shard
from mdfuse.frontend.handle import Handle
from mdfuse.passes.segment_ids import extent_ids, with_ids
from mdfuse.passes.segmentation import merge_local, merge_nothing

TWO = DeviceMesh.arange(tp=2)
ROWS = {"tp": Shard(0)}
COLUMNS = {"tp": Shard(1)}


# -- ids -----------------------------------------------------------------------------------------


def test_ids_are_those_of_the_handles() -> None:
    """Constants and renamed values included; what passes add comes after them, in order."""
    with FusionDefinition("ids") as fd:
        x = fd.define_tensor([8, 4], mesh=TWO, layout=ROWS)
        k = fd.define_scalar(2.0)
        n = fd.define_scalar(dtype=int)
        h = (x * k).on(TWO, ROWS)
        y = (h @ fd.ops.permute(h, [1, 0])).on(TWO, ROWS)
        fd.add_output(y * n)
    handles = [v for v in (x, k, n, h, y) if isinstance(v, Handle)]
    assert {v.name: v.id for v in handles}.items() <= fd.fusion.ids.items()
    assert sorted(fd.fusion.ids.values()) == list(range(len(fd.fusion.ids)))
    program = mf.compile(fd)
    lowered = program.fusion
    assert fd.fusion.ids.items() <= lowered.ids.items()
    added = [e.output for e in lowered.exprs if e.output not in fd.fusion.ids]
    assert added == ["h.whole", "t.whole"]  # the latter is a view of the former
    assert [lowered.ids[name] for name in added] == [len(fd.fusion.ids), len(fd.fusion.ids) + 1]
    assert fd.inputs == [lowered.ids[name] for name in lowered.inputs]
    assert fd.outputs == [lowered.ids[name] for name in lowered.outputs]


def test_a_fusion_without_ids_gets_them() -> None:
    with FusionDefinition("none") as fd:
        x = fd.define_tensor([4])
        fd.add_output(x + 1)
    assert list(with_ids(replace(fd.fusion, ids={})).ids.values()) == [0, 1]


def test_segments_have_ids_of_their_own() -> None:
    """`x @ w` reduced over ranks: w comes first in the segment that reads it second."""
    with FusionDefinition("own") as fd:
        w = fd.define_tensor([4, 6], mesh=TWO, layout=ROWS)
        x = fd.define_tensor([8, 4], mesh=TWO, layout=COLUMNS)
        y = fd.ops.set(x @ w).on(TWO, ROWS)
        fd.add_output(fd.ops.softmax(y, 1))
    matmul, reduce, softmax = mf.compile(fd).segments
    assert [(s.inputs, s.outputs, s.extents) for s in (matmul, reduce, softmax)] == [
        ([0, 1], [2], [-1, -2, -3, -4]),
        ([0], [1], [-1, -2]),
        ([0], [1], [-1, -2]),
    ]
    assert matmul.map == {0: 1, 1: 0, 2: 2, -1: -3, -2: -4, -3: -1, -4: -2}
    assert reduce.map == {0: 2, 1: 3, -1: -3, -2: -2}
    assert softmax.map == {0: 3, 1: 4, -1: -3, -2: -2}
    assert matmul.fusion.inputs == ("x", "w")
    assert "= matmul(%x, %w)" in str(matmul)


#: name -> (what is computed of x [4, 6], y [4, 6], i [3] of indices, z [1, 6]; the input's extent
#: that each dim is, of x.0 x.1 y.0 y.1 i.0 z.0 z.1)
EXTENTS: dict[str, tuple[Callable[..., Handle], Sequence[str | None]]] = {
    "add": (lambda ops, x, y, i, z: x + y, ["x.0", "x.1"]),
    "a stretched operand comes first": (lambda ops, x, y, i, z: z + y, ["y.0", "z.1"]),
    "of another operand": (lambda ops, x, y, i, z: 1 - y, ["y.0", "y.1"]),
    "permute": (lambda ops, x, y, i, z: x.T, ["x.1", "x.0"]),
    "sum": (lambda ops, x, y, i, z: x.sum([0]), ["x.1"]),
    "keepdim": (lambda ops, x, y, i, z: x.sum([0], True), [None, "x.1"]),
    "matmul": (lambda ops, x, y, i, z: x @ y.T, ["x.0", "y.0"]),
    "with itself": (lambda ops, x, y, i, z: x.T @ x, ["x.1", "x.1"]),
    "linear": (lambda ops, x, y, i, z: ops.linear(x, y), ["x.0", "y.0"]),
    "embedding": (lambda ops, x, y, i, z: ops.embedding(i, y), ["i.0", "y.1"]),
    "softmax": (lambda ops, x, y, i, z: ops.softmax(x, 1), ["x.0", "x.1"]),
    "layer_norm": (lambda ops, x, y, i, z: ops.layer_norm(x, [6]), ["x.0", "x.1"]),
    "rms_norm": (lambda ops, x, y, i, z: ops.rms_norm(x, [6]), ["x.0", "x.1"]),
    "attention": (
        lambda ops, x, y, i, z: ops.scaled_dot_product_attention(x, y, y, is_causal=True),
        ["x.0", "y.1"],
    ),
    "merged": (lambda ops, x, y, i, z: x.reshape(24), [None]),
    "split": (lambda ops, x, y, i, z: x.reshape(4, 2, 3), ["x.0", None, None]),
    "other dims of the same extents": (lambda ops, x, y, i, z: x.reshape(6, 4), [None, None]),
    "slice": (lambda ops, x, y, i, z: x[:, 1:], ["x.0", None]),
    "cat": (lambda ops, x, y, i, z: ops.cat([x, y], 0), [None, "x.1"]),
    "unsqueeze": (lambda ops, x, y, i, z: x.unsqueeze(1), ["x.0", None, "x.1"]),
    "squeeze": (lambda ops, x, y, i, z: z.squeeze([0]), ["z.1"]),
    "expand": (lambda ops, x, y, i, z: z.expand(4, 6), [None, "z.1"]),
    "created": (lambda ops, x, y, i, z: ops.uniform([4, 6], 0, 1, seed=0), [None, None]),
}


@pytest.mark.parametrize("name", EXTENTS)
def test_extents_are_traced(name: str) -> None:
    define, expected = EXTENTS[name]
    with FusionDefinition("traced") as fd:
        x, y = fd.define_tensor([4, 6], name="x"), fd.define_tensor([4, 6], name="y")
        i, z = fd.define_tensor([3], torch.int64, name="i"), fd.define_tensor([1, 6], name="z")
        fd.add_output(define(fd.ops, x, y, i, z))
    found = extent_ids(fd.fusion)
    named = {i: f"{name}.{dim}" for (name, dim), i in found.items() if name in fd.fusion.inputs}
    assert list(named) == fd.extents
    (output,) = fd.fusion.outputs
    got = [found.get((output, dim)) for dim in range(len(expected))]
    assert [named[i] if i is not None else None for i in got] == expected


def test_symbolic_extents_are_known_by_their_expression() -> None:
    with FusionDefinition("symbols") as fd:
        x = fd.define_tensor([-1, 6], name="x")
        h = x.reshape(x.shape[0] * 6).reshape(x.shape[0], 6)
        u = fd.ops.uniform([x.shape[0]], 0, 1, seed=0)
        fd.add_output(h)
        fd.add_output(u)
    found = extent_ids(fd.fusion)
    h_name, u_name = fd.fusion.outputs
    assert (found[h_name, 0], found.get((h_name, 1)), found[u_name, 0]) == (-1, None, -1)


# -- running by hand -----------------------------------------------------------------------------


def check_by_hand(program: mf.Program, whole: Sequence[Any], expected: Sequence[Tensor]) -> None:
    """Bit for bit, and stride for stride, what the program gives, which is what torch gives."""
    given = given_to_each(program, whole)
    together = simulate_shares(program, whole)
    alone = simulated(program, given)
    for i, name in enumerate(program.fusion.outputs):
        for rank, outputs in enumerate(together.per_rank):
            got, same = alone[i][rank], outputs[i]
            assert (got is None) == (same is None)
            if got is not None:
                assert torch.equal(got, same), f"%{name} on rank {rank}"
                assert name in program.fusion.reuse or has_strides(got, same.stride())
        assert is_close(together.outputs[i], expected[i])


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_segments_loop_alone(name: str) -> None:
    """Also those that share a loop in the program, and those that keep chunks only."""
    case = STREAMED[name]
    program = case.compile(2, 8 if case.fixed else 7)
    given = case.inputs(program)
    check_by_hand(program, given, case.expected(given))


@pytest.mark.parametrize("seed", range(25))
def test_drawn_programs(seed: int) -> None:
    """Inputs and views as outputs, outputs that later segments read."""
    fd, x, expected, merge = many(seed)
    check_by_hand(mf.compile(fd, should_merge=merge), [x], expected)


@pytest.mark.parametrize("merge", [None, merge_local, merge_nothing])
def test_every_kind_of_value_at_once(merge: Any) -> None:
    """Two meshes, Partial, uneven shards, scalars from segments, an input as output."""
    other = DeviceMesh([3, 1], axes=("a",))
    with FusionDefinition("kinds") as fd:
        x = fd.define_tensor([7, 5], mesh=TWO, layout=COLUMNS)
        w = fd.define_tensor([5, 3], mesh=TWO, layout=ROWS)
        n = fd.define_scalar(dtype=float)
        twice = n * 2
        p = (x @ w).on(TWO, {"tp": Partial()})
        y = fd.ops.set(p * twice).on(other, {"a": Shard(0)})
        fd.add_output(p)
        fd.add_output(x)
        fd.add_output(fd.ops.softmax(y, 1) + y)
        fd.add_output(y)
    program = mf.compile(fd, should_merge=merge)
    x, w = drawn(7, 5), drawn(5, 3)
    y = x @ w * (2 * 0.3)
    check_by_hand(program, [x, w, 0.3], [x @ w, x, torch.softmax(y, 1) + y, y])


def test_sums_are_the_same_to_the_last_bit() -> None:
    """What is gathered along the inner dim lies in columns, and so does what is computed of it.

    A sum of rows that lie otherwise would be rounded otherwise.
    """
    with FusionDefinition("bits") as fd:
        x = fd.define_tensor([64, 130], mesh=TWO, layout=COLUMNS)
        h = fd.ops.set(x).on(TWO, {}) * 1.37
        fd.add_output(h.sum([1]))
    program, x = mf.compile(fd, mf.Options(compile="never")), drawn(64, 130)
    assert not torch.equal((x * 1.37).sum(1), (x.T.contiguous().T * 1.37).sum(1))
    check_by_hand(program, [x], [(x * 1.37).sum(1)])


def test_outputs_keep_their_memory_order() -> None:
    with FusionDefinition("order") as fd:
        x = fd.define_tensor([4, 6], mesh=TWO, layout=ROWS)
        h = x + 1
        fd.add_output(h, stride_order=[0, 1])
        fd.add_output(fd.ops.set(h * 2).on(TWO, {}), stride_order=[0, 1])
    program, whole = mf.compile(fd), drawn(4, 6)
    for output, n in zip(simulated(program, given_to_each(program, [whole])), (2, 4), strict=True):
        assert [part.stride() for part in output] == [(1, n)] * 2


def test_what_the_program_expands_afterwards_a_segment_reduces_in_its_own_order() -> None:
    """The program reduces one row; the segment, which is given all of them, lands and copies."""
    with FusionDefinition("rows") as fd:
        x = fd.define_tensor([1, 4], mesh=TWO, layout={"tp": Partial()})
        fd.add_output(fd.ops.set(fd.ops.expand(x, [5, 4])).on(TWO, {}))
    program = mf.compile(fd)
    row = drawn(1, 4)
    ((whole, _),) = simulated(program, given_to_each(program, [row]))
    ((output,), _) = mf.simulate(program.segments[-1].program, [row.expand(5, 4)]).per_rank
    assert torch.equal(output, row.expand(5, 4))
    assert output.stride() == whole.stride() == (1, 5)


def test_a_segment_simulates_from_global_tensors() -> None:
    """A reduce-scatter of uneven rows; Partial goes in, and the factor comes behind the sum."""
    with FusionDefinition("alone") as fd:
        x = fd.define_tensor([5, 3], mesh=TWO, layout={"tp": Partial()})
        y = fd.ops.set(x * 2).on(TWO, ROWS)
        fd.add_output(y + 1)
    segments = reduce, scale, settle, add = mf.compile(fd).segments
    whole = drawn(5, 3)
    wanted = (reduce, whole), (scale, whole * 2), (settle, whole), (add, whole + 1)
    for segment, expected in wanted:
        result = mf.simulate(segment.program, [whole])
        assert torch.equal(result.outputs[0], expected)
    for rank, (part,) in enumerate(mf.simulate(reduce.program, [whole]).per_rank):
        assert torch.equal(part, local_part(whole, reduce.fusion.layout("x.tp_S0"), rank))
    assert [c.kind for s in segments for c in s.program.communications] == ["ReduceScatter"]


def test_a_function_in_the_place_of_a_segment() -> None:
    with FusionDefinition("replaced") as fd:
        x = fd.define_tensor([6, 4], mesh=TWO, layout=ROWS)
        h = fd.ops.softmax(fd.ops.set(x).on(TWO, {}), 1)
        fd.add_output(h * 2)
    program, whole = mf.compile(fd), drawn(6, 4)

    def run(segment: Any, arguments: list[Any]) -> Sequence[Any]:
        if segment.map[segment.outputs[0]] == h.id:
            return [torch.relu(x) for x in arguments]
        return mf.simulate(segment.program, arguments).outputs

    (got,) = by_hand(program, [whole], run)
    assert torch.equal(got, torch.relu(whole) * 2)


def test_values_go_after_their_last_use() -> None:
    with FusionDefinition("uses") as fd:
        x = fd.define_tensor([4], mesh=TWO)
        a = x + 1
        b = a * x
        fd.add_output(a)
        fd.add_output(b - 1)
    assert [*zip([a.id, b.id, fd.outputs[1]], mf.compile(fd).last_uses, strict=True)] == [
        (1, ()),
        (2, (0,)),
        (3, (2,)),
    ]


def test_nothing_is_made_twice() -> None:
    program = mf.compile(defined("gathered"))
    numbered = program.with_extents({"x.0": 8})
    assert numbered is program.with_extents({"x.0": 8})
    (gather, _) = numbered.segments
    assert gather is program.segments[0].with_extents({"x.0": 8})
    assert gather.program is gather.program
    assert gather.with_extents(None) is gather
    plain = mf.compile(many(3)[0])
    assert plain.segments[0].program is plain.segments[0].program
    assert plain.last_uses is plain.last_uses


def test_the_program_of_a_segment_speaks_of_itself() -> None:
    (gather, _) = mf.compile(defined("gathered")).with_extents({"x.0": 8}).segments
    (itself,) = gather.program.segments
    assert itself.map == {i: i for i in gather.map}
    assert gather.program.fusion.ids == {"x": 0, gather.fusion.outputs[0]: 1}


# -- symbolic extents ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYMBOLIC)
def test_segments_of_known_extents(name: str) -> None:
    program = mf.compile(defined(name))
    symbols = program.segments[0].examples
    for n in (8, 5):
        whole = inputs(name, n)
        numbered = program.with_extents(dict.fromkeys(symbols, n))
        check_by_hand(numbered, whole, [SYMBOLIC[name][2](*whole)])


def looks_at_its_extent() -> mf.Program:
    with FusionDefinition("looks") as fd:
        x = fd.define_tensor([-1], mesh=TWO, layout=ROWS)
        y = x * 2 if x.shape[0] > 4 else x * 3
        fd.add_output(fd.ops.set(y).on(TWO, {}))
    return mf.compile(fd)


def test_a_segment_with_symbols_needs_numbers() -> None:
    segment, _ = looks_at_its_extent().segments
    with pytest.raises(mf.ProgramError, match=r"seg0 has symbolic extents: x\.0[\s\S]*with_ext"):
        _ = segment.program
    with pytest.raises(mf.ProgramError, match=r'x\.0 are missing[\s\S]*"x\.0": \.\.\.'):
        segment.with_extents(None)
    with pytest.raises(mf.ProgramError, match=r"there is no y\.0"):
        segment.with_extents({"y.0": 3})
    with pytest.raises(mf.ProgramError, match="no symbolic extents"):
        segment.with_extents({"x.0": 8}).with_extents({"x.0": 8})


def test_a_segment_is_for_the_extents_that_satisfy_its_guards() -> None:
    """Those of its lowering, and those of the definition."""
    segment, _ = looks_at_its_extent().segments
    assert segment.with_extents({"x.0": 8}).fusion.values["x"].shape == (8,)
    with pytest.raises(mf.ProgramError, match=r"for x\.0 mod 2 == 0[\s\S]*program\.with_extents"):
        segment.with_extents({"x.0": 7})
    with pytest.raises(mf.ProgramError, match=r"for x\.0 > 4"):
        segment.with_extents({"x.0": 2})
