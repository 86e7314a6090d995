"""Across ranks: every send meets a receive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mdfuse.errors import CommunicationError
from mdfuse.hir.verify.events import Event, Programs, difference
from mdfuse.hir.verify.progress import Meeting
from mdfuse.hir.verify.report import disagreement
from mdfuse.ir.graph import dtype_name


@dataclass(frozen=True, slots=True)
class _Side:
    """One send or receive."""

    event: Event
    size: int


@dataclass(slots=True)
class _Channel:
    """What goes from one rank to another, in order."""

    sends: list[_Side] = field(default_factory=list)
    recvs: list[_Side] = field(default_factory=list)


def match_transfers(
    programs: Programs, begun: Mapping[int, list[Event]], is_whole: bool
) -> Iterator[Meeting]:
    """The n-th send from a rank to another, and the n-th receive there; checks that they fit."""
    channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
    for rank, found in begun.items():
        for e in found:
            for peer, size in zip(e.call.sends, e.sends, strict=True):
                channels[rank, peer].sends.append(_Side(e, size))
            for peer, size in zip(e.call.recvs, e.recvs, strict=True):
                channels[peer, rank].recvs.append(_Side(e, size))
    partners: dict[str, _Side] = {}
    for (a, b), channel in channels.items():
        if not is_whole and (a not in programs or b not in programs):
            continue
        if len(channel.sends) != len(channel.recvs):
            raise _unanswered(programs, a, b, channel)
        for n, (s, r) in enumerate(zip(channel.sends, channel.recvs, strict=True)):
            _check_meet(n, a, b, s, r, partners)
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


def _check_meet(n: int, a: int, b: int, s: _Side, r: _Side, partners: dict[str, _Side]) -> None:
    """A send and its receive have one size and one dtype, and belong together."""
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


def _mismatch(s: _Side, r: _Side) -> str | None:
    send, recv = s.event, r.event
    if (s.size, send.dtype) != (r.size, recv.dtype):
        return f"{_amount(s)} are sent where {_amount(r)} are received"
    if (send.i.op == "post") != (recv.i.op == "post"):
        return f"{send.i.op} {send.name} meets {recv.i.op} {recv.name}"
    differs = difference(send, recv) if send.i.op == "post" else None
    if differs is not None:
        return f"{send.name} meets {recv.name}, which has another {differs[0] or 'name'}"
    return None


def _other_partner(send: Event, r: _Side, partners: dict[str, _Side]) -> str | None:
    """A send by itself meets the same receive on all pairs of ranks."""
    if send.i.op == "post":
        return None
    known = partners.setdefault(send.base, r).event
    if known.base == r.event.base:
        return None
    return f"{send.name} meets %{r.event.base} here, but %{known.base} on rank {known.rank}"


def _amount(side: _Side) -> str:
    dtype = side.event.dtype
    return f"{side.size} x {dtype_name(dtype) if dtype is not None else '?'}"


def _comes_first(recv: Event, send: Event) -> bool:
    """A receive stands before its send, and is not begun together with it."""
    ops = [i.op for i in send.program.instructions[: send.at]]
    before = ops[: recv.at]
    is_open = before.count("group_start") > before.count("group_end")
    return recv.at < send.at and not (is_open and "group_end" not in ops[recv.at :])
