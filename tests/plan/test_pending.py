"""How two streams wait for one communication."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from mdfuse.plan.pending import halves, nothing_posted


@dataclass(eq=False)
class Event:
    """Stands for an event of CUDA: what it was recorded behind, and who waited for it."""

    made: list[Event]
    behind: list[int] = field(default_factory=list)

    def record(self) -> None:
        self.behind = [len(self.made)]
        self.made.append(self)

    def wait(self) -> None:
        self.behind.append(-1)


def test_what_only_this_rank_copies_is_waited_for_where_it_was_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second wait is for that alone, not for what the first one's stream did before it."""
    made: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(made))
    sent, received = halves(nothing_posted(has_streams=True)(), has_streams=True)
    for work in (*received, *sent):
        work.wait()
    assert [e.behind for e in made] == [[0, -1, -1]]


class Once:
    """A work that a library lets one wait for."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_other_works_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(made))
    work = Once()
    sent, received = halves((work,), has_streams=True)
    for side in (*received, *sent):
        side.wait()
    assert work.waits == 1 and [e.behind for e in made] == [[0, -1]]
