"""What cannot be streamed, and how that is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers.golden import Golden
from helpers.stream_cases import line

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Shard, Stream
from mdfuse.errors import MdfuseError

MESH = line(4)

Define = Callable[[mf.FusionDefinition], Any]


def matrix(fd: mf.FusionDefinition, layout: dict[str, Any] | None = None, rows: int = 8) -> Any:
    return fd.define_tensor([rows, 6], mesh=MESH, layout=layout or {}, name="x")


#: Each defines the result of a program that is refused.
WRONG: list[Define] = []


def wrong(define: Define) -> Define:
    WRONG.append(define)
    return define


def compiled(define: Define) -> mf.Program:
    with mf.FusionDefinition("wrong") as fd:
        fd.add_output(define(fd))
    return mf.compile(fd)


def message(define: Define) -> str:
    """How an error reads, without its line number, which moves."""
    with pytest.raises(MdfuseError) as found:
        compiled(define)
    name = type(found.value).__name__
    return f"{name}: " + re.sub(r"test_loops_errors.py:\d+", "here", str(found.value))


@wrong
def a_reshape_that_splits_the_dim(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd)
    y = x.reshape(2, 4, 6).on(MESH, stream=Stream(1, 2))
    return y


@wrong
def a_reshape_that_merges_the_dim(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd)
    y = x.reshape(48).on(MESH, stream=Stream(0, 3))
    return y


@wrong
def softmax_over_the_dim(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd)
    y = fd.ops.softmax(x, 0).on(MESH, stream=Stream(0, 2))
    return y


@wrong
def a_sum_over_the_dim(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd)
    y = fd.ops.sum(x, [0], keepdim=True).on(MESH, stream=Stream(0, 2))
    return y


@wrong
def a_dim_that_is_not_there(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd)
    y = fd.ops.abs(x)
    return y.on(MESH, stream=Stream(2, 2))


@wrong
def lengths_that_do_not_fit(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd, {"tp": Shard(0)}, 7)
    y = (x + 1).on(MESH, {"tp": Shard(0)}, stream=Stream(0, (1, 1)))
    return y


@wrong
def lengths_that_do_not_fit_what_is_posted_whole(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd, {"tp": Partial("sum")})
    y = fd.ops.set(x).on(MESH, {"tp": Shard(0)}, stream=Stream(0, (3, 4)))
    return y


@wrong
def lengths_of_all_shards_where_nothing_is_scattered(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd, {"tp": Shard(0)})
    ring = Stream(0, (1, 1) * 4, rotate="tp")
    return (x + 1).on(MESH, {"tp": Shard(0)}, stream=ring)


@wrong
def an_axis_that_is_not_there(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd)
    y = fd.ops.abs(x)
    return y.on(MESH, stream=Stream(0, 4, rotate="dp"))


@wrong
def an_axis_of_an_input_that_is_not_there(fd: mf.FusionDefinition) -> Any:
    layout = Layout(MESH, stream=Stream(0, 4, rotate="dp"))
    return fd.define_tensor([8], layout=layout, name="x")


@wrong
def a_stream_outside_of_a_split(fd: mf.FusionDefinition) -> Any:
    x = matrix(fd)
    order = {0: ("stream", "tp")}
    return fd.ops.set(x).on(MESH, {"tp": Shard(0)}, order, Stream(0, (2, 6)))


@wrong
def rows_in_zigzag_order_that_move_while_chunks_turn(fd: mf.FusionDefinition) -> Any:
    mesh = DeviceMesh.arange(dp=2, tp=2)
    x = fd.define_tensor([8, 6], mesh=mesh, layout={"dp": Shard(0, zigzag=True)}, name="x")
    y = fd.ops.set(x).on(mesh, stream=Stream(1, 3, rotate="tp"))
    return y


@wrong
def no_chunks(fd: mf.FusionDefinition) -> Any:
    return Stream(0, 0)


@wrong
def no_number_of_chunks(fd: mf.FusionDefinition) -> Any:
    return Stream(1, (3, -1))


@wrong
def no_dim(fd: mf.FusionDefinition) -> Any:
    return Stream("rows", 4)


@wrong
def no_stream(fd: mf.FusionDefinition) -> Any:
    return matrix(fd).on(MESH, stream=4)


@wrong
def a_stream_as_a_placement(fd: mf.FusionDefinition) -> Any:
    return Layout(MESH, {"tp": Stream(0, 2)})


@pytest.mark.parametrize("define", WRONG, ids=lambda x: x.__name__)
def test_message(golden: Golden, define: Define) -> None:
    golden(message(define))


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
