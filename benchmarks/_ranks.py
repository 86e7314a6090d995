"""The ranks a benchmark runs on: mdfuse beside torch's default process group, which hands use."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout
from mdfuse.backends.c10d.group_openers import LIBRARIES
from mdfuse.bootstrap import detect
from mdfuse.cli import screen
from mdfuse.torch_private import HashStore

FastLane = Literal["auto", "never", "always"]

#: Deadline of a communication, seconds: a benchmark that hangs should say so soon.
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank among the others.

    Attributes:
        comm: mdfuse's communicator.
        group: for calls by hand, on the same ranks: the backend object of torch's default process
            group; with the null backend another group of its kind.
        mesh: all ranks on one axis, tp.
    """

    comm: mf.Communicator
    group: Any
    mesh: DeviceMesh

    @property
    def device(self) -> torch.device:
        return self.comm.device

    @property
    def is_null(self) -> bool:
        """Nobody else is there, so that values mean nothing."""
        return self.comm.backend == "null"

    @property
    def has_flat_posts(self) -> bool:
        """The library splits tensors along dim 0, so that careful people hand it flat ones."""
        return LIBRARIES[self.comm.backend].needs_flat

    @property
    def name(self) -> str:
        """For a file: backend, ranks, the device where the backend leaves it open, the lane."""
        device = f"-{self.device.type}" if self.is_null else ""
        lane = "-fast-lane" if self.comm.has_fast_lane else ""
        return f"{self.comm.backend}-{self.comm.size}{device}{lane}"

    def settle(self) -> None:
        """Wait until nothing is under way on any rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.comm.barrier()

    def local(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's part, as it would get it, on its device."""
        part = mf.shard_tensor(whole, layout, rank=self.comm.rank)
        return part.contiguous().to(self.device)

    def close(self) -> None:
        gc.collect()  # a graph captured by hand that lives on would keep NCCL from closing
        self.comm.close()
        dist.destroy_process_group()


def start(
    backend: str,
    size: int,
    device: str | None,
    fast_lane: FastLane = "auto",
    carrier: str | None = None,
) -> Ranks:
    """Join the ranks of the launcher, or stand for rank 0 of `size` (backend null)."""
    _settings()
    if backend == "null":
        return _stand_in(size, device)
    if "RANK" not in os.environ:
        screen.fail(f"backend {backend} needs ranks: ./launch/torchrun 4 benchmarks/...")
    if backend != "nccl" and detect(os.environ).is_one_host:  # by loopback, as mdfuse does
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return _joined(backend, fast_lane, {}, carrier)


def start_or_alone(device: str | None, carrier: str | None = None) -> Ranks:
    """Join the ranks of the launcher; without one be the only rank, of a real backend.

    Args:
        device: "cpu" or "cuda"; None: a GPU if there is one.
        carrier: mdfuse's backend, where it is another one than torch's.
    """
    on_gpu = torch.cuda.is_available() if device is None else device == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        return start(backend, 0, device, carrier=carrier)
    _settings()
    return _joined(backend, "auto", {"store": HashStore(), "rank": 0, "world_size": 1})


def _settings() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


def _joined(
    backend: str, fast_lane: FastLane, rendezvous: dict[str, Any], carrier: str | None = None
) -> Ranks:
    """Torch's default process group, and mdfuse's communicator on its ranks."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        rendezvous |= {"device_id": torch.device("cuda", torch.cuda.current_device())}
    dist.init_process_group(backend, **rendezvous)
    options = mf.Options(timeout_s=_TIMEOUT_S, fast_lane=fast_lane)
    comm, world = mf.init(options, carrier or backend), dist.group.WORLD
    return _ranks(comm, cast(Any, world)._get_backend(comm.device))


def _stand_in(size: int, device: str | None) -> Ranks:
    """DTensor gets torch's fake process group, which is also inside of the null backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    fake_store: Any = FakeStore
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
    comm = mf.init(backend="null", rank=0, size=size, device=device)
    open_group = LIBRARIES["null"].opener(comm.device, timedelta(seconds=_TIMEOUT_S), ())
    return _ranks(comm, open_group(HashStore(), 0, size))


def _ranks(comm: mf.Communicator, group: Any) -> Ranks:
    return Ranks(comm=comm, group=group, mesh=DeviceMesh.arange(tp=comm.size))


def choose_backend() -> str:
    """Null without a launcher, else what the ranks' devices call for."""
    if "RANK" not in os.environ:
        return "null"
    return "nccl" if torch.cuda.is_available() else "gloo"
