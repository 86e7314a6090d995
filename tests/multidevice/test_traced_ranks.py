"""Traced runs on real ranks: one file per rank, by one clock; all refuse where one cannot write."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.seeing.events import Event
from mdfuse.seeing.traces import read

pytestmark = pytest.mark.world(2)

_folders = count()


@pytest.fixture
def folder(comm: mf.Communicator) -> Iterator[Path]:
    """A folder that all ranks know, and that is there until all are done."""
    key = f"folder of a traced test/{next(_folders)}"
    if comm.rank == 0:
        comm.store.set(key, tempfile.mkdtemp())
    found = Path(comm.store.get(key).decode())
    yield found
    comm.all_ok(None)
    if comm.rank == 0:
        shutil.rmtree(found)


def handed_over() -> mf.FusionDefinition:
    """Rank 0 doubles and sends, rank 1 adds; then both sum up."""
    first, second, both = DeviceMesh([0]), DeviceMesh([1]), DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("handed_over") as fd:
        x = fd.define_tensor([4], mesh=first)
        z = fd.define_tensor([2, 4], mesh=both, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x * 2).on(second) + 1)
        fd.add_output(fd.ops.set(fd.ops.sum(z, dim=0)).on(both, {}))
    return fd


def test_posts_and_waits_of_both_ranks(folder: Path, comm: mf.Communicator) -> None:
    program = mf.compile(handed_over(), Options(trace=str(folder)))
    x = torch.arange(4.0, device=comm.device) if comm.rank == 0 else None
    z = torch.full((1, 4), comm.rank + 1.0, device=comm.device)
    for _ in range(3):
        y, total = program.run(x, z)
        assert comm.rank == 0 or y.tolist() == [1, 3, 5, 7]
        assert total.tolist() == [3, 3, 3, 3]
    comm.all_ok(None)
    events = read(folder)
    for rank in (0, 1):
        names = [e.name for e in events if e.rank == rank and e.detail != "run 9"]
        assert names.count("post SendRecv") == names.count("wait SendRecv") == 3
        assert names.count("post Allreduce[sum]") == names.count("wait Allreduce[sum]") == 3
    flows: dict[int, list[Event]] = defaultdict(list)
    for e in events:
        if e.flow is not None:
            flows[e.flow].append(e)
    assert len(flows) == 6
    for row in flows.values():
        assert sorted((e.rank, e.part) for e in row) == [
            (0, "post"), (0, "wait"), (1, "post"), (1, "wait"),
        ]  # fmt: skip
        posted = max(e.start_ns for e in row if e.part == "post" and e.rank == 0)
        there = max(e.stop_ns for e in row if e.part == "wait" and e.rank == 1)
        assert posted < there + 10**8, "by one clock, data is there after it was sent"


def test_all_refuse_where_one_cannot_write(folder: Path, comm: mf.Communicator) -> None:
    """A file stands where rank 1 would write; the program runs on both, or on none."""
    with mf.FusionDefinition("total") as fd:
        mesh = DeviceMesh.arange(tp=2)
        x = fd.define_tensor([2], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(fd.ops.sum(x)).on(mesh, {}))
    if comm.rank == 1:
        (folder / "rank1.jsonl").mkdir()
    program = mf.compile(fd, Options(trace=str(folder)))
    with pytest.raises(mf.ProgramError) as refused:
        program.run(torch.ones(1, device=comm.device))
    assert "rank 1 cannot write a trace into" in str(refused.value)
    again = mf.compile(fd, Options())
    assert again.run(torch.ones(1, device=comm.device))[0].item() == 2


def test_ranks_agree_on_tracing(folder: Path, comm: mf.Communicator) -> None:
    with mf.FusionDefinition("apart") as fd:
        mesh = DeviceMesh.arange(tp=2)
        fd.add_output(fd.define_tensor([2], mesh=mesh, layout={"tp": Shard(0)}) * 3)
    program = mf.compile(fd, Options(trace=str(folder) if comm.rank == 0 else None))
    with pytest.raises(mf.ProgramError, match="trace="):
        program.run(torch.ones(1, device=comm.device))


def test_clocks_are_aligned_again_at_the_end(folder: Path, comm: mf.Communicator) -> None:
    """What `close` calls; the communicator of the tests stays open."""
    program = mf.compile(handed_over(), Options(trace=str(folder)))
    x = torch.arange(4.0, device=comm.device) if comm.rank == 0 else None
    program.run(x, torch.ones((1, 4), device=comm.device))
    comm.at_end["clocks"]()
    comm.all_ok(None)
    for rank in (0, 1):
        lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
        clocks = [found for line in lines if "clock" in (found := json.loads(line))]
        assert len(clocks) == 2 and clocks[0]["at"] < clocks[1]["at"]
        assert all(0 <= found["error"] < 10**9 for found in clocks)
