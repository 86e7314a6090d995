"""The kernel of `mdfuse.backends.symmetric.cuda_sums`, in Triton, and what others share with it."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import triton
import triton.language as tl


@triton.jit
def add_up(
    src, dst, n, inboxes, flags_at, turns_at,
    INDEX: tl.constexpr, MEMBERS: tl.constexpr, CHUNK: tl.constexpr, CHUNK_BYTES: tl.constexpr,
):  # fmt: skip
    """Put a chunk into all other inboxes, await those of the others, and add in team order."""
    block, element = tl.program_id(0), tl.arange(0, CHUNK)
    at = block * CHUNK + element
    mine = tl.load(src + at, mask=at < n, other=0.0)
    inbox = tl.load(inboxes + INDEX)
    last = (inbox + turns_at + block * 4).to(tl.pointer_type(tl.int32))
    turn = tl.load(last) + 1
    first, flag = (block * 2 + (turn & 1)) * MEMBERS * CHUNK_BYTES, flags_at + block * MEMBERS * 4
    put_term(mine, element, at < n, inboxes, first, flag, turn, INDEX, MEMBERS, CHUNK_BYTES)
    total = sum_terms(mine, element, at < n, inbox, first, flag, turn, INDEX, MEMBERS, CHUNK_BYTES)
    tl.store(dst + at, total.to(dst.dtype.element_ty), mask=at < n)
    tl.store(last, turn)


@triton.jit
def put_term(
    mine, element, is_in, inboxes, first, flag, turn,
    INDEX: tl.constexpr, MEMBERS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Put this rank's term into all other inboxes, and set its flags there to the turn.

    Each member has a place and a flag of its own: those of the first one are `first` and `flag`
    bytes behind the beginning of an inbox, places are `ROOM` bytes apart.
    """
    for m in tl.static_range(MEMBERS):
        if m != INDEX:
            place = (tl.load(inboxes + m) + first + INDEX * ROOM).to(tl.pointer_type(mine.dtype))
            tl.store(tl.multiple_of(place, 16) + element, mine, mask=is_in)
    tl.debug_barrier()  # the signal is behind the stores of all threads
    for m in tl.static_range(MEMBERS):
        if m != INDEX:
            word = (tl.load(inboxes + m) + flag + INDEX * 4).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(word, turn, sem="release", scope="sys")


@triton.jit
def sum_terms(
    mine, element, is_in, inbox, first, flag, turn,
    INDEX: tl.constexpr, MEMBERS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Await the flags of all other members, and return the sum of all terms in f32, in team order.

    The arguments are those of `put_term`, with this rank's inbox.
    """
    for m in tl.static_range(MEMBERS):
        if m != INDEX:
            word = (inbox + flag + m * 4).to(tl.pointer_type(tl.int32))
            while tl.atomic_add(word, 0, sem="acquire", scope="sys") - turn < 0:
                pass
    tl.debug_barrier()  # the loads of all threads are behind the signals
    total = tl.zeros_like(mine).to(tl.float32)
    for m in tl.static_range(MEMBERS):
        if m == INDEX:
            total += mine.to(tl.float32)
        else:
            place = (inbox + first + m * ROOM).to(tl.pointer_type(mine.dtype))
            place = tl.multiple_of(place, 16) + element
            term = tl.load(place, mask=is_in, other=0.0, cache_modifier=".cg")
            total += term.to(tl.float32)
    return total
