"""Check a table against a program: each action once, on the right rank group, in an order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdfuse.errors import DefinitionError
from mdfuse.pipelines.actions import Action, Phase
from mdfuse.pipelines.timing import Reads, Rows, chain, lanes, unit

_PHASES: tuple[Phase, ...] = ("F", "B", "I", "W")


def check(
    rows: Rows, where: Sequence[int], microbatches: int, gradients: bool, reads: Reads | None
) -> None:
    """Raise DefinitionError unless a table is complete for some stages and microbatches.

    Args:
        rows: for each rank group its units.
        where: the rank group of each stage.
        microbatches: their number.
        gradients: whether the stages have backwards.
        reads: stage -> the stages that it reads; None for a chain.
    """
    groups = 1 + max(where, default=-1)
    if len(rows) != groups:
        raise _wrong(
            f"its {len(rows)} rows", f"the stages lie on {groups} rank groups", "a row for each"
        )
    places: dict[Action, str] = {}
    for g, row in enumerate(rows):
        for n, action in enumerate(a for cell in row for a in cell):
            place = f"row {g}, action {n}"
            _alone(action, g, place, where, microbatches, gradients)
            if action in places:
                raise _wrong(
                    f"{action} twice, in {places[action]} and in {place}",
                    "its results are added up once for each microbatch",
                    "leave one of them out",
                )
            places[action] = place
    for stage in range(len(where)):
        for k in range(microbatches):
            _whole(stage, k, where[stage], places, gradients)
    lanes(rows, unit, reads if reads is not None else chain(rows))


def _alone(
    action: Action,
    group: int,
    place: str,
    where: Sequence[int],
    microbatches: int,
    gradients: bool,
) -> None:
    """Raise for an action that no place of this table could have."""
    what, stages = f"{action} in {place}", len(where)
    if action.stage >= stages:
        raise _wrong(what, f"stages are numbered from 0 to {stages - 1}", _FEWER)
    if action.microbatch >= microbatches:
        raise _wrong(what, f"microbatches are numbered from 0 to {microbatches - 1}", _FEWER)
    if where[action.stage] != group:
        right = where[action.stage]
        because = f"stage {action.stage} lies on rank group {right}"
        raise _wrong(what, because, f"move it to row {right}")
    if action.phase != "F" and not gradients:
        because = "the program computes no gradients"
        raise _wrong(what, because, 'a table of forwards, as schedule="forward" has')


_FEWER = "leave it out, or make a table for these stages and microbatches"


def _whole(
    stage: int, microbatch: int, group: int, places: dict[Action, str], gradients: bool
) -> None:
    """Raise unless a stage goes forward with a microbatch, and back in one part or in two."""
    place_of = {p: places.get(Action(stage, p, microbatch)) for p in _PHASES}
    if place_of["B"] is not None:
        for part in ("I", "W"):
            if place_of[part] is not None:
                raise _wrong(
                    f"{stage}{part}{microbatch} in {place_of[part]} beside {stage}B{microbatch}",
                    "B is the whole backward, I and W are its two parts",
                    "either B, or I and W",
                )
    missing = [
        p
        for p in _needed(place_of["B"], place_of["I"], place_of["W"], gradients)
        if not place_of[p]
    ]
    if missing:
        raise _wrong(
            f"no {stage}{missing[0]}{microbatch}",
            "every stage computes every microbatch" + (", forth and back" if gradients else ""),
            f"put it into row {group}",
        )


def _needed(b: str | None, i: str | None, w: str | None, gradients: bool) -> Iterator[Phase]:
    yield "F"
    if gradients and (i or w):
        yield from ("I", "W")
    elif gradients and not b:
        yield "B"


def _wrong(what: str, because: str, hint: str) -> DefinitionError:
    return DefinitionError(f"table of a schedule: {what}", because=because, hint=hint)
