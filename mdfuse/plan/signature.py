"""Signatures: keys of the kinds of arguments, read off cheaply in each run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.program import BufferType, HostProgram
from mdfuse.ir.tensors import PLAIN, are_writable, is_lazy
from mdfuse.torch_private import (
    Likeness,
    current_raw_stream,
    forward_level,
    is_zero_tensor,
    likeness,
    transform_level,
)

_properties = attrgetter("shape", "dtype", "layout", "device", "requires_grad")


class Lasting(tuple[Any, ...]):
    """Arguments whose owner leaves them as they are, form and place, from run to run.

    A run with the arguments of the last one then looks at the first tensor alone.
    """


@dataclass(frozen=True, slots=True)
class Signature:
    """Reads the signature off a run's arguments: all properties that its plan depends on.

    Attributes:
        count: how many inputs there are.
        tensors: the positions of the inputs of which this rank has a part.
        absent: the positions of the inputs of which it has none.
        numbers: the positions of the inputs that are numbers.
        written: the positions of the inputs whose buffers are written through an alias.
        promoted: the positions of further inputs that change the dtype of torch's results where
            they are zeros without memory.
        bare: the positions of inputs whose memory may go to code that does not know tensors (a
            library of communications, compiled code, a CUDA graph), and so must hold their
            elements.
        device: the index of the GPU whose current stream counts; None on CPU.
        owner: distinguishes the signatures of this program from those of others.
    """

    count: int
    tensors: tuple[int, ...]
    absent: tuple[int, ...]
    numbers: tuple[int, ...]
    written: tuple[int, ...]
    bare: tuple[int, ...]
    promoted: tuple[int, ...]
    device: int | None
    owner: int

    def read(self, arguments: Sequence[Any], out: Sequence[Any] | None) -> Hashable | None:
        """Return the key of these arguments' kind, or None where they need a full check.

        The kind is their shapes, strides, dtypes, layouts and devices, the current stream, and
        which outputs have a buffer. The full check is needed where arguments are missing, are not
        plain tensors or do not hold their elements in memory, and where a transform of torch.func
        or forward-mode gradients are under way.
        """
        if len(arguments) != self.count:
            return None
        if transform_level() is not None or forward_level() >= 0:
            return None
        for n in self.absent:
            if arguments[n] is not None:
                return None
        tensors, given = [arguments[n] for n in self.tensors], None
        if out is not None:
            tensors += [x for x in out if x is not None]
            given = tuple(map(is_, out, repeat(None)))
        if not PLAIN.issuperset(map(type, tensors)):
            return None
        for n in self.bare:
            x = arguments[n]
            if x.is_neg() or x.is_conj() or is_zero_tensor(x):
                return None
        for n in self.promoted:
            if is_zero_tensor(arguments[n]):
                return None
        try:
            properties = *map(_properties, tensors), *map(Tensor.stride, tensors)
        except RuntimeError:  # nested
            return None
        return (self.owner, self.stream(), given, *properties)

    def like(self, arguments: Sequence[Any]) -> Likeness | None:
        """Return a quick test, of some microseconds, that shows other arguments to be of this kind.

        The test returns the addresses of their tensors if they are of the same kind as these, which
        `read` has seen, apart from the stream. If it returns None, they may still be of that kind.
        Programs that take no tensors have no such test.
        """
        if not self.tensors:
            return None
        tensors, absent, count = self.tensors, self.absent, self.count
        where = likeness([arguments[n] for n in tensors])
        if len(tensors) == count:
            return where

        def where_some(given: Sequence[Any]) -> tuple[int, ...] | None:
            if len(given) != count:
                return None
            for n in absent:
                if given[n] is not None:
                    return None
            return where([given[n] for n in tensors])

        return where_some

    def first_like(self, arguments: Sequence[Any]) -> Likeness:
        """Return the same test of the first tensor alone, and so of the modes of torch."""
        n = self.tensors[0]
        where = likeness([arguments[n]])
        return lambda given: where([given[n]])

    def stream(self) -> int:
        """Return the handle of the current CUDA stream; 0 on CPU."""
        return 0 if self.device is None else current_raw_stream(self.device)

    def are_apart(self, arguments: Sequence[Any], out: Sequence[Any] | None) -> bool:
        """Tell, by addresses, whether no written buffer overlaps another one.

        Also False where torch does not write into such a buffer, or where its memory does not hold
        its elements.
        """
        written = [arguments[n] for n in self.written]
        written += [x for x in out or () if x is not None]
        if not written:
            return True
        if any(map(is_lazy, written)) or not are_writable(written):
            return False
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
    """Return the address of a tensor's first byte, and the one behind its last byte."""
    if not x.numel():
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return start, start + (last + 1) * x.itemsize


def copy_alike(x: Tensor, buffer: Tensor) -> None:
    """Copy a tensor into one of the same strides; torch writes into none that overlaps itself."""
    reach = 1
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and stride < reach:
            size = ((span(x)[1] - span(x)[0]) // x.itemsize,)
            x, buffer = x.as_strided(size, (1,)), buffer.as_strided(size, (1,))
            break
        reach += (n - 1) * stride
    buffer.copy_(x)


def signature_of(
    program: HostProgram,
    rank: int,
    device: torch.device,
    owner: int = 0,
    is_captured: bool = False,
) -> Signature:
    """Return the reader of one rank's arguments; `is_captured`: for CUDA graphs, too."""
    kinds = [program.types[name] for name in program.inputs]
    mine = _positions(kinds, lambda k: k.layout is not None and rank in k.layout.mesh)
    bare = {*program.inputs} if is_captured else _bare(program)
    promoted = _positions(kinds, lambda k: not k.shape or not k.dtype.is_floating_point)
    return Signature(
        count=len(kinds),
        tensors=mine,
        absent=_positions(kinds, lambda k: k.layout is not None and rank not in k.layout.mesh),
        numbers=_positions(kinds, lambda k: k.layout is None),
        written=tuple(n for n in mine if program.inputs[n] in program.written_inputs),
        bare=tuple(n for n in mine if program.inputs[n] in bare),
        promoted=tuple(n for n in mine if n in promoted and program.inputs[n] not in bare),
        device=device.index if device.type == "cuda" else None,
        owner=owner,
    )


def _positions(
    kinds: Sequence[BufferType], is_one: Callable[[BufferType], bool]
) -> tuple[int, ...]:
    return tuple(n for n, kind in enumerate(kinds) if is_one(kind))


def _bare(program: HostProgram) -> set[str]:
    """Return the names whose memory a communication or compiled code may read or write."""
    memory = dataflow(program).memory
    users = (i for i in program.walk() if i.comm is not None or i.op in ("send", "recv", "launch"))
    return {memory(x) for i in users for x in (*i.reads, *i.outputs)}
