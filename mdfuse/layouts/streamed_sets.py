"""The communication that each iteration of the host loop posts for a streamed `set`."""

from __future__ import annotations

from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard
from mdfuse.layouts.stream import Stream

#: form -> (the source is read in chunks, each iteration completes a chunk of the result)
FORMS: dict[str, tuple[bool, bool]] = {
    # The chunk changes its layout as the whole would.
    "chunks": (True, True),
    # Chunk i is what rank i of the axis holds, and all want it.
    "broadcast": (False, True),
    # As broadcast, but each rank starts with its own chunk: then from the rank i further on.
    "ring": (False, True),
    # Each rank receives what it lacks of the chunk.
    "exchange": (False, True),
    # Chunk i is rank i's part of the sum.
    "reduce": (True, False),
    # As reduce, but each rank ends with its own chunk: to the rank i further on, which adds up.
    "ring_reduce": (True, False),
}

#: Those in which a rank may send its shard in several pieces.
RINGS = ("ring", "ring_reduce")


def form(source: Layout, destination: Layout, stream: Stream, extent: object) -> str | None:
    """Return the form of a set from one layout to another, streamed over a dim of both.

    Args:
        source: the layout before.
        destination: the layout after.
        stream: of the set.
        extent: of the dim; whether shards are cut into chunks of the whole is known of numbers.

    Returns:
        None where the set cannot be cut along the dim, and is posted whole, outside the loop.
    """
    if stream.rotate is not None and stream.rotate not in destination.mesh.axes:
        return None
    if source == destination:
        return "chunks"
    axis = _only_axis(source, destination)
    if axis is not None and _is_one_shard_per_chunk(source, destination, stream, axis, extent):
        return _one_to_all(source, stream, axis)
    if cuts_alike(source, destination, stream.dim):
        # Ranks along the rotated axis are at different chunks: they cannot meet in a collective.
        may_meet = axis is not None and axis != stream.rotate
        return "chunks" if stream.rotate is None or may_meet else None
    if source.partial_axes or destination.partial_axes or stream.rotate is not None:
        return None
    return "exchange"


def cuts_alike(source: Layout, destination: Layout, dim: int) -> bool:
    """Return whether both layouts cut a dim alike: a chunk of the one is a chunk of the other."""
    if source.cuts.get(dim) != destination.cuts.get(dim):
        return False
    if source.mesh == destination.mesh:
        return source.split_axes(dim) == destination.split_axes(dim)
    parts = [[x.mesh.axis_size(a) for a in x.split_axes(dim)] for x in (source, destination)]
    return [n for n in parts[0] if n > 1] == [n for n in parts[1] if n > 1]


def _only_axis(source: Layout, destination: Layout) -> str | None:
    """Return the one axis whose placement changes, if innermost before and after; else None."""
    if source.mesh != destination.mesh:
        return None
    before, after = source.by_axis(), destination.by_axis()
    changed = [a for a in before if before[a] != after[a]]
    if len(changed) != 1:
        return None
    (axis,) = changed
    placement = source.placement(axis)
    is_innermost = not isinstance(placement, Shard) or source.split_axes(placement.dim)[-1] == axis
    is_all = source.with_placement(axis, destination.placement(axis)) == destination
    return axis if is_innermost and is_all else None


def _is_one_shard_per_chunk(
    source: Layout, destination: Layout, stream: Stream, axis: str, extent: object
) -> bool:
    """Return whether the set gathers or scatters the streamed dim, with one chunk for each rank.

    In a ring there may be several, all of them pieces of one rank's shard.
    """
    before, after = source.placement(axis), destination.placement(axis)
    shard = Shard(stream.dim, zigzag=stream.zigzag)
    gathers = before == shard and isinstance(after, Replicate)
    scatters = isinstance(before, Partial) and after == shard
    if not (gathers or scatters) or source.partial_axes not in ((), (axis,)):
        return False
    pieces, remainder = divmod(stream.count, source.mesh.axis_size(axis))
    if stream.rotate != axis or pieces <= 1:
        return stream.chunks == source.mesh.axis_size(axis)
    return not remainder and _are_pieces(source if gathers else destination, stream, extent, pieces)


def _are_pieces(split: Layout, stream: Stream, extent: object, pieces: int) -> bool:
    """True if the chunks of a dim are those into which its shards are cut, the short ones, too.

    Chunks of given lengths have the same ones in each shard, and no shard is shorter.
    """
    if not isinstance(extent, int) or split.blocked.get(stream.dim) is not None:
        return False
    rows = [stop - start for _, (start, stop) in split.chunks_of(stream.dim, extent)]
    size = split.mesh.axis_size(split.split_axes(stream.dim)[-1])
    if isinstance(stream.chunks, tuple):
        lengths = stream.chunks[:pieces]
        return stream.chunks == lengths * size and {*rows} == {sum(lengths)}
    for at in range(0, len(rows), size):
        team = rows[at : at + size]
        each, remainder = divmod(max(team), pieces)
        if remainder or any(n > 1 and -(-n // pieces) != each for n in team):
            return False
    return True


def _one_to_all(source: Layout, stream: Stream, axis: str) -> str | None:
    """Return the form in which one rank of the axis sends or receives all of each chunk."""
    placement = source.placement(axis)
    if isinstance(placement, Shard):
        return "ring" if stream.rotate == axis else "broadcast"
    if stream.rotate != axis:
        return "reduce"
    assert isinstance(placement, Partial)
    return "ring_reduce" if placement.op == "sum" else None
