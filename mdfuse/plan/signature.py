"""What tells one kind of arguments from another, read off in a run as quickly as Python can."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdfuse.hir.program import HostProgram
from mdfuse.torch_private import current_raw_stream

#: What reading off the signature of something that is no strided tensor raises.
_NO_TENSOR = (AttributeError, RuntimeError, TypeError, IndexError)


@dataclass(frozen=True, slots=True)
class Signature:
    """Reads off what a plan depends on.

    Attributes:
        count: how many inputs there are.
        tensors: the positions of those that this rank has a part of.
        absent: those that it has not.
        numbers: those that are numbers.
        written: those whose buffers are written through an alias.
        device: whose current stream counts; None on CPU.
        owner: tells the signatures of one program from those of others.
    """

    count: int
    tensors: tuple[int, ...]
    absent: tuple[int, ...]
    numbers: tuple[int, ...]
    written: tuple[int, ...]
    device: int | None
    owner: int

    def read(self, arguments: Sequence[Any], out: Sequence[Any] | None) -> Hashable | None:
        """Shapes, strides, dtypes and devices; None: the arguments need a closer look."""
        if len(arguments) != self.count:
            return None
        for n in self.absent:
            if arguments[n] is not None:
                return None
        try:
            found: list[Hashable] = [
                (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
                for x in [arguments[n] for n in self.tensors]
            ]
            if out is not None:
                found += [
                    x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
                    for x in out
                ]
        except _NO_TENSOR:
            return None
        return (self.owner, self.stream(), out is None, *found)

    def stream(self) -> int:
        """The handle of the current CUDA stream; 0 on CPU."""
        return 0 if self.device is None else current_raw_stream(self.device)

    def are_apart(self, arguments: Sequence[Any], out: Sequence[Any] | None) -> bool:
        """No buffer that is written overlaps another one, as far as addresses tell."""
        written = [arguments[n] for n in self.written]
        written += [x for x in out or () if x is not None]
        if not written:
            return True
        read = [arguments[n] for n in self.tensors if n not in self.written]
        spans = sorted(
            (*span(x), is_written) for xs, is_written in ((written, 1), (read, 0)) for x in xs
        )
        end, was_written = 0, 0
        for start, stop, is_written in spans:
            if start < end and (is_written or was_written):
                return False
            if stop > end:
                end, was_written = stop, is_written
        return True


def span(x: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie."""
    if not x.numel():
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return start, start + (last + 1) * x.itemsize


def signature_of(
    program: HostProgram, rank: int, device: torch.device, owner: int = 0
) -> Signature:
    """What to read off the arguments of one rank."""
    kinds = [program.types[name] for name in program.inputs]
    written = {program.root(name) for name in program.aliases}
    numbered = list(enumerate(zip(program.inputs, kinds, strict=True)))
    mine = [n for n, (_, k) in numbered if k.layout is not None and rank in k.layout.mesh]
    return Signature(
        count=len(kinds),
        tensors=tuple(mine),
        absent=tuple(
            n for n, (_, k) in numbered if k.layout is not None and rank not in k.layout.mesh
        ),
        numbers=tuple(n for n, (_, k) in numbered if k.layout is None),
        written=tuple(n for n, (name, _) in numbered if name in written and n in mine),
        device=device.index if device.type == "cuda" else None,
        owner=owner,
    )
