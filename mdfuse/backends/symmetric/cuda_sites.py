"""Sends of a program's posts out of arenas: readers learn the addresses once, and copy there.

A *site* is a post of a program, in all its runs. The first run goes through outboxes, and each rank
publishes the addresses of its sends in the store; from the second run on the others copy from
there. So the host waits for others once, and only for texts of a run that all have begun; a CUDA
graph holds fixed addresses. Addresses are fixed because each program has its own arenas, and
offsets in them follow from its text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from mdfuse.backends.algorithms import Piece
from mdfuse.backends.symmetric.cuda_heap import CudaHeap
from mdfuse.backends.symmetric.outbox_moves import Move, Shown
from mdfuse.backends.symmetric.post_buffers import Buffers
from mdfuse.backends.teams import not_connected
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import POINT_TO_POINT
from mdfuse.torch_private import Store

#: Kinds in which every member of the team sends to, and receives from, each other one.
_ALL_TO_ALL = ("Allgather", "ReduceScatter", "Allreduce", "AllToAll")

#: The handle of a piece's memory, and the first byte; None: it goes through the outbox.
Place = tuple[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNumbers:
    """A post of a program: for each member, its number among the posts with that member.

    Attributes:
        run: the number of the program, alike on all ranks.
        to: index of a reader -> the number of this post among those with it.
        of: index of an owner -> likewise.
    """

    run: int
    to: tuple[tuple[int, int], ...]
    of: tuple[tuple[int, int], ...]


def numbering(run: int) -> Callable[[Call], PostNumbers | None]:
    """Return a function that numbers the posts of a plan, which come in program order.

    >>> number = numbering(3)
    >>> number(Call(kind="Exchange", team=(4, 5, 7), rank=5, sends=(7, 7), recvs=(4,)))
    PostNumbers(run=3, to=((2, 0),), of=((0, 0),))
    >>> number(Call(kind="Allgather", team=(4, 5, 7), rank=5)).of
    ((0, 1), (2, 0))
    """
    counts: Counter[tuple[tuple[int, ...], int, bool]] = Counter()

    def number(call: Call) -> PostNumbers | None:
        if call.kind in POINT_TO_POINT:
            sides = {*call.sends}, {*call.recvs}
        elif call.kind in _ALL_TO_ALL:
            sides = {*call.team} - {call.rank}, {*call.team} - {call.rank}
        else:
            return None
        places = []
        for is_read, ranks in enumerate(sides):
            members = sorted(map(call.team.index, ranks))
            places.append(tuple((m, counts[call.team, m, bool(is_read)]) for m in members))
            counts.update((call.team, m, bool(is_read)) for m in members)
        return PostNumbers(run=run, to=places[0], of=places[1])

    return number


@dataclass(slots=True, eq=False)
class Told:
    """The addresses of a site that this rank published, and those that it read.

    Attributes:
        mine: index of a reader -> the addresses of the pieces for it.
        at: the addresses of the buffers at the last check.
        moves: the moves of all runs from the second one on, once they are known.
    """

    mine: dict[int, list[Place]]
    at: list[int]
    moves: tuple[Move, ...] | None = None


#: (team, site) -> its published addresses, as long as the program lives.
Tellings = dict[tuple[tuple[int, ...], PostNumbers], Told]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sited:
    """A call at its site, for buffers of certain sizes.

    Attributes:
        tellings: of the program's sites.
        pieces: index of a reader -> the pieces sent to it, in order.
        remade: returns its moves where some pieces are shown.
    """

    call: Call
    site: PostNumbers
    tellings: Tellings
    pieces: Mapping[int, Sequence[Piece]]
    remade: Callable[[Shown], tuple[Move, ...]]


@dataclass(frozen=True, slots=True)
class _Known:
    """The pieces that are shown at a site; see `Shown`."""

    site: PostNumbers
    mine: Mapping[int, Sequence[Place]]
    others: Mapping[int, Sequence[int | None]]

    def to(self, reader: int, n: int) -> bool:
        return self.mine[reader][n] is not None

    def at(self, owner: int, n: int) -> int | None:
        return self.others[owner][n]

    def number(self, member: int, is_owner: bool) -> int:
        return dict(self.site.of if is_owner else self.site.to)[member]


@dataclass(eq=False, kw_only=True)
class Sites:
    """The sites of one team.

    Attributes:
        index: this rank's index.
        heap: of its GPU.
        store: of the team; nobody else uses its keys.
        timeout_s: seconds that another rank may take.
    """

    index: int
    heap: CudaHeap
    store: Store
    timeout_s: float

    def moves(
        self, sited: Sited, usual: tuple[Move, ...], srcs: Sequence[Tensor], dsts: Sequence[Tensor]
    ) -> tuple[Move, ...]:
        """Return the moves of a post: those through outboxes in its first run.

        Raises:
            BackendError: another rank does not publish its addresses, or pieces have moved.
        """
        site, at = sited.site, [x.data_ptr() for x in (*srcs, *dsts)]
        telling = sited.tellings.get((sited.call.team, site))
        if telling is None or telling.at != at:
            mine = self._places(sited, Buffers.of(srcs, dsts, 0))
            if telling is None:
                sited.tellings[sited.call.team, site] = Told(mine, at)
                self._tell(site, mine)
                return usual
            if telling.mine != mine:
                raise _moved(sited.call)
            telling.at = at
        if telling.moves is None:
            telling.moves = sited.remade(_Known(site, telling.mine, self._others(sited)))
        return telling.moves

    def _tell(self, site: PostNumbers, mine: Mapping[int, Sequence[Place]]) -> None:
        """Publish to each reader the addresses of its pieces; the reader deletes the text."""
        for reader, number in site.to:
            key = f"{site.run}/{self.index}/{reader}/{number}"
            self.store.set(key, json.dumps(mine.get(reader, [])))

    def _places(self, sited: Sited, buffers: Buffers) -> dict[int, list[Place]]:
        """Return the addresses of the pieces for each reader."""

        def place(piece: Piece) -> Place:
            stays = piece.size > 0 and buffers.stays(piece)
            return self.heap.find(buffers.address(piece, 0)) if stays else None

        return {reader: [place(x) for x in some] for reader, some in sited.pieces.items()}

    def _others(self, sited: Sited) -> dict[int, list[int | None]]:
        """Return the addresses, in this process, of the pieces that others send at a site."""
        site, call = sited.site, sited.call
        keys = [f"{site.run}/{owner}/{self.index}/{number}" for owner, number in site.of]
        if not keys:
            return {}
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
            texts = self.store.multi_get(keys)
            for key in keys:  # nobody else reads it, nor this rank again
                self.store.delete_key(key)
        except RuntimeError as error:
            raise not_connected("symmetric", call.rank, call.team, error) from error
        addresses: dict[int, list[int | None]] = {}
        for (owner, _), text in zip(site.of, texts, strict=True):
            places = json.loads(text.decode())
            addresses[owner] = [None if x is None else self.heap.open(x[0]) + x[1] for x in places]
        return addresses


def _moved(call: Call) -> BackendError:
    return BackendError(
        f"{call.kind} on team {call.team}: rank {call.rank} sends from another place than before",
        because="the others copy what a program sends from where it lay in its first run",
        hint="this is a fault of mdfuse: please report it, with the program",
    )
