"""What the tests of whole programs compare with: plain torch on global tensors, cut by plain torch.

Nothing here asks the code under test what a rank should hold: a layout is read as data (its mesh,
its placements, its order), and `torch.chunk` does the cutting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Shard
from mdfuse.compiled.program import Program

if TYPE_CHECKING:
    from mdfuse.simulation.simulate import Simulated


POISON = mf.Options(poison=True)

#: dtype -> how far a distributed result may be from one device: sums come in another order.
TOLERANCES = {
    torch.complex128: 1e-11,
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


def coordinate(mesh: DeviceMesh, rank: int) -> dict[str, int]:
    """Where a rank is: axis -> index."""
    index = mesh.ranks.index(rank)
    place = {}
    for axis, n in reversed(list(zip(mesh.axes, mesh.shape, strict=True))):
        index, place[axis] = divmod(index, n)
    return place


def splits(layout: Layout) -> list[tuple[int, str]]:
    """(dim, axis) for every cut, outermost first within a dim."""
    order = layout.order
    found: dict[int, list[str]] = {}
    for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True):
        if isinstance(placement, Shard):
            found.setdefault(placement.dim, []).append(axis)
    return [(dim, axis) for dim, axes in found.items() for axis in order.get(dim, axes)]


def local_part(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """A rank's part of a global tensor, Partial axes ignored."""
    for dim in dict.fromkeys(dim for dim, _ in splits(layout)):
        x = _cut(x, layout, rank, dim)
    return x


def _cut(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    place, by_axis = coordinate(layout.mesh, rank), layout.by_axis()
    axes = [axis for d, axis in splits(layout) if d == dim]
    if any(by_axis[a] == Shard(dim, zigzag=True) for a in axes):
        rows = _zigzag(
            x.shape[dim], [(by_axis[a], layout.mesh.axis_size(a), place[a]) for a in axes]
        )
        return x.index_select(dim, rows.to(x.device))
    sizes = blocks(x, [by_axis[a] for a in axes], dim)
    if sizes is None:
        for axis in axes:
            x = _chunk(x, layout.mesh.axis_size(axis), place[axis], dim)
        return x
    rows, block = torch.arange(x.shape[dim]), torch.repeat_interleave(torch.tensor(sizes))
    for axis in axes:
        every, n = [rows], layout.mesh.axis_size(axis)
        if by_axis[axis].blocks is not None:
            every = [rows[block[rows] == i] for i in range(len(sizes))]
        rows = torch.cat([_chunk(some, n, place[axis], 0) for some in every])
    return x.index_select(dim, rows.to(x.device))


def _zigzag(extent: int, axes: Sequence[tuple[Any, int, int]]) -> Tensor:
    """The rows of a rank: (placement, size, place) of each axis, the outermost first."""
    halves: tuple[Tensor, ...] = (torch.arange(extent),)
    for placement, n, i in axes:
        if not placement.zigzag:
            halves = (_chunk(torch.cat(halves), n, i, 0),)
        elif len(halves) == 1:
            halves = (_chunk(halves[0], 2 * n, i, 0), _chunk(halves[0], 2 * n, 2 * n - 1 - i, 0))
        else:
            halves = (_chunk(halves[0], n, i, 0), _chunk(halves[1], n, n - 1 - i, 0))
    return torch.cat(halves)


def blocks(x: Tensor, placements: Sequence[Shard], dim: int) -> list[int] | None:
    """The sizes of the blocks of a split dim; None where it has none."""
    given = next((p.blocks for p in placements if p.blocks is not None), None)
    if isinstance(given, int):
        return [x.shape[dim] // given] * given
    return None if given is None else list(given)


def _chunk(x: Tensor, n: int, i: int, dim: int) -> Tensor:
    """One of n chunks; an empty one where torch makes fewer."""
    pieces = x.chunk(n, dim) if x.shape[dim] else ()
    return pieces[i] if i < len(pieces) else x.narrow(dim, 0, 0)


def shares(x: Tensor, layout: Layout) -> dict[int, Tensor]:
    """What each rank is given of a global tensor.

    Along Partial axes no rank is given the value itself, so that an op which takes a Partial for
    the whole cannot pass by luck.
    """
    layers: dict[tuple[int, ...], Tensor] = {(): x}
    axes = [
        (axis, placement)
        for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True)
        if isinstance(placement, Partial)
    ]
    generator = torch.Generator().manual_seed(x.numel())
    for axis, placement in axes:
        n = layout.mesh.axis_size(axis)
        layers = {
            (*place, i): part
            for place, whole in layers.items()
            for i, part in enumerate(_parts(whole, placement.op, n, generator))
        }
    given = {}
    for rank in layout.mesh.ranks:
        place = coordinate(layout.mesh, rank)
        layer = layers[tuple(place[axis] for axis, _ in axes)]
        given[rank] = local_part(layer, layout, rank)
    return given


def _parts(x: Tensor, op: str, n: int, generator: torch.Generator) -> list[Tensor]:
    """n tensors that `op` joins to x."""

    def draw(low: int, high: int) -> list[Tensor]:
        numbers = torch.randint(low, high, (n, *x.shape), generator=generator)
        return list(numbers.to(x.dtype))

    noise = draw(0, 2) if x.dtype == torch.bool else draw(-2, 3)
    match op:
        case "sum":
            return [x - sum(noise[1:], torch.zeros_like(x)), *noise[1:]]
        case "avg":
            return [x - sum(noise[1:], torch.zeros_like(x)), *(x + y for y in noise[1:])]
        case "prod":
            signs = [1 - 2 * y for y in draw(0, 2)]
            return [x * torch.stack(signs[1:]).prod(0).to(x.dtype), *signs[1:]] if n > 1 else [x]
        case "bxor":
            first = x
            for y in noise[1:]:
                first = first ^ y
            return [first, *noise[1:]]
    worse = {
        "max": lambda y: x - y.abs(),
        "min": lambda y: x + y.abs(),
        "bor": lambda y: x & y,
        "band": lambda y: x | y,
    }[op]
    owner = torch.randint(0, n, x.shape, generator=generator)
    return [torch.where(owner == i, x, worse(y)) for i, y in enumerate(noise)]


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor with its dims in this order, outermost first."""
    permuted = torch.empty([shape[d] for d in order], device="meta")
    strides = [0] * len(shape)
    for d, stride in zip(order, permuted.stride(), strict=True):
        strides[d] = stride
    return tuple(strides)


def memory_order(x: Tensor) -> tuple[int, ...]:
    """The dims of a tensor from outermost to innermost in memory."""
    return tuple(sorted(range(x.ndim), key=lambda d: (-x.stride(d), d)))


def has_strides(x: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor lies so in memory; dims of one element, and empty tensors, lie anyhow."""
    if x.numel() == 0:
        return True
    return all(n == 1 or s == t for n, s, t in zip(x.shape, x.stride(), strides, strict=True))


def is_close(actual: Tensor, expected: Tensor, *, exact: bool = False) -> bool:
    """Equal dtype, shape and values; floats within rounding unless `exact`."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    tolerance = 0.0 if exact else TOLERANCES.get(expected.dtype, 0.0)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def simulate_shares(
    program: Program, inputs: Sequence[object], schedule: int | None = None
) -> Simulated:
    """Simulate from global inputs that are cut here, not by the code under test."""
    given = given_to_each(program, inputs)
    return mf.simulate(program, per_rank=given, options=POISON, schedule=schedule)


def given_to_each(program: Program, inputs: Sequence[object]) -> list[dict[str, object]]:
    """What each rank is given of global inputs, by name."""
    given: list[dict[str, object]] = [{} for _ in range(program.host.last_rank + 1)]
    for name, x in zip(program.fusion.inputs, inputs, strict=True):
        layout = program.fusion.values[name].layout
        if layout is None or not isinstance(x, Tensor):
            for row in given:
                row[name] = x
            continue
        for rank, part in shares(x, layout).items():
            # Views, as a caller may pass them, unless they will be written.
            given[rank][name] = part.clone() if program.fusion.reuse else part
    return given


def check_everywhere(
    program: Program,
    inputs: Sequence[object],
    expected: Sequence[Tensor],
    *,
    exact: bool = False,
    schedule: int | None = None,
) -> Simulated:
    """Simulate, and compare the global outputs and what every rank holds of them.

    A rank outside an output's mesh has None; along Partial axes only the joined value is compared.
    """
    result = simulate_shares(program, inputs, schedule)
    for i, (name, whole) in enumerate(zip(program.fusion.outputs, expected, strict=True)):
        layout = program.fusion.values[name].layout
        assert layout is not None
        assert is_close(result.outputs[i], whole, exact=exact), (
            f"%{name} {layout}:\n{result.outputs[i]}\nexpected\n{whole}\n{program}"
        )
        is_partial = any(isinstance(p, Partial) for p in layout.placements)
        for rank, outputs in enumerate(result.per_rank):
            if rank not in layout.mesh.ranks:
                assert outputs[i] is None, f"rank {rank} is outside {layout.mesh}"
                continue
            part = local_part(whole, layout, rank)
            assert outputs[i].shape == part.shape, f"%{name} on rank {rank}\n{program}"
            if not is_partial:
                assert is_close(outputs[i], part, exact=exact), (
                    f"%{name} {layout} on rank {rank}:\n{outputs[i]}\nexpected\n{part}\n{program}"
                )
    return result
