"""What a launch reads and writes between the calls of libraries, counted by hand."""

import torch

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.seeing import Costs
from mdfuse.seeing.curves import Curve, Grid
from mdfuse.seeing.kernels import kernels

ROWS, WIDTH, HIDDEN = 4, 8, 16


def program() -> mf.hir.HostProgram:
    with mf.FusionDefinition("block") as fd:
        x = fd.define_tensor([ROWS, WIDTH], mesh=DeviceMesh([0]))
        up = fd.define_tensor([HIDDEN, WIDTH], mesh=DeviceMesh([0]))
        down = fd.define_tensor([WIDTH, HIDDEN], mesh=DeviceMesh([0]))
        y = fd.ops.exp(x * 2)
        h = fd.ops.relu(fd.ops.linear(y, up) + 1)
        fd.add_output(y + fd.ops.linear(h, down))
    return mf.compile(fd, mf.Options(compile="always")).host.project(0)


def test_work_between_products_is_a_kernel() -> None:
    host = program()
    (launch,) = (i for i in host.instructions if i.op == "launch")
    small, large = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN
    first, second, third = 2 * small, 2 * large, 3 * small  # y is written, and read at the end
    assert kernels(host, launch) == [(first, "f32"), (second, "f32"), (third, "f32")]


def test_a_launch_takes_its_products_and_its_kernels() -> None:
    host = program()
    (launch,) = (i for i in host.instructions if i.op == "launch")
    curve = Curve(((1.0, 1.0), (1e6, 1e6)))  # a second for each byte
    grid = Grid(((1.0,), (1.0,), (1.0,)), (1e-3,))  # a millisecond for each multiplication
    costs = Costs(works={"* f32": curve}, products={"matmul f32": grid})
    bytes_moved = 4 * (5 * ROWS * WIDTH + 2 * ROWS * HIDDEN)
    seconds = bytes_moved + 2 * ROWS * WIDTH * HIDDEN * 1e-3
    assert round(costs.seconds(host, launch), 6) == round(seconds, 6)
    torch.testing.assert_close(
        Costs(works=costs.works, products=costs.products, is_fused=False).seconds(host, launch),
        4 * ROWS * (2 * WIDTH + 2 * WIDTH + 2 * HIDDEN + 2 * HIDDEN + 3 * WIDTH)
        + 2 * ROWS * WIDTH * HIDDEN * 1e-3,
    )
