"""Check across ranks that every send meets a receive that fits it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache

from mdfuse.errors import CommunicationError
from mdfuse.hir.program import BufferType
from mdfuse.hir.verify.deadlocks import Meeting
from mdfuse.hir.verify.error_report import disagreement
from mdfuse.hir.verify.post_events import PostEvent, Programs, difference
from mdfuse.hir.verify.result_layouts import box_text, chunk_of
from mdfuse.ir.graph import dtype_name
from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard, Varies
from mdfuse.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class _TransferEnd:
    """One end of a transfer: a send or a receive, with its number of elements."""

    event: PostEvent
    size: int


@dataclass(slots=True)
class _Channel:
    """The sends from one rank to another and the receives there, each in program order."""

    sends: list[_TransferEnd] = field(default_factory=list)
    recvs: list[_TransferEnd] = field(default_factory=list)


def match_transfers(
    programs: Programs, begun: Mapping[int, list[PostEvent]], along: Set[str] | None
) -> Iterator[Meeting]:
    """Yield each send with the receive that it meets, once both fit.

    Between two ranks the n-th send meets the n-th receive.

    Args:
        programs: straight-line, by rank.
        begun: the communications that each rank begins, in order.
        along: None if the programs are those of all ranks. Otherwise they are those of one team:
            the handles of transfers along its axis; transfers with other ranks are left out.

    Raises:
        CommunicationError: a send or receive has no counterpart, or the two do not fit.
    """
    channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
    for rank, events in begun.items():
        for e in events:
            for peer, size in zip(e.call.sends, e.sends, strict=True):
                channels[rank, peer].sends.append(_TransferEnd(e, size))
            for peer, size in zip(e.call.recvs, e.recvs, strict=True):
                channels[peer, rank].recvs.append(_TransferEnd(e, size))
    partners: dict[str, _TransferEnd] = {}
    contents: Contents = {}
    for (a, b), channel in channels.items():
        if along is not None and (a not in programs or b not in programs):
            continue
        if len(channel.sends) != len(channel.recvs):
            raise _unanswered(programs, a, b, channel)
        for n, (s, r) in enumerate(zip(channel.sends, channel.recvs, strict=True)):
            _check_meet(n, a, b, s, r, partners)
            _check_content(programs, n, s.event, r.event, contents, along)
            yield s.event, r.event


def _unanswered(programs: Programs, a: int, b: int, channel: _Channel) -> CommunicationError:
    common = min(len(channel.sends), len(channel.recvs))
    sent = len(channel.sends) > common
    left = (channel.sends if sent else channel.recvs)[common].event
    other = b if sent else a
    what = (
        f"{left.name}: rank {a} sends to rank {b}, which does not receive it"
        if sent
        else f"{left.name}: rank {b} receives from rank {a}, which does not send it"
    )
    return disagreement(
        [left.place, *([(programs[other], None)] if other in programs else [])],
        what if other in programs else f"{what}: it has no program",
        because="each send meets one receive",
        hint=f"add the {'receive' if sent else 'send'} on rank {other}, or correct the peer",
    )


def _check_meet(
    n: int, a: int, b: int, s: _TransferEnd, r: _TransferEnd, partners: dict[str, _TransferEnd]
) -> None:
    """Raise CommunicationError unless a send and its receive agree in size, dtype and partner."""
    problem = _mismatch(s, r) or _other_partner(s.event, r, partners)
    if problem is None and a == b and _comes_first(r.event, s.event):
        problem = "a rank receives from itself before it sends"
    if problem is not None:
        raise disagreement(
            [s.event.place, r.event.place],
            f"transfer {n} from rank {a} to rank {b}: {problem}",
            because="between two ranks the n-th send meets the n-th receive",
            hint="send and receive in one order on both ranks, with equal sizes and dtypes",
        )


#: (receive, part of its buffer) -> (send, part of its buffer): what all such ranks receive.
Contents = dict[tuple[object, ...], tuple[object, ...]]


def _check_content(
    programs: Programs,
    n: int,
    send: PostEvent,
    recv: PostEvent,
    contents: Contents,
    along: Set[str] | None,
) -> None:
    """Raise CommunicationError where a received value contradicts the type of its buffer.

    Ranks whose buffers must be equal must receive the same, and a buffer that is a chunk must
    receive that chunk.
    """
    if send.i.op == "post":
        return
    problem = _content_problem(send, recv, contents)
    if problem is None and along is not None and send.base in along:
        problem = _differs_elsewhere(programs, send, recv)
    if problem is not None:
        raise disagreement(
            [send.place, recv.place],
            f"transfer {n} from rank {send.rank} to rank {recv.rank}: {problem}",
            because="a buffer holds what its type says, also after it has received",
            hint="let the buffer vary along the axis, and set it to a layout afterwards",
        )


def _buffer(event: PostEvent) -> tuple[BufferType, Layout]:
    kind = event.program.types[event.i.reads[0]]
    return kind, kind.placed


def _content_problem(send: PostEvent, recv: PostEvent, contents: Contents) -> str | None:
    (a, sent), (b, received) = map(_buffer, (send, recv))
    shapes = a.local_shape(send.rank), b.local_shape(recv.rank)
    if shapes[0] != shapes[1]:
        return f"shape {list(shapes[0])} is sent where {list(shapes[1])} is received"
    if 0 in shapes[0]:
        return None  # all parts without elements are the same
    is_chunk, boxes = chunk_of(received) is not None, (a.box(send.rank), b.box(recv.rank))
    rows = sent.rows(a.shape, send.rank), received.rows(b.shape, recv.rank)
    if (is_chunk or chunk_of(sent) is not None) and (a.shape != b.shape or rows[0] != rows[1]):
        parts = [f"{box_text(x)} of {list(k.shape)}" for x, k in zip(boxes, (a, b), strict=True)]
        return f"{parts[0]} is sent for {parts[1]}"
    is_turned = is_chunk and not _is_split(received, send.rank, recv.rank)
    key = (
        recv.base if is_turned else recv.handle,
        rows[1],
        _varying_coordinates(received, recv.rank),
    )
    held = send.base if is_chunk else send.handle, rows[0], _varying_coordinates(sent, send.rank)
    if contents.setdefault(key, held) == held:
        return None
    return f"ranks that are to hold the same as %{recv.i.reads[0]} receive different parts"


def _is_split(layout: Layout, a: int, b: int) -> bool:
    """Return whether two ranks have different parts of a buffer: an axis between them splits it.

    Then only what one iteration receives is compared: a rank may receive several terms of its part.
    """
    first, second = (layout.mesh.coordinate(rank) or () for rank in (a, b))
    places = zip(first, second, layout.placements, strict=False)
    return any(x != y and isinstance(p, Shard) for x, y, p in places)


def _varying_coordinates(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the rank's coordinates along the axes along which each rank has a value of its own."""
    coordinate = layout.mesh.coordinate(rank) or ()
    places = zip(coordinate, layout.placements, strict=True)
    return tuple(c for c, p in places if isinstance(p, Partial | Varies))


def _differs_elsewhere(programs: Programs, send: PostEvent, recv: PostEvent) -> str | None:
    """Return why teams beside this one receive different values where the type says the same.

    Only the transfers of one team are compared. Along an axis on which all its members have one
    coordinate, a value that the receiver's type replicates must be replicated by the sender's, too.
    """
    (_, sent), (_, received) = map(_buffer, (send, recv))
    mesh = received.mesh
    for axis in _other_axes(mesh, tuple(programs)):
        is_same = sent.mesh == mesh and isinstance(sent.placement(axis), Replicate)
        if not is_same and isinstance(received.placement(axis), Replicate):
            return f"what is sent is not the same along {axis}"
    return None


@lru_cache(maxsize=256)
def _other_axes(mesh: DeviceMesh, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the axes of several ranks along which all these ranks have one coordinate."""
    coordinates = [c for c in map(mesh.coordinate, ranks) if c is not None]
    are_one = [len({c[at] for c in coordinates}) == 1 for at in range(mesh.ndim)]
    return tuple(
        a for a, one in zip(mesh.axes, are_one, strict=True) if one and mesh.axis_size(a) > 1
    )


def _mismatch(s: _TransferEnd, r: _TransferEnd) -> str | None:
    send, recv = s.event, r.event
    if (s.size, send.dtype) != (r.size, recv.dtype):
        return f"{_amount(s)} are sent where {_amount(r)} are received"
    if (send.i.op == "post") != (recv.i.op == "post"):
        return f"{send.i.op} {send.name} meets {recv.i.op} {recv.name}"
    ways = [(e.i.kwargs.get("backend"), e.call.team) for e in (send, recv)]
    if send.i.op != "post" and ways[0] != ways[1]:
        return f"{_way(send)} meets {_way(recv)}"
    differs = difference(send, recv) if send.i.op == "post" else None
    if differs is not None:
        return f"{send.name} meets {recv.name}, which has another {differs[0] or 'name'}"
    return None


def _way(event: PostEvent) -> str:
    """Return a transfer as text, with its backend and the ranks of its team."""
    backend = event.i.kwargs.get("backend", "the usual backend")
    return f"{event.i.op} {event.name} by {backend} among {', '.join(map(str, event.call.team))}"


def _other_partner(
    send: PostEvent, r: _TransferEnd, partners: dict[str, _TransferEnd]
) -> str | None:
    """Return why a send meets another receive than on other ranks; None if it does not."""
    if send.i.op == "post":
        return None
    known = partners.setdefault(send.base, r).event
    if known.base == r.event.base:
        return None
    return f"{send.name} meets %{r.event.base} here, but %{known.base} on rank {known.rank}"


def _amount(side: _TransferEnd) -> str:
    dtype = side.event.dtype
    return f"{side.size} x {dtype_name(dtype) if dtype is not None else '?'}"


def _comes_first(recv: PostEvent, send: PostEvent) -> bool:
    """Return whether a receive precedes its send in the program, and not in one group with it."""
    ops = [i.op for i in send.program.instructions[: send.at]]
    before = ops[: recv.at]
    is_open = before.count("group_start") > before.count("group_end")
    return recv.at < send.at and not (is_open and "group_end" not in ops[recv.at :])
