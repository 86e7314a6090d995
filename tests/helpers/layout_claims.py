"""Operations on split operands: what is sent for them, and that it is what torch computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mdfuse as mf
from helpers.oracle import check_everywhere
from mdfuse import DeviceMesh, Shard

MESH = DeviceMesh.arange(tp=3)


@dataclass(frozen=True)
class Claim:
    """What an operation sends.

    Attributes:
        operands: (shape, dim that is split or None) of each; the extents do not divide. An integer
            in the place of a shape's dtype: indices below it.
        program: of handles or tensors.
        sends: (kind, shape) of each communication, in order.
        result: the dim along which the result is split; None: it lies as it comes.
    """

    operands: Sequence[tuple[Any, ...]]
    program: Callable[..., Any]
    sends: Sequence[tuple[str, tuple[int, ...]]]
    result: int | None = None


def tensors(claim: Claim) -> list[Tensor]:
    """Numbers, or indices below what stands as a third entry; True for bools."""
    found = []
    for seed, (shape, _, *below) in enumerate(claim.operands):
        generator = torch.Generator().manual_seed(seed)
        if below and below[0] is True:
            found.append(torch.rand(shape, generator=generator) < 0.5)
        elif below:
            found.append(torch.randint(0, below[0], shape, generator=generator))
        else:
            found.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return found


def check(claim: Claim) -> list[tuple[str, tuple[int, ...]]]:
    """Compare with torch on three ranks; return what is sent."""
    inputs = tensors(claim)
    with mf.FusionDefinition("claim") as fd:
        handles = []
        for x, (_, dim, *_more) in zip(inputs, claim.operands, strict=True):
            where: Mapping[str, Any] = {} if dim is None else {"tp": Shard(dim)}
            handles.append(fd.define_tensor(x.shape, x.dtype, MESH, where))
        y = claim.program(*handles)
        if claim.result is not None:
            y = fd.ops.set(y).on(MESH, {"tp": Shard(claim.result)})
        fd.add_output(y)
    program = mf.compile(fd)
    assert mf.hir.parse(str(program.host)) == program.host
    check_everywhere(program, inputs, [claim.program(*inputs)])
    return [(c.kind, tuple(c.shape)) for c in program.communications]
