"""Figures of all pairs of layouts on a mesh, in one process or in several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

from _reshard_dtensor import Planner, fake_ranks
from _reshard_least import Least
from _reshard_owners import worst as worst_of_owners
from _reshard_pairs import Moved, Pair, blocked_pairs, bound, moved, pairs, posts, sender_spread
from rich.console import Console
from rich.progress import track

from mdfuse import DeviceMesh, Layout
from mdfuse.communication import Communication
from mdfuse.reshard.steps import _steps as planned  # without what is kept of earlier plans

MESHES = (DeviceMesh.arange(a=2, b=4), DeviceMesh.arange(a=2, b=2, c=2))
SHAPES = ((4096, 4096), (4099, 2053), (13, 9))

#: runs a function on several tasks, which are said in words, and returns what it found, in order
Run = Callable[[str, Callable[[Any], Any], Sequence[Any]], list[Any]]

#: In how many parts the pairs of a mesh and shape are looked at.
_PARTS = 16


@contextmanager
def running(jobs: int) -> Iterator[Run]:
    """Give what runs tasks in this process, or in as many others as are asked for."""
    console = Console(stderr=True)
    if jobs == 1:
        yield lambda what, do, tasks: [do(task) for task in track(tasks, what, console=console)]
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:

        def run(what: str, do: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
            looks = pool.map(do, tasks)
            return [*track(looks, what, total=len(tasks), console=console)]

        yield run


@dataclass(frozen=True)
class Found:
    """The figures of one pair."""

    pair: str
    steps: str
    least: Moved
    ours: Moved
    reachable: float | None
    owners: float | None
    dtensor: float | None
    messages: int
    milliseconds: float
    spread: float | None

    @property
    def ratio(self) -> float:
        """The bytes of the worst rank over the bound; 1 where nothing has to move."""
        return self.ours.worst / self.least.worst if self.least.worst else 1.0 + self.ours.worst

    @property
    def whole_ratio(self) -> float:
        """The same where what the worst rank must get is rounded up to whole elements."""
        least = math.ceil(self.least.worst - 1e-9)
        return self.ours.worst / least if least else 1.0 + self.ours.worst

    @property
    def reachable_ratio(self) -> float | None:
        """The least bytes by steps between layouts, over the bound."""
        if self.reachable is None:
            return None
        return self.reachable / self.least.worst if self.least.worst else 1.0 + self.reachable

    @property
    def owners_ratio(self) -> float | None:
        """The least bytes where any rank may reduce any element, over the bound."""
        if self.owners is None:
            return None
        return max(self.owners / self.least.worst, 1.0)


def look(
    source: Layout,
    goal: Layout,
    shape: tuple[int, ...],
    theirs: Planner | None = None,
    least: Least | None = None,
) -> Found:
    """Plan one pair, and count what its steps move."""
    start = time.process_time_ns()
    path = planned(source, goal, shape)
    elapsed = time.process_time_ns() - start
    comms, ranks = posts(path, shape), sorted({*source.mesh.ranks, *goal.mesh.ranks})
    return Found(
        pair=f"{source} -> {goal}",
        steps="; ".join(map(str, comms)) or "nothing is sent",
        least=bound(source, goal, shape),
        ours=moved(comms, ranks),
        reachable=least.worst(source, goal) if least is not None else None,
        owners=worst_of_owners(source, goal, shape)
        if least is not None and source.partial_axes and not goal.partial_axes
        else None,
        dtensor=theirs.elements(source, goal, least=True) if theirs is not None else None,
        messages=sum(map(_messages, comms)),
        milliseconds=elapsed / 1e6,
        spread=sender_spread(comms),
    )


def _messages(comm: Communication) -> int:
    """Return the number of sends of the busiest rank; one for a collective."""
    if comm.kind not in ("Exchange", "ReduceExchange"):
        return 1
    calls = (comm.part(r).call for r in comm.source.mesh.ranks)
    return max((len(call.sends) for call in calls if call is not None), default=0)


@dataclass(frozen=True)
class Looks:
    """The pairs of a mesh and shape, or each `_PARTS`-th of them."""

    place: int
    shape: tuple[int, ...]
    are_blocked: bool = False
    first: int | None = None


def pairs_of(place: int, shape: tuple[int, ...], are_blocked: bool = False) -> list[Pair]:
    """Return all pairs on a mesh."""
    mesh = MESHES[place]
    return list(blocked_pairs(mesh, shape) if are_blocked else pairs(mesh, len(shape)))


def found_of(looks: Looks, run: Run) -> list[Found]:
    """Look at all pairs; what is found is in their order."""
    what = f"{MESHES[looks.place]} {' x '.join(map(str, looks.shape))}"
    tasks = [replace(looks, first=n) for n in range(_PARTS)]
    rows: list[Any] = [None] * len(pairs_of(looks.place, looks.shape, looks.are_blocked))
    for n, part in enumerate(run(what, _looked, tasks)):
        rows[n::_PARTS] = part
    return rows


def _looked(looks: Looks) -> list[Found]:
    """Look at some pairs."""
    place, shape = looks.place, looks.shape
    every = pairs_of(place, shape, looks.are_blocked)[looks.first :: _PARTS]
    if looks.are_blocked:
        return [look(s, g, shape) for s, g in every]
    is_asked = place == 0 or shape == SHAPES[0]  # it takes minutes
    with fake_ranks(MESHES[place].size):
        theirs = Planner(MESHES[place], shape) if is_asked else None
        return [look(s, g, shape, theirs, _least(place, shape)) for s, g in every]


@lru_cache(maxsize=1)
def _least(place: int, shape: tuple[int, ...]) -> Least:
    return Least(MESHES[place], shape)
