"""The kinds of communication: one row each.

Other modules have tables by kind of their own, which `by_kind` checks against this one when those
modules are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from mdfuse.errors import CommunicationError
from mdfuse.layouts.call import Call

Row = TypeVar("Row")

#: How many blocks the source and the destination of one rank hold; None: the rank does not use it.
Blocks = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One row of the table: the properties of a kind of communication.

    Attributes:
        blocks: what a rank's buffers hold, in blocks of k elements, which are equal on all ranks of
            a team; None: the call states counts, or one buffer for each transfer.
        has_root: one rank of the team has or gets the whole.
        reduces: it computes with what it moves, by a reduce op.
        splits: a dim is gathered, scattered or exchanged, and lies outermost in its buffers.
        in_pieces: any run of rows can be communicated by itself, since all elements travel alike.
        along_several: it may go along several axes of a mesh at once.
        by_pairs: it moves pieces between pairs of ranks; the others are collectives.
        by_all: every member of the team posts each one, so that numbers tell who is behind. Others
            are posted by those that have a part.
        moves: backends carry it. They carry a Barrier as an Allreduce of one element, and a
            ReduceExchange as an Exchange: what arrives is reduced by the plan.
    """

    blocks: Callable[[Call], Blocks] | None = None
    has_root: bool = False
    reduces: bool = False
    splits: bool = False
    in_pieces: bool = False
    along_several: bool = False
    by_pairs: bool = False
    by_all: bool = True
    moves: bool = True


def _at_root(call: Call) -> bool:
    return call.rank == call.root


def _is_part(call: Call) -> bool:
    return call.rank in call.parts


def source_blocks(call: Call) -> int:
    """Return how many blocks the root's source holds in a Scatter."""
    return call.source_blocks or max(call.blocks, default=-1) + 1


KINDS: dict[str, Kind] = {
    "Gather": Kind(
        blocks=lambda c: (1 if _is_part(c) else None, len(c.parts) if _at_root(c) else None),
        has_root=True,
        splits=True,
        by_all=False,
    ),
    "Allgather": Kind(blocks=lambda c: (1, len(c.team)), splits=True, along_several=True),
    "Scatter": Kind(
        blocks=lambda c: (source_blocks(c) if _at_root(c) else None, 1 if _is_part(c) else None),
        has_root=True,
        splits=True,
        by_all=False,
    ),
    "Reduce": Kind(
        blocks=lambda c: (1, 1 if _at_root(c) else None),
        has_root=True,
        reduces=True,
        in_pieces=True,
    ),
    "Allreduce": Kind(blocks=lambda c: (1, 1), reduces=True, in_pieces=True, along_several=True),
    "ReduceScatter": Kind(
        blocks=lambda c: (len(c.team), 1), reduces=True, splits=True, along_several=True
    ),
    "Broadcast": Kind(
        blocks=lambda c: (1, None) if _at_root(c) else (None, 1), has_root=True, in_pieces=True
    ),
    "SendRecv": Kind(has_root=True, by_pairs=True, by_all=False),
    "AllToAll": Kind(splits=True),
    "Exchange": Kind(by_pairs=True, by_all=False),
    "ReduceExchange": Kind(reduces=True, by_pairs=True, by_all=False, moves=False),
    "Barrier": Kind(moves=False),
}


def blocks_of(call: Call) -> Blocks:
    """Return how many blocks a rank's buffers hold; one each where the call states counts."""
    blocks = KINDS[call.kind].blocks
    return (1, 1) if blocks is None else blocks(call)


def kinds_that(holds: Callable[[Kind], bool]) -> tuple[str, ...]:
    """Return the names of the kinds for which `holds` is true, in the order of the table."""
    return tuple(name for name, kind in KINDS.items() if holds(kind))


CARRIED = kinds_that(lambda k: k.moves)
COLLECTIVE = kinds_that(lambda k: k.moves and not k.by_pairs)
POINT_TO_POINT = kinds_that(lambda k: k.by_pairs)
REDUCING = kinds_that(lambda k: k.reduces)
SPLITTING = kinds_that(lambda k: k.splits)
ALONG_SEVERAL = kinds_that(lambda k: k.along_several)
IN_PIECES = kinds_that(lambda k: k.in_pieces)


def by_kind(
    rows: Mapping[str, Row], kinds: tuple[str, ...] = CARRIED, *, default: Row | None = None
) -> dict[str, Row]:
    """Check a table by kind, and return it with a row for each kind, in the order of `kinds`.

    Args:
        rows: kind -> row.
        kinds: those that the table is about; by default all that backends carry.
        default: the row of kinds that are not in `rows`; None: each kind must have one there.

    Raises:
        CommunicationError: a row is missing, or its kind is none of `kinds`.

    >>> by_kind({"Reduce": 1, "Broadcast": 2}, IN_PIECES, default=0)
    {'Reduce': 1, 'Allreduce': 0, 'Broadcast': 2}
    """
    missing = [kind for kind in kinds if kind not in rows] if default is None else []
    unknown = [kind for kind in rows if kind not in kinds]
    if missing or unknown:
        raise CommunicationError(
            "a table by kind "
            + " and ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("has no row of", missing), ("has a row of", unknown))
                if names
            ),
            because=f"it is about {', '.join(kinds)}",
            hint="see mdfuse/layouts/kinds.py",
        )
    return {kind: rows.get(kind, default) for kind in kinds}  # type: ignore[misc]
