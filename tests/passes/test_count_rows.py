"""Ragged values stored as the rows that are there: what moves, on which meshes, what is dense."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard
from mdfuse.hir.text.parser import parse
from mdfuse.hir.verify.check import verify
from mdfuse.layouts.call import Call
from mdfuse.plan import counted_steps

D, H = 64, 8


def layer(
    mesh: DeviceMesh,
    t: int,
    e: int,
    k: int,
    experts: dict[str, Any],
    has_grads: bool = True,
    **how: Any,
) -> Any:
    """Dispatch, two products, combine; tokens are split by all axes but tp."""
    split = {a: Shard(0) for a in mesh.axes if a != "tp"}
    there = {**{a: Shard(0) for a in split}, **{a: Shard(1) for a in experts}}
    parts = how.pop("parts", mesh.size // (mesh.axis_size("tp") if "tp" in mesh.axes else 1))
    with FusionDefinition("layer") as fd:
        x = fd.define_tensor([t, D], torch.float64, mesh, split, name="x")
        ids = fd.define_tensor([t, k], torch.int64, mesh, split, name="ids")
        up = fd.define_tensor([e, D, H], torch.float64, mesh, experts | how.pop("up", {}))
        down = fd.define_tensor([e, H, D], torch.float64, mesh, experts | how.pop("down", {}))
        n = fd.ops.counts(ids, experts=e, parts=parts)
        rows = fd.ops.set(fd.ops.group_rows(x, ids, n, **how)).on(mesh, there)
        y = fd.ops.grouped_mm(F.silu(fd.ops.grouped_mm(rows, up)), down)
        y = fd.ops.ungroup_rows(fd.ops.set(y).on(mesh, split), ids)
        grads = mf.grad((y * y).sum(), [x, up, down]) if has_grads else ()
        for result in (y, *grads):
            fd.add_output(result)
    return fd


def given(t: int, e: int, ids: Tensor) -> list[Tensor]:
    torch.manual_seed(t)
    shapes = (t, D), (e, D, H), (e, H, D)
    x, up, down = (torch.randn(*s, dtype=torch.float64) for s in shapes)
    return [x, ids, up, down]


def by_loop(x: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
    leaves = [v.clone().requires_grad_() for v in (x, up, down)]
    a, u, d = leaves
    rows = [sum(F.silu(a[i] @ u[e]) @ d[e] for e in row) for i, row in enumerate(ids.tolist())]
    y = torch.stack(rows)
    return [y.detach(), *torch.autograd.grad((y * y).sum(), leaves)]


def router(t: int, e: int, k: int) -> Tensor:
    return torch.rand(t, e, generator=torch.Generator().manual_seed(e)).topk(k, -1).indices


MESHES: dict[str, tuple[DeviceMesh, dict[str, Any], dict[str, Any]]] = {
    "dp x ep": (DeviceMesh.arange(dp=2, ep=2), {"ep": Shard(0)}, {}),
    "ep x tp": (
        DeviceMesh.arange(ep=2, tp=2), {"ep": Shard(0)},
        {"up": {"tp": Shard(2)}, "down": {"tp": Shard(1)}}),
    "dp x ep x tp": (
        DeviceMesh.arange(dp=2, ep=2, tp=2), {"ep": Shard(0)},
        {"up": {"tp": Shard(2)}, "down": {"tp": Shard(1)}}),
    "tp x ep": (
        DeviceMesh.arange(tp=2, ep=2), {"ep": Shard(0)},
        {"up": {"tp": Shard(2)}, "down": {"tp": Shard(1)}}),
}  # fmt: skip


@pytest.mark.parametrize("name", MESHES)
def test_experts_beside_other_axes(name: str) -> None:
    mesh, experts, layouts = MESHES[name]
    fd = layer(mesh, 8, 4, 2, experts, **layouts)
    program = mf.compile(fd)
    assert sum(len(i.inputs) == 3 for i in program.host.walk() if i.op == "post") == 4
    ids = router(8, 4, 2)
    values = given(8, 4, ids)
    check_everywhere(program, values, by_loop(*values))


@pytest.mark.parametrize("seed", range(16))
def test_parts_of_other_sizes(seed: int) -> None:
    """Tokens that two axes split unevenly; a rank has none of few. The sizes are stated."""
    draw = random.Random(seed)
    t, k, ep = draw.randint(1, 13), draw.choice([1, 2, 5]), draw.choice([2, 3])
    sizes = [len(c) for part in nested(range(t), 2) for c in nested(part, ep)]
    mesh, experts = DeviceMesh.arange(dp=2, ep=ep), {"ep": Shard(0)}
    fd = layer(mesh, t, 5, k, experts, parts=sizes)
    options = mf.Options(counts=draw.choice(["host", "device"]), poison=True)
    count = draw.choice([1, 2, 3])
    if count == 1:
        program = mf.compile(fd, options)
    else:
        batch = {"x": 0, "ids": 0}
        program = mf.pipeline(fd, microbatches=count, batch=batch, options=options)
    assert " are dense" not in program.explain()
    values = given(t, 5, router(t, 5, k))
    check_everywhere(program, values, by_loop(*values))
    verify(parse(str(program)))


def nested(rows: Any, count: int) -> list[Any]:
    """Cut as `torch.chunk` does; parts behind the last have nothing."""
    size = -(-len(rows) // count)
    return [rows[i * size : (i + 1) * size] for i in range(count)]


def test_sizes_of_parts_that_are_others_are_refused() -> None:
    with FusionDefinition("sizes") as fd:
        ids = fd.define_tensor([6, 2], torch.int64, DeviceMesh.arange(ep=2), {"ep": Shard(0)})
        for parts in ([3, 2], [4, 3], [7, -1], []):
            with pytest.raises(mf.DefinitionError, match="the tokens of all parts are all tokens"):
                fd.ops.counts(ids, experts=3, parts=parts)
        fd.add_output(fd.ops.counts(ids, experts=3, parts=[4, 2]))
    chosen = torch.tensor([[0, 1]] * 4 + [[2, 0]] * 2)
    wanted = torch.tensor([[4, 4, 0], [2, 0, 2]])
    check_everywhere(mf.compile(fd), [chosen], [wanted])


@pytest.mark.parametrize(("up", "down"), [(2, 1), (1, 1), (2, 2)])
def test_matrices_split_as_tokens_are_come_to_the_rows(up: int, down: int) -> None:
    """As fully sharded ones: rows that went along fsdp would be dense, in the backward, too."""
    of = {"up": {"fsdp": Shard(up)}, "down": {"fsdp": Shard(down)}}
    fd = layer(DeviceMesh.arange(fsdp=2, ep=2), 64, 4, 2, {"ep": Shard(0)}, **of)
    program = mf.compile(fd)
    assert "as they are counted in a run" in program.explain()
    values = given(64, 4, router(64, 4, 2))
    check_everywhere(program, values, by_loop(*values))


@pytest.mark.parametrize("counts", ["host", "device"])
def test_ranks_without_columns_add_nothing(counts: Any) -> None:
    """Five ranks share eight columns: the last has none, of as many rows as its experts have."""
    up, down = {"tp": Shard(2)}, {"tp": Shard(1)}
    fd = layer(DeviceMesh.arange(ep=2, tp=5), 6, 3, 2, {"ep": Shard(0)}, up=up, down=down)
    program = mf.compile(fd, mf.Options(counts=counts, poison=True))
    values = given(6, 3, torch.tensor([[0, 1], [2, 0], [2, 1], [2, 0], [0, 2], [2, 1]]))
    check_everywhere(program, values, by_loop(*values))


@pytest.mark.parametrize("tp", [2, 5])
@pytest.mark.parametrize("count", [1, 2])
def test_rows_go_back_with_the_columns_of_each_rank(tp: int, count: int) -> None:
    """What experts yield is split by columns, which come together where the tokens are."""
    mesh, down = DeviceMesh.arange(tp=tp, ep=2), {"tp": Shard(2)}
    fd = layer(mesh, 6, 3, 2, {"ep": Shard(0)}, has_grads=False, down=down)
    program = mf.pipeline(fd, microbatches=count, batch={"x": 0, "ids": 0})
    (_, back) = (c for c in program.communications if c.kind == "AllToAll")
    assert back.source.placement("tp") == Shard(3)
    values = given(6, 3, router(6, 3, 2))
    check_everywhere(program, values, by_loop(*values)[:1])


#: The mesh, axes that split experts -> along which axes counts are gathered.
KNOWN: list[tuple[dict[str, int], tuple[str, ...], dict[str, Any], tuple[str, ...]]] = [
    ({"dp": 2, "ep": 2}, ("ep",), {}, ("ep",)),
    ({"dp": 1, "fsdp": 3, "ep": 2}, ("ep",), {}, ("ep",)),
    ({"dp": 2, "fsdp": 2}, (), {}, ()),
    ({"dp": 2, "ep": 2}, ("ep",), {"capacity": 9}, ("dp", "ep")),
    ({"dp": 2, "ep": 2}, ("ep",), {"capacity": 9, "drop": True}, ("ep",)),
]


@pytest.mark.parametrize(("axes", "experts", "how", "along"), KNOWN, ids=str)
def test_counts_travel_among_ranks_that_exchange_rows(
    axes: dict[str, int], experts: tuple[str, ...], how: dict[str, Any], along: tuple[str, ...]
) -> None:
    """All ranks know all of them where all are to refuse the same run."""
    mesh, t = DeviceMesh.arange(**axes), 12
    fd = layer(mesh, t, 4, 2, dict.fromkeys(experts, Shard(0)), **how)
    program = mf.compile(fd)
    counts = [c for c in program.communications if c.dtype == torch.int64]
    assert [c.axes for c in counts] == [along] * bool(along)
    values = given(t, 4, router(t, 4, 2))
    check_everywhere(program, values, by_loop(*values))


SKEWS: dict[str, Callable[[int, int], Tensor]] = {
    "balanced": lambda t, e: (torch.arange(t * 2).view(t, 2) * 7) % e,
    "drawn": lambda t, e: router(t, e, 2),
    "all to one": lambda t, e: torch.tensor([0, 1]).expand(t, 2).contiguous(),
    "a rank's own": lambda t, e: (torch.arange(t) * e // t // 2 * 2).unsqueeze(1) + torch.arange(2),
}


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_only_rows_that_must_move_arrive(
    ep: int, skew: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    t, e = 16 * ep, 2 * ep
    program = mf.compile(layer(DeviceMesh.arange(ep=ep), t, e, 2, {"ep": Shard(0)}))
    ids = SKEWS[skew](t, e)
    arrived: list[tuple[int, ...]] = []
    exact = counted_steps.counted

    def noting(poster: Any, call: Call) -> Any:
        at = call.team.index(call.rank)
        arrived.append(tuple(n for i, n in enumerate(call.recv_counts) if i != at))
        return exact(poster, call)

    monkeypatch.setattr(counted_steps, "counted", noting)
    values = given(t, e, ids)
    mf.simulate(program, values)
    is_there = torch.arange(t).unsqueeze(1) // (t // ep) == ids // (e // ep)
    must = 4 * int((~is_there).sum()) * D  # there and back, forward and backward
    assert sum(map(sum, arrived)) == must
    posts = [c for c in program.communications if c.kind != "AllToAll"]
    beside = sum(c.bytes_received(r) for c in posts for r in range(ep))
    weights = sum(p.numel() for p in values[2:]) * 8 * (ep - 1)
    assert beside < weights / 16, "counts alone travel beside rows"


def dense_output(fd: FusionDefinition, rows: Any, ids: Any) -> Any:
    fd.add_output(rows * 2)


MESH = DeviceMesh.arange(ep=2)
DENSE = {
    "an output": (dense_output, "is an output, which is dense"),
    "a sigmoid": (
        lambda fd, rows, ids: fd.add_output(torch.sigmoid(rows)), "is an output, which is dense"),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_dense_rows_are_named(name: str) -> None:
    use, because = DENSE[name]
    with FusionDefinition("dense") as fd:
        x = fd.define_tensor([4, 3], torch.float32, MESH, {"ep": Shard(0)})
        ids = fd.define_tensor([4, 2], torch.int64, MESH, {"ep": Shard(0)})
        n = fd.ops.counts(ids, experts=3, parts=2)
        use(fd, fd.ops.group_rows(x, ids, n), ids)
    program = mf.compile(fd)
    assert because in program.explain()
    assert not any(i.op == "fetch" for i in program.host.walk())
    values = [torch.randn(4, 3), torch.tensor([[0, 1], [2, 0], [1, 2], [1, 0]])]
    check_everywhere(program, values, mf.reference(fd, values))


def test_rows_over_the_capacity_are_said_to_be_dropped() -> None:
    with FusionDefinition("capacity") as fd:
        x = fd.define_tensor([4, 3], torch.float32, MESH, {"ep": Shard(0)})
        ids = fd.define_tensor([4, 2], torch.int64, MESH, {"ep": Shard(0)})
        n = fd.ops.counts(ids, experts=3, parts=2)
        rows = fd.ops.set(fd.ops.group_rows(x, ids, n, capacity=1, drop=True)).on(
            MESH, {"ep": Shard(1)}
        )
        fd.add_output(fd.ops.ungroup_rows(fd.ops.set(rows).on(MESH, {"ep": Shard(0)}), ids))
    text = mf.compile(fd).explain()
    assert "rows over the capacity of 1 per part and expert are dropped" in text
    assert "as they are counted in a run" in text


@pytest.mark.parametrize("compile", ["never", "always"])
def test_ids_in_the_shape_of_counts(compile: Any) -> None:
    """Each of four parts is one token, which chooses all four experts; in units, too."""
    mesh, experts, layouts = MESHES["dp x ep"]
    program = mf.compile(layer(mesh, 4, 4, 4, experts, **layouts), mf.Options(compile=compile))
    verify(program.host)
    values = given(4, 4, router(4, 4, 4))
    assert "as they are counted in a run" in program.explain()
    check_everywhere(program, values, by_loop(*values))
