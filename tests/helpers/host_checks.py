"""Host programs as text, and what the verifier says of them."""

from __future__ import annotations

import re

import pytest

from mdfuse import hir
from mdfuse.errors import MdfuseError
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.check import verify

#: Abbreviations in the texts below.
WORDS = {
    "T": "f32[4] (x=R)",
    "M": "f32[4,4] (x=R)",
    "S": "f32[2] of [4] (x=S0)",
    "P": "f32[4] (x=P(sum))",
    "V": "f32[4] (x=varies)",
    "CHUNK": "f32[2] of [4] (x=R, chunk(0,2,%i))",
    "SUM": "f32[4] (x=P(sum)) => (x=R) axis=x",
    "GATHER": "f32[4] (x=S0) => (x=R) axis=x dim=0",
}


def full(text: str) -> str:
    """A line for each instruction, and the types that stand for the words of `WORDS`."""
    text = re.sub(r"(?<= )[A-Z]+(?=[ ;]|$)", lambda word: WORDS[word.group()], text)
    return "\n".join(line.strip() for line in text.split(";"))


def parse(text: str, on: str = "mesh(x=2)", rank: int | None = None) -> HostProgram:
    """The program with these instructions."""
    of = "" if rank is None else f" rank {rank}"
    return hir.parse(f"host @p on {on}{of} {{\n{full(text)}\n}}")


def everywhere(program: HostProgram) -> dict[int, HostProgram]:
    """The projection of every rank."""
    return {rank: project(program, rank) for rank in range(program.last_rank + 1)}


def per_rank(*texts: str, on: str | None = None) -> dict[int, HostProgram]:
    """A program for each rank."""
    mesh = on or f"mesh(x={len(texts)})"
    return {rank: parse(text, mesh, rank) for rank, text in enumerate(texts)}


def refused(program: str | HostProgram | dict[int, HostProgram], *words: str) -> str:
    """The message with which a program, or its text, is refused; it contains these words, in this
    order."""
    with pytest.raises(MdfuseError) as caught:
        verify(parse(program) if isinstance(program, str) else program)
    message, at = str(caught.value), 0
    for word in words:
        found = message.find(word, at)
        assert found >= 0, f"{word!r} is not in the rest of:\n{message}"
        at = found + len(word)
    return message


def accepted(program: HostProgram) -> None:
    """The program is right for all ranks at once, and so are its projections."""
    assert hir.parse(str(program)) == program
    verify(program)
    verify(everywhere(program))
    for local in everywhere(program).values():
        verify(local)
