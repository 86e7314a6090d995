"""Meetings of ranks through a store: threads stand for ranks, a dictionary for the network."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from mdfuse.bootstrap import Launch
from mdfuse.errors import BackendError
from mdfuse.runtime.agreement.rendezvous import Meetings, raise_alike
from mdfuse.runtime.deadline import Deadline
from mdfuse.runtime.first_meeting import disagreement

SIZE = 4


def _say(rank: int, meeting: int) -> str | None:
    return f"rank {rank} at {meeting}" if (rank + meeting) % 3 == 0 and meeting % 5 else None


def test_everybody_gets_everybodys_text_and_the_store_does_not_grow() -> None:
    store, meetings = dist.HashStore(), 40
    keys: list[int] = []

    def attend(rank: int) -> list[tuple[str | None, ...]]:
        agreement = Meetings(store, rank, SIZE, timeout_s=20)
        heard = []
        for meeting in range(meetings):
            heard.append(agreement.exchange(_say(rank, meeting)))
            keys.append(store.num_keys())
        return heard

    with ThreadPoolExecutor(SIZE) as pool:
        heard = list(pool.map(attend, range(SIZE)))
    expected = [tuple(_say(r, m) for r in range(SIZE)) for m in range(meetings)]
    assert heard == [expected] * SIZE
    # one key per rank, and of two meetings at most "in", "go" and one text per rank
    assert max(keys) <= SIZE + 2 * (2 + SIZE)


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()

    def attend(rank: int) -> str:
        agreement = Meetings(store, rank, SIZE, timeout_s=0.3)
        with pytest.raises(BackendError) as caught:
            agreement.exchange(None)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(attend, (0, 2)))
    assert messages[0].startswith("rank 0 waited 0.3 s for ranks [1, 3]")
    assert messages[1].startswith("rank 2 waited 0.3 s for ranks [1, 3]")


def test_a_world_of_one_asks_nobody() -> None:
    store = dist.HashStore()
    assert Meetings(store, 0, 1, timeout_s=1).exchange("text") == ("text",)
    assert store.num_keys() == 0


def test_leaving_waits_for_the_last() -> None:
    store = dist.HashStore()

    def leave(rank: int) -> list[int]:
        return Meetings(store, rank, SIZE, timeout_s=1).leave(0 if rank else 20)

    assert Meetings(store, 3, SIZE, timeout_s=1).leave(0.1) == [0, 1, 2]
    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(leave, range(SIZE - 1))) == [[]] * (SIZE - 1)


class Gone:
    """A store whose host died."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def test_the_store_is_lost() -> None:
    with pytest.raises(BackendError, match="rank 2 lost the store") as caught:
        Meetings(Gone(), 2, SIZE, timeout_s=1).exchange(None)  # type: ignore[arg-type]
    assert "Connection reset by peer" in str(caught.value)


def test_rank_0_does_not_join() -> None:
    store = dist.HashStore()
    launch = Launch(name="torchrun", rank=1, size=2, local_rank=1, why="told so")
    with pytest.raises(BackendError, match="rank 1 waited for rank 0, which did not join"):
        disagreement(store, launch, "gloo", Deadline.after(0.1))


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "is_same"),
    [("gloo", "gloo", True), ("gloo, ucx", "gloo, ucx", True), ("gloo, ucx", "gloo", False)],
)
def test_ranks_name_the_same_backends(rank_0: str, rank_1: str, is_same: bool) -> None:
    """Else one would open what the other does not wait for."""
    store = dist.HashStore()
    launches = [Launch(name="torchrun", rank=r, size=2, local_rank=r, why="") for r in range(2)]
    assert disagreement(store, launches[0], rank_0, Deadline.after(20)) is None
    found = disagreement(store, launches[1], rank_1, Deadline.after(20))
    assert (found is None) == is_same
    if found is not None:
        assert "rank 1 uses backend 'gloo', rank 0 'gloo, ucx'" in str(found)


@pytest.mark.parametrize("said", [(None,) * 3, (None, "no GPU", None), ("late", None, "no GPU")])
def test_a_problem_of_one_rank_is_one_of_all(said: tuple[str | None, ...]) -> None:
    def elsewhere(rank: int, text: str) -> BackendError:
        return BackendError(f"rank {rank}: {text}")

    first = next((r for r, text in enumerate(said) if text is not None), None)
    for rank, own in enumerate(said):
        problem = None if own is None else BackendError(f"here: {own}")
        if first is None:
            raise_alike(problem, said, elsewhere)
            continue
        with pytest.raises(BackendError) as caught:
            raise_alike(problem, said, elsewhere)
        assert caught.value is problem or caught.value.what == f"rank {first}: {said[first]}"
        assert (caught.value is problem) is (said[rank] is not None)
