"""Build the verifier's errors: the fact, the instructions, the user's lines, the rule, the hint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mdfuse.errors import CommunicationError, MdfuseError, ProgramError
from mdfuse.hir.program import HostProgram, Instruction


def instruction_text(program: HostProgram, i: Instruction) -> str:
    """Return an instruction as the program prints it, without the block inside it."""
    shown = replace(program, instructions=(replace(i, source=None),), inputs=(), aliases={})
    try:
        return str(shown).splitlines()[1].strip().removesuffix(" {")
    except (MdfuseError, LookupError, AssertionError, ValueError, StopIteration):
        return str(i)  # its types or its post are wrong, and cannot be printed


def place(program: HostProgram, i: Instruction | None) -> list[str]:
    """Return the lines of an error that show the rank, the instruction and the user's line."""
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
    """Return the error for an instruction that is wrong.

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


@dataclass(frozen=True, slots=True)
class ErrorText:
    """The words of an error, with the instruction `i` and other arguments in braces."""

    what: str
    because: str | None = None
    hint: str | None = None

    def __call__(
        self,
        program: HostProgram,
        i: Instruction | None,
        *also: Instruction | None,
        **arguments: object,
    ) -> ProgramError:
        """Return the error for an instruction; `also`: others that have to do with it."""
        because, hint = (
            text and text.format(i=i, **arguments) for text in (self.because, self.hint)
        )
        what = self.what.format(i=i, **arguments)
        return wrong(program, i, what, because=because, hint=hint, also=also)


def disagreement(
    places: Sequence[tuple[HostProgram, Instruction | None]],
    what: str,
    *,
    because: str,
    hint: str | None = None,
) -> CommunicationError:
    """Return the error for communications that do not fit together, with the place on each rank.

    Args:
        places: the program of each rank that has to do with it, and the instruction there; None for
            the program as a whole.
        what: the fact.
        because: the rule that was broken.
        hint: what to do instead.
    """
    where = [line for program, i in places for line in place(program, i)]
    return CommunicationError(what, where=where, because=because, hint=hint)
