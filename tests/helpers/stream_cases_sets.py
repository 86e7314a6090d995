"""Streamed changes of layout along one axis, and what is computed before and after them."""

from __future__ import annotations

import torch

import mdfuse as mf
from helpers.stream_case import case, line
from mdfuse import Partial, Shard, Stream


@case(lambda x: x)
def gather_another_dim(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The dim that is gathered leads in what is sent; a copy puts it back in its place."""
    x = fd.define_tensor([rows, 8], mesh=line(n), layout={"tp": Shard(1)})
    y = fd.ops.set(x).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x)
def gather_outermost(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([8, rows], mesh=line(n), layout={"tp": Shard(0)})
    y = fd.ops.set(x).on(line(n), stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda x: x)
def gather_by_broadcasts(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """As many chunks as ranks: each sends its own, right into its place of the whole."""
    x = fd.define_tensor([rows, 3], mesh=line(n), layout={"tp": Shard(0)})
    y = fd.ops.set(x).on(line(n), stream=Stream(0, n))
    fd.add_output(y)


@case(lambda x: x)
def gather_by_exchanges(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Otherwise each rank receives what it lacks of the chunk."""
    x = fd.define_tensor([rows, 3], mesh=line(n), layout={"tp": Shard(0)})
    y = fd.ops.set(x).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x)
def gather_by_ring(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 3], mesh=line(n), layout={"tp": Shard(0)})
    y = fd.ops.set(x).on(line(n), stream=Stream(0, n, rotate="tp"))
    fd.add_output(y)


@case(lambda x: (x.T, (x.T + 1) * 2))
def gather_inner_dim(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """What is sent lies in another memory order, and so does the whole."""
    x = fd.define_tensor([rows, 3], mesh=line(n), layout={"tp": Shard(0)})
    a = x.T + 0
    y = fd.ops.set(a).on(line(n), stream=Stream(1, n))
    b = a + 1
    z = fd.ops.set(b).on(line(n), stream=Stream(1, n, rotate="tp"))
    fd.add_output(y)
    fd.add_output((z * 2).on(line(n)))


@case(lambda x: x, fixed=True)
def gather_lengths(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n), layout={"tp": Shard(0)})
    y = fd.ops.set(x).on(line(n), stream=Stream(0, (1, 0, 5, 2)))
    fd.add_output(y)


@case(lambda x: x)
def reduce_all(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 4], mesh=line(n), layout={"tp": Partial("sum")})
    y = fd.ops.set(x).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x)
def reduce_max(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([3, rows], mesh=line(n), layout={"tp": Partial("max")})
    y = fd.ops.set(x).on(line(n), stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda x: x)
def scatter_another_dim(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Partial("sum")})
    y = fd.ops.set(x).on(line(n), {"tp": Shard(1)}, stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x, is_exact=False)
def scatter_outermost(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([8, rows], mesh=line(n), layout={"tp": Partial("avg")})
    y = fd.ops.set(x).on(line(n), {"tp": Shard(0)}, stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda x: x)
def scatter_by_reductions(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 3], mesh=line(n), layout={"tp": Partial("max")})
    y = fd.ops.set(x).on(line(n), {"tp": Shard(0)}, stream=Stream(0, n))
    fd.add_output(y)


@case(lambda x: x)
def scatter_by_ring(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 3], mesh=line(n), layout={"tp": Partial("sum")})
    y = fd.ops.set(x).on(line(n), {"tp": Shard(0)}, stream=Stream(0, n, rotate="tp"))
    fd.add_output(y)


@case(lambda x: (x.T, x.T + 2))
def scatter_inner_dim(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The results lie as x does: their streamed dim is outermost in memory."""
    x = fd.define_tensor([rows, 3], mesh=line(n), layout={"tp": Partial("sum")})
    p = x.T
    y = fd.ops.set(p).on(line(n), {"tp": Shard(1)}, stream=Stream(1, n))
    z = fd.ops.set(p).on(line(n), {"tp": Shard(1)}, stream=Stream(1, n, rotate="tp"))
    fd.add_output(y)
    fd.add_output((z + 2).on(line(n), {"tp": Shard(1)}))


@case(lambda x: x)
def scatter_whole(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Three chunks for n ranks: each chunk would be parts of two ranks' rows. Posted whole."""
    x = fd.define_tensor([rows, 4], mesh=line(n), layout={"tp": Partial("sum")})
    y = fd.ops.set(x).on(line(n), {"tp": Shard(0)}, stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x)
def all_to_all(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([5, 6, rows], mesh=line(n), layout={"tp": Shard(0)})
    y = fd.ops.set(x).on(line(n), {"tp": Shard(1)}, stream=Stream(2, 3))
    fd.add_output(y)


@case(lambda x, p, q: ((x * 2).T, (x * 2).reshape(-1, 3, 2).mT.reshape(-1, 6) + q, x * 2 + p))
def copies_of_views(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """A view that is written into its place, and one that must copy, while transfers go on."""
    x = fd.define_tensor([rows, 6], mesh=line(n))
    p = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    q = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    a = (x * 2).on(line(n), stream=Stream(0, 3))
    b = fd.ops.set(p).on(line(n), stream=Stream(0, 3))
    c = a.T.on(line(n), stream=Stream(1, 3))
    d = fd.ops.set(q).on(line(n), stream=Stream(0, 3))
    e = a.reshape(rows, 3, 2).on(line(n), stream=Stream(0, 3))
    f = e.permute(0, 2, 1).on(line(n), stream=Stream(0, 3))
    g = f.reshape(rows, 6).on(line(n), stream=Stream(0, 3))
    h = (g + d).on(line(n), stream=Stream(0, 3))
    i = (a + b).on(line(n), stream=Stream(0, 3))
    fd.add_output(c)
    fd.add_output(h)
    fd.add_output(i)


@case(lambda x: x)
def rotated_gather_of_another_dim(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Ranks with different chunks would have to meet: posted whole."""
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    y = fd.ops.set(x).on(line(n), stream=Stream(0, 3, rotate="tp"))
    fd.add_output(y)


@case(lambda x: (x, x + 1))
def local_slices(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Nobody lacks anything: nothing is posted."""
    x = fd.define_tensor([rows, 6], mesh=line(n))
    y = fd.ops.set(x).on(line(n), {"tp": Shard(0)}, stream=Stream(0, 3))
    z = (x + 1).on(line(n), {"tp": Shard(1)}, stream=Stream(0, 3))
    fd.add_output(y)
    fd.add_output(z)


@case(lambda x, w: x @ w)
def gather_matmul(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(1)})
    y = (x @ w).on(line(n), {"tp": Shard(1)}, stream=Stream(0, n))
    fd.add_output(y)


@case(lambda x, w: torch.relu(x @ w))
def gather_matmul_in_a_ring(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(1)})
    h = (x @ w).on(line(n), {"tp": Shard(1)}, stream=Stream(0, n, rotate="tp"))
    y = fd.ops.relu(h).on(line(n), {"tp": Shard(1)}, stream=Stream(0, n, rotate="tp"))
    fd.add_output(y)


@case(lambda x, w: x @ w)
def matmul_scatter(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(0)})
    y = (x @ w).on(line(n), {"tp": Shard(0)}, stream=Stream(0, n))
    fd.add_output(y)


@case(lambda x, w: x @ w)
def matmul_scatter_in_a_ring(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(0)})
    y = (x @ w).on(line(n), {"tp": Shard(0)}, stream=Stream(0, n, rotate="tp"))
    fd.add_output(y)


@case(lambda x, w: x @ w)
def gather_matmul_in_pieces(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """A ring in which each rank's shard goes in two pieces, where its rows are even."""
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(1)})
    fd.add_output((x @ w).on(line(n), {"tp": Shard(1)}, stream=Stream(0, 2 * n, rotate="tp")))


@case(lambda x, w: x @ w)
def matmul_scatter_in_pieces(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(0)})
    fd.add_output((x @ w).on(line(n), {"tp": Shard(0)}, stream=Stream(0, 2 * n, rotate="tp")))


@case(lambda x, w: 2 * x @ w, fixed=True)
def gather_matmul_in_lengths(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """As in pieces, the first of which is short."""
    stream = Stream(0, (1, 2 * rows // n - 1) * n, rotate="tp")
    x = fd.define_tensor([2 * rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(1)})
    x = (x * 2).on(line(n), {"tp": Shard(0)}, stream=stream.of_shard(2))
    x = fd.ops.set(x).on(line(n), stream=stream)
    fd.add_output((x @ w).on(line(n), {"tp": Shard(1)}, stream=stream))


@case(lambda x, w: x @ w, fixed=True)
def gather_matmul_in_other_lengths(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Those of one shard are not those of the others: what is gathered is posted as a whole."""
    stream = Stream(0, (2, rows // n - 2, *(1, rows // n - 1) * (n - 1)), rotate="tp")
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(1)})
    fd.add_output((x @ w).on(line(n), {"tp": Shard(1)}, stream=stream))


@case(lambda x, w: x @ w, fixed=True)
def matmul_scatter_in_lengths(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    stream = Stream(0, (1, 2 * rows // n - 1) * n, rotate="tp")
    x = fd.define_tensor([2 * rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(0)})
    fd.add_output((x @ w).on(line(n), {"tp": Shard(0)}, stream=stream))


@case(lambda x, w: x @ w, fixed=True)
def matmul_scatter_in_other_lengths(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    stream = Stream(0, (2, rows // n - 2, *(1, rows // n - 1) * (n - 1)), rotate="tp")
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(0)})
    fd.add_output((x @ w).on(line(n), {"tp": Shard(0)}, stream=stream))


@case(lambda x, w: x @ w)
def matmul_scatter_columns(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([8, 6], mesh=line(n), layout={"tp": Shard(1)})
    w = fd.define_tensor([6, rows], mesh=line(n), layout={"tp": Shard(0)})
    y = (x @ w).on(line(n), {"tp": Shard(0)}, stream=Stream(1, 3))
    fd.add_output(y)


@case(lambda x, w, b: x @ w.T + b)
def matmul_reduce(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Row-parallel: the bias is added once, after the reduction, in the same loop."""
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(1)})
    w = fd.define_tensor([5, 6], mesh=line(n), layout={"tp": Shard(1)})
    b = fd.define_tensor([5], mesh=line(n))
    y = fd.ops.linear(x, w, b).on(line(n), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x, w: (x @ w).relu() @ w.T)
def perceptron(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Rows are gathered, multiplied, multiplied again, and the sums scattered.

    The transposition between them is not streamed: two loops.
    """
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(1)})
    h = (x @ w).on(line(n), {"tp": Shard(1)}, stream=Stream(0, n))
    a = fd.ops.relu(h).on(line(n), {"tp": Shard(1)}, stream=Stream(0, n))
    y = (a @ w.T).on(line(n), {"tp": Shard(0)}, stream=Stream(0, n))
    fd.add_output(y)


@case(lambda x, w, v: (x @ w).relu() @ v)
def perceptron_in_one_loop(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """While one chunk is multiplied, the next one arrives and the one before is summed up."""
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 8], mesh=line(n), layout={"tp": Shard(1)})
    v = fd.define_tensor([8, 6], mesh=line(n), layout={"tp": Shard(0)})
    h = (x @ w).on(line(n), {"tp": Shard(1)}, stream=Stream(0, n))
    a = fd.ops.relu(h).on(line(n), {"tp": Shard(1)}, stream=Stream(0, n))
    y = (a @ v).on(line(n), {"tp": Shard(0)}, stream=Stream(0, n))
    fd.add_output(y)


@case(lambda x, w, v: x @ w @ v)
def gathered_weights(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Weights are gathered before the loop, also those of the second product."""
    x = fd.define_tensor([rows, 6], mesh=line(n), layout={"tp": Shard(0)})
    w = fd.define_tensor([6, 4], mesh=line(n), layout={"tp": Shard(0)})
    v = fd.define_tensor([4, 4], mesh=line(n), layout={"tp": Shard(0)})
    h = (x @ w).on(line(n), {"tp": Shard(0)}, stream=Stream(0, 2))
    y = (h @ v).on(line(n), {"tp": Shard(0)}, stream=Stream(0, 2))
    fd.add_output(y)


@case(lambda x: (x * 2 + 1, (x * 2 + 1).sum(0)), fixed=True)
def chunks_split_by_an_axis(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Each rank has a piece of every chunk of the whole: the stream is outside of the split."""
    x = fd.define_tensor([rows, 4], mesh=line(n), layout={"tp": Shard(0)})
    where = line(n), {"tp": Shard(0)}, {0: ("stream", "tp")}, Stream(0, 2)
    y = (fd.ops.set(x).on(*where) * 2 + 1).on(*where)
    fd.add_output(fd.ops.set(y).on(line(n)))
    fd.add_output(fd.ops.set(y.sum(0)).on(line(n)))
