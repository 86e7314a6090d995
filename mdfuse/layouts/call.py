"""One rank's part of a communication as a library sees it: a kind, a team, counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One rank's part of one communication, as a communication library sees it.

    `srcs` and `dsts` are what the bound poster gets, dense tensors of one dtype, seen as flat.
    With n = len(team) and k = elements per block:

    ==============  =========================  ======================  ==========================
    kind            srcs                       dsts                    who
    ==============  =========================  ======================  ==========================
    Allgather       (k,)                       (n*k,) in team order    every member
    ReduceScatter   (n*k,) in team order       (k,)                    every member
    Allreduce       (k,)                       (k,), may be the src    every member
    AllToAll        (sum(send_counts),)        (sum(recv_counts),)     every member
    Broadcast       root: (k,)                 others: (k,)            every member
    Reduce          (k,)                       root: (k,)              every member
    Gather          parts: (k,)                root: (len(parts)*k,)   parts and the root
    Scatter         root: (blocks of k)        parts: (k,)             parts and the root
    SendRecv        as Exchange                as Exchange
    Exchange        one per entry of `sends`   one per entry of `recvs`
    ==============  =========================  ======================  ==========================

    Attributes:
        kind: one of the kinds above.
        team: the ranks that take part, in mesh order.
        rank: the rank whose part this is.
        root: a rank of the team, for the kinds that have one.
        reduce_op: sum, prod, min, max, avg, band, bor or bxor, for the kinds that reduce.
        parts: Gather and Scatter: the ranks that contribute (receive) a block, in block order.
            The root may be outside; then it gives (gets) nothing.
        blocks: Scatter: for each of `parts`, which block of k elements of the root's src it gets.
        source_blocks: Scatter: how many blocks of k the root's src holds; None: max(blocks) + 1.
            Only a root whose last blocks go to nobody needs to say.
        send_counts: AllToAll: elements for each member, in team order.
        recv_counts: AllToAll: elements from each member, in team order.
        sends: Exchange and SendRecv: the receiving rank of each src, never this rank.
        recvs: Exchange and SendRecv: the sending rank of each dst, never this rank. Between two
            ranks, the i-th send meets the i-th receive.
        is_counted: AllToAll: each run has counts of its own, which ranks pass even where all of
            theirs are equal.
        backend: which of a communicator's backends posts it; None: the first.
    """

    kind: str
    team: tuple[int, ...]
    rank: int
    root: int | None = None
    reduce_op: str | None = None
    parts: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    source_blocks: int | None = None
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    recvs: tuple[int, ...] = ()
    is_counted: bool = False
    backend: str | None = None
