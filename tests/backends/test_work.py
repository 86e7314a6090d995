"""Works of eager posts, and the streams that wait for them."""

from __future__ import annotations

import pytest
import torch
from helpers.events import Event, WaitsOnce

from mdfuse import BackendError
from mdfuse.backends.transfers import transferred
from mdfuse.backends.work import DONE, Posted, Shared
from mdfuse.layouts.call import Call

CALL = Call(kind="Allreduce", team=(0, 1), rank=0, reduce_op="sum")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """As if a GPU were in use: (what, the stream that is current)."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return Event.install(monkeypatch)


def test_a_second_wait_on_another_stream_is_for_what_the_first_one_left(
    events: list[tuple[str, str]],
) -> None:
    """Also for what came behind the work: a sum of what arrived."""
    work, finished = WaitsOnce(), list[str]()
    posted = Posted(CALL, (work,), None, lambda: finished.append(Event.current))
    for stream in ("left", "right", "third"):
        Event.current = stream
        posted.wait()
    assert work.joined == finished == ["left"]
    assert events == [("record", "left"), ("wait", "right"), ("wait", "third")]


def test_a_second_wait_without_a_gpu_has_nothing_to_do() -> None:
    work = WaitsOnce()
    posted = Posted(CALL, (work,), [])
    for _ in range(2):
        posted.wait()
    assert len(work.joined) == 1 and posted.referenced is None


def test_a_second_wait_for_what_failed_fails_again(events: list[tuple[str, str]]) -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("the other one is gone")

    posted = Posted(CALL, (Broken(),), None)
    for _ in range(2):
        with pytest.raises(BackendError, match="the other one is gone"):
            posted.wait()
    assert events == []


def test_a_shared_work_is_waited_for_once(events: list[tuple[str, str]]) -> None:
    shared = Shared(work := WaitsOnce())
    for stream in ("left", "right"):
        Event.current = stream
        shared.wait()
    assert work.joined == ["left"] and events == [("record", "left"), ("wait", "right")]


def test_scratch_stays_until_the_stream_that_waits_has_read_it(
    events: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives to be reduced lies in memory of the stream that posts."""
    call = Call(kind="Reduce", team=(0, 1), rank=0, root=0, reduce_op="sum")

    def arrive(recvs: list[tuple[int, torch.Tensor]], sends: object) -> list[WaitsOnce]:
        for _, into in recvs:
            into.copy_(torch.tensor([10.0, 20.0]))
        return [WaitsOnce()]

    left: list[list[float]] = []
    monkeypatch.setattr(
        "mdfuse.backends.transfers.leave", lambda found: left.extend(x.tolist() for x in found)
    )
    src, dst = torch.tensor([1.0, 2.0]), torch.empty(2)
    transferred(call, arrive)([src], [dst]).wait()
    assert dst.tolist() == [11.0, 22.0] and left == [[1.0, 2.0, 10.0, 20.0]]


def test_a_post_that_only_copies_is_there_to_wait_for(
    events: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is queued on the stream of the post, and no library's work stands behind it."""
    call = Call(kind="AllToAll", team=(0,), rank=0, send_counts=(3,), recv_counts=(3,))
    post = transferred(call, lambda recvs, sends: pytest.fail("nothing goes to other ranks"))
    src, dst = torch.arange(3.0), torch.empty(3)
    assert post([src], [dst]) is DONE and torch.equal(src, dst)
    monkeypatch.setattr("mdfuse.backends.transfers.queued", lambda buffers: (WaitsOnce(),))
    (work,) = post([src], [dst]).works  # type: ignore[attr-defined]
    work.wait()
    assert work.joined == [Event.current]
