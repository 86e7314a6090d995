"""Actions of a rank group: one phase of one stage, for one microbatch.

The words are those of `torch.distributed.pipelining`: `1F0` is the forward of stage 1 for
microbatch 0, `1B0` its backward, `1I0` the part of it that other stages wait for (gradients of the
stage's inputs), `1W0` the rest (gradients of its weights).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from mdfuse.errors import DefinitionError, shown

Phase = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
#: Other entries of torch's tables: parameters are gathered, gradients reduced, data sent.
_IMPLIED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")
_OVERLAP = re.compile(r"\(([0-9]{1,9})(F)([0-9]{1,9});([0-9]{1,9})([BI])([0-9]{1,9})\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One phase of one stage for one microbatch.

    Attributes:
        stage: its number, from 0 on.
        phase: "F", forward; "B", backward; "I" and "W", the two parts of it.
        microbatch: its number, from 0 on.

    >>> print(Action(1, "F", 0))
    1F0
    """

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward as one unit: each works while the other waits.

    Attributes:
        forward: of one stage.
        backward: of another stage of the same rank group.

    >>> print(Overlap(Action(0, "F", 3), Action(1, "B", 0)))
    (0F3;1B0)OVERLAP_F_B
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


#: An entry of a table: None is an idle slot.
Cell = Action | Overlap | None


def of(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of a cell, in order."""
    match cell:
        case None:
            return ()
        case Overlap(forward, backward):
            return forward, backward
        case Action():
            return (cell,)


def read(text: str, where: str) -> tuple[Cell, ...]:
    """Return the cell that a text stands for, in a tuple; () for an implied action.

    Sends, receives, and FSDP's actions follow from the program: they are left out.

    Args:
        text: as `torch.distributed.pipelining` writes it.
        where: its position in the table, for the error.

    Raises:
        DefinitionError: it is no such text.
    """
    text = text.strip()
    if not text:
        return (None,)
    if match := _ACTION.fullmatch(text):
        return (_action(match),)
    if _IMPLIED.fullmatch(text):
        return ()
    if match := _OVERLAP.fullmatch(text):
        return (Overlap(_action(match, 1), _action(match, 4)),)
    raise DefinitionError(
        f"{shown(text)} is no action of a pipeline",
        where=where,
        because="an action is a stage, one of F, B, I and W, and a microbatch",
        hint="for example 1F0: the forward of stage 1 for microbatch 0",
    )


def _action(match: re.Match[str], at: int = 1) -> Action:
    return Action(int(match[at]), cast(Phase, match[at + 1]), int(match[at + 2]))
