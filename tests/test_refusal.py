"""Wrong input in a later run, on one rank alone: it ends, and the others learn why at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Ranks write down what they met; the guilty one goes, as a process with an uncaught error does.
SCRIPT = """
import os
import time
import torch
import mdfuse as mf

comm = mf.init()
mesh = mf.DeviceMesh([0, 1, 2])
with mf.FusionDefinition("gather") as fd:
    x = fd.define_tensor([6], mesh=mesh, layout={"x": mf.Shard(0)})
    fd.add_output(fd.ops.set(x).on(mesh, {}))
program = mf.compile(fd)
program.run(torch.ones(2))
try:
    program.run(torch.ones(5 if comm.rank == 1 else 2))
    said = "fine"
except mf.MdfuseError as error:
    said = f"{type(error).__name__} {error}"
with open(f"said.{comm.rank}", "w") as file:
    file.write(said)
others = [f"said.{r}" for r in range(3) if comm.rank != 1]
until = time.monotonic() + 60
while not all(map(os.path.exists, others)) and time.monotonic() < until:
    time.sleep(0.01)  # rank 0 keeps the store in which the words are
os._exit(1)
"""


def test_one_rank_refuses_a_later_run(tmp_path: Path) -> None:
    """Far sooner than the timeout of 600 s every rank has the words of the guilty one."""
    (tmp_path / "job.py").write_text(SCRIPT, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "job.py"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": "lo",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "3",
            },
        )
        for rank in range(3)
    ]
    assert [p.wait(timeout=100) for p in ranks] == [1, 1, 1]
    for rank in range(3):
        said = (tmp_path / f"said.{rank}").read_text(encoding="utf-8")
        assert said.startswith("ProgramError")
        assert "%x has shape (5,) on rank 1, expected (2,)" in said
