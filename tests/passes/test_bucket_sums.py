"""Values that are reduced alike are reduced together, where nothing reads one of them before."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard

LINE = DeviceMesh.arange(dp=4)
GRID = DeviceMesh.arange(dp=2, tp=2)
TOGETHER = mf.Options(bucket_bytes=1 << 20)


def kinds(program: mf.Program) -> dict[str, int]:
    return dict(Counter(str(i.comm.kind) for i in program.host.walk() if i.comm is not None))


def numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * 9).to(dtype)


def reductions(
    shapes: Sequence[Sequence[int]],
    to: dict[str, Any],
    mesh: DeviceMesh = LINE,
    dtype: torch.dtype = torch.float64,
    op: str = "sum",
) -> tuple[mf.FusionDefinition, list[Tensor], list[Tensor]]:
    """A reduction over a split dim for each shape, its inputs, and what comes out."""
    with mf.FusionDefinition("many") as fd:
        xs = [fd.define_tensor([8, *shape], dtype, mesh, {"dp": Shard(0)}) for shape in shapes]
        for x in xs:
            y = x.sum(0) if op == "sum" else x.amax(0)
            fd.add_output(fd.ops.set(y).on(mesh, to))
    given = [numbers((8, *shape), n, dtype) for n, shape in enumerate(shapes)]
    return fd, given, [x.sum(0) if op == "sum" else x.amax(0) for x in given]


SHAPES = ((6,), (), (2, 3), (1, 4, 1))
EVEN = ((8,), (4, 3), (12, 1, 2))


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_values_on_all_ranks(dtype: torch.dtype, op: str) -> None:
    fd, given, expected = reductions(SHAPES, {}, dtype=dtype, op=op)
    assert kinds(mf.compile(fd)) == {"Allreduce": 4}
    program = mf.compile(fd, TOGETHER)
    assert kinds(program) == {"Allreduce": 1}
    assert program.bytes_received(0) == mf.compile(fd).bytes_received(0)
    check_everywhere(program, given, expected)
    text = str(mf.hir.parse(str(program.host)))
    assert str(mf.hir.parse(text)) == text


def test_values_that_are_split_afterwards() -> None:
    """A rank's row of the bucket is its part of each value."""
    fd, given, expected = reductions(EVEN, {"dp": Shard(0)})
    assert kinds(mf.compile(fd)) == {"ReduceScatter": 3}
    program = mf.compile(fd, TOGETHER)
    assert kinds(program) == {"ReduceScatter": 1}
    check_everywhere(program, given, expected)


@pytest.mark.parametrize("to", [{"tp": Shard(0)}, {"dp": Shard(0), "tp": Shard(0)}], ids=str)
def test_values_that_are_split_along_another_axis(to: dict[str, Any]) -> None:
    with mf.FusionDefinition("grid") as fd:
        xs = [
            fd.define_tensor([8, *s], torch.float64, GRID, {"dp": Shard(0), "tp": Shard(1)})
            for s in EVEN
        ]
        for x in xs:
            fd.add_output(fd.ops.set(x.sum(0)).on(GRID, to))
    given = [numbers((8, *s), n) for n, s in enumerate(EVEN)]
    program = mf.compile(fd, TOGETHER)
    assert sum(kinds(program).values()) < sum(kinds(mf.compile(fd)).values())
    check_everywhere(program, given, [x.sum(0) for x in given])


@pytest.mark.parametrize(
    ("shapes", "to"),
    [
        (((6,), (5,)), {"dp": Shard(0)}),  # uneven parts
        (((3, 8), (5, 8)), {"dp": Shard(1)}),  # not by the first dim
        (((0, 4), (0,)), {}),  # nothing is sent
    ],
    ids=str,
)
def test_what_goes_alone(shapes: Sequence[Sequence[int]], to: dict[str, Any]) -> None:
    fd, given, expected = reductions(shapes, to)
    alone, program = mf.compile(fd), mf.compile(fd, TOGETHER)
    assert kinds(program) == kinds(alone)
    check_everywhere(program, given, expected)


def test_a_bucket_has_a_limit() -> None:
    """48, 8, 48 and 32 bytes."""
    fd, given, expected = reductions(SHAPES, {})
    counts = {0: 4, 7: 4, 8: 4, 56: 3, 80: 2, 104: 2, 136: 1}
    for most, count in counts.items():
        program = mf.compile(fd, mf.Options(bucket_bytes=most))
        assert kinds(program) == {"Allreduce": count}, most
        check_everywhere(program, given, expected)


def test_a_value_that_is_read_before_the_last_is_there() -> None:
    """The second is made of the first, the fourth of the second."""
    with mf.FusionDefinition("chain") as fd:
        x = fd.define_tensor([8, 4], torch.float64, LINE, {"dp": Shard(0)})
        a = fd.ops.set(x.sum(0)).on(LINE, {})
        b = fd.ops.set((x * a).sum(0)).on(LINE, {})
        c = fd.ops.set((x - 1).sum(0)).on(LINE, {})
        d = fd.ops.set((x * b).sum(0)).on(LINE, {})
        for y in (a, b, c, d):
            fd.add_output(y)
    given = numbers((8, 4), 0)
    first = given.sum(0)
    second = (given * first).sum(0)
    program = mf.compile(fd, TOGETHER)
    assert kinds(program) == {"Allreduce": 3}  # b and c together
    check_everywhere(program, [given], [first, second, (given - 1).sum(0), (given * second).sum(0)])


def test_different_values_have_buckets_of_their_own() -> None:
    """Two dtypes, two reduce ops, two meshes, a sum that stays Partial along an axis."""
    other = DeviceMesh([4, 5, 6, 7], axes=("dp",))
    with mf.FusionDefinition("kinds") as fd:
        x = fd.define_tensor([8, 4], torch.float64, LINE, {"dp": Shard(0)})
        z = fd.define_tensor([8, 4], torch.float64, other, {"dp": Shard(0)})
        p = fd.define_tensor([4], torch.float64, GRID, {"dp": Partial("sum"), "tp": Partial("sum")})
        for n in range(2):
            y = x + n
            fd.add_output(fd.ops.set(y.sum(0)).on(LINE, {}))
            fd.add_output(fd.ops.set(y.amax(0)).on(LINE, {}))
            fd.add_output(fd.ops.set(y.to(torch.float32).sum(0)).on(LINE, {}))
            fd.add_output(fd.ops.set((z + n).sum(0)).on(other, {}))
            fd.add_output(fd.ops.set(p * (n + 1)).on(GRID, {"tp": Partial("sum")}))
    xs = numbers((8, 4), 0), numbers((8, 4), 1), numbers((4,), 2)
    expected = [
        v
        for n in range(2)
        for v in (
            (xs[0] + n).sum(0), (xs[0] + n).amax(0), (xs[0] + n).float().sum(0),
            (xs[1] + n).sum(0), xs[2] * (n + 1),
        )
    ]  # fmt: skip
    alone, program = mf.compile(fd), mf.compile(fd, TOGETHER)
    assert kinds(alone) == {"Allreduce": 9}  # the input is reduced once for both of its readers
    assert kinds(program) == {"Allreduce": 5}
    check_everywhere(program, xs, expected)


def test_narrow_sums_are_widened_together() -> None:
    fd, given, expected = reductions(SHAPES, {}, dtype=torch.bfloat16)
    options = mf.Options(bucket_bytes=1 << 20, reduce_dtype=torch.float32)
    program = mf.compile(fd, options)
    assert kinds(program) == {"Allreduce": 1}
    posts = [i for i in program.host.walk() if i.comm is not None]
    assert [program.host.types[i.reads[0]].dtype for i in posts] == [torch.float32]
    check_everywhere(program, given, expected)


def test_casts_of_what_arrives_go_with_it() -> None:
    """Gradients of 16 bits of which masters in f32 are made; the last is read at once."""
    given = [numbers((8, 6), n).bfloat16() for n in range(4)]
    with mf.FusionDefinition("cast") as fd:
        xs = [fd.define_tensor([8, 6], torch.bfloat16, LINE, {"dp": Shard(0)}) for _ in given]
        ys = [fd.ops.set(x.amax(0)).on(LINE, {}).to(torch.float32) for x in xs]
        for y in (*ys, ys[-1] * 2):
            fd.add_output(y)
    program = mf.compile(fd, TOGETHER)
    assert kinds(program) == {"Allreduce": 1}
    wide = [x.amax(0).float() for x in given]
    check_everywhere(program, given, [*wide, wide[-1] * 2])


def test_a_sum_that_nobody_reads_is_left_out() -> None:
    with mf.FusionDefinition("unread") as fd:
        x = fd.define_tensor([8, 4], torch.float64, LINE, {"dp": Shard(0)})
        kept = [fd.ops.set((x + n).sum(0)).on(LINE, {}) for n in range(3)]
        fd.add_output(kept[0])
        fd.add_output(kept[2])
    program = mf.compile(fd, TOGETHER)
    (post,) = [i for i in program.host.walk() if i.comm is not None]
    assert program.host.types[post.reads[0]].shape == (1, 8)


@pytest.mark.parametrize("seed", range(12))
def test_drawn(seed: int) -> None:
    """Sums of drawn shapes, which some later ones are made of, in buckets of a drawn size."""
    draw = random.Random(seed)
    given = [numbers((4, 6), n) for n in range(3)]
    mesh = draw.choice([LINE, GRID])
    goals: list[dict[str, Any]] = [{}, {"dp": Shard(0)}, {a: Shard(0) for a in mesh.axes}]
    expected: list[Tensor] = []
    with mf.FusionDefinition("drawn") as fd:
        xs = [
            fd.define_tensor([4, 6], torch.float64, mesh, {draw.choice(mesh.axes): Shard(0)})
            for _ in given
        ]
        known = [*zip(xs, given, strict=True)]
        for _ in range(9):
            x, whole = draw.choice(known)
            y, v = (x * 0.5 + 1).sum(0), (whole * 0.5 + 1).sum(0)
            if draw.random() < 0.5:
                y, v = y.reshape(2, 3), v.reshape(2, 3)
            y = fd.ops.set(y).on(mesh, draw.choice(goals))
            fd.add_output(y)
            expected.append(v)
            if draw.random() < 0.3:
                other, of = draw.choice(known)
                known.append((other + y.reshape(6), of + v.reshape(6)))
    options = mf.Options(bucket_bytes=draw.choice([16, 100, 1 << 20]))
    check_everywhere(mf.compile(fd, options), given, expected)


@pytest.mark.parametrize("value", [-1, 1.5, True, "8"])
def test_a_wrong_size_is_refused(value: Any) -> None:
    with pytest.raises(mf.ProgramError, match=r"bucket_bytes=(.|\n)*0 for none"):
        mf.Options(bucket_bytes=value)
