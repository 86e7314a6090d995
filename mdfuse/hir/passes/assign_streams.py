"""Spread loops over chunks across streams, so that iterations, or copies and compute, overlap.

    for %i in 0..4 {                            %caller = get_stream
      %x.i: … = chunk(%x)                       for %s in 0..2 {
      %y.i: … = chunk(%y)                         set_stream %s
      %y.i = add(%x.i, 1.0)                       sync %caller
    }                                   ->      }
                                                for %i in 0..4 {
                                                  set_stream %i mod 2
                                                  …
                                                }
                                                set_stream %caller
                                                for %s in 0..2 {
                                                  sync %s
                                                }

The streams wait for the caller's stream before their first work; it waits for them at the end.
Where `next` divides a loop, each part says on which streams it runs, and waits on the stream that
reads what arrives: a stream that waited for all that is queued on the transfers' would wait for the
next chunk, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from mdfuse.config import Options
from mdfuse.extents.expressions import Index, calc, loop
from mdfuse.hir.analysis.dataflow import Dataflow, dataflow, grouped
from mdfuse.hir.instructions import POSTS, op_of, received, row_of
from mdfuse.hir.program import BufferType, HostProgram, Instruction, joined
from mdfuse.ir.graph import fresh_name

name = "assign_streams"

#: The streams of the policy copy_compute.
COMPUTE, TRANSFER = 0, 1

#: Instructions on the transfer stream: an `alloc` of what arrives, too; an `if` adds that up.
_TRANSFERS = (*POSTS, "wait", "alloc", "if")
#: How many times the bytes of a loop's posts its largest value has where these are few.
_FEW = 1024
#: Large computations, which are worth a stream of their own.
_CONTRACTIONS = ("matmul", "linear", "attention")


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with its loops on streams."""
    places = {id(i) for i in program.instructions if _is_spread(i) and not _is_work(program, i)}
    if options.streams == 1 or not places:
        return program
    types = dict(program.types)
    caller, s = fresh_name(types, "caller"), fresh_name(types, "s")
    code: list[Instruction] = [Instruction(op="get_stream", outputs=(caller,))]
    for i in program.instructions:
        code += _on_streams(dataflow(program), i, options, caller, s) if id(i) in places else [i]
    if any(s in i.outputs for i in code):
        types[s] = BufferType(dtype=torch.int64)
    return replace(program, types=types, instructions=tuple(code))


def _on_streams(
    flow: Dataflow, i: Instruction, options: Options, caller: str, s: str
) -> list[Instruction]:
    """Return a loop with its streams, which the caller's stream joins; `s` counts them."""
    back = Instruction(op="set_stream", inputs=(caller,))
    wait = Instruction(op="sync", inputs=(caller,))
    if _policy(i, options) == "copy_compute":
        body = _copy_compute(flow, i)
        used = {j.kwargs["stream"] for j in body if j.op == "set_stream"}
    else:
        used = set(range(min(options.streams, i.kwargs["stop"])))
        turn = set_stream(calc("mod", loop(i.outputs[0]), len(used)))
        body = joined((turn, *part) for part in i.parts)
    if len(used) == 1:
        (only,) = used
        body = tuple(j for j in body if j.op != "set_stream")
        return [set_stream(only), wait, replace(i, body=body), back, sync_with(only)]
    over = Instruction(
        op="for", outputs=(s,), attrs=(("start", 0), ("stop", len(used)), ("step", 1))
    )
    return [
        replace(over, body=(set_stream(loop(s)), wait)),
        replace(i, body=body),
        back,
        replace(over, body=(sync_with(loop(s)),)),
    ]


def _policy(i: Instruction, options: Options) -> str:
    if _adds_up(i):
        return "copy_compute"  # iterations add up one buffer, so on one stream
    if options.stream_policy != "auto":
        return options.stream_policy
    return "copy_compute" if any(j.op in POSTS for j in i.walk()) else "round_robin"


def _adds_up(i: Instruction) -> bool:
    """Return whether some iterations write what others have written."""
    return any(j.op in ("if", "accumulate") for j in i.walk())


def _is_spread(i: Instruction) -> bool:
    """Return whether a loop has work that several streams could do at once."""
    return i.op == "for" and (not _adds_up(i) or any(j.op in POSTS for j in i.walk()))


def _is_work(program: HostProgram, i: Instruction) -> bool:
    """Return whether a loop posts, but so few bytes that parts in turn hide all of it.

    On one stream what reads the same values may be one kernel, and memory is used again sooner.
    """
    if len(i.parts) == 1:
        return False
    types, inside = program.types, [k for j in i.body for k in j.walk()]
    posted = [types[x].nbytes() for j in inside if j.op in POSTS for x in received(j)]
    sizes = [types[x].nbytes() for j in inside if op_of(j) is not None for x in j.outputs]
    return _FEW * sum(posted) <= max(sizes, default=0)


def set_stream(stream: Index) -> Instruction:
    """Return what makes a stream current."""
    return Instruction(op="set_stream", attrs=(("stream", stream),))


def sync_with(stream: Index) -> Instruction:
    """Return what lets the current stream wait for another one."""
    return Instruction(op="sync", attrs=(("stream", stream),))


@dataclass
class _Assigned:
    """A loop body under construction, with copies on one stream and computations on another.

    Small computations on what arrives from a transfer of computed values stay with the transfers:
    the next iteration's large ones, queued behind them, need not wait for that transfer. Not so
    where others compute what arrives, as in a pipeline, and not behind a large computation on it.
    """

    flow: Dataflow
    code: list[Instruction] = field(default_factory=list)
    #: name -> the stream on which it was written last
    homes: dict[str, int] = field(default_factory=dict)
    #: names that the other stream already waited for
    known: set[str] = field(default_factory=set)
    #: stream -> what it used and the other has not waited for; a view counts as what it shows
    used: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    #: names that a transfer of computed values brought, and what follows from them
    late: set[str] = field(default_factory=set)
    current: int | None = None
    #: whether other iterations may post between a post and its wait
    is_divided: bool = False

    def next(self) -> None:
        """Begin the next part."""
        self.code.append(Instruction(op="next"))
        self.current = None

    def wait(self, i: Instruction, following: Sequence[list[Instruction]]) -> None:
        """Append a wait, in a loop that is divided on the stream of what needs it."""
        arrived = {*self.flow.posts[i.reads[0]].reads}
        readers = (j for members in following for j in members if arrived & {*j.reads, *j.outputs})
        stream = next((s for s in map(self.stream_of, readers) if s is not None), TRANSFER)
        if stream == TRANSFER or not self.is_divided:
            self.add([i])
            return
        # what stands before the post on its stream is done as well
        self.homes.update(dict.fromkeys(arrived & self.homes.keys(), COMPUTE))
        self.known -= arrived
        self.used[TRANSFER].difference_update(self.memory(arrived))
        self.code += [set_stream(COMPUTE), i] if self.current != COMPUTE else [i]
        self.current = COMPUTE

    def add(self, members: list[Instruction]) -> None:
        """Append an instruction, or a group of posts."""
        stream = TRANSFER if len(members) > 1 else self.stream_of(members[0])
        if stream != COMPUTE:
            self.note_late(members)
        if stream is None:
            self.pass_on(members[0])
            return
        if stream != self.current:
            self.code.append(set_stream(stream))
            self.current = stream
        names = {n for i in members for n in self.touched(i)}
        written = {n for i in members for n in _written(i)}
        away = {n for n in names if self.homes.get(n, stream) != stream} - self.known
        if away or not self.used[1 - stream].isdisjoint(self.memory(written)):
            self.code.append(sync_with(1 - stream))
            self.known.update(n for n, home in self.homes.items() if home != stream)
            self.used[1 - stream].clear()
        self.used[stream].update(self.memory(names))
        for i in members:
            for n in (*_written(i), *(self.touched(i) if i.op == "wait" else ())):
                self.homes[n] = stream
                self.known.discard(n)
        self.code += members

    def stream_of(self, i: Instruction) -> int | None:
        """Return the stream of an instruction; None where it does no work."""
        if i.op == "alloc" and i.kwargs.get("memory") == "symmetric":
            return COMPUTE  # of what is sent; its place waits for nobody
        if i.op in _TRANSFERS:
            return TRANSFER
        row, op = row_of(i), op_of(i)
        if i.op == "launch" or (op is not None and not op.is_view):
            is_small = all(j.op not in _CONTRACTIONS for j in i.walk())
            return TRANSFER if is_small and not self.late.isdisjoint(i.reads) else COMPUTE
        is_view = i.op == "free" or (row is not None and row.is_pure_view)
        if is_view and i.order is None and all(self.flow.is_bound_by(n, i) for n in i.outputs):
            return None
        return self.homes.get(i.reads[0], TRANSFER)  # a copy is made where the data is

    def note_late(self, members: list[Instruction]) -> None:
        """Note as late what these instructions write, if something that they read is late."""
        reads = [n for i in members if i.op != "wait" for j in i.walk() for n in j.reads]
        is_post = any(i.op in POSTS and _comes_back(i) for i in members)
        if any(n in self.late or (is_post and self.homes.get(n) == COMPUTE) for n in reads):
            self.late.update(n for i in members for n in _written(i))

    def pass_on(self, i: Instruction) -> None:
        """Append a view, which counts as being on the stream of what it shows."""
        if i.outputs and i.reads and i.reads[0] in self.homes:
            self.homes[i.outputs[0]] = self.homes[i.reads[0]]
            if i.reads[0] in self.known:
                self.known.add(i.outputs[0])
        self.code.append(i)

    def memory(self, names: Iterable[str]) -> set[str]:
        return {self.flow.bases.get(n, (n,))[0] for n in names}

    def touched(self, i: Instruction) -> Iterable[str]:
        for j in i.walk():
            yield from (*j.reads, *j.outputs)
            if j.op == "wait":
                yield from self.flow.posts[j.reads[0]].reads


def _comes_back(i: Instruction) -> bool:
    """Return whether some rank that computes what is posted receives what arrives."""
    if i.comm is None:
        return True
    return not set(i.comm.source.mesh.ranks).isdisjoint(i.comm.destination.mesh.ranks)


def _copy_compute(flow: Dataflow, i: Instruction) -> tuple[Instruction, ...]:
    units, assigned = grouped(i.body), _Assigned(flow, is_divided=len(i.parts) > 1)
    for at, members in enumerate(units):
        match members[0].op:
            case "next":
                assigned.next()
            case "wait":
                assigned.wait(members[0], units[at + 1 :])
            case _:
                assigned.add(members)
    return tuple(assigned.code)


def _written(i: Instruction) -> Iterable[str]:
    for j in i.walk():
        yield from received(j) if j.op in ("post", "recv") else j.outputs
