"""Events of CUDA without a GPU, which note who records and waits for them."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch


class Event:
    """Stands for `torch.cuda.Event`: notes which stream records it, and which ones wait for it."""

    #: The stream that is current.
    current: ClassVar[str] = ""
    notes: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def install(cls, patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
        """Take the place of torch's; return what is noted: (record or wait, the stream)."""
        patch.setattr(torch.cuda, "Event", cls)
        patch.setattr(cls, "current", "")
        patch.setattr(cls, "notes", [])
        return cls.notes

    def record(self) -> None:
        self.notes.append(("record", self.current))

    def wait(self) -> None:
        self.notes.append(("wait", self.current))


class WaitsOnce:
    """A work whose second wait does nothing, as that of several libraries."""

    def __init__(self) -> None:
        self.joined: list[str] = []

    def wait(self) -> None:
        if not self.joined:
            self.joined.append(Event.current)
