"""What cannot be streamed, and how that is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from expecttest import TestCase
from helpers.stream_cases import line

import mdfuse as mf
from mdfuse import Layout, Partial, Shard, Stream
from mdfuse.errors import MdfuseError

MESH = line(4)


def matrix(fd: mf.FusionDefinition, layout: dict[str, Any] | None = None, rows: int = 8) -> Any:
    return fd.define_tensor([rows, 6], mesh=MESH, layout=layout or {}, name="x")


def compiled(define: Callable[[mf.FusionDefinition], Any]) -> mf.Program:
    with mf.FusionDefinition("wrong") as fd:
        fd.add_output(define(fd))
    return mf.compile(fd)


def message(define: Callable[[mf.FusionDefinition], Any]) -> str:
    """How an error reads, without its line number, which moves."""
    with pytest.raises(MdfuseError) as found:
        compiled(define)
    name = type(found.value).__name__
    return f"{name}: " + re.sub(r"test_loops_errors.py:\d+", "here", str(found.value))


class TestErrors(TestCase):
    def test_a_reshape_that_splits_the_dim(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd)
            y = x.reshape(2, 4, 6).on(MESH, stream=Stream(1, 2))
            return y

        self.assertExpectedInline(
            message(define),
            """\
LoweringError: %y = reshape(8, 6) -> (2, 4, 6) is streamed over dim 1
  here   y = x.reshape(2, 4, 6).on(MESH, stream=Stream(1, 2))
  because     the reshape splits or merges that dim: a chunk of the result is none of its operand
  try         chunks of whole rows before and after it, or stream a dim that the reshape keeps""",
        )

    def test_a_reshape_that_merges_the_dim(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd)
            y = x.reshape(48).on(MESH, stream=Stream(0, 3))
            return y

        self.assertExpectedInline(
            message(define),
            """\
LoweringError: %y = reshape(8, 6) -> (48,) is streamed over dim 0
  here   y = x.reshape(48).on(MESH, stream=Stream(0, 3))
  because     the reshape splits or merges that dim: a chunk of the result is none of its operand
  try         chunks of whole rows before and after it, or stream a dim that the reshape keeps""",
        )

    def test_softmax_over_the_dim(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd)
            y = fd.ops.softmax(x, 0).on(MESH, stream=Stream(0, 2))
            return y

        self.assertExpectedInline(
            message(define),
            """\
LoweringError: %y = softmax is streamed over dim 0
  here   y = fd.ops.softmax(x, 0).on(MESH, stream=Stream(0, 2))
  because     softmax needs dim 0 as a whole
  try         stream another dim, or leave stream= out: the result is the same""",
        )

    def test_a_sum_over_the_dim(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd)
            y = fd.ops.sum(x, [0], keepdim=True).on(MESH, stream=Stream(0, 2))
            return y

        self.assertExpectedInline(
            message(define),
            """\
LoweringError: %y = sum is streamed over dim 0
  here   y = fd.ops.sum(x, [0], keepdim=True).on(MESH, stream=Stream(0, 2))
  because     sum needs dim 0 as a whole
  try         stream another dim, or leave stream= out: the result is the same""",
        )

    def test_a_dim_that_is_not_there(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd)
            y = fd.ops.abs(x)
            return y.on(MESH, stream=Stream(2, 2))

        self.assertExpectedInline(
            message(define),
            """\
LayoutError: %y: stream(2,2): dim 2 is out of range for a tensor with 2 dims
  here   return y.on(MESH, stream=Stream(2, 2))
  try         dims go from -2 to 1""",
        )

    def test_lengths_that_do_not_fit(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd, {"tp": Shard(0)}, 7)
            y = (x + 1).on(MESH, {"tp": Shard(0)}, stream=Stream(0, (1, 1)))
            return y

        self.assertExpectedInline(
            message(define),
            """\
LoweringError: %y is streamed in chunks of (1, 1) rows of dim 0
  here   y = (x + 1).on(MESH, {"tp": Shard(0)}, stream=Stream(0, (1, 1)))
  because     laid out as (tp=S0), the ranks have [1, 2] rows of that dim
  try         give lengths that add up to each rank's part, or a count of chunks""",
        )

    def test_lengths_that_do_not_fit_what_is_posted_whole(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd, {"tp": Partial("sum")})
            y = fd.ops.set(x).on(MESH, {"tp": Shard(0)}, stream=Stream(0, (3, 4)))
            return y

        self.assertExpectedInline(
            message(define),
            """\
LoweringError: %y is streamed in chunks of (3, 4) rows of dim 0
  here   y = fd.ops.set(x).on(MESH, {"tp": Shard(0)}, stream=Stream(0, (3, 4)))
  because     laid out as (tp=S0), the ranks have [2] rows of that dim
  try         give lengths that add up to each rank's part, or a count of chunks""",
        )

    def test_lengths_of_all_shards_where_nothing_is_scattered(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd, {"tp": Shard(0)})
            ring = Stream(0, (1, 1) * 4, rotate="tp")
            return (x + 1).on(MESH, {"tp": Shard(0)}, stream=ring)

        self.assertExpectedInline(
            message(define),
            """\
LoweringError: %t is streamed in chunks of (1, 1, 1, 1, 1, 1, 1, 1) rows of dim 0
  here   return (x + 1).on(MESH, {"tp": Shard(0)}, stream=ring)
  because     laid out as (tp=S0), the ranks have [2] rows of that dim
  try         give lengths that add up to each rank's part, or a count of chunks""",
        )

    def test_an_axis_that_is_not_there(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd)
            y = fd.ops.abs(x)
            return y.on(MESH, stream=Stream(0, 4, rotate="dp"))

        self.assertExpectedInline(
            message(define),
            """\
MeshError: mesh(tp=4) has no axis 'dp'
  here   return y.on(MESH, stream=Stream(0, 4, rotate="dp"))
  try         its axes are 'tp'""",
        )

    def test_an_axis_of_an_input_that_is_not_there(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            layout = Layout(MESH, stream=Stream(0, 4, rotate="dp"))
            return fd.define_tensor([8], layout=layout, name="x")

        self.assertExpectedInline(
            message(define),
            """\
MeshError: mesh(tp=4) has no axis 'dp'
  here   return fd.define_tensor([8], layout=layout, name="x")
  try         its axes are 'tp'""",
        )

    def test_a_stream_outside_of_a_split(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            x = matrix(fd)
            order = {0: ("stream", "tp")}
            return fd.ops.set(x).on(MESH, {"tp": Shard(0)}, order, Stream(0, (2, 6)))

        self.assertExpectedInline(
            message(define),
            """\
LayoutError: order {0: ('stream', 'tp')}: the stream comes before tp
  here   return fd.ops.set(x).on(MESH, {"tp": Shard(0)}, order, Stream(0, (2, 6)))
  because     chunks that axes split are equal parts of the whole dim
  try         put the stream first, with a number of chunks of this dim, or last""",
        )

    def test_no_chunks(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            return Stream(0, 0)

        self.assertExpectedInline(
            message(define),
            """\
LayoutError: Stream(0, 0)
  here   return Stream(0, 0)
  because     chunks is how many there are, or a tuple of their lengths
  try         for example Stream(0, 4) or Stream(0, (3, 1))""",
        )

    def test_no_number_of_chunks(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            return Stream(1, (3, -1))

        self.assertExpectedInline(
            message(define),
            """\
LayoutError: Stream(1, (3, -1))
  here   return Stream(1, (3, -1))
  because     chunks is how many there are, or a tuple of their lengths
  try         for example Stream(0, 4) or Stream(0, (3, 1))""",
        )

    def test_no_dim(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            return Stream("rows", 4)

        self.assertExpectedInline(
            message(define),
            """\
LayoutError: Stream('rows', 4)
  here   return Stream("rows", 4)
  because     a dim is an integer of 64 bits
  try         for example Stream(0, 4)""",
        )

    def test_no_stream(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            return matrix(fd).on(MESH, stream=4)

        self.assertExpectedInline(
            message(define),
            """\
LayoutError: stream=4
  here   return matrix(fd).on(MESH, stream=4)
  try         stream=Stream(dim, chunks), or none""",
        )

    def test_a_stream_as_a_placement(self) -> None:
        def define(fd: mf.FusionDefinition) -> Any:
            return Layout(MESH, {"tp": Stream(0, 2)})

        self.assertExpectedInline(
            message(define),
            """\
LayoutError: axis tp: stream(0,2) is not a placement of a mesh axis
  here   return Layout(MESH, {"tp": Stream(0, 2)})
  try         pass stream=Stream(dim, chunks)""",
        )


def test_a_stream_inside_of_a_split_is_what_it_is_anyway() -> None:
    layouts = [
        Layout(MESH, {"tp": Shard(0)}, order, Stream(0, 2)) for order in ({0: ("tp", "stream")}, {})
    ]
    assert layouts[0] == layouts[1]


def test_a_dim_counted_from_the_end() -> None:
    with mf.FusionDefinition("last") as fd:
        y = (matrix(fd) + 1).on(MESH, stream=Stream(-1, 2))
        fd.add_output(y)
    assert y.layout.stream == Stream(1, 2)
