"""Schedules by one greedy rule: the ready action with the smallest key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    stage: int
    phase: str
    microbatch: int


@dataclass(frozen=True)
class Rows:
    rows: tuple[tuple[Action, ...], ...]


def forward(stages: int, microbatches: int) -> Rows:
    return Rows(tuple(tuple(Action(s, "F", k) for k in range(microbatches)) for s in range(stages)))


def gpipe(stages: int, microbatches: int) -> Rows:
    return Rows(
        tuple(
            tuple(Action(s, phase, k) for phase in "FB" for k in range(microbatches))
            for s in range(stages)
        )
    )


def one_f_one_b(stages: int, microbatches: int, split: bool = False) -> Rows:
    rows = []
    for s in range(stages):
        ahead = min(stages - s, microbatches)
        row = [Action(s, "F", k) for k in range(ahead)]
        for k in range(microbatches):
            row += [Action(s, p, k) for p in ("IW" if split else "B")]
            row += [Action(s, "F", k + ahead)] if k + ahead < microbatches else []
        rows.append(tuple(row))
    return Rows(tuple(rows))
