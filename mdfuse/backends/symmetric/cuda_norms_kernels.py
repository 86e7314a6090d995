"""The kernel of `mdfuse.backends.symmetric.cuda_norms`, in Triton."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import triton
import triton.language as tl

from mdfuse.backends.symmetric.cuda_sums_kernels import put_term, sum_terms


@triton.jit
def add_and_norm(
    src, residual, weight, total, result, inboxes, flags_at, turns_at, eps,
    INDEX: tl.constexpr, MEMBERS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_TOTAL: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Put a row into all other inboxes, await theirs, add in team order, and normalise."""
    row, element = tl.program_id(0), tl.arange(0, BLOCK)
    at, is_in = row * WIDTH + element, element < WIDTH
    NARROW: tl.constexpr = src.dtype.element_ty
    mine = tl.load(src + at, mask=is_in, other=0.0)
    inbox = tl.load(inboxes + INDEX)
    # of posts so far, and of blocks that have begun this one
    counts = (inbox + turns_at).to(tl.pointer_type(tl.int32))
    turn = tl.load(counts) + 1
    first, flag = (turn & 1) * MEMBERS * ROOM + row * STRIDE, flags_at + row * MEMBERS * 4
    put_term(mine, element, is_in, inboxes, first, flag, turn, INDEX, MEMBERS, ROOM)
    # The last block to have read the number of this post writes it, for the next post.
    if tl.atomic_add(counts + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counts + 1, 0)
        tl.store(counts, turn)
    if HAS_RESIDUAL:  # what needs no other rank is loaded while they are awaited
        added = tl.load(residual + at, mask=is_in, other=0.0)
    if HAS_WEIGHT:
        factor = tl.load(weight + element, mask=is_in, other=0.0)
    wide = sum_terms(mine, element, is_in, inbox, first, flag, turn, INDEX, MEMBERS, ROOM)
    wide = wide.to(NARROW).to(tl.float32)
    if HAS_RESIDUAL:
        wide += added.to(tl.float32)
        wide = wide.to(NARROW).to(tl.float32)
    if HAS_TOTAL:
        tl.store(total + at, wide.to(NARROW), mask=is_in)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    if IS_ROUNDED:
        wide = wide.to(NARROW).to(tl.float32)
    if HAS_WEIGHT:
        wide *= factor.to(tl.float32)
    tl.store(result + at, wide.to(NARROW), mask=is_in)
