"""The null backend: one process stands for any rank; shapes are right, values mean nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.bare import bare_environment

import mdfuse as mf
from mdfuse import BackendError, DeviceMesh, Layout, Options, Partial, Replicate, Shard

RING = DeviceMesh.arange(tp=8)
THREE = DeviceMesh([0, 5, 2])
FIRST = DeviceMesh([0])
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MDFUSE_BACKEND")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, unjoined: None) -> None:
    """No launcher and no communicator."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


RESHARDS = {
    "Allgather": (Layout(RING, {"tp": Shard(0)}), Layout(RING, {})),
    "ReduceScatter": (Layout(RING, {"tp": Partial("sum")}), Layout(RING, {"tp": Shard(0)})),
    "Allreduce": (Layout(RING, {"tp": Partial("sum")}), Layout(RING, {})),
    "AllToAll": (Layout(RING, {"tp": Shard(0)}), Layout(RING, {"tp": Shard(1)})),
    "Broadcast": (Layout(FIRST, {}), Layout(RING, {})),
    "Scatter": (Layout(FIRST, {}), Layout(RING, {"tp": Shard(0)})),
    "Gather": (Layout(RING, {"tp": Shard(0)}), Layout(FIRST, {})),
    "Reduce": (Layout(RING, {"tp": Partial("sum")}), Layout(FIRST, {})),
    "Exchange": (Layout(RING, {"tp": Shard(0)}), Layout(THREE, {"x": Shard(0)})),
}


def local_shape(shape: tuple[int, ...], layout: Layout, rank: int) -> list[int] | None:
    """The shape of a rank's part; None outside the mesh."""
    return None if layout.mesh.coordinate(rank) is None else list(layout.local_shape(shape, rank))


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("shape", [(32, 16), (11, 9)], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", RESHARDS)
def test_every_kind_runs_in_one_process(kind: str, shape: tuple[int, ...], rank: int) -> None:
    before, after = RESHARDS[kind]
    with mf.FusionDefinition("reshard") as fd:
        x = fd.define_tensor(shape, torch.float32, before)
        fd.add_output(fd.ops.set(x).on(after))
    program = mf.compile(fd)
    if shape == (32, 16):
        assert kind in [c.kind for c in program.communications]
    mf.init(backend="null", rank=rank, size=8)
    mine, want = local_shape(shape, before, rank), local_shape(shape, after, rank)
    for _ in range(2):
        (got,) = program.run(None if mine is None else torch.zeros(mine))
        assert (None if got is None else list(got.shape)) == want


@pytest.mark.parametrize("rank", [0, 5])
def test_a_program_of_several_steps(rank: int) -> None:
    rows = {"tp": Shard(0)}
    with mf.FusionDefinition("chain") as fd:
        x = fd.define_tensor([32, 16], mesh=RING, layout=rows)
        w = fd.define_tensor([16, 16], mesh=RING)
        columns = fd.define_tensor([16, 24], mesh=RING, layout={"tp": Shard(1)})
        whole = fd.ops.set(x @ w).on(RING, {"tp": Replicate()})
        hidden = fd.ops.set(whole @ columns).on(RING, rows)
        fd.add_output(hidden)
        fd.add_output(fd.ops.sum(hidden, dims=[0]))
    comm = mf.init(backend="null", rank=rank, size=8)
    assert (comm.rank, comm.size, comm.backend) == (rank, 8, "null")
    outputs = mf.compile(fd).run(torch.zeros(4, 16), torch.zeros(16, 16), torch.zeros(16, 3))
    assert list(outputs[0].shape) == [4, 24]
    assert not dist.is_initialized()


def test_an_ordinary_init_follows_a_close() -> None:
    comm = mf.init(backend="null", rank=5, size=8)
    comm.barrier()
    assert comm.all_ok("text") == ("text",)
    comm.close()
    again = mf.init(backend="gloo")
    assert (again.rank, again.size, again.backend) == (0, 1, "gloo")


def test_launcher_variables_count_and_nobody_is_contacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("MDFUSE_BACKEND", "null")
    comm = mf.init()
    assert (comm.rank, comm.size, comm.backend) == (5, 8, "null")
    assert mf.init(rank=5) is comm
    comm.close()
    comm = mf.init(Options(backend="null"), rank=2)
    assert (comm.rank, comm.size) == (2, 8)
    comm.close()
    comm = mf.init(backend="null", size=3)
    assert (comm.rank, comm.size) == (0, 3)


def test_a_rank_of_one_without_launcher() -> None:
    comm = mf.init(backend="null")
    assert (comm.rank, comm.size) == (0, 1)


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("given", [{"rank": 1}, {"size": 2}, {"device": "cpu"}])
def test_other_backends_find_out_by_themselves(backend: str, given: dict[str, object]) -> None:
    with pytest.raises(BackendError, match="only backend 'null'"):
        mf.init(backend=backend, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "size"), [(8, 8), (-1, 8), (1, None), (0, 0)])
def test_a_rank_fits_its_world(rank: int, size: int | None) -> None:
    with pytest.raises(BackendError, match="does not fit size"):
        mf.init(backend="null", rank=rank, size=size)


def test_a_process_stands_for_one_rank() -> None:
    comm = mf.init(backend="null", rank=1, size=8)
    assert mf.init(backend="null", rank=1, device="cpu") is comm
    with pytest.raises(BackendError, match="stands for rank 1 of 8"):
        mf.init(backend="null", rank=2)


def test_devices() -> None:
    with pytest.raises(BackendError, match="cannot be used on meta"):
        mf.init(backend="null", device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="no CUDA device"):
            mf.init(backend="null", device="cuda")


def test_doctor_lists_it_and_auto_never_means_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mdfuse", "doctor"],
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [x for x in done.stdout.splitlines() if x.split()[:1] == ["null"]]
    assert mf.init().backend != "null"
