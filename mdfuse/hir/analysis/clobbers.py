"""The names of a straight program whose memory is written while they are in use.

A part that a rank sends to itself need not be copied if nothing writes into its memory: the name
that receives the part may share the memory of the sent one. Plans and costs ask this.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict

from mdfuse.hir.analysis.dataflow import dataflow, shared_operand
from mdfuse.hir.instructions import POSTS, received
from mdfuse.hir.once import once
from mdfuse.hir.program import HostProgram, Instruction


@once
def updated_names(program: HostProgram) -> frozenset[str]:
    """Return the names whose memory may be written again while they are in use.

    An output is in use after the run, when the next run may write: an output that is a view of an
    input which the program writes is among them. A name through which a write goes is among them,
    too, and so are the names of which it is a view, since the write must not show in them.
    """
    memories, outputs = dataflow(program).memories, frozenset(program.outputs)
    top = (i for i in program.instructions if i.op != "free")
    leaves = [j for i in top for j in i.walk() if j.op != "launch"]
    bound: dict[str, int] = dict.fromkeys(program.inputs, -1)
    viewed: dict[str, frozenset[str]] = {}  # name -> itself and those that it is a view of
    last_use: dict[str, float] = {}
    writes = defaultdict[str, list[int]](list)  # memory -> positions of writes while it has a value
    updated, empty = set[str](), set[str]()
    for n, i in enumerate(leaves):
        if i.op == "alloc" and "fill" not in i.kwargs:
            empty.update(i.outputs)
        else:  # the first result in an empty buffer binds its name
            for name in empty.intersection(i.outputs).difference(i.reads):
                del bound[name]
            empty.difference_update((*i.reads, *i.outputs))
        for name in (*received(i), *bound.keys() & {*i.outputs}):
            writes[memories.get(name, name)].append(n)
            updated |= viewed.get(name, {name})
        operand = shared_operand(i)
        of = i.reads if i.op in POSTS else (operand,) if operand is not None else ()
        for name in i.outputs:
            bound.setdefault(name, n)
            viewed[name] = viewed.get(name, frozenset({name})).union(
                *(viewed.get(x, {x}) for x in of)
            )
        for name in (*i.reads, *i.outputs):
            for base in viewed.get(name, {name}):
                last_use[base] = math.inf if name in outputs else max(n, last_use.get(base, -1))
    for name, memory in memories.items():
        places, last = writes[memory], last_use.get(name, -1)
        later = bisect_right(places, bound.get(name, math.inf))
        is_given = last == math.inf and memory in program.inputs  # the next run writes there again
        if places if is_given else later < len(places) and places[later] < last:
            updated.add(name)
    return frozenset(updated)


@once
def uncopied(program: HostProgram) -> frozenset[str]:
    """Return the handles of transfers of a rank with itself that move nothing.

    On several streams alone: on one a copy is made at once, and its source may be gone.

    Args:
        program: of one rank, written out.
    """
    transfers = [
        i
        for i in program.instructions
        if program.rank in (i.kwargs.get("to"), i.kwargs.get("from"))
    ]
    if not transfers or not any(i.op == "set_stream" for i in program.instructions):
        return frozenset()
    sends, recvs = ([i for i in transfers if i.op == op] for op in ("send", "recv"))
    handles: set[str] = set()
    for send, recv in zip(sends, recvs, strict=False):  # the first that is sent comes first
        a, b = (program.local_shape(i.reads[0]) for i in (send, recv))
        if a == b and may_stand_for(program, send, recv):
            handles.update((*send.outputs, *recv.outputs))
    return frozenset(handles)


def may_stand_for(program: HostProgram, send: Instruction, recv: Instruction) -> bool:
    """Return whether the buffer of a receive from the rank itself may share the sent memory.

    Nothing writes into the sent memory while it has a value, or only before the send, piece by
    piece. The buffer is filled once, and read under one name alone.

    Args:
        program: of one rank, written out.
        send, recv: its transfers with itself.
    """
    flow, ends = dataflow(program), {*program.inputs, *program.outputs}
    memory, into = flow.memory(send.reads[0]), recv.reads[0]
    is_over = flow.last_write(memory, len(flow.code)) < flow.uses[send.outputs[0]][0]
    updated = updated_names(program) | program.written_inputs
    if not updated.isdisjoint(flow.sharing[memory]) and (not is_over or memory in ends):
        return False
    users = [flow.code[n] for n in flow.uses[into]]
    is_filled_once = sum(into in i.outputs for i in users) == 1
    is_filled_once &= sum(into in received(i) for i in users) == 1
    return is_filled_once and into not in ends and flow.sharing[into] == [into]
