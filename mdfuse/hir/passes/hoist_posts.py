"""Post ahead what is there already, so that it travels behind earlier work (`prefetch_bytes`).

    %h = matmul(%x, %w1.whole)                      %w2.whole = alloc
    %w2.whole = alloc                               %c1 = post allgather(%w2) -> %w2.whole
    %c1 = post allgather(%w2) -> %w2.whole   ->     %h = matmul(%x, %w1.whole)
    wait %c1                                        wait %c1
    %y = matmul(%h, %w2.whole)                      %y = matmul(%h, %w2.whole)

A post moves up with the buffer that it fills and the copies and views that it sends, up to the last
write of what these read, and stands before work or a wait, not before a post that is wanted sooner.
Posts are taken in the order of the program, as long as the buffers that what was posted ahead of
its place fills, and those that it copies what it sends into, take no more bytes on a rank than the
option says: the memory that it costs. With "layer" these are gathers of a module's parameters, and
one group of posts (`post_layers`), or one post, is ahead: that of the next layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, dataflow, shared_operand
from mdfuse.hir.instructions import COMMUNICATIONS, POSTS, PURE_VIEWS, row_of
from mdfuse.hir.once import once
from mdfuse.hir.orders import Dims, seen_through
from mdfuse.hir.program import HostProgram, Instruction

name = "hoist_posts"

#: Instructions that nothing passes: others count on what stands before them.
_FENCES = ("block", "call", "barrier", "get_stream", "set_stream", "sync", "return")
#: Instructions that may go with a post, besides views: they make or fill the buffers that it uses.
_CARRIED = ("alloc", "set", "pack", "pad", *PURE_VIEWS)


@dataclass(frozen=True)
class Raised:
    """A post that may move up, or a group of posts.

    Attributes:
        at: its place among the instructions; that of a group's start.
        posts: the places of its posts.
        since: the first place at which everything that it needs is there.
        carried: the places of what goes with it, and its own.
        bytes: of the buffers that are made for it, on a rank.
    """

    at: int
    posts: tuple[int, ...]
    since: int
    carried: tuple[int, ...]
    bytes: int


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with posts moved up."""
    if not options.prefetch_bytes:
        return program
    most = options.prefetch_bytes
    if most == "layer":
        raised = [*candidates(program, of_parameters=True)]
    else:
        raised = [r for r in raisable(program) if r.bytes <= most]
    if not raised:
        return program
    gaps = [_is_gap(i) for i in program.instructions]
    order = _order(gaps, raised, most)
    return replace(program, instructions=tuple(program.instructions[n] for n in order))


def parameter(program: HostProgram, i: Instruction) -> str | None:
    """Return the parameter of a module that a post gathers; None: it does something else.

    A program is that of a module if the name of an input has a dot, as `layers.0.weight`; then all
    inputs count, since parameters outside of layers may have plain names.
    """
    if i.comm is None or i.comm.kind != "Allgather":
        return None
    x = dataflow(program).memory(i.reads[0])
    return x if x in program.inputs and any("." in name for name in program.inputs) else None


def is_by_layers(program: HostProgram) -> bool:
    """Return whether a program gathers the parameters of a module."""
    return any(parameter(program, i) is not None for i in program.instructions)


def largest(program: HostProgram) -> int:
    """Return the most bytes that a gather outside of loops takes ahead of its place; 0: none."""
    comms = ((r, program.instructions[r.posts[0]].comm) for r in raisable(program))
    return max((r.bytes for r, c in comms if c is not None and c.kind == "Allgather"), default=0)


@once
def raisable(program: HostProgram) -> tuple[Raised, ...]:
    """Return the posts that may move up, in order."""
    return (*candidates(program),)


def candidates(program: HostProgram, of_parameters: bool = False) -> Iterator[Raised]:
    """Yield the posts that may move up, in order; of a group the first one says what it gathers."""
    start, fence = -1, -1
    for at, i in enumerate(program.instructions):
        fence = at if i.op in _FENCES else fence
        if i.op == "group_start":
            start = at
        elif i.op == "group_end" or (i.op == "post" and start < 0):
            places = range(start if start >= 0 else at, at + 1)
            first = program.instructions[places[start >= 0]]
            start = -1
            if of_parameters and parameter(program, first) is None:
                continue
            raised = _raised(program, places, fence)
            if raised is not None:
                yield raised


def _raised(program: HostProgram, places: range, fence: int) -> Raised | None:
    """Return how a post, or a group of posts, may move up to a fence; None where it may not."""
    flow, at = dataflow(program), places[0]
    posts = tuple(n for n in places if program.instructions[n].op == "post")
    if not posts or len(places) != len(posts) + 2 * (len(places) > 1):
        return None  # a group of transfers
    carried, since = {*places}, fence + 1
    reads = [x for n in posts for x in program.instructions[n].reads]
    filled = {program.instructions[n].reads[-1] for n in posts}
    while reads:
        x = reads.pop()
        by = flow.bound_at(x)
        if by in carried:
            continue
        if by <= fence or not _goes_along(flow, x, at):
            if x in filled:
                return None  # the buffer may be in use
            since = max(since, 1 + by, 1 + flow.last_write(x, at))
            continue
        carried.add(by)
        reads += program.instructions[by].reads
    moved = map(program.instructions.__getitem__, carried)
    new = (x for i in moved if _is_new(program, i) for x in i.outputs)
    size = sum(program.types[x].nbytes() for x in new)
    return Raised(at, posts, since, tuple(sorted(carried)), size) if since < at else None


def _is_new(program: HostProgram, i: Instruction) -> bool:
    """Return whether an instruction that goes with a post makes memory.

    A view does so where it has to lie in another memory order.
    """
    operand = shared_operand(i)
    if operand is None or i.op == "pad":
        return i.op not in POSTS
    if operand in program.inputs:
        lies: Dims | None = tuple(range(len(program.types[operand].shape)))
    else:
        known = program.orders.get(program.root(operand))
        lies = known.lies if known is not None else None
    if lies is not None and i.op != "set":
        lies = seen_through(i, lies) if i.op == "permute" else None
    return i.order is not None and i.order != lies


def _goes_along(flow: Dataflow, x: str, at: int) -> bool:
    """Return whether the maker of a buffer may move.

    It did nothing else, and nothing wrote there since.
    """
    by = flow.bound_at(x)
    i = flow.code[by]
    if i.outputs != (x,) or not _is_carried(i) or i.body:
        return False
    return shared_operand(i) is not None or flow.last_write(x, at) == by


def _is_carried(i: Instruction) -> bool:
    """Return whether an instruction may make or fill a buffer that a post uses, and go with it."""
    row = row_of(i)
    return i.op in _CARRIED or (row is not None and row.is_view)


def _is_gap(i: Instruction) -> bool:
    """Return whether posts go before an instruction: work or a wait, not another post."""
    return (not _is_carried(i) and i.op not in COMMUNICATIONS) or i.op == "wait"


def _order(
    gaps: Sequence[bool], raised: Sequence[Raised], most: int | Literal["layer"]
) -> list[int]:
    """Return the places of the instructions in their new order."""
    order: list[int] = []
    done: set[int] = set()
    #: the posts ahead of their place -> their bytes
    ahead: dict[int, int] = {}
    waiting = list(raised)
    for at, is_gap in enumerate(gaps):
        ahead.pop(at, None)
        waiting = [r for r in waiting if r.at > at]
        for r in [r for r in waiting if r.since <= at and is_gap]:
            if ahead if most == "layer" else sum(ahead.values()) + r.bytes > most:
                break  # a later one must not take its room
            ahead[r.at] = r.bytes
            waiting.remove(r)
            fresh = [n for n in r.carried if n not in done]
            order += fresh
            done.update(fresh)
        if at not in done:
            order.append(at)
            done.add(at)
    return order
