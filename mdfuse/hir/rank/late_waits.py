"""Let a rank that only sends wait as late as its next send, so that its computations overlap.

    %c0 = post broadcast(%a) …                      %c0 = post broadcast(%a) …
    wait %c0                                        %b = matmul(%x, %w)
    free %a                                         wait %c0
    %b = matmul(%x, %w)                    ->       free %a
    %c1 = post broadcast(%b) …                      %c1 = post broadcast(%b) …
    wait %c1                                        wait %c1
    return                                          return

A program for all ranks waits where what arrives is used, which is nothing on a rank to which
nothing comes. There the wait stands before the next such post, so that one buffer more is alive,
or before what writes where the post reads, or at the end. It stays on its stream. Where parts of a
loop take turns it is late already: the next iteration's post stands before it. No wait comes
between a sum and a norm that one kernel may compute: that kernel writes when the sum is posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mdfuse.hir.analysis.dataflow import Dataflow, current_streams, dataflow
from mdfuse.hir.edits import Edits
from mdfuse.hir.instructions import BLOCKS, only_sends
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.row_norms import unit_behind
from mdfuse.names import base_name

#: Instructions that a wait is not moved past.
_STOPS = ("return", *BLOCKS, "next", "call", "barrier", "group_start")


def run(program: HostProgram) -> HostProgram:
    """Return a projection whose waits for sends alone are moved down, in each block by itself.

    A wait for a send alone is one of a post from which nothing arrives at this rank.
    """
    if not any(map(only_sends, program.walk())):
        return program
    return replace(program, instructions=_moved(dataflow(program), program.instructions))


def _moved(flow: Dataflow, block: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return a block with such waits moved down, and with them the frees of what was sent."""
    code = [_inside(flow, i) for i in block]
    edits, streams = Edits(code), current_streams(code)
    posts = {unit_behind(code, n): n for n, i in enumerate(code) if "then" in i.kwargs}
    passed = defaultdict[str, list[range]](list)  # memory -> positions that its waits moved past
    sent = {i.outputs[0]: flow.memory(i.reads[0]) for i in code if only_sends(i)}
    for n, i in enumerate(code):
        if i.op == "wait" and not i.attrs and i.reads[0] in sent and not _is_late(code, n):
            source = sent[i.reads[0]]
            to = _latest(flow, code, streams, posts, n, source)
            edits.move(n, to)
            passed[source].append(range(n + 1, to))
    for n, i in enumerate(code):
        if passed and i.op == "free":
            places = defaultdict[int, list[str]](list)
            for name in i.reads:  # behind the last wait for a send
                moved = (r.stop for r in passed.get(flow.memory(name), ()) if n in r)
                places[max(moved, default=n)].append(name)
            edits.drop(n)
            for to, names in places.items():
                edits.ahead[to].append(i.changed(inputs=tuple(names)))
    return edits.result()


def _inside(flow: Dataflow, i: Instruction) -> Instruction:
    if i.op not in BLOCKS:
        return i
    return replace(i, body=_moved(flow, i.body), orelse=_moved(flow, i.orelse))


def _is_late(code: Sequence[Instruction], at: int) -> bool:
    """Return whether a wait stands behind what a later iteration sends by the same post."""
    handle = code[at].reads[0]
    posts = (i.outputs[0] for i in reversed(code[:at]) if i.op == "post")
    return next(h for h in posts if base_name(h) == base_name(handle)) != handle


def _latest(
    flow: Dataflow,
    code: Sequence[Instruction],
    streams: Sequence[Instruction | None],
    posts: Mapping[int | None, int],
    at: int,
    source: str,
) -> int:
    """Return the position of the instruction before which a wait may stand at the latest.

    Args:
        flow: of the program.
        code: the block.
        streams: its current streams.
        posts: units that may be computed with the sums before them -> the posts of these.
        at: where the wait stands.
        source: the memory that is being sent.
    """
    latest = at + 1
    for n in range(at + 1, len(code)):
        i, is_same = code[n], streams[n - 1] == streams[at]
        latest = posts.get(n, n) if is_same else latest
        is_stop = i.op in _STOPS or only_sends(i) or source in flow.effects(i).writes
        if is_stop or (i.op == "sync" and not is_same):
            return latest  # another stream waits for all that this one waited for
    return len(code) if streams[-1] == streams[at] else latest
