"""Translate DTensors' placements into layouts, and back.

This module imports `torch.distributed.tensor`, so others import it only once there is a DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from mdfuse.errors import LayoutError, MeshError, shown
from mdfuse.ir.infer import dense_strides, memory_order
from mdfuse.layouts.layout import REDUCE_OPS, Layout, Partial, Placement, Replicate, Shard, Varies
from mdfuse.mesh import DeviceMesh
from mdfuse.runs.dtensor_splits import Split, from_torch, to_torch
from mdfuse.torch_private import shard_order, strided_blocks, strided_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    from mdfuse.frontend.spec import TensorSpec

#: Reduce ops that have another name in torch: ours -> torch's, and back.
_TORCH_OPS = {"prod": "product"}
_OWN_OPS = {torch_op: op for op, torch_op in _TORCH_OPS.items()}


# -- from DTensors -------------------------------------------------------------------------------


def layout_of(
    x: DTensor, axes: Sequence[str] | None = None, hosts: Sequence[int] | None = None
) -> Layout:
    """Return the layout of a DTensor.

    Args:
        x: any DTensor.
        axes: names of the mesh's axes; by default those that its mesh has, else `DeviceMesh`'s.
        hosts: of the mesh's ranks, in row-major order.

    Returns:
        Its layout; a dim that several axes split is split in torch's order, outermost first.

    Raises:
        LayoutError: a placement that has no counterpart, such as `_StridedShard`; a dim that is
            split along an axis on which the ranks do not ascend.
        MeshError: the mesh is a slice of another one, or the names do not fit it.

    >>> import torch, torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import DTensor, Shard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    >>> layout_of(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
    (tp=S0)
    >>> dist.destroy_process_group()
    """
    _check(x)
    mesh = DeviceMesh(x.device_mesh, axes, hosts)
    placements = dict(zip(mesh.axes, (_placement_of(x, p) for p in x.placements), strict=True))
    order = {dim: [mesh.axes[i] for i in mesh_dims] for dim, mesh_dims in shard_order(x)}
    for dim in {p.dim for p in x.placements if (strided_blocks(p) or 1) > 1}:  # type: ignore[attr-defined]
        split = _split_by(x, mesh, dim)
        order[dim] = [*split.order]
        placements |= {
            a: Shard(dim, None if a in split.plain else split.blocks) for a in order[dim]
        }
    layout = Layout(mesh, placements, order)
    turned = _turned_axis(layout)
    if turned is not None:
        because, hint = _TURNED
        raise LayoutError(f"a DTensor split along {turned} of {mesh}", because=because, hint=hint)
    return layout


#: The reason why ranks must ascend along a split axis, and the remedy: on other meshes torch's own
#: scatter or gather, of uneven parts say, gives a wrong tensor.
_TURNED = (
    "torch's collectives go along an axis in the order of the ranks, while its coordinates go in "
    "that of the mesh: which rank holds which part is ambiguous",
    "a mesh whose ranks ascend along the axis",
)


def _turned_axis(layout: Layout) -> str | None:
    """Return an axis that splits a dim and along which ranks do not ascend; None: all is well."""
    mesh = layout.mesh
    if list(mesh.ranks) == sorted(mesh.ranks):
        return None
    splits = (axis for _, axes in layout.splits for axis in axes)
    teams = ((axis, mesh.team(rank, axis)) for axis in splits for rank in mesh)
    return next((axis for axis, team in teams if list(team) != sorted(team)), None)


def _placement_of(x: DTensor, placement: TorchPlacement) -> Placement:
    """Return the layout's counterpart of one of torch's placements; subclasses have none."""
    if type(placement) is TorchShard or strided_blocks(placement) is not None:
        return Shard(placement.dim)  # type: ignore[attr-defined]
    if type(placement) is TorchReplicate:
        return Replicate()
    if type(placement) is TorchPartial:
        op = _OWN_OPS.get(placement.reduce_op, placement.reduce_op)
        if op in REDUCE_OPS:
            return Partial(op)
    raise _without_counterpart(
        x, f"{placement!r} has no counterpart: ranks hold parts, copies, or summands"
    )


def _split_by(x: DTensor, mesh: DeviceMesh, dim: int) -> Split:
    """Return how a layout splits a dim of which `_StridedShard` makes blocks."""
    split = [
        (a, n, strided_blocks(p) or 1)
        for a, n, p in zip(mesh.axes, mesh.shape, x.placements, strict=True)
        if getattr(p, "dim", None) == dim
    ]
    layout_split = from_torch(split, x.shape[dim])
    if layout_split is None:
        raise _without_counterpart(
            x,
            f"what splits dim {dim} of {x.shape[dim]} rows has no counterpart: axes split all of "
            "some equal blocks, whole ones, or what others leave as one",
        )
    return layout_split


def _without_counterpart(x: DTensor, because: str) -> LayoutError:
    plain = ", ".join(_plain(p) for p in x.placements)
    return LayoutError(
        f"a DTensor placed as {list(x.placements)}",
        because=because,
        hint=f"x.redistribute(x.device_mesh, [{plain}])",
    )


def _plain(placement: TorchPlacement) -> str:
    """Return, as code, a similar placement of torch's that has a counterpart."""
    if type(placement) is TorchPartial and placement.reduce_op in (*REDUCE_OPS, *_OWN_OPS):
        return f"Partial({placement.reduce_op!r})"
    dim = getattr(placement, "dim", None)
    return "Replicate()" if dim is None else f"Shard({dim})"


def _check(x: object) -> None:
    if not isinstance(x, DTensor):
        raise LayoutError(
            f"{shown(x)} is no DTensor", hint="distribute_tensor(x, mesh, placements)"
        )


def spec_of(x: DTensor, axes: Sequence[str] | None = None) -> TensorSpec:
    """Return the `TensorSpec` of a DTensor: global shape, dtype, layout, memory order.

    Args:
        x: any DTensor.
        axes: names of the mesh's axes; see `layout_of`.

    Raises:
        LayoutError, MeshError: as `layout_of`.
    """
    from mdfuse.frontend.spec import TensorSpec

    _check(x)
    order = memory_order(x.stride())
    places = tuple(len(order) - 1 - order.index(dim) for dim in range(x.ndim))
    is_usual = order == tuple(range(x.ndim))
    return TensorSpec(
        tuple(x.shape), x.dtype, layout_of(x, axes), stride_order=None if is_usual else places
    )


# -- to DTensors ---------------------------------------------------------------------------------


def placements_of(layout: Layout, shape: Sequence[int] | None = None) -> tuple[TorchPlacement, ...]:
    """A layout's placements as torch's, one per axis of its mesh.

    Args:
        layout: with dims counted from 0.
        shape: global extents, where these are known.

    Raises:
        LayoutError: no DTensor can be laid out so.

    >>> from mdfuse import DeviceMesh, Shard
    >>> placements_of(Layout(DeviceMesh.arange(dp=2, tp=2), {"tp": Shard(0)}))
    (Replicate(), Shard(dim=0))
    """
    why = why_not(layout, shape)
    if why is not None:
        because, hint = why
        raise LayoutError(f"{layout} is not a layout of DTensors", because=because, hint=hint)
    factors = [_factors(layout, d, shape) or {} for d, _ in layout.splits]
    of = {a: n for of_dim in factors for a, n in of_dim.items()}
    return tuple(_torch(p, of.get(a, 1)) for a, p in layout.by_axis().items())


def _factors(layout: Layout, dim: int, shape: Sequence[int] | None) -> Mapping[str, int] | None:
    extent = shape[dim] if shape is not None and dim < len(shape) else None
    return to_torch(layout, dim, extent if isinstance(extent, int) else None)


def redistributed(x: Tensor, layout: Layout) -> Tensor:
    """Return a DTensor as a layout says; itself where it lies so."""
    assert isinstance(x, DTensor)
    placements = placements_of(layout, x.shape)
    return x if x.placements == placements else x.redistribute(None, placements)


def why_not(layout: Layout, shape: Sequence[int] | None = None) -> tuple[str, str] | None:
    """Return the reason why no DTensor has this layout, and the remedy; None: there is one.

    Args:
        layout: with dims counted from 0.
        shape: global extents, where these are known.
    """
    wrong = [d for d, _ in layout.splits if _factors(layout, d, shape) is None]
    if any(layout.blocked.get(d) == "zigzag" for d in wrong):
        return (
            "torch has no placement in zigzag order, of two chunks on each rank",
            "a plain Shard of the DTensor: a layout of the program brings it into zigzag order",
        )
    if any(d in layout.blocked for d in wrong):
        return (
            "a DTensor's dim is split in the order of the mesh, in equal blocks (_StridedShard), "
            "plainly only inside of them or by whole ones",
            "another layout: a plain Shard, or the blocks one by one",
        )
    if wrong:
        return (
            "the axes split a DTensor's dim in the order that they have in the mesh, or in another "
            "where the parts are equal (_StridedShard)",
            "another layout, without order=",
        )
    if _turned_axis(layout) is not None:
        return _TURNED
    if layout.varying_axes:
        return "no placement of torch's says that each rank holds what it likes", "set it to one"
    ops = sorted({p.op for p in layout.placements if isinstance(p, Partial)})
    if len(ops) > 1:
        return f"a DTensor is Partial in one way, not in {len(ops)}", f"reduce {ops[0]} first"
    return None


def _torch(placement: Placement, factor: int) -> TorchPlacement:
    match placement:
        case Shard(dim):
            return TorchShard(dim) if factor == 1 else strided_shard(dim, factor)
        case Partial(op):
            return TorchPartial(_TORCH_OPS.get(op, op))
        case Replicate() | Varies():  # along an axis of one rank they are the same
            return TorchReplicate()


def to_dtensor(
    local: Tensor,
    mesh: TorchMesh,
    layout: Layout | Mapping[str, Placement] | None,
    shape: Sequence[int],
    order: Sequence[int] | None = None,
) -> DTensor:
    """Make a DTensor from the ranks' parts, without communication; it shares their memory.

    Args:
        local: this rank's part; on a rank outside of the mesh an empty tensor of the same dtype.
        mesh: torch's mesh, with the ranks and the shape of the layout's.
        layout: of the parts, as a `Layout` or axis -> placement; parts may be uneven, as
            `torch.chunk` makes them.
        shape: of the whole.
        order: its dims from outermost to innermost in memory; by default as in `local`.

    Returns:
        A DTensor that requires no gradient.

    Raises:
        MeshError: the mesh is another one than the layout's.
        LayoutError: the part has another shape, or no DTensor can be laid out so.
    """
    if not isinstance(layout, Layout):
        layout = Layout(DeviceMesh(mesh), layout)
    if not describes(mesh, layout.mesh):
        raise MeshError(
            f"a DTensor on {mesh} of a layout on {layout.mesh}",
            because="both have the same ranks in the same shape, and the same names",
            hint=f"init_device_mesh(device, {layout.mesh.shape}, "
            f"mesh_dim_names={layout.mesh.axes})",
        )
    layout, coordinate = layout.normalized(len(shape)), mesh.get_coordinate()
    placements = placements_of(layout, shape)
    if coordinate is not None:
        rank = layout.mesh.rank_at(coordinate)
        expected = layout.local_shape(shape, rank)
        if tuple(local.shape) != expected:
            raise LayoutError(
                f"a part of shape {tuple(local.shape)} on rank {rank}, expected {expected}",
                because=f"the rank's part of {tuple(shape)} laid out as {layout} has that shape",
                hint="mdfuse.shard_tensor(whole, mesh, layout, rank=...) cuts it",
            )
        order = memory_order(local.stride()) if order is None else order
    strides = dense_strides(shape, order)
    return DTensor.from_local(
        local.detach(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


# -- meshes --------------------------------------------------------------------------------------


def describes(torch_mesh: Any, mesh: DeviceMesh) -> bool:
    """Tell whether torch's mesh has the ranks and the shape of ours.

    Where torch's mesh has names, they must be ours, too.

    Raises:
        MeshError: torch's is a slice of another mesh.
    """
    if torch_mesh.ndim != mesh.ndim:
        return False
    names = torch_mesh.mesh_dim_names
    if names is not None and tuple(names) != mesh.axes:
        return False
    return DeviceMesh(torch_mesh, mesh.axes, mesh.hosts) == mesh
