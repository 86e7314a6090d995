"""Messages of rank 0 to the others."""

from __future__ import annotations

import numpy as np
import pytest

from mdfuse.serving.front import Message, _packed, _unpacked


@pytest.mark.parametrize(
    "message",
    [
        Message("nothing", requests=0),
        Message("end"),
        Message("error", text="rank 0: – ü"),
        Message("step", True, np.arange(7), None),
        Message("step", False, np.arange(3), np.arange(8.0).reshape(2, 4), requests=2),
    ],
    ids=str,
)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    there = _unpacked(_packed(message))
    assert there._replace(integers=None, numbers=None) == message._replace(
        integers=None, numbers=None
    )
    for a, b in zip(there[2:4], message[2:4], strict=True):
        assert (a is None) == (b is None)
        np.testing.assert_array_equal(a, b)
