"""UCX itself, with several workers in this process, one thread per rank."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.listening import listening
from torch import Tensor
from torch.distributed import FileStore

from mdfuse.backends import staging
from mdfuse.backends.ucx import ucx_backend as ucx
from mdfuse.backends.ucx import ucx_library as ucx_library
from mdfuse.backends.ucx.ucx_backend import UcxBackend
from mdfuse.backends.ucx.ucx_engine import Engine
from mdfuse.errors import BackendError, CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.runtime.backend_rows import BACKENDS
from mdfuse.torch_private import HashStore

TEAM = (0, 1, 2)
CPU = torch.device("cpu")


@contextmanager
def world(
    size: int, timeout_s: float = 30, device: torch.device = CPU
) -> Iterator[list[UcxBackend]]:
    """One backend per rank, with a team of all."""
    store = HashStore()
    backends = [
        UcxBackend(rank=r, device=device, store=store, timeout_s=timeout_s) for r in range(size)
    ]
    try:
        for backend in backends:
            backend.prepare([tuple(range(size))])
        yield backends
    finally:
        for backend in backends:
            backend.close()


@pytest.fixture(scope="module")
def three() -> Iterator[list[UcxBackend]]:
    with world(3) as backends:
        yield backends


def on_all(backends: Sequence[UcxBackend], body: Callable[[int, UcxBackend], Any]) -> list[Any]:
    """What `body(rank, backend)` gives on each rank, all at the same time."""
    with ThreadPoolExecutor(len(backends)) as pool:
        return list(pool.map(body, range(len(backends)), backends))


def values(rank: int, k: int, dtype: torch.dtype) -> Tensor:
    """Small numbers: sums and products of three are exact in every dtype."""
    generator = torch.Generator().manual_seed(7 * rank + k)
    return torch.randint(0, 3, (k,), generator=generator).to(dtype)


PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
)


def table() -> Iterator[tuple[torch.dtype, str]]:
    for dtype in FLOATS:
        yield from ((dtype, op) for op in ("sum", "prod", "min", "max"))
    for dtype in INTEGERS:
        yield from ((dtype, op) for op in PAIRWISE)


@pytest.fixture(params=["small", "large"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each communication takes one step, or several."""
    monkeypatch.setattr(ucx, "SMALL_BYTES", 1 << 30 if request.param == "small" else 0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("k", [1, 7, 3_000])
def test_every_reduce_op_on_every_dtype(three: list[UcxBackend], k: int) -> None:
    def all_of_them(rank: int, backend: UcxBackend) -> list[Tensor]:
        return [allreduced(backend, rank, op, values(rank, k, dtype)) for dtype, op in table()]

    for results in on_all(three, all_of_them):
        for (dtype, op), got in zip(table(), results, strict=True):
            wide = torch.float64 if dtype.is_floating_point else torch.int64
            operands = [values(r, k, dtype).to(wide) for r in TEAM]
            expected = reduce(PAIRWISE[op], operands).to(dtype)
            assert got.dtype is dtype
            assert torch.equal(got.to(wide), expected.to(wide)), (dtype, op)


def allreduced(backend: UcxBackend, rank: int, op: str, src: Tensor) -> Tensor:
    dst = torch.empty_like(src)
    backend.bind(Call(kind="Allreduce", team=TEAM, rank=rank, reduce_op=op))([src], [dst]).wait()
    return dst


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_narrow_floats_are_rounded_once(three: list[UcxBackend], op: str) -> None:
    """256 + 1 is 256 in bfloat16, and 256 + 1 + 1 is not."""
    k = 20
    srcs = [torch.full((k,), x, dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    total = 258.0 if op == "sum" else 86.0
    for got in on_all(three, lambda rank, backend: allreduced(backend, rank, op, srcs[rank])):
        assert torch.equal(got, torch.full((k,), total, dtype=torch.bfloat16))


def test_posts_may_be_waited_for_in_different_orders(three: list[UcxBackend]) -> None:
    """Each wait makes all that is pending progress; the buffers of a post belong to it alone."""

    def body(rank: int, backend: UcxBackend) -> list[Tensor]:
        n, k = 6, 60_000
        post = backend.bind(Call(kind="Allreduce", team=TEAM, rank=rank, reduce_op="sum"))
        dsts = [torch.empty(k) for _ in range(n)]
        works = [post([torch.full((k,), 10.0 * rank + i)], [dsts[i]]) for i in range(n)]
        for work in works if rank else reversed(works):
            work.wait()
            work.wait()
        return dsts

    for dsts in on_all(three, body):
        assert all(torch.equal(x, torch.full_like(x, 30.0 + 3 * i)) for i, x in enumerate(dsts))


def test_buffers_are_seen_as_flat_in_memory_order(three: list[UcxBackend]) -> None:
    src = torch.arange(6.0).view(2, 3).t()

    def body(rank: int, backend: UcxBackend) -> Tensor:
        dst = torch.empty(3, 2)
        sent = [src] if rank == 1 else []
        call = Call(kind="Broadcast", team=TEAM, rank=rank, root=1)
        backend.bind(call)(sent, [dst] if rank != 1 else []).wait()
        return dst

    first, _, last = on_all(three, body)
    assert torch.equal(first.flatten(), torch.arange(6.0)) and torch.equal(first, last)


def test_a_closed_rank_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it shows that a connection was closed."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with world(2, timeout_s=60) as backends:
        post_all(backends, [0, 1])
        backends[1].close()
        work = post_one(backends[0], 0)
        for _ in range(2):
            with pytest.raises(BackendError, match="Allreduce failed on rank 0") as caught:
                work.wait()
            assert caught.value.because is not None
            assert "rank 1 is gone" in caught.value.because


DIES = """
import os, signal, sys
import torch.distributed as dist
from backends.test_ucx import CPU, UcxBackend, post_one

backend = UcxBackend(rank=1, device=CPU, store=dist.FileStore(sys.argv[1], 2), timeout_s=60)
backend.prepare([(0, 1)])
post_one(backend, 1).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("transports", ["tcp,self", "sm,self"])
def test_a_killed_rank_is_an_error_long_before_the_deadline(
    transports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    folders = os.pathsep.join([*map(str, Path(__file__).parents[1:3]), *sys.path])
    other = subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": folders},
    )
    store = FileStore(str(tmp_path / "store"), 2)
    backend = UcxBackend(rank=0, device=CPU, store=store, timeout_s=60)
    backend.prepare([(0, 1)])
    post_one(backend, 0).wait()
    with ThreadPoolExecutor() as launcher:  # whose child that is not waited for still seems to live
        status = launcher.submit(other.wait)
        with pytest.raises(BackendError, match="Allreduce failed on rank 0") as caught:
            post_one(backend, 0).wait()
    assert "rank 1 is gone" in (caught.value.because or "")
    assert status.result() == -signal.SIGKILL
    backend.close()


def test_a_silent_rank_is_an_error_at_the_deadline() -> None:
    with world(2, timeout_s=0.2) as backends:
        work = post_one(backends[0], 0)
        with pytest.raises(BackendError, match=r"after 0\.2 s nothing came from.* rank 1"):
            work.wait()


@pytest.mark.parametrize("other", [("Broadcast", 2), ("Scatter", 4)], ids=["size", "kind"])
def test_ranks_that_post_something_else_never_meet(other: tuple[str, int]) -> None:
    """Another kind, or another size: nothing that means something else arrives."""
    kind, k = other

    def body(rank: int, backend: UcxBackend) -> Tensor:
        given = Call(kind="Broadcast", team=(0, 1), rank=rank, root=1)
        wrong = replace(given, kind=kind, parts=(0,), blocks=(0,))
        dst = torch.zeros(4)
        work = backend.bind(wrong if rank else given)([torch.ones(k)] * rank, [dst] * (1 - rank))
        if rank == 0:
            with pytest.raises(BackendError, match="Broadcast failed on rank 0"):
                work.wait()
        return dst

    with world(2, timeout_s=0.2) as backends:
        assert not on_all(backends, body)[0].any()


def post_one(backend: UcxBackend, rank: int) -> Any:
    call = Call(kind="Allreduce", team=(0, 1), rank=rank, reduce_op="sum")
    return backend.bind(call)([torch.ones(3)], [torch.empty(3)])


def post_all(backends: Sequence[UcxBackend], ranks: Sequence[int]) -> None:
    on_all([backends[r] for r in ranks], lambda rank, backend: post_one(backend, rank).wait())


def test_binding_needs_a_prepared_team_and_a_known_kind(three: list[UcxBackend]) -> None:
    with pytest.raises(CommunicationError, match="has not prepared"):
        three[0].bind(Call(kind="Allgather", team=(1, 0), rank=0))
    with pytest.raises(CommunicationError, match="Shout is not a kind"):
        three[0].bind(Call(kind="Shout", team=TEAM, rank=0))


def test_reductions_without_a_meaning_are_refused(three: list[UcxBackend]) -> None:
    post = three[0].bind(Call(kind="Allreduce", team=TEAM, rank=0, reduce_op="bxor"))
    with pytest.raises(CommunicationError, match="bxor of float32 values"):
        post([torch.ones(2)], [torch.ones(2)])


def test_a_member_that_does_not_come_is_a_timeout_not_a_hang() -> None:
    backend = UcxBackend(rank=0, device=CPU, store=HashStore(), timeout_s=0.1)
    with pytest.raises(BackendError, match="ucx cannot connect rank 0 with the team"):
        backend.prepare([(0, 1)])
    backend.close()


def test_tags_have_room_for_so_many_teams() -> None:
    store = HashStore()
    backends = [UcxBackend(rank=r, device=CPU, store=store, timeout_s=5) for r in range(2)]
    store.add("ucx/teams", 65535)
    with pytest.raises(BackendError, match="ucx cannot make team 65536 of this world"):
        backends[0].prepare([(0, 1)])
    for backend in backends:
        backend.close()


# -- device memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transports", "takes"),
    [
        (
            "#  component 1  :  cuda_cpy\n#  resource 2 :  md 1  dev 1  flags -- cuda_copy/cuda",
            True,
        ),
        ("#  component 1  :  cuda_cpy\n#  resource 2 :  md 1  dev 1  flags -- tcp/eth0", False),
    ],
)
def test_whether_ucx_moves_device_memory(transports: str, takes: bool) -> None:
    assert (ucx_library.why_staged(transports) is None) is takes


def test_what_ucx_found_is_what_it_prints() -> None:
    engine = Engine(ucx_library.load())
    assert " self/memory" in engine.transports
    engine.close()


@dataclass
class Device(threading.local):
    """A rank's, which is a thread here: what its stream still has to do, and what happened."""

    queued: list[Callable[[], object]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


DEVICE = Device()


class SlowGate:
    """Closed at two looks, after the post and after local work."""

    def __init__(self, stream: object) -> None:
        self._looks = 2

    def is_open(self) -> bool:
        self._looks -= 1
        if self._looks >= 0:
            return False
        while DEVICE.queued:
            DEVICE.queued.pop()()
        DEVICE.log.append("open")
        return True

    @contextmanager
    def local_work(self) -> Iterator[None]:
        yield
        DEVICE.log.append("local work")
        self._looks = 2


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", ["Allreduce", "Allgather", "Broadcast"])
def test_ucx_gets_buffers_when_their_device_is_done(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx, "why_staged", lambda transports: None)
    monkeypatch.setattr(ucx, "Gate", SlowGate)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    for name in ("send", "receive"):
        monkeypatch.setattr(Engine, name, logged(getattr(Engine, name)))

    def body(rank: int, backend: UcxBackend) -> tuple[Tensor, list[str]]:
        DEVICE.log.clear()
        src, into = torch.zeros(3_000), torch.zeros(9_000 if kind == "Allgather" else 3_000)
        DEVICE.queued.append(partial(src.fill_, rank + 1.0))
        call = Call(kind=kind, team=TEAM, rank=rank, reduce_op="sum", root=1)
        is_root = kind == "Broadcast" and rank == 1
        is_leaf = kind == "Broadcast" and rank != 1
        backend.bind(call)([] if is_leaf else [src], [] if is_root else [into]).wait()
        return src if is_root else into, [*DEVICE.log]

    one = torch.ones(3_000)
    want = {"Allreduce": 6 * one, "Allgather": torch.cat([one, 2 * one, 3 * one])}
    with world(3, device=torch.device("cuda")) as backends:
        for got, log in on_all(backends, body):
            assert torch.equal(got, want.get(kind, 2 * one))
            for before, what in pairwise(log):
                assert what != "UCX" or before in ("open", "UCX")
            assert log[-1] == "open", "the last local work is done too"


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        DEVICE.log.append("UCX")
        return function(*args)

    return call


def test_a_device_that_never_ends_is_an_error_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = SimpleNamespace(is_open=lambda: False)
    monkeypatch.setattr(ucx, "why_staged", lambda transports: None)
    monkeypatch.setattr(ucx, "Gate", lambda stream: never)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    with world(2, timeout_s=0.1, device=torch.device("cuda")) as backends:
        work = post_one(backends[0], 0)
        with pytest.raises(BackendError, match="the device has not done what was queued before"):
            work.wait()


def test_staged_posts_of_device_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(ucx, "why_staged", lambda transports: "no CUDA")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(staging, "_pinned", lambda x: torch.full((x.numel(),), 7, dtype=x.dtype))

    def body(rank: int, backend: UcxBackend) -> Tensor:
        src, dst = values(rank, 6, torch.bfloat16).view(2, 3).t(), torch.zeros(3, 2).bfloat16()
        call = Call(kind="Allreduce", team=TEAM, rank=rank, reduce_op="sum")
        work = backend.bind(call)([src], [dst])
        assert not dst.any()
        work.wait()
        return dst

    with world(3, device=torch.device("cuda")) as backends:
        total = sum(values(r, 6, torch.int64) for r in TEAM)
        for got in on_all(backends, body):
            assert torch.equal(got.flatten().long(), total)
    assert caplog.messages == ["backend ucx: all through pinned host memory: no CUDA"]


# -- a process that cannot use it ------------------------------------------------------------------


@pytest.fixture
def unloaded() -> Iterator[None]:
    """As in a process that has not loaded UCX yet."""
    ucx_library.load.cache_clear()
    yield
    ucx_library.load.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_ucxx_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*filter(lambda name: name.startswith("ucxx"), sys.modules), "ucxx"]:
        monkeypatch.setitem(sys.modules, name, None)
    because, hint = BACKENDS["ucx"].why_not() or ("", "")
    assert because == "ucxx is not installed"
    assert 'pip install "mdfuse[ucx]"' in hint
    with pytest.raises(BackendError, match="backend 'ucx' cannot be used"):
        UcxBackend(rank=0, device=CPU, store=HashStore(), timeout_s=1)


@pytest.mark.usefixtures("unloaded")
def test_another_ucx_was_loaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_library() -> None:
        raise OSError("libuct.so: undefined symbol: ucs_some_function\nand more")

    monkeypatch.setattr(importlib.import_module("libucx"), "load_library", load_library)
    because, hint = BACKENDS["ucx"].why_not() or ("", "")
    assert because == "UCX cannot be loaded: libuct.so: undefined symbol: ucs_some_function"
    assert "load UCX before MPI" in hint


def test_what_the_user_told_ucx_counts() -> None:
    ours = ucx_library.settings({})
    assert ours["KEEPALIVE_INTERVAL"] == "300ms"
    told = ucx_library.settings({"UCX_KEEPALIVE_INTERVAL": "5s"})
    assert told == {k: v for k, v in ours.items() if k != "KEEPALIVE_INTERVAL"}
    assert ucx_library.settings({}, is_one_host=True) == ours | {"NET_DEVICES": "lo"}
    for name in ("UCX_NET_DEVICES", "UCX_TLS"):
        assert "NET_DEVICES" not in ucx_library.settings({name: "some"}, is_one_host=True)


def test_on_one_host_it_listens_on_loopback_alone() -> None:
    before = listening()
    engine = Engine(ucx_library.load(), is_one_host=True)
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    engine.close()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(("told", "counts"), [({}, "auto"), ({"UCX_RNDV_THRESH": "4K"}, "4K")])
def test_what_ucxx_would_tell_ucx_does_not(
    told: dict[str, str], counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_RNDV_THRESH", raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    ucx_library.load()
    assert os.environ["UCX_RNDV_THRESH"] == counts
