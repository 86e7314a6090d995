"""The check of `mdfuse doctor --collective` on ranks that exist."""

from __future__ import annotations

import pytest

import mdfuse as mf
from mdfuse.cli.doctor.collective import measure, wrong_values


@pytest.mark.world(4)
def test_values_are_right_and_times_positive(comm: mf.Communicator) -> None:
    found = measure(comm, [64, 4096])
    assert wrong_values(comm, found) == []
    assert [m.size for m in found] == [64, 4096] * 3
    # as a ring: each element of an all-reduce arrives 2 (n - 1) / n times
    assert [m.arrives for m in found if m.size == 64] == [96, 48, 64]
    assert all(m.seconds > 0 and m.bandwidth > 0 for m in found)
