"""The kernel of `mdfuse.backends.symmetric.cuda_sums`, in Triton."""

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
    DTYPE: tl.constexpr = tl.pointer_type(src.dtype.element_ty)
    WORD: tl.constexpr = tl.pointer_type(tl.int32)
    mine = tl.load(src + at, mask=at < n, other=0.0)
    inbox = tl.load(inboxes + INDEX)
    last = (inbox + turns_at + block * 4).to(WORD)
    turn = tl.load(last) + 1
    first = (block * 2 + (turn & 1)) * MEMBERS
    for m in tl.static_range(MEMBERS):
        if m != INDEX:
            place = tl.load(inboxes + m) + (first + INDEX) * CHUNK_BYTES
            tl.store(tl.multiple_of(place.to(DTYPE), 16) + element, mine, mask=at < n)
    tl.debug_barrier()  # the signal is behind the stores of all threads
    for m in tl.static_range(MEMBERS):
        if m != INDEX:
            flag = tl.load(inboxes + m) + flags_at + (block * MEMBERS + INDEX) * 4
            tl.atomic_xchg(flag.to(WORD), turn, sem="release", scope="sys")
    for m in tl.static_range(MEMBERS):
        if m != INDEX:
            flag = (inbox + flags_at + (block * MEMBERS + m) * 4).to(WORD)
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - turn < 0:
                pass
    tl.debug_barrier()  # the loads of all threads are behind the signals
    total = tl.zeros([CHUNK], tl.float32)
    for m in tl.static_range(MEMBERS):
        if m == INDEX:
            total += mine.to(tl.float32)
        else:
            place = tl.multiple_of((inbox + (first + m) * CHUNK_BYTES).to(DTYPE), 16)
            term = tl.load(place + element, mask=at < n, other=0.0, cache_modifier=".cg")
            total += term.to(tl.float32)
    tl.store(dst + at, total.to(dst.dtype.element_ty), mask=at < n)
    tl.store(last, turn)
