"""A rank's part of a communication as moves through the outboxes of its team, as data.

An outbox is memory of one rank that all members of a team see: slots, and a word for each slot and
reader, which is 0 while the slot is empty. Its owner *puts* a piece there: it waits until the words
are 0, copies the piece into the slot, and writes a tag into the words. A reader *takes* it: it
waits until its word holds the tag, copies the piece out, and writes 0. Nothing counts: the same
moves may be made again and again, as the replay of a CUDA graph does.

A piece for all other members is put once, in a slot of `Shape.slot` bytes; a piece for one of them
in its share of another slot. Larger pieces go in chunks, which take `SLOTS` slots in turn. All
members make the moves of a team in one order, and each puts before it takes.

A source may lie in memory that the others see. Then its owner writes only words, for the whole
piece at once; readers copy it from there, and the post of its owner is over when all of them have.
On CPUs the owner writes the offset in its heap beside the words (`host_team`). On GPUs, where the
host does not look at words, readers know the address beforehand (`Shown`): the owner *shows* all
such pieces of a post at once, by a *signal* for each reader, who answers with another one. Each of
both waits for a signal in memory of its own GPU, and posts take `TURNS` of them in turn, so that
none waits for the readers of the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, Protocol

from mdfuse.backends.algorithms import Composition, Copy, Piece, Reduce, Round
from mdfuse.backends.algorithms import Transfer as Sent
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import CARRIED

#: Slots that chunks take in turn: while one is taken, the next one is filled.
SLOTS = 2

#: Signals each way that posts take in turn to show pieces.
TURNS = 8

#: Alignment of a reader's share of a slot, bytes: copies of aligned memory are faster.
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
    def signals(self) -> int:
        """The number of signals."""
        return 2 * TURNS * self.members

    @property
    def bytes(self) -> int:
        """The size of all slots: those with one piece for all, then those with shares."""
        return 2 * SLOTS * self.slot

    def place(self, chunk: int, reader: int | None) -> int:
        """Return the offset of the n-th chunk, for one reader or (None) for all."""
        slot = chunk % SLOTS
        if reader is None:
            return slot * self.slot
        return (SLOTS + slot) * self.slot + reader * self.share

    def word(self, chunk: int, reader: int, is_shared: bool) -> int:
        """Return the index of the word that shows a reader the n-th chunk."""
        return ((0 if is_shared else SLOTS) + chunk % SLOTS) * self.members + reader

    def signal(self, number: int, owner: int) -> int:
        """Return the signal of a reader by which an owner shows its n-th post with it."""
        return number % TURNS * self.members + owner

    def taken(self, number: int, reader: int) -> int:
        """Return the signal of an owner by which a reader confirms its n-th post."""
        return (TURNS + number % TURNS) * self.members + reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A copy of a part of a piece into this rank's outbox.

    Attributes:
        piece: of a buffer of the post.
        start: the first byte of the part, counted from that of the piece.
        bytes: its size.
        place: its offset in the outbox.
        readers: the members that take it, by index in the team.
        words: the word of each reader.
        tag: the value that the words then hold.
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
    """Signals between this rank and a reader that knows the addresses of pieces.

    Attributes:
        reader: its index in the team.
        shown: the reader's signal, which this rank sets.
        taken: this rank's signal, which the reader sets once it has all pieces.
        tag: the value that both then hold.
    """

    reader: int
    shown: int
    taken: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class See:
    """A copy of a piece that its owner shows, from its address.

    Attributes:
        shown, taken: this rank's signal and the owner's; see `Show`.
        is_first, is_last: among pieces shown at once: the first waits for `shown`, the last sets
            `taken`.
    """

    piece: Piece
    bytes: int
    source: int
    owner: int
    shown: int
    taken: int
    tag: int
    is_first: bool
    is_last: bool


Move = Put | Show | Take | See | Copy | Reduce


class Shown(Protocol):
    """The pieces whose addresses readers know; members are counted by their index."""

    def to(self, reader: int, n: int) -> bool:
        """Return whether this rank shows a member the n-th piece that it sends it in a call."""

    def at(self, owner: int, n: int) -> int | None:
        """Return the address of the n-th piece that a member sends; None: it is not shown."""

    def number(self, member: int, is_owner: bool) -> int:
        """Return the number of the post among a member's sends to, or receives from, this rank."""


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
    ordered: list[Move] = []
    ends = _CallPieces(call, composition, itemsize, shape, shown)
    ordered += ends.shows()
    for step, before in zip(composition.steps, _counted(call, composition), strict=True):
        ordered += step.local
        ordered += _Moving(ends, step, before).moves()
    return tuple(ordered)


def pieces(
    call: Call, composition: Composition, side: Literal["sends", "recvs"]
) -> dict[int, list[Piece]]:
    """Return the pieces that a rank sends, or receives, in order, by the index of the other."""
    by_member: dict[int, list[Piece]] = {}
    for step in composition.steps:
        for member, some in _by_member(call, getattr(step, side)).items():
            by_member.setdefault(member, []).extend(x.piece for x in some)
    return by_member


def _counted(call: Call, composition: Composition) -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Yield for each step how many pieces went to each member, and came from it, before."""
    sent, received = Counter[int](), Counter[int]()
    for step in composition.steps:
        yield sent.copy(), received.copy()
        sent.update({m: len(x) for m, x in _by_member(call, step.sends).items()})
        received.update({m: len(x) for m, x in _by_member(call, step.recvs).items()})


def kind_of(tag: int) -> str:
    """Return the kind of the communication to which a word's tag belongs."""
    return CARRIED[(((tag & ~IN_HEAP) - 1) >> _SIZE_BITS) % len(CARRIED)]


class _CallPieces:
    """A rank's part of a call, and the pieces of it that are shown.

    Attributes:
        seen: owner -> the numbers of its pieces that it shows, in order.
    """

    def __init__(
        self,
        call: Call,
        composition: Composition,
        itemsize: int,
        shape: Shape,
        shown: Shown | None,
    ) -> None:
        self.call, self.itemsize, self.shape, self.shown = call, itemsize, shape, shown
        self.own = call.team.index(call.rank)
        self.sent = pieces(call, composition, "sends")
        self.received = pieces(call, composition, "recvs")
        self.seen = {
            owner: [n for n, x in enumerate(some) if x.size and self.source(owner, n) is not None]
            for owner, some in self.received.items()
        }

    def tag(self, some: Sequence[Piece]) -> int:
        return _tag(CARRIED.index(self.call.kind), sum(x.size for x in some) * self.itemsize)

    def is_shown(self, reader: int, n: int) -> bool:
        return self.shown is not None and self.shown.to(reader, n)

    def source(self, owner: int, n: int) -> int | None:
        return self.shown.at(owner, n) if self.shown is not None else None

    def shows(self) -> Iterator[Show]:
        """Yield the moves that show pieces to readers."""
        for reader, some in self.sent.items():
            shown = [x for n, x in enumerate(some) if x.size and self.is_shown(reader, n)]
            if shown and self.shown is not None:
                n = self.shown.number(reader, False)
                shown_word, taken = self.shape.signal(n, self.own), self.shape.taken(n, reader)
                yield Show(reader=reader, shown=shown_word, taken=taken, tag=self.tag(shown))

    def see(self, owner: int, n: int, source: int) -> See:
        """Return the copy of a piece that is shown."""
        assert self.shown is not None
        together, some = self.seen[owner], self.received[owner]
        number = self.shown.number(owner, True)
        return See(
            piece=some[n],
            bytes=some[n].size * self.itemsize,
            source=source,
            owner=owner,
            shown=self.shape.signal(number, owner),
            taken=self.shape.taken(number, self.own),
            tag=self.tag([some[k] for k in together]),
            is_first=n == together[0],
            is_last=n == together[-1],
        )


@dataclass(frozen=True, slots=True)
class _Moving:
    """One step of a composition.

    Attributes:
        before: how many pieces went to each member, and came from it, in the steps before.
    """

    ends: _CallPieces
    step: Round
    before: tuple[Counter[int], Counter[int]]

    @property
    def room(self) -> int:
        shape = self.ends.shape
        return shape.slot if self.step.is_shared else shape.share

    def moves(self) -> Iterator[Move]:
        """Yield the chunks of the step, one of each pair in turn; each is put one ahead."""
        call = self.ends.call
        sends, recvs = (_by_member(call, x) for x in (self.step.sends, self.step.recvs))
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
        """Yield the puts into the outbox; the n-th chunk has the n-th words in turn."""
        ends, is_shared, n = self.ends, self.step.is_shared, 0
        to, first = (None if is_shared else readers[0]), self.before[0][readers[0]]
        for number, piece in enumerate((x.piece for x in sent), first):
            if ends.is_shown(readers[0], number):
                continue
            for start, count in _chunks(piece, ends.itemsize, self.room):
                words = tuple(ends.shape.word(n, reader, is_shared) for reader in readers)
                yield Put(
                    piece=piece, start=start, bytes=count, place=ends.shape.place(n, to),
                    readers=readers, words=words, tag=ends.tag([piece]),
                )  # fmt: skip
                n += 1

    def takes(self, received: Sequence[Sent], owner: int) -> Iterator[Move]:
        """Yield the copies of a member's pieces, in the order in which it puts them."""
        ends, is_shared, n = self.ends, self.step.is_shared, 0
        for number, piece in enumerate((x.piece for x in received), self.before[1][owner]):
            source = ends.source(owner, number)
            if source is not None:
                if piece.size:
                    yield ends.see(owner, number, source)
                continue
            for start, count in _chunks(piece, ends.itemsize, self.room):
                yield Take(
                    piece=piece, start=start, bytes=count, owner=owner, tag=ends.tag([piece]),
                    place=ends.shape.place(n, None if is_shared else ends.own),
                    word=ends.shape.word(n, ends.own, is_shared),
                )  # fmt: skip
                n += 1


def _by_member(call: Call, transfers: Sequence[Sent]) -> dict[int, list[Sent]]:
    """Return the transfers with each member, by its index in the team, in their order."""
    by_member: dict[int, list[Sent]] = {}
    for transfer in transfers:
        by_member.setdefault(call.team.index(transfer.peer), []).append(transfer)
    return by_member


def _chunks(piece: Piece, itemsize: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a piece that fit into a slot, as first byte and size."""
    size = piece.size * itemsize
    yield from ((at, min(room, size - at)) for at in range(0, size, room))


def _in_turn(lanes: Sequence[Sequence[Move]]) -> list[list[Move]]:
    """Return the first move of each lane, then the second ones, and so on."""
    return [[move for move in row if move is not None] for row in zip_longest(*lanes)]


def _tag(kind: int, size: int) -> int:
    return 1 + (kind << _SIZE_BITS | size % _PRIME)
