"""Every change of layout on two axes, with every reduce op, from what each rank holds.

Each layer of a Partial value is drawn by itself, so that nothing is right by luck: what a rank
passes along a Partial axis is no part of the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
import torch
from helpers.oracle import coordinate, local_part
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, LayoutError, Partial, Replicate, Shard
from mdfuse.layouts.layout import REDUCE_OPS, Placement, commute

MESH = DeviceMesh.arange(a=2, b=2)
#: dtype -> the reduce ops that it has
OPS = {
    torch.float64: ("sum", "prod", "min", "max", "avg"),
    torch.complex64: ("sum", "prod", "avg"),
    torch.int32: ("sum", "prod", "min", "max", "band", "bor", "bxor"),
    torch.bool: ("min", "max", "band", "bor", "bxor"),
}
#: In numpy; on bool, + and * are or and and, as they are for torch.
JOIN = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
SHAPE = (5, 3)


# -- which ops commute ---------------------------------------------------------------------------


def reduced(op: str, x: np.ndarray, axis: int) -> np.ndarray:
    return x.mean(axis) if op == "avg" else JOIN[op].reduce(x, axis)


@pytest.mark.parametrize(("op", "other"), [*combinations_with_replacement(REDUCE_OPS, 2)])
def test_a_layout_has_the_ops_that_commute(op: str, other: str) -> None:
    """Reduced along one axis and then the other, or the other way round, on all small numbers."""
    placements = {"a": Partial(op), "b": Partial(other)}
    is_of_bits = any(o.startswith("b") for o in (op, other))
    if is_of_bits and "avg" in (op, other):
        is_same = False  # no dtype has both
    else:
        squares = np.array(list(product(range(4), repeat=4))).reshape(-1, 2, 2)
        first = reduced(other, reduced(op, squares, 1), 1)
        is_same = bool(np.allclose(first, reduced(op, reduced(other, squares, 2), 1)))
    assert commute([op, other]) == is_same
    if is_same:
        Layout(MESH, placements)
        return
    with pytest.raises(LayoutError, match="several ways") as caught:
        Layout(MESH, placements)
    assert op in caught.value.what and other in caught.value.what
    Layout(DeviceMesh.arange(a=2, b=1), placements)  # one rank: nothing is reduced along b


# -- every change of layout ----------------------------------------------------------------------


def layouts(ops: Sequence[str]) -> Iterator[Layout]:
    """Every layout on the mesh, both orders where both axes split one dim."""
    kinds: list[Placement] = [Replicate(), Shard(0), *map(Partial, ops)]
    kinds += [Shard(1)] if len(ops) < 6 else []  # more ops are enough to go through
    for p, q in product(kinds, repeat=2):
        if isinstance(p, Partial) and isinstance(q, Partial) and not commute([p.op, q.op]):
            continue
        yield Layout(MESH, {"a": p, "b": q})
        if isinstance(p, Shard) and p == q:
            yield Layout(MESH, {"a": p, "b": q}, {p.dim: ("b", "a")})


def is_possible(source: Layout, destination: Layout) -> bool:
    for before, after in zip(source.placements, destination.placements, strict=True):
        if not isinstance(after, Partial) or before == after:
            continue
        if isinstance(before, Partial):
            return False
    return True


def drawn(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    low, high = (0, 2) if dtype == torch.bool else (-3, 4)
    x = torch.randint(low, high, SHAPE, generator=generator)
    if dtype.is_complex:
        return torch.complex(x.float(), torch.randint(-3, 4, SHAPE, generator=generator).float())
    return x.to(dtype)


def layer_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Which of the values that are to be reduced a rank has a part of."""
    place = coordinate(layout.mesh, rank)
    pairs = zip(layout.mesh.axes, layout.placements, strict=True)
    return tuple(place[a] if isinstance(p, Partial) else 0 for a, p in pairs)


def joined(layout: Layout, layers: dict[tuple[int, ...], Tensor]) -> Tensor:
    """The value: reduced along b, then along a."""
    (any_layer, *_) = layers.values()
    x = np.stack([layers[i, j].numpy() for i in (0, 1) for j in (0, 1) if (i, j) in layers])
    rows = 1 + max(i for i, _ in layers)
    x = x.reshape(rows, -1, *SHAPE)
    for p in layout.placements[::-1]:
        x = reduced(p.op, x, x.ndim - 3) if isinstance(p, Partial) else x.squeeze(x.ndim - 3)
    return torch.from_numpy(np.asarray(x)).to(any_layer.dtype)


def given(layout: Layout, dtype: torch.dtype, seed: int) -> tuple[list[Tensor], Tensor]:
    """What each rank has, and the value that it is part of."""
    generator = torch.Generator().manual_seed(seed)
    numbers = {layer_of(layout, rank): None for rank in MESH.ranks}
    layers = {layer: drawn(dtype, generator) for layer in numbers}
    parts = [local_part(layers[layer_of(layout, r)], layout, r).clone() for r in MESH.ranks]
    return parts, joined(layout, layers)


def assembled(layout: Layout, parts: Sequence[Tensor]) -> Tensor:
    """The value that ranks hold; ranks that hold the same part of a layer must agree on it."""
    layers: dict[tuple[int, ...], Tensor] = {}
    index = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    found: dict[tuple[int, ...], dict[int, Tensor]] = {}
    for rank, part in zip(MESH.ranks, parts, strict=True):
        where = local_part(index, layout, rank)
        assert part.shape == where.shape
        row = found.setdefault(layer_of(layout, rank), {})
        for i, x in zip(where.flatten().tolist(), part.flatten(), strict=True):
            assert torch.equal(row.setdefault(i, x), x)
    for layer, row in found.items():
        layers[layer] = torch.stack([row[i] for i in range(index.numel())]).reshape(SHAPE)
    return joined(layout, layers)


def check(source: Layout, goals: Sequence[Layout], dtype: torch.dtype) -> None:
    """One program, with an input for each change of layout."""
    with mf.FusionDefinition("changes") as fd:
        inputs = [fd.define_tensor(SHAPE, dtype, source) for _ in goals]
        for x, goal in zip(inputs, goals, strict=True):
            fd.add_output(fd.ops.set(x).on(goal))
    program = mf.compile(fd)
    drawn_for = [given(source, dtype, seed) for seed in range(len(goals))]
    per_rank = [
        {name: parts[r] for name, (parts, _) in zip(program.fusion.inputs, drawn_for, strict=True)}
        for r in MESH.ranks
    ]
    results = mf.simulate(program, per_rank=per_rank)
    for i, (goal, (_, value)) in enumerate(zip(goals, drawn_for, strict=True)):
        parts = [outputs[i] for outputs in results.per_rank]
        torch.testing.assert_close(
            assembled(goal, parts),
            value,
            # printed where it is wrong only: that takes longer than to lower it
            msg=lambda m, g=goal: f"{m}\n{source} -> {g} of {dtype}\n{program}",
        )
        torch.testing.assert_close(results.outputs[i], value)


@pytest.mark.parametrize("dtype", OPS, ids=str)
def test_every_change_of_layout(dtype: torch.dtype) -> None:
    every = list(layouts(OPS[dtype]))
    for source in every:
        goals = [goal for goal in every if is_possible(source, goal)]
        if dtype != torch.float64:  # without a Partial all dtypes are moved alike
            goals = [goal for goal in goals if source.partial_axes or goal.partial_axes]
        if goals:
            check(source, goals, dtype)


@pytest.mark.parametrize("op", ["prod", "bxor", "avg", "sum"])
def test_a_partial_that_stays_is_not_reduced_on_the_way(op: str) -> None:
    """The order of two axes changes while the third is Partial: no reduction is posted."""
    mesh = DeviceMesh.arange(a=2, b=2, c=2)
    placements = {"a": Partial(op), "b": Shard(0), "c": Shard(0)}
    source, goal = (Layout(mesh, placements, {0: tuple(order)}) for order in ("bc", "cb"))
    dtype = torch.int64 if op == "bxor" else torch.float64
    with mf.FusionDefinition("order") as fd:
        fd.add_output(fd.ops.set(fd.define_tensor([8], dtype, source)).on(goal))
    program = mf.compile(fd)
    assert [c.kind for c in program.communications] == ["Exchange"]
    layers = torch.arange(16, dtype=dtype).reshape(2, 8) + 1
    place = [coordinate(mesh, r) for r in mesh.ranks]
    per_rank = [
        {name: local_part(layers[place[r]["a"]], source, r) for name in program.fusion.inputs}
        for r in mesh.ranks
    ]
    result = mf.simulate(program, per_rank=per_rank)
    for r in mesh.ranks:
        assert torch.equal(result.per_rank[r][0], local_part(layers[place[r]["a"]], goal, r))
    assert max(program.bytes_received(r) for r in mesh.ranks) == 2 * dtype.itemsize


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize(
    "goal", [{}, {"a": Shard(0)}, {"b": Shard(0)}, {"b": Shard(0, 2)}], ids=str
)
def test_one_term_is_the_value(op: str, goal: dict[str, Placement]) -> None:
    """Along an axis of one rank nobody is asked for other terms."""
    mesh, x = DeviceMesh.arange(a=1, b=2), torch.arange(24.0).reshape(8, 3)
    with mf.FusionDefinition("one") as fd:
        given = fd.define_tensor(x.shape, x.dtype, Layout(mesh, {"a": Partial(op)}))
        fd.add_output(fd.ops.set(given).on(mesh, goal))
    program = mf.compile(fd)
    assert all(c.part(rank).call is None for c in program.communications for rank in mesh.ranks)
    result = mf.simulate(program, per_rank=[{program.fusion.inputs[0]: x}] * 2)
    assert torch.equal(result.outputs[0], x)
    for rank, (part,) in enumerate(result.per_rank):
        assert torch.equal(part, local_part(x, Layout(mesh, goal), rank))
