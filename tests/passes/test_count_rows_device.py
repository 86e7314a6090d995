"""Counts that stay on the device: ranks exchange blocks, and no host waits for a number."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled_suite
from helpers.oracle import check_everywhere
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mdfuse as mf
from mdfuse import CountsError, DeviceMesh, FusionDefinition, ProgramError, Shard
from mdfuse.hir.instructions import counts_of
from mdfuse.hir.text.parser import parse
from mdfuse.hir.uncapturable import eager
from mdfuse.hir.verify.check import verify
from mdfuse.ir import groups, packed_rows
from mdfuse.ir.packed_rows import RowBlocks

DEVICE = mf.Options(counts="device", poison=True)
D, H = 6, 5


def layer(axes: dict[str, int], t: int, e: int, k: int, **how: Any) -> FusionDefinition:
    """A router's choices, two products with a bias, weights; its gradients."""
    mesh = DeviceMesh.arange(**axes)
    split, experts = {a: Shard(0) for a in axes}, {"ep": Shard(0)}
    there = split | {"ep": Shard(1)}
    with FusionDefinition("layer") as fd:
        x = fd.define_tensor([t, D], torch.float64, mesh, split, name="x")
        ids = fd.define_tensor([t, k], torch.int64, mesh, split, name="ids")
        weights = fd.define_tensor([t, k], torch.float64, mesh, split, name="weights")
        up = fd.define_tensor([e, D, H], torch.float64, mesh, experts, name="up")
        bias = fd.define_tensor([e, 1, H], torch.float64, mesh, experts, name="bias")
        down = fd.define_tensor([e, H, D], torch.float64, mesh, experts, name="down")
        n = fd.ops.counts(ids, experts=e, parts=mesh.size)
        rows = fd.ops.set(fd.ops.group_rows(x, ids, n, **how)).on(mesh, there)
        y = fd.ops.grouped_mm(F.silu(fd.ops.grouped_mm(rows, up) + bias).sigmoid(), down)
        y = fd.ops.ungroup_rows(fd.ops.set(y).on(mesh, split), ids, weights)
        for result in (y, *mf.grad((y * y).sum(), [x, weights, up, bias, down])):
            fd.add_output(result)
    return fd


def given(t: int, e: int, ids: Tensor) -> list[Tensor]:
    torch.manual_seed(t)
    shapes = (t, D), (*ids.shape,), (e, D, H), (e, 1, H), (e, H, D)
    x, weights, up, bias, down = (torch.randn(*s, dtype=torch.float64) for s in shapes)
    return [x, ids, weights, up, bias, down]


def by_loop(values: Sequence[Tensor], parts: int, most: int | None = None) -> list[Tensor]:
    """Loop over tokens and choices; of each part the first `most` rows go to an expert."""
    x, ids, *others = values
    leaves = [v.clone().requires_grad_() for v in (x, *others)]
    a, w, up, bias, down = leaves
    taken, size, rows = defaultdict[tuple[int, int], int](int), max(-(-len(x) // parts), 1), []
    for i, row in enumerate(ids.tolist()):
        y = 0 * a[i]
        for j, e in enumerate(row):
            if e >= 0 and (most is None or taken[i // size, e] < most):
                taken[i // size, e] += 1
                h = F.silu(a[i] @ up[e] + bias[e, 0]).sigmoid()
                y = y + w[i, j] * (h @ down[e])
        rows.append(y)
    y = torch.stack(rows) if rows else 0 * a
    total = (y * y).sum() + sum(0 * v.sum() for v in leaves)
    return [y.detach(), *torch.autograd.grad(total, leaves)]


def router(t: int, e: int, k: int) -> Tensor:
    return torch.rand(t, e, generator=torch.Generator().manual_seed(e)).topk(k, -1).indices


def check_no_host(program: mf.Program) -> None:
    """Nothing of a program waits for the device, or depends on a number of a run."""
    every = [*program.host.walk()]
    assert not any(i.op == "fetch" or counts_of(i) is not None for i in every)
    assert not [*eager(program.host)]
    assert "the whole program is captured" in program.explain()
    assert sum(c.kind in ("AllToAll", "Exchange") for c in program.communications) >= 4


#: name -> axes, tokens, experts, choices of each token, ids.
CASES: dict[str, tuple[dict[str, int], int, int, Tensor]] = {
    "drawn": ({"ep": 2}, 8, 4, router(8, 4, 2)),
    "one expert takes all": ({"ep": 2}, 6, 4, torch.full((6, 2), 3)),
    "a rank without rows": ({"ep": 3}, 6, 3, torch.tensor([[0], [1], [-1], [-1], [2], [0]])),
    "one choice": ({"ep": 4}, 9, 8, router(9, 8, 1)),
    "all choices": ({"ep": 2}, 4, 3, router(4, 3, 3)),
    "uneven experts": ({"ep": 3}, 7, 5, router(7, 5, 2)),
    "fewer experts than ranks": ({"ep": 4}, 8, 2, router(8, 2, 1)),
    "dp x ep": ({"dp": 2, "ep": 2}, 12, 4, router(12, 4, 2)),
    "dp x ep, uneven": ({"dp": 2, "ep": 3}, 13, 4, router(13, 4, 2)),
    "no token": ({"ep": 2}, 0, 4, torch.zeros(0, 2, dtype=torch.int64)),
    "ranks without tokens": ({"ep": 4}, 3, 4, router(3, 4, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_go_to_their_experts_and_back(name: str) -> None:
    """Values and gradients are those of a loop over tokens and experts, in f64."""
    axes, t, e, ids = CASES[name]
    program = mf.compile(layer(axes, t, e, ids.shape[1]), DEVICE)
    values = given(t, e, ids)
    if t:
        check_no_host(program)
    check_everywhere(program, values, by_loop(values, program.host.meshes[0].size))
    assert parse(str(program.host)).types == program.host.types


@pytest.mark.parametrize("name", ["drawn", "one expert takes all", "uneven experts", "dp x ep"])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_rows_over_a_capacity_are_dropped(name: str, most: int) -> None:
    axes, t, e, ids = CASES[name]
    how: dict[str, Any] = {"capacity": most, "drop": True}
    program = mf.compile(layer(axes, t, e, ids.shape[1], **how), DEVICE)
    assert not [*eager(program.host)]
    values = given(t, e, ids)
    check_everywhere(program, values, by_loop(values, program.host.meshes[0].size, most))


def test_a_capacity_bounds_bytes_and_memory() -> None:
    """RowBlocks, and buffers of experts, have room for the capacity, not for all tokens."""
    t, e, ep, k = 64, 8, 4, 2
    bound = t // ep * k

    def sizes(**how: Any) -> tuple[int, int, int]:
        program = mf.compile(layer({"ep": ep}, t, e, k, **how), DEVICE)
        assert [*program.explain().split("bytes reach a rank")] != [program.explain()]
        ways = [c for c in program.communications if c.kind == "AllToAll"]
        rows = max(
            kind.local_shape()[0]
            for kind in program.host.types.values()
            if kind.counts is not None and kind.layout and kind.layout.split_axes(1)
        )
        return len(ways), sum(c.bytes_received(0) for c in ways), rows

    assert sizes() == (4, 4 * (ep - 1) * bound * D * 8, ep * bound)
    room = 5 * e // ep
    assert sizes(capacity=5) == (4, 4 * (ep - 1) * room * D * 8, ep * room)
    program = mf.compile(layer({"ep": ep}, t, e, k, capacity=5), DEVICE)
    moved = 4 * (ep - 1) * room * D * 8
    assert f"{moved} bytes reach a rank, {4 * (ep - 1) * bound // ep * D * 8} are" in (
        program.explain()
    )


def test_over_a_capacity_all_ranks_refuse_at_the_end() -> None:
    """Rows of one part alone are too many; runs around it are right."""
    axes, t, e, _ = CASES["drawn"]
    program = mf.compile(layer(axes, t, e, 2, capacity=2), DEVICE)
    *_, last, free, end = program.host.instructions
    assert (last.op, free.op, end.op) == ("fetch", "free", "return")
    assert [i.op for i, _ in eager(program.host)] == ["fetch"]
    assert "rows of a part for an expert, at their ends: the host waits" in program.explain()
    even = given(t, e, torch.tensor([[0, 1], [2, 3]] * 4))
    skewed = given(t, e, torch.tensor([[0, 1], [2, 3]] * 2 + [[3, 1], [3, 2], [3, 3], [0, 1]]))
    for _ in range(2):
        check_everywhere(program, even, by_loop(even, 2))
        with pytest.raises(CountsError, match="4 rows of part 1 for expert 3, of which there may"):
            mf.simulate(program, skewed)


@pytest.mark.parametrize("capacity", [None, 2])
def test_microbatches(capacity: int | None) -> None:
    """Each counts its own rows; a capacity is that of each, and the host waits in each."""
    fd = layer({"dp": 2, "ep": 2}, 16, 4, 2, capacity=capacity)
    batch = {"x": 0, "ids": 0, "weights": 0}
    program = mf.pipeline(fd, options=DEVICE, microbatches=2, batch=batch)
    values = given(16, 4, torch.tensor([[0, 1], [2, 3], [3, 0], [1, 0]] * 4))
    check_everywhere(program, values, by_loop(values, 4))
    fetches = sum(i.op == "fetch" for i in program.host.walk())
    assert fetches == (capacity is not None)
    assert ("in each microbatch: the host waits there" in program.explain()) == bool(fetches)
    if capacity is not None:
        values[1] = torch.full((16, 2), 1)
        with pytest.raises(CountsError, match="of which there may be 2"):
            mf.simulate(program, values)


class _NoNumbers(TorchDispatchMode):
    """Raises where an operation reads elements, or has as many results as they say."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(x in name for x in ("_local_scalar_dense", "nonzero", "masked_select", "unique")):
            raise AssertionError(f"{name} waits for the device")
        if "repeat_interleave" in name:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """In this context calls go as on a GPU, and none reads an element of a tensor."""
    asked = Counter[str]()

    def refuse(*_: object) -> None:
        raise AssertionError("a number of a tensor is read")

    with monkeypatch.context() as patch, _NoNumbers():
        patch.setattr(groups, "may_look", lambda _: bool(asked.update(["looked"])))
        for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "numpy"):
            patch.setattr(Tensor, name, refuse)
        yield asked


def test_no_number_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ranks compute in a run, forward and backward, is calls that a graph can hold."""
    axes, t, e, ids = CASES["dp x ep"]
    program = mf.compile(layer(axes, t, e, 2, capacity=2, drop=True), mf.Options(counts="device"))
    values = given(t, e, ids)
    wanted = by_loop(values, 4, 2)
    mf.simulate(program, values)  # plans are built
    with no_numbers(monkeypatch) as asked:
        results = mf.simulate(program, values).outputs
    assert asked["looked"]
    for result, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, want)
    host = mf.compile(layer(axes, t, e, 2))
    mf.simulate(host, values)
    with no_numbers(monkeypatch), pytest.raises(AssertionError, match="a number of a tensor"):
        mf.simulate(host, values)


def test_units_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of counted rows are in units with what is beside them, as on a GPU."""
    axes, t, e, ids = CASES["dp x ep"]
    refused = sum(compiled_suite.REFUSED.values())
    monkeypatch.setattr(groups, "may_look", lambda _: False)
    with compiled_suite.launches():
        options = mf.Options(counts="device", compile="always")
        program = mf.compile(layer(axes, t, e, 2, capacity=2, drop=True), options)
        values = given(t, e, ids)
        check_everywhere(program, values, by_loop(values, 4, 2))
    units = [{j.fn for j in i.body} for i in program.host.walk() if i.op == "launch"]
    assert any({"rows_mm", "spread_rows", "mask_rows"} <= unit for unit in units)
    assert sum(compiled_suite.REFUSED.values()) == refused


# -- blocks ----------------------------------------------------------------------------------------

N = torch.tensor([[1, 0, 2], [0, 3, 1], [0, 0, 0]])


@pytest.mark.parametrize("room", [0, 1, 4])
@pytest.mark.parametrize("inner", [(), (0,), (2,), (2, 3)])
def test_blocks_of_rows(room: int, inner: tuple[int, ...]) -> None:
    """Rows that a block has no room for are zeros; all others come back."""
    blocks = RowBlocks(parts=(0, 3), experts=(0, 3), groups=2, width=2)
    x = torch.randn(9, *inner)
    out = torch.full((3, 2, room, *inner), torch.nan)
    packed_rows.unpack(out, x, N, blocks=blocks)
    sizes = [[1, 2], [3, 1], [0, 0]]
    wanted, back, first = torch.zeros_like(out), torch.zeros_like(x), 0
    for p, row in enumerate(sizes):
        for g, size in enumerate(row):
            there = min(size, room)
            wanted[p, g, :there] = x[first : first + there]
            back[first : first + there] = x[first : first + there]
            first += size
    assert torch.equal(out, wanted)
    again = torch.full_like(x, torch.nan)
    packed_rows.pack(again, out, N, blocks=blocks)
    assert torch.equal(again, back)


TEXT = """
host @blocks on mesh(ep=2) {
  input %x: f32[1,4,2] of [2,4,2] (ep=S0)
  input %n: i64[2,3] (ep=R)
  %m: i64[2,3] (ep=R) = clamp(%n, max=2)
  %s: f32[<=4:%m<=2,2] of [2,3,4,2] (ep=S0) = pack_rows(%x, %m)
  %b: f32[1,2,4,2] of [2,2,4,2] (ep=S0) = unpack_rows(%s, %m)
  %c: f32[1,2,4,2] of [2,2,4,2] (ep=S0) = mul(%b, 2.0)
  %r: f32[<=4:%m<=2,2] of [2,3,4,2] (ep=S0) = pack_rows(%c, %m)
  %y: f32[1,4,2] of [2,4,2] (ep=S0) = unpack_rows(%r, %m)
  return %y
}
"""


def test_blocks_by_hand() -> None:
    program = parse(TEXT)
    verify(program)
    assert parse(str(program)) == program
    x, n = torch.randn(2, 4, 2), torch.tensor([[1, 5, 1], [0, 0, 1]])
    (first,), (second,) = mf.simulate(program, [x, n]).per_rank
    assert torch.equal(first, 2 * x[:1])
    assert torch.equal(second[0, :1], 2 * x[1, :1])
    assert not second[0, 1:].any()


#: name -> what is written, what instead, and what the verifier says.
WRONG: dict[str, tuple[str, str, str]] = {
    "no room for a group": (
        "[1,2,4,2] of [2,2,4,2]", "[1,2,3,2] of [2,2,3,2]",
        "4 rows of a part for a group may be there, and it has room for 3"),
    "groups on other ranks": (
        "%b: f32[1,2,4,2] of [2,2,4,2] (ep=S0)", "%b: f32[2,1,4,2] of [2,2,4,2] (ep=S1)",
        "groups are .*, rows"),
    "other columns": (
        "%b: f32[1,2,4,2] of [2,2,4,2]", "%b: f32[1,2,4,3] of [2,2,4,3]", "of the same dtype"),
    "a bound that nothing holds": ("clamp(%n, max=2)", "clamp(%n, max=3)", "has room for 2"),
    "counts that are not cut": ("clamp(%n, max=2)", "add(%n, 0)", "any number of rows"),
    "other bounds of one value": ("%r: f32[<=4:%m<=2,2]", "%r: f32[<=3:%m<=1,2]", "has room for 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_blocks_are_refused(name: str) -> None:
    written, instead, says = WRONG[name]
    assert written in TEXT
    with pytest.raises(ProgramError, match=says):
        verify(parse(TEXT.replace(written, instead)))


def test_rows_of_other_bounds_are_not_added() -> None:
    text = TEXT.replace(
        "  %y:",
        "  %p: f32[<=4:%m<=3,2] of [2,3,4,2] (ep=S0) = pack_rows(%x, %m)\n"
        "  %q: f32[<=4:%m<=2,2] of [2,3,4,2] (ep=S0) = add(%r, %p)\n  %y:",
    )
    with pytest.raises(ProgramError, match="rows with other bounds"):
        verify(parse(text))


def test_wrong_options() -> None:
    with pytest.raises(ProgramError, match="it is one of host, device"):
        mf.Options(counts="gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("microbatches", [1, 12])
def test_counts_that_have_not_arrived_are_not_read(microbatches: int) -> None:
    """Rows are packed by counts in memory: behind their wait, and where its stream has waited."""
    fd = layer({"ep": 2}, 24, 3, 2)
    batch, options = {"x": 0, "ids": 0, "weights": 0}, mf.Options(counts="device")
    how: dict[str, Any] = {"microbatches": microbatches, "batch": batch, "options": options}
    program = mf.pipeline(fd, **how) if microbatches > 1 else mf.compile(fd, options)
    lines = str(program).splitlines()
    at = next(n for n, x in enumerate(lines) if "wait %c0" in x)
    packed = next(n for n, x in enumerate(lines) if n > at and "= pack_rows" in x)
    moved = [*lines[:at], *lines[at + 1 : packed + 1], lines[at], *lines[packed + 1 :]]
    verify(parse("\n".join(lines)))
    with pytest.raises(mf.ProgramError, match=r"pack_rows -> %?t\S* reads %n\S*counted"):
        verify(parse("\n".join(moved)))
