"""Saves in threads of real ranks: all raise in one call, and nobody waits for a disk."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.full_disk import failing, shared_folder

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.compiled import newest
from mdfuse.frontend.importing import save as saving


def counter(comm: mf.Communicator, rows: int = 7) -> mf.Step:
    """A step that counts on all ranks, and adds the parts up."""
    mesh, split = DeviceMesh.arange(dp=comm.size), {"dp": Shard(0)}
    with mf.FusionDefinition("count") as fd:
        n = fd.define_tensor([rows], mesh=mesh, layout=split, name="n")
        fd.add_output(fd.ops.set(n.sum()).on(mesh, {}))
        fd.add_output(n + 1, reuse=n)
    part = mf.shard_tensor(torch.zeros(rows), mesh, split, rank=comm.rank)
    return mf.Step(mf.compile(fd), {"n": part.clone().to(comm.device)})


@pytest.mark.parametrize("rows", [7, 1])
@pytest.mark.world(2)
def test_steps_go_on_while_one_disk_is_slow(
    comm: mf.Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Also with fewer rows than ranks; and of two steps that are saved at once."""
    folder, write = shared_folder(comm, tmp_path, f"background.slow.{rows}"), saving.write_parts

    def slow(*arguments: Any) -> None:
        time.sleep(0.5)
        write(*arguments)

    if comm.rank == 1:
        monkeypatch.setattr(saving, "write_parts", slow)
    step, other = counter(comm, rows), counter(comm, rows)
    step()
    for n, saved in enumerate((step, other)):
        saved.save(folder / f"{'ab'[n]}" / "step-1", portable=True, wait=False, keep=1)
    began = time.monotonic()
    total = [float(step()) for _ in range(4)]
    assert total == [rows * n for n in (1, 2, 3, 4)]
    assert time.monotonic() - began < 0.4 or newest.newest(folder / "a") is None
    step.save(folder / "a" / "step-5", portable=True, wait=False, keep=1)
    step.saved()
    other.saved()
    assert sorted(x.name for x in (folder / "a").iterdir()) == ["newest", "step-5"]
    step.load(folder / "a" / "newest")
    assert float(step()) == 5 * rows
    step.load(folder / "b" / "newest")
    assert float(step()) == 0


@pytest.mark.world(2)
@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("moment", ["write", "open", "fsync"])
def test_a_full_disk_is_an_error_of_all_in_one_call(
    comm: mf.Communicator, tmp_path: Path, portable: bool, moment: str
) -> None:
    """Soon; however far each rank has come, all raise in the same call, and all goes on."""
    folder = shared_folder(comm, tmp_path, f"background.full.{moment}.{portable}")
    step = counter(comm)
    step()
    for slow in (0, 1):
        fault = failing(moment) if comm.rank == 1 else nullcontext()
        began, calls = time.monotonic(), [0]

        def train(pause: float, calls: list[int]) -> None:
            while True:
                time.sleep(pause)
                step()
                calls[0] += 1

        with fault:
            step.save(folder / f"new-{slow}", portable=portable, wait=False)
            with pytest.raises(mf.ProgramError, match="cannot be written") as error:
                train(0.003 if comm.rank == slow else 0, calls)
        assert time.monotonic() - began < 10
        said = comm.all_ok(str(calls[0]))
        assert set(said) == {str(calls[0])}
        assert error.value.follows == (comm.rank != 1)
        step()
        step.save(folder / f"new-{slow}", portable=portable, wait=False)
        step.saved()
        step.load(folder / f"new-{slow}")
