"""DTensors on real ranks: what torch distributed goes in, and what comes out torch gathers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.drawn import drawn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard
from mdfuse.runtime import communicator

R, P = TorchReplicate(), TorchPartial()
S0, S1 = TorchShard(0), TorchShard(1)


@pytest.fixture(scope="module", autouse=True)
def group(comm: mf.Communicator) -> Iterator[None]:
    """A default process group of torch's beside the communicator that all tests share."""
    dist.init_process_group(
        "nccl" if comm.device.type == "cuda" else "gloo",
        store=dist.PrefixStore("dtensors", comm.store),
        rank=comm.rank,
        world_size=comm.size,
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def line(comm: mf.Communicator) -> TorchMesh:
    return init_device_mesh(comm.device.type, (comm.size,), mesh_dim_names=("tp",))


@pytest.fixture(scope="module")
def grid(comm: mf.Communicator) -> TorchMesh:
    return init_device_mesh(comm.device.type, (2, comm.size // 2), mesh_dim_names=("dp", "tp"))


def spread(whole: Tensor, mesh: TorchMesh, *placements: Any) -> DTensor:
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements)


def check(y: DTensor, want: Tensor, mesh: TorchMesh, *placements: Any) -> None:
    assert type(y) is DTensor
    assert y.device_mesh is mesh
    assert y.placements == placements
    assert (y.shape, y.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(y.full_tensor().cpu(), want)


# -- values --------------------------------------------------------------------------------------


def check_uneven(rows: int, line: TorchMesh) -> None:
    mesh = DeviceMesh(line)
    with mf.FusionDefinition("uneven") as fd:
        x = fd.define_tensor([rows, 3], mesh=line, layout={"tp": Shard(0)})
        y = fd.ops.exp(x)
        fd.add_output(y)
        fd.add_output(fd.ops.set(y).on(mesh, {"tp": Shard(1)}))
        fd.add_output(fd.ops.set(fd.ops.sum(x, dims=[0])).on(mesh, {}))
    program = mf.compile(fd)
    for seed in range(3):
        whole = drawn(rows, 3, seed=seed)
        outputs = program.run(spread(whole, line, S0))
        check(outputs[0], whole.exp(), line, S0)
        check(outputs[1], whole.exp(), line, S1)
        check(outputs[2], whole.sum(0), line, R)
        assert outputs[0].stride() == (3, 1)
        assert outputs[0].to_local().shape == spread(whole, line, S0).to_local().shape
    assert program.plans.info()[:2] == (2, 1)


@pytest.mark.world(4)
@pytest.mark.parametrize("rows", [5, 6, 7, 1])
def test_uneven_parts_of_four(rows: int, line: TorchMesh) -> None:
    check_uneven(rows, line)


@pytest.mark.world(2)
@pytest.mark.parametrize("rows", [5, 1])
def test_uneven_parts_of_two(rows: int, line: TorchMesh) -> None:
    check_uneven(rows, line)


def check_mlp(grid: TorchMesh) -> None:
    with mf.FusionDefinition("mlp") as fd:
        x = fd.define_tensor([7, 8], mesh=grid, layout={"dp": Shard(0)})
        w1 = fd.define_tensor([8, 12], mesh=grid, layout={"tp": Shard(1)})
        w2 = fd.define_tensor([12, 8], mesh=grid, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(fd.ops.tanh(x @ w1) @ w2).on(grid, {"dp": Shard(0)}))
    x, w1, w2 = drawn(7, 8), drawn(8, 12, seed=1), drawn(12, 8, seed=2)
    placed = spread(x, grid, S0, R), spread(w1, grid, R, S1), spread(w2, grid, R, S0)
    (y,) = mf.compile(fd).run(*placed)
    check(y, torch.tanh(x @ w1) @ w2, grid, S0, R)
    # torch goes on with it
    torch.testing.assert_close(
        (y * 2).sum().full_tensor().cpu(), (torch.tanh(x @ w1) @ w2).sum() * 2
    )


@pytest.mark.world(4)
def test_dp_and_tp(grid: TorchMesh) -> None:
    check_mlp(grid)


@pytest.mark.world(2)
def test_dp_alone(grid: TorchMesh) -> None:
    """An axis of one rank: torch may say Shard along it, which splits nothing."""
    check_mlp(grid)
    with mf.FusionDefinition("double") as fd:
        fd.add_output(fd.define_tensor([4, 4], mesh=grid, layout={"dp": Shard(0)}) * 2.0)
    whole = drawn(4, 4)
    check(mf.compile(fd).run(spread(whole, grid, S0, S1))[0], whole * 2, grid, S0, R)


@pytest.mark.world(4)
@pytest.mark.parametrize("rows", [8, 5])
def test_both_axes_on_one_dim(rows: int, grid: TorchMesh) -> None:
    mesh = DeviceMesh(grid)
    with mf.FusionDefinition("both") as fd:
        x = fd.define_tensor([rows, 4], mesh=mesh, layout={"dp": Shard(0), "tp": Shard(0)})
        fd.add_output(fd.ops.set(x * 2.0).on(mesh, {"tp": Shard(0)}))
        fd.add_output(fd.ops.set(x).on(mesh, {"dp": Shard(1), "tp": Shard(1)}))
    whole = drawn(rows, 4)
    y, z = mf.compile(fd).run(spread(whole, grid, S0, S0))
    check(y, whole * 2, grid, R, S0)
    check(z, whole, grid, S1, S1)


@pytest.mark.world(4)
def test_parts_with_placements_by_axis_name(comm: mf.Communicator, grid: TorchMesh) -> None:
    """torch gathers the whole of what each rank cut, where parts are uneven, too."""
    whole, (y, x) = drawn(5, 3), divmod(comm.rank, 2)
    for placed, part, placements in (
        ({"tp": Shard(0)}, whole.chunk(2)[x], (R, S0)),
        ({"tp": Shard(0), "dp": Shard(1)}, whole.chunk(2, 1)[y].chunk(2)[x], (S1, S0)),
        ({"dp": Partial()}, whole * (0.25 + 0.5 * y), (P, R)),
    ):
        local = part.clone().to(comm.device)
        check(mf.to_dtensor(local, grid, placed, (5, 3)), whole, grid, *placements)


@pytest.mark.world(4)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_partial_values(op: str, comm: mf.Communicator, line: TorchMesh) -> None:
    with mf.FusionDefinition("partial") as fd:
        x = fd.define_tensor([6, 2], mesh=line, layout={"tp": Partial(op)})
        fd.add_output((x + x).on(line, {"tp": Partial(op)}))
        fd.add_output(fd.ops.set(x).on(line, {"tp": Shard(0)}))
    parts = torch.stack([drawn(6, 2, seed=r) for r in range(4)])
    want = parts.sum(0) if op == "sum" else parts.amax(0)
    mine = parts[comm.rank].to(comm.device)
    x = DTensor.from_local(mine, line, [TorchPartial(op)], run_check=False)
    y, z = mf.compile(fd).run(x)
    check(y, want * 2, line, TorchPartial(op))
    check(z, want, line, S0)


@pytest.mark.world(4)
def test_memory_order(line: TorchMesh) -> None:
    """A transposed DTensor: the strides of the whole are those that torch gives on one device."""
    with mf.FusionDefinition("turned") as fd:
        x = fd.define_tensor([7, 6], mesh=line, layout={"tp": Shard(0)}, stride_order=(0, 1))
        fd.add_output(x * 2.0)
        fd.add_output(fd.ops.transpose(x, 0, 1))
    whole = drawn(6, 7).t()
    x = spread(whole.t(), line, S1).t()
    assert x.placements == (S0,)
    y, t = mf.compile(fd).run(x)
    check(y, whole * 2, line, S0)
    check(t, whole.t(), line, S1)
    assert (y.stride(), t.stride()) == ((whole * 2).stride(), whole.t().stride())


@pytest.mark.world(4)
def test_buffers(line: TorchMesh) -> None:
    with mf.FusionDefinition("into") as fd:
        x = fd.define_tensor([5, 2], mesh=line, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x * 2.0).on(line, {}))
    whole, buffer = drawn(5, 2), spread(torch.zeros(5, 2), line, R)
    (y,) = mf.compile(fd).run(spread(whole, line, S0), out=[buffer])
    assert y is buffer
    torch.testing.assert_close(buffer.to_local().cpu(), whole * 2)


@pytest.mark.world(4)
def test_a_dtensor_that_is_still_under_way(line: TorchMesh) -> None:
    whole = drawn(8, 2)
    with mf.FusionDefinition("whole") as fd:
        fd.add_output(fd.define_tensor([8, 2], mesh=line) * 2.0)
    x = spread(whole, line, S0).redistribute(line, [R], async_op=True)
    check(mf.compile(fd).run(x)[0], whole * 2, line, R)


@pytest.mark.world(4)
def test_symbolic_extents_follow_from_dtensors(line: TorchMesh) -> None:
    with mf.FusionDefinition("grow") as fd:
        x = fd.define_tensor([-1, 2], mesh=line, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x * 2.0).on(line, {}))
    program = mf.compile(fd)
    for rows in (8, 5, 8, 7):
        whole = drawn(rows, 2)
        check(program.run(spread(whole, line, S0))[0], whole * 2, line, R)


@pytest.mark.world(4)
def test_meshes_of_some_ranks(comm: mf.Communicator) -> None:
    """Two stages; ranks outside of a mesh have empty DTensors there."""
    kind = comm.device.type
    first = TorchMesh(kind, [1, 3], mesh_dim_names=("tp",))
    second = TorchMesh(kind, [0, 2], mesh_dim_names=("tp",))
    with mf.FusionDefinition("stages") as fd:
        x = fd.define_tensor([4, 2], mesh=first, layout={"tp": Shard(0)})
        b = fd.define_tensor([2], mesh=second)
        moved = fd.ops.set(x).on(second, {"tp": Shard(1)})
        fd.add_output(moved + fd.ops.set(b).on(second, {"tp": Shard(0)}))
        fd.add_output(x * 3.0)
    whole, bias = drawn(4, 2), drawn(2, seed=1)
    x, b = spread(whole, first, S0), spread(bias, second, R)
    y, z = mf.compile(fd).run(x, b)
    assert (y.device_mesh, z.device_mesh) == (second, first)
    assert (y.placements, z.placements) == ((S1,), (S0,))
    assert y.shape == z.shape == (4, 2)
    at = comm.rank // 2
    if comm.rank in (0, 2):
        torch.testing.assert_close(y.to_local().cpu(), (whole + bias)[:, at : at + 1])
        assert z.to_local().numel() == 0
    else:
        torch.testing.assert_close(z.to_local().cpu(), whole[2 * at : 2 * at + 2] * 3)
        assert y.to_local().numel() == 0


# -- errors --------------------------------------------------------------------------------------


def gather(line: TorchMesh) -> mf.Program:
    with mf.FusionDefinition("gather") as fd:
        x = fd.define_tensor([8, 4], mesh=line, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x).on(line, {}))
    return mf.compile(fd)


def wrong(what: str, line: TorchMesh, grid: TorchMesh) -> DTensor:
    whole = drawn(8, 4)
    match what:
        case "mesh":
            return spread(whole, grid, S0, R)
        case "placement":
            return spread(whole, line, S1)
        case "shape":
            return spread(drawn(12, 4), line, S0)
    return spread(whole.double(), line, S0)


@pytest.mark.world(4)
@pytest.mark.parametrize("what", ["mesh", "placement", "shape", "dtype"])
def test_all_ranks_refuse_what_does_not_fit(what: str, line: TorchMesh, grid: TorchMesh) -> None:
    program = gather(line)
    with pytest.raises(mf.ProgramError, match="%x "):
        program.run(wrong(what, line, grid))
    whole = drawn(8, 4)
    check(program.run(spread(whole, line, S0))[0], whole, line, R)


@pytest.mark.world(4)
@pytest.mark.parametrize("what", ["placement", "shape"])
def test_one_rank_has_what_does_not_fit(
    what: str, comm: mf.Communicator, line: TorchMesh, grid: TorchMesh
) -> None:
    good, bad = spread(drawn(8, 4), line, S0), wrong(what, line, grid)
    with pytest.raises(mf.ProgramError) as caught:
        gather(line).run(bad if comm.rank == 2 else good)
    assert ("%x is a DTensor" in str(caught.value)) and (
        comm.rank == 2 or "rank 2 refused to run @gather" in str(caught.value)
    )


# -- traced functions, and a group that is there before ------------------------------------------


def check_traced(line: TorchMesh) -> None:
    mesh = DeviceMesh(line)

    @mf.fusion
    def layer(x: Any, w: Any, n: float) -> Any:
        y = mf.ops.set(x @ w).on(mesh, {"tp": Shard(0)}) * n
        return y, mf.ops.set(mf.ops.sum(y, dims=[0])).on(mesh, {})

    for seed in range(2):
        x, w = drawn(5, 8, seed=seed), drawn(8, 4, seed=9)
        y, total = layer(spread(x, line, S1), spread(w, line, S0), n=0.5)
        check(y, x @ w / 2, line, S0)
        check(total, (x @ w / 2).sum(0), line, R)


@pytest.mark.world(4)
def test_a_traced_function_of_four(line: TorchMesh) -> None:
    check_traced(line)


@pytest.mark.world(2)
def test_a_traced_function_of_two(line: TorchMesh) -> None:
    check_traced(line)


@pytest.mark.world(4)
def test_the_default_group_is_used_and_left(
    line: TorchMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A communicator of its own on top of the group; closed, it leaves DTensors alone."""
    monkeypatch.setattr(communicator, "_live", None)
    own = mf.init()
    assert own.launch.name == "default group"
    whole = drawn(8, 4)
    (y,) = gather(line).run(spread(whole, line, S0))
    own.close()
    check(y, whole, line, R)
    check(y.redistribute(line, [S1]) + 1.0, whole + 1, line, S1)


# -- under torch's autograd ----------------------------------------------------------------------


@mf.fusion
def mlp(x: Any, w: Any, v: Any) -> Any:
    return torch.tanh(x @ w) @ v


@pytest.mark.world(4)
def test_gradients_through_a_function(line: TorchMesh, grid: TorchMesh) -> None:
    """Gradients lie as what they are of, also where the cotangent comes otherwise."""
    f = mf.differentiable(mlp)
    wholes = [drawn(6, 4, seed=1), drawn(4, 8, seed=2), drawn(8, 5, seed=3)]
    leaves = [x.double().requires_grad_() for x in wholes]
    want = torch.tanh(leaves[0] @ leaves[1]) @ leaves[2]
    ct = drawn(6, 5, seed=4)
    torch.autograd.backward(want, ct.double())
    cases: list[tuple[TorchMesh, list[tuple[Any, ...]], tuple[Any, ...]]] = [
        (line, [(R,), (S1,), (S0,)], (R,)),
        (line, [(S0,), (R,), (R,)], (S0,)),
        (line, [(S0,), (S0,), (S0,)], (R,)),
        (grid, [(S0, R), (R, S1), (R, S0)], (S0, R)),
        (grid, [(S0, R), (S0, S1), (S0, S0)], (S1, S0)),
    ]
    for mesh, placements, back in cases:
        given = [spread(x, mesh, *p) for x, p in zip(wholes, placements, strict=True)]
        for x in given:
            x.requires_grad_()
        y = f(*given)
        torch.testing.assert_close(y.full_tensor().cpu().double(), want, rtol=1e-4, atol=1e-5)
        torch.autograd.backward(y, spread(ct, mesh, *back))
        for x, leaf, p in zip(given, leaves, placements, strict=True):
            assert isinstance(x.grad, DTensor) and x.grad.placements == p
            got = x.grad.full_tensor().cpu().double()
            torch.testing.assert_close(got, leaf.grad, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            assert not f(*given).requires_grad


@pytest.mark.world(2)
def test_gradients_beside_dtensors_of_torch(line: TorchMesh) -> None:
    """A program between operations of torch's on DTensors, some of which need no gradient."""
    x, w, v = (spread(drawn(8, 8, seed=n), line, p) for n, p in enumerate((TorchShard(0), R, R), 1))
    w.requires_grad_()
    v.requires_grad_()
    found = []
    for f in (mf.differentiable(mlp), mlp.function):
        loss = (f(x * 2.0, w, v) * x).sum()
        found.append([loss, *torch.autograd.grad(loss, (w, v))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor(), rtol=1e-4, atol=1e-4)


@pytest.mark.world(4)
def test_gradients_of_local_tensors(comm: mf.Communicator) -> None:
    """Each rank gets the whole gradient of a replicated weight, and its own part of uneven rows."""
    mesh = DeviceMesh.arange(dp=comm.size)
    with mf.FusionDefinition("local") as fd:
        x = fd.define_tensor([7, 4], mesh=mesh, layout={"dp": Shard(0)})
        w = fd.define_tensor([4, 3], mesh=mesh)
        fd.add_output((x @ w).tanh())
    f = mf.differentiable(fd)
    whole, weight, ct = drawn(7, 4, seed=1), drawn(4, 3, seed=2), drawn(7, 3, seed=3)
    rows = mf.Layout(mesh, {"dp": Shard(0)})
    x, ct_here = (
        mf.shard_tensor(t, rows, rank=comm.rank).clone().to(comm.device) for t in (whole, ct)
    )
    x.requires_grad_()
    w = weight.clone().to(comm.device).requires_grad_()
    for _ in range(3):
        (y,) = f(x, w)
        x.grad = w.grad = None
        y.backward(ct_here)
    leaves = [t.double().requires_grad_() for t in (whole, weight)]
    want = (leaves[0] @ leaves[1]).tanh()
    want.backward(ct.double())
    assert x.grad is not None and w.grad is not None and leaves[0].grad is not None
    part = mf.shard_tensor(leaves[0].grad, rows, rank=comm.rank)
    torch.testing.assert_close(x.grad.cpu().double(), part, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad.cpu().double(), leaves[1].grad, rtol=1e-4, atol=1e-5)
