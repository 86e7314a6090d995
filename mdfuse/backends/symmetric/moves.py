"""A rank's part of a communication as moves through the outboxes of its team, as data.

An outbox is memory of one rank that all members of a team see: slots, and a word for each slot and
reader, which is 0 while the slot is empty. Its owner *puts* a piece there: it waits until the words
are 0, copies the piece into the slot, and writes a tag into the words. A reader *takes* it: it
waits until its word holds the tag, copies the piece out, and writes 0. Nothing counts: the same
moves may be made again and again, as the replay of a CUDA graph does.

What goes to all other members is put once, in a slot of `Shape.slot` bytes; what goes to one of
them in its share of another slot. Larger pieces go in chunks, which take `SLOTS` slots in turn. All
members make the moves of a team in one order, and each puts before it takes.

What is sent may lie in memory that the others see. Then its owner writes only words, for the whole
piece at once; readers copy it from there, and the post of its owner is over when all of them have.
On CPUs the owner writes where it lies in its heap beside the words (`host_team`). On GPUs, where
the host does not look at words, readers know that beforehand (`shown`): the owner *shows* a piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

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
class Show:
    """Words that tell readers that a piece of this rank lies where they know; else as `Put`."""

    readers: tuple[int, ...]
    words: tuple[int, ...]
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A copy out of a member's memory; `owner` is its index in the team, the rest as in `Put`.

    Attributes:
        source: the address of a whole piece that its owner shows; None: it is in the outbox.
    """

    piece: Piece
    start: int
    bytes: int
    place: int
    owner: int
    word: int
    tag: int
    source: int | None = None


Move = Put | Show | Take | Copy | Reduce


class Shown(Protocol):
    """Which pieces lie where their readers know; members are counted by their index."""

    def to(self, reader: int, n: int) -> bool:
        """Return whether this rank shows a member the n-th piece that it sends it in a call."""

    def at(self, owner: int, n: int) -> int | None:
        """Return the address of the n-th piece that a member sends; None: it is not shown."""


def moves(
    call: Call, composition: Composition, itemsize: int, shape: Shape, shown: Shown | None = None
) -> tuple[Move, ...]:
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
    for step, before in zip(composition.steps, _counted(call, composition), strict=True):
        found += step.local
        found += _Moving(call, step, itemsize, shape, shown, before).moves()
    return tuple(found)


def pieces_to(call: Call, composition: Composition) -> dict[int, list[Piece]]:
    """Return the pieces that a rank sends in a call, by the index of who gets them, in order."""
    found: dict[int, list[Piece]] = {}
    for step in composition.steps:
        for member, sent in _by_member(call, step.sends).items():
            found.setdefault(member, []).extend(x.piece for x in sent)
    return found


def _counted(call: Call, composition: Composition) -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Yield for each step how many pieces went to each member, and came from it, before."""
    sent, received = Counter[int](), Counter[int]()
    for step in composition.steps:
        yield sent.copy(), received.copy()
        sent.update({m: len(x) for m, x in _by_member(call, step.sends).items()})
        received.update({m: len(x) for m, x in _by_member(call, step.recvs).items()})


def kind_of(tag: int) -> str:
    """Return the kind of the communication whose chunk a word's tag tells of."""
    return CARRIED[(((tag & ~IN_HEAP) - 1) >> _SIZE_BITS) % len(CARRIED)]


@dataclass(frozen=True, slots=True)
class _Moving:
    """One step of a composition.

    Attributes:
        before: how many pieces went to each member, and came from it, in the steps before.
    """

    call: Call
    step: Round
    itemsize: int
    shape: Shape
    shown: Shown | None
    before: tuple[Counter[int], Counter[int]]

    @property
    def own(self) -> int:
        return self.call.team.index(self.call.rank)

    @property
    def room(self) -> int:
        return self.shape.slot if self.step.is_shared else self.shape.share

    def tag(self, piece: Piece) -> int:
        return _tag(CARRIED.index(self.call.kind), piece.size * self.itemsize)

    def moves(self) -> Iterator[Move]:
        """Yield the chunks of the step, one of each pair in turn; each is put one ahead."""
        sends, recvs = (_by_member(self.call, x) for x in (self.step.sends, self.step.recvs))
        if self.step.is_shared and sends:
            put = [list(self.puts(next(iter(sends.values())), tuple(sends)))]
        else:
            put = [list(self.puts(sent, (reader,))) for reader, sent in sends.items()]
        taken = [list(self.takes(received, owner)) for owner, received in recvs.items()]
        ahead, behind = _in_turn(put), [[], *_in_turn(taken)]
        for n in range(max(len(ahead), len(behind))):
            for row in (*ahead[n : n + 1], *behind[n : n + 1]):
                yield from row

    def puts(self, sent: Sequence[Sent], readers: tuple[int, ...]) -> Iterator[Move]:
        """Yield what tells readers of pieces; the n-th chunk has the n-th words in turn."""
        is_shared, n = self.step.is_shared, 0
        to, first = (None if is_shared else readers[0]), self.before[0][readers[0]]
        for number, piece in enumerate((x.piece for x in sent), first):
            is_shown = self.shown is not None and self.shown.to(readers[0], number)
            for start, count in _chunks(piece, self.itemsize, None if is_shown else self.room):
                words = tuple(self.shape.word(n, reader, is_shared) for reader in readers)
                tag, place = self.tag(piece), self.shape.place(n, to)
                n += 1
                if is_shown:
                    yield Show(readers=readers, words=words, tag=tag)
                else:
                    yield Put(
                        piece=piece, start=start, bytes=count, place=place, readers=readers,
                        words=words, tag=tag,
                    )  # fmt: skip

    def takes(self, received: Sequence[Sent], owner: int) -> Iterator[Move]:
        """Yield what copies a member's pieces, in the order in which it puts them."""
        is_shared, n = self.step.is_shared, 0
        for number, piece in enumerate((x.piece for x in received), self.before[1][owner]):
            source = self.shown.at(owner, number) if self.shown is not None else None
            room = self.room if source is None else None
            for start, count in _chunks(piece, self.itemsize, room):
                yield Take(
                    piece=piece, start=start, bytes=count, owner=owner, tag=self.tag(piece),
                    place=self.shape.place(n, None if is_shared else self.own),
                    word=self.shape.word(n, self.own, is_shared), source=source,
                )  # fmt: skip
                n += 1


def _by_member(call: Call, transfers: Sequence[Sent]) -> dict[int, list[Sent]]:
    """Return the transfers with each member, by its index in the team, in their order."""
    found: dict[int, list[Sent]] = {}
    for transfer in transfers:
        found.setdefault(call.team.index(transfer.peer), []).append(transfer)
    return found


def _chunks(piece: Piece, itemsize: int, room: int | None) -> Iterator[tuple[int, int]]:
    """Yield the parts of a piece that fit into a slot, as first byte and size; None: all of it."""
    size = piece.size * itemsize
    room = max(size, 1) if room is None else room
    yield from ((at, min(room, size - at)) for at in range(0, size, room))


def _in_turn(lanes: Sequence[Sequence[Move]]) -> list[list[Move]]:
    """Return the first move of each lane, then the second ones, and so on."""
    return [[move for move in row if move is not None] for row in zip_longest(*lanes)]


def _tag(kind: int, size: int) -> int:
    return 1 + (kind << _SIZE_BITS | size % _PRIME)
