"""NCCL's functions without a GPU: several ranks in one process, on tensors of the host.

Ranks record what they post; `Wire.run` then does it, by address, as NCCL would. And a device whose
events and marks are entries of a log.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import Buffer, Posting, Prepared

#: nccl.h
DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
)


def seen(address: int, count: int, code: int) -> Tensor:
    """Memory as a tensor."""
    size = count * DTYPES[code].itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=DTYPES[code])


def reduced(op: int, rows: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack([row.double() for row in rows])
    table = {
        0: lambda: stacked.sum(0),
        1: lambda: stacked.prod(0),
        2: lambda: stacked.amax(0),
        3: lambda: stacked.amin(0),
        4: lambda: stacked.mean(0),
    }
    return table[op]().to(rows[0].dtype)


class Wire:
    """What the ranks of one communicator have posted and not done yet."""

    def __init__(self, size: int) -> None:
        self.posted: list[list[tuple[Any, ...]]] = [[] for _ in range(size)]

    def run(self) -> None:
        """Do it all; every rank's posts in its order."""
        while any(self.posted):
            kinds = {posts[0][0] for posts in self.posted if posts}
            assert len(kinds) == 1, f"ranks post different things: {self.posted}"
            heads = [posts.pop(0)[1] if posts else [] for posts in self.posted]
            getattr(self, "_" + kinds.pop())(heads)

    def _all_gather(self, heads: list[Any]) -> None:
        whole = torch.cat([seen(src, n, code) for src, _, n, code in heads])
        for _, dst, n, code in heads:
            seen(dst, n * len(heads), code).copy_(whole)

    def _reduce_scatter(self, heads: list[Any]) -> None:
        size = len(heads)
        rows = [seen(src, n * size, code) for src, _, n, code, _ in heads]
        total = reduced(heads[0][4], rows)
        for i, (_, dst, n, code, _) in enumerate(heads):
            seen(dst, n, code).copy_(total[i * n : i * n + n])

    def _all_reduce(self, heads: list[Any]) -> None:
        total = reduced(heads[0][4], [seen(src, n, code) for src, _, n, code, _ in heads])
        for _, dst, n, code, _ in heads:
            seen(dst, n, code).copy_(total)

    def _bcast(self, heads: list[Any]) -> None:
        (root,) = {root for *_, root in heads}
        whole = seen(*heads[root][:3]).clone()
        for address, n, code, _ in heads:
            seen(address, n, code).copy_(whole)

    def _reduce(self, heads: list[Any]) -> None:
        (root,) = {root for *_, root in heads}
        total = reduced(heads[0][4], [seen(src, n, code) for src, _, n, code, _, _ in heads])
        assert all((dst == 0) == (i != root) for i, (_, dst, *_) in enumerate(heads))
        seen(*heads[root][1:4]).copy_(total)

    def _group(self, heads: list[Any]) -> None:
        """The i-th send from a to b meets the i-th receive of b from a; collectives in order."""
        if all(name not in ("send", "recv") for posts in heads for name, *_ in posts):
            for posts in zip(*heads, strict=True):
                getattr(self, f"_{posts[0][0]}")([arguments for _, *arguments in posts])
            return
        sent: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for rank, transfers in enumerate(heads):
            for name, address, n, code, peer in transfers:
                if name == "send":
                    sent[rank, peer].append(seen(address, n, code).view(torch.uint8).clone())
        for rank, transfers in enumerate(heads):
            for name, address, n, code, peer in transfers:
                if name == "recv":
                    seen(address, n, code).view(torch.uint8).copy_(sent[peer, rank].pop(0))
        assert not any(sent.values()), "a send that nobody receives"


class FakeNccl:
    """One rank's `nccl.bindings.nccl`."""

    def __init__(self, wire: Wire, index: int, log: list[Any]) -> None:
        self.wire, self.index, self.log = wire, index, log
        self.result = 0
        self._group: list[Any] | None = None

    def _post(self, name: str, arguments: tuple[Any, ...], comm: Any, stream: int) -> None:
        assert comm == "comm" and isinstance(stream, int)
        self.log.append((name, stream))
        if self._group is None:
            self.wire.posted[self.index].append((name, arguments))
        else:
            self._group.append((name, *arguments))

    def all_gather(self, src: int, dst: int, n: int, code: int, comm: Any, stream: int) -> None:
        self._post("all_gather", (src, dst, n, code), comm, stream)

    def reduce_scatter(
        self, src: int, dst: int, n: int, code: int, op: int, comm: Any, stream: int
    ) -> None:
        self._post("reduce_scatter", (src, dst, n, code, op), comm, stream)

    def all_reduce(
        self, src: int, dst: int, n: int, code: int, op: int, comm: Any, stream: int
    ) -> None:
        self._post("all_reduce", (src, dst, n, code, op), comm, stream)

    def bcast(self, buffer: int, n: int, code: int, root: int, comm: Any, stream: int) -> None:
        self._post("bcast", (buffer, n, code, root), comm, stream)

    def reduce(
        self, src: int, dst: int, n: int, code: int, op: int, root: int, comm: Any, stream: int
    ) -> None:
        self._post("reduce", (src, dst, n, code, op, root), comm, stream)

    def send(self, src: int, n: int, code: int, peer: int, comm: Any, stream: int) -> None:
        self._post("send", (src, n, code, peer), comm, stream)

    def recv(self, dst: int, n: int, code: int, peer: int, comm: Any, stream: int) -> None:
        self._post("recv", (dst, n, code, peer), comm, stream)

    def group_start(self) -> None:
        assert self._group is None
        self._group = []

    def group_end(self) -> None:
        self.wire.posted[self.index].append(("group", self._group))
        self._group = None

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    def comm_init_rank(self, size: int, unique: bytearray, index: int) -> str:
        self.log.append(("init", size, bytes(unique), index))
        return "comm"

    def comm_get_async_error(self, comm: Any) -> int:
        return self.result

    def get_error_string(self, result: int) -> str:
        return f"unhandled result {result}"

    def get_last_error(self, comm: Any) -> str:
        return "the network is down"

    def comm_destroy(self, comm: Any) -> None:
        self.log.append("destroy")

    def comm_abort(self, comm: Any) -> None:
        self.log.append("abort")


class FakeTrack:
    """Done when the test says so."""

    def __init__(self, log: list[Any] | None = None, stream: int = 0) -> None:
        self.log, self._stream = log if log is not None else [], stream
        self.marked = self.done = 0

    def mark(self, number: int) -> None:
        self.marked = number
        self.log.append(("mark", self._stream))

    def is_done(self, number: int) -> bool:
        return self.done >= number


class FakeDevice:
    """Streams are their handles, events are numbers, everything goes to the log."""

    OWN = 77

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.events = 0
        self.current = 6
        self.tracks: dict[int, FakeTrack] = {}

    def record(self, event: int, stream: int) -> None:
        self.log.append(("record", event, stream))

    def wait(self, stream: int, event: int, flags: int) -> None:
        assert flags == 0
        self.log.append(("wait", event, stream))

    def stream(self, handle: int) -> int:
        return handle

    def event(self) -> int:
        self.events += 1
        return self.events

    def track(self, handle: int) -> FakeTrack:
        self.tracks[handle] = FakeTrack(self.log, handle)
        return self.tracks[handle]

    def current_stream(self) -> int:
        return self.current

    def new_stream(self) -> int:
        return self.OWN

    def is_capturing(self) -> bool:
        return False

    def enter(self) -> None:
        self.log.append("enter")

    def synchronize(self) -> None:
        self.log.append("synchronize")


def carry_out(calls: Sequence[Prepared], srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> None:
    """Call prepared calls as a plan does."""
    sides = {"src": srcs, "dst": dsts}

    def given(argument: Any) -> Any:
        if isinstance(argument, list):
            return [given(x) for x in argument]
        if isinstance(argument, Buffer):
            buffer = sides[argument.side][argument.index]
            forms = {"tensor": lambda: buffer, "flat": lambda: buffer.view(-1)}
            return forms.get(argument.form, buffer.data_ptr)()
        return argument

    for call in calls:
        assert not isinstance(call.run, str)
        call.run(*map(given, call.args))


def post(posting: Posting | None, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> None:
    if posting is None:  # nothing to do here
        return
    assert posting.wait is not None
    carry_out(posting.post, srcs, dsts)
    carry_out(posting.wait, srcs, dsts)
