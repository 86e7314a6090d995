"""Ranks of which some read their lowered program from a file, and some lower it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mdfuse as mf
from mdfuse.compiled import program_files


@pytest.mark.world(2)
def test_ranks_with_a_file_and_ranks_without_one(
    comm: mf.Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / str(comm.rank)
    monkeypatch.setattr(program_files, "FEWEST", 0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    x = torch.arange(8.0).reshape(4, 2)
    for _ in range(2):
        mf.debug.FusionCache.reset()
        with mf.FusionDefinition("gather") as fd:
            mesh = mf.DeviceMesh.arange(dp=2)
            part = fd.define_tensor([4, 2], mesh=mesh, layout={"dp": mf.Shard(0)})
            fd.add_output(fd.ops.set(part * 2).on(mesh, {}))
        (y,) = mf.compile(fd).run(x.chunk(2)[comm.rank].to(comm.device))
        torch.testing.assert_close(y.cpu(), x * 2)
        (file,) = (folder / "mdfuse").glob("*.program")
        if comm.rank:
            file.unlink()
