"""Fusions whose outputs are written into their inputs, with what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.host_programs import numbers
from mdfuse import DeviceMesh, FusionDefinition, Partial, Shard, Stream
from mdfuse.frontend.handle import Handle

MESH = DeviceMesh([0, 1])
SPLIT: dict[str, Any] = {"x": Shard(0)}

Build = Callable[[FusionDefinition, Handle, Handle], None]
Expect = Callable[[Tensor, Tensor], list[Tensor]]


def to_all(fd: FusionDefinition, x: Handle) -> Handle:
    return fd.ops.set(x).on(MESH, {})


def one_op(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(x + 1.0, reuse=x)


def a_later_reader(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(x + 1.0, reuse=x)
    fd.add_output(x * 2.0)


def a_view_of_the_input(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(x + 1.0, reuse=x)
    fd.add_output(fd.ops.permute(x, [1, 0]))


def the_input_itself(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(x + 1.0, reuse=x)
    fd.add_output(fd.ops.set(x))


def a_view_of_a_view(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(x + 1.0, reuse=x)
    fd.add_output(fd.ops.permute(fd.ops.permute(x, [1, 0])[1:, :], [1, 0]))


def two_that_swap(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(w + 0.0, reuse=x)
    fd.add_output(x + 0.0, reuse=w)


def two_inputs_that_swap(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(fd.ops.set(w), reuse=x)
    fd.add_output(fd.ops.set(x), reuse=w)


def two_views_that_swap(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(fd.ops.reshape(w, [4, 3]), reuse=x)
    fd.add_output(fd.ops.reshape(x, [4, 3]), reuse=w)


def a_post_of_the_input(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """The communication reads x while x + 1 is computed."""
    fd.add_output(x + 1.0, reuse=x)
    fd.add_output(to_all(fd, x) * 2.0)


def a_post_before_and_after(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    everything = to_all(fd, x)
    fd.add_output(x + fd.ops.sum(everything), reuse=x)
    fd.add_output(fd.ops.sum(everything * 2.0))


def several_segments(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    h = fd.ops.set(to_all(fd, x * 2.0) + 1.0).on(MESH, SPLIT)
    y = h + x
    fd.add_output(fd.ops.set(to_all(fd, y)).on(MESH, SPLIT), reuse=x)
    fd.add_output(x - w)
    fd.add_output(w + fd.ops.sum(to_all(fd, x)), reuse=w)


def a_result_that_is_read_again(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    y = x + 1.0
    fd.add_output(y, reuse=x)
    fd.add_output(y * 2.0)
    fd.add_output(fd.ops.permute(y, [1, 0]))


def a_reshard_into_the_input(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """What a communication delivers goes into the input's buffer."""
    total = fd.ops.sum(to_all(fd, x), dims=[1], keepdim=True) + to_all(fd, w)
    fd.add_output(fd.ops.set(total).on(MESH, SPLIT), reuse=x)


def an_optimizer(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """Momentum and weight, each in its place; the step is computed before both."""
    momentum = w * 0.5 + x
    fd.add_output(x - momentum * 0.25, reuse=x)
    fd.add_output(momentum, reuse=w)


def no_linear_op(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(fd.ops.where(fd.ops.gt(x, 2.0), fd.ops.relu(x), fd.ops.neg(x)), reuse=x)
    fd.add_output(fd.ops.sqrt(w), reuse=w)


def a_view_beside_it(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """An element is read after another one that lies before it was written."""
    fd.add_output(x + x[:, :1], reuse=x)
    fd.add_output(fd.ops.cat([w[:, 1:], w[:, :1]], 1), reuse=w)


def rows_of_it(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output(x @ fd.ops.permute(to_all(fd, w)[:3], [1, 0]), reuse=x)


def a_post_of_the_result(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    y = x + 1.0
    fd.add_output(y, reuse=x)
    fd.add_output(to_all(fd, y))
    fd.add_output(fd.ops.set(y) * 3.0, reuse=w)


def a_view_of_another(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    y = w * 2.0
    fd.add_output(y, reuse=x)
    fd.add_output(fd.ops.reshape(y, [4, 3]), reuse=w)


# -- computed in host loops over chunks ----------------------------------------------------------

ROWS, COLUMNS = {"stream": Stream(0, 2)}, {"stream": Stream(1, 3)}


def by_chunks(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output((x - 0.5 * w).on(MESH, SPLIT, **COLUMNS), reuse=x)


def by_chunks_of_several_ops(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """All of it in one iteration, which may be one host unit."""
    step = (x * w).on(MESH, SPLIT, **ROWS)
    fd.add_output((x - fd.ops.neg(step).on(MESH, SPLIT, **ROWS)).on(MESH, SPLIT, **ROWS), reuse=x)


def chunks_of_another(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """Nothing reads the old value; the operation is not one element by element."""
    rows = (w @ fd.ops.permute(to_all(fd, w)[:3], [1, 0])).on(MESH, SPLIT, **ROWS)
    fd.add_output(rows, reuse=x)


def chunks_that_go_on(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """The same loop reads its result, another one too, and it is sent."""
    y = (x + 1.0).on(MESH, SPLIT, **COLUMNS)
    fd.add_output(y, reuse=x)
    fd.add_output((y * 2.0).on(MESH, SPLIT, **COLUMNS))
    fd.add_output((y * 3.0).on(MESH, SPLIT, **ROWS))
    fd.add_output(to_all(fd, y))


def chunks_after_a_loop(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """Another loop reads the old value before."""
    fd.add_output((x * 2.0).on(MESH, SPLIT, **ROWS))
    fd.add_output((x + 1.0).on(MESH, SPLIT, **COLUMNS), reuse=x)


def two_by_chunks(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """Each in its place; the second reads what the first has written."""
    momentum = (w * 0.5 + x).on(MESH, SPLIT, **COLUMNS)
    fd.add_output(momentum, reuse=w)
    fd.add_output((x - momentum * 0.25).on(MESH, SPLIT, **COLUMNS), reuse=x)


def sent_by_chunks(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """An iteration sends its chunk before it writes it."""
    whole = fd.ops.set(x).on(MESH, {}, **COLUMNS)
    fd.add_output((whole * 2.0).on(MESH, {}, **COLUMNS))
    fd.add_output((x + 1.0).on(MESH, SPLIT, **COLUMNS), reuse=x)


def read_on_both_streams(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """What is computed of what comes back stays with the transfers, the step does not."""
    halves, rows = fd.ops.set(x).on(MESH, {"x": Shard(1)}), fd.ops.set(to_all(fd, w)[:3])
    parts = (halves @ rows.on(MESH, SPLIT)).on(MESH, {"x": Partial()}, **COLUMNS)
    fd.add_output((fd.ops.set(parts).on(MESH, SPLIT, **COLUMNS) * x).on(MESH, SPLIT, **COLUMNS))
    fd.add_output((x - w).on(MESH, SPLIT, **COLUMNS), reuse=x)


def received_by_chunks(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """Communications deliver the chunks of the output."""
    columns = fd.ops.set(w).on(MESH, {"x": Shard(1)})
    fd.add_output(fd.ops.set(columns * 2.0).on(MESH, SPLIT, **ROWS), reuse=x)


def received_behind_a_reader(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    columns = fd.ops.set(x * 2.0).on(MESH, {"x": Shard(1)})
    fd.add_output(fd.ops.set(columns).on(MESH, SPLIT, **ROWS), reuse=x)


def chunks_and_a_later_reader(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output((x + 1.0).on(MESH, SPLIT, **COLUMNS), reuse=x)
    fd.add_output(x * 2.0)


def a_chunk_that_is_read_later(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """By the same iteration."""
    y = (x + 1.0).on(MESH, SPLIT, **COLUMNS)
    fd.add_output(y, reuse=x)
    fd.add_output((x * y).on(MESH, SPLIT, **COLUMNS))


def chunks_that_swap(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    fd.add_output((w + 0.0).on(MESH, SPLIT, **COLUMNS), reuse=x)
    fd.add_output((x + 0.0).on(MESH, SPLIT, **COLUMNS), reuse=w)


def chunks_of_a_product(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """Each element needs a row of the old chunk."""
    turned = fd.ops.permute(to_all(fd, w)[:3], [1, 0])
    fd.add_output((x @ turned).on(MESH, SPLIT, **ROWS), reuse=x)


def other_chunks_too(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """Each iteration reads the first column, which the first one writes."""
    fd.add_output((x + x[:, :1]).on(MESH, SPLIT, **COLUMNS), reuse=x)
    turned = fd.ops.cat([w[:, 1:], w[:, :1]], 1)
    fd.add_output((turned - w).on(MESH, SPLIT, **COLUMNS), reuse=w)


def other_chunks_before(fd: FusionDefinition, x: Handle, w: Handle) -> None:
    """Each iteration reads the first column, though not where it writes."""
    scaled = (w * x[:, :1]).on(MESH, SPLIT, **COLUMNS)
    fd.add_output((x + scaled).on(MESH, SPLIT, **COLUMNS), reuse=x)


CASES: list[tuple[Build, Expect]] = [
    (one_op, lambda x, w: [x + 1]),
    (a_later_reader, lambda x, w: [x + 1, x * 2]),
    (a_view_of_the_input, lambda x, w: [x + 1, x.T]),
    (the_input_itself, lambda x, w: [x + 1, x]),
    (a_view_of_a_view, lambda x, w: [x + 1, x[:, 1:]]),
    (two_that_swap, lambda x, w: [w, x]),
    (two_inputs_that_swap, lambda x, w: [w, x]),
    (two_views_that_swap, lambda x, w: [w, x]),
    (a_post_of_the_input, lambda x, w: [x + 1, x * 2]),
    (a_post_before_and_after, lambda x, w: [x + x.sum(), 2 * x.sum()]),
    (several_segments, lambda x, w: [3 * x + 1, x - w, w + x.sum()]),
    (a_result_that_is_read_again, lambda x, w: [x + 1, (x + 1) * 2, (x + 1).T]),
    (a_reshard_into_the_input, lambda x, w: [x.sum(1, keepdim=True) + w]),
    (an_optimizer, lambda x, w: [x - (w * 0.5 + x) * 0.25, w * 0.5 + x]),
    (no_linear_op, lambda x, w: [torch.where(x > 2, x.relu(), -x), w.sqrt()]),
    (a_view_beside_it, lambda x, w: [x + x[:, :1], w.roll(-1, 1)]),
    (rows_of_it, lambda x, w: [x @ w[:3].T]),
    (a_post_of_the_result, lambda x, w: [x + 1, x + 1, 3 * x + 3]),
    (a_view_of_another, lambda x, w: [w * 2, w * 2]),
    (by_chunks, lambda x, w: [x - 0.5 * w]),
    (by_chunks_of_several_ops, lambda x, w: [x + x * w]),
    (chunks_of_another, lambda x, w: [w @ w[:3].T]),
    (chunks_that_go_on, lambda x, w: [x + 1, (x + 1) * 2, (x + 1) * 3, x + 1]),
    (chunks_after_a_loop, lambda x, w: [x * 2, x + 1]),
    (two_by_chunks, lambda x, w: [w * 0.5 + x, x - (w * 0.5 + x) * 0.25]),
    (sent_by_chunks, lambda x, w: [x * 2, x + 1]),
    (read_on_both_streams, lambda x, w: [(x @ w[:3]) * x, x - w]),
    (received_by_chunks, lambda x, w: [w * 2]),
    (received_behind_a_reader, lambda x, w: [x * 2]),
    (chunks_and_a_later_reader, lambda x, w: [x + 1, x * 2]),
    (a_chunk_that_is_read_later, lambda x, w: [x + 1, x * (x + 1)]),
    (chunks_that_swap, lambda x, w: [w, x]),
    (chunks_of_a_product, lambda x, w: [x @ w[:3].T]),
    (other_chunks_too, lambda x, w: [x + x[:, :1], w.roll(-1, 1) - w]),
    (other_chunks_before, lambda x, w: [x + w * x[:, :1]]),
]


def define(build: Build) -> FusionDefinition:
    with FusionDefinition(build.__name__) as fd:
        x = fd.define_tensor([4, 3], mesh=MESH, layout=SPLIT)
        w = fd.define_tensor([4, 3], mesh=MESH, layout=SPLIT)
        build(fd, x, w)
    return fd


def inputs() -> tuple[Tensor, Tensor]:
    return numbers(4, 3), numbers(4, 3, start=100)
