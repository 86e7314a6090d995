"""A rank's part of a communication as moves through the outboxes of its team, as data.

An outbox is memory of one rank that all members of a team see: slots, and a word for each slot and
reader, which is 0 while the slot is empty. Its owner *puts* a piece there: it waits until the words
are 0, copies the piece into the slot, and writes a tag into the words. A reader *takes* it: it
waits until its word holds the tag, copies the piece out, and writes 0. Nothing counts: the same
moves may be made again and again, as the replay of a CUDA graph does.

What goes to all other members is put once, in a slot of `Shape.slot` bytes; what goes to one of
them in its share of another slot. Larger pieces go in chunks, which take `SLOTS` slots in turn. All
members make the moves of a team in one order, and each puts before it takes.

On CPUs a large piece of what is sent may lie in the owner's heap. Then its owner writes only where,
beside the words, for the whole piece at once; readers copy it from there, and the post of its owner
is over when all of them have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mdfuse.backends.algorithms import Composition, Copy, Piece, Reduce, Round
from mdfuse.backends.algorithms import Transfer as Sent
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import CARRIED

#: Slots that chunks take in turn: while one is taken, the next one is filled.
SLOTS = 2

#: Where a reader's share of a slot begins, bytes: copies of aligned memory are faster.
_ALIGNED = 256

#: A tag holds a kind above the remainder of a size by this prime; it is never 0, and has 31 bits.
_PRIME, _SIZE_BITS = 16_777_213, 24

#: Set beside a tag where the whole piece lies in the owner's heap, at the place beside the word.
IN_HEAP = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The layout of an outbox.

    Attributes:
        members: of the team.
        slot: bytes of a slot.
    """

    members: int
    slot: int

    @property
    def share(self) -> int:
        """The bytes that a slot has for each reader."""
        return self.slot // self.members // _ALIGNED * _ALIGNED

    @property
    def words(self) -> int:
        """The number of words."""
        return 2 * SLOTS * self.members

    @property
    def bytes(self) -> int:
        """The size of all slots: those with one piece for all, then those with shares."""
        return 2 * SLOTS * self.slot

    def place(self, chunk: int, reader: int | None) -> int:
        """Return where the n-th chunk lies, for one reader or (None) for all."""
        slot = chunk % SLOTS
        if reader is None:
            return slot * self.slot
        return (SLOTS + slot) * self.slot + reader * self.share

    def word(self, chunk: int, reader: int, is_shared: bool) -> int:
        """Return which word tells a reader of the n-th chunk."""
        return ((0 if is_shared else SLOTS) + chunk % SLOTS) * self.members + reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A copy of a part of a piece into this rank's outbox.

    Attributes:
        piece: of a buffer of the post.
        start: the first byte of the part, counted from that of the piece.
        bytes: its size.
        place: where it goes in the outbox.
        readers: who takes it, by index in the team.
        words: the word of each reader.
        tag: what the words then hold.
    """

    piece: Piece
    start: int
    bytes: int
    place: int
    readers: tuple[int, ...]
    words: tuple[int, ...]
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A copy out of a member's outbox; `owner` is its index in the team, the rest as in `Put`."""

    piece: Piece
    start: int
    bytes: int
    place: int
    owner: int
    word: int
    tag: int


Move = Put | Take | Copy | Reduce


def moves(call: Call, composition: Composition, itemsize: int, shape: Shape) -> tuple[Move, ...]:
    """Return the moves of one rank's part of a communication, in order.

    >>> from mdfuse.backends.algorithms import Sizes, compose
    >>> call = Call(kind="Allgather", team=(4, 7), rank=7)
    >>> composition = compose(call, Sizes(srcs=(3,), dsts=(6,), is_open=True))
    >>> for move in moves(call, composition, 4, Shape(members=2, slot=1024)):
    ...     print(type(move).__name__)
    Copy
    Put
    Take
    """
    found: list[Move] = []
    for step in composition.steps:
        found += step.local
        found += _through_outboxes(call, step, itemsize, shape)
    return tuple(found)


def kind_of(tag: int) -> str:
    """Return the kind of the communication whose chunk a word's tag tells of."""
    return CARRIED[(((tag & ~IN_HEAP) - 1) >> _SIZE_BITS) % len(CARRIED)]


def _through_outboxes(call: Call, step: Round, itemsize: int, shape: Shape) -> Iterator[Move]:
    """Yield the chunks of a step, one of each pair in turn; each is put one ahead."""
    own, kind = call.team.index(call.rank), CARRIED.index(call.kind)
    room = shape.slot if step.is_shared else shape.share

    def puts(sent: Sequence[Sent], readers: tuple[int, ...]) -> list[Move]:
        to = None if step.is_shared else readers[0]
        return [
            Put(
                piece=piece,
                start=start,
                bytes=count,
                place=shape.place(n, to),
                readers=readers,
                words=tuple(shape.word(n, reader, step.is_shared) for reader in readers),
                tag=_tag(kind, piece.size * itemsize),
            )
            for n, (piece, start, count) in enumerate(_chunks(sent, itemsize, room))
        ]

    def takes(received: Sequence[Sent], owner: int) -> list[Move]:
        return [
            Take(
                piece=piece,
                start=start,
                bytes=count,
                place=shape.place(n, None if step.is_shared else own),
                owner=owner,
                word=shape.word(n, own, step.is_shared),
                tag=_tag(kind, piece.size * itemsize),
            )
            for n, (piece, start, count) in enumerate(_chunks(received, itemsize, room))
        ]

    sends, recvs = (_by_member(call, x) for x in (step.sends, step.recvs))
    if step.is_shared and sends:
        put = [puts(next(iter(sends.values())), tuple(sends))]
    else:
        put = [puts(sent, (reader,)) for reader, sent in sends.items()]
    taken = [takes(received, owner) for owner, received in recvs.items()]
    ahead, behind = _in_turn(put), [[], *_in_turn(taken)]
    for n in range(max(len(ahead), len(behind))):
        for row in (*ahead[n : n + 1], *behind[n : n + 1]):
            yield from row


def _by_member(call: Call, transfers: Sequence[Sent]) -> dict[int, list[Sent]]:
    """Return the transfers with each member, by its index in the team, in their order."""
    found: dict[int, list[Sent]] = {}
    for transfer in transfers:
        found.setdefault(call.team.index(transfer.peer), []).append(transfer)
    return found


def _chunks(
    transfers: Sequence[Sent], itemsize: int, room: int
) -> Iterator[tuple[Piece, int, int]]:
    """Yield the parts of pieces that fit into a slot: the piece, first byte, number of bytes."""
    for piece in (t.piece for t in transfers):
        size = piece.size * itemsize
        yield from ((piece, at, min(room, size - at)) for at in range(0, size, room))


def _in_turn(lanes: Sequence[Sequence[Move]]) -> list[list[Move]]:
    """Return the first move of each lane, then the second ones, and so on."""
    return [[move for move in row if move is not None] for row in zip_longest(*lanes)]


def _tag(kind: int, size: int) -> int:
    return 1 + (kind << _SIZE_BITS | size % _PRIME)
