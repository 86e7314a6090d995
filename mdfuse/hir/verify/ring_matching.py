"""Prove that the transfers of a program meet, for all ranks at once, where they rotate an axis.

    for %i in 0..4 {
      group_start                                                a rank at c sends to c - %i, and
      %c0 = send(%x, to=(coord(tp) - %i) mod 4, axis=tp)    ->   the rank at c - %i receives from c:
      %c1 = recv(%y, from=(coord(tp) + %i) mod 4, axis=tp)       so on every rank, for every %i
      group_end

Lemma. If in each block the k-th send goes as far as the k-th receive comes, then the n-th send
between any two ranks meets the n-th receive, in the same iteration: a rotation is a bijection, and
all ranks run the same blocks. The contents of both buffers are compared as expressions in the
coordinate of the sender. A program without this proof may be right: then the transfers of each rank
are written out (`point_to_point.py`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from mdfuse.extents.expressions import Calc, Index, Term, terms
from mdfuse.extents.linear import Linear, linear, simplified
from mdfuse.hir.instructions import BLOCKS, POSTS, TRANSFERS
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.verify.result_layouts import chunk_of, plain
from mdfuse.layouts.kinds import POINT_TO_POINT
from mdfuse.layouts.layout import Layout, Partial, Replicate, Varies
from mdfuse.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class _TransferSite:
    """A `send` or `recv` of a program.

    Attributes:
        i: the instruction.
        block: the path to its block; equal for instructions of one block.
        group: the number of its group; None outside of groups.
        waits: how many waits, barriers, blocks and `next` stand before it in its block.
        kind: the type of its buffer.
        layout: of its buffer.
    """

    i: Instruction
    block: tuple[int, ...]
    group: int | None
    waits: int
    kind: BufferType
    layout: Layout

    @property
    def place(self) -> tuple[DeviceMesh, str]:
        """The mesh and the axis along which it goes."""
        return self.layout.mesh, self.i.kwargs["axis"]


def rotates(program: HostProgram) -> bool:
    """Return whether all sends and receives of a program are sure to meet, and to fit.

    Args:
        program: for all ranks, whose blocks depend on no rank.

    Returns:
        False where a fault is possible, or where no proof is known.
    """
    sites = list(_sites(program))
    sends, recvs = ([s for s in sites if s.i.op == op] for op in TRANSFERS)
    if not sites or len(sends) != len(recvs) or not _is_plain(program):
        return False
    order = {id(s): n for n, s in enumerate(sites)}
    pairs = zip(sends, recvs, strict=True)
    return all(_meet(s, r, order[id(s)] < order[id(r)]) for s, r in pairs)


def turns(program: HostProgram) -> bool:
    """Return whether each send and receive goes as far along an axis on every rank.

    It is False, too, where two ranks are both in several meshes. Contents are not compared.
    """
    every = [i for i in program.walk() if i.op in TRANSFERS]
    layouts = [program.types[program.root(i.reads[0])].layout for i in every]
    meshes = {k.mesh for k in layouts if k is not None}
    pairs: Counter[tuple[DeviceMesh, DeviceMesh]] = Counter()
    if len(meshes) > 1:
        meshes_at: dict[int, list[DeviceMesh]] = defaultdict(list)
        for mesh in meshes:
            for rank in mesh.ranks:
                pairs.update((mesh, other) for other in meshes_at[rank])
                meshes_at[rank].append(mesh)
    is_far = all(k is not None and _is_far(i, k) for i, k in zip(every, layouts, strict=True))
    return is_far and all(n < 2 for n in pairs.values())


def _is_far(i: Instruction, layout: Layout) -> bool:
    """Return whether the peer of a transfer is as far from each rank along its axis."""
    axis, peer = i.kwargs.get("axis"), i.kwargs["to" if i.op == "send" else "from"]
    if axis is None:
        return False
    size, coordinate = layout.mesh.axis_size(axis), Term("coord", axis)
    is_there = isinstance(peer, Calc) and peer.op == "mod" and peer.right == size
    return size == 1 or peer == coordinate or (is_there and _factor(peer, coordinate, size) == 1)


def _factor(index: Index, term: Term, n: int) -> int | None:
    """Return by how much a term counts in an index, modulo n; None where this is not known."""
    if term not in terms(index):
        return 0
    if index == term:
        return 1
    if not isinstance(index, Calc):
        return None
    left, right = (_factor(x, term, n) for x in (index.left, index.right))
    if left is None or right is None:
        return None
    if index.op in ("+", "-"):
        return (left + right if index.op == "+" else left - right) % n
    return left if index.op == "mod" and index.right == n and right == 0 else None


def _sites(program: HostProgram) -> Iterator[_TransferSite]:
    """Yield the sends and receives of a program, in order."""
    yield from _of_block(program, program.instructions, ())


def _of_block(
    program: HostProgram, block: tuple[Instruction, ...], path: tuple[int, ...]
) -> Iterator[_TransferSite]:
    group, is_open, waits = 0, False, 0
    for at, i in enumerate(block):
        if i.op == "group_start":
            group, is_open = group + 1, True
        elif i.op == "group_end":
            is_open = False
        elif i.op in TRANSFERS:
            kind = program.types[program.root(i.reads[0])]
            yield _TransferSite(i, path, group if is_open else None, waits, kind, kind.placed)
        elif i.op in BLOCKS:
            yield from _of_block(program, i.body, (*path, at, 0))
            yield from _of_block(program, i.orelse, (*path, at, 1))
        waits += i.op in ("wait", "barrier", "next", *BLOCKS)


def _is_plain(program: HostProgram) -> bool:
    """Return whether sends meet receives alone, and all chunks of posted buffers exist."""
    posts = [i for i in program.walk() if i.op in POSTS]
    if len({i.outputs[0] for i in posts}) < len(posts):
        return False
    layouts = [program.types[program.root(n)].layout for i in posts for n in i.reads]
    for i in posts:
        if i.comm is not None:
            if i.comm.kind in POINT_TO_POINT:
                return False
            layouts += [i.comm.source, i.comm.destination]
    return all(k is None or chunk_of(k) is None or _chunk(k) is not None for k in layouts)


def _meet(send: _TransferSite, recv: _TransferSite, is_sent_first: bool) -> bool:
    """Return whether a send meets a receive on all ranks, in each iteration."""
    backends = {end.i.kwargs.get("backend") for end in (send, recv)}
    if send.place != recv.place or len(backends) > 1:
        return False
    mesh, axis = send.place
    size, coordinate = mesh.axis_size(axis), Term("coord", axis)
    to = _peer(send.i.kwargs["to"], size, coordinate)
    come = _peer(recv.i.kwargs["from"], size, coordinate)
    if to is None or come is None or to != simplified({}, 0, size).plus(come, -1):
        return False
    is_one_group = send.group is not None and send.group == recv.group
    is_own = not to.factors and to.constant == 0
    if not is_one_group and not (is_own and is_sent_first):
        return False  # each would wait for the other, or a rank receive from itself first
    is_together = send.block == recv.block and send.waits == recv.waits
    return is_together and _fits(send, recv, to) and not _differs_elsewhere(send, recv)


def _peer(peer: Index, size: int, coordinate: Term) -> Linear | None:
    """Return how far away a peer is, modulo the size of the axis; None where it rotates nothing."""
    is_there = peer == coordinate or (
        isinstance(peer, Calc) and peer.op == "mod" and peer.right == size
    )
    position = linear(peer, size) if is_there else None
    if position is None or any(t != coordinate and t.kind != "index" for t, _ in position.factors):
        return None
    if position.factor(coordinate) != 1 % size:
        return None
    return position.plus(simplified({coordinate: 1}, 0, size), -1)


# -- what is sent and received -------------------------------------------------------------------

#: A part of a dim: the number of parts, and the position of this one.
_Part = tuple[object, Linear]


def _fits(send: _TransferSite, recv: _TransferSite, to: Linear) -> bool:
    """Return whether a message from a sender `to` away agrees with the type of the receiver."""
    a, b = send.kind, recv.kind
    if (a.dtype, a.flat, a.padding, b.padding) != (b.dtype, b.flat, None, None):
        return False
    sent, received = _parts(send), _parts(recv)
    if sent is None or received is None:
        return False
    arrived = _of_sender(recv, received, to)
    is_same_part = a.shape == b.shape and arrived == sent
    is_chunk = chunk_of(recv.layout) is not None
    if not is_same_part and (is_chunk or chunk_of(send.layout) is not None):
        return False
    if not is_same_part and not _are_even(send, sent, recv, received):
        return False
    return not _is_of_sender(send, sent, is_same_part) or (
        not is_chunk and _tells_receiver(recv, received)
    )


def _is_of_sender(send: _TransferSite, sent: list[list[_Part]], is_same_part: bool) -> bool:
    """Return whether messages depend on the sender beyond the part that receivers name."""
    mesh, axis = send.place
    is_own = isinstance(send.layout.placement(axis), Partial | Varies)
    return mesh.axis_size(axis) > 1 and (is_own or (not is_same_part and _names(send, sent)))


def _tells_receiver(recv: _TransferSite, received: list[list[_Part]]) -> bool:
    """Return whether each rank of a team has a value of its own after a receive."""
    _, axis = recv.place
    return isinstance(recv.layout.placement(axis), Partial | Varies) or _names(recv, received)


def _names(site: _TransferSite, parts: list[list[_Part]]) -> bool:
    """Return whether ranks along the axis have different parts, each one of its own."""
    mesh, axis = site.place
    size, coordinate = mesh.axis_size(axis), Term("coord", axis)
    numbers = (p for dim in parts for p in dim)
    return any(count == size and p.factor(coordinate) in (1, size - 1) for count, p in numbers)


def _parts(site: _TransferSite) -> list[list[_Part]] | None:
    """Return how each dim of a buffer is divided, axis by axis, then into chunks; None: unknown."""
    layout = plain(site.layout, len(site.kind.shape))
    parts: list[list[_Part]] = [[] for _ in site.kind.shape]
    for dim, axes in layout.splits:
        for axis in axes:
            size = layout.mesh.axis_size(axis)
            parts[dim].append((size, simplified({Term("coord", axis): 1}, 0, size)))
    chunk = chunk_of(layout)
    if chunk is not None:
        which = _chunk(layout)
        if which is None:
            return None
        if chunk.chunks != 1:
            parts[chunk.dim % len(parts)].append((chunk.chunks, which))
    return parts


def _chunk(layout: Layout) -> Linear | None:
    """Return the number of a chunk, modulo their count; None where it may be out of range."""
    chunk = chunk_of(layout)
    assert chunk is not None
    index, count = chunk.index, chunk.count
    if isinstance(index, Term):
        is_there = index.kind == "index" or (
            index.kind == "coord"
            and index.name in layout.mesh.axes
            and layout.mesh.axis_size(index.name) <= count
        )
    elif isinstance(index, Calc):
        is_there = index.op == "mod" and index.right == count
    else:
        is_there = index is not None and 0 <= index < count
    number = linear(index, count) if is_there and index is not None else None
    if number is None or any(not _is_of_mesh(t, layout.mesh) for t, _ in number.factors):
        return None
    return number


def _is_of_mesh(term: Term, mesh: DeviceMesh) -> bool:
    return term.kind == "index" or (term.kind == "coord" and term.name in mesh.axes)


def _of_sender(
    recv: _TransferSite, parts: list[list[_Part]], to: Linear
) -> list[list[_Part]] | None:
    """Return the parts of a receiver, as the sender counts; None where this cannot be told."""
    mesh, axis = recv.place
    size, coordinate = mesh.axis_size(axis), Term("coord", axis)
    if size == 1:
        return parts
    there = simplified({coordinate: 1}, 0, size).plus(to)
    shifted = []
    for dim in parts:
        if any(p.factor(coordinate) and p.modulus != size for _, p in dim):
            return None
        shifted.append([(n, p.with_term(coordinate, there)) for n, p in dim])
    return shifted


def _are_even(
    send: _TransferSite, sent: list[list[_Part]], recv: _TransferSite, received: list[list[_Part]]
) -> bool:
    """Return whether all parts on both sides have one shape."""
    shapes = []
    for site, parts in ((send, sent), (recv, received)):
        shape = []
        for extent, dim in zip(site.kind.shape, parts, strict=True):
            counts = [n for n, _ in dim if isinstance(n, int)]
            if len(counts) < len(dim) or type(extent) is not int or extent % math.prod(counts):
                return False
            shape.append(extent // math.prod(counts))
        shapes.append(shape)
    return shapes[0] == shapes[1]


def _differs_elsewhere(send: _TransferSite, recv: _TransferSite) -> bool:
    """Return whether teams beside this one may receive other values where the type forbids it."""
    mesh, axis = send.place
    others = [a for a in mesh.axes if a != axis and mesh.axis_size(a) > 1]
    return any(
        isinstance(recv.layout.placement(a), Replicate)
        and not isinstance(send.layout.placement(a), Replicate)
        for a in others
    )
