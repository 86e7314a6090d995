"""A rank refuses a later run, or an error ends one there: all learn why at once, none runs on.

What the guilty rank posts next would meet what the others posted in the run that it left.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from helpers.shown_reports import not_said, shown

from mdfuse import BackendError
from mdfuse.runtime.agreement.abort_protocol import Refusals
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.torch_private import HashStore

ROOT = Path(__file__).resolve().parents[3]

#: Each rank writes down what it met: in the run that rank 1 refuses, in the next one, and after all
#: have joined again. Then the same of a run that Ctrl-C ends on rank 1, between two posts, and
#: what happens where rank 1 has no memory for the plan of a first run.
SCRIPT = """
import os
import time
import torch
import mdfuse as mf
from mdfuse import evaluator

mf.init()
mesh = mf.DeviceMesh([0, 1, 2])
with mf.FusionDefinition("gather") as fd:
    x = fd.define_tensor([6], mesh=mesh, layout={"x": mf.Shard(0)})
    fd.add_output(fd.ops.set(x).on(mesh, {}))
program = mf.compile(fd)
rank = mf.init().rank
program.run(torch.ones(2))
said = []


def interrupted(x):
    if (x == 7.0).any():
        raise KeyboardInterrupt
    return x * 2


double = mf.register_op("double", interrupted, "b -> b", meta=torch.empty_like)
with mf.FusionDefinition("doubled") as fd:
    x = fd.define_tensor([6], mesh=mesh, layout={"x": mf.Shard(0)})
    whole = fd.ops.set(x).on(mesh, {})
    own = fd.ops.set(whole * 1.0).on(mesh, {"x": mf.Shard(0)})
    fd.add_output(fd.ops.set(double(own)).on(mesh, {}))
doubled = mf.compile(fd)


def run(rows, value, program=program):
    try:
        (got,) = program.run(torch.full((rows,), value))
        said.append(str(got.tolist()))
    except (mf.MdfuseError, MemoryError, KeyboardInterrupt) as error:
        said.append(f"{type(error).__name__} {error}")


run(5 if rank == 1 else 2, 10.0)
run(2, 100.0)
mf.init().close()
run(2, float(rank))

run(2, 1.0, doubled)
run(2, 7.0 if rank == 1 else 2.0, doubled)
run(2, 3.0, doubled)
mf.init().close()


def no_room(*_, **__):
    raise MemoryError("no room")


build = evaluator.build
evaluator.build = no_room if rank == 1 else build
run(2, 3.0, doubled)
evaluator.build = build
run(2, 3.0, doubled)
with open(f"said.{rank}", "w") as file:
    file.write("\\n====\\n".join(said))
"""


def test_one_rank_refuses_or_leaves_a_later_run(tmp_path: Path) -> None:
    """Far sooner than the timeout of 600 s every rank has the words of the guilty one."""
    (tmp_path / "job.py").write_text(SCRIPT, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "job.py"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
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
    told = [p.communicate(timeout=100)[1] for p in ranks]
    assert [p.returncode for p in ranks] == [0, 0, 0], "\n".join(told)
    for rank in range(3):
        said = (tmp_path / f"said.{rank}").read_text(encoding="utf-8")
        refused, run_on, joined_again, first, *left = said.split("\n====\n")
        assert refused.startswith("ProgramError")
        assert "%x has shape (5,) on rank 1, expected (2,)" in refused
        assert run_on.startswith(f"BackendError rank {rank} runs no program that communicates")
        assert "call mdfuse.init() again" in run_on
        if rank == 1:
            said_here = run_on.removeprefix("BackendError ")
            assert not_said(shown()["test_refusal"], said_here) == []
        assert joined_again == "[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]"
        assert first == str([2.0] * 6)
        interrupted, run_on, unbuilt, joined_again = left
        if rank == 1:
            assert interrupted == "KeyboardInterrupt "
            assert "because     KeyboardInterrupt ended a run of @doubled here" in run_on
        else:
            said_here = f"ProgramError @doubled broke off on rank {rank}: another rank left it"
            assert interrupted.startswith(f"{said_here}\n  rank 1: KeyboardInterrupt\n")
        assert run_on.startswith(f"BackendError rank {rank} runs no program that communicates")
        if rank == 1:
            assert unbuilt == "MemoryError no room"
        else:
            said_here = "ProgramError rank 1 refused to run @doubled\n  MemoryError: no room\n"
            assert unbuilt.startswith(said_here)
        assert joined_again == str([6.0] * 6)


def test_others_wait_in_the_run_that_was_left_or_in_the_next_one() -> None:
    store = HashStore()
    here, there = (
        Refusals(store=store, rank=rank, size=2, timeout_s=1.0, waiting=lambda _: nullcontext())
        for rank in range(2)
    )
    there.abandon(RunCount(name="f", serial=3, runs=7), IndexError("9 is out of range"))
    for runs, deed in ((7, "left it"), (8, "left the one before"), (9, None)):
        error = here.broke_off(RunCount(name="f", serial=3, runs=runs), BackendError("closed"))
        assert (error is None) == (deed is None)
        said = (
            f"@f broke off on rank 0: another rank {deed}\n  rank 1: IndexError: 9 is out of range"
        )
        assert error is None or str(error).startswith(said)
