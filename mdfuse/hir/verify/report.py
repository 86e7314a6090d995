"""Where a host program is wrong: what the errors of the verifier have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mdfuse.errors import CommunicationError, MdfuseError, ProgramError
from mdfuse.hir.program import HostProgram, Instruction


def instruction_text(program: HostProgram, i: Instruction) -> str:
    """An instruction as the program prints it, without what is inside it."""
    shown = replace(program, instructions=(replace(i, source=None),), inputs=(), aliases={})
    try:
        return str(shown).splitlines()[1].strip().removesuffix(" {")
    except (MdfuseError, LookupError, AssertionError, ValueError, StopIteration):
        return str(i)  # its types, or what it posts, are what is wrong


def place(program: HostProgram, i: Instruction | None) -> list[str]:
    """The rank, the instruction and the user's line, for an error message."""
    rank = "" if program.rank is None else f"rank {program.rank}   "
    if i is None:
        return [f"{rank}host @{program.name}"]
    quote = [i.source.quote()] if i.source else []
    return [rank + instruction_text(program, i), *quote]


def wrong(
    program: HostProgram,
    i: Instruction | None,
    what: str,
    *,
    because: str | None = None,
    hint: str | None = None,
    also: Sequence[Instruction | None] = (),
) -> ProgramError:
    """The error for an instruction.

    Args:
        program: the program that was checked.
        i: the instruction; None for the program as a whole.
        what: the fact.
        because: the rule that was broken.
        hint: what to do instead.
        also: other instructions that have to do with it.
    """
    where = [line for x in (i, *also) for line in place(program, x)]
    return ProgramError(f"@{program.name}: {what}", where=where, because=because, hint=hint)


def disagreement(
    places: Sequence[tuple[HostProgram, Instruction | None]],
    what: str,
    *,
    because: str,
    hint: str | None = None,
) -> CommunicationError:
    """The error for communications that do not fit together, with the place on each rank."""
    where = [line for program, i in places for line in place(program, i)]
    return CommunicationError(what, where=where, because=because, hint=hint)
