"""A world of one: no launcher, no network, no address; and what notes replays."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.bare import bare_environment

import mdfuse as mf

_PROGRAM = """
import torch
import torch.distributed as dist
from mdfuse.layouts.call import Call
from mdfuse.config import Options
from mdfuse.errors import BackendError
from mdfuse.runtime.communicator import init


def refused(make, words):
    try:
        make()
    except BackendError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)


refused(lambda: init(backend="carrier pigeon"), "backend 'carrier pigeon'")
refused(lambda: init(backend="gloo, tp=carrier pigeon"), "there is no such backend")
if not torch.cuda.is_available():
    refused(lambda: init(backend="nccl"), "rank 0 cannot use backend 'nccl'")
if not dist.is_ucc_available():
    refused(lambda: init(Options(backend="ucc")), "built without UCC")

comm = init(backend="gloo")
assert init() is comm and init(Options(backend="gloo")) is comm
refused(lambda: init(backend="nccl"), "already communicates by 'gloo'")
assert (comm.rank, comm.size, comm.local_rank, comm.backend) == (0, 1, 0, "gloo")
assert comm.launch.name == "single" and comm.device == torch.device("cpu")
assert comm.all_ok("text") == ("text",)
comm.barrier()
comm.prepare([(0,)])

src = torch.arange(6.0).view(2, 3)
for kind in ("Allgather", "ReduceScatter", "Allreduce", "AllToAll", "Reduce", "Gather", "Scatter"):
    call = Call(kind=kind, team=(0,), rank=0, root=0, reduce_op="sum", parts=(0,), blocks=(0,))
    dst = torch.zeros(3, 2)
    comm.poster(call)([src], [dst]).wait()
    assert torch.equal(dst.flatten(), src.flatten()), kind
for kind in ("Broadcast", "Exchange", "SendRecv"):
    post = comm.poster(Call(kind=kind, team=(0,), rank=0, root=0))
    post([src] * (kind == "Broadcast"), []).wait()

assert not dist.is_initialized()
comm.close()
comm.close()
refused(comm.barrier, "its communicator is closed")
again = init(backend="gloo")
assert again is not comm and again.size == 1
"""


def test_a_single_process_needs_no_launcher_and_no_network() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=bare_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


class Marking:
    """A backend that queues posts on a stream, and a track of them."""

    def __init__(self, stream: int | None) -> None:
        self.stream, self.marked = stream, list[int]()

    def track(self, stream: int) -> Marking | None:
        return self if stream == self.stream else None

    def mark(self, number: int) -> None:
        self.marked.append(number)

    def is_done(self, number: int) -> bool:
        return False

    def close(self) -> None:
        return None


@pytest.mark.usefixtures("unjoined")
def test_replays_are_noted_where_a_backend_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fast lane, and with backends beside it that queue nothing."""
    comm, queue = mf.init(backend="gloo"), Marking(7)
    assert comm.replays("mlp", 7) is None
    monkeypatch.setitem(comm._backends, "other", Marking(None))
    assert comm.replays("mlp", 7) is None
    monkeypatch.setitem(comm._backends, "queue", queue)
    replays = comm.replays("mlp", 7)
    assert replays is not None
    before, behind = replays.end(0)
    before()
    behind()
    assert queue.marked == [1]
    again = comm.replays("other", 7)  # of another program: the same track
    assert again is not None and again._track is queue and len(comm._watch.tracks) == 1


@pytest.mark.usefixtures("unjoined")
def test_no_run_begins_where_others_end_their_posts() -> None:
    """One that is idle stands by: a later run would read what others do not compute."""
    comm = mf.init(backend="gloo")
    comm.settle()
    comm.interruption.stand_by()
    for _ in range(2):
        assert not comm.is_ready
        with pytest.raises(mf.BackendError, match="posts of other ranks were ended"):
            comm.settle()
