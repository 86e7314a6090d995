"""Streamed local operations."""

from __future__ import annotations

import torch
from torch import Tensor

import mdfuse as mf
from helpers.stream_case import case, line
from mdfuse import Layout, Shard, Stream
from mdfuse.passes.segmentation import merge_local


@case(lambda x: x + 1)
def one_op(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = (x + 1).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(torch.relu)
def inner_dim(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """An iteration has some columns of all rows."""
    x = fd.define_tensor([8, rows], mesh=line(n), layout={"tp": Shard(0)})
    y = fd.ops.relu(x).on(line(n), {"tp": Shard(0)}, stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda a, b: a * b)
def binary(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    a = fd.define_tensor([rows, 4], mesh=line(n))
    b = fd.define_tensor([rows, 4], mesh=line(n))
    y = (a * b).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x, row, column: (x + row) * column)
def broadcast_operands(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """One operand has no streamed dim, the other has nothing else."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    row = fd.define_tensor([1, 4], mesh=line(n))
    column = fd.define_tensor([rows, 1], mesh=line(n))
    y = (x + row).on(line(n), stream=Stream(0, 3))
    z = (y * column).on(line(n), stream=Stream(0, 3))
    fd.add_output(z)


@case(lambda x: x * x + x)
def sliced_once(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """%x is read twice and sliced once."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = (x * x).on(line(n), stream=Stream(0, 3))
    z = (y + x).on(line(n), stream=Stream(0, 3))
    fd.add_output(z)


@case(lambda x: x)
def two_sets(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """One loop; %y, which only the loop reads, is never whole."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = fd.ops.set(x).on(line(n), stream=Stream(0, 3))
    z = fd.ops.set(y).on(line(n), stream=Stream(0, 3))
    fd.add_output(z)


@case(lambda x: (x + 1) * 2 - 3)
def plain_between(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The stream spreads to what is computed of chunks, and what chunks are computed of."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    a = (x + 1).on(line(n), stream=Stream(0, 3))
    b = (a * 2).on(line(n))
    c = (b - 3).on(line(n), stream=Stream(0, 3))
    fd.add_output(c)


@case(lambda x: (x.sum(1), x.amax((1, 2))))
def reduction(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4, 3], mesh=line(n))
    y = fd.ops.sum(x, dims=[1]).on(line(n), stream=Stream(0, 3))
    z = fd.ops.max(x, dims=[1, 2]).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)
    fd.add_output(z)


@case(lambda x, w: x @ w)
def matmul_rows(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=line(n))
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(1)})
    y = (x @ w).on(line(n), {"tp": Shard(1)}, stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x, w: x @ w)
def matmul_columns(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([8, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, rows], mesh=line(n))
    y = (x @ w).on(line(n), {"tp": Shard(0)}, stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda a, b: a @ b)
def batched_matmul(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    a = fd.define_tensor([rows, 4, 5], mesh=line(n))
    b = fd.define_tensor([rows, 5, 3], mesh=line(n))
    y = (a @ b).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x, w, bias: torch.nn.functional.linear(x, w, bias))
def linear_columns(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([2, 3, 6], mesh=line(n))
    w = fd.define_tensor([rows, 6], mesh=line(n))
    bias = fd.define_tensor([rows], mesh=line(n))
    y = fd.ops.linear(x, w, bias).on(line(n), stream=Stream(-1, 3))
    fd.add_output(y)


@case(lambda x: x.to(torch.float32).abs().neg().to(torch.int64))
def casts(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], torch.bfloat16, mesh=line(n))
    a = fd.ops.cast(x, torch.float32).on(line(n), stream=Stream(0, 3))
    b = fd.ops.abs(a).on(line(n), stream=Stream(0, 3))
    c = (-b).on(line(n), stream=Stream(0, 3))
    d = fd.ops.cast(c, torch.int64).on(line(n), stream=Stream(0, 3))
    fd.add_output(d)


def _normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(x, -1)
    return p, torch.nn.functional.layer_norm(p, [4])


@case(_normalized, merge=merge_local, is_exact=False)
def host_unit(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """One unit with two results, one of which is read inside it too."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    p = fd.ops.softmax(x, -1).on(line(n), stream=Stream(0, 3))
    y = fd.ops.layer_norm(p, [4]).on(line(n), stream=Stream(0, 3))
    fd.add_output(p)
    fd.add_output(y)


@case(lambda x: torch.nn.functional.layer_norm(torch.softmax(x, -1), [4]) + 1, is_exact=False)
def unit_and_op(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n))
    p = fd.ops.softmax(x, -1).on(line(n), stream=Stream(0, 3))
    h = fd.ops.layer_norm(p, [4]).on(line(n), stream=Stream(0, 3))
    y = (h + 1).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x, w, b: x @ w + b)
def sharded_and_streamed(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Each rank splits its own rows."""
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 4], mesh=line(n))
    b = fd.define_tensor([rows, 4], mesh=line(n), layout={"tp": Shard(0)})
    h = (x @ w).on(line(n), {"tp": Shard(0)}, stream=Stream(0, 2))
    y = (h + b).on(line(n), {"tp": Shard(0)}, stream=Stream(0, 2))
    fd.add_output(y)


@case(lambda x: x * 2 + 1)
def many_chunks(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = (x * 2).on(line(n), stream=Stream(0, 11))
    z = (y + 1).on(line(n), stream=Stream(0, 11))
    fd.add_output(z)


@case(lambda x, w: (x @ w) * 2, fixed=True)
def lengths(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=line(n))
    w = fd.define_tensor([6, 4], mesh=line(n))
    h = (x @ w).on(line(n), stream=Stream(0, (1, 0, 5, 2)))
    y = (h * 2).on(line(n), stream=Stream(0, (1, 0, 5, 2)))
    fd.add_output(y)


@case(lambda x: (x * 2).T + 1)
def permuted_inside(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The streamed dim is another one after the permute; its memory order is torch's."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    a = (x * 2).on(line(n), stream=Stream(0, 3))
    b = a.T.on(line(n), stream=Stream(1, 3))
    y = (b + 1).on(line(n), stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda x: (x * 2).T)
def permuted_at_the_end(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n))
    a = (x * 2).on(line(n), stream=Stream(0, 3))
    y = a.T.on(line(n), stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda x: (x * 2).T.contiguous())
def ordered(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """An output in a memory order of the user's."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    a = (x * 2).on(line(n), stream=Stream(0, 3))
    y = fd.ops.stride_order(a.T, (1, 0)).on(line(n), stream=Stream(0, 2))
    fd.add_output(y)


@case(lambda x: x.reshape(-1, 6) + x.unsqueeze(1).expand(-1, 5, 2, 3).reshape(-1, 5, 6).sum(1))
def views(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Reshapes that keep the streamed dim, a new dim, an expanded one."""
    x = fd.define_tensor([rows, 2, 3], mesh=line(n))
    a = x.reshape(rows, 6).on(line(n), stream=Stream(0, 3))
    b = x.unsqueeze(1).on(line(n), stream=Stream(0, 3))
    c = b.expand(rows, 5, 2, 3).on(line(n), stream=Stream(0, 3))
    d = c.reshape(rows, 5, 6).on(line(n), stream=Stream(0, 3))
    e = fd.ops.sum(d, dims=[1]).on(line(n), stream=Stream(0, 3))
    y = (a + e).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: ((x + 1), (x + 1) * 2, (x + 1).sum(0)))
def read_afterwards(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The streamed value is an output, goes on in its loop, and is read whole after it."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = (x + 1).on(line(n), stream=Stream(0, 3))
    z = (y * 2).on(line(n), stream=Stream(0, 3))
    total = fd.ops.sum(y, dims=[0]).on(line(n))
    fd.add_output(y)
    fd.add_output(z)
    fd.add_output(total)


@case(lambda x: ((x + 1) * 2 + 5, (x + 1) - 3))
def several_loops(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """One value feeds two loops, cut along different dims."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = (x + 1).on(line(n), stream=Stream(0, 3))
    z = (y * 2).on(line(n), stream=Stream(0, 3))
    v = (y - 3).on(line(n), stream=Stream(1, 2))
    w = (z + 5).on(line(n), stream=Stream(0, 2))
    fd.add_output(w)
    fd.add_output(v)


@case(lambda x: (x * 2) @ (x * 2).T)
def read_whole(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The second product needs all of what the loop computes: another loop."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    h = (x * 2).on(line(n), stream=Stream(0, 3))
    t = h.T.on(line(n), stream=Stream(1, 3))
    y = (h @ t).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: ((x + 1), x * 2))
def reused(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Written into the input, which a loop still reads."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = x + 1
    z = (x * 2).on(line(n), stream=Stream(0, 3))
    fd.add_output(y, reuse=x)
    fd.add_output(z)


@case(lambda x: ((x + 1) * 2, x.sum(0)))
def reused_by_a_loop(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n))
    h = (x + 1).on(line(n), stream=Stream(0, 3))
    y = (h * 2).on(line(n), stream=Stream(0, 3))
    z = fd.ops.sum(x, dims=[0])
    fd.add_output(y, reuse=x)
    fd.add_output(z)


@case(lambda x: (x + 1) * 2)
def streamed_input(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], layout=Layout(line(n), {"tp": Shard(1)}, stream=Stream(0, 3)))
    y = (x + 1).on(line(n), {"tp": Shard(1)}, stream=Stream(0, 3))
    z = y * 2
    fd.add_output(z)


@case(lambda x: x * 2 + 1)
def rotated_op(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Each rank starts at its own chunk, of which there are more than ranks."""
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = (x * 2).on(line(n), stream=Stream(0, 5, rotate="tp"))
    z = (y + 1).on(line(n), stream=Stream(0, 5, rotate="tp"))
    fd.add_output(z)


@case(lambda x, s: x * s + s)
def scalar(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n))
    s = fd.define_scalar()
    y = (x * s).on(line(n), stream=Stream(0, 3))
    z = (y + s).on(line(n), stream=Stream(0, 3))
    fd.add_output(z)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@case(_attended, is_exact=False)
def attention(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """A chunk of the queries sees all keys; the heads are split."""
    shapes = [2, 4, rows, 3], [2, 4, 5, 3], [2, 4, 5, 3]
    q, k, v = (fd.define_tensor(s, mesh=line(n), layout={"tp": Shard(1)}) for s in shapes)
    y = fd.ops.scaled_dot_product_attention(q, k, v)
    y.on(line(n), {"tp": Shard(1)}, stream=Stream(2, 3))
    fd.add_output(y)


@case(lambda i, table: table[i.remainder(9)])
def lookup(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Rows are drawn; columns are streamed."""
    i = fd.define_tensor([7], torch.int64, mesh=line(n))
    table = fd.define_tensor([9, rows], mesh=line(n))
    j = i % 9
    y = fd.ops.embedding(j, table).on(line(n), stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda x, y: torch.where(x > 0, x, torch.zeros_like(x)))
def composites(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n))
    y = fd.define_tensor([rows, 4], mesh=line(n))
    here = (x > 0).on(line(n), stream=Stream(0, 3))
    joined = fd.ops.cat([x, y], 1).on(line(n), stream=Stream(0, 3))
    part = joined[:, :4].on(line(n), stream=Stream(0, 3))
    z = fd.ops.where(here, part, 0).on(line(n), stream=Stream(0, 3))
    fd.add_output(z)
