"""Positions of a sequence that are split over ranks: who has which, and torch's ring of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from _ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from mdfuse.cli import screen

#: Attention of a rank's rows, q, k, v -> averages.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Kernels, None being torch's choice, and whether each head of a query gets keys of its own.
_WAYS = [
    (kernel, repeats)
    for repeats in (False, True)
    for kernel in (None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
]

#: What torch raises where it lacks a way.
_PROBLEMS = AssertionError, IndexError, KeyError, RuntimeError, TypeError

#: The largest relative error of a way, and the positions of each rank where it is looked for.
_TOLERANCE, _FEW = 4e-2, 256


def positions(size: int, ranks: int, rank: int, is_zigzag: bool) -> Tensor:
    """Return which positions a rank has."""
    if not is_zigzag:
        return torch.arange(size).chunk(ranks)[rank]
    chunks = torch.arange(size).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@contextmanager
def ring(mesh: Any, device: torch.device) -> Iterator[None]:
    """Let `F.scaled_dot_product_attention` see the keys of all ranks, in zigzag order.

    What torch splits here is a stand-in, since it takes no empty list: values come split.

    Args:
        mesh: torch's, of one dim.
        device: of the values.
    """
    from torch.distributed.tensor.experimental import context_parallel

    stand_in = torch.zeros(1, 2 * mesh.size(), device=device)
    with context_parallel(mesh, buffers=[stand_in], buffer_seq_dims=[1]):
        yield


@cache
def ring_attention(ranks: Ranks, dtype: torch.dtype, *heads: int) -> Attention | None:
    """Return the first way for which torch's ring has kernels, with right values and gradients.

    Args:
        ranks: those of the ring.
        dtype: of values.
        heads: of the query, of keys, and the features of each.
    """
    mesh, problems = init_device_mesh(ranks.device.type, (ranks.comm.size,)), []
    for kernel, repeats in _WAYS:
        way = partial(_attended, kernel=kernel, repeats=repeats)
        name = f"{kernel.name if kernel else 'any kernel'}{', repeated keys' if repeats else ''}"
        try:
            error = _error(way, mesh, torch.empty(0, dtype=dtype, device=ranks.device), *heads)
        except _PROBLEMS as problem:
            problems.append(f"not {name}: {problem}")
            continue
        if error < _TOLERANCE:
            _say("; ".join([f"context_parallel takes {name}", *problems]))
            return way
        problems.append(f"not {name}: a relative error of {error:.2g}")
    _say("; ".join(["context_parallel is left out", *problems]))
    return None


def _say(line: str) -> None:
    if screen.is_first():
        screen.output().print(line, markup=False, soft_wrap=True)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, kernel: SDPBackend | None = None, repeats: bool = False
) -> Tensor:
    if repeats:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    with sdpa_kernel(kernel) if kernel else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeats)


def _error(way: Attention, mesh: Any, like: Tensor, heads: int, kv_heads: int, head: int) -> float:
    """Return the largest relative error of results and gradients in a ring."""
    n, device = _FEW * mesh.size(), like.device
    at = positions(n, mesh.size(), mesh.get_local_rank(), is_zigzag=True).to(device)
    generator: Any = torch.Generator(device).manual_seed(0)
    whole = [
        torch.empty(1, h, n, head, device=device).normal_(generator=generator).to(like.dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    mine = [x[:, :, at].requires_grad_() for x in whole]
    wide = [x.double().requires_grad_() for x in whole]
    with torch.enable_grad():
        with ring(mesh, device):
            y = way(*mine[:3])
            got = [y, *torch.autograd.grad(y, mine[:3], mine[3])]
        with sdpa_kernel(SDPBackend.MATH):
            right = _attended(*wide[:3], repeats=True)
        want = [right, *torch.autograd.grad(right, wide[:3], wide[3])]
    norm, pairs = torch.linalg.vector_norm, zip(got, want, strict=True)
    return max(float(norm(a.double() - b[:, :, at]) / norm(b[:, :, at])) for a, b in pairs)
