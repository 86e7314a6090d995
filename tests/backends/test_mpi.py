"""The backend mpi without MPI: when it is refused, what it gives MPI, how long it waits."""

from __future__ import annotations

import _ctypes
import gc
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse.backends import staging
from mdfuse.backends.base import root_index
from mdfuse.backends.mpi import mpi_library as mpi_library
from mdfuse.backends.mpi.mpi_backend import MpiBackend
from mdfuse.backends.mpi.mpi_posts import (
    MOST_ELEMENTS,
    MpiTeam,
    carrying_type,
    check_sizes,
    is_reducible,
    reduce_op,
    reducing_type,
)
from mdfuse.backends.mpi.pending_requests import Requests, State, Waiting, poll
from mdfuse.backends.work import DONE
from mdfuse.bootstrap import Launch
from mdfuse.errors import BackendError, CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.runtime.stores import open_store
from mdfuse.torch_private import HashStore

TWO = Launch(name="torchrun", rank=1, size=2, local_rank=1, why="")
CPU = torch.device("cpu")


def fake_mpi(**more: Any) -> Any:
    """As much of mpi4py's module as a backend needs that never posts."""
    alone = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1)
    usual = {
        "COMM_WORLD": alone,
        "COMM_SELF": alone,
        "THREAD_MULTIPLE": 3,
        "Query_thread": lambda: 3,
        "Get_library_version": lambda: "Open MPI v5.0.11, package: Open MPI user@host",
    }
    return SimpleNamespace(**usual | more)


@pytest.fixture
def with_mpi(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def put(**more: Any) -> Any:
        fake = fake_mpi(**more)
        monkeypatch.setattr(mpi_library, "library", lambda: fake)
        return fake

    return put


def backend(device: str = "cpu", rank: int = 0) -> MpiBackend:
    return MpiBackend(rank=rank, device=torch.device(device), store=HashStore(), timeout_s=0.05)


def test_ranks_that_do_not_come_to_the_first_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = SimpleNamespace(Test=lambda: False)
    world = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2, Ibarrier=lambda: barrier)
    monkeypatch.setattr(mpi_library, "library", lambda: SimpleNamespace(COMM_WORLD=world))
    with pytest.raises(BackendError, match="rank 1 cannot reach the other rank") as caught:
        open_store(replace(TWO, name="mpirun"), 0.001, {})
    because = r"not all ranks came to MPI's barrier: not done within [\d.e-]+ s of the wait"
    assert re.fullmatch(because, caught.value.because or "")


@pytest.mark.parametrize(("is_alone", "failure"), [(False, ValueError()), (False, None), (True, 1)])
def test_after_an_error_mpi_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, is_alone: bool, failure: object
) -> None:
    """What Python runs as the process ends."""
    asked: list[int] = []
    monkeypatch.setattr("mpi4py.run.set_abort_status", asked.append)
    monkeypatch.setattr(sys, "last_value", failure, raising=False)
    world = SimpleNamespace(Get_size=lambda: 1 if is_alone else 2)
    monkeypatch.setattr(mpi_library, "_linked", lambda mpi: mpi)
    ended: list[bool] = []
    state = {"Is_initialized": lambda: True, "Is_finalized": lambda: False}
    fake = fake_mpi(COMM_WORLD=world, MPI_Finalize=lambda: ended.append(True), **state)
    mpi_library._end(fake)
    assert asked == ([] if is_alone or failure is None else [1])
    assert ended == [True] * (not asked)


def test_a_job_that_is_to_be_aborted_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m mpi4py` tells mpi4py so after `sys.exit(1)`, and nobody else."""
    monkeypatch.setattr(mpi_library, "_end_state", mpi_library._EndState())
    ended, told = [], list[int]()
    fake = fake_mpi(
        Is_initialized=lambda: True,
        Is_finalized=lambda: False,
        MPI_Finalize=lambda: ended.append(True),
        _set_abort_status=told.append,
    )
    monkeypatch.setattr(mpi_library, "_linked", lambda mpi: mpi)
    mpi_library._note_aborts(fake)
    fake._set_abort_status(1)
    mpi_library._end(fake)
    assert told == [1] and not ended


# -- whether MPI can be used -----------------------------------------------------------------------


@pytest.mark.usefixtures("unjoined")
def test_without_mpi4py_the_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="rank 0 cannot use backend 'mpi'") as told:
        mf.init(backend="mpi")
    assert "mpi4py is not installed" in str(told.value)
    assert "pip install 'mdfuse[mpi]'" in str(told.value)


def test_to_ask_in_a_single_process_does_not_start_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def started() -> None:
        raise AssertionError("MPI was started")

    monkeypatch.setattr(mpi_library, "library", started)
    monkeypatch.setattr(mpi_library, "find_spec", lambda name: name)
    alone = Launch(name="single", rank=0, size=1, local_rank=0, why="")
    monkeypatch.setattr(mpi_library, "detect", lambda *_: alone)
    assert mpi_library.why_not() is None


def test_mpis_world_must_be_that_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, with_mpi: Callable[..., Any]
) -> None:
    """Under torchrun each process is a world of its own to MPI."""
    with_mpi()
    monkeypatch.setattr(mpi_library, "find_spec", lambda name: name)
    monkeypatch.setattr(mpi_library, "detect", lambda *_: TWO)
    refusal = mpi_library.why_not()
    assert refusal is not None
    assert refusal[0] == "MPI sees rank 0 of 1, torchrun says rank 1 of 2"
    assert "mpirun -n 4 python -m mpi4py" in refusal[1]
    here = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2)
    with_mpi(COMM_WORLD=here)
    assert mpi_library.why_not() is None


@pytest.mark.parametrize("error", [ImportError("no libmpi.so"), RuntimeError("no libmpi.so")])
def test_an_mpi4py_without_its_mpi(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def missing(name: str) -> None:
        raise error

    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)  # another test's import
    monkeypatch.setattr(mpi_library.importlib, "import_module", missing)
    refusal = mpi_library.why_not_in(TWO)
    assert refusal is not None
    assert refusal[0] == "mpi4py cannot be imported: no libmpi.so"
    with pytest.raises(BackendError, match="mpi4py cannot be imported") as told:
        backend()
    assert "no libmpi.so" in str(told.value)


# -- device memory ---------------------------------------------------------------------------------

#: version text, environment, what the queries that it has answer -> why device memory is staged
STAGED = [
    ("Open MPI v5.0.11, package", {}, [True], None),
    ("Open MPI v5.0.11, package", {}, [False], "Open MPI v5.0.11 was built without CUDA"),
    ("Open MPI v5.0.11, package", {}, [], "does not say whether it takes device memory"),
    ("MPICH Version:      4.2", {}, [True], None),
    ("MPICH Version:      4.2", {}, [False], "was built without CUDA"),
    ("MVAPICH2 Version 2.3", {}, [True], "only where MV2_USE_CUDA=1"),
    ("MVAPICH2 Version 2.3", {"MV2_USE_CUDA": "1"}, [True], None),
    ("MPI VERSION : CRAY MPICH 8.1", {}, [True], "only where MPICH_GPU_SUPPORT_ENABLED=1"),
    ("MPI VERSION : CRAY MPICH 8.1", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, [True], None),
    ("Something else", {}, [], "does not say whether it takes device memory"),
]


@pytest.mark.parametrize(("version", "environment", "answers", "why"), STAGED)
def test_when_device_memory_is_staged(
    version: str,
    environment: dict[str, str],
    answers: list[bool],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries = [(answer, bool) for answer in answers]
    monkeypatch.setattr(mpi_library, "_queries", lambda mpi: queries)
    got = mpi_library.why_staged(fake_mpi(Get_library_version=lambda: version), environment)
    assert got is None if why is None else why in str(got)


def test_the_queries_are_found_in_the_library_itself() -> None:
    """Asked of a library without them, ctypes' own: none is there, and so none is called."""
    assert mpi_library._queries(SimpleNamespace(__file__=_ctypes.__file__)) == []


@pytest.mark.parametrize(
    ("status", "answer", "takes"), [(0, 1, True), (0, 0, False), (1, 1, False)]
)
def test_a_query_that_answers_by_reference(status: int, answer: int, takes: bool) -> None:
    def query(kind: int, into: Any) -> int:
        assert kind == 0
        into._obj.value = answer
        return status

    assert mpi_library._answer_by_reference(query) is takes


def test_staging_is_said_once_by_rank_0(
    with_mpi: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_mpi()
    for why, what in ((None, "collectives through"), ("no CUDA", "all through pinned host memory")):
        monkeypatch.setattr(mpi_library, "why_staged", lambda *_, why=why: why)
        caplog.clear()
        for rank in range(2):
            backend("cuda", rank)
        (said,) = caplog.messages
        assert what in said


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the current stream; pinned memory is plain memory here."""
    done: list[str] = []
    current = SimpleNamespace(synchronize=lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(staging, "_pinned", lambda x: torch.full((x.numel(),), 77, dtype=x.dtype))
    return done


def test_staged_buffers_go_there_and_back(stream: list[str]) -> None:
    src, dst = torch.arange(6.0).view(2, 3).t(), torch.zeros(2, 3)
    seen = []

    def post(srcs: Any, dsts: Any) -> Any:
        assert stream == ["synchronize"]
        seen.append(srcs[0].clone())
        dsts[0].copy_(srcs[0] + 1)
        return DONE

    work = staging.Staged(post, Call(kind="Allreduce", team=(0,), rank=0), CPU)([src], [dst])
    assert seen[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert dst.sum() == 0
    work.wait()
    assert dst.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_which_posts_are_staged(
    with_mpi: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what goes between pairs, where MPI takes device memory: see the backend's message."""
    made: list[str] = []
    module = "mdfuse.backends.mpi.mpi_backend"
    monkeypatch.setattr(f"{module}.build_post", lambda *_: None)
    monkeypatch.setattr(f"{module}.Staged", lambda *_: made.append("staged"))
    monkeypatch.setattr(f"{module}.after_the_stream", lambda *_: made.append("as it is"))
    with_mpi()
    for why, device, want in (
        (None, "cuda", ["as it is", "staged"]),
        ("no CUDA", "cuda", ["staged", "staged"]),
        (None, "cpu", []),
    ):
        monkeypatch.setattr(mpi_library, "why_staged", lambda *_, why=why: why)
        made.clear()
        for kind in ("Exchange", "Allgather"):
            call = Call(kind=kind, team=(0,), rank=0)
            backend(device).build(None, call, torch.float32)  # type: ignore[arg-type]
        assert made == want


def test_what_is_on_a_device_is_there_before_a_direct_post(stream: list[str]) -> None:
    def post(srcs: Any, dsts: Any) -> Any:
        assert stream == ["synchronize"]
        return DONE

    staging.after_the_stream(post, CPU)([torch.ones(1)], []).wait()


# -- types -----------------------------------------------------------------------------------------


def test_the_type_of_what_travels_has_as_many_bytes() -> None:
    names = SimpleNamespace(
        BYTE=1, UINT16_T=2, UINT32_T=4, UINT64_T=8, C_DOUBLE_COMPLEX=16, INT8_T=-1, UINT8_T=-2
    )
    for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128):
        assert carrying_type(names, dtype) == dtype.itemsize
    assert reducing_type(names, torch.bool) == -2


def test_narrow_floats_are_not_reduced_by_mpi() -> None:
    narrow = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    assert not any(map(is_reducible, narrow))


def test_reduce_ops_of_bool_are_those_of_bytes_that_hold_0_or_1() -> None:
    ops = SimpleNamespace(**{n: n for n in ("SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR")})
    assert reduce_op(ops, "sum", torch.bool) == "MAX"
    assert reduce_op(ops, "prod", torch.bool) == "MIN"
    assert reduce_op(ops, "sum", torch.int8) == "SUM"
    assert reduce_op(ops, "avg", torch.float32) == "SUM"


# -- calls that mean nothing -----------------------------------------------------------------------


def test_a_root_outside_the_team() -> None:
    with pytest.raises(CommunicationError, match="has root 5") as told:
        root_index(Call(kind="Broadcast", team=(0, 1), rank=0, root=5))
    assert "its root is one of the team" in str(told.value)


def test_binding_needs_a_known_kind_and_a_prepared_team(with_mpi: Callable[..., Any]) -> None:
    with_mpi()
    with pytest.raises(CommunicationError, match="Shout is not a kind"):
        backend().bind(Call(kind="Shout", team=(0,), rank=0))
    with pytest.raises(CommunicationError, match="has not prepared"):
        backend().bind(Call(kind="Allgather", team=(0, 1), rank=0))


def test_posts_from_a_thread_that_mpi_does_not_know(with_mpi: Callable[..., Any]) -> None:
    with_mpi(Query_thread=lambda: 1, Is_thread_main=lambda: False)
    post = backend().bind(Call(kind="Allgather", team=(0,), rank=0))
    with pytest.raises(BackendError, match="from a thread that did not start MPI") as told:
        post([torch.ones(1)], [torch.ones(1)])
    assert "THREAD_MULTIPLE" in str(told.value)


def test_an_error_of_mpi_at_the_post_says_what_was_posted(with_mpi: Callable[..., Any]) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("MPI_ERR_COUNT: invalid count argument")

    memory = SimpleNamespace(fromaddress=lambda *_: None)
    alone = SimpleNamespace(Iallgather=refuse)
    with_mpi(COMM_SELF=alone, buffer=memory, UINT32_T=None)
    post = backend().bind(Call(kind="Allgather", team=(0,), rank=0))
    with pytest.raises(BackendError, match="Allgather failed on rank 0") as told:
        post([torch.ones(1)], [torch.ones(1)])
    assert "MPI_ERR_COUNT" in str(told.value)


def test_more_elements_than_mpi_counts() -> None:
    call = Call(kind="Allgather", team=(0, 1), rank=0)
    check_sizes(call, [torch.empty(MOST_ELEMENTS, device="meta")])
    with pytest.raises(CommunicationError, match="a buffer of 2147483648 elements"):
        check_sizes(call, [torch.empty(MOST_ELEMENTS + 1, device="meta")])


def test_a_member_that_does_not_come(with_mpi: Callable[..., Any]) -> None:
    with_mpi()
    with pytest.raises(BackendError, match=r"mpi cannot connect rank 0 with the team \(0, 1\)"):
        backend().prepare([(0, 1)])


# -- waits -----------------------------------------------------------------------------------------


def after(calls: int) -> Callable[[], bool]:
    left = iter([False] * calls)
    return lambda: next(left, True)


def test_a_wait_asks_until_it_is_done() -> None:
    poll(after(0), Waiting(timeout_s=1e-9))
    poll(after(5), Waiting(timeout_s=100))


def test_a_wait_has_a_deadline() -> None:
    with pytest.raises(RuntimeError, match=r"not done within 0.01 s of the wait"):
        poll(lambda: False, Waiting(timeout_s=0.01))


def test_a_wait_that_another_thread_ends() -> None:
    waiting = Waiting(timeout_s=100)

    def asked() -> bool:
        waiting.aborted += 1
        return False

    with pytest.raises(RuntimeError, match="another rank does not take part"):
        poll(asked, waiting)
    poll(after(3), waiting)  # waits that begin later last


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    monkeypatch.setattr("mdfuse.backends.mpi.pending_requests._KEPT", found)
    return found


def test_a_failed_wait_fails_again_and_keeps_its_buffers(kept: list[object]) -> None:
    request, buffer, state = SimpleNamespace(Test=lambda: False), object(), State()
    work = Requests([request], buffer, Waiting(timeout_s=0.001), state)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not done"):
            work.wait()
    assert state.is_broken
    del work
    gc.collect()
    assert kept == [([request], buffer)]


@pytest.mark.parametrize("is_waited", [True, False])
def test_a_post_that_nobody_waits_for_keeps_its_buffers(
    kept: list[object], is_waited: bool
) -> None:
    """The team goes on: its members posted the same."""
    state = State()
    work = Requests([SimpleNamespace(Test=lambda: True)], [], Waiting(timeout_s=1), state)
    if is_waited:
        work.wait()
        work.wait()
    del work
    gc.collect()
    assert bool(kept) is not is_waited
    assert not state.is_broken


def test_a_team_with_a_post_that_failed_takes_no_more(with_mpi: Callable[..., Any]) -> None:
    fake = with_mpi()
    team = MpiTeam(mpi=fake, ranks=(0, 1), comms={}, waiting=Waiting(timeout_s=1))
    team.state.is_broken = True
    with pytest.raises(BackendError, match=r"rank 0 cannot post Allgather on team \(0, 1\)"):
        backend().check_usable(team, Call(kind="Allgather", team=(0, 1), rank=0))


def test_close_leaves_communicators_that_failed_or_that_mpi_has_freed(
    with_mpi: Callable[..., Any],
) -> None:
    freed: list[str] = []
    fake = with_mpi(Is_finalized=lambda: False)
    opened = backend()
    for name in ("good", "bad"):
        comm = SimpleNamespace(Free=lambda name=name: freed.append(name))
        comms = {"Allgather": comm, "Reduce": comm}
        opened._teams[0, len(opened._teams) + 1] = opened._team((0, 1), comms)
    opened._teams[0, 2].state.is_broken = True
    opened.close()
    assert freed == ["good", "good"]
    fake.Is_finalized = lambda: True
    opened._teams[0, 1] = opened._team((0, 1), {"Reduce": SimpleNamespace()})
    opened.close()
