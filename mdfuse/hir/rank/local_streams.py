"""Drop from a projection the syncs of its loops that guard nothing on its rank.

    for %i in 0..4 {                                for %i in 0..4 {
      set_stream 0                                    set_stream 0
      %h.i = matmul(%x.i, %w)                         %h.i = matmul(%x.i, %w)
      set_stream 1                                    set_stream 1
      sync 0                                          sync 0
      %c0 = post broadcast(%h.i) …          ->        %c0 = post broadcast(%h.i) …
      wait %c0                                        wait %c0
      set_stream 0                                  }
      sync 1
      %y.i = …            # on another rank
    }

A program for all ranks has the syncs that any of them needs. On this one, the second sync would
make each chunk wait until the one before it is sent. Needed are those without which two accesses
of a buffer would be in no order (`hir/verify/needed.py`). What runs on which stream stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mdfuse.errors import ProgramError
from mdfuse.hir.analysis.dataflow import shared_operand
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.needed import MARK, Needed

#: Instructions that do no work on a stream; views do none either.
_IDLE = ("free", "get_stream", "set_stream", "sync", "group_start", "group_end")


def run(program: HostProgram, whole: HostProgram) -> HostProgram:
    """Return a projection without syncs that it does not need, where it lacks work of the whole."""
    if not any(i.op == "sync" for i in _looped(whole)):
        return program
    if _count(program) == _count(whole) or _work(program) == _work(whole):
        return program
    marked = replace(program, instructions=tuple(_marked(program.instructions, iter(range(10**6)))))
    needed = _needed(marked)
    if needed is None:
        return program
    return replace(program, instructions=tuple(_dropped(marked.instructions, needed)))


def _looped(program: HostProgram) -> Iterator[Instruction]:
    return (j for i in program.instructions if i.op == "for" for k in i.body for j in k.walk())


def _count(program: HostProgram) -> int:
    return sum([1 for _ in _looped(program)])


def _work(program: HostProgram) -> int:
    """Return how many instructions in loops do work on a stream."""
    return sum(_is_work(i) for i in _looped(program))


def _is_work(i: Instruction) -> bool:
    is_view = shared_operand(i) is not None and i.order is None
    return i.op not in (*_IDLE, "for", "next", "if") and not is_view


def _marked(
    block: tuple[Instruction, ...], numbers: Iterator[int], is_loop: bool = False
) -> Iterator[Instruction]:
    """Yield the block, with a number at each sync of two numbered streams inside a loop."""
    is_numbered = False
    for i in block:
        if i.op == "set_stream":
            is_numbered = bool(i.attrs)
        if i.op == "sync" and i.attrs and is_loop and is_numbered:
            i = replace(i, attrs=(*i.attrs, (MARK, next(numbers))))
        is_for = is_loop or i.op == "for"
        if i.op in ("for", "if"):
            body, orelse = (tuple(_marked(b, numbers, is_for)) for b in (i.body, i.orelse))
            i = replace(i, body=body, orelse=orelse)
        yield i


def _needed(marked: HostProgram) -> frozenset[int] | None:
    """Return the marks of the syncs that are needed; None where the program is wrong anyway.

    A wrong program stays as it is, and the verifier says what is wrong with it.
    """
    updated = frozenset(map(marked.root, marked.aliases)).intersection(marked.inputs)
    try:
        flow = Needed(written_out(marked), updated)
        flow.run()
    except ProgramError:
        return None
    return flow.marks


def _dropped(
    block: tuple[Instruction, ...], needed: frozenset[int], is_over: bool = False
) -> list[Instruction]:
    """Return the block without the syncs that are not needed, and without the marks of the others.

    Args:
        block: the instructions.
        needed: the marks that are.
        is_over: what follows the block switches before it does any work.
    """
    remaining: list[Instruction] = []
    for n, i in enumerate(block):
        mark = i.kwargs.get(MARK) if i.op == "sync" else None
        if mark is not None and mark not in needed:
            continue
        if mark is not None:
            i = replace(i, attrs=tuple(pair for pair in i.attrs if pair[0] != MARK))
        if i.op in ("for", "if"):
            after = _is_idle(block[n + 1 :], is_over) and (i.op == "if" or _is_idle(i.body, False))
            body, orelse = (tuple(_dropped(b, needed, after)) for b in (i.body, i.orelse))
            i = replace(i, body=body, orelse=orelse)
        remaining.append(i)
    return _switched(remaining, is_over)


def _switched(block: list[Instruction], is_over: bool) -> list[Instruction]:
    """Return the block without `set_stream` where it changes nothing, or no work follows."""
    remaining: list[Instruction] = []
    current: Instruction | None = None  # the last switch of the block, still in force
    for n, i in enumerate(block):
        if i.op == "set_stream":
            if i == current or _is_idle(block[n + 1 :], is_over):
                continue
            current = i
        elif i.op == "next" or any(j.op == "set_stream" for j in i.walk()):
            current = None
        remaining.append(i)
    return remaining


def _is_idle(following: Sequence[Instruction], is_over: bool) -> bool:
    """Return whether a switch follows before any work; `is_over` where `following` has neither."""
    for i in following:
        if i.op == "set_stream":
            return True
        if i.op in ("sync", "get_stream", "for", "next", "if", "return") or _is_work(i):
            return False
    return is_over
