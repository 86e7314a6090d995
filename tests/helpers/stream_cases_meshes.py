"""Streamed changes of layout on meshes of two axes, and between two meshes."""

from __future__ import annotations

import mdfuse as mf
from helpers.stream_case import case, grid, halves, line
from mdfuse import DeviceMesh, Partial, Shard, Stream


@case(lambda x, w: x @ w)
def ring_in_a_grid(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """dp splits the rows before tp does; the ring goes round along tp."""
    x = fd.define_tensor([rows, 6], mesh=grid(n), layout={"dp": Shard(0), "tp": Shard(0)})
    w = fd.define_tensor([6, 4], mesh=grid(n), layout={"tp": Shard(1)})
    layout = {"dp": Shard(0), "tp": Shard(1)}
    y = (x @ w).on(grid(n), layout, stream=Stream(0, 2, rotate="tp"))
    fd.add_output(y)


@case(lambda x: x)
def outer_axis_of_a_grid(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The rows are split by tp first: dp, which is innermost, is gathered."""
    order = {0: ("tp", "dp")}
    layout = {"dp": Shard(0), "tp": Shard(0)}
    x = fd.define_tensor([rows, 3], mesh=grid(n), layout=layout, order=order)
    chunks = max(n // 2, 1)
    y = fd.ops.set(x).on(grid(n), {"tp": Shard(0)}, stream=Stream(0, chunks))
    fd.add_output(y)


@case(lambda x: x)
def not_innermost(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """dp comes first, so that what tp holds is no run of rows of the whole."""
    x = fd.define_tensor([rows, 3], mesh=grid(n), layout={"dp": Shard(0), "tp": Shard(0)})
    y = fd.ops.set(x).on(grid(n), {"tp": Shard(0)}, stream=Stream(0, 2))
    fd.add_output(y)


@case(lambda x: x)
def another_order(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    layout = {"dp": Shard(0), "tp": Shard(0)}
    x = fd.define_tensor([rows, 3], mesh=grid(n), layout=layout)
    y = fd.ops.set(x).on(grid(n), layout, {0: ("tp", "dp")}, stream=Stream(0, 2))
    fd.add_output(y)


@case(lambda x: x)
def another_order_of_another_dim(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    layout = {"dp": Shard(0), "tp": Shard(0)}
    x = fd.define_tensor([9, rows], mesh=grid(n), layout=layout)
    y = fd.ops.set(x).on(grid(n), layout, {0: ("tp", "dp")}, stream=Stream(1, 2, rotate="tp"))
    fd.add_output(y)


@case(lambda x: x)
def rotated_reduction(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The ranks along dp, which meet, are all at the same chunk."""
    x = fd.define_tensor([rows, 4], mesh=grid(n), layout={"dp": Partial("sum"), "tp": Shard(1)})
    y = fd.ops.set(x).on(grid(n), {"tp": Shard(1)}, stream=Stream(0, 3, rotate="tp"))
    fd.add_output(y)


@case(lambda x: x)
def rotated_not_innermost(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """Ranks with different chunks would have to meet: posted whole."""
    x = fd.define_tensor([rows, 9], mesh=grid(n), layout={"dp": Shard(1), "tp": Shard(1)})
    y = fd.ops.set(x).on(grid(n), {"tp": Shard(1)}, stream=Stream(0, 2, rotate="tp"))
    fd.add_output(y)


@case(lambda x: x)
def both_axes(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6, 4], mesh=grid(n), layout={"dp": Partial("sum"), "tp": Shard(1)})
    y = fd.ops.set(x).on(grid(n), {"dp": Shard(2)}, stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x)
def both_axes_of_the_dim(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=grid(n), layout={"dp": Shard(0), "tp": Shard(0)})
    y = fd.ops.set(x).on(grid(n), {}, stream=Stream(0, n))
    fd.add_output(y)


@case(lambda x: x * 2 + 1)
def send_to_a_mesh(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The stages share one loop: a chunk is sent on while the next one is computed."""
    a, b = halves(n)
    x = fd.define_tensor([rows, 6], mesh=a, layout={"a": Shard(1)})
    h = (x * 2).on(a, {"a": Shard(1)}, stream=Stream(0, 3))
    y = fd.ops.set(h).on(b, {"b": Shard(1)}, stream=Stream(0, 3))
    z = (y + 1).on(b, {"b": Shard(1)}, stream=Stream(0, 3))
    fd.add_output(z)


@case(lambda x: x)
def scatter_to_a_mesh(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The sender keeps a part; the last chunk may have one row, the others more."""
    x = fd.define_tensor([rows, 6], mesh=DeviceMesh([0]))
    y = fd.ops.set(x).on(DeviceMesh(range(n)), {"x": Shard(1)}, stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x + 1)
def broadcast_to_a_mesh(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 6], mesh=DeviceMesh([n - 1]))
    y = fd.ops.set(x).on(DeviceMesh(range(n)), stream=Stream(0, 3))
    z = (y + 1).on(DeviceMesh(range(n)), stream=Stream(0, 3))
    fd.add_output(z)


@case(lambda x: x)
def gather_from_a_mesh(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    x = fd.define_tensor([rows, 5], mesh=DeviceMesh(range(n)), layout={"x": Shard(1)})
    y = fd.ops.set(x).on(DeviceMesh([1]), stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x)
def reduce_to_a_mesh(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    a, b = halves(n)
    x = fd.define_tensor([rows, 5], mesh=a, layout={"a": Partial("sum")})
    y = fd.ops.set(x).on(b, stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x)
def reduce_to_a_split_mesh(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The sums are scattered first, along the other dim."""
    a, b = halves(n)
    x = fd.define_tensor([rows, 5], mesh=a, layout={"a": Partial("sum")})
    y = fd.ops.set(x).on(b, {"b": Shard(1)}, stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x, w: x @ w)
def rotated_on_another_mesh(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The product is computed where its operands are: there is no axis y to rotate by."""
    x = fd.define_tensor([rows, 4], mesh=DeviceMesh(range(n)), layout={"x": Shard(0)})
    w = fd.define_tensor([4, 6], mesh=DeviceMesh(range(n)), layout={"x": Shard(1)})
    y = (x @ w).on(DeviceMesh(range(n), axes=("y",)), stream=Stream(0, n, rotate="y"))
    fd.add_output(y)


@case(lambda x: x)
def resplit_on_a_mesh(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The streamed dim is split before and after, on ranks that overlap."""
    x = fd.define_tensor([rows, 3], mesh=DeviceMesh(range(n)), layout={"x": Shard(0)})
    mesh = DeviceMesh(range(n - 1, -1, -1), axes=("y",))
    y = fd.ops.set(x).on(mesh, {"y": Shard(0)}, stream=Stream(0, 3))
    fd.add_output(y)


@case(lambda x: x.unsqueeze(1).expand(-1, 4, 3) * 1)
def expanded(fd: mf.FusionDefinition, n: int, rows: int) -> None:
    """The expanded dim does not travel."""
    x = fd.define_tensor([rows, 3], mesh=line(n), layout={"tp": Shard(0)})
    a = x.unsqueeze(1).expand(rows, 4, 3)
    y = fd.ops.set(a).on(line(n), stream=Stream(0, n))
    z = (y * 1).on(line(n), stream=Stream(0, n))
    fd.add_output(z)
