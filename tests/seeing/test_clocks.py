"""Clocks of several ranks are aligned as well as the store is quick."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import perf_counter_ns

import pytest

from mdfuse.seeing.clocks import offset


class Shared:
    """A store of several threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 60)
            return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            there = self.changed.wait_for(
                lambda: {*keys} <= self.values.keys(), timeout.total_seconds()
            )
        if not there:
            raise RuntimeError(f"no {keys} in time")

    def delete_key(self, key: str) -> bool:
        with self.changed:
            return self.values.pop(key, None) is not None


def test_offsets_are_found_within_their_errors() -> None:
    """Ranks whose clocks are hours apart, one running backwards in sign, agree afterwards."""
    ahead = [0, 3_600_000_000_000, -7_200_000_000_123]
    store, zero = Shared(), 5_000_000_000_000_000

    def ask(rank: int) -> tuple[int, int]:
        return offset(
            store,
            rank,
            len(ahead),
            clock=lambda: perf_counter_ns() + ahead[rank],
            unix=lambda: perf_counter_ns() + zero,
        )

    with ThreadPoolExecutor(len(ahead)) as pool:
        found = [*pool.map(ask, range(len(ahead)))]
    for rank, (by, error) in enumerate(found):
        assert error < 10**9
        assert abs(by - (zero - ahead[rank])) <= error
    assert store.values == {}, "nothing stays in the store"


def test_one_rank_asks_nobody() -> None:
    by, error = offset(Shared(), 0, 1, clock=lambda: 100, unix=lambda: 1100)
    assert (by, error) == (1000, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_gone_is_not_waited_for(rank: int) -> None:
    with pytest.raises(RuntimeError, match="in time"):
        offset(Shared(), rank, 2, timeout_s=0.01)
