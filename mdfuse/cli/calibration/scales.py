"""Sizes and repeats of a calibration, on a CPU and on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mdfuse.seeing.amounts import QUERIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes and repeats on a kind of device.

    Attributes:
        dtypes: of floats, the usual one first.
        flops: a guess, for how often something is done in a run; per second.
        bandwidth: likewise, bytes per second.
        run_s: how long a run is to take.
        sample_s: how long the runs of a sample are to take.
        most: how often a run does something at most: planning and capturing it takes time, too.
        cache: bytes of weights beyond which products find none of them in the cache of a core.
        stale: bytes of operands and results that pointwise work goes through before it comes back
            to the first, so that none is in the cache of a core: in programs others were there.
        tensors: how many operands or weights a run goes through at most: to define and plan them
            takes time, too.
        sizes: bytes of pointwise work.
        rows: m of products.
        features: n and k.
        lengths: of the sequences of attention.
        beside: m of a product, and its n and k, beside which there are communications.
        heads: features of a head of attention; on a GPU sizes in between take as long as the next.
        multiprocessors: of a GPU, whose attention is measured by blocks; 0: query by query.
        compiled: bytes, as of pointwise work, of kernels that are compiled, which takes seconds.
        messages: bytes of communications; on a GPU more of them where NCCL begins to send in
            another way, which takes half as long again.
        chilled: bytes of communications that are also measured behind work that goes through more
            than the cache of a GPU holds.
        l2: bytes of that cache; 0: nothing is known of one.
        between_s: how long a rank works before each communication, a guess: on a CPU the threads
            that send and receive have fallen asleep by then, as in programs. On a GPU its own time
            counts, and they go back to back.
        factor: how much larger than on a CPU the programs are that the table is judged by.
    """

    dtypes: tuple[torch.dtype, ...]
    flops: float
    bandwidth: float
    run_s: float
    sample_s: float
    most: int
    cache: int
    stale: int
    tensors: int
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    features: tuple[int, ...]
    beside: tuple[int, int]
    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    multiprocessors: int
    compiled: tuple[int, ...]
    messages: tuple[int, ...]
    chilled: tuple[int, ...]
    l2: int
    between_s: float
    factor: int


CPU = Scale(
    dtypes=(torch.float32,),
    flops=3e10,
    bandwidth=5e9,
    run_s=2e-3,
    sample_s=3e-3,
    most=64,
    cache=1 << 25,
    stale=1 << 22,
    tensors=48,
    sizes=tuple(1 << n for n in (12, 15, 18, 20, 22, 24, 26)),
    rows=(1, 2, 4, 8, 32, 128, 512),
    features=(64, 512, 2048, 8192),
    beside=(512, 1024),
    lengths=(32, 128, 512),
    heads=(32, 64, 128),
    multiprocessors=0,
    compiled=(),
    messages=tuple(1 << n for n in (8, 12, 15, 18, 20, 22, 24)),
    chilled=(),
    l2=0,
    between_s=1e-3,
    factor=1,
)
GPU = Scale(
    dtypes=(torch.bfloat16, torch.float32),
    flops=3e14,
    bandwidth=2e12,
    run_s=2e-4,
    sample_s=1e-3,
    most=8,
    cache=1 << 28,
    stale=0,
    tensors=16,
    sizes=tuple(1 << n for n in (14, 18, 20, 22, 24, 26, 28)),
    rows=(1, 16, 128, 256, 512, 1024, 2048, 4096),
    features=(256, 1024, 2048, 4096, 8192, 16384),
    beside=(4096, 8192),
    lengths=(64, 512, 4096),
    heads=(64, 128),
    multiprocessors=132,
    compiled=(1 << 20, 1 << 24),
    messages=(
        *(1 << 8, 1 << 12),
        *(n << 16 for n in (1, 4, 16, 19, 32, 38, 64, 128, 192, 256, 1024, 4096)),
    ),
    chilled=(1 << 12, 1 << 20, 1 << 22),
    l2=50 << 20,
    between_s=0.0,
    factor=4,
)


#: Whether attention is causal -> how many blocks a multiprocessor has where most are there at once.
#: Without a mask the blocks of a wave end together: each wave takes as long.
_WAVES = {False: (1, 4), True: (1, 2, 4)}


def blocks_of(scale: Scale, is_causal: bool = False) -> list[int]:
    """Return the numbers of blocks of measured attention on a GPU.

    They are few, and as many as fill all of its multiprocessors some times; each is a multiple of
    the blocks of the longest sequence in a head.

    >>> blocks_of(GPU), blocks_of(GPU, is_causal=True)
    ([32, 128, 512], [32, 128, 256, 512])
    """
    one = math.ceil(scale.lengths[-1] / QUERIES)
    full = (max(1, n * scale.multiprocessors // one) * one for n in _WAVES[is_causal])
    return sorted({one, *full}) if scale.multiprocessors else []
