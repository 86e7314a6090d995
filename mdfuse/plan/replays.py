"""Captured regions, and replays that need no closer look.

Parameters that a graph reads in place must still lie at the same addresses: one comparison. All
others are copied in and out. So a run whose plan is one graph needs no other decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor

from mdfuse.plan.captures import Recording
from mdfuse.plan.signature import copy_alike

_Call = Callable[[], None]


def unwatched() -> None:
    """Do nothing, where there is no watch."""


@dataclass
class Captured:
    """A captured region: the graph, and the buffers that it reads and fills.

    Attributes:
        bound: parameters that the graph reads where they lie -> their address.
        copied: parameters that are copied -> the graph's buffer.
        filled: the copied parameters that are only written.
        results: slot -> the buffer that each replay fills.
        written: the parameters in `copied` that the region writes into.
        recording: the graph.
        notes: the functions called before and behind a replay, for the watch.
    """

    bound: dict[int, int]
    copied: dict[int, Tensor]
    filled: frozenset[int]
    results: dict[int, Any]
    written: tuple[int, ...]
    recording: Recording
    notes: tuple[_Call, _Call]

    @property
    def call(self) -> _Call:
        """The call of a replay where nothing is copied."""
        before, behind = self.notes
        calls = [x for x in (before, self.recording.replay, behind) if x is not unwatched]
        if len(calls) == 1:
            return calls[0]

        def all_of_them() -> None:
            for call in calls:
                call()

        return all_of_them

    def replay(self, slots: dict[int, Any]) -> None:
        """Replay for the values of some slots; fill those of the results."""
        for slot, buffer in self.copied.items():
            if slot not in self.filled:
                copy_alike(slots[slot], buffer)
        self.call()
        for slot in self.written:
            slots[slot].copy_(self.copied[slot])
        slots.update(self.results)

    def fits(self, slots: Mapping[int, Any]) -> bool:
        """Tell whether the parameters that the graph reads in place still lie there."""
        return all(slots[slot].data_ptr() == at for slot, at in self.bound.items())


@dataclass(slots=True)
class Ready:
    """A whole run by one graph, for values in the order of a plan's parameters.

    Attributes:
        at: the addresses of the values that the graph reads in place, without new outputs; if
            possible the same tuple as in the last run, so that an identity check suffices.
        taken: takes these from the addresses of all given values; None: it reads all in place.
        before: places of values that are copied before, each with the graph's buffer.
        replay: queues the graph.
        behind: places of values that are written behind, each with the graph's buffer.
        copies: whether any value is copied.
    """

    at: tuple[int, ...]
    taken: Callable[[Sequence[int]], tuple[int, ...]] | None
    before: tuple[tuple[int, Tensor], ...]
    replay: _Call
    behind: tuple[tuple[int, Tensor], ...]
    copies: bool

    def fits(self, at: tuple[int, ...]) -> bool:
        """Tell, by the given addresses, whether the values read in place still lie there."""
        return self.at == (at if self.taken is None else self.taken(at))

    def run(self, values: Sequence[Any]) -> None:
        """Replay, with copies before and behind."""
        for n, buffer in self.before:
            copy_alike(values[n], buffer)
        self.replay()
        for n, buffer in self.behind:
            values[n].copy_(buffer)


def ready(
    captured: Captured, parameters: Sequence[int], values: Sequence[Any], new: Collection[int]
) -> Ready:
    """Return the run by one graph alone.

    Args:
        captured: the graph.
        parameters: the slots that a run is given.
        values: their values in a run; other runs lack the same values as this one.
        new: the slots of new outputs, which are made for each run.
    """
    places = {slot: n for n, slot in enumerate(parameters)}
    given = [s for s, x in zip(parameters, values, strict=True) if x is not None and s not in new]
    bound = [n for n, slot in enumerate(given) if slot in captured.bound]
    before = [(places[s], x) for s, x in captured.copied.items() if s not in captured.filled]
    behind = [(places[s], captured.copied[s]) for s in captured.written]
    return Ready(
        at=tuple([captured.bound[given[n]] for n in bound]),
        taken=None if len(bound) == len(given) else _tuple_of(bound),
        before=tuple(before),
        replay=captured.call,
        behind=tuple(behind),
        copies=bool(before or behind),
    )


#: Takes the arguments, and the addresses of the tensors among them; returns the outputs, or None.
Quick = Callable[[Sequence[Any], tuple[int, ...]], "list[Any] | None"]


def quick(
    ready: Mapping[tuple[int, ...], Ready],
    fresh: Callable[[], list[Tensor]],
    taken: Callable[[Sequence[Any]], list[Any]],
    *,
    is_all_new: bool,
) -> Quick:
    """Return the function that runs by one graph alone, if new outputs lie where one expects them.

    It returns None if any tensor lies elsewhere. It precedes each replay, so it makes as few calls
    as possible.

    Args:
        ready: addresses of new outputs -> the run.
        fresh: makes new outputs.
        taken: takes the outputs from arguments and new outputs.
        is_all_new: the outputs are exactly the new ones.
    """
    address = Tensor.data_ptr

    def again(arguments: Sequence[Any], at: tuple[int, ...]) -> list[Any] | None:
        buffers = fresh()
        one = ready.get(tuple(map(address, buffers)))
        if one is None:
            return None
        if one.copies:
            if not one.fits(at):
                return None
            one.run([*arguments, *buffers])
        else:
            if one.at is not at:
                if one.at != at:
                    return None
                one.at = at
            one.replay()
        return buffers if is_all_new else taken([*arguments, *buffers])

    return again


def _tuple_of(places: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[n] for n in places])


@dataclass(slots=True)
class AddressMisses:
    """Counts how often in a row outputs came at addresses that no graph expects.

    After some times a graph is to be captured. Each capture doubles the times until the next one,
    so that captures, which take milliseconds, stay rare for any caller.

    >>> turns = AddressMisses(patience=2)
    >>> [turns.is_due(at) for at in ((1,), (2,), (2,))]
    [False, False, True]
    >>> turns.note_capture()
    >>> [turns.is_due(at) for at in ((3,), (3,), (3,), (3,))]
    [False, False, False, True]
    """

    patience: int
    _times: int = 0
    _last: tuple[int, ...] = ()

    def is_due(self, at: tuple[int, ...]) -> bool:
        """Note the addresses of outputs; tell whether a graph is to be captured for them."""
        self._times = self._times + 1 if at == self._last else 1
        self._last = at
        return self._times >= self.patience

    def note_capture(self) -> None:
        """Note that a graph was captured."""
        self.patience, self._times = 2 * self.patience, 0
