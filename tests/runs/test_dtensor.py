"""DTensors and torch's meshes, in one process."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.oracle import shares
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.runs.dtensor import placements_of

FOUR = DeviceMesh.arange(tp=4)
GRID = DeviceMesh.arange(dp=2, tp=2)
R, S0, S1 = TorchReplicate(), TorchShard(0), TorchShard(1)


def join_fake(rank: int, size: int = 4) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@pytest.fixture(params=[0, 3])
def rank(request: pytest.FixtureRequest, unjoined: None) -> Iterator[int]:
    """One of four ranks; nothing moves, so that values mean nothing."""
    join_fake(request.param)
    mf.init(backend="null", rank=request.param, size=4)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def fake(unjoined: None) -> Iterator[None]:
    """Rank 2 of four."""
    join_fake(2)
    mf.init(backend="null", rank=2, size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def alone(unjoined: None) -> Iterator[TorchMesh]:
    """A world of one rank, with a group that was there before; its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def torch_mesh(mesh: DeviceMesh, named: bool = True) -> TorchMesh:
    ranks = torch.tensor(mesh.ranks).reshape(mesh.shape)
    return TorchMesh("cpu", ranks, mesh_dim_names=mesh.axes if named else None)


def cut(whole: Tensor, layout: Layout, mesh: TorchMesh, rank: int) -> DTensor:
    """A rank's DTensor of a tensor, made by torch alone."""
    part = shares(whole, layout).get(rank)
    part = torch.empty(0, dtype=whole.dtype) if part is None else part.clone()
    return DTensor.from_local(
        part,
        mesh,
        [TORCH[type(p)](p) for p in layout.placements],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


TORCH: dict[type, Callable[[Any], Any]] = {
    Shard: lambda p: TorchShard(p.dim),
    Replicate: lambda p: TorchReplicate(),
    Partial: lambda p: TorchPartial({"prod": "product"}.get(p.op, p.op)),
}


# -- meshes --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_a_torch_mesh_is_a_mesh() -> None:
    named, bare = torch_mesh(GRID), torch_mesh(GRID, named=False)
    turned = TorchMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    assert DeviceMesh(named) == GRID
    assert DeviceMesh(bare) == DeviceMesh([[0, 1], [2, 3]], axes=("y", "x"))
    assert DeviceMesh(bare, axes=("dp", "tp")) == DeviceMesh(named, axes=("dp", "tp")) == GRID
    assert DeviceMesh(turned) == DeviceMesh([[3, 1], [2, 0]], axes=("a", "b"))
    assert DeviceMesh(TorchMesh("cpu", [1, 2])) == DeviceMesh([1, 2])


@pytest.mark.usefixtures("fake")
def test_a_torch_mesh_wherever_a_mesh_stands() -> None:
    torchs = torch_mesh(GRID)
    split = {"dp": Shard(0), "tp": Shard(1)}
    whole = torch.arange(20).reshape(5, 4)
    with mf.FusionDefinition("both") as fd:
        x = fd.define_tensor([5, 4], torch.int64, mesh=torchs, layout=split)
        y = fd.define_tensor([5, 4], torch.int64, mesh=Layout(torchs, split))
        fd.add_output(fd.ops.set(x + y).on(torchs, {"tp": Shard(0)}))
    program = mf.compile(fd)
    assert {v.layout.mesh for v in program.fusion.values.values() if v.layout} == {GRID}
    assert torch.equal(mf.simulate(program, [whole, whole]).outputs[0], whole * 2)
    parts = [mf.shard_tensor(whole, torchs, split, rank=r) for r in range(4)]
    assert torch.equal(parts[3], whole[3:, 2:])
    assert torch.equal(mf.unshard_tensor(parts, torchs, split), whole)


@pytest.mark.usefixtures("fake")
def test_a_slice_is_no_mesh_of_a_program() -> None:
    """Rank 2 sees the slice (2, 3), rank 0 would see (0, 1)."""
    whole = torch_mesh(GRID)
    with pytest.raises(mf.MeshError, match="is a slice of") as caught:
        DeviceMesh(whole["tp"])
    assert "pass the whole mesh" in str(caught.value)
    assert DeviceMesh(whole["dp", "tp"]) == GRID
    assert DeviceMesh(whole["dp", "tp"]._flatten("all")) == DeviceMesh.arange(all=4)


@pytest.mark.usefixtures("fake")
def test_names_that_a_mesh_cannot_have() -> None:
    with pytest.raises(mf.MeshError, match="letters, digits and underscores"):
        DeviceMesh(TorchMesh("cpu", [0, 1], mesh_dim_names=("data parallel",)))
    with pytest.raises(mf.MeshError, match="has no default names"):
        DeviceMesh(TorchMesh("cpu", [[[[0, 1]]]]))
    with pytest.raises(mf.LayoutError, match="is not a placement") as caught:
        Layout(torch_mesh(FOUR), {"tp": S0})  # type: ignore[dict-item]
    assert "mdfuse.Shard(dim)" in str(caught.value)


# -- layouts -------------------------------------------------------------------------------------

PLACEMENTS: list[tuple[list[Any], dict[str, Any]]] = [
    ([TorchReplicate(), TorchReplicate()], {}),
    ([S0, TorchReplicate()], {"dp": Shard(0)}),
    ([S1, S0], {"dp": Shard(1), "tp": Shard(0)}),
    ([S0, S0], {"dp": Shard(0), "tp": Shard(0)}),
    ([TorchPartial(), S1], {"dp": Partial(), "tp": Shard(1)}),
    ([TorchReplicate(), TorchPartial("avg")], {"tp": Partial("avg")}),
    ([TorchPartial("product"), TorchReplicate()], {"dp": Partial("prod")}),
    ([_StridedShard(0, split_factor=2), S1], {"dp": Shard(0, 2), "tp": Shard(1)}),
    ([_StridedShard(0, split_factor=3), S0], {"dp": Shard(0, 3), "tp": Shard(0)}),
]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("placements", "ours"), PLACEMENTS)
def test_placements(placements: list[Any], ours: dict[str, Any]) -> None:
    x = DTensor.from_local(torch.ones(6, 2), torch_mesh(GRID), placements, run_check=False)
    assert mf.layout_of(x) == Layout(GRID, ours)
    assert placements_of(Layout(GRID, ours)) == tuple(placements)
    bare = DTensor.from_local(
        torch.ones(6, 2), torch_mesh(GRID, named=False), placements, run_check=False
    )
    assert mf.layout_of(bare, axes=("dp", "tp")) == Layout(GRID, ours)
    assert mf.layout_of(bare).mesh.axes == ("y", "x")


@pytest.mark.parametrize(("n", "blocks"), [(12, 3), (12, 6), (14, 2), (3, 3)])
def test_torch_splits_blocks_as_layouts_do(n: int, blocks: int) -> None:
    whole, mesh = torch.arange(n), DeviceMesh.arange(tp=3)
    layout = Layout(mesh, {"tp": Shard(0, blocks)})
    (placement,) = placements_of(layout)
    assert placement == _StridedShard(0, split_factor=blocks)
    parts, _ = placement._split_tensor(whole, 3, with_padding=False)
    for rank, part in enumerate(parts):
        assert torch.equal(mf.shard_tensor(whole, layout, rank=rank), part)


@pytest.mark.parametrize(
    ("ours", "order"),
    [
        ({"tp": Shard(0, (2, 1))}, None),
        ({"dp": Shard(0), "tp": Shard(0, 3)}, {0: ("tp", "dp")}),
    ],
)
def test_blocks_without_counterpart(ours: dict[str, Any], order: Any) -> None:
    with pytest.raises(mf.LayoutError, match="plainly only inside of them or by whole ones"):
        placements_of(Layout(GRID, ours, order))


def test_fsdp_over_tensor_parallelism_in_uneven_parts_is_none_of_torchs() -> None:
    layout = Layout(GRID, {"dp": Shard(0), "tp": Shard(0)}, {0: ("tp", "dp")})
    assert placements_of(layout, (8,)) == (_StridedShard(0, split_factor=2), S0)
    with pytest.raises(mf.LayoutError, match="where the parts are equal"):
        placements_of(layout, (7,))


@pytest.mark.parametrize("at", range(6))
def test_torch_splits_as_layouts_do(at: int, unjoined: None) -> None:
    """Which part a rank holds, of dims of any extent, split by one axis or by both."""
    join_fake(at, 6)
    ours = DeviceMesh.arange(dp=2, tp=3)
    mesh = torch_mesh(ours)
    for n in range(15):
        for placements in ([S0, S0], [S0, S1], [S1, S0], [S1, S1], [TorchReplicate(), S0]):
            splits = zip(ours.axes, placements, strict=True)
            layout = Layout(ours, {a: Shard(p.dim) for a, p in splits if type(p) is TorchShard})
            box = layout.box((n, 4), at)
            shape, offset = compute_local_shape_and_global_offset((n, 4), mesh, placements)
            assert tuple(shape) == tuple(stop - start for start, stop in box)
            if 0 not in shape:
                assert tuple(offset) == tuple(start for start, _ in box)
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake")
def test_placements_without_counterpart() -> None:
    mesh, part = torch_mesh(GRID), torch.ones(2, 2)
    strided = [_StridedShard(0, split_factor=3), S0]
    x = DTensor.from_local(part, mesh, strided, run_check=False)  # 8 rows are not 3 blocks
    with pytest.raises(mf.LayoutError, match="has no counterpart") as caught:
        mf.layout_of(x)
    assert "_StridedShard" in str(caught.value)
    assert "x.redistribute(x.device_mesh, [Shard(0), Shard(0)])" in str(caught.value)
    masked = [TorchPartial("max"), _MaskPartial(offset_shape=torch.Size((2, 2)), offset_dim=0)]
    spec = DTensor.from_local(part, mesh, [TorchReplicate()] * 2, run_check=False)._spec
    spec.placements = tuple(masked)
    with pytest.raises(mf.LayoutError, match="has no counterpart") as caught:
        mf.layout_of(DTensor(part, spec, requires_grad=False))
    assert "[Partial('max'), Replicate()]" in str(caught.value)


@pytest.mark.usefixtures("fake")
def test_ranks_that_do_not_ascend_along_an_axis() -> None:
    """There torch's own gather of uneven parts gives a wrong tensor."""
    mesh, part = TorchMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("dp", "tp")), torch.ones(2, 2)
    x = DTensor.from_local(part, mesh, [S0, TorchReplicate()], run_check=False)
    with pytest.raises(mf.LayoutError, match="split along dp of") as caught:
        mf.layout_of(x)
    assert "a mesh whose ranks ascend along the axis" in str(caught.value)
    with pytest.raises(mf.LayoutError, match="order of the ranks"):
        placements_of(Layout(DeviceMesh(mesh), {"dp": Shard(0)}))
    for placements in ([TorchReplicate(), S0], [TorchPartial(), TorchReplicate()]):
        x = DTensor.from_local(part, mesh, placements, run_check=False)
        assert placements_of(mf.layout_of(x)) == tuple(placements)


@pytest.mark.usefixtures("fake")
def test_an_order_that_torch_knows() -> None:
    """Placements alike, but tp splits first: what a spec says besides counts."""
    mesh, both = torch_mesh(GRID), {"dp": Shard(0), "tp": Shard(0)}
    usual = cut(torch.arange(8.0), Layout(GRID, both), mesh, 2)
    spec = copy.copy(usual._spec)
    spec.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    turned = DTensor(usual.to_local(), spec, requires_grad=False)
    layout = Layout(GRID, both, order={0: ("tp", "dp")})
    assert mf.layout_of(turned) == layout
    assert mf.layout_of(usual) == Layout(GRID, both)
    with mf.FusionDefinition("ordered") as fd:
        x = fd.define_tensor([8], mesh=layout)
        fd.add_output(fd.ops.set(x).on(GRID, {}))
    program = mf.compile(fd)
    assert program.run(turned)[0].placements == (TorchReplicate(),) * 2
    with pytest.raises(mf.ProgramError, match="order 0:tp>dp") as caught:
        program.run(usual)
    assert "[_StridedShard(0, split_factor=2), Shard(0)]" in str(caught.value)
    strided = [_StridedShard(0, split_factor=2), S0]
    x = DTensor.from_local(turned.to_local(), mesh, strided, run_check=False)
    assert program.run(x)[0].placements == (TorchReplicate(),) * 2


def test_layouts_without_counterpart() -> None:
    both = {"dp": Shard(0), "tp": Shard(0)}
    with pytest.raises(mf.LayoutError, match="not a layout of DTensors") as caught:
        placements_of(Layout(GRID, both, order={0: ("tp", "dp")}), (9, 2))
    assert "without order=" in str(caught.value)
    assert placements_of(Layout(GRID, both, order={0: ("dp", "tp")})) == (S0,) * 2
    with pytest.raises(mf.LayoutError, match="Partial in one way") as caught:
        placements_of(Layout(GRID, {"dp": Partial("avg"), "tp": Partial("sum")}))
    assert "reduce avg first" in str(caught.value)


@pytest.mark.usefixtures("fake")
def test_a_spec_says_how_a_dtensor_lies() -> None:
    mesh, layout = torch_mesh(GRID), Layout(GRID, {"tp": Shard(1)})
    x = cut(torch.ones(4, 6, dtype=torch.float64), layout, mesh, 2)
    spec = mf.spec_of(x)
    assert (spec.shape, spec.dtype, spec.mesh, spec.stride_order) == (
        (4, 6), torch.float64, layout, None,
    )  # fmt: skip
    turned = mf.spec_of(cut(torch.ones(6, 4).t(), layout, mesh, 2))
    assert (turned.shape, turned.stride_order) == ((4, 6), (0, 1))
    with mf.FusionDefinition("turned") as fd:
        fd.add_output(fd.define_tensor(turned.shape, stride_order=turned.stride_order) * 2.0)
    assert mf.reference(fd, [torch.ones(6, 4).t()])[0].stride() == (1, 4)


@pytest.mark.parametrize("rows", [4, 5, 6, 7, 3, 0])
@pytest.mark.parametrize("order", [None, (0, 1, 2), (1, 2, 0)])
def test_local_tensors_to_dtensors(rows: int, order: Any, rank: int) -> None:
    """Uneven parts, empty ones too; the shape and the strides are those of the whole."""
    whole = torch.empty(rows, 2, 3)
    if order == (1, 2, 0):
        whole = torch.empty(2, 3, rows).permute(2, 0, 1)
    mesh, layout = torch_mesh(FOUR, named=False), Layout(FOUR, {"tp": Shard(0)})
    part = shares(whole, layout)[rank]
    x = mf.to_dtensor(part, mesh, layout, whole.shape, order)
    assert (x.shape, x.dtype, x.requires_grad) == (whole.shape, whole.dtype, False)
    assert x.device_mesh is mesh
    assert x.placements == (S0,)
    assert x._local_tensor.data_ptr() == part.data_ptr()
    if rows:
        assert x.stride() == whole.stride()


ALL = slice(None)
#: Placements by axis name: torch's, and what ranks 0 and 3 have of five rows and three columns.
NAMED: list[tuple[dict[str, Any] | None, tuple[Any, ...], tuple[slice, ...], tuple[slice, ...]]]
NAMED = [
    (None, (R, R), (ALL, ALL), (ALL, ALL)),
    ({}, (R, R), (ALL, ALL), (ALL, ALL)),
    ({"tp": Shard(0)}, (R, S0), (slice(3), ALL), (slice(3, 5), ALL)),
    ({"dp": Replicate(), "tp": Shard(-1)}, (R, S1), (ALL, slice(2)), (ALL, slice(2, 3))),
    (
        {"tp": Shard(0), "dp": Shard(1)}, (S1, S0),
        (slice(3), slice(2)), (slice(3, 5), slice(2, 3)),
    ),
    ({"tp": Shard(0), "dp": Shard(0)}, (S0, S0), (slice(2), ALL), (slice(4, 5), ALL)),
]  # fmt: skip


@pytest.mark.parametrize(("named", "placements", "first", "last"), NAMED, ids=range(len(NAMED)))
def test_placements_by_axis_name(
    named: Any, placements: Any, first: Any, last: Any, rank: int
) -> None:
    """What torch itself cuts of the whole; axes that are not named hold it all."""
    mesh, whole = torch_mesh(GRID), torch.arange(15.0).reshape(5, 3)
    want = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    part = whole[first if rank == 0 else last].clone()
    x = mf.to_dtensor(part, mesh, named, whole.shape)
    assert torch.equal(part, want.to_local())
    assert torch.equal(x.to_local(), want.to_local())
    assert (x.placements, x.shape, x.stride()) == (want.placements, want.shape, want.stride())
    with pytest.raises(mf.LayoutError, match=f"on rank {rank}, expected"):
        mf.to_dtensor(torch.ones(4, 1), mesh, named, whole.shape)


def test_axes_of_a_mesh_without_names(rank: int) -> None:
    """The names that a mesh has by itself; no others."""
    mesh, whole = torch_mesh(GRID, named=False), torch.arange(8.0).reshape(4, 2)
    want = distribute_tensor(whole, mesh, (S1, S0), src_data_rank=None)
    x = mf.to_dtensor(want.to_local(), mesh, {"x": Shard(0), "y": Shard(1)}, whole.shape)
    assert (x.placements, x._spec) == (want.placements, want._spec)
    with pytest.raises(mf.MeshError, match="no axis 'tp'"):
        mf.to_dtensor(want.to_local(), mesh, {"tp": Shard(0)}, whole.shape)


@pytest.mark.usefixtures("fake")
def test_a_part_that_does_not_fit() -> None:
    layout = Layout(FOUR, {"tp": Shard(0)})
    with pytest.raises(mf.LayoutError, match="rank 2, expected") as caught:
        mf.to_dtensor(torch.ones(2, 2), torch_mesh(FOUR), layout, (5, 2))
    assert "(1, 2)" in str(caught.value)
    with pytest.raises(mf.MeshError, match="same ranks in the same shape"):
        mf.to_dtensor(torch.ones(1, 2), torch_mesh(GRID), layout, (5, 2))
    with pytest.raises(mf.MeshError, match="same names"):
        mf.to_dtensor(torch.ones(1, 2), torch_mesh(DeviceMesh.arange(dp=4)), layout, (5, 2))


# -- runs ----------------------------------------------------------------------------------------


def mlp_definition(rows: int = 8) -> mf.FusionDefinition:
    with mf.FusionDefinition("mlp") as fd:
        x = fd.define_tensor([rows, 4], mesh=FOUR, layout={"tp": Shard(0)})
        w = fd.define_tensor([4, 8], mesh=FOUR, layout={"tp": Shard(1)})
        h = fd.ops.set(x).on(FOUR, {}) @ w
        fd.add_output(h)
        fd.add_output(fd.ops.set(h).on(FOUR, {"tp": Shard(0)}))
    return fd


def mlp_arguments(rank: int, rows: int = 8, named: bool = True) -> list[DTensor]:
    mesh = torch_mesh(FOUR, named)
    x = cut(torch.ones(rows, 4), Layout(FOUR, {"tp": Shard(0)}), mesh, rank)
    return [x, cut(torch.ones(4, 8), Layout(FOUR, {"tp": Shard(1)}), mesh, rank)]


@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize("named", [True, False])
def test_dtensors_come_back(rows: int, named: bool, rank: int) -> None:
    program, arguments = mf.compile(mlp_definition(rows)), mlp_arguments(rank, rows, named)
    for _ in range(3):
        h, y = program.run(*arguments)
        assert h.placements == (S1,)
        assert y.placements == (S0,)
        for out in (h, y):
            assert type(out) is DTensor
            assert out.device_mesh is arguments[0].device_mesh
            assert (out.shape, out.requires_grad) == ((rows, 8), False)
        assert h.stride() == (8, 1)
        assert y.stride() == (1, rows)  # as the all-to-all leaves it, also where a rank has one row
        assert h.to_local().shape == (rows, 2)
        layout = Layout(FOUR, {"tp": Shard(0)})
        assert y.to_local().shape == shares(torch.empty(rows, 8), layout)[rank].shape
    assert program.plans.info()[:2] == (2, 1)


@pytest.mark.usefixtures("fake")
def test_plain_tensors_stay_plain_beside_dtensors() -> None:
    program, (x, w) = mf.compile(mlp_definition()), mlp_arguments(2)
    plain = [x.to_local(), w.to_local()]
    for _ in range(2):
        assert [type(y) for y in program.run(*plain)] == [Tensor, Tensor]
        assert [type(y) for y in program.run(x, plain[1])] == [DTensor, DTensor]
        assert [type(y) for y in program.run(plain[0], w)] == [DTensor, DTensor]
    assert program.plans.info()[:2] == (5, 1)


@pytest.mark.usefixtures("fake")
def test_a_whole_dtensor_is_not_taken_for_its_local_tensor() -> None:
    """Replicated, both have one shape: the plan of plain tensors must not meet a DTensor."""
    with mf.FusionDefinition("double") as fd:
        fd.add_output(fd.define_tensor([3], mesh=FOUR) * 2.0)
    program = mf.compile(fd)
    plain = torch.tensor([1.0, 2.0, 3.0])
    x = DTensor.from_local(plain, torch_mesh(FOUR), [TorchReplicate()], run_check=False)
    for _ in range(2):
        (y,) = program.run(plain)
        assert type(y) is Tensor
        (y,) = program.run(x)
        assert type(y) is DTensor
        assert y.to_local().tolist() == [2, 4, 6]


@pytest.mark.usefixtures("fake")
def test_buffers_that_are_dtensors() -> None:
    program, arguments = mf.compile(mlp_definition()), mlp_arguments(2)
    mesh = arguments[0].device_mesh
    h = cut(torch.zeros(8, 8), Layout(FOUR, {"tp": Shard(1)}), mesh, 2)
    y = cut(torch.zeros(8, 8), Layout(FOUR, {"tp": Shard(0)}), mesh, 2)
    plain = torch.zeros(2, 8)
    for given in (arguments, [x.to_local() for x in arguments]):
        outputs = program.run(*given, out=[h, y])
        assert outputs[0] is h
        assert outputs[1] is y
    outputs = program.run(*arguments, out=[h, plain])
    assert outputs[0] is h
    assert outputs[1] is plain
    with pytest.raises(mf.ProgramError, match="%h is a DTensor laid out as") as caught:
        program.run(*arguments, out=[y, y])
    assert 'h.on(mesh, {"tp": Shard(0)})' in str(caught.value)
    assert "output %h of @mlp" in str(caught.value)
    with pytest.raises(mf.ProgramError, match="1 buffer for 2 outputs"):
        program.run(*arguments, out=[h])


@pytest.mark.usefixtures("fake")
def test_an_evaluator_with_a_buffer_for_one_output() -> None:
    program, (x, w) = mf.compile(mlp_definition()), mlp_arguments(2)
    t = cut(torch.zeros(8, 8), Layout(FOUR, {"tp": Shard(1)}), x.device_mesh, 2)
    evaluator = mf.HostIrEvaluator(program.host)
    outputs = evaluator.run({"x": x, "w": w, program.host.outputs[0]: t})
    assert outputs[0] is t
    assert outputs[1].placements == (S0,)
    with pytest.raises(mf.ProgramError, match="missing"):
        evaluator.run({"x": x})


@pytest.mark.usefixtures("fake")
def test_parameters() -> None:
    """A parameter is a DTensor; a run has no gradient, and says so."""
    program, (x, w) = mf.compile(mlp_definition()), mlp_arguments(2)
    parameter = torch.nn.Parameter(w)
    with pytest.raises(mf.ProgramError, match="requires grad"):
        program.run(x, parameter)
    with torch.no_grad():
        for _ in range(2):
            outputs = program.run(x, parameter)
            assert all(type(y) is DTensor and not y.requires_grad for y in outputs)
    assert program.plans.info()[:2] == (1, 1)
    with pytest.raises(mf.ProgramError, match="requires grad"):
        program.run(x, parameter)


@pytest.mark.usefixtures("fake")
def test_an_input_that_comes_back_is_itself() -> None:
    with mf.FusionDefinition("back") as fd:
        x = fd.define_tensor([8], mesh=FOUR, layout={"tp": Shard(0)})
        y = fd.define_tensor([8], mesh=FOUR, layout={"tp": Shard(0)})
        fd.add_output(x)
        fd.add_output(x + y, reuse=y)
    mesh, layout = torch_mesh(FOUR), Layout(FOUR, {"tp": Shard(0)})
    a, b = (cut(torch.ones(8), layout, mesh, 2) for _ in range(2))
    outputs = mf.compile(fd).run(a, b)
    assert outputs[0] is a
    assert outputs[1] is b
    assert b.to_local().tolist() == [2, 2]


@pytest.mark.usefixtures("fake")
def test_a_transposed_dtensor() -> None:
    with mf.FusionDefinition("turned") as fd:
        x = fd.define_tensor([8, 6], mesh=FOUR, layout={"tp": Shard(0)}, stride_order=(0, 1))
        fd.add_output(x * 2.0)
        fd.add_output(fd.ops.transpose(x, 0, 1))
    whole = torch.arange(48.0).reshape(6, 8).t()
    x = cut(whole, Layout(FOUR, {"tp": Shard(0)}), torch_mesh(FOUR), 2)
    y, t = mf.compile(fd).run(x)
    assert (y.shape, y.stride()) == ((8, 6), (whole * 2).stride())
    assert (t.shape, t.stride(), t.placements) == ((6, 8), whole.t().stride(), (S1,))
    assert torch.equal(y.to_local(), whole[4:6] * 2)
    assert torch.equal(t.to_local(), whole.t()[:, 4:6])


def test_numbers_partials_and_an_evaluator(rank: int) -> None:
    with mf.FusionDefinition("scaled") as fd:
        x = fd.define_tensor([8, 2], mesh=GRID, layout={"dp": Partial(), "tp": Shard(0)})
        s = fd.define_scalar()
        fd.add_output((x * s).on(GRID, {"dp": Partial(), "tp": Shard(0)}))
    program = mf.compile(fd)
    mesh = torch_mesh(GRID)
    part = torch.full((4, 2), 3.0)
    x = DTensor.from_local(part, mesh, [TorchPartial(), S0], run_check=False)
    for outputs in (program.run(x, 2.0), mf.HostIrEvaluator(program.host).run({"x": x, "s": 2.0})):
        (y,) = outputs
        assert y.placements == x.placements
        assert torch.equal(y._local_tensor, part * 2)
    with pytest.raises(mf.ProgramError, match="this input is a number"):
        program.run(x, x)


def test_a_mesh_of_some_ranks(rank: int) -> None:
    """A rank outside has an empty DTensor and gets one; the other stage's mesh comes with out=."""
    first, second = DeviceMesh([0, 1], axes=("tp",)), DeviceMesh([2, 3], axes=("tp",))
    with mf.FusionDefinition("stages") as fd:
        x = fd.define_tensor([4, 2], mesh=first, layout={"tp": Shard(0)})
        fd.add_output(x * 2.0)
        fd.add_output(fd.ops.set(x).on(second, {"tp": Shard(1)}))
    program, whole = mf.compile(fd), torch.ones(4, 2)
    meshes = torch_mesh(first), torch_mesh(second)
    x = cut(whole, Layout(first, {"tp": Shard(0)}), meshes[0], rank)
    with pytest.raises(mf.ProgramError, match="cannot be a DTensor") as caught:
        program.run(x)
    assert "pass out= with a DTensor on that mesh" in str(caught.value)
    layouts = Layout(first, {"tp": Shard(0)}), Layout(second, {"tp": Shard(1)})
    out = [cut(whole, at, mesh, rank) for at, mesh in zip(layouts, meshes, strict=True)]
    assert all(a is b for a, b in zip(program.run(x, out=out), out, strict=True))
    y = mf.compile(one_stage(first)).run(x)[0]
    assert (y.shape, y.placements, y.device_mesh) == ((4, 2), (S0,), meshes[0])
    assert y.to_local().numel() == (4 if rank == 0 else 0)


def one_stage(mesh: DeviceMesh) -> mf.FusionDefinition:
    with mf.FusionDefinition("stage") as fd:
        fd.add_output(fd.define_tensor([4, 2], mesh=mesh, layout={"tp": Shard(0)}) * 2.0)
    return fd


@pytest.mark.usefixtures("fake")
def test_outputs_that_are_no_dtensors() -> None:
    with mf.FusionDefinition("ordered") as fd:
        x = fd.define_tensor([7], mesh=GRID, layout={"dp": Shard(0), "tp": Shard(0)})
        split = {"dp": Shard(0), "tp": Shard(0)}
        fd.add_output(fd.ops.set(x).on(GRID, split, order={0: ("tp", "dp")}))
    program = mf.compile(fd)
    x = cut(torch.ones(7), Layout(GRID, split), torch_mesh(GRID), 2)
    with pytest.raises(mf.ProgramError, match="cannot be a DTensor") as caught:
        program.run(x)
    assert "without order=" in str(caught.value)
    assert "x.to_local()" in str(caught.value)
    assert type(program.run(x.to_local())[0]) is Tensor


Spoil = Callable[[DTensor, TorchMesh], Any]

WRONG: dict[str, tuple[Spoil, list[str]]] = {
    "placement": (lambda x, mesh: DTensor.from_local(torch.ones(8, 1), mesh, [S1]),
                  ["laid out as (tp=S1), expected (tp=S0)", "x.redistribute(mesh, [Shard(0)])",
                  'layout={"tp": Shard(1)}', "input %x of @mlp"]),
    "partial": (lambda x, mesh: DTensor.from_local(torch.ones(8, 4), mesh, [TorchPartial()]),
                ["(tp=P(sum))", "x.redistribute"]),
    "shape": (lambda x, mesh: cut(torch.ones(12, 4), Layout(FOUR, {"tp": Shard(0)}), mesh, 2),
              ["DTensor of shape (12, 4), expected (8, 4)"]),
    "a part of another shape": (lambda x,
        mesh: DTensor.from_local(torch.ones(3, 4), mesh, [S0], run_check=False, shape=torch.Size((8,
        4)), stride=(4, 1)), ["%x has shape (3, 4) on rank 2, expected (2, 4)"]),
    "dtype": (lambda x,
              mesh: cut(torch.ones(8, 4).double(), Layout(FOUR, {"tp": Shard(0)}), mesh, 2),
              ["dtype torch.float64, expected torch.float32"]),
    "mesh": (lambda x,
             mesh: DTensor.from_local(torch.ones(2, 4), TorchMesh("cpu", [1, 0, 2, 3]), [S0],
             run_check=False),
             ["expected mesh(tp=4)", "init_device_mesh(device, (4,), mesh_dim_names=('tp',))"]),
    "shape of the mesh": (lambda x,
                          mesh: DTensor.from_local(torch.ones(4, 4), torch_mesh(GRID), [S0,
                          TorchReplicate()]), ["on mesh(dp=2, tp=2), expected mesh(tp=4)"]),
    "names of the mesh": (lambda x,
                          mesh: cut(torch.ones(8, 4), Layout(FOUR, {"tp": Shard(0)}),
                          torch_mesh(DeviceMesh.arange(dp=4)), 2),
                          ["on mesh(dp=4), expected mesh(tp=4)"]),
    "slice": (lambda x,
              mesh: DTensor.from_local(torch.ones(4, 4), torch_mesh(GRID)["tp"], [S0],
              run_check=False), ["%x: ", "is a slice of", "replicate along the axes"]),
    "strided": (lambda x,
                mesh: DTensor.from_local(torch.ones(2, 4), mesh, [_StridedShard(0, split_factor=2)],
                run_check=False), ["%x is a DTensor laid out as (tp=S0/2), expected (tp=S0)"]),
    "more dims than the definition": (lambda x,
        mesh: cut(torch.ones(8, 4, 1), Layout(FOUR, {"tp": Shard(0)}), mesh, 2),
        ["DTensor of shape (8, 4, 1), expected (8, 4)"]),
}  # fmt: skip


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("ran", [False, True])
def test_a_dtensor_that_does_not_fit(what: str, ran: bool) -> None:
    spoil, texts = WRONG[what]
    program, (x, w) = mf.compile(mlp_definition()), mlp_arguments(2)
    if ran:
        program.run(x, w)
    with pytest.raises(mf.ProgramError) as caught:
        program.run(spoil(x, x.device_mesh), w)
    for text in texts:
        assert text in str(caught.value)
    assert type(program.run(x, w)[0]) is DTensor
    with pytest.raises(mf.ProgramError, match="1 argument for 2 inputs"):
        program.run(x)


@pytest.mark.usefixtures("fake")
def test_tools_of_one_process_refuse_dtensors() -> None:
    fd, arguments = mlp_definition(), mlp_arguments(2)
    for run in (
        lambda: mf.simulate(mf.compile(fd), arguments),
        lambda: mf.reference(fd, arguments),
    ):
        with pytest.raises(mf.ProgramError, match="a DTensor for %x") as caught:
            run()
        assert "x.full_tensor()" in str(caught.value)


@pytest.mark.usefixtures("fake")
def test_a_padded_buffer_is_no_dtensor() -> None:
    program = mf.hir.parse(PADDED)
    mesh = torch_mesh(DeviceMesh.arange(tp=4))
    x = DTensor.from_local(torch.ones(2), mesh, [S0], run_check=False)
    with pytest.raises(mf.ProgramError, match="padded or flat"):
        mf.HostIrEvaluator(program).run({"x": x})
    x = cut(torch.ones(5), Layout(FOUR, {"tp": Shard(0)}), mesh, 2)
    with pytest.raises(mf.ProgramError, match="%y cannot be a DTensor") as caught:
        mf.HostIrEvaluator(mf.hir.parse(PADDED_OUTPUT)).run({"x": x})
    assert "padded or flat" in str(caught.value)


PADDED_OUTPUT = """
host @padded on mesh(tp=4) {
  input %x: f32[2] of [5] (tp=S0)
  %y: f32[2] of [5] (tp=S0) pad=block(dim=0,parts=4,axis=tp) = pad(%x, dim=0)
  return %y
}
"""

PADDED = """
host @padded on mesh(tp=4) {
  input %x: f32[2] of [5] (tp=S0) pad=block(dim=0,parts=4,axis=tp)
  %y: f32[2] of [5] (tp=S0) pad=block(dim=0,parts=4,axis=tp) = exp(%x)
  return %y
}
"""


# -- symbolic extents ----------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_dtensors_say_their_extents() -> None:
    """Local shapes of split dims do not: ranks hold 2 rows each of 5 to 8."""
    with mf.FusionDefinition("grow") as fd:
        x = fd.define_tensor([-1, 2], mesh=FOUR, layout={"tp": Shard(0)})
        fd.add_output(x * 2.0)
    program, mesh = mf.compile(fd), torch_mesh(FOUR)
    layout = Layout(FOUR, {"tp": Shard(0)})
    for rows in (8, 5, 7, 8, 5):
        whole = torch.arange(2.0 * rows).reshape(rows, 2)
        (y,) = program.run(cut(whole, layout, mesh, 2))
        assert y.shape == (rows, 2)
        assert torch.equal(y.to_local(), shares(whole * 2, layout)[2])
    (y,) = program.run(cut(torch.ones(6, 2), layout, mesh, 2), extents={"x.0": 6})
    assert y.shape == (6, 2)
    for wrong in ({"x.0": 8}, {"y.0": 6}, 6):
        with pytest.raises(mf.ProgramError):
            program.run(cut(torch.ones(6, 2), layout, mesh, 2), extents=wrong)  # type: ignore[arg-type]


# -- a process group that is there before --------------------------------------------------------


def test_the_default_group_is_used_and_left(alone: TorchMesh) -> None:
    comm = mf.init()
    assert comm.launch.name == "default group"
    x = DTensor.from_local(torch.arange(6.0).reshape(2, 3), alone, [S0, S1])
    with mf.FusionDefinition("total") as fd:
        total = fd.ops.sum(fd.define_tensor([2, 3], mesh=alone), dims=[1])
        fd.add_output(fd.ops.set(total).on(alone, {"dp": Shard(0)}))
    (y,) = mf.compile(fd).run(x.redistribute(alone, [TorchReplicate()] * 2))
    assert y.device_mesh is alone
    comm.close()
    assert dist.is_initialized()
    assert y.full_tensor().tolist() == [3, 12]
    assert (y + y).redistribute(alone, [TorchReplicate()] * 2).to_local().tolist() == [6, 24]


def test_dtensors_are_imported_where_they_are_used() -> None:
    """A program on plain tensors does not pay for importing torch's module of DTensors."""
    package = Path(mf.__file__).parent
    for file in package.rglob("*.py"):
        if file.parent == package / "runs" and file.name.startswith("dtensor"):
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            lazy = ("torch.distributed.tensor", "mdfuse.runs.dtensor")
            assert not [n for n in names if n.startswith(lazy)], file
