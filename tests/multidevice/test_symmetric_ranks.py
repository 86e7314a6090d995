"""The backend symmetric on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from backend_suite import *  # noqa: F403  the tests that every backend passes

pytestmark = pytest.mark.backend("symmetric")


@pytest.mark.world(4)
def test_the_backend_is_symmetric(comm: Any) -> None:
    assert comm.backend == "symmetric"
